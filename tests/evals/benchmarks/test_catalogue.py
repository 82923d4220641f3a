import csv
import json
import random
import re

import pytest

from nautile.common.errors import ConfigError
from nautile.configs.evaluation import BenchmarkChoice
from nautile.evals.benchmarks.catalogue import PAPER, PINNED, choose, items_of, shuffled
from nautile.evals.benchmarks.loading import check_benchmark, items_for
from nautile.evals.running.runner import evaluate
from nautile.evals.scoring.intervals import wilson
from nautile.evals.scoring.scores import score
from nautile.evals.tables import paper_figures as paper
from tests.support.servers.benchmark_hub import PUBLIC


@pytest.fixture(scope="module")
def items(served_records):
    return {name: items_of(item, served_records[name], seed=3) for name, item in PUBLIC.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLIC)
def test_the_records_come_from_the_hub_as_they_are(items, served_records, hub_records, name):
    made = items_of(PUBLIC[name], hub_records(name, len(served_records[name])), seed=3)
    assert items[name] == made


@pytest.mark.slow
def test_a_split_or_a_configuration_that_does_not_exist_is_named(served_records):
    split, subset, gated = (served_records[f"no such {what}"] for what in ("split", "subset", "gated part"))
    assert split.startswith("ConfigError: gsm8k: openai/gsm8k main validation at e53f048856ff: not available")
    assert subset.startswith("ConfigError: gsm8k: openai/gsm8k plain_text test at e53f048856ff: not available")
    assert gated.endswith("accept its terms on the Hub and set HF_TOKEN")


@pytest.mark.slow
def test_a_gated_set_is_refused_with_what_helps_and_not_tried_again(hub, tmp_path):
    """Everyone may see which files there are; their content is for users who have accepted the terms."""
    refused = hub.read({"gpqa_diamond": {}}, "hf_another", tmp_path)["gpqa_diamond"]
    assert refused.startswith(
        "ConfigError: gpqa_diamond: Idavidrein/gpqa gpqa_diamond train at 633f5ee89ab8: not avail"
    )
    assert refused.endswith("; it is gated: accept its terms on the Hub and set HF_TOKEN")


@pytest.mark.slow
def test_a_quota_is_waited_for_and_files_of_another_format_are_read_as_well(hub, tmp_path):
    """Another revision of GPQA may have Parquet, which says itself what is a text."""
    other = {"benchmark": "gpqa_diamond", "hub": "allenai/ai2_arc", "subset": "ARC-Easy", "split": "test"}
    repository = hub.repositories["openai/gsm8k"]
    repository.faults = ["throttled"]
    result = hub.read({"gpqa_diamond": {}, "arc": other, "gsm8k": {}}, home=tmp_path)
    assert len(result["gpqa_diamond"]) == len(result["arc"]) == 300
    assert isinstance(result["gsm8k"], list)
    assert repository.met["throttled"] == 1


def test_every_repository_is_pinned_to_a_commit():
    assert all(re.fullmatch(r"[0-9a-f]{40}", entry.commit) for entry in PUBLIC.values())
    assert set(PINNED) == {entry.hub for entry in PUBLIC.values()}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLIC)
def test_an_oracle_scores_everything_and_silence_nothing(items, model, oracle, tmp_path, name):
    def scored(file, rule):
        return score(name, evaluate(model(items[name], rule), items[name], tmp_path / file))

    rules = {"right": oracle, "empty": lambda item: "", "unfinished": lambda item: None}
    right, empty, unfinished = (scored(f"{file}.jsonl", rule) for file, rule in rules.items())
    assert (right["n"], right["accuracy"], right["accuracy_lenient"]) == (len(items[name]), 1.0, 1.0)
    assert (right["no_answer"], right["many_answers"], right["unfinished"]) == (0, 0, 0)
    assert (empty["correct"], empty["correct_lenient"], empty["no_answer"]) == (0, 0, len(items[name]))
    assert (unfinished["correct"], unfinished["unfinished"]) == (0, len(items[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLIC)
def test_guessing_scores_chance(items, model, tmp_path, name):
    rng = random.Random(1)
    guessing = model(items[name], lambda item: rng.choice(item.letters or "0123456789"))
    result = score(name, evaluate(guessing, items[name], tmp_path / "rows.jsonl"))
    low, high = wilson(result["correct"], result["n"], z=3.3)
    if PUBLIC[name].chance:
        assert result["chance"] == pytest.approx(PUBLIC[name].chance)
        assert low <= PUBLIC[name].chance <= high
    else:
        assert result["chance"] == 0
        # A digit may be a small sum's answer, and a letter keeps some instructions: little more than nothing.
        assert result["accuracy"] < 0.05 or name == "ifeval"


@pytest.mark.parametrize("name", [name for name, item in PUBLIC.items() if item.kind == "choice"])
def test_options_are_shuffled_by_seed_and_the_key_follows(hub_records, name):
    rows = hub_records(name, 40)
    results, same, other = (items_of(PUBLIC[name], rows, seed) for seed in (1, 1, 2))
    assert results == same
    assert results != other
    for a, b in zip(results, other, strict=True):
        assert sorted(a.options) == sorted(b.options)
        assert a.options[a.letters.index(a.expected)] == b.options[b.letters.index(b.expected)]
        assert f"{a.expected}. {a.options[a.letters.index(a.expected)]}" in a.prompt


@pytest.mark.parametrize(
    "last", ["All of the above", "None of these", "Both A and B", "Neither (A) nor (C)", "Option B"]
)
def test_options_that_speak_of_places_stay_in_theirs(last):
    options = ("one", "two", "three", last)
    assert all(shuffled(options, 3, seed) == (options, 3) for seed in range(20))


def test_a_larger_draw_holds_the_smaller(hub_records):
    items = items_of(PUBLIC["mmlu"], hub_records("mmlu", 60), seed=3)
    small, large = (choose(items, count, seed=5) for count in (10, 50))
    assert len(small) == 10
    assert {item.index for item in small} <= {entry.index for entry in large}
    assert [candidate.index for candidate in large] == sorted(actual.index for actual in large)
    assert choose(items, None, seed=5) == items


WRONG = [
    ("gsm8k", "question", None, "field `question` is missing"),
    ("gsm8k", "answer", "It is 5", "does not end in `#### <number>`"),
    ("gsm8k", "answer", "work #### five or six", "does not end in"),
    ("mmlu", "answer", 4, "points to option 4, but there are 4 options"),
    ("mmlu", "answer", "B", "is str, not int"),
    ("mmlu", "choices", ["one"], "but there are 1"),
    ("mmlu", "choices", "abcd", "is str, not list"),
    ("mmlu_pro", "answer_index", 11, "points to option 11"),
    ("mmlu_pro", "answer", "Z", "is not the letter of `answer_index`"),
    ("piqa", "label", -1, "points to option -1"),
    ("piqa", "sol2", "  ", "field `sol2` is empty"),
    ("openbookqa", "answerKey", "F", "not among the labels A, B, C, D"),
    ("arc_easy", "choices", {"text": ["a", "b"], "label": ["A"]}, "1 labels for 2 texts"),
    ("arc_easy", "choices", {"label": ["A"]}, "`choices`: field `text` is missing"),
    ("trivia_qa", "answer", {"aliases": []}, "`answer`: field `value` is missing"),
    ("ifeval", "instruction_id_list", ["keywords:sea"], "no instruction 'keywords:sea'"),
    (
        "arc_easy",
        "choices",
        {"text": ["a", "b", "c", "d"], "label": ["A", "A", "B", "B"]},
        "is the label of several options",
    ),
    ("gsm8k", "question", "half \ud800", "field `question` has half a surrogate pair"),
    ("mmlu", "choices", ["a", "\udc00"], "field `choices` has half a surrogate pair"),
    ("gpqa_diamond", "Incorrect Answer 2", None, "`Incorrect Answer 2` is missing"),
]


@pytest.mark.parametrize(("name", "field", "value", "message"), WRONG)
def test_a_record_that_does_not_fit_is_refused_by_name(hub_records, name, field, value, message):
    rows = hub_records(name, 3)
    rows[2] = {**rows[2], field: value}
    where = f"{name}: record 2 of {PUBLIC[name].hub} {PUBLIC[name].split}"
    with pytest.raises(ConfigError, match=re.escape(where) + ".*" + re.escape(message)):
        items_of(PUBLIC[name], rows, seed=0)


def test_a_share_of_bad_records_is_left_out_counted_and_named(hub_records, tmp_path):
    rows = hub_records("gsm8k", 20)
    lines = [json.dumps(row) for row in rows]
    lines[3], lines[7] = "{torn", json.dumps({"question": "How many?", "answer": "no number"})
    path = tmp_path / "gsm8k.jsonl"
    path.write_text("\n".join(lines) + "\n")
    left_out: dict[str, list[str]] = {}
    choice = BenchmarkChoice(name="gsm8k", path=str(path), bad_rows_share=0.1)
    items = items_for(choice, 0, left_out)["gsm8k"]
    assert [item.index for item in items] == [at for at in range(20) if at not in (3, 7)]
    bad = left_out.pop("gsm8k")
    assert (left_out, len(bad)) == ({}, 2)
    assert "line 4 is not JSON" in bad[0]
    assert "record 7 of openai/gsm8k test: field `answer`" in bad[1]
    with pytest.raises(
        ConfigError, match=r"line 4 is not JSON.*of 20 records 2 are bad, and `bad_rows_share` allows 9"
    ):
        items_for(choice.model_copy(update={"bad_rows_share": 0.09}), 0)


def test_an_unknown_benchmark_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match="no benchmark 'gsm9k'; there are arc, arc_challenge"):
        items_for(BenchmarkChoice(name="gsm9k"), 0)


@pytest.mark.parametrize("revision", ["main", "abc123"])
def test_the_hub_is_asked_for_commits_alone(revision):
    with pytest.raises(ConfigError, match="'gsm8k' needs as `revision` a full commit hash of openai/gsm8k"):
        items_for(BenchmarkChoice(name="gsm8k", revision=revision), 0)


@pytest.mark.parametrize("name", ["gsm8k", "arc", "wiki_choice"])
def test_a_choice_is_checked_without_loading_it(name):
    check_benchmark(BenchmarkChoice(name=name, revision="" if name == "wiki_choice" else "0123456789" * 4))


def test_records_come_from_a_csv_as_texts(hub_records, tmp_path):
    rows = hub_records("gpqa_diamond", 12)
    path = tmp_path / "gpqa_diamond.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    loaded = items_for(BenchmarkChoice(name="gpqa_diamond", path=str(path)), 1)["gpqa_diamond"]
    assert loaded == items_of(PUBLIC["gpqa_diamond"], rows, 1)


def test_records_come_from_a_file_too(hub_records, tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = hub_records("gsm8k", 20)
    (tmp_path / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "gsm8k.parquet")
    loaded = [
        items_for(BenchmarkChoice(name="gsm8k", items=7, path=str(tmp_path / name)), 1)["gsm8k"]
        for name in ("gsm8k.jsonl", "gsm8k.parquet")
    ]
    assert loaded[0] == loaded[1]
    assert len(loaded[0]) == 7


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        ('{"question": "a", "answer": "b #### 1"}\nnot json', "line 2 is not JSON"),
        ("[1]", "line 1 is not a JSON object"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, content, message):
    path = tmp_path / "gsm8k.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=f"gsm8k: {re.escape(str(path))}: {message}"):
        items_for(BenchmarkChoice(name="gsm8k", path=str(path)), 0)


def test_the_papers_table_is_whole_and_its_averages_are_its_own():
    parts = {part for entry in PAPER for part in entry.parts}
    assert list(paper.TABLE_2) == [entry.name for entry in PAPER if entry.name not in parts]
    assert len(paper.TABLE_2) == 11
    for model, average in paper.TABLE_2_AVERAGE.items():
        assert sum(row[model] for row in paper.TABLE_2.values()) / 11 == pytest.approx(average, abs=0.051)
