"""Kernels and plan interpreter of Paceline."""

import enum
from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray

KEYS_PER_BLOCK: int = 16
MIN_INT8_HEAD_DIM: int = 8

def best_isa() -> str: ...
def default_isa() -> str: ...
def amx_refused() -> str | None:
    """None where this process may use AMX (the system is asked once), else why not, as a clause."""

def select_isa(name: str = "") -> str: ...

class ThreadPool:
    def __init__(self, threads: int) -> None: ...
    @property
    def size(self) -> int: ...

class Arena:
    def __init__(self, capacity: int) -> None: ...
    @property
    def used(self) -> int: ...

class Quant(enum.Enum):
    NONE = 0

    INT8 = 1

    INT8_CHANNEL = 2

    INT4 = 3

    INT4_MIN = 4

def quant_row_bytes(quant: Quant, k: int) -> int: ...
def packed_quant_bytes(quant: Quant, n: int, k: int, gated: bool = False) -> int: ...
def quantise_rows(
    quant: Quant,
    values: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)],
    out: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order="C", device="cpu")],
) -> int:
    """
    fp32 [n, k] to the stored form uint8 [n, quant_row_bytes]. Returns -1, or the first row whose values no scale holds.
    """

def quant_isa(isa: str = "") -> str:
    """The quantised kernels that a path uses: portable, avx2 or avx512_vnni. All give the same bits."""

def quantise_activations(
    values: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)],
    out: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order="C", device="cpu")],
    isa: str = "",
) -> None:
    """
    fp32 [n, k] to 48 bytes per group of 32: int8 values, fp32 scale, int32 -128 and -8 times their sum, fp32 scale
    times their sum.
    """

class Packed:
    def __init__(
        self, arena: Arena, n: int, k: int, f32: bool, gated: bool = False, quant: Quant = Quant.NONE
    ) -> None: ...
    @property
    def quant(self) -> Quant: ...
    def fill_quant(
        self,
        rows: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order="C", device="cpu", writable=False)],
        row: int = 0,
        part: int = 0,
    ) -> None: ...
    def view(self, row: int, count: int) -> Packed: ...
    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def fill(
        self,
        values: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)],
        row: int = 0,
        part: int = 0,
    ) -> None: ...
    def fill_bf16(
        self,
        bits: Annotated[NDArray[numpy.uint16], dict(shape=(None, None), order="C", device="cpu", writable=False)],
        row: int = 0,
        part: int = 0,
    ) -> None: ...
    def row(
        self, row: int, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu")]
    ) -> None: ...

class KVCache:
    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, blocks: int, f32: bool, int8: bool = False
    ) -> None: ...
    @property
    def blocks(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def bytes_per_block(self) -> int: ...
    def read(
        self,
        layer: int,
        block: int,
        slot: int,
        keys: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu")],
        values: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu")],
    ) -> None: ...
    def copy_rows(self, source: int, to: int, slot: int, count: int) -> None: ...

class StateCache:
    """
    Recurrent states of gated delta nets in slots, and a journal for the rows of a pass that are not committed yet.
    """

    def __init__(
        self,
        pool: ThreadPool,
        layers: int,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        kernel: int,
        slots: int,
        journal_rows: int,
    ) -> None: ...
    @property
    def slots(self) -> int: ...
    @property
    def journal_rows(self) -> int: ...
    @property
    def slot_bytes(self) -> int: ...
    @property
    def journal_row_bytes(self) -> int: ...
    def rows(self, slot: int) -> int: ...
    def reset(self, slot: int) -> None: ...
    def copy(self, source: int, to: int) -> None: ...
    def assume(self, slot: int, rows: int) -> None: ...
    def read(
        self, slot: int, out: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu")]
    ) -> None: ...
    def commit(
        self,
        isa: str,
        entries: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order="C", device="cpu", writable=False)],
        snapshots: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order="C", device="cpu", writable=False)]
        | None = None,
    ) -> None:
        """
        Repeat the first rows of journals of the last pass. entries: (slot, first journal row, rows); snapshots: (entry,
        rows, slot), at most one for an entry.
        """

class BufferKind(enum.Enum):
    F32 = 0

    ACT = 1

    INPUT = 2

    LOGITS = 3

    TAPS = 4

class Epilogue(enum.Enum):
    STORE = 0

    ADD = 1

    SWIGLU = 2

    GELU_TANH = 3

class Plan:
    def __init__(self, pool: ThreadPool, isa: str, f32: bool, max_rows: int) -> None: ...
    @property
    def max_rows(self) -> int: ...
    @property
    def scratch_bytes(self) -> int: ...
    def profile(self, on: bool) -> None: ...
    @property
    def op_times(self) -> list: ...
    def buffer(self, kind: BufferKind, width: int) -> int: ...
    def embed_packed(self, out: int, weight: object, scale: float = 1.0) -> None: ...
    def embed_table(self, out: int, table: object, scale: float = 1.0) -> None: ...
    def rope(
        self,
        cos: int,
        sin: int,
        inv_freq: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        scale: float = 1.0,
    ) -> None: ...
    def linear(
        self,
        input: int,
        out: int,
        weight: object,
        epilogue: Epilogue = Epilogue.STORE,
        norm: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)]
        | None = None,
        eps: float = 0.0,
        convert: bool = False,
        selected: bool = False,
        bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)]
        | None = None,
    ) -> None: ...
    def qkv_post(
        self,
        input: int,
        out: int,
        cos: int,
        sin: int,
        layer: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rotary_dim: int,
        interleaved: bool = False,
        q_norm: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)]
        | None = None,
        k_norm: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)]
        | None = None,
        eps: float = 0.0,
    ) -> None: ...
    def attention(
        self,
        input: int,
        out: int,
        layer: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        causal: bool = True,
        window: int = 0,
        softcap: float = 0.0,
        first_key: int = 0,
    ) -> None: ...
    def copy(self, input: int, out: int, width: int, offset: int = 0) -> None: ...
    def local_conv(
        self,
        input: int,
        out: int,
        delta: int,
        base: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)],
        group: int,
        offset: int = 0,
        add: bool = False,
        norm: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)]
        | None = None,
        eps: float = 0.0,
    ) -> None: ...
    def norm(
        self,
        input: int,
        out: int,
        weight: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        eps: float,
        add: bool = False,
    ) -> None:
        """out = (or +=) the RMSNorm of the first len(weight) columns of input."""

    def gate(self, input: int, out: int, width: int, offset: int = 0) -> None:
        """out *= sigmoid(columns [offset, offset + width) of input)."""

    def softcap(self, out: int, width: int, scale: float = 1.0, cap: float = 0.0) -> None:
        """out *= scale, then cap * tanh(out / cap) for a cap above 0."""

    def experts(
        self,
        input: int,
        router: int,
        out: int,
        gate_up: list,
        down: list,
        top_k: int,
        normalise: bool,
        norm: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        eps: float,
    ) -> None:
        """
        out += for each row of norm(input) the weighted sum of its top_k experts by the logits in `router`, ties to the
        lower expert. gate_up: gated Packed [inner, hidden] each; down: Packed [hidden, inner] each.
        """

    def short_conv(
        self,
        input: int,
        rows: int,
        layer: int,
        weight: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)],
        heads: int,
        head_dim: int,
    ) -> None: ...
    def delta_rule(
        self,
        input: int,
        rows: int,
        out: int,
        layer: int,
        channels: int,
        kernel: int,
        rate: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        dt_bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        norm: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        eps: float,
    ) -> None: ...
    def forward(
        self,
        cache: KVCache | None,
        positions: list[int]
        | Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        row_starts: list[int]
        | Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        tokens: list[int]
        | Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)]
        | None = None,
        block_tables: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order="C", device="cpu", writable=False)]
        | None = None,
        select: list[int]
        | Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)]
        | None = None,
        logits: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu")] | None = None,
        taps: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu")] | None = None,
        input: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)]
        | None = None,
        state: StateCache | None = None,
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)]
        | None = None,
        journal: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)]
        | None = None,
        snapshots: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order="C", device="cpu", writable=False)]
        | None = None,
        mirrors: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order="C", device="cpu", writable=False)]
        | None = None,
        copies: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order="C", device="cpu", writable=False)]
        | None = None,
    ) -> None:
        """
        state: of plans with a delta net. slots: of each sequence; journal: its first journal row, or -1 where its rows
        are committed as they come; snapshots: (sequence, rows, slot), ascending: the state behind so many of its rows
        goes to another slot as well.
        """

def measure_read_bandwidth(pool: ThreadPool, bytes: int, isa: str = "") -> float: ...
def measure_peak(
    pool: ThreadPool, isa: str = "", f32: bool = False, iterations: int = 2000000, weights: str = ""
) -> float:
    """1e9 operations a second of the instructions that multiply weights of this type (`weight_type` of a model)."""

class IdMap:
    """Target ids of the columns of a head over part of the vocabulary."""

    def __init__(self, ids: NDArray[numpy.int32], vocab_size: int) -> None:
        """ids: int32 [columns], strictly increasing. Raises ValueError."""

    def __len__(self) -> int: ...

class SamplingState:
    """Parameters and token counts of one choice of one request."""

    def __init__(
        self,
        vocab_size: int,
        prompt: Sequence[int],
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Sequence[tuple[int, float]] = [],
        banned: Sequence[int] = [],
        min_tokens: int = 0,
        allowed: Sequence[int] = [],
        bad_words: Sequence[Sequence[int]] = [],
        seed: int = 0,
        choice: int = 0,
    ) -> None:
        """
        logit_bias: (id, value) pairs. banned: ids masked while the output is shorter than min_tokens. allowed: the
        only ids that can be drawn; empty: all. bad_words: token sequences that the output must not hold. top_k 0,
        top_p 1 and min_p 0 are off. Raises ValueError for ids outside the vocabulary.
        """

    def commit(self, tokens: Sequence[int]) -> None:
        """Append tokens to the output."""

    def permitted(self, tokens: Sequence[int]) -> int:
        """How many of these could follow: up to the first that allowed, bad_words or banned rule out."""

    @property
    def masks(self) -> bool:
        """Whether any of them rules out ids for the next token."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output: the absolute position of the next draw."""

    @property
    def num_output(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def choice(self) -> int: ...

def argmax_rows(logits: NDArray[numpy.float32]) -> NDArray[numpy.int64]:
    """
    int64 [rows] of float32 [rows, columns]. Ties: lowest column; NaN never wins. A row of NaN and -inf alone gives
    its first -inf, or 0.
    """

def sample_rows(
    logits: NDArray[numpy.float32],
    states: Sequence[SamplingState],
    drafts: Sequence[Sequence[int]] = [],
    allowed: NDArray[numpy.int32] | None = None,
    pool: ThreadPool | None = None,
) -> list[int]:
    """
    The token drawn in every row. logits: float32 [rows, vocabulary], raw; state i owns len(drafts[i]) + 1 rows, of
    which row j sees drafts 1..j. Empty drafts: one row each. allowed: int32 [rows, ceil(vocabulary / 32)], bit i of
    a row permits id i. pool: its threads share the rows out where that pays. Order: mask, allowed ids, bad words,
    min_tokens, logit_bias, penalties, temperature, min_p, top_k, top_p. -1 where masks leave nothing.
    """

def draft_rows(
    logits: NDArray[numpy.float32],
    states: Sequence[SamplingState],
    counts: Sequence[int],
    id_map: IdMap | None = None,
    allowed: NDArray[numpy.int32] | None = None,
    pool: ThreadPool | None = None,
) -> list[int]:
    """
    Tokens (target ids) of a block drafter, drawn with the target's noise: state i owns counts[i] rows, of which row
    j sees the tokens drawn in the rows before. pool: as in sample_rows.
    """

def draft_rows_with_probs(
    logits: NDArray[numpy.float32],
    states: Sequence[SamplingState],
    counts: Sequence[int],
    id_map: IdMap | None = None,
    allowed: NDArray[numpy.int32] | None = None,
) -> tuple[list[int], NDArray[numpy.float32]]:
    """
    As draft_rows, with the drafter's own noise, and the distributions float32 [rows, columns] drawn from.
    """

def probs_rows(
    logits: NDArray[numpy.float32],
    states: Sequence[SamplingState],
    drafts: Sequence[Sequence[int]] = [],
    allowed: NDArray[numpy.int32] | None = None,
) -> NDArray[numpy.float32]:
    """
    The distributions that sample_rows draws from, float32 [rows, vocabulary].
    """

def reject_rows(
    logits: NDArray[numpy.float32],
    states: Sequence[SamplingState],
    drafts: Sequence[Sequence[int]],
    draft_probs: NDArray[numpy.float32] | None = None,
    draft_ids: NDArray[numpy.int32] | None = None,
    allowed: NDArray[numpy.int32] | None = None,
) -> list[tuple[int, int]]:
    """
    Rejection sampling: per state (accepted drafts, next token, -1 as in sample_rows). Rows as there. draft_probs:
    float32 [drafts of all states, m], None = each draft was certain. draft_ids: int32 [1 or drafts, m], the ids of
    its columns; None = column is id.
    """

def reject_block(
    target_probs: NDArray[numpy.float32],
    drafts: Sequence[int],
    uniforms: Sequence[float],
    draft_probs: NDArray[numpy.float32] | None = None,
    draft_ids: NDArray[numpy.int32] | None = None,
) -> tuple[int, NDArray[numpy.float32]]:
    """
    The rule behind reject_rows for one block with given distributions [drafts + 1, vocabulary] and uniforms:
    (accepted drafts, float32 [vocabulary] distribution of the next token).
    """

def logprobs_rows(
    logits: NDArray[numpy.float32], rows: Sequence[int], ids: Sequence[int], top_n: int = 0
) -> tuple[NDArray[numpy.float32], NDArray[numpy.int32], NDArray[numpy.int32], NDArray[numpy.float32]]:
    """
    Raw log-softmax of ids[i] in row rows[i] and of the top_n best ids there: (logprobs float32 [n], ranks int32
    [n], ids int32 [n, top_n], logprobs float32 [n, top_n]); id -1 where a row has fewer ids above -inf.
    """

def philox4x32_10(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """The generator of all noise: 4 words of 32 bits."""

def gumbel_noise(seed: int, choice: int, position: int, ids: Sequence[int]) -> list[float]:
    """The noise of coupled sampling."""

def select_sampling_isa(name: str = "") -> str:
    """
    Force a path of the sampler for tests (all give the same bits); '' = the one it started with. Returns its name.
    """

def dequantize_f32(
    format: str,
    src: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)],
    dst: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu")],
) -> None:
    """
    Convert stored blocks (uint8 [bytes]) into dst (float32 [elements]); the GIL is released.
    """

def dequantize_bf16(
    format: str,
    src: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)],
    dst: Annotated[NDArray[numpy.uint16], dict(shape=(None,), order="C", device="cpu")],
) -> None:
    """
    Convert stored blocks (uint8 [bytes]) into dst (bfloat16 bits as uint16 [elements]); the GIL is released.
    """

class MarkovHead:
    """DSpark's sequential head over the slots of draft blocks."""

    def __init__(
        self,
        pool: ThreadPool,
        isa: str,
        f32: bool,
        w1: NDArray[numpy.float32] | NDArray[numpy.uint16],
        w2: Packed,
        inner: NDArray[numpy.float32] | None = None,
        recurrent: bool = False,
        confidence: NDArray[numpy.float32] | None = None,
        has_confidence: bool = False,
        max_sequences: int = 512,
    ) -> None:
        """
        w1: float32 or uint16 (bfloat16 bits) [vocabulary, r]. w2: Packed [columns, r]. inner: float32 [r, r] for a
        gated head, [3 r, 2 r] for a recurrent one. confidence: float32 [r], the weights of the token.
        """

    @property
    def features(self) -> int:
        """Columns of what `draft` takes as features."""

    def draft(
        self,
        logits: NDArray[numpy.float32],
        features: NDArray[numpy.float32],
        anchors: Sequence[int],
        counts: Sequence[int],
        states: Sequence[SamplingState],
        id_map: IdMap | None = None,
        probs: bool = False,
    ) -> tuple[list[int], list[float], NDArray[numpy.float32] | None, list[float]]:
        """
        Draw all slots. Rows are ordered by slot, then by sequence; counts never rise. logits: float32 [slots,
        columns], biased in place. Returns (target ids, confidence logits or [], float32 [slots, columns]
        distributions or None, of a head with confidence the logit of each slot's likeliest token or []); with
        probs, drawn with the drafter's own noise, else with the target's.
        """

class CandidateSelector:
    """DFlash 2's walk through the best tokens of each slot."""

    def __init__(
        self,
        predecessors: NDArray[numpy.float32] | NDArray[numpy.uint16],
        successors: NDArray[numpy.float32] | NDArray[numpy.uint16],
        top_k: int,
    ) -> None:
        """
        predecessors, successors: float32 or uint16 (bfloat16 bits) [vocabulary, r].
        """

    def draft(
        self,
        logits: NDArray[numpy.float32],
        features: NDArray[numpy.float32],
        anchors: Sequence[int],
        counts: Sequence[int],
        states: Sequence[SamplingState],
        id_map: IdMap | None = None,
        probs: bool = False,
    ) -> tuple[list[int], NDArray[numpy.int32], NDArray[numpy.float32], NDArray[numpy.float32] | None]:
        """
        Draw all slots, one sequence after the other. logits: float32 [slots, columns], those of the whole vocabulary
        or of id_map's ids; features: float32 [slots, r]. Returns (tokens, ids int32 [slots, top_k] in increasing
        order, their scores float32, and with probs the float32 distributions drawn from with the drafter's own
        noise, else None).
        """

def draft_step(
    logits: NDArray[numpy.float32],
    states: Sequence[SamplingState],
    drafts: Sequence[Sequence[int]],
    id_map: IdMap | None = None,
    probs: NDArray[numpy.float32] | None = None,
) -> list[int]:
    """
    The next draft of each sequence (target ids). logits: float32 [sequences, columns], seeing drafts[i] behind the
    committed tokens. probs: float32 like logits, to be filled with the distributions drawn from with the drafter's
    own noise; None: drawn with the target's.
    """

class Acceptance:
    """Conditional acceptance per position, with exponential forgetting: tries and hits of the drafts so far."""

    def __init__(self) -> None: ...
    @property
    def tries(self) -> list[float]:
        """Drafts that were put to the test, per position."""

    @property
    def hits(self) -> list[float]:
        """Those of them that were kept."""

    def observe(self, drafted: int, accepted: int, forget: float = 1.0) -> None:
        """A draft of `drafted` tokens of which the first `accepted` were kept."""

    def fade(self, share: float) -> None:
        """Keep this share of the weight of what was seen."""

    def expect(self, first: int, chances: Sequence[float], forget: float = 1.0) -> None:
        """
        Drafts behind the first `first`, all of which were kept, that were not put to the test: counted by their
        calibrated chances, so that what was left out because it was doubtful does not look good.
        """

    def survival(self, length: int, prior: Acceptance | None = None) -> list[float]:
        """Chance that each of `length` positions is kept; positions never tried follow the one before."""

class DraftMemory:
    """What requests showed of their drafts, by their numbers, and lengths that are kept for a few steps."""

    def __init__(self, forget: float, forget_overall: float, trust: float, forget_trust: float) -> None:
        """
        Weights of the past of a request and of all, at each draft; drafts for which chances are trusted as they are,
        and the weight of those before at each.
        """

    @property
    def overall(self) -> Acceptance:
        """Of all requests."""

    @property
    def promised(self) -> float:
        """Drafts that were to be kept by their chances."""

    @property
    def kept(self) -> float:
        """Those that were."""

    @property
    def trust(self) -> float:
        """Of what chances promise, what came."""

    def of(self, request: int) -> Acceptance | None:
        """Of one request; None: nothing."""

    def __len__(self) -> int:
        """Entries of requests."""

    def survivals(self, requests: Sequence[int], limits: Sequence[int]) -> list[list[float]]:
        """Chance of each of limits[i] drafts of each request to be kept together with those before it."""

    def keep(
        self, requests: Sequence[int], limits: Sequence[int], rows: int, margin: float, like: float, steps: int
    ) -> None:
        """
        Lengths were chosen for these, and are good for so many steps, as long as no survival changes by more than
        `like`.
        """

    def drop(self) -> None:
        """Not for any more."""

    def holds(self, requests: Sequence[int], limits: Sequence[int], rows: int, margin: float) -> bool:
        """Whether those lengths are good for this step, which counts as one of the steps. If not, they are dropped."""

    def cut(
        self,
        requests: Sequence[int],
        drafts: Sequence[list[int]],
        chances: Sequence[Sequence[float]],
        lengths: Sequence[int],
    ) -> None:
        """Cut drafts, in place, to lengths, and remember what their chances promise and what was left out."""

    def trim(
        self,
        requests: Sequence[int],
        drafts: Sequence[list[int]],
        chances: Sequence[Sequence[float]],
        rows: int,
        verify: CostCurve,
        draft: CostCurve,
        few: float,
    ) -> bool:
        """
        `cut` to what is worth verifying (see allotment.admitted) beside `rows` rows, where `few` steps have shown what
        such drafts take; else False, and nothing is done.
        """

    def leave_out(self, request: int, chances: Sequence[float]) -> None:
        """Drafts with these chances were not verified."""

    def observe(self, request: int, drafted: int, accepted: int) -> None:
        """What became of a draft."""

    def finish(self, request: int) -> None:
        """The request has ended."""

class Pace:
    """What curves of costs share; see cost_table.Pace."""

    def __init__(
        self, knots: Sequence[int], floor: Sequence[float], shapes: Sequence[Sequence[float]], any_level: float
    ) -> None:
        """
        knots: rows, ascending. floor: logarithms of seconds there of a curve of which nothing is known. shapes:
        covariance of curves around it, without their level, whose variance is any_level.
        """

class CostCurve:
    """See cost_table.CostCurve."""

    changes: int

    def __init__(self, pace: Pace) -> None: ...
    @property
    def known(self) -> bool:
        """Whether anything was observed."""

    @property
    def medians(self) -> dict[int, float]:
        """Rows -> seconds, of the knots that were learned."""

    @property
    def row_seconds(self) -> float:
        """What a row costs in a pass of many."""

    def observe(self, rows: int, seconds: float) -> None:
        """
        The first step of a size does not count: it touches memory first. Of sizes that are known well enough, one in a
        few does: the better they are known, the fewer.
        """

    def start(self, values: Sequence[float], cov: Sequence[Sequence[float]], knots: Sequence[int]) -> None:
        """
        Begin with these logarithms of seconds at the knots and their covariance; knots: places of those that an earlier
        run has shown.
        """

    def seconds(self, rows: int) -> float:
        """At the pace of late; in passes of one row as long as nothing was observed."""

    def several(self, rows: int, more: int) -> list[float]:
        """The same of rows, rows + 1, ..., rows + more."""

    def settled(self, rows: int, steps: float = 12.0) -> bool:
        """Whether that many steps showed what passes of so many rows take."""

def best_lengths(
    survivals: Sequence[Sequence[float]],
    rows: float,
    seconds: Sequence[float],
    prices: Sequence[float],
    found: Sequence[bool],
    margin: float,
) -> tuple[list[int], float]:
    """See allotment.best_lengths. seconds[n]: of a pass of rows + n. prices[n]: of making n drafts."""

def admitted(survivals: Sequence[Sequence[float]], rows: float, seconds: Sequence[float], paid: float) -> list[int]:
    """See allotment.admitted. seconds[n]: of a pass of rows + n."""

def likeliest(survivals: Sequence[Sequence[float]], drafts: int) -> tuple[list[int], float]:
    """See allotment.likeliest."""

def survivals_of(chances: Sequence[Sequence[float]], trust: float = 1.0) -> list[list[float]]:
    """See allotment.survivals_of."""

def slot_worths(
    worths: Sequence[float],
    survivals: Sequence[Sequence[float]],
    seconds: Sequence[float],
    token_seconds: float,
    steps: float,
) -> list[float]:
    """See allotment.slot_worths. seconds[n]: of a pass with n drafts."""

def alike(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]], by: float) -> bool:
    """Whether two lists of rows differ by no more in any place."""

def calibrated(
    logits: Sequence[float],
    own: Sequence[float],
    mix: tuple[float, float, float] | None,
    temperatures: Sequence[float],
) -> list[float]:
    """See Calibration.chances. Of no temperatures, 1; of too few, the last one."""

def rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """See cost_table.rising."""

def draft_candidates(
    logits: NDArray[numpy.float32],
    states: Sequence[SamplingState],
    counts: Sequence[int],
    top: int,
    id_map: IdMap | None = None,
) -> tuple[NDArray[numpy.int32], NDArray[numpy.float32]]:
    """
    The best tokens of each slot of a block, with the target's noise: (ids int32 [rows, top], log-chances float32
    [rows, top]), best first. State i owns counts[i] rows; the first token of a row is the one that draft_rows draws
    there. Where a row permits fewer, id -1 with log-chance -inf.
    """

def walk_rows(
    logits: NDArray[numpy.float32],
    states: Sequence[SamplingState],
    drafts: Sequence[Sequence[int]],
    parents: Sequence[Sequence[int]],
) -> list[tuple[list[int], list[int]]]:
    """
    Follows the target's draws down trees of drafts. State i owns len(drafts[i]) + 1 rows; row j + 1 is draft j, whose
    parent is row parents[i][j] <= j. Per state: (rows visited, from 0 on; the token drawn in each). The draw of a row
    sees the drafts on the way to it, with the bits of sample_rows.
    """
