"""What `paceline demo` shows: two panes side by side or one after the other, then the table of figures."""

from __future__ import annotations

import re
from time import perf_counter
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from paceline.cli.engine import summary
from paceline.detokenizer import IncrementalDetokenizer

if TYPE_CHECKING:
    from paceline.cli.demo import Race, RaceResult
    from paceline.outputs import StreamDelta

ACCEPTED_STYLE = "underline green"
FRAMES_PER_SECOND = 12
TITLES = ("plain decoding", "speculative decoding")
MARKS = ("⟦", "⟧")


class Pane:
    """One arm's answer so far, with each token from an accepted draft marked, and its speed so far."""

    def __init__(self, title: str, race: Race) -> None:
        self.title = title
        self.text = Text()
        self.tokens = 0
        self.rate: float | None = None
        self._detokenizer = IncrementalDetokenizer(race.llm.tokenizer)
        self._first_token_at: float | None = None
        self._pending_accepted = False

    def add(self, delta: StreamDelta, worked: float) -> list[tuple[str, bool]]:
        """Take a delta the engine finished after `worked` seconds; returns its (text, accepted) pieces."""
        pieces: list[tuple[str, bool]] = []
        for token_id, accepted in zip(delta.token_ids, delta.accepted, strict=True):
            piece = self._detokenizer.push(token_id)
            if piece:
                pieces.append((piece, accepted))
        if delta.output is not None:
            # The engine's text is the authority: it holds what is left of an incomplete character at the end.
            rest = delta.output.outputs[0].text[len(self.text.plain) + sum(len(p) for p, _ in pieces) :]
            if rest:
                pieces.append((rest, False))
        for piece, accepted in pieces:
            self.text.append_text(_styled(piece, accepted))
        if self._first_token_at is None and delta.token_ids:
            self._first_token_at, self.tokens = worked, len(delta.token_ids)
            self._counted_from = self.tokens
        else:
            self.tokens += len(delta.token_ids)
        if self._first_token_at is not None and worked > self._first_token_at:
            self.rate = (self.tokens - self._counted_from) / (worked - self._first_token_at)
        return pieces

    def heading(self) -> str:
        speed = "" if self.rate is None else f" · {self.rate:.0f} tok/s"
        return f"{self.title} · {self.tokens} tokens{speed}"

    def panel(self, console: Console, width: int, height: int | None) -> Panel:
        """The pane at a fixed width; with a height only its last lines (while text streams in)."""
        lines = list(self.text.wrap(console, width - 4))
        if height is not None:
            lines = lines[-(height - 2) :] if height > 2 else lines[-1:]
        body = Text("\n").join(lines)
        return Panel(body, title=Text(self.heading()), title_align="left", width=width, height=height)


def show_race(race: Race, prompt: str, *, side_by_side: bool, console: Console | None = None) -> None:
    """Stream both arms to the terminal: plain first, then speculative; on a pipe as plain text."""
    console = console or Console(highlight=False, soft_wrap=True)
    console.print(Text(f"{summary(race.llm, [race.num_speculative_tokens])}\n", style="dim"))
    console.print(Text(prompt.strip(), style="bold"))
    console.print(_legend(console))
    panes = [Pane(title, race) for title in TITLES]
    if side_by_side:
        _stream_side_by_side(race, panes, console)
    else:
        for arm, pane in zip(race.arms, panes, strict=True):
            _stream_alone(race, arm, pane, console)


def _styled(piece: str, accepted: bool) -> Text:
    """The piece, marked if it was drafted; white space is left alone, since underlined indentation looks bad."""
    if not accepted:
        return Text(piece)
    parts = re.split(r"(\s+)", piece)
    return Text.assemble(*((part, "" if part.isspace() else ACCEPTED_STYLE) for part in parts if part))


def _legend(console: Console) -> Text:
    if console.is_terminal:
        return Text.assemble(
            "\nAccepted draft tokens look ",
            ("like this", ACCEPTED_STYLE),
            "; the model itself made the others.",
        )
    return Text(f"\nAccepted draft tokens stand in {MARKS[0]}brackets{MARKS[1]}; the model itself made the others.")


def _stream_side_by_side(race: Race, panes: list[Pane], console: Console) -> None:
    def frame(height: int | None) -> RenderableType:
        grid = Table.grid(padding=0)
        width = (console.width - 2) // 2  # a terminal writes ^C behind the frame: it must not wrap and scroll
        grid.add_row(*(pane.panel(console, width, height) for pane in panes))
        return grid

    screen = max(6, console.height - 2)
    with Live(frame(screen), console=console, auto_refresh=False, transient=True) as live:
        drawn = 0.0
        try:
            for arm, pane in zip(race.arms, panes, strict=True):
                for delta, worked in race.stream(arm):
                    pane.add(delta, worked)
                    if perf_counter() - drawn > 1 / FRAMES_PER_SECOND or delta.output is not None:
                        live.update(frame(screen), refresh=True)
                        drawn = perf_counter()
        except KeyboardInterrupt:
            live.transient = False  # both panes stay as they stand
            live.update(frame(screen))
            raise
    console.print(frame(None))


def _stream_alone(race: Race, arm: int | None, pane: Pane, console: Console) -> None:
    console.print(f"\n--- {pane.title} ---")
    inside = False
    for delta, worked in race.stream(arm):
        for piece, accepted in pane.add(delta, worked):
            if console.is_terminal:
                console.print(_styled(piece, accepted), end="")
                continue
            mark = MARKS[not accepted] if accepted != inside else ""
            console.file.write(mark + piece)
            inside = accepted
        console.file.flush()
    if inside:
        console.file.write(MARKS[1])
    console.print(f"\n--- {pane.heading()} ---")


def show_result(result: RaceResult, console: Console | None = None) -> None:
    """The table, the survival per position, and as the last line whether the answers are identical."""
    console = console or Console(highlight=False, soft_wrap=True)
    spec = result.spec_decode
    table = Table(show_header=False, title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    table.add_row("plain", f"{result.plain_tok_s:.1f} tok/s")
    table.add_row("speculative", f"{result.spec_tok_s:.1f} tok/s")
    table.add_row("speed-up", f"{result.speedup:.2f}x", style="bold")
    table.add_row("tokens per pass", f"{(result.tokens - 1) / result.passes:.2f}")
    table.add_row("acceptance length", f"{spec['acceptance_length']:.2f}")
    table.add_row("acceptance rate", f"{spec['acceptance_rate']:.1%}")
    console.print()
    several = f"Medians of {result.repeats} runs of each, taken in turns:"
    console.print("One run of each:" if result.repeats == 1 else several)
    console.print(table)
    console.print(f"Drafts came with {spec['num_drafts']} of {result.passes} passes.")
    console.print("Of all drafts, short ones included, this share survived to each position:")
    for position, share in enumerate(spec["per_position_acceptance_rates"], 1):
        console.print(Text.assemble(f"  {position:>2}  {share:>6.1%}  ", ("█" * round(30 * share), "green")))
    if result.identical:
        console.print(Text(f"Outputs identical: yes ({result.tokens} token ids compared)", style="bold"))
    else:
        console.print(Text("Outputs identical: NO. This is a bug; please report it.", style="bold red"))
