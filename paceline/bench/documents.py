"""A study as Markdown, as one self-contained HTML file, or as JSON, by the name of the file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from paceline.bench.report import check_writable, write_text
from paceline.bench.sections import Section, Study, sections
from paceline.errors import PacelineError

FORMATS = (".html", ".md", ".json")
SYNTHETIC = "SYNTHETIC: random weights or made-up acceptance. The times are real, the text and its acceptance are not."

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; background: #fff; max-width: 860px; margin: 2em auto;
       padding: 0 1em }
h1 { font-size: 1.6em; margin-bottom: .2em } h2 { font-size: 1.15em; margin: 2em 0 .3em } p { margin: .3em 0 .8em }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; margin: .6em 0 }
th, td { padding: 3px 10px; text-align: right; border-bottom: 1px solid #e4e7eb }
th { background: #f5f7fa; font-weight: 600 }
th:first-child, td:first-child, .facts td { text-align: left } .facts td:first-child { white-space: nowrap }
td.bad { color: #b8453f; font-weight: 700 }
svg { width: 100%; display: block; margin: .5em 0 } .grid { stroke: #e4e7eb }
svg text { font: 11px system-ui, sans-serif; fill: #52606d } svg text.value { font-size: 9.5px }
.mark { stroke: #52606d; stroke-dasharray: 2 3 }
.synthetic { background: #fff3cd; border: 1px solid #d9a400; padding: .5em .8em; font-weight: 600 }
details summary { cursor: pointer; color: #52606d } .scroll { overflow-x: auto }
"""


def check_report(path: Path) -> None:
    """Refuse a report of an unknown format, or one that cannot be written, before anything is measured."""
    if path.suffix not in FORMATS:
        raise PacelineError(f"--report {path}: the format follows from the name; end it in {', '.join(FORMATS)}")
    check_writable(path, "--report")


def write_report(path: Path, study: Study) -> None:
    """Write the study in the format that the name ends in."""
    texts = {".html": html, ".md": markdown, ".json": lambda s: json.dumps(s.as_dict(), indent=2) + "\n"}
    write_text(path, texts[path.suffix](study))


def markdown(study: Study) -> str:
    """Tables under headings; the plots' figures are in the tables."""
    out = ["# Speculative decoding, measured", ""]
    out += [f"**{SYNTHETIC}**", ""] if study.synthetic else []
    out += [*_markdown_table(["", ""], [[k, v] for k, v in study.facts.items()]), ""]
    for section in sections(study):
        out += [f"## {section.title}", ""]
        out += [section.text, ""] if section.text else []
        out += [*_markdown_table(section.header, section.rows), ""]
    return "\n".join(out)


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return [line(header), "|" + "---|" * len(header), *(line(row) for row in rows)]


def html(study: Study) -> str:
    """One file: style and plots inside, nothing loaded from elsewhere."""
    facts = "".join(f"<tr><td>{escape(k)}</td><td>{escape(v)}</td></tr>" for k, v in study.facts.items())
    banner = f'<p class="synthetic">{escape(SYNTHETIC)}</p>' if study.synthetic else ""
    body = "".join(map(_html_section, sections(study)))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Speculative decoding, measured</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>'
        f"<h1>Speculative decoding, measured</h1>{banner}<table class=facts>{facts}</table>{body}</body></html>\n"
    )


def _html_section(section: Section) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in section.header) if any(section.header) else ""
    lines = "".join(
        "<tr>" + "".join(f"<td{' class=bad' * (cell == 'NO')}>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in section.rows
    )
    kind = "" if head else " class=facts"
    table = f'<div class="scroll"><table{kind}>{head and f"<tr>{head}</tr>"}{lines}</table></div>'
    if section.svg:
        table = f"{section.svg}<details><summary>Figures</summary>{table}</details>"
    text = f"<p>{escape(section.text)}</p>" if section.text else ""
    return f"<h2>{escape(section.title)}</h2>{text}{table}"
