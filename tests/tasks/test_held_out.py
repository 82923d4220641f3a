"""The stage that gathers the benchmarks' questions, before anything is trained on."""

import json
from dataclasses import replace

import pytest

from nautile.common.errors import ConfigError
from nautile.configs.evaluation import BenchmarkChoice
from nautile.data.screening.contamination import read_questions
from nautile.evals.benchmarks.loading import items_for
from nautile.evals.benchmarks.stand_ins import STAND_INS
from nautile.tasks.engine.job import Job
from nautile.tasks.evaluate import held_out, screened_for
from tests.support.samples.stage_store import published

GENERATED = [entry.name for entry in STAND_INS if entry.build]
ROWS = [
    {"question": f"Ann has {n} pens and buys {n} more at the shop. How many?", "answer": f"{n} + {n}\n#### {2 * n}"}
    for n in range(30)
]


def job(staging, *benchmarks):
    section = {"seeds": {"evaluation": 3}, "held_out": {"benchmarks": list(benchmarks)}}
    return Job("held_out", "key", "execution", section, {}, staging, lambda kind, **fields: None)


def gathered(staging, *benchmarks):
    held_out.work(job(staging, *benchmarks))
    facts = json.loads((staging / "facts" / "questions.json").read_text())
    return read_questions(staging / "output" / "questions"), facts


def test_every_item_of_a_benchmark_is_held_out_however_few_are_asked(tmp_path):
    path = tmp_path / "gsm8k.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    result, facts = gathered(tmp_path, {"name": "gsm8k", "path": str(path), "items": 2})
    assert [(q.benchmark, q.example, q.text) for q in result] == [
        ("gsm8k", str(n), row["question"]) for n, row in enumerate(ROWS)
    ]
    assert not any(question.whole for question in result)
    assert (facts["questions"], facts["benchmarks"]) == (30, {"gsm8k": 30})
    assert facts["too_short"] == facts["boilerplate"] == 0
    assert facts["rule"] == {"words": 13, "shortest": 5, "boilerplate_above": 10}


def test_records_that_are_left_out_are_said_because_their_questions_may_be_trained_on(tmp_path):
    path = tmp_path / "gsm8k.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS) + "{torn\n")
    events = []
    section = {"name": "gsm8k", "path": str(path), "bad_rows_share": 0.1}
    asked = replace(job(tmp_path, section), emit=lambda kind, **fields: events.append((kind, fields)))
    held_out.work(asked)
    facts = json.loads((tmp_path / "facts" / "questions.json").read_text())
    assert facts["lost"] == f"lost: 1 of 31 records (gsm8k: {path}: line 31 is not JSON (not_json))"
    assert [fields["note"] for kind, fields in events if kind == "progress"] == [facts["lost"]]


@pytest.mark.slow
def test_stand_ins_give_what_is_asked_without_our_prompt(tmp_path):
    result, facts = gathered(tmp_path, *({"name": name, "items": 4} for name in GENERATED))
    assert facts["benchmarks"] == dict.fromkeys(sorted(GENERATED), 4)
    assert len(facts["stand_ins"]) == len(GENERATED)
    assert {q.benchmark for q in result if q.whole} == {"gsm_symbolic", "instructions"}
    trivia = items_for(BenchmarkChoice(name="wiki_trivia", items=4), 3)["wiki_trivia"]
    asked = {question.example: question.text for question in result if question.benchmark == "wiki_trivia"}
    for item in trivia:
        assert asked[item.id] in item.prompt
        assert not set(asked[item.id].split()) & {"Answer", "blank?"}
    assert all(question.text.strip() for question in result)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"name": "bbh"}, "no benchmark 'bbh'"),
        ({"name": "mmlu", "revision": "main"}, "'mmlu' needs as `revision` a full commit hash of cais/mmlu"),
        ({"name": "gsm8k", "path": "/nowhere.jsonl"}, "no such file"),
        ({"name": "arc", "path": "/nowhere.jsonl"}, "each part of 'arc'"),
    ],
)
def test_an_unreadable_benchmark_is_refused_at_the_start(tmp_path, choice, message):
    with pytest.raises(ConfigError, match=message):
        gathered(tmp_path, {"name": "wiki_choice", "items": 4}, choice)
    assert not (tmp_path / "facts").exists()


def made(store, kind, word, files, **inputs):
    given = {"inputs": {name: artifact.full_id for name, artifact in inputs.items()}}
    return published(store, kind, word, files, **given)


def test_a_checkpoint_was_screened_for_what_each_list_in_its_lineage_names(store):
    def listed(word, *texts):
        lines = "".join(json.dumps({"benchmark": "b", "example": text, "text": text}) + "\n" for text in texts)
        return made(store, "questions", word, {"questions.jsonl": lines})

    first, second = listed("first", "one", "two"), listed("second", "two", "three")
    web, other = made(store, "tokens", "web", {}, questions=first), made(store, "tokens", "more", {}, questions=first)
    pretrained = made(store, "checkpoint", "pretrain", {}, web=web, more=other)
    assert screened_for(pretrained) == {"one", "two"}
    # A stage of another run, which holds out another list, continues it.
    aligned = made(store, "checkpoint", "align", {}, checkpoint=pretrained, questions=second)
    assert screened_for(aligned) == {"two"}
    imported = made(store, "checkpoint", "imported", {})
    assert screened_for(imported) == set()
    assert screened_for(made(store, "checkpoint", "tuned", {}, checkpoint=imported, questions=first)) == set()
    plain = made(store, "tokens", "plain", {})
    assert screened_for(made(store, "checkpoint", "mixed", {}, web=web, plain=plain)) == set()
