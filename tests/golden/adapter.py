"""The one place that ties the golden harness to Paceline's own interfaces."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from sampling import golden_vectors

from paceline import LLM, SamplingParams
from paceline.models.layouts import recognise
from paceline.speculation.dflash import DFlashProposer, Drawn
from paceline.speculation.dflash2 import DFlash2Proposer
from paceline.speculation.drafting import Proposal
from paceline.speculation.dspark import DSparkProposer

from .cases import Case
from .checks import Round, Run
from .tokenizer import add_tokenizer


def open_llm(target: Path, speculative_config: dict[str, Any] | None = None) -> LLM:
    """An engine in fp32. Raises PacelineError for a family that is not built."""
    with TemporaryDirectory() as folder:
        model = add_tokenizer(target, Path(folder))
        return LLM(model, dtype="float32", speculative_config=speculative_config, kv_cache_space=0.05)


class NativeTarget:
    """A target of the native engine; see `checks.Target`."""

    def __init__(self, folder: Path) -> None:
        self.llm = open_llm(folder)
        self.model = self.llm.model

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        return self.model.logits(ids)[0]

    def greedy(self, ids: Sequence[int], count: int) -> list[int]:
        (output,) = self.llm.generate([list(ids)], _greedy(count))
        return output.outputs[0].token_ids

    def hidden_states(self, ids: Sequence[int]) -> list[np.ndarray]:
        layers = range(-1, self.model.config.num_layers)
        _, taps = self.model.logits(ids, taps=layers)
        states = np.split(taps, len(layers), axis=1)
        last = states[-1]
        # A tap is the residual stream; the reference's last entry is after the final norm.
        scale = np.sqrt(np.mean(last**2, axis=1, keepdims=True) + self.model.config.rms_norm_eps)
        return [*states[:-1], last / scale * self.model.weights.final_norm]


class NativeSpeculator:
    """A target and its drafter in the native engine's own step loop; see `checks.Speculator`."""

    def __init__(self, target: Path, drafter: Path) -> None:
        config = json.loads((drafter / "config.json").read_text())
        self.llm = open_llm(target, {"method": recognise(config, str(drafter)).family, "model": str(drafter)})
        proposer = self.llm.engine.proposer
        assert isinstance(proposer, DFlashProposer), f"{drafter}: drafts come from {proposer}"
        self.recorder = _Recorder(proposer)
        self.llm.engine.proposer = self.recorder

    def run(self, prompt: Sequence[int], expected: dict[str, Any]) -> Run:
        params = _greedy(expected["max_new_tokens"], expected.get("stop_token_ids"))
        output: list[int] = []
        rounds: list[Round] = []
        self.recorder.start()
        # Every delta is one step; the first is the prefill.
        drafter = self.recorder.inner
        drafts = expected["width"] - (0 if drafter.drafter.config.anchor_first else 1)
        if isinstance(drafter, DSparkProposer):
            drafter.confidence_threshold = expected["confidence_threshold"]
        for delta in self.llm.stream(list(prompt), params, num_speculative_tokens=drafts):
            output += delta.token_ids
            observed = self.recorder.take()
            if observed is not None:
                observed.produced_tokens = delta.token_ids
                verified = observed.verified_draft_tokens
                rows = len(observed.draft_tokens if verified is None else verified) + 1
                observed.tensors["verify_logits"] = self.llm.engine._logits[:rows].copy()
                observed.num_accepted = _matching(observed)
                rounds.append(observed)
        return Run(output, rounds)


def _matching(observed: Round) -> int:
    """Drafts that equal the target's choice before the first that does not, cut or not."""
    choices = observed.tensors["verify_logits"].argmax(axis=1).tolist()
    drafts = observed.draft_tokens if observed.verified_draft_tokens is None else observed.verified_draft_tokens
    pairs = zip(drafts, choices, strict=False)
    return next((i for i, (draft, choice) in enumerate(pairs) if draft != choice), len(drafts))


class _Recorder:
    """A drafter that notes what the one behind it was asked, saw and answered."""

    def __init__(self, inner: DFlashProposer) -> None:
        self.inner = inner
        self.start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def start(self) -> None:
        self._context: list[tuple[int, np.ndarray]] = []
        self._round: Round | None = None

    def take(self) -> Round | None:
        taken, self._round = self._round, None
        return taken

    def observe(self, items: Sequence[tuple[Any, int, np.ndarray]]) -> None:
        self._context += [(first, taps.copy()) for _, first, taps in items]
        self.inner.observe(items)

    def propose(self, sequences: Sequence[Any], limits: Sequence[int]) -> Proposal:
        draft_logits: Callable[..., np.ndarray] = self.inner.drafter.draft_logits
        seen: list[np.ndarray] = []
        drawn: list[Drawn] = []
        tensors: dict[str, np.ndarray] = {}

        def noting(*arguments: Any, **named: Any) -> np.ndarray:
            seen.append(draft_logits(*arguments, **named))
            tensors["base_logits"] = seen[-1].copy()
            return seen[-1]

        draw = self.inner._draw_block if hasattr(self.inner, "_draw_block") else self.inner._draw

        def noting_draw(*arguments: Any) -> Drawn:
            drawn.append(draw(*arguments))
            return drawn[-1]

        with ExitStack() as stack:
            stack.enter_context(_replaced(self.inner.drafter, "draft_logits", noting))
            stack.enter_context(_replaced(self.inner, draw.__name__, noting_draw))
            if isinstance(self.inner, DFlash2Proposer):
                selector = _NotingSelector(self.inner.drafter.selector, tensors)
                stack.enter_context(_replaced(self.inner.drafter, "selector", selector))
            proposal = self.inner.propose(sequences, limits)
        (sequence,), (verified,), (logits,) = sequences, proposal.drafts, seen
        anchor = len(sequence.token_ids) - 1
        (drafts,) = drawn[0].drafts
        positions = [np.arange(first, first + len(taps)) for first, taps in self._context]
        width = len(drafts) + (0 if self.inner.drafter.config.anchor_first else 1)
        tensors |= {
            "taps": np.concatenate([taps for _, taps in self._context]),
            "position_ids": np.concatenate([*positions, np.arange(anchor, anchor + width)]),
            "draft_logits": logits.copy(),
        }
        self._context = []
        self._round = Round(anchor, sequence.token_ids[-1], drafts, 0, [], tensors=tensors)
        if isinstance(self.inner, DSparkProposer):
            self._round.verified_draft_tokens = list(verified)
            assert drawn[0].confidence is not None
            (self._round.confidence,) = drawn[0].confidence
        return proposal


class _replaced:
    """An attribute of an object set for the time of a `with` block."""

    def __init__(self, owner: Any, name: str, value: Any) -> None:
        self.owner, self.name, self.value = owner, name, value

    def __enter__(self) -> None:
        self.before = vars(self.owner).get(self.name, self)
        setattr(self.owner, self.name, self.value)

    def __exit__(self, *_: object) -> None:
        if self.before is self:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.before)


class _NotingSelector:
    """DFlash 2's selector, with what it scored."""

    def __init__(self, inner: Any, tensors: dict[str, np.ndarray]) -> None:
        self.inner, self.tensors = inner, tensors

    def draft(self, *arguments: Any) -> Any:
        tokens, ids, scores, probs = self.inner.draft(*arguments)
        self.tensors |= {
            "selector_candidates": ids,
            "selector_scores": scores,
            "selector_path": np.array(tokens),
        }
        return tokens, ids, scores, probs


def _greedy(count: int, stop: list[int] | None = None) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, stop_token_ids=stop or [], ignore_eos=True)


def check_sampling(case: Case) -> None:
    """Warped distributions, accepted counts and residuals of a case of kind "sampling"."""
    golden_vectors.check(case.expected, case.tensors)
