"""Supervised training: rows are what graders accept, replies alone are trained on, it learns, and it resumes."""

import numpy as np
import pytest

from nautile.common.errors import ConfigError
from nautile.configs.base import OptimizerConfig
from nautile.configs.training import ProblemsConfig, SuperviseConfig
from nautile.data.chat_template import encode_prompt, parse_completion
from nautile.data.sources.reasoning_gym import Problem
from nautile.model.weights.files import save_weights
from nautile.rl.problems import load
from nautile.rl.rewards import verifiable
from nautile.rl.rollouts import StageInputs
from nautile.rl.supervised import Supervision, solution_rows, supervise
from nautile.rl.training_rows import batches
from nautile.tasks.supervise import _check
from tests.rl.conftest import SUMS, TOKENIZER
from tests.support.stages.stage_parent import wait_for

SOLVED = [
    Problem("gsm8k", 0, "48 clips, half as many in May?", "24", "Half is 48/2 = <<48/2=24>>24 clips.", "number"),
    Problem("math", 1, "Solve it.", "\\frac{1}{2}", "We get $\\boxed{\\frac{1}{2}}$.", "math"),
    Problem("file", 2, "Soup?\nA. fork\nB. spoon", "B", "One eats it with a spoon.", "choice", ("fork", "spoon")),
    Problem("file", 3, "What is a hat for?", "the head", "It covers the head.", "text"),
    *load(ProblemsConfig(tasks=SUMS, count=2), 0),
]


def test_a_row_is_what_a_rollout_would_be_and_the_strict_grader_accepts_it(tokenizer):
    rows, left_out = solution_rows(SOLVED, tokenizer, 1000)
    assert not left_out.total()
    for row, problem in zip(rows, SOLVED, strict=True):
        assert row.prompt_ids == encode_prompt(tokenizer, problem.question)
        reply = parse_completion(tokenizer, row.ids.tolist())
        assert (reply.finished, reply.finished_thinking) == (True, True)
        assert verifiable(problem, reply) == 1.0, problem
    first = parse_completion(tokenizer, rows[0].ids.tolist())
    assert (first.reasoning, first.answer) == ("Half is 48/2 = 24 clips.", "24")


def test_replies_alone_are_trained_on(tokenizer):
    rows, _ = solution_rows(SOLVED, tokenizer, 1000)
    (batch,) = batches(rows, len(rows), max(map(len, rows)))
    for index, row in enumerate(rows):
        trained = batch["weights"][index] > 0
        assert batch["targets"][index][trained].tolist() == row.ids.tolist()
        assert set(batch["weights"][index]) <= {0.0, 1.0}


def test_what_has_no_solution_or_is_too_long_is_left_out_and_counted(tokenizer, model, params, tmp_path):
    without = Problem("file", 9, "Why?", "so", "")
    rows, left_out = solution_rows([*SOLVED, without], tokenizer, 64)
    assert left_out["have no rationale"] == 1
    assert len(rows) + left_out["are longer than 64 tokens"] == len(SOLVED)
    config = SuperviseConfig(problems=ProblemsConfig(tasks=SUMS), optimizer=OptimizerConfig())
    with pytest.raises(ConfigError, match=r"supervise.problems: none of its 1 problems is a row: 1 have no rationale"):
        supervise(Supervision(StageInputs(model, TOKENIZER, [without]), config, {}, tmp_path, 0), params)


def test_a_source_without_solutions_is_refused_before_anything_runs():
    problems = ProblemsConfig(sources=({"source": "gsm8k"}, {"source": "arc_easy"}))
    with pytest.raises(ConfigError, match=r"supervise\.problems\.sources\[1\]\.source: 'arc_easy' has answers without"):
        _check(SuperviseConfig(problems=problems, optimizer=OptimizerConfig()))


class Killed(Exception):
    """Ends a run in place of a signal."""


@pytest.mark.slow
def test_it_learns_and_ended_at_an_update_it_resumes_to_the_same_bytes(model, params, tmp_path):
    """The second run ends in its sixth update, after a checkpoint at the fourth."""
    problems, losses, begun = load(ProblemsConfig(tasks=SUMS, count=22), 0), [], []
    config = SuperviseConfig(
        problems=ProblemsConfig(tasks=SUMS, count=22), epochs=8, batch_rows=8, save_every=4,
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
    )  # fmt: skip

    def run(folder, emit):
        work = Supervision(StageInputs(model, TOKENIZER, problems), config, {"run": 1}, folder, 5, emit)
        trained, facts = supervise(work, params)
        save_weights(folder / "final", trained, model, TOKENIZER)
        return facts

    def whole(kind, **fields):
        if kind == "metric" and fields["name"] == "loss":
            losses.append((fields["step"], fields["value"]))

    def ends(kind, **fields):
        if (kind, fields.get("step"), fields.get("name")) == ("metric", 6, "loss"):
            wait_for((tmp_path / "killed" / "checkpoints" / "steps" / "4").exists)  # written in the background
            raise Killed

    def resumed(kind, **fields):
        if kind == "metric" and fields["name"] == "loss":
            begun.append((fields["step"], fields["value"]))

    facts = run(tmp_path / "whole", whole)
    assert facts["updates"] == len(losses) == 24
    assert facts["last_loss"] < 0.5 * facts["first_loss"]
    with pytest.raises(Killed):
        run(tmp_path / "killed", ends)
    assert run(tmp_path / "killed", resumed) == facts
    assert begun == losses[4:]
    for name in ("weights.safetensors", "config.json"):
        ours, theirs = (tmp_path / folder / "final" / name for folder in ("whole", "killed"))
        assert ours.read_bytes() == theirs.read_bytes()
    assert np.isfinite([value for _, value in losses]).all()
