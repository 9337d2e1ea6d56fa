"""The engine in this process as something to measure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from paceline.bench.backend import Completion, Conversation, DraftLength, Run, in_order
from paceline.bench.datasets import encode
from paceline.errors import PacelineError
from paceline.outputs import own_logprob
from paceline.speculation.cost_table import CostTable
from paceline.speculation.length import DraftLengthPolicy

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.sampling_params import SamplingParams


class _OwnTable(CostTable):
    """Costs that one arm saw: not to be kept for later runs of the engine. They are means over all of its steps, as the
    tokens per second are that the arm is judged by. Arms run interleaved, so what disturbs the machine disturbs all."""

    def __init__(self) -> None:
        super().__init__()
        self._sums: dict[int, tuple[int, float]] = {}

    def observe(self, rows: int, seconds: float) -> None:
        """The first of a size does not count: it touches memory first."""
        count, total = self._sums.get(rows, (-1, 0.0))
        count, total = count + 1, total + seconds if count >= 0 else 0.0
        self._sums[rows] = (count, total)
        if count:
            self.preset({rows: total / count})

    @property
    def changes(self) -> int:
        return 0

    @changes.setter
    def changes(self, _: int) -> None:
        pass


class ArmPolicy(DraftLengthPolicy):
    """A draft-length policy for one arm of fixed length: it keeps what that arm showed away from the adaptive arm,
    which has to learn from its own drafts as it would in production, and from the costs that the engine keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.verify, self.draft = _OwnTable(), _OwnTable()
        self._warming_up = 0

    def observe_draft(self, rows: int, context_rows: int, seconds: float) -> None:
        """Context that waited counts: with drafts of fixed length it is what it will be in every run."""
        self.draft.observe(rows, seconds)


class LocalBackend:
    """Clients are streams of one `LLM`, read in turns: every step of the engine serves all that are open."""

    local = True

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.adaptive = llm.engine.lengths  # what the engine learns and keeps by itself
        self.policies: dict[int, DraftLengthPolicy] = {}

    def policy(self, length: DraftLength) -> DraftLengthPolicy:
        """What the engine measures and learns while an arm runs."""
        if not isinstance(length, int):
            return self.adaptive
        return self.policies.setdefault(length, ArmPolicy())

    def run(
        self,
        conversations: Sequence[Conversation],
        length: DraftLength,
        params: SamplingParams,
        concurrency: int,
        on_done: Callable[[Completion], None] = lambda _completion: None,
    ) -> Run:
        """See `Backend.run`. A request that the engine refuses is a failed completion, not the end of the run."""
        policy = self.policy(length)
        self.llm.reset_prefix_cache()
        self.llm.engine.lengths = policy
        chosen = Counter(policy.chosen)
        done: list[Completion] = []

        def finished(completion: Completion) -> None:
            done.append(completion)
            on_done(completion)

        waiting = deque(conversations)
        clients: list[_Client] = []
        begin = perf_counter()
        try:
            while waiting or clients:
                while waiting and len(clients) < concurrency:
                    clients.append(_Client(self.llm, waiting.popleft(), length, params, finished))
                    clients[-1].send()
                for client in clients:
                    client.receive()
                clients = [client for client in clients if client.busy]
        finally:
            wall = perf_counter() - begin
            for client in clients:
                client.close()
            self.llm.engine.lengths = self.adaptive
        spent = Counter(policy.chosen)
        spent.subtract(chosen)
        return Run(in_order(done), wall, +spent if length == "auto" else Counter())


class _Client:
    """One conversation, request by request."""

    def __init__(
        self,
        llm: LLM,
        conversation: Conversation,
        length: DraftLength,
        params: SamplingParams,
        finished: Callable[[Completion], None],
    ) -> None:
        self.llm, self.conversation, self.length, self.params = llm, conversation, length, params
        self._finished = finished
        self._stream: Any = None
        self._sent = 0.0

    @property
    def busy(self) -> bool:
        return self._stream is not None

    def send(self) -> None:
        """Open the stream of the next request."""
        ids = encode(self.conversation.messages, self.llm.tokenizer, self.conversation.prompt.index)
        salt = self.conversation.salt
        prompt: Any = ids if salt is None else {"prompt_token_ids": ids, "cache_salt": salt}
        drafts = None if self.length == "auto" else self.length
        self._sent = perf_counter()
        try:
            self._stream = self.llm.stream(prompt, self.params, num_speculative_tokens=drafts)
        except PacelineError as error:
            self._fail(error)

    def receive(self) -> None:
        """What the next step adds; a finished answer is followed by the conversation's next request at once."""
        if self._stream is None:
            return
        try:
            delta = next(self._stream)
        except PacelineError as error:
            self._fail(error)
            return
        if delta.output is None:
            return
        self._stream = None
        self._finished(self._completion(delta.output))
        if self.conversation.advance(delta.output.outputs[0].text):
            self.send()

    def close(self) -> None:
        """Drop the request."""
        if self._stream is not None:
            self._stream.close()

    def _completion(self, output: Any) -> Completion:
        choice, metrics = output.outputs[0], output.metrics
        return Completion(
            prompt=self.conversation.prompt,
            num_speculative_tokens=self.length,
            token_ids=list(choice.token_ids),
            logprobs=None if choice.logprobs is None else [own_logprob(found)[1].logprob for found in choice.logprobs],
            finish_reason=choice.finish_reason,
            ttft_s=metrics.time_to_first_token_s,
            decode_s=metrics.generation_time_s,
            wall_s=perf_counter() - self._sent,
            stats=metrics.spec_decode,
            turn=self.conversation.turn,
            copy=self.conversation.copy,
            text=choice.text,
            prompt_tokens=len(output.prompt_token_ids),
            cached_tokens=output.num_cached_tokens,
        )

    def _fail(self, error: PacelineError) -> None:
        """Later turns of the conversation fail with it, so that no arm has fewer requests than another."""
        self._stream = None
        where = self.conversation
        for turn in range(where.turn, len(where.prompt.later_turns) + 1):
            self._finished(
                Completion(where.prompt, self.length, [], None, None, 0.0, 0.0, 0.0, None, str(error), turn, where.copy)
            )
