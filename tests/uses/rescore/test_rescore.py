"""Stored rollouts under another reward, and under a judge with another rubric."""

import json
import math

import numpy as np
import pyarrow.parquet
import pytest

from nautile.common.errors import ConfigError
from nautile.common.files import read_json
from nautile.configs.endpoint import EndpointConfig
from nautile.configs.model import TokenizerConfig
from nautile.configs.rewards import REWARDS
from nautile.configs.training import JudgeConfig
from nautile.data.chat_template import encode_prompt, parse_completion
from nautile.data.endpoints.pool import EndpointPool
from nautile.data.sources.reasoning_gym import Problem
from nautile.data.tokenizer import tokenizer_for
from nautile.model.nautile import initialise
from nautile.model.weights.files import save_weights
from nautile.rl.judge import RUBRIC, Judge
from nautile.rl.rewards import advantages
from nautile.rl.rollouts import Group, Rollout
from nautile.store.artifacts import Store
from nautile.tasks.engine.job import Job
from nautile.uses.rescore.config import RescoreConfig
from nautile.uses.rescore.stage import ROLLOUTS, ROWS, groups_of, rescore, summary_of
from tests.rl.conftest import tiny_model
from tests.support.plug_ins import add_plug_in
from tests.support.samples.stage_store import published
from tests.support.servers.fake_openai import FakeOpenAI

TOKENIZER = TokenizerConfig(ranks=300)
# Problem, then the answers and rewards of its rollouts. The second was never solved, the third is a choice.
STORED = (
    (Problem("sum", 3, "1 + 1?", "2", ""), {"2": 1.0, "3": 0.0, "22": None}),
    (Problem("sum", 4, "2 + 2?", "4", ""), {"5": 0.0, "55": 0.0, "555": 0.0}),
    (Problem("text", 5, "Which?", "B", "", "choice", ("red", "blue")), {"B": 1.0, "A": 0.0, "": 0.0}),
)
BY_ANSWER = """
def by_answer(problem, reply):
    if problem.task == "text" and (problem.kind, problem.options) != ("choice", ("red", "blue")):
        raise ValueError(problem)
    return None if reply.answer == "3" else len(reply.answer) / 4
"""


def log_of(groups=STORED):
    tokenizer = tokenizer_for(TOKENIZER)
    lines = []
    for position, (problem, given) in enumerate(groups):
        rollouts = []
        for answer, reward in given.items():
            ids = np.array([*tokenizer.encode("so"), tokenizer.think_end, *tokenizer.encode(answer), tokenizer.im_end])
            rollout = Rollout(
                encode_prompt(tokenizer, problem.question), ids, np.full(len(ids), -0.5), False,
                parse_completion(tokenizer, ids), tokenizer.decode(ids), reward,
            )  # fmt: skip
            rollouts.append(rollout)
        for rollout, advantage in zip(rollouts, advantages([r.reward for r in rollouts]), strict=True):
            rollout.advantage = advantage
        group = Group(position, problem, rollouts)
        lines += [json.dumps({"step": position, **group.row(member)}) + "\n" for member in range(len(rollouts))]
    return "".join(lines)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    model = tiny_model()
    save_weights(folder, initialise(model, 0), model, TOKENIZER)
    return folder


@pytest.fixture
def run(checkpoint, tmp_path):
    """run(settings of the section, endpoints) -> rows and summary of a step of its own."""

    def rescored(endpoints=None, execution="e", log=None, **settings):
        staging = tmp_path / f"staging-{len(list(tmp_path.iterdir()))}"
        rollouts = staging / "rollouts"
        rollouts.mkdir(parents=True)
        (rollouts / ROLLOUTS).write_text(log_of() if log is None else log, encoding="utf-8")
        part = RescoreConfig(group=3, max_tokens=24, **settings)
        section = {"rescore": part.model_dump(mode="json")}
        section["endpoints"] = {name: value.model_dump(mode="json") for name, value in (endpoints or {}).items()}
        inputs = {"rollouts": rollouts, "checkpoint": checkpoint}
        job = Job("rescore", "k" * 64, execution, section, inputs, staging, lambda *_, **__: None, tmp_path / "replies")
        rescore.work(job)
        out = job.output("rescored")
        return pyarrow.parquet.read_table(out / ROWS).to_pylist(), read_json(out / "summary.json")

    return rescored


def test_the_reward_that_it_was_sampled_under_gives_what_was_stored(run):
    rows, summary = run(reward="verifiable")
    assert [(row["new_reward"], row["new_advantage"]) for row in rows[3:]] == [
        (row["old_reward"], row["old_advantage"]) for row in rows[3:]
    ]
    assert (summary["rollouts"], summary["groups"], summary["both"], summary["agree"]) == (9, 3, 8, 8)
    assert (summary["missing_old"], summary["missing_new"]) == (1, 0)
    assert summary["correlation"] == pytest.approx({"pearson": 1.0, "spearman": 1.0})
    assert (summary["live_old"], summary["live_new"], summary["live_both"]) == (2, 2, 2)


@pytest.mark.slow
def test_another_reward_sees_the_whole_problem_and_what_it_changes_is_counted(run, tmp_path, monkeypatch):
    add_plug_in(monkeypatch, tmp_path, REWARDS, "by_answer", BY_ANSWER)
    rows, summary = run(reward="by_answer")
    assert [row["new_reward"] for row in rows] == [0.25, None, 0.5, 0.25, 0.5, 0.75, 0.25, 0.25, 0.0]
    assert (summary["missing_new"], summary["both"], summary["live_old"], summary["live_new"]) == (1, 7, 2, 3)
    # Of the second group none was above its mean; of the third, "A" is now.
    assert summary["signs"]["at"] == {"below": 1, "at": 1, "above": 1}
    assert summary["signs"]["below"] == {"below": 1, "at": 0, "above": 1}
    assert (summary["signs_changed"], summary["signs_compared"], summary["without_problem"]) == (4, 7, 0)
    old = "".join(
        json.dumps({name: value for name, value in json.loads(line).items() if name != "problem"}) + "\n"
        for line in log_of().splitlines()
    )
    rows, summary = run(reward="by_answer", log=old)
    assert [row["new_reward"] for row in rows[6:]] == [None] * 3, "the kind of an earlier version's is not known"
    assert summary["without_problem"] == 9


def marks(body):
    """Full marks where the text of the answer is asked for, else by its presence."""
    system = body["messages"][0]["content"]
    overall = 20 if "Be strict" in system else 80
    return json.dumps({"reason": 3, "answer": 3, "follow": 3, "overall": overall})


def test_a_judge_with_another_rubric_is_paid_once_and_told_that_answers_are_data(run, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "sk-judge-0123456789")
    with FakeOpenAI(reply=marks, key="sk-judge-0123456789", models=("judge",)) as server:
        endpoints = {
            "judge": EndpointConfig(
                kind="openai", model="judge", url=server.url, key_variable="JUDGE_API_KEY", dollars_per_million_in=1.0,
                dollars_per_million_out=1.0,
            )
        }  # fmt: skip
        plain, strict = (JudgeConfig(endpoint="judge", rubric=rubric) for rubric in (None, "Be strict: four marks."))
        rows, summary = run(endpoints, judge=plain)
        assert {row["new_reward"] for row in rows} == {0.5 * 3 / 5 + 0.5 * 0.8}
        assert (summary["judge"]["rubric"], summary["live_new"]) == ("nautile-judge-3", 0)
        assert summary["correlation"] == {"pearson": None, "spearman": None}, "a constant has none"
        asked = len(server.bodies)
        assert summary["dollars"] > 0
        rows, summary = run(endpoints, execution="f", judge=strict)
        assert {row["new_reward"] for row in rows} == {0.5 * 3 / 5 + 0.5 * 0.2}
        assert summary["judge"]["rubric"].startswith("own-")
        system = server.bodies[-1]["messages"][0]["content"]
        assert system == f"Be strict: four marks.\n{RUBRIC[RUBRIC.index('The sections') :]}"
        assert len(server.bodies) == 2 * asked
        _, summary = run(endpoints, execution="g", judge=strict)
        assert (len(server.bodies), summary["dollars"]) == (2 * asked, 0.0)


def test_the_checker_reads_no_other_rubric(tmp_path):
    with (
        EndpointPool(
            {"checker": EndpointConfig(kind="checker", model="arithmetic-checker-1")}, tmp_path, lambda *_, **__: None
        ) as pool,
        pytest.raises(ConfigError, match=r"judge\.rubric: the endpoint 'checker' is a program"),
    ):
        Judge(pool, JudgeConfig(endpoint="checker", rubric="Be strict."))


def test_missing_rewards_are_in_no_figure():
    row = {"old_advantage": None, "new_advantage": None, "whole": True, "group": 0}
    summary = summary_of([row | {"old_reward": None, "new_reward": 1.0}, row | {"old_reward": 0.5, "new_reward": None}])
    assert (summary["both"], summary["mean_old"], summary["signs_compared"]) == (0, None, 0)
    assert (summary["missing_old"], summary["missing_new"]) == (1, 1)


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("not json\n", r"rollouts\.jsonl:1: not a stored rollout"),
        ('{"step": 0}\n', r"rollouts\.jsonl:1: not a stored rollout \(KeyError"),
        ("[]\n", r"rollouts\.jsonl:1: not a stored rollout"),
        (log_of(STORED[:1])[:-1].rpartition("\n")[0], "its last group has 2 rollouts"),
        (log_of([(STORED[0][0], {"2": 1.0}), (STORED[1][0], {"5": 0.0})]), r":2: a group of 3 rollouts has several"),
    ],
)
def test_a_log_that_is_none_is_refused_with_its_line(tmp_path, log, said):
    (tmp_path / ROLLOUTS).write_text(log, encoding="utf-8")
    with pytest.raises(ConfigError, match=said):
        list(groups_of(tmp_path / ROLLOUTS, 3))


@pytest.fixture
def store(checkpoint, tmp_path, monkeypatch):
    """A store with the rollouts of a stage `reason`, and its checkpoint."""
    store = Store(tmp_path / "store")
    monkeypatch.setenv("NAUTILE_STORE", str(store.root))
    store.prepare()
    files = {path.name: path.read_text(encoding="latin-1") for path in checkpoint.iterdir() if path.suffix == ".json"}
    stage = {"stage": "reason", "config": {"reason": {"rollout": {"group": 3, "max_tokens": 24}, "policy": {}}}}
    published(store, "checkpoint", "reason", files, **stage)
    published(store, "rollouts", "reason", {ROLLOUTS: log_of()}, **stage)
    published(store, "traces", "self_distill", {"traces.jsonl": ""}, stage="self_distill")
    return store


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("reason", "--reward", "verifable"), "--reward: no reward 'verifable' (did you mean 'verifiable'?)"),
        (("align", "--reward", "verifiable"), "no stored rollouts of 'align': there are those of reason (rollouts/"),
        (("self_distill", "--reward", "verifiable"), "self_distill keeps the traces that it trained on"),
        (("reason",), "name either a reward"),
        (("reason", "--reward", "verifiable", "--judge", "local"), "name either a reward"),
        (("reason", "--reward", "verifiable", "--set", "name=x"), "--set: only with --judge"),
        (("reason", "--judge", "local", "--set", "align=false"), "has no [align.judge]"),
        (("reason", "--reward", "verifiable", "--out", "rows.csv"), "must be a .parquet file"),
    ],
)
def test_what_cannot_be_scored_again_is_one_line_that_names_it(command_line, store, words, said):
    code, out, err = command_line("rescore", *words)
    assert (code, out) == (2, "")
    assert said in err.replace("\n", " ")
    assert "Traceback" not in err


@pytest.mark.heavy
def test_the_command_and_the_python_function_score_once(command_line, store, tmp_path):
    import nautile

    out = tmp_path / "rows.parquet"
    code, text, err = command_line("rescore", "reason", "--reward", "verifiable", "--out", str(out))
    assert code == 0, err
    assert "groups with a signal now" in text
    assert pyarrow.parquet.read_table(out).num_rows == 9
    (artifact,) = store.list("rescored")
    frame = nautile.open(store.root).rescore("reason", reward="verifiable")
    assert (frame.attrs["artifact"], len(store.list("rescored", superseded=True))) == (artifact.id, 1)
    assert frame.attrs["summary"]["agree"] == 8
    assert [None if math.isnan(value) else value for value in frame["old_reward"]][:3] == [1.0, 0.0, None]
