"""Names that users of other engines try first are answered with the one that stands for them."""

from __future__ import annotations

import pytest

from paceline.cli.app import app
from paceline.cli.hints import COMMANDS, OPTIONS, BenchGroup


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ("serve --model x", "No such option: --model; the model is an argument: paceline serve MODEL"),
        ("serve --gpu-memory-utilization 0.9", "--gpu-memory-utilization; use --kv-cache-space"),
        ("generate hi --gpu-memory-utilization 0.9", "; leave it out: memory is taken as it is needed"),
        ("generate hi -ngl 99", "No such option: -ngl; leave it out: models run on the processor"),
        ("serve x -ngl=99", "No such option: -ngl; leave it out"),
        ("bench -md x", "No such option: -md; use --speculative-config"),
        ("generate hi --n-predict 5", "--n-predict; use --max-tokens"),
        ("bench --n-predict 5", "--n-predict; use --output-len"),
        ("bench --dataset-name x", "--dataset-name; use --dataset"),
        ("bench accuracy --temp 1", "--temp; use --temperature"),
        ("bench kernels --bogus", "No such option: --bogus"),
        ("tune --max-concurrency 2", "--max-concurrency; use --concurrency"),
        ("generate hi --max-token 5", "Possible options: --max-model-len, --max-tokens"),
        ("chat smollm2-135m", "argument(s) (smollm2-135m); the model is an option: --model MODEL"),
        ("serve -np 4", "No such option: -np; use --max-num-seqs"),
        ("generate hi -np 2", "No such option: -np; leave it out"),
        ("serve -t 4", "No such option: -t; use --threads"),
        ("serve --seed 1", "--seed; leave it out: a request brings its own seed"),
        ("serve --revision main", "org/name@REVISION"),
        ("serve --load-format auto", "it follows from the files"),
        ("serve --hf-token x", "HF_TOKEN"),
        ("serve --lora-modules a=b", "there are no adapters"),
        ("serve --jinja", "chat templates are Jinja"),
        ("generate hi --grammar x", "structured_outputs"),
        ("list", "No such command 'list'; use 'drafters'"),
        ("run hi", "No such command 'run'; use 'generate'"),
        ("bench serve", "No such command 'serve'; use 'paceline bench --base-url URL'"),
        ("serv", "No such command 'serv'. Did you mean 'serve'?"),
    ],
)
def test_wrong_names(paceline, argv, told):
    ran = paceline(*argv.split())
    assert ran.code == 2 and not ran.out
    assert told in ran.err


def test_what_is_named_exists():
    from typer.main import get_command

    root = get_command(app)
    commands = {**root.commands, **root.commands["bench"].commands, "bench": root.commands["bench"]}
    options = {spelled for command in commands.values() for p in command.params for spelled in p.opts}
    assert {name for wanted, _ in OPTIONS.values() for name in wanted} <= options
    assert set(COMMANDS.values()) <= set(root.commands) and not set(COMMANDS) & set(root.commands)
    assert not set(BenchGroup.known) & set(root.commands["bench"].commands)
    for said in BenchGroup.known.values():
        assert said.startswith("paceline bench --") and said.split()[2] in options
