"""Speculation at real sizes without weights: random weights, made-up acceptance, real time.

The engine, the passes of target and drafter, sampling and commit are the real ones. Only which drafts are kept is made
up: what the drafter proposes is thrown away, and in its place stand as many tokens of the target's own continuation
(known from a plain run) as a draw from the given survival says, followed by a wrong one. Output stays that of plain
decoding, and is compared with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

import paceline.llm as llm_module
from paceline.bench.backend import Completion, Conversation, DraftLength, Run
from paceline.bench.datasets import BenchPrompt
from paceline.bench.local import LocalBackend
from paceline.bench.shapes import RandomCheckpoint, Shape, hash_of
from paceline.models.dflash import DFlashDrafter, read_drafter_config
from paceline.models.target import TargetModel
from paceline.sampling import SamplerMode
from paceline.sampling_params import SamplingParams
from paceline.speculation.config import SpeculativeConfig
from paceline.speculation.dflash import DFlashProposer
from paceline.speculation.drafting import Drafter, Proposal

NAME = "SYNTHETIC"
PROMPT_TOKENS = 128


class SyntheticDrafter:
    """A drafter that takes the time of `inner` and is right as often as `survival` says. truth: prompt ids -> what the
    target generates for them."""

    name = NAME

    def __init__(self, inner: Drafter, survival: Sequence[float], seed: int = 0) -> None:
        self.inner = inner
        self._survival = np.array(survival)
        self._seed = seed
        self.truth: dict[tuple[int, ...], list[int]] = {}
        self.taps = inner.taps
        self.max_drafts = inner.max_drafts
        self.window = 0

    def cache_bytes(self, blocks: int, max_num_seqs: int) -> int:
        return self.inner.cache_bytes(blocks, max_num_seqs)

    def bind(self, blocks: int, max_num_seqs: int) -> None:
        self.inner.bind(blocks, max_num_seqs)
        self.window = self.inner.window

    def propose(self, sequences: Sequence[Any], limits: Sequence[int]) -> Proposal:
        self.inner.propose(sequences, limits)
        return Proposal([self._drafts(s, limit) for s, limit in zip(sequences, limits, strict=True)])

    def _drafts(self, sequence: Any, limit: int) -> list[int]:
        ids = sequence.token_ids
        future = self.truth.get(tuple(ids[:PROMPT_TOKENS]), [])[len(ids) - PROMPT_TOKENS :]
        generator = np.random.default_rng([self._seed, hash_of(str(ids[:8])), len(ids)])
        kept = min(int((generator.random() < self._survival).sum()), limit, len(future))
        wrong = [(future[kept] if kept < len(future) else 0) ^ 1] * (limit - kept)
        return future[:kept] + wrong

    def observe(self, items: Sequence[tuple[Any, int, np.ndarray]]) -> None:
        self.inner.observe(items)

    def finish(self, sequence: Any) -> None:
        self.inner.finish(sequence)


class IdTokenizer:
    """Stands for a tokenizer: text is a seed for random ids, and ids are shown as numbers."""

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id = None
    special_ids: frozenset[int] = frozenset()
    byte_level = True
    chat_template = NAME

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = np.random.default_rng(hash_of(text)).integers(0, self.vocab_size, PROMPT_TOKENS)
        return [int(i) for i in ids]

    def encode_chat(self, messages: list[dict[str, Any]], **_: Any) -> list[int]:
        return self.encode("".join(m["content"] for m in messages))

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(f"{i} " for i in ids)

    def token_bytes(self, token: int) -> bytes:
        return f"{token} ".encode()


class SyntheticBackend(LocalBackend):
    """Like any engine in this process; each prompt is first continued plainly, unmeasured, to know what is right."""

    def run(
        self,
        conversations: Sequence[Conversation],
        length: DraftLength,
        params: SamplingParams,
        concurrency: int,
        on_done: Callable[[Completion], None] = lambda _completion: None,
    ) -> Run:
        drafter = self.llm.engine.proposer
        if isinstance(drafter, SyntheticDrafter) and length != 0:
            asked = {tuple(self.llm.tokenizer.encode_chat(c.messages)) for c in conversations}
            wanted = params.max_tokens or 1
            unknown = [list(ids) for ids in asked if len(drafter.truth.get(ids, ())) < wanted]
            for output in self.llm.generate(unknown, params, num_speculative_tokens=0) if unknown else ():
                drafter.truth[tuple(output.prompt_token_ids)] = list(output.outputs[0].token_ids)
        run = super().run(conversations, length, params, concurrency, on_done)
        if isinstance(drafter, SyntheticDrafter) and length == 0:
            for completion in run.completions:
                prompt = tuple(self.llm.tokenizer.encode_chat(completion.prompt.messages))
                if len(completion.token_ids) > len(drafter.truth.get(prompt, ())):
                    drafter.truth[prompt] = completion.token_ids
        return run


def prompts(count: int) -> list[BenchPrompt]:
    """Prompts of random ids."""
    return [BenchPrompt(i, [{"role": "user", "content": f"synthetic prompt {i}"}]) for i in range(count)]


def open_synthetic(name: str, shape: Shape, survival: Sequence[float], **options: Any) -> SyntheticBackend:
    """An `LLM` of random weights in a shape, with a drafter of random weights that is right as often as asked."""
    from paceline.llm import LLM

    target = RandomCheckpoint(name, shape.target)

    class SyntheticLLM(LLM):
        def _choose_drafter(self, config: Any, longer: bool) -> tuple[SpeculativeConfig | None, Drafter | None]:
            if shape.drafter is None or not survival:
                return None, None
            return None, SyntheticDrafter(_proposer(name, shape.drafter, self.model, self.sampler), survival)

    with _in_place_of_a_model(target):
        return SyntheticBackend(SyntheticLLM(name, **options))


def _proposer(name: str, config: dict[str, Any], model: TargetModel, sampler: SamplerMode) -> DFlashProposer:
    checkpoint = RandomCheckpoint(f"{name} drafter", config, seed=1)
    drafter = DFlashDrafter(checkpoint, model, read_drafter_config(checkpoint.config, name))
    return DFlashProposer(drafter, drafter.config.max_drafts, sampler)


@contextmanager
def _in_place_of_a_model(checkpoint: RandomCheckpoint) -> Iterator[None]:
    """`LLM` opens models by name; while the block runs, every name is this checkpoint."""
    kept = {name: getattr(llm_module, name) for name in ("resolve_model", "open_checkpoint", "load_tokenizer")}
    try:
        stand_ins: dict[str, Any] = {
            "resolve_model": lambda *_args, **_options: checkpoint.path,
            "open_checkpoint": lambda _path: checkpoint,
            "load_tokenizer": lambda _checkpoint: IdTokenizer(checkpoint.config["vocab_size"]),
        }
        for name, value in stand_ins.items():
            setattr(llm_module, name, value)
        yield
    finally:
        for name, value in kept.items():
            setattr(llm_module, name, value)
