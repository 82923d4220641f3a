"""The loss of stage 3 (paper §4.4) against its formula, and the weights of short and long traces."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from nautile.common.errors import ConfigError
from nautile.configs.base import OptimizerConfig
from nautile.configs.training import ProblemsConfig, RolloutConfig, SelfDistillConfig
from nautile.data.chat_template import ParsedReply
from nautile.data.sources.reasoning_gym import Problem
from nautile.model.nautile import forward
from nautile.rl import rollouts as rollouts_module
from nautile.rl import self_distillation
from nautile.rl.learner import SkippedUpdates
from nautile.rl.rollouts import Group, Rollout, StageInputs
from nautile.rl.self_distillation import SelfDistillation, curriculum, self_distil, update
from nautile.rl.training_rows import TrainingRow, batches
from tests.rl.conftest import SUMS, TOKENIZER, tiny_model

MODEL, ROWS = tiny_model(), 5
RATE = 0.1


def row(rng, length, advantage, forced=None):
    """A trace of `length` tokens after a prompt: ten in all, so that the formula is compiled for one shape."""
    ids = rng.integers(1, MODEL.vocabulary, length)
    prompt_ids = rng.integers(1, MODEL.vocabulary, 10 - length).tolist()
    return TrainingRow(prompt_ids, ids, np.zeros(length), advantage, 1.0, forced)


@jax.jit
@jax.value_and_grad
def trace_loss(params, tokens_1L, weights_L):
    """sum of w_t * (- log p of token t) of one row without padding."""
    segments_1L, positions_1L = jnp.ones_like(tokens_1L), jnp.arange(tokens_1L.shape[1])[None]
    hidden_LD = forward(params, MODEL, tokens_1L, segments_1L, positions_1L)[0]
    logits_LV = (hidden_LD @ params["embedding"].T)[:, : MODEL.vocabulary]
    logprobs_LV = jax.nn.log_softmax(logits_LV.astype(jnp.float32))
    picked_L = jnp.take_along_axis(logprobs_LV[:-1], tokens_1L[0, 1:, None], axis=1)[:, 0]
    return -jnp.sum(weights_L[1:] * picked_L)


def expected_loss(params, rows, aggregate):
    """The loss and its gradient; a forced token counts in nothing.

    "example": the mean over traces of A_i times the mean of - log p over its tokens. "batch_tokens": the sum over
    traces of A_i * (- log p of its tokens), over the number of all tokens.
    """
    parts, tokens = [], sum(len(trace.ids) - (trace.forced is not None) for trace in rows)
    for trace in rows:
        counted = np.array([index != trace.forced for index in range(len(trace.ids))], np.float32)
        scale = 1 / (len(rows) * counted.sum()) if aggregate == "example" else 1 / tokens
        weights_L = np.concatenate([np.zeros(len(trace.prompt_ids)), trace.advantage * scale * counted])
        row_1L = np.asarray([[*trace.prompt_ids, *trace.ids.tolist()]], np.int32)
        parts.append(trace_loss(params, row_1L, weights_L.astype(np.float32)))
    return jax.tree.map(lambda *terms: sum(np.asarray(term) for term in terms), *parts)


@pytest.fixture(scope="module", params=["example", "batch_tokens"])
def aggregate(request):
    return request.param


@pytest.fixture(scope="module")
def step(aggregate):
    updated = jax.jit(partial(update, MODEL, optax.sgd, aggregate))

    def run(params, rows):
        (batch,) = batches(rows, ROWS, 16)
        return updated(params, optax.sgd(lambda _: RATE).init(params), batch, RATE)

    return run


@pytest.mark.slow
def test_a_step_is_the_formulas_whatever_the_padding(params, step, aggregate):
    """Rows without padding against a batch of wider rows, with two empty ones and with none."""
    rng = np.random.default_rng(3)
    rows = [row(rng, 2, 0.9), row(rng, 9, 0.25), row(rng, 5, 0.5, forced=2), row(rng, 3, 0.7), row(rng, 4, 0.1)]
    for chosen in (rows[:3], rows):
        value, gradient = expected_loss(params, chosen, aggregate)
        after, _, loss, _ = step(params, chosen)
        np.testing.assert_allclose(loss, value, rtol=1e-5)
        jax.tree.map(
            lambda new, old, slope: np.testing.assert_allclose(new, old - RATE * slope, atol=2e-6, rtol=1e-4),
            after,
            params,
            gradient,
        )


@pytest.mark.slow
def test_an_update_that_is_not_finite_is_not_applied(params, step):
    rng = np.random.default_rng(3)
    after, _, _, measured = step(params, [row(rng, 2, 0.9), row(rng, 9, np.inf)])
    jax.tree.map(np.testing.assert_array_equal, after, params)
    assert not measured["applied"]
    skipped = SkippedUpdates(1, "self_distill")
    assert not skipped.record(7, measured, params)
    with pytest.raises(
        ConfigError, match=r"self_distill: 2 updates in a row were not finite \(steps 7 to 8\).*skip_limit 1"
    ):
        skipped.record(8, measured, params)


@pytest.fixture
def distil(model, params, monkeypatch, tmp_path):
    """distil(traces of each round, settings) -> facts, events and the rates of the updates; nothing is computed.

    A round has a row for each trace, of a problem of its own, and one of a problem that was never solved.
    """

    def run_of(traces, **settings):
        trace = {
            "prompt_ids": [1], "ids": [2], "logprobs": [0.0], "reward": 1.0, "advantage": 0.5, "forced": None,
            "solve_rate": 0.5,
        }  # fmt: skip
        unsolved = {"reward": 0.0, "advantage": 0.0, "solve_rate": 0.0}
        rates, events = [], []

        def sample(run, params, number, mesh, check_stop):
            rows = [{"step": 0, "position": position, **trace} for position in range(traces[number])]
            rows.append({"step": 0, "position": 9, **trace, **unsolved})
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (run.work / self_distillation.SAMPLES.format(number)).write_text(lines)

        def step(params, state, batch, rate):
            rates.append(float(rate))
            return params, state, jnp.float32(1.0), {"applied": True}

        state = optax.ScaleByScheduleState(count=jnp.zeros((), jnp.int32))
        monkeypatch.setattr(self_distillation, "_sample", sample)
        monkeypatch.setattr(self_distillation, "programs", lambda *_: (lambda params: state, step))
        config = SelfDistillConfig(
            rollout=RolloutConfig(prompts=1, group=2, max_tokens=8, prompt_length=8),
            problems=ProblemsConfig(tasks=SUMS), rounds=len(traces), **settings,
        )  # fmt: skip
        run = SelfDistillation(
            StageInputs(model, TOKENIZER, ()), config, {}, tmp_path, tmp_path / "traces.jsonl", 0,
            lambda kind, **fields: events.append((kind, fields)),
        )  # fmt: skip
        return self_distil(run, params)[1], events, rates

    return run_of


def test_the_updates_of_all_rounds_are_numbered_in_one_sequence(distil):
    """The rounds have traces of 3 and of 1 problem, so 6 and 2 updates of one trace each."""
    optimizer = OptimizerConfig(learning_rate=RATE)
    _, events, _ = distil([3, 1], epochs=2, batch_rows=1, optimizer=optimizer)
    assert [fields["step"] for _, fields in events if fields.get("name") == "loss"] == list(range(1, 9))


def test_a_batch_of_few_traces_has_a_rate_that_much_lower(distil):
    optimizer = OptimizerConfig(learning_rate=RATE, schedule="constant")
    facts, _, rates = distil([5], batch_rows=2, optimizer=optimizer)
    assert (facts["updates"], rates) == (3, pytest.approx([RATE, RATE, RATE / 2]))


def test_a_round_without_any_trace_says_why(distil):
    facts, events, _ = distil([0], optimizer=OptimizerConfig(learning_rate=RATE))
    assert facts["updates"] == 0
    assert facts["no_update"] == ("no completion is better than its group: of 1 problems 1 were never solved, 0 always")
    notes = [fields.get("note") for kind, fields in events if kind == "progress"]
    assert notes[-1] == f"no update: {facts['no_update']}"


@pytest.mark.parametrize(("weights", "expected"), [(None, [0.25, 0.875]), ("ones", [1.0, 1.0])])
def test_traces_weigh_by_their_advantage_or_all_alike(weights, expected):
    traces = [
        {"prompt_ids": [1], "ids": [2, 3], "logprobs": [0.0, 0.0], "advantage": advantage, "forced": 1}
        for advantage in (0.25, 0.875)
    ]
    rows = [self_distillation._training_row(trace, weights) for trace in traces]
    assert [row.advantage for row in rows] == expected
    assert [row.forced for row in rows] == [1, 1]


def test_a_prompt_has_no_weight_however_it_is_padded():
    """As in pretraining on replies alone: the completion's first token is predicted from the prompt's last one."""
    long = TrainingRow([7, 8, 9], np.array([4, 5, 6, 2]), np.zeros(4), 0.5, 1.0)
    short = TrainingRow([7, 8, 9, 1, 3], np.array([4]), np.zeros(1), 0.5, 1.0)
    (batch,) = batches([long, short], 3, 16)
    assert batch["weights"].tolist() == [[0, 0, 1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 0, 0, 0], [0] * 8]
    assert batch["targets"][batch["weights"] > 0].tolist() == [4, 5, 6, 2, 4]


def test_the_few_right_traces_of_a_hard_problem_weigh_most():
    def sampled(position, rewards):
        rate = sum(rewards) / len(rewards)
        return [{"position": position, "solve_rate": rate, "advantage": reward - rate} for reward in rewards]

    rows = sampled(0, [1, 0, 0, 0]) + sampled(1, [1, 1, 1, 0]) + sampled(2, [1, 1, 1, 1]) + sampled(3, [0, 0, 0, 0])
    levels = {level["solve_rate"]: (level["weight"], level["traces"]) for level in curriculum(rows)}
    assert levels == {0.0: (0.0, 0), 0.25: (0.75, 1), 0.75: (0.25, 3), 1.0: (0.0, 0)}


def test_another_reward_decides_the_advantages_and_the_solve_rate_stays_the_graders():
    replies = [ParsedReply("", answer, True, True) for answer in ("2", "3", "2")]
    rollouts = [
        Rollout([1], np.arange(length), np.zeros(length), False, reply, "") for length, reply in enumerate(replies, 1)
    ]
    group = Group(0, Problem("file", 0, "1 + 1?", "2", ""), rollouts)

    def score(completions):
        return [None if reply.length == 3 else -reply.length for _, reply in completions]

    samples = self_distillation._score_rows([group], score)
    assert [sample["reward"] for sample in samples] == [-1, -2, None]
    assert [sample["advantage"] for sample in samples] == [0.5, -0.5, None]
    assert [sample["parts"]["correct"] for sample in samples] == [1, 0, 1]
    assert {sample["solve_rate"] for sample in samples} == {2 / 3}


@pytest.mark.parametrize(
    ("rewards", "rate", "advantages"),
    [([None, 1.0, 0.0, 1.0], 2 / 3, [None, 1 / 3, -2 / 3, 1 / 3]), ([None] * 4, None, [None] * 4)],
)
def test_a_completion_that_could_not_be_graded_is_in_no_rate_and_no_trace(monkeypatch, rewards, rate, advantages):
    left = list(rewards)
    monkeypatch.setattr(rollouts_module, "verifiable", lambda problem, reply: left.pop(0))
    reply = ParsedReply("", "2", True, True)
    rollouts = [Rollout([1], np.array([2, 3]), np.zeros(2), False, reply, "2") for _ in rewards]
    group = Group(0, Problem("file", 0, "1 + 1?", "2", ""), rollouts)
    samples = self_distillation._score_rows([group], None)
    assert [sample["advantage"] for sample in samples] == pytest.approx(advantages)
    assert {sample["solve_rate"] for sample in samples} == {rate}
    traces = self_distillation._traces_of(samples)
    assert [trace["reward"] for trace in traces] == [1.0] * (0 if rate is None else 2)
    facts = self_distillation._facts(samples, traces, [], 0)
    assert (facts["unscored"], facts["solve_rate"]) == (rewards.count(None), rate)
    assert [level["problems"] for level in facts["curriculum"]] == ([] if rate is None else [1])


def test_a_draw_that_solves_too_little_ends_the_stage_before_all_are_drawn(model, params, tmp_path, monkeypatch):
    """Of 70 problems, in draws of 16, the first 64 are measured; a second try draws the last of these again."""
    drawn = []

    class Engine:
        tokens, seconds = 1, 1.0

        def __init__(self, *arguments):
            pass

        def check(self, problems):
            pass

        def sample(self, params, problems, draw):
            drawn.append(draw)
            replies = [ParsedReply("", "2" if position == 0 else "7", True, True) for position, _ in problems]
            rollouts = [Rollout([1], np.array([2]), np.zeros(1), False, reply, "") for reply in replies]
            return [Group(*problem, [rollout]) for problem, rollout in zip(problems, rollouts, strict=True)]

    monkeypatch.setattr(self_distillation, "RolloutEngine", Engine)
    config = SelfDistillConfig(
        rollout=RolloutConfig(prompts=16, group=2, max_tokens=8, prompt_length=8),
        problems=ProblemsConfig(tasks=SUMS), optimizer=OptimizerConfig(learning_rate=RATE), least_success=0.1,
    )  # fmt: skip
    problems = [Problem("file", index, f"{index} + 1?", "2", "") for index in range(70)]
    run = SelfDistillation(StageInputs(model, TOKENIZER, problems), config, {}, tmp_path, tmp_path / "traces.jsonl", 0)
    said = r"self_distill: 1 of its first 64 completions, of 64 problems, are right"
    for _ in range(2):
        with pytest.raises(ConfigError, match=said):
            self_distil(run, params)
    assert drawn == [0, 1, 2, 3, 3]
