"""The prompts of the comparisons: the first of HumanEval, GSM8K and MT-Bench in turn, as token ids."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from paceline.bench.datasets import load_dataset
from paceline.tokenizer import Tokenizer

SETS = ("humaneval", "gsm8k", "mt-bench")
OUTPUT_LENGTHS = (32, 64, 96, 128, 192, 256)  # of a mixed batch, in turn


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that are given at once: prompts as token ids, and how many tokens each shall produce, no fewer."""

    prompts: list[list[int]]
    max_tokens: list[int]

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return sum(self.max_tokens)


def prompts(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """`count` prompts under the chat template, taken from the sets in turn."""
    sets = [load_dataset(name, -(-count // len(SETS))) for name in SETS]
    rows = chain.from_iterable(zip(*sets, strict=True))
    return [prompt.encode(tokenizer) for prompt in rows][:count]


def mixed(tokenizer: Tokenizer, count: int) -> Workload:
    """`count` requests of mixed lengths: those of the prompts, and outputs of 32 to 256 tokens."""
    lengths = [OUTPUT_LENGTHS[i % len(OUTPUT_LENGTHS)] for i in range(count)]
    # every length meets every set: the sets come in turn, too, and six lengths over three sets would pair up
    shift = [lengths[(i + i // len(OUTPUT_LENGTHS)) % count] for i in range(count)]
    return Workload(prompts(tokenizer, count), shift)


def uniform(tokenizer: Tokenizer, count: int, prompt: int, output: int) -> Workload:
    """`count` requests of `prompt` tokens of running text each, different ones, and `output` tokens: the shape that
    llama-batched-bench runs."""
    text = list(chain.from_iterable(prompts(tokenizer, 192)))
    if count * prompt > len(text):
        text *= -(-count * prompt // len(text))
    return Workload([text[i * prompt : (i + 1) * prompt] for i in range(count)], [output] * count)
