"""Texts to encode: a collection of what tokenizers trip over, and every evaluation prompt."""

from __future__ import annotations

import pytest

from paceline.bench.datasets import PACKAGED, packaged_rows
from paceline.errors import PacelineError

TORTURE: dict[str, str] = {
    "empty": "",
    "one space": " ",
    "words": "Hello, world! It's a test; isn't it? I'LL DON'T we've they'd you're I'm 's 'S",
    "digits": "0 1 12 123 1234 12345 3.14159 1,000,000 2024-11-29 v1.2.3 0x1F 10^6 1e-5 007",
    "digits in words": "abc123def 4ever x1y22z333 H2O CO2 i18n k8s",
    "other digits": "٠١٢٣ ०१२ ①②③ ⅧⅨ ½ ¾ x² 10₂ 一二三 𝟘𝟙𝟚",
    "whitespace": "a  b   c    d\te\t\tf \t g        h",
    "trailing whitespace": "end   ",
    "leading whitespace": "   start",
    "newlines": "a\nb\n\nc\n\n\nd\n \n  \n\te\n",
    "carriage returns": "a\r\nb\r\n\r\nc\rd\r\r\n",
    "odd spaces": "a\u00a0b\u2003c\u200bd\u3000e\u2028f\u2029g\u0085h\ufeffi\u180ej",
    "code": "def f(x):\n    return {'a': x**2, \"b\": [i for i in range(10) if i % 2 == 0]}\n"
    "\n\t# tab\n    if x != y: pass",
    "operators": 'a+=b; c<<=2; d->e; f::g; !(h && i || ~j); <tag attr="v"/> $x ${y} `z` #! @foo |> => !== ...',
    "punctuation": "!!! ??? ... --- ___ *** ((())) [[]] {{}} ;;; ,,, ::: \"\"\" ''' ``` ~~~ ^^^ |||",
    "unicode quotes": "“quoted” ‘single’ «guillemets» don’t — dash – en … ellipsis",
    "accents": "naïve café Ångström façade Žižek ñandú ß ſ İ ı",
    "combining marks": "e\u0301 a\u030a o\u0308\u0304 n\u0303 Z\u0351\u036b\u0343a\u0325\u0360lgo हिन्दी ภาษาไทย",
    "cjk": "你好，世界！這是測試。こんにちは世界、テスト123です。안녕하세요 세계",
    "right to left": "שלום עולם مرحبا بالعالم 123 abc",
    "emoji": "😀 👍🏽 👩‍👩‍👧‍👦 🇩🇪🇫🇷 ❤️ 🏳️‍🌈 1️⃣ 🫠",
    "mathematics": "∀x∈ℝ: x²≥0 ∧ ∑ᵢ₌₁ⁿ i = n(n+1)/2 ≠ ∞ √2 ≈ 1.414 𝒳 𝔄",
    "control characters": "a\x00b\x01c\x07d\x1be\x7ff\x80g\x9fh",
    "replacement and private": "\ufffd \ue000 \U0010ffff \U000f0000",
    "special tokens in text": "<|im_start|>user\nhi<|im_end|> <|endoftext|><|im_start|> <|im_end|>x y<|im_end|>",
    "almost special": "<|im_end| > <| im_end|> <|IM_END|> <|im_end <repo_name <|>",
    "urls": "https://example.org/a/b?c=d&e=f#g mailto:x.y+z@example.co.uk C:\\dir\\file.txt ../up /etc/fstab",
    "long run": "a" * 300 + " " * 120 + "1" * 60 + "=" * 90 + "\n" * 40,
    "mixed scripts": "abcабвαβγאבג日本語 Straße123улица456 x_y-z",
    "json": '{"key": "välue", "n": [1, 2.5, -3e10, null, true], "s": "\\u00e9\\n\\t\\\\"}',
}


def evaluation_prompts() -> list[str]:
    """HumanEval (164), GSM8K (100), MT-Bench (80, both turns), as text. Skips where they cannot be fetched."""
    texts: list[str] = []
    for name in PACKAGED:
        try:
            rows = packaged_rows(name)
        except PacelineError as error:
            pytest.skip(f"evaluation prompts are not here: {error}")
        texts += [turn for row in rows for turn in PACKAGED[name].turns(row)]
    return texts
