"""Reports: every section's figures, three formats, nothing loaded from elsewhere."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from fakes.llm import FakeLLM
from hypothesis import given
from hypothesis import strategies as st

from paceline.bench import charts, costmodel, documents, figures, runner, sections
from paceline.bench.backend import Arm
from paceline.bench.datasets import BenchPrompt
from paceline.bench.local import LocalBackend
from paceline.errors import PacelineError
from paceline.sampling_params import SamplingParams


def rows(name="set <&> name", lengths=(0, 4, "auto")):
    backend = LocalBackend(FakeLLM())
    prompts = [BenchPrompt(i, [{"role": "user", "content": text}]) for i, text in enumerate(("one", "two"))]
    arms = [Arm(backend, k) for k in lengths]
    params = SamplingParams(temperature=0.0, max_tokens=20)
    return [
        row
        for c in (1, 2)
        for row in figures.result_rows(runner.measure(name, prompts, arms, params, concurrency=c, repeats=2))
    ]


def study(**fields):
    rounds = [
        {"arm": "k = 4", "k": 4, "steps": 9, "draft": 1.0, "pass": 5.0, "sampling": 0.5, "context": 0.25, "rest": 0.25}
    ]
    found = [
        {"dataset": "set <&> name", "k": k, "predicted": 1.0 + k / 4, "measured": None if k == 1 else 1.5}
        for k in (0, 1, 4)
    ]
    base = {"facts": {"engine": "a | b <c>"}, "rows": rows(), "rounds": rounds, "predictions": found, "price": 1.8}
    return sections.Study(**base | fields)


TITLES = [
    "In short",
    "Speed-up per set",
    "Speed-up against concurrency",
    "Cost per token",
    "Acceptance",
    "Survival per position",
    "Conditional acceptance per position",
    "Accepted tokens per block",
    "Where a round's time goes",
    "Speed-up against draft length",
]


def test_every_section_is_there_and_those_without_figures_are_not():
    assert [s.title for s in sections.sections(study())][:10] == TITLES
    bare = sections.Study({}, [row for row in rows(lengths=(0,)) if row["concurrency"] == 1])
    assert [s.title for s in sections.sections(bare)] == ["In short", "Speed-up per set", "Cost per token"]


def test_figures_of_the_sections():
    found = {s.title: s for s in sections.sections(study())}
    by_set = found["Speed-up per set"].rows
    assert by_set[1][:4] == ["set <&> name", "4", f"{rows()[1]['decode_tok_s']:.1f}", f"{rows()[1]['speedup']:.2f}"]
    assert found["Where a round's time goes"].rows == [
        ["k = 4", "9", "1.00", "5.00", "0.50", "0.25", "0.25", "7.00", "-", "-"]
    ]
    # 2 of 4 drafts are kept in every block
    assert found["Accepted tokens per block"].rows[0][2:7] == ["0.0%", "0.0%", "100.0%", "0.0%", "0.0%"]
    assert [row[0] for row in found["In short"].rows][:4] == [
        "fastest on average",
        "tokens per pass",
        "outputs",
        "cost model",
    ]
    assert found["In short"].rows[0][1].endswith(f"set <&> name {rows()[1]['speedup']:.2f}x")
    assert found["In short"].rows[2][1] == "the same token ids in every arm, repeat and concurrency"
    # k = 1 was predicted but not measured
    assert found["What the cost model would choose"].rows == [["set <&> name", "4", "1.50", "0", "1.50", "1.00", "4"]]
    cost = found["Cost per token"].rows[1]
    assert cost[3] == f"{1 - 1 / rows()[1]['speedup']:.0%}"


def test_arms_of_one_length_are_told_apart():
    """Two drafters with the same number of drafts: each has its own figures, and one colour in all plots."""
    backend, prompts = LocalBackend(FakeLLM()), [BenchPrompt(0, [{"role": "user", "content": "one"}])]
    arms = [Arm(backend, 0, "plain"), Arm(backend, 4, "a <b>"), Arm(backend, 4, "other")]
    params = SamplingParams(temperature=0.0, max_tokens=20)
    for names in (["x"], ["x", "y"]):
        several = [
            row
            for name in names
            for c in (1, 2)
            for row in figures.result_rows(runner.measure(name, prompts, arms, params, concurrency=c, repeats=1))
        ]
        found = {s.title: s for s in sections.sections(sections.Study({}, several))}
        for title in ("Survival per position", "Conditional acceptance per position", "Accepted tokens per block"):
            assert [row[:2] for row in found[title].rows] == [[n, arm] for n in names for arm in ("a <b>", "other")]
            legend = [f"{n}, {arm}" if len(names) > 1 else arm for n in names for arm in ("a &lt;b&gt;", "other")]
            assert all(f">{name}</text>" in found[title].svg for name in legend)
        alike = ("Survival per position", "Accepted tokens per block") if len(names) == 1 else ()
        for title in ("Speed-up per set", "Speed-up against concurrency", *alike):
            legend = found[title].svg.partition('y="280"')[2].split("<rect")
            colours = {text.rpartition('">')[2].partition("<")[0]: text.partition('fill="')[2][:7] for text in legend}
            assert colours["other"] == charts.COLOURS[2], title


def test_the_report_says_at_once_that_figures_are_doubtful():
    found = rows()
    clean = [{**row, "warnings": []} for row in found]
    assert "warnings" not in dict(sections.sections(study(rows=clean))[0].rows)
    clean[1]["warnings"] = ["too wide", "another"]
    assert dict(sections.sections(study(rows=clean))[0].rows)["warnings"].startswith("2, listed at the end")


def test_above_one_request_at_a_time_a_speed_up_is_of_the_throughput():
    shared = [row for row in rows() if row["concurrency"] == 2]
    found = {s.title: s for s in sections.sections(study(rows=shared))}["Speed-up per set"]
    assert found.text.startswith("Throughput of all requests together")
    assert found.rows[1][2:4] == [f"{shared[1]['output_tok_s']:.1f}", f"{shared[1]['output_speedup']:.2f}"]


def test_outputs_that_differ_are_said_first():
    found = [{**row, "identical": row["num_speculative_tokens"] != 4} for row in rows()]
    short = sections.sections(sections.Study({}, found))[0]
    assert ["outputs", "DIFFER in 2 of 6 rows"] in short.rows


@pytest.mark.parametrize(
    ("measured", "chosen", "best", "share"),
    [
        ({0: 1.0, 3: 1.4, 5: 1.5}, 3, 5, 1.4 / 1.5),
        ({0: 1.0, 3: 1.5, 5: 1.5}, 3, 3, 1.0),
        ({0: 1.0, 5: 0.9}, 5, 0, 0.9),
    ],
)
def test_the_cost_models_choice_against_the_fastest(measured, chosen, best, share):
    predicted = {0: 1.0, 3: 1.6, 4: 1.7, 5: 1.5}
    table = [{"dataset": "s", "k": k, "predicted": p, "measured": measured.get(k)} for k, p in predicted.items()]
    (row,) = costmodel.choice_rows(table)
    assert (row["predicted_k"], row["best_k"], row["predicted_any_k"]) == (chosen, best, 4)
    assert row["share_of_best"] == pytest.approx(share)
    assert costmodel.choice_rows([{**r, "measured": None} for r in table]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_shares_of_accepted_tokens_sum_to_one(values):
    survival = sorted(values, reverse=True)
    shares = sections.accepted_shares({"per_position_acceptance_rates": survival})
    assert sum(shares) == pytest.approx(1.0)
    assert min(shares) >= -1e-12


class _Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found, self.open = [], []

    def handle_starttag(self, tag, attrs):
        self.found += [v for k, v in attrs if k in ("src", "href") or (v or "").startswith(("http:", "https:"))]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_html_is_whole_well_formed_and_loads_nothing():
    text = documents.html(study())
    parser = _Links()
    parser.feed(text)
    assert parser.open == []
    assert [link for link in parser.found if link != "http://www.w3.org/2000/svg"] == []
    assert "set &lt;&amp;&gt; name" in text
    assert "<c>" not in text
    for title in TITLES:
        assert title.replace("'", "&#x27;") in text
    assert "SYNTHETIC" not in text
    assert "SYNTHETIC" in documents.html(study(synthetic=True))
    assert "SYNTHETIC" in documents.markdown(study(synthetic=True))


def test_plots_are_xml_with_finite_places():
    for section in sections.sections(study()):
        if section.svg:
            root = ET.fromstring(section.svg)
            for element in root.iter():
                for key in ("x", "y", "x1", "y1", "cx", "cy", "width", "height"):
                    assert 0 <= float(element.get(key, "0")) <= 700


@given(st.lists(st.one_of(st.none(), st.floats(0, 1e9, allow_subnormal=False)), min_size=1, max_size=6))
def test_any_values_can_be_drawn(values):
    ET.fromstring(charts.lines(list(range(1, len(values) + 1)), [("a", values)], unit="u", x_label="x", log_x=True))
    ET.fromstring(
        charts.bars([str(i) for i in range(len(values))], [("a", values), ("b", values)], unit="u", stacked=True)
    )


def test_markdown_tables_have_one_width():
    for block in documents.markdown(study()).split("\n\n"):
        lines = [line.replace("\\|", "") for line in block.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in lines}) <= 1


def test_the_format_follows_from_the_name(tmp_path):
    for name in ("r.html", "r.md", "r.json"):
        documents.check_report(tmp_path / name)
        documents.write_report(tmp_path / name, study())
    values = json.loads((tmp_path / "r.json").read_text())
    assert [len(values[key]) for key in ("results", "rounds", "predictions")] == [6, 1, 3]
    with pytest.raises(PacelineError, match=r"end it in \.html, \.md, \.json"):
        documents.check_report(tmp_path / "r.pdf")
