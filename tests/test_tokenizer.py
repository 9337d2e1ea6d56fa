"""The Tokenizer from folders and GGUF files: special tokens, end tokens, templates, bytes, damaged files."""

from __future__ import annotations

import json

import pytest
from weights.builders import CHATML, tiny_gguf

from paceline.chat_template import ChatTemplateError
from paceline.errors import CheckpointError
from paceline.tokenizer import Tokenizer, load_tokenizer
from paceline.weights.checkpoint import open_checkpoint

MESSAGES = [{"role": "user", "content": "Hello 12"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    tiny_gguf(path)
    return load_tokenizer(path)


@pytest.fixture
def folder(tmp_path, tokenizer):
    tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(folder, **files: object) -> None:
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))


def test_from_gguf(tokenizer):
    assert tokenizer.vocab_size == 300
    assert tokenizer.eos_token_ids == (2, 0)
    assert tokenizer.bos_token_id == 1
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.chat_template == CHATML


def test_from_an_open_checkpoint_and_from_its_path(tmp_path, tokenizer):
    tiny_gguf(tmp_path / "m.gguf")
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        assert load_tokenizer(checkpoint).encode("Hello") == tokenizer.encode("Hello")
    assert load_tokenizer(str(tmp_path)).encode("Hello") == tokenizer.encode("Hello")


def test_special_tokens_in_text_are_recognised(tokenizer):
    ids = tokenizer.encode("a<|im_end|>b")
    assert 2 in ids
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|im_end|>b"


def test_chat(tokenizer):
    text = tokenizer.apply_chat_template(MESSAGES)
    assert text == "<|im_start|>user\nHello 12<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode_chat(MESSAGES) == tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=False).endswith("<|im_end|>\n")


def test_keywords_of_transformers_about_ids(tokenizer):
    want = tokenizer.apply_chat_template(MESSAGES)
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False, return_tensors=None, truncation=False) == want
    for name, value in (("tokenize", True), ("return_tensors", "pt"), ("return_dict", True), ("padding", True)):
        with pytest.raises(ChatTemplateError, match=f"^{name}: this returns text; encode_chat"):
            tokenizer.apply_chat_template(MESSAGES, **{name: value})


@pytest.mark.parametrize("begun", ["Hello", "im", "m_e", "<|", "a ", "a\n", ""])
def test_the_last_message_is_continued(tokenizer, begun):
    """Also one that stands in what the template writes behind it."""
    messages = [*MESSAGES, {"role": "assistant", "content": begun}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == f"<|im_start|>user\nHello 12<|im_end|>\n<|im_start|>assistant\n{begun}"
    assert messages[-1]["content"] == begun


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([], "there is no message"),
        ([{"role": "assistant", "content": [{"type": "text", "text": "a"}]}], "has no text to go on with"),
        (["a"], "has no text to go on with"),
    ],
)
def test_what_cannot_be_continued(tokenizer, messages, told):
    with pytest.raises(ChatTemplateError, match=told):
        tokenizer.apply_chat_template(messages, add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(ChatTemplateError, match="needs add_generation_prompt=False"):
        tokenizer.apply_chat_template(MESSAGES, continue_final_message=True)


def test_token_bytes(tokenizer):
    for text in ("Hello", " world", "é", "😀", "\n", "<|im_end|>", "<tool_call>"):
        assert b"".join(tokenizer.token_bytes(i) for i in tokenizer.encode(text)) == text.encode()
    assert tokenizer.token_bytes(10**6) == b""


def test_lone_surrogates_become_replacement_characters(tokenizer):
    assert tokenizer.encode("a\ud800b") == tokenizer.encode("a\ufffdb")
    assert tokenizer.encode("\ud83d\ude00") == tokenizer.encode("😀")  # a pair is one character


def test_ids_outside_the_vocabulary_decode_to_nothing(tokenizer):
    assert tokenizer.decode([10**6, *tokenizer.encode("x")]) == "x"


def test_folder_settings(folder):
    write(
        folder,
        tokenizer_config={"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>", "chat_template": CHATML},
        generation_config={"eos_token_id": [0, 2]},
        config={"eos_token_id": 1, "bos_token_id": 7},
    )
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_token_ids == (0, 2)
    assert tokenizer.bos_token_id == 1
    assert tokenizer.apply_chat_template(MESSAGES).startswith("<|im_start|>user")
    assert tokenizer.special_tokens == {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}


def test_end_tokens_without_generation_config(folder):
    write(folder, config={"eos_token_id": 1})
    assert load_tokenizer(folder).eos_token_ids == (1,)
    write(folder, tokenizer_config={"eos_token": "<|im_end|>"})
    assert load_tokenizer(folder).eos_token_ids == (1, 2)


@pytest.mark.parametrize("value", ["2", [1, "2"], -1, 1.0, True])
def test_bad_end_tokens(folder, value):
    write(folder, generation_config={"eos_token_id": value})
    with pytest.raises(CheckpointError, match="eos_token_id"):
        load_tokenizer(folder)


def test_template_files_win(folder):
    write(folder, tokenizer_config={"chat_template": "old"})
    (folder / "chat_template.jinja").write_text("new {{ messages[0].content }}")
    assert load_tokenizer(folder).apply_chat_template(MESSAGES) == "new Hello 12"


def test_named_templates(folder):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    write(folder, tokenizer_config={"chat_template": named})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.apply_chat_template(MESSAGES) == "plain"
    assert tokenizer.apply_chat_template(MESSAGES, tools=[{"type": "function"}]) == "1 tools"
    assert tokenizer.apply_chat_template(MESSAGES, chat_template="mine") == "mine"


def test_no_template(folder):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.chat_template is None
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer.encode_chat(MESSAGES)


def test_no_tokenizer(tmp_path):
    write(tmp_path, config={})
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"model": 3}', '{"version": "1.0", "model": {"type": "BPE"}}', "\x00"]
)
def test_damaged_tokenizer(folder, text):
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a valid tokenizer"):
        load_tokenizer(folder)


def test_padding_and_truncation_of_the_file_are_ignored(folder, tokenizer):
    tokenizer.backend.enable_truncation(2)
    tokenizer.backend.enable_padding(length=9)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    tokenizer.backend.no_truncation()
    tokenizer.backend.no_padding()
    assert load_tokenizer(folder).encode("Hello 12 Hello 12") == tokenizer.encode("Hello 12 Hello 12")


def test_variables_of_a_template_may_have_any_name(tokenizer):
    source = "{{ source }}{{ text }}{{ self_ }}"
    said = tokenizer.apply_chat_template([], chat_template=source, source="a", text="b", self_="c", self=1, messages_=2)
    assert said == "abc"


def test_a_message_that_is_written_twice_is_continued_without_a_mark(tokenizer):
    source = "{% for m in messages %}{{ m.content }}|{% endfor %}{{ messages[-1].content }}END"
    messages = [*MESSAGES, {"role": "assistant", "content": "xy"}]
    said = tokenizer.apply_chat_template(
        messages, chat_template=source, add_generation_prompt=False, continue_final_message=True
    )
    assert said.endswith("|xy|xy") and "continued" not in said
    trimmed = source.replace("content }}", "content | trim }}")
    assert "continued" not in tokenizer.apply_chat_template(
        messages, chat_template=trimmed, add_generation_prompt=False, continue_final_message=True
    )


def test_a_message_with_tool_calls_is_not_continued(tokenizer):
    call = {"role": "assistant", "content": "ok", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    with pytest.raises(ChatTemplateError, match="tool calls"):
        tokenizer.apply_chat_template([*MESSAGES, call], add_generation_prompt=False, continue_final_message=True)
