"""The report over a toy chain: what it holds, that it fetches nothing, and that hostile text stays text."""

import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest
from markdown_it import MarkdownIt

from nautile.data.tokens.source_reading import SourceReading
from nautile.evals.tables.results import MISSING, ResultTable
from nautile.tasks.report import compose
from nautile.tasks.reporting.data import Input, collect, scores, screening
from nautile.tasks.reporting.render import (
    MOST_POINTS,
    BarChart,
    LineChart,
    Paragraph,
    Pipeline,
    ReportSection,
    Samples,
    TimeChart,
    html_page,
    markdown,
    svg,
    thinned,
)
from tests.support.stages.toy_stages import HOSTILE


@pytest.fixture(scope="module")
def folder(made):
    store, outputs = made
    return store.get(outputs["report"]["report"]).path


@pytest.fixture(scope="module")
def page(folder):
    return (folder / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def data(folder):
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))


_EMPTY = {
    "stages": [], "scores": {}, "curves": {}, "calls": [], "cost": {"calls": 0}, "screening": screening([]),
    "samples": [], "stand_ins": [], "lineage": [], "ladder": None, "problems": [], "about": {},
    "ladder_over_seeds": [],
}  # fmt: skip


class Walk(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.fetched, self.open = set(), [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        named = dict(attributes)
        self.fetched += [named[name] for name in ("src", "href", "xlink:href") if name in named]
        if tag not in ("meta", "path", "rect", "use", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag in self.open:
            assert self.open.pop() == tag, f"<{tag}> closes another"


def test_the_page_fetches_nothing_and_is_well_formed(page):
    walk = Walk(page)
    assert walk.open == []
    assert all(reference.startswith("#") for reference in walk.fetched)
    assert not walk.tags & {"script", "link", "iframe", "img"}
    assert "default-src &#39;none&#39;" in page or "default-src 'none'" in page


def test_text_of_a_model_is_escaped_in_the_page(page):
    assert HOSTILE not in page
    assert "<script>" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "\x1b" not in page


def test_text_of_a_model_cannot_leave_its_block_in_the_terminal(folder):
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert "\x1b" not in text
    tokens = [token for token in MarkdownIt("commonmark").parse(text) if "alert(1)" in token.content]
    assert len(tokens) > 5
    assert {token.type for token in tokens} == {"fence"}


def test_table_1_stands_beside_the_papers_with_intervals_and_says_it_is_not_comparable(page, folder):
    text = (folder / "report.md").read_text(encoding="utf-8")
    for figure in ("27.98", "28.96", "31.36", "33.43"):
        assert figure in text
        assert figure in page
    assert "35.00 [20.00, 50.00]" in text
    assert "not comparable" in text


def test_the_report_opens_with_the_ladder_and_replies_of_every_stage(page, data, folder):
    titles = re.findall(r"<h2[^>]*>([^<]*)</h2>", page)
    assert titles[:5] == [
        "The ladder", "Three problems after each stage", "What it cost", "What is a stand-in here", "The run",
    ]  # fmt: skip
    assert [entry["score"]["accuracy"] for entry in data["ladder"]["stages"]] == [0.35] * 4
    assert data["ladder"]["stages"][1]["test"]["n"] == 20
    assert 0 < len(data["problems"]) <= 3
    assert {len(problem["replies"]) for problem in data["problems"]} == {4}
    assert 0 < data["cost"]["run_seconds"] < data["cost"]["seconds"]
    linked = re.findall(r'<a href="(#s\d+)">(Cost|Stand-ins)</a>', page.partition("</nav>")[2])
    assert [title for _, title in linked] == ["Cost", "Stand-ins"]
    # A link goes into the folded part, which a browser then opens.
    folded = '<details><summary><h2>{}</h2></summary>\n<div id="{}">'
    assert all(folded.format(title, anchor[1:]) in page for anchor, title in linked)
    assert "seed 0 · commit " in page.partition("<nav>")[0]
    assert "[Cost](#cost)" in (folder / "report.md").read_text(encoding="utf-8")


def test_curves_calls_and_seconds_come_from_the_catalog(data):
    assert data["curves"]["pretrain"]["loss"][""][0] == [1, 8.0]
    assert len(data["curves"]["pretrain"]["loss"][""]) == 20
    (call,) = data["calls"]
    assert (call["label"], call["calls"], call["cached"], call["tokens_out"]) == ("distill", 3, 1, 60)
    assert data["cost"]["dollars"] == pytest.approx(0.03)
    assert data["cost"]["seconds"] == pytest.approx(13 * 1.5)


def test_every_input_is_in_the_lineage_with_what_it_read(made, data):
    _, outputs = made
    ids = {artifact_id for label, kinds in outputs.items() if label != "report" for artifact_id in kinds.values()}
    assert {row["id"] for row in data["lineage"]} == ids
    reason = next(row for row in data["lineage"] if row["label"] == "reason")
    assert reason["reads"] == {
        "checkpoint": outputs["align"]["checkpoint"],
        "questions": outputs["held_out"]["questions"],
    }


def test_a_score_that_training_text_was_not_screened_for_is_labelled_wherever_it_stands(data):
    scores = {stage: {**result, "benchmarks": {**result["benchmarks"]}} for stage, result in data["scores"].items()}
    note = "training text was not screened for it"
    for result in scores.values():
        result["benchmarks"]["gsm_symbolic"] = {
            **result["benchmarks"]["held_out"],
            "title": "Words",
            "not_screened": note,
        }
    text = markdown("t", "s", compose({**data, "scores": scores}))
    assert "| Words (stand-in, not screened for) |" in text
    assert f"{note} (Ours (self_distill))" in text.replace("\\", "")
    assert note not in markdown("t", "s", compose(data))


def test_samples_show_good_and_bad_ones(data):
    answers = next(group for group in data["samples"] if group["title"] == "evaluate:reason: answers")
    assert [row["good"] for row in answers["rows"]] == [True, False]
    rollouts = next(group for group in data["samples"] if group["title"].startswith("reason: rollouts"))
    assert {row["verdict"] for row in rollouts["rows"]} == {"reward 1", "reward 0"}


def tables_of(blocks):
    return {block.title: block for block in blocks if isinstance(block, ResultTable)}


def blocks_about(data, label, **facts):
    """The blocks of a report in which one stage has these facts, and no other stage is."""
    stages = [{**data["stages"][0], "label": label, "stage": label, "facts": facts}]
    return [block for section in compose({**data, "stages": stages}) for block in section.blocks]


def texts_about(data, label, **facts):
    return [block.text for block in blocks_about(data, label, **facts) if isinstance(block, Paragraph)]


def beginning(found, title):
    """The one table or text that begins so."""
    (only,) = [one for one in found if (one if isinstance(one, str) else one.title).startswith(title)]
    return only


def test_counts_and_refusals_are_shown_as_far_as_they_are_numbers(data):
    tables = tables_of(block for section in compose(data) for block in section.blocks)
    assert tables["distill: counts"].rows == (("documents", "1"), ("prompts", "4"))
    assert tables["distill: rejected, by reason"].rows == (("copied", "1"), ("too short", "2"))
    assert tables["distill: teachers"].rows == (("local", "toy", "1", "4", "1", "30", "60"),)
    counts = (("calibration: auc: overall", "0.57"), ("rounds, last: traces", "5"), ("steps", "20"))
    assert tables["align: counts"].rows == counts
    written = next(group for group in data["samples"] if group["title"] == "distill: what the teacher wrote")
    assert [row["verdict"] for row in written["rows"]] == ["kept", "rejected: too_short"]


def test_what_pretraining_read_of_its_sources_is_a_table_and_no_list_of_numbers(data):
    synth = SourceReading("replies", fill=0.891, cropped_share=0.0, trained_share=0.4204, epochs=1.2).facts()
    web = SourceReading("all", fill=1.0, cropped_share=0.0, epochs=0.5).facts()
    facts = {"steps": 3, "reading_by_source": {"web": web, "synth": synth}}
    tables = tables_of(blocks_about(data, "pretrain", checkpoint=facts))
    assert tables["pretrain: its sources"].rows == (
        ("web", "all", "100%", "0%", "not known", "0.50"),
        ("synth", "replies", "89%", "0%", "42%", "1.20"),
    )
    assert tables["pretrain: counts"].rows == (("steps", "3"),)


def test_the_judge_measured_and_injections_against_it_stand_beside_the_rewards(data):
    hostile = {
        "items": 8, "unscored": 1, "turned": 0,
        "right": {"pairs": 4, "moved": 0.25, "raised": 0.0, "points": -2.5},
        "wrong": {"pairs": 0, "moved": None, "raised": None, "points": None},
        "forms": {"verdict after": 12.0, "plea": 0.0, "threat": -4.0, "chatml turn": 30.0},
    }  # fmt: skip
    measured = {"judge": {"model": "toy", "rubric": "one"}, "items": 8, "auc": {"overall": 0.57}, "length_bias": None}
    tables = tables_of(blocks_about(data, "align", calibration=measured | {"hostile": hostile}))
    calibration = beginning(tables.values(), "align: calibration of the judge toy")
    assert [row[:2] for row in calibration.rows] == [
        ("chance to mark right above wrong: overall", "0.57"),
        ("answers marked", "8"),
        ("bias by length", MISSING),
    ]
    injections = tables["align: injections against the judge"]
    assert injections.rows == (
        ("right answers", "4", "25%", "0%", "-2.5"),
        ("wrong answers", "0", MISSING, MISSING, MISSING),
    )
    assert injections.notes[-1] == "What raised wrong answers most: chatml turn (+30), verdict after (+12)."
    # And the calibration of another endpoint beside it.
    checker = {"judge": {"model": "checker", "rubric": "one", "stand_in": True}, "items": 8, "auc": {"overall": 1.0}}
    compared = [{"judge": {"model": "toy"}, "items": 4, "auc": {"overall": 0.34}}]
    blocks = blocks_about(data, "align", calibration=checker | {"compared": compared})
    both = beginning(tables_of(blocks).values(), "align: calibration")
    assert both.columns == ("What", "checker, a stand-in", "toy", "Meaning")
    assert [row[1:3] for row in both.rows] == [("1", "0.34"), ("8", "4")]


def test_the_curriculum_is_a_chart_of_weight_by_solve_rate(data):
    rates = ((0.0, 3, 0, 0.0, 0.0), (0.25, 2, 2, 0.75, 1.5), (0.5, 1, 2, 0.5, 1.0))
    names = ("solve_rate", "problems", "traces", "weight", "total")
    curriculum = [dict(zip(names, rate, strict=True)) for rate in rates]
    blocks = blocks_about(data, "self_distill", checkpoint={"rounds": [{"curriculum": curriculum}]})
    chart = beginning([b for b in blocks if isinstance(b, LineChart)], "self_distill: weight by solve rate")
    assert chart.x_label == "solve rate of the problem"
    assert chart.series["weight of a trace"] == [(0.25, 0.75), (0.5, 0.5)]
    assert chart.series["share of all weight"] == [(0.25, 0.6), (0.5, 0.4)]


@pytest.mark.slow
def test_what_a_judge_is_and_saw_and_why_a_stage_made_no_update_is_said(data):
    checker = {"model": "toy", "kind": "checker", "stand_in": True}
    texts = texts_about(data, "align", checkpoint={"judge": checker})
    about = beginning(texts, "align: the judge is toy, a program that checks arithmetic")
    assert "stand-in" in about
    assert "It does not see the right answers" in about
    shown = texts_about(data, "align", checkpoint={"judge": checker | {"reference": True}})
    assert "It is shown the right answers" in beginning(shown, "align: the judge")
    shown = texts_about(data, "align", checkpoint={"judge": {"model": "toy", "reference": True}})
    assert "align: the judge toy is shown the right answer where one is known." in shown
    blind = texts_about(data, "align", checkpoint={"judge": {"model": "toy", "reference": False}})
    assert [text for text in blind if text.startswith("align: the judge")] == []
    none = texts_about(data, "reason", checkpoint={"updates": 0, "no_update": "all 8 groups had equal rewards"})
    about = beginning(none, "reason made no update")
    assert about.endswith("the one that it began with: all 8 groups had equal rewards.")
    results = [block.text for section in compose(data) for block in section.blocks if isinstance(block, Paragraph)]
    assert "its AUC was 0.57, where 0.5 is chance" in beginning(results, "align: the judge is toy, a small stand-in")


def test_what_was_not_measured_is_left_out(made):
    store, outputs = made
    only = [Input("ingest:wikipedia", store.get(outputs["ingest:wikipedia"]["tokens"]))]
    sections = compose(collect(store, only, samples=4))
    assert [section.title for section in sections] == [
        "What it cost",
        "What is a stand-in here",
        "The run",
        "Kept out of training",
        "Cost",
        "Stand-ins",
        "Lineage",
    ]
    text = markdown("Toy", "", sections)
    assert "27.98" not in text
    assert "dollars" not in text
    assert "0 calls" in text
    assert "0 requests" in text


def test_an_evaluation_without_scores_is_no_row(made):
    store, outputs = made
    artifact = store.get(outputs["pretrain"]["checkpoint"])
    assert scores([Input("evaluate:pretrain", artifact)]) == {}


def test_a_chart_with_one_point_or_none_is_not_drawn():
    curves = {"pretrain": {"loss": {"": [[1, 8.0]]}}, "reason": {"kl": {"": [[1, 0.1], [2, 0.2]]}}}
    sections = compose({**_EMPTY, "curves": curves})
    charts = [block for section in sections for block in section.blocks if isinstance(block, LineChart)]
    assert [chart.title for chart in charts] == ["reason: KL to the start"]


BARS = {"one <b>": {"a<b": 3, "$1$": 2}, "two": {"a<b": 1}}
FIGURES = (
    LineChart("lines <i>", {"a": [(0.0, 1.0), (1.0, 2.0)], "b": []}, "nats"),
    BarChart("bars <i>", BARS, ("a<b", "$1$"), "", "prompts"),
    BarChart("histogram <i>", {"n": {"0.00": 1, "0.50": 2}}, ("0.00", "0.50"), "x", "n", 0.5, ((0.5, "up to <b>"),)),
    TimeChart("cost <i>", ((1e9, 1.0), (1e9 + 200, 2.0)), "dollars"),
    Pipeline((("a <i>", "1 s"), ("b", "")), (("a <i>", "b"),)),
)


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: type(figure).__name__)
def test_every_figure_is_the_same_bytes_and_escapes_its_texts(figure):
    first = svg(figure)
    assert first == svg(figure)
    other = svg(LineChart("reward", {"a": [(0.0, 1.0), (1.0, 2.0)]}, ""))
    ids = [
        {node.get("id") for node in ElementTree.fromstring(page).iter() if node.get("id")} for page in (first, other)
    ]
    assert not ids[0] & ids[1], "two figures of a page share no identifier"
    texts = {node.text for node in ElementTree.fromstring(first).iter() if node.tag.endswith("text")}
    assert any("<" in (text or "") for text in texts), "what was escaped reads as it was written"
    assert "<i>" not in first
    assert "<b>" not in first
    if figure.__class__ is BarChart and not figure.bin_width:
        assert "$1$" in texts, "a dollar sign starts no mathematics"


def test_long_curves_are_averaged_not_sampled():
    points = [(float(i), float(i % 2)) for i in range(10_000)]
    few = thinned(points)
    assert len(few) == MOST_POINTS
    assert all(0.4 < value < 0.6 for _, value in few)
    assert thinned(points[:10]) == points[:10]


def test_the_picture_puts_readers_to_the_right_and_escapes_labels():
    boxes = [("a<b", "1 s"), ("c", ""), ("d", "")]
    picture = svg(Pipeline(tuple(boxes), (("a<b", "c"), ("c", "d"), ("a<b", "d"))))
    texts = [node for node in ElementTree.fromstring(picture).iter() if node.tag.endswith("}text")]
    lefts = {node.text: float(node.get("x")) for node in texts}
    assert lefts["a<b"] < lefts["c"] < lefts["d"]


def test_rendering_escapes_titles_and_paragraphs():
    rows = [{"verdict": "<b>", "good": False, "prompt": "p", "text": "```x```", "expected": "`<i>`"}]
    sections = [ReportSection("<h>", (Paragraph("<p>"), Samples("<s>", rows)))]
    page = html_page("<t>", "<u>", sections)
    for raw in ("<b>", "<i>", "<t>", "<u>", "<s>", "<h>"):
        assert raw not in page
    assert "````\np\n→\n```x```\n````" in markdown("t", "u", sections)


def test_what_was_kept_out_of_training_is_listed_by_benchmark_and_example(data, folder):
    result = data["screening"]
    assert result["questions"] == {"questions": 1, "benchmarks": {"arc": 1}, "too_short": 1, "boilerplate": 0}
    assert result["overlaps"] == {"ingest:wikipedia": {"arc": 2}, "ingest:synth": {"arc": 2}}
    assert result["left_out"]["ingest:synth"]["duplicate"] == 3
    assert "distill" not in result["left_out"]  # it was not searched: absent, not zero
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert "Kept out of training" in text
    assert "if both share thirteen consecutive words" in text
    assert "| arc | 1 | 2 | 2 |" in text
    assert "arc 7, 50 % of it" in text
    assert "why is the sea" in text


def test_hits_come_from_the_file_or_the_facts_a_few_of_each_benchmark(tmp_path):
    hit = {"benchmark": "arc", "example": "7", "share": 0.5, "words": "a b c", "begins": "x"}
    lines = [{**hit, "example": str(n)} for n in range(9)] + [{**hit, "benchmark": "mmlu"}]
    (tmp_path / "contamination.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ingest = ("ingest:web", "tokens", tmp_path, {"contaminated": {"arc": 9, "mmlu": 1}})
    problems = ("reason", "rollouts", tmp_path / "none", {"contaminated": {"arc": 1}, "hits": [hit]})
    clean = ("align", "rollouts", tmp_path / "none", {"contaminated": {}, "hits": []})
    evidence = {"benchmark": "arc", "example": "3", "words": "a b c d e"}
    refused = [{"query": "why?", "evidence": evidence}, {"query": "how?"}]
    distilled = ("distill", "documents", tmp_path / "none", {"samples": {"contaminated": refused}})
    result = screening([ingest, problems, clean, distilled])
    assert [(entry["label"], entry["benchmark"], entry["example"]) for entry in result["hits"]] == [
        *(("ingest:web", "arc", str(n)) for n in range(3)),
        ("ingest:web", "mmlu", "7"),
        ("reason", "arc", "7"),
        ("distill", "arc", "3"),
    ]
    assert result["overlaps"] == {"ingest:web": {"arc": 9, "mmlu": 1}, "reason": {"arc": 1}, "align": {}}
    sections = compose({**_EMPTY, "screening": screening([])})
    assert "Kept out of training" not in [section.title for section in sections]
