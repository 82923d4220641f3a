import json
import shutil
from dataclasses import replace

import pytest

from nautile.common.errors import ConfigError
from nautile.common.events import silent
from nautile.configs.base import TaskConfig
from nautile.configs.evaluation import EvaluateConfig
from nautile.configs.model import TokenizerConfig
from nautile.configs.training import ProblemsConfig
from nautile.data.chat_template import encode_prompt
from nautile.data.tokenizer import tokenizer_for
from nautile.evals.running import answerers
from nautile.evals.running.answerers import Answer, CheckpointAnswerer, SkippedQuestion
from nautile.store.artifacts import Store
from nautile.tasks.engine.job import Job
from nautile.tasks.evaluate import evaluate, held_out, items_to_ask
from tests.evals.running.conftest import RANKS
from tests.support.samples.stage_store import published

pytestmark = pytest.mark.slow

CONFIG = EvaluateConfig(benchmarks=(), max_tokens=6, prompt_length=128, batch=4, temperature=1.0)
PROMPTS = ["Is it?", "What is 1 + 2?", "sea " * 20, "Why?", "shell " * 60]
SEEDS = [(1, n) for n in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def answerer(checkpoint):
    return CheckpointAnswerer(checkpoint, CONFIG)


def test_a_checkpoint_answers_and_long_prompts_are_not_asked(answerer):
    answers = answerer.answer(PROMPTS, SEEDS)
    assert [type(entry) for entry in answers] == [Answer] * 4 + [SkippedQuestion]
    tokenizer = tokenizer_for(TokenizerConfig(ranks=RANKS))
    lengths = [len(encode_prompt(tokenizer, prompt)) for prompt in PROMPTS]
    assert lengths[2] > 64 > lengths[1]
    assert [candidate.tokens_in for candidate in answers] == lengths
    assert answers[4].reason == "too_long"
    for answer in answers[:4]:
        assert 1 <= answer.tokens_out <= 6
        assert answer.truncated == (not answer.reply.finished)
        assert answer.latency_s > 0


def test_an_answer_depends_on_its_prompt_and_seed_alone(answerer):
    together = answerer.answer(PROMPTS, SEEDS)
    alone = [answerer.answer([prompt], [seed])[0] for prompt, seed in zip(PROMPTS[:3], SEEDS[:3], strict=True)]
    backwards = answerer.answer(PROMPTS[::-1], SEEDS[::-1])[::-1]
    assert [item.output for item in together[:3]] == [entry.output for entry in alone]
    assert [candidate.output for candidate in together[:4]] == [backward.output for backward in backwards[:4]]
    other = answerer.answer(PROMPTS[:4], [(2, n) for n in range(4)])
    assert [actual.output for actual in other] != [value.output for value in together[:4]]


def test_its_name_is_its_weights(checkpoint, answerer, tmp_path):
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert CheckpointAnswerer(tmp_path, CONFIG).name == answerer.name


def test_the_shape_a_prompt_gets_does_not_change_its_answer(checkpoint, answerer, monkeypatch):
    monkeypatch.setattr(answerers, "SHORTEST_BUCKET", 64)
    two_shapes = CheckpointAnswerer(checkpoint, CONFIG)
    outputs = [item.output for item in two_shapes.answer(PROMPTS[:4], SEEDS[:4])]
    assert outputs == [entry.output for entry in answerer.answer(PROMPTS[:4], SEEDS[:4])]


def test_a_checkpoint_of_another_tokenizer_is_refused(checkpoint, tmp_path):
    with pytest.raises(ConfigError, match="has a tokenizer of 300 ranks, the configuration's has 400"):
        CheckpointAnswerer(checkpoint, CONFIG, TokenizerConfig(ranks=400))
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    described = json.loads((tmp_path / "config.json").read_text())
    described["tokenizer"]["ranks"] = 4000
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(ConfigError, match="a tokenizer of 4005 ids with a model of 305 rows"):
        CheckpointAnswerer(tmp_path, CONFIG)


def test_a_missing_checkpoint_and_too_long_a_prompt_are_refused(checkpoint, tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json"):
        CheckpointAnswerer(tmp_path, CONFIG)
    with pytest.raises(ConfigError, match="no room for an answer in the model's context of 160"):
        CheckpointAnswerer(checkpoint, CONFIG.model_copy(update={"prompt_length": 160}))


def test_a_long_prompt_leaves_its_answer_what_is_left_of_the_context(checkpoint, monkeypatch):
    monkeypatch.setattr(answerers, "SHORTEST_BUCKET", 64)
    longer = CheckpointAnswerer(checkpoint, CONFIG.model_copy(update={"prompt_length": 150, "max_tokens": 40}))
    answers = longer.answer([PROMPTS[0], "sea " * 40], SEEDS[:2])
    assert [answer.tokens_in > 128 for answer in answers] == [False, True]
    assert answers[0].tokens_out > 10
    assert answers[1].tokens_out <= 10
    assert answers[1].truncated == (answers[1].tokens_out == 10 and not answers[1].reply.finished)


SECTION = {
    "seed": 1,
    "evaluate": EvaluateConfig(
        benchmarks=({"name": "wiki_choice", "items": 6},),
        held_out=ProblemsConfig(tasks=(TaskConfig(name="chain_sum"),), count=6),
        max_tokens=6,
        prompt_length=128,
        batch=4,
    ).model_dump(mode="json"),
}


def job(checkpoint, root, emit=silent, **section):
    """An evaluation of a checkpoint of a store in `root`, whose training text is not known."""
    store, inputs = Store(root), {}
    if checkpoint:
        folder = store.staging("c" * 64) / "output"
        shutil.copytree(checkpoint, folder)
        made = {"stage": "pretrain", "version": 1, "config": {}, "inputs": {}, "facts": {}}
        inputs["checkpoint"] = store.publish("checkpoint", "c" * 64, folder, **made).path
    return Job("evaluate", "e" * 64, "e", {**SECTION, **section}, inputs, store.staging("e" * 64), emit)


def test_the_stage_writes_scores_rows_and_samples_and_continues(checkpoint, tmp_path):
    events = []
    first = job(checkpoint, tmp_path / "one", lambda kind, **fields: events.append((kind, fields)))
    evaluate.work(first)
    out = first.output("evaluation")
    names = {"rows.jsonl", "scores.json", "samples.json"}
    names |= {f"{table}.{form}" for table in ("table2", "breakdown") for form in ("json", "md", "html")} | {
        "table2.svg"
    }
    assert {path.name for path in out.iterdir()} == names | {"latency.rows.jsonl"}
    asked = sum(benchmark["n"] for benchmark in json.loads((out / "scores.json").read_text())["benchmarks"].values())
    assert len((out / "latency.rows.jsonl").read_text().splitlines()) == asked > 0
    scores = json.loads((out / "scores.json").read_text())
    assert {name: candidate["items"] for name, candidate in scores["benchmarks"].items()} == {
        "wiki_choice": 6,
        "held_out": 6,
    }
    assert all(entry["stand_in"] for entry in scores["benchmarks"].values())
    assert scores["protocol"]["temperature"] == 0
    rows = (out / "rows.jsonl").read_bytes()
    assert len(rows.splitlines()) == sum(kind == "sample" for kind, _ in events) == 12
    metrics = {fields["name"] for kind, fields in events if kind == "metric"}
    assert "evaluate/held_out/accuracy" in metrics
    facts = json.loads((first.staging / "facts" / "evaluation.json").read_text())
    assert facts["samples"] == 12
    assert len(facts["stand_ins"]) == 2

    interrupted = job(checkpoint, tmp_path / "two")
    (interrupted.output("evaluation") / "rows.jsonl").write_bytes(rows[: len(rows) // 2])
    evaluate.work(interrupted)
    for name in names:
        assert (interrupted.output("evaluation") / name).read_bytes() == (out / name).read_bytes(), name


def test_both_ways_are_asked_of_a_checkpoint(checkpoint, tmp_path):
    both = job(checkpoint, tmp_path, evaluate={**SECTION["evaluate"], "ways": ["generate", "likelihood"]})
    evaluate.work(both)
    out = both.output("evaluation")
    scores = json.loads((out / "scores.json").read_text())
    assert list(scores["likelihood"]) == ["wiki_choice"]
    assert scores["likelihood"]["wiki_choice"]["items"] == 6
    note = "training text was not screened for it"  # nothing is known of the checkpoint's text
    assert scores["likelihood"]["wiki_choice"]["not_screened"] == note
    assert "Wikipedia choice (stand-in, not screened for)" in (out / "breakdown.md").read_text()
    facts = json.loads((both.staging / "facts" / "evaluation.json").read_text())
    assert facts["not_screened"] == {"wiki_choice": note}
    assert scores["benchmarks"]["held_out"]["not_screened"] is None  # kept apart by a hash of the question
    assert "per byte" in scores["protocol"]["likelihood"]
    assert len((out / "likelihood.jsonl").read_text().splitlines()) == 6
    alone = {**SECTION["evaluate"], "ways": ["likelihood"], "benchmarks": ()}
    with pytest.raises(ConfigError, match="none of the benchmarks has answer options"):
        evaluate.work(job(checkpoint, tmp_path / "alone", evaluate=alone))


def test_the_lineage_tells_which_questions_training_text_was_screened_for(checkpoint, tmp_path):
    likelihood = {**SECTION["evaluate"], "ways": ["likelihood"], "held_out": None}
    asked = job(checkpoint, tmp_path, evaluate=likelihood)
    store = Store(tmp_path)
    section = {"held_out": {"benchmarks": [{"name": "wiki_choice", "items": 2}]}}
    gathered = Job("held_out", "q" * 64, "q", section, {}, store.staging("d" * 64), silent)
    held_out.work(gathered)
    given = {"stage": "toy", "version": 1, "config": {}, "facts": {}}
    listed = store.publish("questions", "d" * 64, gathered.output("questions"), inputs={}, **given)
    text = published(store, "tokens", "text", inputs={"questions": listed.full_id})
    folder = store.staging("a" * 64) / "output"
    shutil.copytree(checkpoint, folder)
    trained = store.publish("checkpoint", "a" * 64, folder, inputs={"web": text.full_id}, **given)
    evaluate.work(replace(asked, inputs={"checkpoint": trained.path}))
    score = json.loads((asked.output("evaluation") / "scores.json").read_text())["likelihood"]["wiki_choice"]
    assert score["not_screened"] == "training text was not screened for 4 of its 6 questions"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"benchmarks": ({"name": "mmlu", "revision": "main"},)}, "'mmlu' needs as `revision` a full commit"),
        ({"benchmarks": ({"name": "sums"},)}, "no benchmark 'sums'"),
        ({"benchmarks": ({"name": "wiki_choice", "items": 2},) * 2}, "'wiki_choice' is listed twice"),
        ({"benchmarks": ()}, "neither `benchmarks` nor `held_out`"),
    ],
)
def test_a_section_that_cannot_be_asked_is_refused(section, message):
    with pytest.raises(ConfigError, match=message):
        items_to_ask(EvaluateConfig.model_validate(section), 0, {})


def test_the_stage_wants_a_checkpoint(checkpoint, tmp_path):
    with pytest.raises(ConfigError, match="no input named `checkpoint`"):
        evaluate.work(job(None, tmp_path))
    with pytest.raises(ConfigError, match="a tokenizer of 300 ranks, the configuration's has 256"):
        evaluate.work(job(checkpoint, tmp_path, tokenizer={"ranks": 256}))
