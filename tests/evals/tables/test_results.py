import json
from html.parser import HTMLParser

import pytest

from nautile.evals.scoring.scores import summarise
from nautile.evals.tables import paper_figures as paper
from nautile.evals.tables.ladder import ladder, ladder_table, verdict
from nautile.evals.tables.results import MISSING, breakdown, signed, table_1, table_2, to_html, to_json, to_markdown

PLAIN = {"chance": 0.0, "truncated": False, "tokens_out": 1, "finished_thinking": True}


def scores_of(screened=None, **benchmarks):
    """scores.json of a model that got `right` of `n` in each benchmark."""
    rows = []
    for name, (right, n) in benchmarks.items():
        for index in range(n):
            row = {"benchmark": name, "index": index, "strict": index < right, "lenient": index < right}
            row |= {"id": str(index), "prompt_digest": str(index)}
            row["screened"] = screened
            rows.append(row | dict.fromkeys(("category", "left_out", "problem")) | PLAIN)
    return summarise(rows, "m", {})


def test_table_2_has_every_row_of_the_paper_and_the_stand_ins_apart():
    table = table_2({"ours": scores_of(gsm8k=(20, 100), gsm_symbolic=(9, 10), arc_easy=(1, 2), arc_challenge=(1, 2))})
    shown = {row[0]: row for row in table.rows}
    assert len(table.rows) == 1 + 11 + 1 + 1
    assert shown["Training tokens"][3:5] == ("~0.8T", "18T")
    assert shown["GSM8K (0-shot)"][1:4] == ("20.0 [13.3, 28.9]", "-13.4", "33.4")
    assert shown["ARC"][1].startswith("50.0 [")
    assert shown["PIQA"][1:4] == (MISSING, MISSING, "61.5")
    assert shown["Average"][1:4] == (MISSING, MISSING, "35.7")
    stand_in = shown["GSM-Symbolic (stand-in)"]
    assert stand_in[1].startswith("90.0")
    assert set(stand_in[2:-1]) == {MISSING}
    assert "stands in for GSM8K" in stand_in[-1]


def test_every_table_says_which_scores_training_text_was_not_screened_for():
    asked = {"gsm8k": (20, 100), "gsm_symbolic": (9, 10)}
    clean, other = scores_of(True, **asked), scores_of(False, **asked)
    note = "training text was not screened for it"
    cells = {row[0]: row[-1] for row in table_2({"a": clean, "b": other}).rows}
    assert cells["GSM8K (0-shot)"] == f"100 of the split's 1,319 questions; {note} (b)"
    assert cells["GSM-Symbolic (stand-in)"].endswith(f"; {note} (b)")
    stages = {"pretrain": clean, "align": other}
    first = table_1(stages)
    assert f"GSM8K (0-shot): {note} (align)." in first.notes
    assert [note in row[-1] for row in first.rows] == [False, True, False, False]
    climbed = ladder(stages, {})
    assert f"GSM8K (0-shot): {note} (align)." in ladder_table(climbed).notes
    assert f"{note} (align)" in verdict(climbed)
    assert not any(note in to_markdown(table) for table in (table_2({"a": clean}), table_1({"pretrain": clean})))
    titles = [row[0] for row in breakdown(other)[0].rows]
    assert titles == ["GSM8K (0-shot) (not screened for)", "GSM-Symbolic (stand-in, not screened for)"]


def test_table_2_takes_several_models_each_beside_its_own_column_and_none():
    ours, theirs = scores_of(gsm8k=(1, 4)), scores_of(gsm8k=(3, 4)) | {"column": "qwen2.5_0.5b"}
    bundled = scores_of(gsm8k=(2, 4)) | {"column": ""}
    table = table_2({"a": ours, "b": theirs, "c": bundled})
    assert table.columns[1:6] == ("a", "Difference", "b", "Difference", "c")
    row = next(row for row in table.rows if row[0].startswith("GSM8K"))
    assert (row[1][:4], row[2]) == ("25.0", signed(25.0 - 33.4))
    assert (row[3][:4], row[4]) == ("75.0", signed(75.0 - 28.3))
    assert (row[5][:4], row[6]) == ("50.0", "33.4")
    assert row[-1] == "4 of the split's 1,319 questions"
    nobody = table_2({}).rows[1:]
    assert [row[1] for row in nobody[:11]] == [f"{figures['nautile_370m']:.1f}" for figures in paper.TABLE_2.values()]


def test_table_1_on_gsm8k_takes_the_difference():
    table = table_1({"pretrain": scores_of(gsm8k=(28, 100)), "self_distill": scores_of(gsm8k=(34, 100))})
    assert [row[0] for row in table.rows] == list(paper.TABLE_1_ROWS.values())
    assert table.rows[0][1:6] == ("28.00 [20.14, 37.49]", MISSING, "27.98", MISSING, "+0.02")
    assert table.rows[1][1:3] == (MISSING, MISSING)
    assert table.rows[3][2:6] == ("+6.00", "33.43", "+5.45", "+0.57")


def test_a_stage_that_the_paper_does_not_have_stands_in_its_place_and_the_next_gains_over_it():
    stages = {name: scores_of(gsm8k=(n, 100)) for name, n in (("pretrain", 3), ("supervise", 10), ("align", 12))}
    row = table_1(stages).rows[1]
    assert (row[0], row[2:6]) == ("+ supervise (not of the paper)", ("+7.00", MISSING, MISSING, MISSING))
    climbed = ladder(stages, {})
    assert [entry["over"] for entry in climbed["stages"]] == [None, "pretrain", "supervise", None, None]
    assert ladder_table(climbed).rows[1][-1] == MISSING
    assert [entry["stage"] for entry in ladder({"pretrain": stages["pretrain"]}, {})["stages"]] == list(paper.TABLE_1)


def test_table_1_on_a_stand_in_shows_gains_alone():
    table = table_1({"pretrain": scores_of(held_out=(4, 10)), "reason": scores_of(held_out=(5, 10))})
    assert table.columns[1] == "Held-out problems"
    assert {row[5] for row in table.rows} == {MISSING}
    assert table.rows[2][2] == "+10.00"
    assert any("not GSM8K" in note for note in table.notes)


@pytest.mark.parametrize("table", [table_1({}), table_2({"<ours>": scores_of(gsm8k=(1, 2))})])
def test_every_rendering_holds_every_cell(table):
    lines = to_markdown(table).splitlines()
    assert len({line.count(" | ") for line in lines if line.startswith("|")}) == 1
    assert json.loads(json.dumps(to_json(table)))["title"] == table.title
    cells = []

    class Cells(HTMLParser):
        def handle_starttag(self, tag, attrs):
            cells.append("") if tag in ("td", "th") else None

        def handle_data(self, data):
            if cells and data.strip():
                cells[-1] = cells[-1] or data

    Cells().feed(to_html(table))
    assert len(cells) == len(table.columns) * (len(table.rows) + 1)
    assert cells[: len(table.columns)] == list(table.columns)
