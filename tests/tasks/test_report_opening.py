"""The first page of the report: the ladder with its paired gains, problems side by side, cost and stand-ins."""

from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt

from nautile.evals.running.rows import digest
from nautile.evals.scoring.over_seeds import lead
from nautile.evals.scoring.scores import summarise
from nautile.evals.tables.ladder import gains_in_words, ladder, ladder_table, verdict
from nautile.evals.tables.results import MISSING
from nautile.tasks.report import opening
from nautile.tasks.reporting.about import about_line
from nautile.tasks.reporting.data import changed_problems
from nautile.tasks.reporting.other_seeds import ladder_over_seeds
from nautile.tasks.reporting.render import BulletList, IntervalChart, Paragraph, SideBySide, html_page, markdown, svg
from tests.support.stages.toy_stages import HOSTILE

N = 40
STAGES = ("pretrain", "align", "reason", "self_distill")
# Problem 39 becomes right at align alone; reason solves fifteen more and loses none; self_distill changes nothing.
RIGHT = {
    "pretrain": set(range(10)),
    "align": {*range(10), 39},
    "reason": {*range(25), 39},
    "self_distill": {*range(25), 39},
}


def rows_of(right, benchmark="held_out", count=N):
    rows = []
    for index in range(count):
        prompt = f"{index} + 1? {HOSTILE}"
        verdicts = {"strict": index in right, "lenient": index in right}
        verdicts["problem"] = None if index in right else "unfinished"
        text = {"reasoning": f"one more {HOSTILE}", "answer": None if index % 2 else str(index + 1), "output": HOSTILE}
        asked = {"benchmark": benchmark, "index": index, "id": str(index), "category": None, "prompt": prompt}
        asked |= {"prompt_digest": digest(prompt), "expected": str(index + 1), "chance": 0.0, "left_out": None}
        rows.append(asked | verdicts | text | {"truncated": False, "tokens_out": 5, "parsed": None})
    return rows


def made(rows):
    """The data of the opening, from rows by stage."""
    scores = {stage: summarise(of, stage, {}) for stage, of in rows.items()}
    result = ladder(scores, rows)
    cost = {
        "calls": 3,
        "tokens_in": 30,
        "tokens_out": 60,
        "dollars": 0.02,
        "unknown_dollars": 0.01,
        "run_seconds": 90,
        "run_ended": True,
    }
    notes = [{"label": stage, "note": "a program <b> stands in"} for stage in ("align", "reason")]
    problems = changed_problems(result, rows) if result else []
    return {
        "ladder": result,
        "ladder_over_seeds": [],
        "problems": problems,
        "cost": cost,
        "calls": [{"cached": 1}],
        "stand_ins": notes,
    }


@pytest.fixture(scope="module")
def rows():
    return {stage: rows_of(RIGHT[stage]) for stage in STAGES}


@pytest.fixture(scope="module")
def data(rows):
    return made(rows)


def blocks(data, kind):
    return [block for section in opening(data) for block in section.blocks if isinstance(block, kind)]


def test_a_gain_is_of_the_same_problems_with_what_became_right_and_wrong(data):
    table = ladder_table(data["ladder"])
    cells = {row[0]: row for row in table.rows}
    assert cells["pretrain"] == ("pretrain", "25.0 [14.2, 40.2]", *(MISSING,) * 4, "40", "27.98")
    assert cells["align"][3:6] == ("1", "1", "0")
    assert cells["reason"][2].startswith("+37.5 [")
    assert cells["reason"][3:6] == ("<0.0001", "15", "0")
    assert cells["self_distill"][2].startswith("+0.0 [-")


def test_the_verdict_is_two_sentences_from_the_first_stage_to_the_last(data, rows):
    text = verdict(data["ladder"])
    assert text.startswith("Held-out problems solved: 25.0 % after pretrain and 65.0 % after self_distill (+40.0 [")
    first, second = text.split(". ")
    assert first.endswith("points on the same problems)")
    assert second.startswith("Gained beyond chance: reason; within chance or not compared: align, self_distill")
    assert verdict(made({"align": rows["align"]})["ladder"]).startswith("Fewer than two stages")


def test_the_line_below_the_title_says_whose_results_these_are():
    seeds = {"data": [1], "weights": [1], "sampling": [1], "evaluation": [0]}
    about = {"configuration": "local", "seeds": seeds, "commits": ["abc", "def-dirty"], "machines": ["vm"]}
    line = about_line(about | {"run": "r1", "artifacts": 3, "newest": "2026-11-22 22:14:48"})
    assert line.startswith("configuration local · seed 1 · commit abc, def-dirty · machine vm · run r1")
    assert line.endswith("3 artifacts, the newest of 2026-11-22 22:14:48 UTC")
    assert about_line({}) == ""
    assert about_line({"seeds": {"evaluation": [0]}}) == ""
    assert about_line({"seeds": {"data": [1], "weights": [1, 2]}}) == "data seed 1 · weights seed 1, 2"
    assert about_line({"seeds": seeds | {"evaluation": [3]}}) == "seed 1 · evaluation seed 3"


def test_the_sentence_names_only_gains_whose_interval_is_above_zero(data, rows):
    text = gains_in_words(data["ladder"])
    assert "above zero: reason +37.5" in text
    assert "Within chance: align +2.5" in text
    assert "From pretrain to self_distill: +40.0" in text
    worse = made({**rows, "reason": rows_of(set())})["ladder"]
    assert "Losses beyond chance, their 95 % interval below zero: reason" in gains_in_words(worse)
    none = made({stage: rows["pretrain"] for stage in STAGES})["ladder"]
    assert gains_in_words(none).startswith("No gain is beyond chance.")


def test_other_seeds_of_the_recipe_stand_below_the_ladder(data):
    by_seed = {
        "pretrain": {"0": 0.25, "1": 0.3, "2": 0.2},
        "align": {"0": 0.275, "1": 0.29},
        "reason": {"0": 0.65, "1": 0.55, "2": 0.6},
    }
    accuracies = {f"evaluate:{stage}": {"held_out": values} for stage, values in by_seed.items()}
    over_seeds = ladder_over_seeds(accuracies, data["ladder"])
    assert [row["stage"] for row in over_seeds] == ["pretrain", "align", "reason"]  # self_distill has no other seed
    gain = lead(by_seed["align"], by_seed["reason"], 2, N)
    assert over_seeds[2]["gain"]["lead"] == pytest.approx(gain.lead)
    assert over_seeds[2]["gain"]["detectable"] == pytest.approx(gain.detectable)
    assert over_seeds[2]["gain"]["p_corrected"] == pytest.approx(2 * gain.p)
    (section, *_) = opening({**data, "ladder_over_seeds": over_seeds})
    (table,) = [block for block in section.blocks if getattr(block, "title", "") == "After each stage, over seeds"]
    cells = {row[0]: row for row in table.rows}
    assert cells["pretrain"][1:] == ("3", "25.0 [12.6, 37.4]", "5.0", *(MISSING,) * 3)
    assert cells["reason"][4].startswith("+31.7 [") or cells["reason"][4].startswith("+31.8 [")
    assert ladder_over_seeds({}, data["ladder"]) == []
    two = {
        stage: {"held_out": {"0": 0.1, "1": high}}
        for stage, high in (("evaluate:pretrain", 0.2), ("evaluate:align", 0.9))
    }
    (section, *_) = opening({**data, "ladder_over_seeds": ladder_over_seeds(two, data["ladder"])})
    (table,) = [block for block in section.blocks if getattr(block, "title", "") == "After each stage, over seeds"]
    assert [row[2] for row in table.rows] == ["15.0 [0.0, 78.5]", "50.0 [0.0, 100.0]"]
    assert table.rows[1][4] == "+35.0 [-100.0, +100.0] over pretrain"


def test_a_missing_stage_is_a_dash_and_no_mark_and_the_next_gain_names_its_base(rows):
    data = made({stage: of for stage, of in rows.items() if stage != "align"})
    cells = {row[0]: row for row in ladder_table(data["ladder"]).rows}
    assert set(cells["align"][1:7]) == {MISSING}
    assert cells["reason"][2].endswith(" over pretrain")
    (chart,) = blocks(data, IntervalChart)
    (ours,) = chart.series.values()
    assert set(ours) == {"pretrain", "reason", "self_distill"}
    drawn = [path.get("d", "") for path in ElementTree.fromstring(svg(chart)).iter() if path.tag.endswith("path")]
    assert not any("nan" in d for d in drawn)
    assert any(d.count("M") == 2 and d.count("L") == 1 for d in drawn), "the line is broken where a stage is missing"
    assert "Not measured: align." in [block.text for block in blocks(data, Paragraph)]
    assert [reply["verdict"] for reply in data["problems"][0]["replies"]][1] == "not evaluated"


def test_a_score_of_none_is_missing_and_not_zero(rows):
    missing = dict.fromkeys(("strict", "lenient", "output", "reasoning", "answer"))
    skipped = [row | missing | {"left_out": "prompt_too_long"} for row in rows["align"]]
    data = made({**rows, "align": skipped})
    assert data["ladder"]["stages"][1]["score"] is None
    assert set(ladder_table(data["ladder"]).rows[1][1:7]) == {MISSING}
    reply = data["problems"][0]["replies"][1]
    assert (reply["good"], reply["verdict"]) == (None, "not asked (prompt too long)")


def test_without_rows_or_common_problems_there_is_a_score_and_no_gain(rows):
    scores = {stage: summarise(of, stage, {}) for stage, of in rows.items()}
    bare = ladder(scores, {})
    assert ladder_table(bare).rows[1][1:3] == ("27.5 [16.1, 42.8]", MISSING)
    assert "Not compared, for lack of rows of both evaluations: align, reason, self_distill." in gains_in_words(bare)
    others = [row | {"prompt_digest": "0" * 16} for row in rows["align"]]
    assert ladder(scores, {**rows, "align": others})["stages"][1]["test"] is None


def test_gsm8k_is_the_ladder_where_it_was_run_and_nothing_is_where_no_benchmark_was(rows):
    both = {stage: [*of, *rows_of({1}, "gsm8k", 4)] for stage, of in rows.items()}
    assert made(both)["ladder"]["benchmark"] == "gsm8k"
    assert len(ladder_table(made(both)["ladder"]).notes) == 1
    assert made({"pretrain": rows_of({1}, "piqa", 4)})["ladder"] is None
    left = [section.title for section in opening(made({})) if section.blocks]
    assert left == ["What it cost", "What is a stand-in here"]


def test_problems_are_those_that_changed_and_fewer_are_said_to_be_so(data, rows):
    assert [(row["stage"], row["change"], row["of"]) for row in data["problems"]] == [
        ("align", "became right", 1),
        ("reason", "became right", 15),
    ]
    assert data["problems"] == changed_problems(data["ladder"], rows), "the choice is the same each time"
    assert data["problems"][0]["id"] == "39"
    marks = [[reply["good"] for reply in row["replies"]] for row in data["problems"]]
    assert marks == [[False, True, True, True], [False, False, True, True]]
    text = " ".join(block.text for block in blocks(data, Paragraph))
    assert "only 2 of three" in text
    assert "No other verdict changed: self_distill." in text
    lost = made({**rows, "self_distill": rows_of(RIGHT["reason"] - {3})})["problems"][2]
    assert (lost["change"], lost["of"], lost["id"]) == ("became wrong", 1, "3")


def test_what_was_spent_is_certain_or_unknown_and_absent_figures_are_not_zero(data):
    (text,) = [block.text for block in blocks(data, Paragraph) if block.see == "Cost"]
    assert "1 min 30 s from the run's first start to its end" in text
    assert "3 requests to endpoints (1 answered from the cache); 30 tokens in, 60 out" in text
    assert "$0.0200 certain; up to $0.0100 unknown" in text
    (text,) = [block.text for block in blocks({**data, "cost": {"calls": 3}}, Paragraph) if block.see == "Cost"]
    assert text == "3 requests to endpoints (1 answered from the cache); tokens not counted; dollars not known."
    total = {"calls": 0, "chip_hours": 24.0, "chip_dollars": 60.0}
    (text,) = [block.text for block in blocks({**data, "cost": total, "calls": []}, Paragraph) if block.see == "Cost"]
    assert text == "24.0 chip-hours, $60.00; 0 requests to endpoints."


def test_both_forms_show_all_of_it_and_escape_what_models_wrote(data):
    sections = [section for section in opening(data) if section.blocks]
    page, text = html_page("t", "", sections), markdown("t", "", sections)
    assert "<script>" not in page
    assert "<b> stands" not in page
    assert "\x1b" not in page + text
    assert "&lt;script&gt;alert(1)" in page
    fences = [token for token in MarkdownIt("commonmark").parse(text) if "alert(1)" in token.content]
    assert len(fences) == 10
    assert {token.type for token in fences} == {"fence"}
    for form in (page, text):
        assert "this run: Held-out problems" in form
        assert "+37.5 [" in form
        assert "a program" in form
    assert page.count('class="missing"') == 0
    assert page.count('class="bad"') == 3
    assert "href" not in page.partition("</nav>")[2].replace("xlink:href", ""), "no link to a section that is not there"
    linked = markdown("t", "", [*sections, type(sections[0])("Stand-ins", (BulletList(("x",)),))])
    assert "[Stand-ins](#stand-ins)" in linked


def test_the_picture_is_the_same_bytes_and_has_every_figure(data):
    (chart,) = blocks(data, IntervalChart)
    first = svg(chart)
    assert first == svg(chart)
    texts = {node.text for node in ElementTree.fromstring(first).iter() if node.tag.endswith("text")}
    assert {"25.0", "27.5", "65.0", "28.0", "33.4", *STAGES} <= texts
    missing = svg(IntervalChart("none <i>", STAGES, {}, {}, "%"))
    assert "<i>" not in missing


def test_a_reply_without_reasoning_or_answer_says_so(data):
    (first, _) = blocks(data, SideBySide)
    assert [reply["answer"] for reply in first.replies] == ["(none)"] * 4
    bare = made({stage: [row | {"reasoning": ""} for row in rows_of(RIGHT[stage])] for stage in STAGES})
    assert {reply["reasoning"] for reply in bare["problems"][0]["replies"]} == {"(none)"}
