"""Streaming text equals the text of the whole, whatever the tokens are and however they are cut."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, trainers
from weights.builders import smollm2_path, tiny_gguf
from weights.prompts import TORTURE

from paceline.detokenizer import IncrementalDetokenizer
from paceline.tokenizer import Tokenizer, load_tokenizer

RELAXED = settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory) -> Tokenizer:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    tiny_gguf(path)
    return load_tokenizer(path)


@pytest.fixture(scope="module", params=[True, False], ids=["joined bytes", "windows"])
def sentencepiece(request) -> Tokenizer:
    """The shape of Llama 2's tokenizer: metaspace, byte fallback, one leading space stripped. Its decoder is known to
    join the bytes of tokens, or it has a step more, without effect, and is not.
    """
    backend = Backend(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))],
        show_progress=False,
        max_token_length=12,
    )
    backend.train_from_iterator([text for name, text in TORTURE.items() if name not in ("emoji", "cjk")] * 3, trainer)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps if request.param else [*steps, decoders.Fuse()])
    # The trainer marks the byte tokens as special; in a real vocabulary only the first three are.
    state = backend.to_str().replace('"special":true', '"special":false')
    backend = Backend.from_str(state)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer = Tokenizer(backend)
    assert tokenizer.sentencepiece == request.param
    return tokenizer


def stream(tokenizer: Tokenizer, ids: list[int], **options: bool) -> tuple[list[str], IncrementalDetokenizer]:
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    pieces = [detokenizer.push(i) for i in ids]
    pieces.append(detokenizer.finish())
    return pieces, detokenizer


@RELAXED
@given(data=st.data(), skip=st.booleans())
def test_byte_level_streams_any_ids(byte_level, data, skip):
    ids = data.draw(st.lists(st.integers(0, byte_level.vocab_size + 5), max_size=60))
    pieces, detokenizer = stream(byte_level, ids, skip_special_tokens=skip)
    assert "".join(pieces) == byte_level.decode(ids, skip_special_tokens=skip)
    assert detokenizer.text == "".join(pieces)


@RELAXED
@given(raw=st.binary(max_size=40))
def test_byte_level_replaces_malformed_utf8_as_the_whole_decode_does(byte_level, raw):
    """Every byte its own token: all ways of cutting and breaking a character."""
    ids = [byte_level.backend.token_to_id(char) for char in map(byte_char, raw)]
    pieces, _ = stream(byte_level, ids)
    assert "".join(pieces) == byte_level.decode(ids) == raw.decode("utf-8", "replace")


def byte_char(byte: int) -> str:
    from paceline.tokenizer import _byte_table

    return next(char for char, value in _byte_table().items() if value == byte)


@RELAXED
@given(text=st.text(max_size=60))
def test_text_comes_back_and_is_never_broken(byte_level, text):
    text = text.replace("<|", "")  # special tokens would be skipped
    pieces, _ = stream(byte_level, byte_level.encode(text))
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@RELAXED
@given(text=st.text(max_size=60))
def test_sentencepiece_text_comes_back_and_is_never_broken(sentencepiece, text):
    ids = sentencepiece.encode(text)
    pieces, _ = stream(sentencepiece, ids)
    assert "".join(pieces) == sentencepiece.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@RELAXED
@given(data=st.data(), skip=st.booleans())
def test_sentencepiece_streams_any_ids(sentencepiece, data, skip):
    outside = 5 if sentencepiece.sentencepiece else -1
    ids = data.draw(st.lists(st.integers(0, sentencepiece.vocab_size + outside), max_size=40))
    whole = sentencepiece.decode(ids, skip_special_tokens=skip)
    if sentencepiece.sentencepiece or "\ufffd" not in whole:
        assert "".join(stream(sentencepiece, ids, skip_special_tokens=skip)[0]) == whole
    known = [i for i in ids if i < sentencepiece.vocab_size]
    if "\ufffd" not in whole:
        assert whole == sentencepiece.backend.decode(known, skip_special_tokens=skip)


def test_sentencepiece_fixture_uses_bytes_and_metaspace(sentencepiece):
    """Or the test above would show little."""
    tokens = [sentencepiece.backend.id_to_token(i) for i in sentencepiece.encode("two words 😀")]
    assert "<0xF0>" in tokens
    assert any(token.startswith("▁") for token in tokens)
    assert not sentencepiece.byte_level


def test_sentencepiece_never_holds_back_for_long(sentencepiece):
    """Bytes that never become a character come out after a bounded number of tokens."""
    byte = sentencepiece.backend.token_to_id("<0x80>")
    detokenizer = IncrementalDetokenizer(sentencepiece)
    assert any(detokenizer.push(byte) for _ in range(16))


def test_a_character_of_several_tokens_appears_whole(byte_level):
    raw = "é😀".encode()
    detokenizer = IncrementalDetokenizer(byte_level)
    out = [detokenizer.push(byte_level.backend.token_to_id(byte_char(b))) for b in raw]
    assert out == ["", "é", "", "", "", "😀"]
    assert detokenizer.finish() == ""


def test_an_unfinished_character_is_replaced_at_the_end(byte_level):
    detokenizer = IncrementalDetokenizer(byte_level)
    assert detokenizer.push(byte_level.backend.token_to_id(byte_char(0xF0))) == ""
    assert detokenizer.text == ""
    assert detokenizer.finish() == "\ufffd"


def test_special_tokens(byte_level):
    ids = byte_level.encode("<|im_start|>hi<|im_end|>")
    assert "".join(stream(byte_level, ids)[0]) == "hi"
    assert "".join(stream(byte_level, ids, skip_special_tokens=False)[0]) == "<|im_start|>hi<|im_end|>"
    user_defined = byte_level.encode("<tool_call>x")
    assert len(user_defined) == 2
    assert "".join(stream(byte_level, user_defined)[0]) == "<tool_call>x"


def test_the_real_tokenizer_on_the_torture_text():
    tokenizer = load_tokenizer(smollm2_path())
    for text in TORTURE.values():
        ids = tokenizer.encode(text)
        for skip in (True, False):
            pieces, _ = stream(tokenizer, ids, skip_special_tokens=skip)
            assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(stream(tokenizer, ids, skip_special_tokens=False)[0]) == text
