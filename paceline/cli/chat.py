"""`paceline chat`: a conversation in the terminal, or one read from a pipe line by line."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import options as opt
from paceline.cli.generate import cut_off, stats_line, stream_to
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from paceline.llm import LLM
    from paceline.sampling_params import SamplingParams

HELP = """\
/help           this list
/reset          forget the conversation, keep the system message
/system TEXT    set the system message and start anew; without TEXT: back to the model's default
/quit           leave (also Ctrl-D)
Ctrl-C stops an answer. A line that ends in \\ goes on in the next one."""


def chat(
    model: opt.ModelOption = opt.DEFAULT_MODEL,
    system: Annotated[
        str | None,
        typer.Option("--system", metavar="TEXT", help="System message; default: the chat template's own."),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", min=1, metavar="N", help="Longest single answer in tokens.")
    ] = 1024,
    temperature: opt.TemperatureOption = 0.0,
    top_p: opt.TopPOption = 1.0,
    top_k: opt.TopKOption = 0,
    min_p: opt.MinPOption = 0.0,
    seed: opt.SeedOption = None,
    repetition_penalty: opt.RepetitionPenaltyOption = 1.0,
    stop: opt.StopOption = None,
    speculative_config: opt.SpeculativeConfigOption = None,
    num_speculative_tokens: opt.NumSpeculativeTokensOption = None,
    no_speculation: opt.NoSpeculationOption = False,
    dtype: opt.DtypeOption = "auto",
    quantization: opt.QuantizationOption = opt.DEFAULT_QUANTIZATION,
    kv_cache_dtype: opt.KVCacheDtypeOption = opt.DEFAULT_KV_CACHE_DTYPE,
    threads: opt.ThreadsOption = None,
    max_model_len: opt.MaxModelLenOption = None,
    stats: Annotated[
        bool,
        typer.Option(
            "--stats",
            help="A line of figures on standard error after each answer.",
            rich_help_panel=opt.OUTPUT_PANEL,
        ),
    ] = False,
) -> None:
    """Talk with a model over several turns.

    Type /help inside for the commands. On a pipe each line of standard input is one turn, and goes on in the next if it
    ends in a backslash.

    Exit code 1 if one of them could not be answered.
    """
    opt.check_speculation(no_speculation, num_speculative_tokens, speculative_config)
    config = opt.parse_speculative_config(speculative_config)
    params = opt.sampling_params(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        repetition_penalty=repetition_penalty,
        stop=stop,
        max_tokens=max_tokens,
    )
    from paceline.cli.engine import note_long_drafts, open_llm, summary

    llm = open_llm(
        opt.EngineOptions(
            model,
            dtype,
            threads,
            max_model_len,
            config,
            not no_speculation,
            quantization,
            kv_cache_dtype=kv_cache_dtype,
        )
    )
    if llm.tokenizer.chat_template is None:
        raise PacelineError(f"{model} has no chat template; use `paceline generate --raw` with this model")
    length = 0 if no_speculation else num_speculative_tokens
    note_long_drafts(llm, length)
    conversation = Conversation(llm, params, system, length, stats)
    if sys.stdin.isatty():
        print(summary(llm, [length]))
        print("/help lists the commands, Ctrl-D leaves.")
        _interactive(conversation)
    else:
        for message in _messages(sys.stdin):
            if message.strip() and not conversation.take(message):
                break
        if conversation.failed:
            raise typer.Exit(1)


class Conversation:
    """The messages so far and what to do with the next line."""

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        system: str | None = None,
        num_speculative_tokens: int | None = None,
        stats: bool = False,
    ) -> None:
        self.llm = llm
        self.params = params
        self.num_speculative_tokens = num_speculative_tokens
        self.stats = stats
        self.messages: list[dict[str, Any]] = []
        self.failed = False  # a message could not be answered
        self.start(system)

    def start(self, system: str | None) -> None:
        """Forget everything; `system` None leaves the system message to the chat template."""
        self.system = system
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def take(self, line: str) -> bool:
        """Carry out a command or answer a message. False when the conversation is over."""
        if line.startswith("/"):
            return self._command(*line.split(maxsplit=1))
        self._answer(line)
        return True

    def _command(self, name: str, argument: str = "") -> bool:
        if name == "/quit":
            return False
        if name == "/help":
            print(HELP)
        elif name == "/reset":
            self.start(self.system)
            print("(conversation forgotten)")
        elif name == "/system":
            self.start(argument or None)
            print("(system message set, conversation forgotten)" if argument else "(default system message)")
        else:
            print(f"{name} is not a command; /help lists them", file=sys.stderr)
        return True

    def _answer(self, text: str) -> None:
        """Stream an answer. Ctrl-C keeps what was said so far; an error takes the message back."""
        request = [*self.messages, {"role": "user", "content": text}]
        said: list[str] = []

        def show(piece: str) -> None:
            said.append(piece)
            sys.stdout.write(piece)
            sys.stdout.flush()

        try:
            output = stream_to(show, self.llm, request, self.params, self.num_speculative_tokens)
        except KeyboardInterrupt:
            print("\n(interrupted)", file=sys.stderr)
            answer = "".join(said)
            if not answer:
                return
        except PacelineError as error:
            self.failed = True
            print(f"{error}\n/reset starts a new conversation.", file=sys.stderr)
            return
        else:
            answer = output.outputs[0].text
            if (cut := cut_off(output, self.params)) is not None:
                print(f"(cut off: {cut})", file=sys.stderr)
            if self.stats:
                print(stats_line(output), file=sys.stderr)
        self.messages = [*request, {"role": "assistant", "content": answer}]


def _interactive(conversation: Conversation) -> None:
    import contextlib

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    while True:
        try:
            line = _read_message()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /quit leaves)")
            continue
        if line.strip() and not conversation.take(line):
            return


def _messages(lines: Iterable[str]) -> Iterator[str]:
    """Messages of a pipe: one a line, those joined that end in a backslash."""
    begun: list[str] = []
    for line in lines:
        begun.append(line.rstrip("\n"))
        if begun[-1].endswith("\\"):
            begun[-1] = begun[-1][:-1]
        else:
            yield "\n".join(begun)
            begun = []
    if begun:
        yield "\n".join(begun)


def _read_message() -> str:
    line = input("> ")
    while line.endswith("\\"):
        line = line[:-1] + "\n" + input(". ")
    return line
