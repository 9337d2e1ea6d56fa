"""Kernels and plan interpreter of Paceline."""

from collections.abc import Sequence
import enum
from typing import Annotated

import numpy
from numpy.typing import NDArray

KEYS_PER_BLOCK: int = 16

def best_isa() -> str: ...
def select_isa(name: str = "") -> str: ...

class ThreadPool:
    def __init__(self, threads: int) -> None: ...
    @property
    def size(self) -> int: ...

class Arena:
    def __init__(self, capacity: int) -> None: ...
    @property
    def used(self) -> int: ...

class Packed:
    def __init__(self, arena: Arena, n: int, k: int, f32: bool, gated: bool = False) -> None: ...
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
    def __init__(self, layers: int, kv_heads: int, head_dim: int, blocks: int, f32: bool) -> None: ...
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
    ) -> None: ...
    def copy(self, input: int, out: int, width: int, offset: int = 0) -> None: ...
    def forward(
        self,
        cache: KVCache | None,
        positions: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        row_starts: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)]
        | None = None,
        block_tables: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order="C", device="cpu", writable=False)]
        | None = None,
        select: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)]
        | None = None,
        logits: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu")] | None = None,
        taps: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu")] | None = None,
        input: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)]
        | None = None,
    ) -> None: ...

def measure_read_bandwidth(pool: ThreadPool, bytes: int, isa: str = "") -> float: ...
def measure_peak(pool: ThreadPool, isa: str = "", f32: bool = False, iterations: int = 2000000) -> float: ...

class IdMap:
    def __init__(
        self,
        ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        vocab_size: int,
    ) -> None: ...
    def __len__(self) -> int: ...

class SamplingState:
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
        seed: int = 0,
        choice: int = 0,
    ) -> None: ...
    def commit(self, tokens: Sequence[int]) -> None: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_output(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def choice(self) -> int: ...

def argmax_rows(
    logits: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)],
) -> object: ...
def sample_rows(
    logits: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)],
    states: Sequence[SamplingState],
    drafts: Sequence[Sequence[int]] = [],
    allowed: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order="C", device="cpu", writable=False)]
    | None = None,
) -> list[int]: ...
def draft_rows(
    logits: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)],
    states: Sequence[SamplingState],
    counts: Sequence[int],
    id_map: IdMap | None = None,
    allowed: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order="C", device="cpu", writable=False)]
    | None = None,
    with_probs: bool = False,
) -> object: ...
def probs_rows(
    logits: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)],
    states: Sequence[SamplingState],
    drafts: Sequence[Sequence[int]] = [],
    allowed: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order="C", device="cpu", writable=False)]
    | None = None,
) -> object: ...
def reject_rows(
    logits: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)],
    states: Sequence[SamplingState],
    drafts: Sequence[Sequence[int]],
    draft_probs: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)]
    | None = None,
    draft_ids: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order="C", device="cpu", writable=False)]
    | None = None,
    allowed: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order="C", device="cpu", writable=False)]
    | None = None,
) -> list[tuple[int, int]]: ...
def reject_block(
    target_probs: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)],
    drafts: Sequence[int],
    uniforms: Sequence[float],
    draft_probs: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)]
    | None = None,
    draft_ids: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order="C", device="cpu", writable=False)]
    | None = None,
) -> object: ...
def logprobs_rows(
    logits: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)],
    rows: Sequence[int],
    ids: Sequence[int],
    top_n: int = 0,
) -> object: ...
def philox4x32_10(counter: Sequence[int], key: Sequence[int]) -> list[int]: ...
def gumbel_noise(seed: int, choice: int, position: int, ids: Sequence[int]) -> list[float]: ...
def select_sampling_isa(name: str = "") -> str: ...
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
