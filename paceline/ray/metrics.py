"""The metrics of several replicas on one page: each sample gets a label that says whose it is."""

from __future__ import annotations

from collections.abc import Mapping

LABEL = "replica"


def merge_metrics(pages: Mapping[str, str]) -> str:
    """One page in Prometheus' text format from the pages of the replicas (name -> page).

    A family's HELP and TYPE lines come once, before the samples of all replicas.
    """
    headers: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, page in sorted(pages.items()):
        family = ""
        for line in page.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                family = line.split(" ", 3)[2]
                lines = headers.setdefault(family, [])
                if not any(known.split(" ", 3)[1] == line.split(" ", 3)[1] for known in lines):
                    lines.append(line)
            elif line and not line.startswith("#"):
                samples.setdefault(family, []).append(_labelled(line, replica))
    out = []
    for family in [*headers, *(name for name in samples if name not in headers)]:
        out += [*headers.get(family, []), *samples.get(family, [])]
    return "\n".join(out) + "\n" if out else ""


def _labelled(sample: str, replica: str) -> str:
    """`name{a="b"} value` with the replica's label in front of the others."""
    label = f'{LABEL}="{replica}"'
    brace, space = sample.find("{"), sample.find(" ")
    if 0 <= brace < space:
        rest = sample[brace + 1 :]
        return f"{sample[:brace]}{{{label}{'' if rest.startswith('}') else ','}{rest}"
    return f"{sample[:space]}{{{label}}}{sample[space:]}"
