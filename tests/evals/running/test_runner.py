import json

import pytest

from nautile.common.errors import ConfigError, Retryable
from nautile.data.chat_template import ParsedReply
from nautile.evals.benchmarks.items import BenchmarkItem
from nautile.evals.running.answerers import Answer, SkippedQuestion
from nautile.evals.running.rows import sample_readings
from nautile.evals.running.runner import evaluate, sample_seed, with_samples
from nautile.evals.scoring.scores import score


@pytest.fixture
def items():
    return [
        BenchmarkItem("sums", n, str(n), f"{'What' * (n % 5)} is {n} + 1?", "number", str(n + 1)) for n in range(40)
    ]


def test_rows_come_in_the_items_order_and_are_all_in_the_file(items, model, tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = evaluate(model(items, lambda item: item.expected, batch=7), items, path)
    assert [row["index"] for row in rows] == list(range(40))
    on_disk = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(on_disk, key=lambda row: row["index"]) == rows
    assert [len(row["prompt"]) for row in on_disk] == sorted(len(item.prompt) for item in items)


def test_nothing_is_asked_twice(items, model, tmp_path):
    path = tmp_path / "rows.jsonl"
    first = model(items, lambda item: "1", batch=7)
    evaluate(first, items[:25], path)
    before = path.read_bytes()
    second = model(items, lambda item: "1", batch=7)
    rows = evaluate(second, items, path)
    assert len(first.asked) == 25
    assert len(second.asked) == 15
    assert not {*first.asked} & {*second.asked}
    assert path.read_bytes().startswith(before)
    assert len(rows) == 40


def test_a_torn_last_line_is_asked_again_and_the_file_ends_the_same(items, model, tmp_path):
    whole, torn = tmp_path / "whole.jsonl", tmp_path / "torn.jsonl"
    evaluate(model(items, lambda item: "1", batch=7), items, whole)
    torn.write_bytes(whole.read_bytes()[:4000])
    evaluate(model(items, lambda item: "1", batch=7), items, torn)
    assert torn.read_bytes() == whole.read_bytes()


def test_a_sample_whose_row_was_lost_after_its_latency_has_one_latency(items, model, tmp_path):
    path = tmp_path / "rows.jsonl"
    evaluate(model(items, lambda item: "1", batch=7), items[:14], path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:7]))  # killed between the two files of a batch
    evaluate(model(items, lambda item: "1", batch=7), items, path)
    latencies = [json.loads(line) for line in (tmp_path / "latency.rows.jsonl").read_text().splitlines()]
    assert sorted(row["index"] for row in latencies) == list(range(40))


def test_events_name_every_new_sample_once_and_say_how_far_it_is(items, model, tmp_path):
    events = []
    path = tmp_path / "rows.jsonl"

    def emit(kind, **fields):
        events.append((kind, fields))

    evaluate(model(items, lambda item: "1", batch=16), items[:16], path, emit=emit)
    evaluate(model(items, lambda item: "1", batch=16), items, path, emit=emit)
    samples = [fields for kind, fields in events if kind == "sample"]
    assert sorted(entry["index"] for entry in samples) == list(range(40))
    assert all(
        sample["set"] == "sums" and sample["latency_s"] == 0.5 and None not in sample.values() for sample in samples
    )
    progress = [(fields["done"], fields["total"]) for kind, fields in events if kind == "progress"]
    assert progress == [(0, 16), (16, 16), (16, 40), (32, 40), (40, 40)]
    assert [fields["name"] for kind, fields in events if kind == "metric"] == ["evaluate/tokens_per_second"] * 2


def test_what_cannot_be_asked_is_left_out_counted_and_shown(items, tmp_path):
    class Short:
        name, batch = "short", 8

        def answer(self, prompts, seeds):
            good = Answer(ParsedReply("", "1", True, False), "1", truncated=True, tokens_out=4)
            return [
                SkippedQuestion("too_long", 99) if prompt.startswith("WhatWhatWhat") else good for prompt in prompts
            ]

    events = []
    rows = evaluate(Short(), items, tmp_path / "r.jsonl", emit=lambda kind, **fields: events.append((kind, fields)))
    out = [row for row in rows if row["left_out"]]
    assert {(row["left_out"], row["strict"], row["lenient"], row["output"]) for row in out} == {
        ("too_long", None, None, None)
    }
    result = score("sums", rows)
    assert (result["items"], result["n"], result["left_out"]) == (40, 24, {"too_long": 16})
    assert (result["truncated"], result["correct"], result["tokens_out_mean"]) == (24, 1, 4)
    assert sum(kind == "sample" for kind, _ in events) == 40
    assert all(sample_reading["prompt"] for sample_reading in sample_readings(rows))


def test_a_score_of_nothing_asked_is_none(items):
    result = score("sums", [])
    assert (result["n"], result["accuracy"], result["interval"], result["chance"]) == (0, None, None, None)


def test_rows_of_another_model_or_another_prompt_are_refused(items, model, tmp_path):
    path = tmp_path / "rows.jsonl"
    evaluate(model(items, lambda item: "1"), items, path)
    with pytest.raises(ConfigError, match=r"rows\.jsonl has answers of 'known', not of 'other'"):
        evaluate(model(items, lambda item: "1", name="other"), items, path)
    changed = [BenchmarkItem("sums", 0, "0", "What else?", "number", "1")]
    with pytest.raises(ConfigError, match="sums 0 was asked with another prompt"):
        evaluate(model(changed, lambda item: "1"), changed, path)


@pytest.mark.parametrize("line", [b'{"benchmark": "sums"', b'{"benchmark": "\xff"}'])
def test_a_damaged_line_is_named(items, model, tmp_path, line):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(line + b"\n{}\n")
    with pytest.raises(ConfigError, match=r"rows\.jsonl: line 1 is damaged"):
        evaluate(model(items, lambda item: "1"), items, path)


def test_a_model_that_stops_answering_keeps_what_it_answered(items, model, tmp_path):
    class Fading(model):
        def answer(self, prompts, seeds):
            if len(self.asked) >= 16:
                raise Retryable("endpoint 'fading': 8 of 8 questions got no reply")
            return super().answer(prompts, seeds)

    path = tmp_path / "rows.jsonl"
    with pytest.raises(Retryable, match="no reply"):
        evaluate(Fading(items, lambda item: "1", batch=8), items, path)
    assert len(path.read_text().splitlines()) == 16
    rest = model(items, lambda item: "1", batch=8)
    evaluate(rest, items, path)
    assert len(rest.asked) == 24


def test_seeds_tell_samples_apart_and_never_change():
    def item(benchmark, index):
        return BenchmarkItem(benchmark, index, str(index), "?", "number", "1")

    assert sample_seed(3, item("gsm8k", 7)) == (3, *sample_seed(0, item("gsm8k", 7))[1:])
    each = [item(benchmark, index) for benchmark in ("gsm8k", "piqa") for index in range(5)]
    each += with_samples(each, 3)
    assert len({sample_seed(seed, one) for seed in (0, 1) for one in each}) == 80


def test_several_answers_to_a_question_are_rows_of_their_own_and_none_is_asked_twice(items, model, tmp_path):
    each, events = with_samples(items, 3), []
    path = tmp_path / "sampled.jsonl"
    evaluate(model(each[:30], lambda item: item.expected, batch=7), each[:30], path)
    rest = model(each, lambda item: item.expected, batch=7)
    rows = evaluate(rest, each, path, emit=lambda kind, **fields: events.append(kind))
    assert [(row["index"], row["sample"]) for row in rows] == [(n, k) for n in range(40) for k in range(3)]
    assert len(rest.asked) == 90
    assert "sample" not in events, "the catalog has one sample a question, the greedy one"


def test_readings_show_right_ones_and_every_kind_of_failure(items, model, tmp_path):
    says = [lambda item: item.expected, lambda item: "0", lambda item: "1 or 2", lambda item: "", lambda item: None]
    rows = evaluate(model(items, lambda item: says[item.index % 5](item)), items, tmp_path / "rows.jsonl")
    shown = sample_readings(rows, right=3, wrong=2)
    kinds = [entry["kind"] for entry in shown]
    assert kinds == ["right"] * 3 + sorted(["wrong", "many_answers", "no_answer", "unfinished"] * 2)
    assert sample_readings(rows) == sample_readings(rows[::-1])
