"""What stands behind a score, and the two tables as pictures."""

import xml.etree.ElementTree as ElementTree

import pytest

from nautile.evals.scoring.scores import summarise
from nautile.evals.tables.results import breakdown, table_1, table_2
from nautile.evals.tables.svg import table_figure

KEPT = [
    {"instruction": "a:x", "strict": True, "lenient": True},
    {"instruction": "b:y", "strict": False, "lenient": True},
]


def row(benchmark, index, right, **fields):
    plain = {"benchmark": benchmark, "index": index, "category": None, "chance": 0.25, "left_out": None}
    plain |= {"id": str(index), "prompt_digest": str(index)}
    by_name = {"problem": None, "truncated": False, "tokens_out": 3, "finished_thinking": True}
    return {**plain, **by_name, "strict": right, "lenient": right, **fields}


def rows():
    subjects = [row("mmlu", n, n % 2 == 0, category=("law", "art")[n % 2]) for n in range(8)]
    problems = [row("mmlu", 8 + n, False, category="law", problem=item) for n, item in enumerate(["no_answer"] * 2)]
    cut = [row("mmlu", 10, False, category="law", problem="many_answers", truncated=True)]
    return subjects + problems + cut + [row("ifeval", n, False, instructions=KEPT) for n in range(3)]


def weighed():
    return [row("mmlu", n, n < 6, strict_by_sum=n < 2) for n in range(8)]


def tables():
    return {table.title: table for table in breakdown(summarise(rows(), "m", {}, likelihood_rows=weighed()))}


def test_failures_are_counted_beside_both_verdicts():
    shown = {entry[0]: entry for entry in tables()["Answers and failures"].rows}
    assert shown["MMLU"][1] == "11"
    assert shown["MMLU"][2].startswith("36.4 [")
    assert shown["MMLU"][6:] == ("2", "1", "0", "1", "0")


def test_both_ways_of_asking_stand_beside_each_other():
    (result,) = tables()["Generation and likelihood"].rows
    assert (result[0], result[1][:4], result[2][:4], result[3:]) == ("MMLU", "36.4", "75.0", ("25.0", "25.0", "8"))
    assert "Generation and likelihood" not in {table.title for table in breakdown(summarise(rows(), "m", {}))}


def test_subjects_and_instruction_types_have_rows_of_their_own():
    result = tables()
    assert [candidate[:2] for candidate in result["MMLU by category"].rows] == [("art", "4"), ("law", "7")]
    levels = {entry[0]: entry for entry in result["IFEval: both levels"].rows}
    assert (levels["prompt"][1], levels["instruction"][1]) == ("3", "6")
    assert (levels["instruction"][2][:4], levels["instruction"][3][:5]) == ("50.0", "100.0")
    assert [actual[0] for actual in result["IFEval by instruction"].rows] == ["a:x", "b:y"]


@pytest.mark.slow
def test_the_pictures_hold_every_figure_and_are_the_same_bytes():
    scores = summarise(rows(), "m", {})
    for table in (table_2({"<ours>": scores}), table_2({}), table_1({"pretrain": scores}, "mmlu")):
        svg = table_figure(table)
        assert svg == table_figure(table)
        titles = [node.text for node in ElementTree.fromstring(svg).iter() if node.tag.endswith("title")]
        assert len(titles) >= 4
    measured = [title for title in titles if title.startswith("ours: ")]
    assert measured == ["ours: 36.4 [15.2, 64.6]"]
    two = table_figure(table_2({"<ours>": scores}))
    assert "&lt;ours&gt;: 36.4" in two
    assert two.count("<path") > 12 * 5


def test_the_legend_fits_the_picture_however_long_a_name_is():
    name = "an arm of a sweep whose name is long, " * 2
    svg = ElementTree.fromstring(table_figure(table_2({name: summarise(rows(), "m", {})})))
    width = float(svg.attrib["viewBox"].split()[2])
    texts = {node.text: node.attrib for node in svg.iter() if node.tag.endswith("text")}
    legend = [name, *(text for text in texts if text.endswith("(paper)"))]
    assert len(legend) == 6
    for text in legend:
        begin = float(texts[text]["transform"].split()[1])  # rotate(-0 x y)
        assert begin + 3.5 * len(text) < width, text  # a letter of the legend takes more
