"""Pack a model and prompts for ``quarter_hour`` on a machine that has neither tokenizer files nor a network."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from paceline.bench.datasets import PACKAGED, load_dataset
from paceline.tokenizer import Tokenizer, load_tokenizer

from .corpus import say
from .errors import TrainError
from .loading import choose_mask_token, open_model
from .package import MIB, PackedPrompts, split_bundle
from .prompts import read_prompts

WEIGHTS = (".gguf", ".safetensors", ".json")


def encode_file(path: Path, tokenizer: Tokenizer, longest: int, limit: int | None) -> PackedPrompts:
    """Prompts of a file as ids; those beyond ``longest`` tokens are left out."""
    domains, tokens = [], []
    for prompt in read_prompts(path)[:limit]:
        ids = tokenizer.encode_chat(list(prompt.messages))
        if len(ids) <= longest:
            domains.append(prompt.domain)
            tokens.append(ids)
    return PackedPrompts(domains, tokens)


def encode_sets(names: list[str], count: int, tokenizer: Tokenizer) -> PackedPrompts:
    """The first ``count`` prompts of each benchmark set or file."""
    domains, tokens = [], []
    for name in names:
        for prompt in load_dataset(name, count):
            domains.append(Path(name).stem)
            tokens.append(prompt.encode(tokenizer))
    return PackedPrompts(domains, tokens)


def model_files(path: Path) -> list[tuple[str, Path]]:
    """Names in the bundle and paths of what a checkpoint consists of."""
    files = [path] if path.is_file() else sorted(f for f in path.iterdir() if f.suffix in WEIGHTS)
    if not files:
        raise TrainError(f"{path}: no model files to pack")
    return [(f"target/{f.name}", f) for f in files]


def pack(
    model: str,
    prompts: Path,
    held: list[str],
    out: Path,
    *,
    held_count: int,
    longest: int,
    limit: int | None,
    part: int,
) -> list[Path]:
    """Write the parts; returns their folders."""
    with open_model(model) as checkpoint, tempfile.TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(checkpoint)
        train, test = encode_file(prompts, tokenizer, longest, limit), encode_sets(held, held_count, tokenizer)
        if not train.tokens or not test.tokens:
            raise TrainError(f"{prompts}: no prompt of at most {longest} tokens, or no prompt to measure on")
        used = {t for ids in (*train.tokens, *test.tokens) for t in ids}
        mask = choose_mask_token(tokenizer, used, checkpoint.config["vocab_size"])
        train.save(Path(folder) / "prompts.npz")
        test.save(Path(folder) / "held.npz")
        (Path(folder) / "about.json").write_text(json.dumps({"model": model, "mask_token": mask}))
        files = [(f.name, f) for f in sorted(Path(folder).iterdir())]
        parts = split_bundle([*files, *model_files(Path(checkpoint.path))], out, part)
    size = sum(f.stat().st_size for p in parts for f in p.iterdir())
    say(f"{len(train.tokens)} prompts and {model}: {len(parts)} parts in {out}, {size / MIB:.1f} MiB together")
    return parts


def main(arguments: list[str]) -> None:
    p = argparse.ArgumentParser(prog="paceline.train.pack_run", description=__doc__)
    p.add_argument("--model", default="smollm2-135m")
    p.add_argument("--prompts", type=Path, required=True, help="prompts, JSON lines")
    p.add_argument("--held-out", nargs="+", default=sorted(PACKAGED), help="benchmark sets or files to measure on")
    p.add_argument("--held-count", type=int, default=20)
    p.add_argument("--max-prompt", type=int, default=384)
    p.add_argument("--limit", type=int)
    p.add_argument("--part-mib", type=float, default=40.0)
    p.add_argument("--out", type=Path, required=True)
    o = p.parse_args(arguments)
    pack(
        o.model,
        o.prompts,
        o.held_out,
        o.out,
        held_count=o.held_count,
        longest=o.max_prompt,
        limit=o.limit,
        part=int(o.part_mib * MIB),
    )


if __name__ == "__main__":
    main(sys.argv[1:])
