"""A benchmark of a plug-in, in one file: what it needs to be asked, and what becomes of its faults."""

import json
import math
import time

import pytest

from nautile.common.errors import ConfigError
from nautile.configs.evaluation import BenchmarkChoice
from nautile.configs.plugins import PlugIn
from nautile.evals.benchmarks.catalogue import Benchmark
from nautile.evals.benchmarks.items import BenchmarkItem, grade
from nautile.evals.benchmarks.loading import count_of, items_for, questions, with_own_files
from nautile.evals.benchmarks.registry import BENCHMARKS
from nautile.evals.benchmarks.schemas import Question
from nautile.evals.benchmarks.versions import versions
from nautile.evals.graders.grading import NOT_GRADED, Verdict
from nautile.evals.running.runner import evaluate
from nautile.evals.scoring.scores import summarise
from nautile.evals.tables.results import table_2


def read(record):
    """Colours: a question, and its options with the right one first."""
    return Question(record.text("ask"), options=tuple(record.fields["options"]), correct=0)


def upper(item, reply):
    return reply.answer is not None and reply.answer.isupper()


def shout(seed, count):
    yield from (Question(f"Say {seed + n} loudly.", expected="LOUD") for n in range(count))


def fail(seed, count):
    yield from shout(seed, 2)
    raise KeyError("third")


COLOURS = Benchmark(title="Colours", path="colours.jsonl", size=3, read=read)
ENTRIES = {
    "colours": COLOURS,
    "shouts": Benchmark(title="Shouts", size=7, build=shout, grade=upper, version=4),
    "both": Benchmark(title="Both", parts=("shouts", "broken")),
    "broken": Benchmark(title="Broken", size=5, build=fail),
}


@pytest.fixture(autouse=True)
def plug_ins(monkeypatch, tmp_path):
    """The entries above as those of NAUTILE_PLUGINS would be."""
    monkeypatch.chdir(tmp_path)
    rows = [{"ask": f"Number {n}?", "options": ["red", "blue"]} for n in range(3)]
    (tmp_path / "colours.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"options": []}]))
    for name, entry in ENTRIES.items():
        monkeypatch.setitem(globals(), name, entry)
        plug_in = PlugIn("benchmarks", name, f"{__name__}:{name}", "a test")
        monkeypatch.setitem(BENCHMARKS.plug_ins, name, plug_in)


def test_a_benchmark_of_one_file_is_asked_held_out_counted_and_shown(model, tmp_path):
    choice = BenchmarkChoice(name="shouts", items=5)
    items = items_for(choice, 0)["shouts"]
    assert [item.question for item in items] == [f"Say {n} loudly." for n in range(5)]
    assert {question.text for question in questions([choice], 0)} == {item.question for item in items}
    assert (count_of(choice), count_of(BenchmarkChoice(name="shouts"))) == (5, 7)
    rows = evaluate(model(items, lambda item: "LOUD" if item.index % 2 else "low"), items, tmp_path / "rows.jsonl")
    scores = summarise(rows, "ours", {})
    assert (scores["benchmarks"]["shouts"]["title"], scores["benchmarks"]["shouts"]["accuracy"]) == ("Shouts", 0.4)
    shown = next(row for row in table_2({"ours": scores}).rows if row[0] == "Shouts")
    assert (shown[1].split()[0], shown[-1]) == ("40.0", "not in the paper")


def test_its_own_file_is_named_in_the_section_and_a_bad_record_is_counted():
    assert with_own_files([{"name": "colours", "path": ""}, {"name": "gsm8k", "path": ""}]) == [
        {"name": "colours", "path": "colours.jsonl"},
        {"name": "gsm8k", "path": ""},
    ]
    bad = {}
    items = items_for(BenchmarkChoice(name="colours", bad_rows_share=0.5), 0, bad)["colours"]
    assert {item.kind for item in items} == {"choice"}
    assert all(item.options[item.letters.index(item.expected)] == "red" for item in items)
    assert [message.split(":")[1] for message in bad["colours"]] == [" record 3 of colours.jsonl"]
    with pytest.raises(ConfigError, match=r"record 3 of colours\.jsonl"):
        items_for(BenchmarkChoice(name="colours"), 0)


def test_its_version_is_its_own_else_the_digest_of_its_source():
    assert versions(["shouts"]) == {"shouts": {"questions": 4}}
    digest = BENCHMARKS.plug_ins["colours"].digest
    assert versions(["both", "colours"])["colours"]["questions"] == digest
    assert set(versions(["both"])) == {"shouts", "broken"}


def test_a_generator_that_fails_is_a_fault_of_the_configuration():
    with pytest.raises(ConfigError, match=r"broken: its generator failed after 2 questions \(KeyError: 'third'\)"):
        items_for(BenchmarkChoice(name="broken"), 0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "one of `hub`, `path`, `build` and `parts`"),
        ({"hub": "a/b", "path": "c", "read": read, "size": 1}, "one of `hub`, `path`, `build` and `parts`"),
        ({"hub": "a/b", "size": 1}, "`read` is missing"),
        ({"build": shout}, "`size` is missing"),
        ({"build": shout, "size": 1, "kind": "colour"}, "no answer kind 'colour'"),
    ],
)
def test_an_entry_that_lacks_something_says_what(fields, message):
    with pytest.raises(ValueError, match=message):
        Benchmark(**fields)


def wait(item, reply):
    while True:
        try:
            time.sleep(60)
        except Exception:
            continue


def leave(item, reply):
    raise SystemExit(3)


@pytest.mark.parametrize(
    "grader",
    [
        wait, leave, lambda item, reply: {}["x"], lambda item, reply: "right", lambda item, reply: None,
        lambda item, reply: Verdict(math.nan, True, None, None),
        lambda item, reply: Verdict(True, True, None, "rubbish"),
    ],
)  # fmt: skip
def test_a_grader_that_hangs_raises_or_gives_no_verdict_is_a_missing_score(grader, reply, monkeypatch):
    monkeypatch.setattr("nautile.evals.benchmarks.items.GRADER_S", 0.2)
    item = BenchmarkItem("b", 0, "0", "?", "text", "x", grader=grader)
    assert grade(item, reply("x")).verdict == NOT_GRADED


def test_a_grader_may_say_right_or_wrong_and_unfinished_thinking_is_never_right(reply):
    item = BenchmarkItem("b", 0, "0", "?", "text", "x", grader=lambda item, reply: True)
    assert grade(item, reply("x")).verdict == Verdict(True, True, "x", None)
    assert grade(item, reply(None)).verdict == Verdict(False, True, None, "unfinished")
