"""Command-line options that several commands share, and what they are turned into."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline.dtypes import DEFAULT_KV_CACHE_DTYPE, DEFAULT_QUANTIZATION, KVCacheDtype, Quantization

if TYPE_CHECKING:
    from paceline.sampling_params import SamplingParams

Dtype = Literal["auto", "bfloat16", "float32"]
DEFAULT_MODEL = "smollm2-135m"

NO_DRAFTS = {"method": "none"}  # a speculative config that stands for plain decoding

MODEL_PANEL = "Model"
SAMPLING_PANEL = "Sampling"
SPECULATION_PANEL = "Speculation"
OUTPUT_PANEL = "Output"

MODEL_HELP = "Model: a known name (smollm2-135m), a folder, a .gguf file, or a Hugging Face id (org/name)."


ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
ModelOption = Annotated[
    str,
    typer.Option("--model", "-m", metavar="MODEL", help=MODEL_HELP, rich_help_panel=MODEL_PANEL),
]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="Weights in memory.", rich_help_panel=MODEL_PANEL)]
QuantizationOption = Annotated[
    Quantization,
    typer.Option(
        "--quantization",
        help="Weights in memory: auto = as a quantised file holds them (others as --dtype says), none = as --dtype "
        "says, or convert them.",
        rich_help_panel=MODEL_PANEL,
    ),
]
KVCacheDtypeOption = Annotated[
    KVCacheDtype,
    typer.Option(
        "--kv-cache-dtype",
        help="Keys and values in memory: auto = as --dtype says, int8 = half of that, with a scale per token and head.",
        rich_help_panel=MODEL_PANEL,
    ),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(
        "--threads",
        min=1,
        metavar="N",
        help="Threads; default: the physical cores that this process may use.",
        rich_help_panel=MODEL_PANEL,
    ),
]
MaxModelLenOption = Annotated[
    int | None,
    typer.Option(
        "--max-model-len",
        min=1,
        metavar="N",
        help="Longest context (prompt and answer) in tokens; default: what the model allows.",
        rich_help_panel=MODEL_PANEL,
    ),
]
SpeculativeConfigOption = Annotated[
    str | None,
    typer.Option(
        "--speculative-config",
        metavar="JSON|FILE",
        help="""What drafts, as vLLM writes it: '{"method": "ngram", "num_speculative_tokens": 7}', """
        "or a file with that, as `paceline tune` writes it. "
        "Default: the drafter that belongs to the model, else prompt lookup.",
        rich_help_panel=SPECULATION_PANEL,
    ),
]
NumSpeculativeTokensOption = Annotated[
    int | None,
    typer.Option(
        "--num-speculative-tokens",
        "-k",
        min=0,
        metavar="K",
        help="Tokens drafted per step, fixed; 0 decodes plainly. Default: as many as pay, chosen at each step, up to "
        "the drafter's number.",
        rich_help_panel=SPECULATION_PANEL,
    ),
]
NoSpeculationOption = Annotated[
    bool,
    typer.Option(
        "--no-speculation",
        help="Decode plainly, and load no drafter. The text is the same either way.",
        rich_help_panel=SPECULATION_PANEL,
    ),
]
TemperatureOption = Annotated[
    float,
    typer.Option("--temperature", "-t", min=0.0, metavar="T", help="0 is greedy.", rich_help_panel=SAMPLING_PANEL),
]
TopPOption = Annotated[
    float,
    typer.Option(
        "--top-p",
        metavar="P",
        help="Keep the likeliest tokens that sum to P, above 0 and at most 1.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
TopKOption = Annotated[
    int,
    typer.Option(
        "--top-k",
        min=0,
        metavar="K",
        help="Keep the K likeliest tokens; 0 keeps all.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
MinPOption = Annotated[
    float,
    typer.Option(
        "--min-p",
        min=0.0,
        max=1.0,
        metavar="P",
        help="Drop tokens below P times the likeliest one.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        "--seed",
        metavar="N",
        help="Same seed, same text, with or without speculation. Default: a random one.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
RaceSeedOption = Annotated[
    int | None,
    typer.Option(
        "--seed",
        metavar="N",
        help="Seed of all arms, so that they draw the same text; needed with a temperature above 0.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
RepetitionPenaltyOption = Annotated[
    float,
    typer.Option(
        "--repetition-penalty",
        metavar="R",
        help="Above 0; above 1 discourages tokens of the prompt and the answer so far.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
PresencePenaltyOption = Annotated[
    float,
    typer.Option(
        "--presence-penalty",
        min=-2.0,
        max=2.0,
        metavar="A",
        help="Subtracted once from a token the answer already holds.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
FrequencyPenaltyOption = Annotated[
    float,
    typer.Option(
        "--frequency-penalty",
        min=-2.0,
        max=2.0,
        metavar="A",
        help="Subtracted for each time the answer holds a token.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
StopOption = Annotated[
    list[str] | None,
    typer.Option(
        "--stop",
        metavar="TEXT",
        help="End before this text; may be given several times.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
MinTokensOption = Annotated[
    int,
    typer.Option(
        "--min-tokens",
        min=0,
        metavar="N",
        help="No end before this many tokens.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
IgnoreEosOption = Annotated[
    bool,
    typer.Option(
        "--ignore-eos",
        help="Go on past the model's end-of-text token, up to the limit.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What a command needs to open a model."""

    model: str = DEFAULT_MODEL
    dtype: Dtype = "auto"
    threads: int | None = None
    max_model_len: int | None = None
    speculative_config: dict[str, Any] | None = None
    speculation: bool = True
    quantization: Quantization = DEFAULT_QUANTIZATION
    max_num_seqs: int | None = None
    kv_cache_dtype: KVCacheDtype = DEFAULT_KV_CACHE_DTYPE


def parse_speculative_config(text: str | None) -> dict[str, Any] | None:
    """`--speculative-config` as a dict, checked before a model is loaded. The text is JSON, or names a file (with or
    without a leading @) that holds it; `{"method": "none"}` is plain decoding."""
    if text is None:
        return None
    from paceline.speculation.config import SpeculativeConfig, SpeculativeConfigError

    text, where = _read_config(text)
    if _is_no_drafts(text):
        return dict(NO_DRAFTS)
    try:
        SpeculativeConfig.parse(text)
    except SpeculativeConfigError as error:
        message = f"{where}: {error}" if where else str(error)
        raise typer.BadParameter(message, param_hint="--speculative-config") from None
    return json.loads(text)


def _read_config(text: str) -> tuple[str, str]:
    """(JSON, the file it came from or "")."""
    name = text.removeprefix("@")
    if text.startswith("@") or (not text.lstrip().startswith("{") and os.path.isfile(name)):
        try:
            with open(name, encoding="utf-8") as file:
                return file.read(), name
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8 text"
            raise typer.BadParameter(f"{name}: {reason}", param_hint="--speculative-config") from None
    return text, ""


def _is_no_drafts(text: str) -> bool:
    try:
        return json.loads(text) == NO_DRAFTS
    except (ValueError, RecursionError):
        return False


def check_speculation(no_speculation: bool, num_speculative_tokens: int | None, config: str | None) -> None:
    """Refuse options that contradict each other rather than let one win silently."""
    if not no_speculation:
        return
    if num_speculative_tokens:
        raise typer.BadParameter(
            f"contradicts --num-speculative-tokens {num_speculative_tokens}; give one of them",
            param_hint="--no-speculation",
        )
    if config is not None:
        raise typer.BadParameter("contradicts --speculative-config; give one of them", param_hint="--no-speculation")


def parse_ints(text: str, option: str, *, least: int, other: str = "") -> list[int]:
    """`"0,7"` -> [0, 7]: whole numbers >= `least`, no duplicates, in the order given. other: what the option takes
    besides, for messages."""
    values: list[int] = []
    for part in text.split(","):
        try:
            value = int(part)
        except ValueError:
            raise typer.BadParameter(f"{part!r} in {text!r} is not a whole number{other}", param_hint=option) from None
        if value < least:
            raise typer.BadParameter(f"{value} in {text!r} is below {least}", param_hint=option)
        if value in values:
            raise typer.BadParameter(f"{value} appears twice in {text!r}", param_hint=option)
        values.append(value)
    return values


def parse_lengths(text: str, option: str) -> list[int | Literal["auto"]]:
    """`"0,7,auto"` -> [0, 7, "auto"]: draft lengths, `auto` being the one that is chosen at each step."""
    parts = [part.strip() for part in text.split(",")]
    if parts.count("auto") > 1:
        raise typer.BadParameter(f"auto appears twice in {text!r}", param_hint=option)
    fixed = [part for part in parts if part != "auto"]
    numbers: list[int | Literal["auto"]] = []
    numbers += parse_ints(",".join(fixed), option, least=0, other=" or auto") if fixed else []
    if "auto" in parts:
        numbers.insert(parts.index("auto"), "auto")
    return numbers


def parse_shares(text: str, option: str) -> list[float]:
    """`"0.86,0.74"` -> [0.86, 0.74]."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers", param_hint=option) from None


def sampling_params(**fields: Any) -> SamplingParams:
    """`SamplingParams` from option values; one that was not given (`None`) keeps the class's default."""
    from paceline.sampling_params import SamplingParams, SamplingParamsError

    try:
        return SamplingParams(**{name: value for name, value in fields.items() if value is not None})
    except SamplingParamsError as error:
        field = str(error).partition("=")[0]
        hint = "--" + field.replace("_", "-") if field in fields else None
        raise typer.BadParameter(str(error), param_hint=hint) from None


def count(number: int, noun: str) -> str:
    """`count(1, "thread")` -> "1 thread", `count(2, "thread")` -> "2 threads"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def terminal_width(default: int = 80) -> int:
    """Columns of the terminal on standard output (`COLUMNS` wins, as in every other program)."""
    try:
        return int(os.environ["COLUMNS"])
    except (KeyError, ValueError):
        pass
    try:
        return os.get_terminal_size(1).columns
    except OSError:
        return default


def given(context: typer.Context, name: str) -> bool:
    """Whether a parameter was written on the command line. By name: typer's own copy of click has its own enum."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
