"""Text to token ids and back, chat templates included, from a Hugging Face folder or a GGUF file."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from paceline.chat_template import ChatTemplateError, cut_behind, marked, render
from paceline.errors import CheckpointError
from paceline.weights.checkpoint import Checkpoint, open_checkpoint
from paceline.weights.gguf_model import GGUFCheckpoint
from paceline.weights.gguf_sentencepiece import SPACE, silent_ids, token_texts
from paceline.weights.gguf_tokenizer import build_tokenizer
from paceline.weights.gguf_vocabulary import is_sentencepiece, token_id
from paceline.weights.hf_folder import read_json

# errors= of UTF-8 decoding: one U+FFFD for each byte that is part of no character, as SentencePiece decodes
EACH_BYTE = "paceline.each_byte"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(EACH_BYTE, _replace_each_byte)

_BEFORE = "\x02"  # in no token together with other characters
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "cls_token", "sep_token", "mask_token")

# keywords of transformers' apply_chat_template that are no variables of a template
_ABOUT_IDS = ("tokenize", "padding", "truncation", "return_tensors", "return_dict")


class Tokenizer:
    """A `tokenizers.Tokenizer` (`backend`) and what surrounds it: end tokens, chat template, bytes of a token.

    Special tokens that occur in a text are always recognised, in a rendered chat too, as Hugging Face and
    llama.cpp do: a user who writes "<|im_end|>" ends the turn. Text that must not do so has to be cleaned
    before it is passed in. Decoding never "cleans up" spaces, so that a streamed text equals the whole one.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        eos_token_ids: Iterable[int] = (),
        bos_token_id: int | None = None,
        chat_template: str | dict[str, str] | None = None,
        special_tokens: dict[str, str] | None = None,
        silent_ids: Iterable[int] = (),
    ) -> None:
        """silent_ids: tokens that stand for no text, of a tokenizer in SentencePiece's style."""
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.eos_token_ids = tuple(eos_token_ids)
        self.bos_token_id = bos_token_id
        self.templates = {"default": chat_template} if isinstance(chat_template, str) else dict(chat_template or {})
        self.special_tokens = dict(special_tokens or {})
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        state = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
        self.byte_level = state.get("type") == "ByteLevel"
        self.sentencepiece, self.strips_space = _read_sentencepiece(state)
        # of the tokens that were asked for so far
        self._token_bytes: dict[int, bytes] = dict.fromkeys(silent_ids, b"") if self.sentencepiece else {}

    @property
    def chat_template(self) -> str | None:
        """The source of the default template."""
        return self.templates.get("default")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids; `add_special_tokens` adds the model's frame around a text (BOS for Llama 3, mostly nothing).

        Lone surrogates, which JSON can carry and UTF-8 cannot, become U+FFFD.
        """
        if not text.isascii():
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_inside(self, text: str) -> list[int]:
        """Ids of a text that goes on behind other text: no frame, and no space in front as SentencePiece puts one."""
        ids = self.encode(_BEFORE + text, add_special_tokens=False) if self.strips_space else []
        before = self.encode(_BEFORE, add_special_tokens=False) if ids else []
        if ids and ids[: len(before)] == before:
            return ids[len(before) :]
        return self.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids; invalid UTF-8 becomes U+FFFD, ids outside the vocabulary nothing."""
        if self.sentencepiece:
            skipped = self.special_ids if skip_special_tokens else frozenset()
            data = b"".join([self.token_bytes(token) for token in ids if token not in skipped])
            text = data.decode("utf-8", EACH_BYTE)
            return text.removeprefix(" ") if self.strips_space else text
        known = [token for token in ids if 0 <= token < self.vocab_size]
        return self.backend.decode(known, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for on its own, special tokens by their text; b"" outside the
        vocabulary.
        """
        known = self._token_bytes.get(token)
        if known is None:
            text = self.backend.id_to_token(token) if 0 <= token < self.vocab_size else None
            if text is None:
                return b""
            known = self._token_bytes[token] = self._bytes_of(text)
        return known

    def token_text(self, token: int) -> str:
        """Its characters, U+FFFD for bytes that are none alone."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def _bytes_of(self, text: str) -> bytes:
        if self.byte_level:
            table = _byte_table()
            try:
                return bytes([table[char] for char in text])
            except KeyError:  # an added token that is plain text, as the decoder treats it
                return text.encode()
        if match := _BYTE_TOKEN.fullmatch(text):
            return bytes([int(match[1], 16)])
        return text.replace(SPACE, " ").encode()

    def template_for(self, chat_template: str | None = None, tools: list[dict[str, Any]] | None = None) -> str:
        """The source of the template that `apply_chat_template` runs. Raises `ChatTemplateError`."""
        source = chat_template
        if source is None and tools:
            source = self.templates.get("tool_use")
        if source is None:
            source = self.chat_template
        if source is None:
            raise ChatTemplateError(
                "this model has no chat template; use plain completion, or pass a Jinja chat_template="
            )
        return source

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        /,  # variables may have these names
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt text for OpenAI-style messages. Raises `ChatTemplateError`.

        `chat_template` replaces the model's own. `continue_final_message`: the text ends where the last message's
        does, wherever the template puts it. Other keywords are variables of the template (enable_thinking=False), as
        in transformers; its keywords about ids are refused unless they are None or False (tokenize=False).
        """
        for name in _ABOUT_IDS:
            if variables.pop(name, None):
                raise ChatTemplateError(f"{name}: this returns text; encode_chat(messages) returns a list of ids")
        mark = ""
        if continue_final_message:
            if add_generation_prompt:
                raise ChatTemplateError("continue_final_message: needs add_generation_prompt=False")
            messages, mark = marked(messages)
        text = render(
            self.template_for(chat_template, tools),
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            **{**self.special_tokens, **variables},
        )
        return cut_behind(text, mark) if continue_final_message else text

    def encode_chat(self, messages: list[dict[str, Any]], /, **kwargs: Any) -> list[int]:
        """`apply_chat_template`, then `encode` without adding anything: the template writes its own BOS."""
        return self.encode(self.apply_chat_template(messages, **kwargs), add_special_tokens=False)


def _read_sentencepiece(decoder: dict[str, Any]) -> tuple[bool, bool]:
    """Whether a decoder, as JSON, joins bytes of tokens as SentencePiece's do, and takes one space off the front."""
    steps = decoder.get("decoders") if decoder.get("type") == "Sequence" else None
    joins = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return steps in (joins, [*joins, strip]), steps == [*joins, strip]


@lru_cache(maxsize=1)
def _byte_table() -> dict[str, int]:
    """Byte-level BPE's visible alphabet (GPT-2): character -> byte."""
    visible = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in visible}
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    table.update({chr(256 + i): byte for i, byte in enumerate(hidden)})
    return table


def load_tokenizer(source: Checkpoint | str | Path) -> Tokenizer:
    """The tokenizer of an open checkpoint, a Hugging Face folder (weights not needed) or a GGUF file.

    Raises `CheckpointError` if there is none or it is damaged.
    """
    if isinstance(source, GGUFCheckpoint):
        return _from_gguf(source)
    if isinstance(source, Checkpoint):
        return _from_folder(source.path)
    path = Path(source)
    if path.is_dir() and (path / "tokenizer.json").is_file():
        return _from_folder(path)
    with open_checkpoint(path) as checkpoint:
        return load_tokenizer(checkpoint)


def _from_gguf(checkpoint: GGUFCheckpoint) -> Tokenizer:
    metadata = checkpoint.metadata

    def error(message: str) -> CheckpointError:
        return CheckpointError(f"{checkpoint.path}: {message}")

    backend = build_tokenizer(metadata, checkpoint.path)
    sentencepiece = is_sentencepiece(metadata)
    tokens: list[str] = token_texts(metadata, error) if sentencepiece else metadata["tokenizer.ggml.tokens"]
    special = {}
    for name, kind in (
        ("bos_token", "bos"),
        ("eos_token", "eos"),
        ("pad_token", "padding"),
        ("unk_token", "unknown"),
    ):
        index = token_id(metadata, kind, len(tokens), error)
        if index is not None:
            special[name] = tokens[index]
    prefix = "tokenizer.chat_template"
    templates = {
        key.removeprefix(prefix).removeprefix(".") or "default": value
        for key, value in metadata.items()
        if (key == prefix or key.startswith(prefix + ".")) and isinstance(value, str)
    }
    eos = checkpoint.eos_token_ids()
    if any(not 0 <= i < len(tokens) for i in eos):
        raise error(f"end tokens {eos} lie outside the vocabulary of {len(tokens)}")
    return Tokenizer(
        backend,
        eos_token_ids=eos,
        bos_token_id=token_id(metadata, "bos", len(tokens), error),
        chat_template=templates,
        special_tokens=special,
        silent_ids=silent_ids(metadata) if sentencepiece else (),
    )


def _from_folder(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder}: there is no tokenizer.json here, so text cannot be encoded; add the model's own"
        )
    try:
        backend = Backend.from_file(str(path))
    except BaseException as error:  # a damaged file raises a plain Exception or a Rust panic, which is no Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise CheckpointError(f"{path}: not a valid tokenizer: {error}") from error
    optional = {
        name: read_json(folder / f"{name}.json") if (folder / f"{name}.json").is_file() else {}
        for name in ("tokenizer_config", "generation_config", "config")
    }
    settings = optional["tokenizer_config"]
    special = {name: text for name in _SPECIAL_NAMES if (text := _token_text(settings.get(name))) is not None}
    config = optional["config"]
    if isinstance(config.get("text_config"), dict):  # of a model with more parts
        config = {**config["text_config"], **config}
    eos = _ids(optional["generation_config"].get("eos_token_id"), folder) or _ids(config.get("eos_token_id"), folder)
    if "eos_token" in special:
        eos += _ids(backend.token_to_id(special["eos_token"]), folder)
    bos = config.get("bos_token_id")
    if "bos_token" in special:
        bos = backend.token_to_id(special["bos_token"])
    return Tokenizer(
        backend,
        eos_token_ids=dict.fromkeys(eos),
        bos_token_id=bos if type(bos) is int else None,
        chat_template=_templates(settings.get("chat_template"), folder),
        special_tokens=special,
    )


def _ids(value: Any, folder: Path) -> list[int]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(v) is int and v >= 0 for v in values):
        raise CheckpointError(f"{folder}: eos_token_id is {str(value)[:60]}, expected an id or a list of ids")
    return values


def _token_text(value: Any) -> str | None:
    """A special token in tokenizer_config.json: a string, or an AddedToken as an object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _templates(setting: Any, folder: Path) -> dict[str, str]:
    """chat_template.jinja wins over tokenizer_config.json, which holds one or a list of named ones."""
    templates: dict[str, str] = {}
    if isinstance(setting, str):
        templates["default"] = setting
    elif isinstance(setting, list):
        for row in setting:
            if isinstance(row, dict) and isinstance(row.get("name"), str) and isinstance(row.get("template"), str):
                templates[row["name"]] = row["template"]
    elif isinstance(setting, dict):
        templates.update({k: v for k, v in setting.items() if isinstance(v, str)})
    files = [("default", folder / "chat_template.jinja")]
    files += [(p.stem, p) for p in sorted((folder / "additional_chat_templates").glob("*.jinja"))]
    for name, file in files:
        if file.is_file():
            try:
                templates[name] = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise CheckpointError(f"{file}: cannot be read: {error}") from error
    return templates
