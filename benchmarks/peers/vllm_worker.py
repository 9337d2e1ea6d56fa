"""vLLM's side of `benchmarks.peers.vllm`: a program that runs in vLLM's own environment and needs nothing of Paceline.

Reads one JSON request a line from standard input and writes one JSON answer a line to the standard output it was
started with; everything that vLLM prints goes to standard error. The first line it writes says that the model is ready.
Started with `python -P`: the folder of this file holds a `vllm.py` that must not shadow the package.
"""

import json
import os
import sys
import time


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value):
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    started = time.perf_counter()
    import torch
    import vllm

    settings = json.loads(sys.argv[1])
    llm = vllm.LLM(disable_log_stats=False, **settings)
    answer(
        {
            "start_up_s": time.perf_counter() - started,
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }
    )
    for line in sys.stdin:
        answer(generate(vllm, llm, json.loads(line)))


def generate(vllm, llm, request):
    """All prompts at once: seconds of the whole call, and of each request from its first token to its last."""
    params = [
        vllm.SamplingParams(
            temperature=request["temperature"], max_tokens=tokens, ignore_eos=request["ignore_eos"], detokenize=True
        )
        for tokens in request["max_tokens"]
    ]
    before = counters(llm)
    begin = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in request["prompts"]], params, use_tqdm=False)
    wall = time.perf_counter() - begin
    return {
        "wall_s": wall,
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        "decode_s": [output.metrics.last_token_ts - output.metrics.first_token_ts for output in outputs],
        "spec_decode": {name: value - before[name] for name, value in counters(llm).items()},
    }


def counters(llm):
    """vLLM's counters of speculative decoding since the start; all 0 without speculation."""
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    out = dict.fromkeys(names, 0)
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:spec_decode_")
        if name in out and name != metric.name:
            out[name] += int(metric.value)
    return out


if __name__ == "__main__":
    main()
