"""Passes behind a long context: an int8 key/value cache against a bf16 one, measured in turns.

python -m benchmarks.long_context --contexts 2048,4096,8000 --rows 1,4,8
"""

from __future__ import annotations

import argparse
import statistics
from typing import cast

from paceline import LLM
from paceline.dtypes import DEFAULT_QUANTIZATION, QUANTIZATIONS, KVCacheDtype

KINDS = ("bfloat16", "int8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default=DEFAULT_QUANTIZATION)
    parser.add_argument("--contexts", default="128,2048,4096,8000")
    parser.add_argument("--rows", default="1,4,8")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    contexts, rows = ([int(n) for n in text.split(",")] for text in (options.contexts, options.rows))
    llms = {
        kind: LLM(
            options.model,
            quantization=options.quantization,
            kv_cache_dtype=cast(KVCacheDtype, kind),
            speculative_config=None,
        )
        for kind in KINDS
    }
    for kind, llm in llms.items():
        llm.time_forward(1, max(contexts))  # fills the cache
        print(f"{kind}: {llm.info()['kv_bytes_per_token']:,} bytes a token, {llm.model.weight_bytes:,} of weights")
    for context in contexts:
        for count in rows:
            times: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for _ in range(options.repeats):
                for kind, llm in llms.items():
                    times[kind].append(llm.time_forward(count, context))
            full, half = (1e3 * statistics.median(times[kind]) for kind in KINDS)
            ratio = statistics.median(a / b for a, b in zip(*times.values(), strict=True))
            print(f"context {context:5}, {count:2} rows: bf16 {full:6.2f} ms, int8 {half:6.2f} ms, {ratio:.2f}x")


if __name__ == "__main__":
    main()
