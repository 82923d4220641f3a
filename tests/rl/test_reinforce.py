"""A reinforcement run that ends anywhere resumes to the same bytes; missing scores are counted and left out."""

import hashlib
import json

import numpy as np
import pytest

from nautile.common.errors import ConfigError, Retryable
from nautile.common.events import silent
from nautile.configs.endpoint import EndpointConfig
from nautile.configs.training import JudgeConfig, ProblemsConfig, RolloutConfig
from nautile.data.endpoints.pool import EndpointPool
from nautile.model.nautile import initialise
from nautile.model.weights.files import save_weights
from nautile.rl.judge import Judge
from nautile.rl.learner import Learner
from nautile.rl.problems import load, load_guard
from nautile.rl.reinforce import Reinforcement, reinforce
from nautile.rl.rollouts import StageInputs, truncate_log
from nautile.tasks.reinforce import JudgeScorer
from tests.rl.conftest import SUMS, TOKENIZER, policy, tiny_model
from tests.support.servers.fake_openai import FakeOpenAI, always, useful
from tests.support.stages.stage_parent import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_retries")]

JUDGE = JudgeConfig(endpoint="judge")


def run(folder, url, steps=4, emit=silent, least=None, **changes):
    """Align a tiny model by the judge at `url`. `changes` are of the policy."""
    endpoint = EndpointConfig(kind="openai", model="fake", url=url, timeout_s=60, concurrency=2)
    model, settings = (
        tiny_model(),
        policy(steps=steps, kl=0.1, **{"save_every": 2, "refill": 1, "sync_every": 3, **changes}),
    )
    problems = load(ProblemsConfig(tasks=SUMS, count=12), 0), load_guard(ProblemsConfig(tasks=SUMS), settings)
    with EndpointPool({"judge": endpoint}, folder / "replies", emit) as pool:
        reinforcement = Reinforcement(
            inputs=StageInputs(model, TOKENIZER, *problems), policy=settings, identity={"run": 1}, work=folder,
            rollout=RolloutConfig(prompts=2, group=4, prompt_length=60, max_tokens=6),
            scorer=JudgeScorer(Judge(pool, JUDGE), JUDGE, 6), rollouts=folder / "rollouts.jsonl", data_seed=7,
            sampling_seed=7, emit=emit, least_success=least,
        )  # fmt: skip
        params, facts = reinforce(reinforcement, initialise(model, 0))
    save_weights(folder / "final", params, model, TOKENIZER)
    return facts


def marks_of(body):
    """Marks that depend on the request alone; about every fifth reply has none."""
    digest = hashlib.sha256(json.dumps(body["messages"]).encode()).digest()[0]
    return "Well, that is hard to say." if digest % 5 == 0 else useful(body)


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


class Killed(Exception):
    """Ends a run in place of a signal."""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    metrics = []
    with FakeOpenAI(reply=marks_of) as server:
        facts = run(folder, server.url, emit=lambda kind, **fields: metrics.append((kind, fields)))
    return folder, facts, server.answered, metrics


def test_ended_in_an_update_and_in_marks_it_resumes_to_the_same_bytes(uninterrupted, tmp_path, monkeypatch):
    """In the third update, whose rollouts are in the log but in no checkpoint; then, resumed, in marks of a later step.
    (An end in a rollout leaves no more than one in its marks.)"""
    folder, _, answered, _ = uninterrupted
    accumulate, saved = Learner._accumulate, tmp_path / "checkpoints" / "steps" / "2"

    def die_in_the_third(learner, *arguments):
        if learner.steps == 2:
            wait_for(saved.exists)  # written in the background
            raise Killed
        accumulate(learner, *arguments)

    with FakeOpenAI(reply=marks_of) as server:
        with monkeypatch.context() as patch:
            patch.setattr(Learner, "_accumulate", die_in_the_third)
            with pytest.raises(Killed):
                run(tmp_path, server.url)
        assert {row["step"] for row in lines(tmp_path / "rollouts.jsonl")} == {0, 1, 2}
        held = server.answered + 3  # in the middle of a group
        server.faults = lambda arrival: None if server.answered < held else "close"
        with pytest.raises(Retryable):  # an outage is worth another try
            run(tmp_path, server.url)
        assert not (tmp_path / "final").exists()
        server.faults = always(None)
        run(tmp_path, server.url)
        assert server.answered == answered, "no reply was asked for twice"
    assert (tmp_path / "rollouts.jsonl").read_bytes() == (folder / "rollouts.jsonl").read_bytes()
    for name in ("weights.safetensors", "config.json"):
        assert (tmp_path / "final" / name).read_bytes() == (folder / "final" / name).read_bytes()


def test_missing_scores_are_counted_and_left_out(uninterrupted):
    folder, facts, _, _ = uninterrupted
    rows = lines(folder / "rollouts.jsonl")
    assert len(rows) == facts["rollouts"]
    assert facts["updates"] == facts["steps"] == 4
    unscored = [row for row in rows if row["reward"] is None]
    assert 0 < len(unscored) == facts["unscored"]
    assert all(row["advantage"] is None for row in unscored)
    assert all(len(row["logprobs"]) == len(row["ids"]) == row["length"] for row in rows)


def test_rewards_and_advantages_follow_the_papers_formulas(uninterrupted):
    """Straight from the stored marks: r, and A_i = r_i - mean over the scored of the group."""
    rows = lines(uninterrupted[0] / "rollouts.jsonl")
    for row in rows:
        marks = row["parts"]
        if row["reward"] is not None:
            weighed = 0.30 * marks["reason"] + 0.55 * marks["answer"] + 0.15 * marks["follow"]
            expected = 0.5 * weighed / 5 + 0.5 * marks["overall"] / 100 - JUDGE.overlong_penalty * row["truncated"]
            assert row["reward"] == pytest.approx(expected)
    for first in range(0, len(rows), 4):
        group = rows[first : first + 4]
        scored = [row["reward"] for row in group if row["reward"] is not None]
        for row in group:
            if row["reward"] is None or len(scored) < 2:
                assert row["advantage"] is None
            else:
                assert row["advantage"] == pytest.approx(row["reward"] - np.mean(scored))


def test_every_step_emits_the_metrics_a_practitioner_looks_at(uninterrupted):
    emitted = [(fields["name"], fields["step"]) for kind, fields in uninterrupted[3] if kind == "metric"]
    expected = {
        "reward", "reward_reason", "reward_answer", "reward_follow", "reward_overall", "solve_rate",
        "zero_signal_share", "grad_norm", "update_norm", "learning_rate", "kl", "entropy", "clip_share", "length",
        "truncated_share", "unscored", "sampler_gap", "importance_weight", "importance_above_cap", "skipped_updates",
        "logprob_positive", "logprob_negative", "rollout_tokens_per_second", "update_tokens_per_second",
    }  # fmt: skip
    for step in range(1, 5):
        assert expected <= {name for name, emitted_at in emitted if emitted_at == step}
    samples = {fields["step"] for kind, fields in uninterrupted[3] if kind == "sample"}
    assert samples == set(range(1, 5))  # as the metrics count them
    gaps = [fields["value"] for _, fields in uninterrupted[3] if fields.get("name") == "sampler_gap"]
    assert max(gaps[0], gaps[3]) < 1e-4, "the sampler and the training forward pass agree"
    assert min(gaps[1:3]) > 1e-4, "the sampler keeps its parameters for three steps"


@pytest.mark.parametrize(("action", "returns"), [("stop", 0), ("roll_back", 1)])
def test_the_guard_stops_or_goes_back_when_the_policy_falls(tmp_path, monkeypatch, action, returns):
    """Scripted readings (the tiny model solves nothing): 8 of 8 at the start, none after the first two updates."""
    right = iter([True] * 8 + [False] * 16 + [True] * 8)
    monkeypatch.setattr("nautile.rl.reinforce.verifiable", lambda problem, reply: float(next(right)))
    settings = {"guard_every": 1, "guard_problems": 8, "guard_action": action, "guard_returns": 1}
    with FakeOpenAI(reply=marks_of) as server:
        facts = run(tmp_path, server.url, steps=3, **settings)
    readings = facts["guard"]
    assert [reading["correct"] for reading in readings] == [8, 0, 0, 8][: 3 + returns]
    assert [reading["went_back"] for reading in readings[:3]] == [False, False, bool(returns)]
    assert facts["steps"] == 2 + returns
    assert facts["published_step"] == 3 * returns  # the later of equals; the start where nothing came after the fall


def test_a_run_without_an_update_says_why(tmp_path):
    """The judge gives no marks: each step says so, and so does the last line."""
    notes = []
    with FakeOpenAI(reply=lambda body: "no marks") as server:
        facts = run(
            tmp_path, server.url, steps=2,
            emit=lambda kind, **fields: notes.append(fields["note"]) if kind == "progress" else None,
        )  # fmt: skip
    assert (facts["updates"], facts["no_update"]) == (0, "no completion was scored")
    assert notes == [
        *["no reward yet, 16 completions without a score, no update: no completion was scored"] * 2,
        "no update: no completion was scored",
    ]


def test_a_policy_that_solves_nothing_stops_the_stage_and_again_when_it_resumes(tmp_path):
    said = r"reason: 0 of its first \d+ completions, of \d+ problems, are right"
    with FakeOpenAI(reply=marks_of) as server:
        for _ in range(2):  # the second begins from a checkpoint, which has what was measured before it
            with pytest.raises(ConfigError, match=said):
                run(tmp_path, server.url, steps=3, least=0.1, save_every=1)
            assert (tmp_path / "checkpoints" / "steps" / "1").exists()
        assert run(tmp_path, server.url, steps=3, save_every=1)["steps"] == 3


def test_a_run_killed_after_a_better_reading_rolls_back_to_the_policy_of_its_checkpoint(tmp_path, monkeypatch):
    """Checkpoint 2 has step 1 as its best reading; the run is killed after reading 4, which is as good."""
    readings = [8, 8, 0, 0, 8]

    def run_from(folder, first, emit=silent):
        right = iter([number < correct for correct in readings[first:] for number in range(8)])
        monkeypatch.setattr("nautile.rl.reinforce.verifiable", lambda problem, reply: float(next(right)))
        with FakeOpenAI(reply=marks_of) as server:
            settings = {"guard_every": 1, "guard_problems": 8, "guard_action": "roll_back", "guard_returns": 1}
            return run(folder, server.url, emit=emit, **settings)

    def kill(kind, **fields):
        if fields.get("name") == "guard_accuracy" and fields["step"] == 4:
            wait_for((tmp_path / "killed" / "checkpoints" / "steps" / "2").exists)
            raise Killed

    facts = run_from(tmp_path / "whole", 0)
    assert [reading["went_back"] for reading in facts["guard"]] == [False, False, False, True, False]
    policies = {path.name for path in (tmp_path / "whole" / "best").iterdir()}
    assert policies == {"1", "4"}, "those of the two checkpoints"
    with pytest.raises(Killed):
        run_from(tmp_path / "killed", 0, kill)
    assert run_from(tmp_path / "killed", 3) == facts
    name = "final/weights.safetensors"
    assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_truncate_log_drops_later_rows_and_a_torn_line(tmp_path):
    log = tmp_path / "log.jsonl"
    # A completion may hold a line separator other than a line feed, which JSON leaves as it is.
    kept = '{"step": 0}\n{"step": 1, "text": "a\u2028b\x85c"}\n'
    for torn in (b'{"st', '{"step": 1, "text": "\u00e9'.encode()[:-1]):  # a full disk ends a write at any byte
        log.write_bytes(f'{kept}{{"step": 2}}\n'.encode() + torn)
        truncate_log(log, 2)
        assert log.read_text(encoding="utf-8") == kept
    truncate_log(tmp_path / "absent.jsonl", 2)


@pytest.mark.parametrize("alike", [True, False])
def test_groups_that_teach_nothing_are_counted_and_said_once(tmp_path, caplog, alike):
    """A judge that marks all alike: most groups have equal rewards, for nearly all completions are cut off."""
    equal = '{"reason": 3, "answer": 3, "follow": 3, "overall": 50}'
    with FakeOpenAI(reply=(lambda body: equal) if alike else useful) as server:
        facts = run(tmp_path, server.url, steps=3, refill=1)
    said = [record.getMessage() for record in caplog.records if "have equal rewards" in record.getMessage()]
    assert len(said) == alike
    if alike:
        assert facts["no_signal"] > facts["groups"] / 2
        assert facts["groups"] == 6 + facts["refilled"]
        assert f"{facts['no_signal']} of the first {facts['groups']} groups" in said[0]
        assert "below 15.9% right most groups of 4 are all wrong" in said[0]
        assert "policy.refill (1)" in said[0]
