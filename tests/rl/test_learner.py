"""The learner's gradients: against finite differences, and the same whatever the padding, order or micro-batching."""

import json
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nautile.common.errors import ConfigError
from nautile.configs.training import RolloutConfig
from nautile.model import program_thread
from nautile.model.loss import masked_logits, token_logprobs
from nautile.model.nautile import forward
from nautile.model.sharding import make_mesh
from nautile.rl.learner import Learner, means_of
from nautile.rl.learner import rows_of as rows_by_group
from nautile.rl.objective_registry import Balance
from nautile.rl.training_rows import batches, completion_batches, prompts_of
from tests.rl.conftest import group, policy

LENGTH = 52  # a quarter holds every row here, so one width is compiled


ROLLOUT = RolloutConfig(prompts=2, prompt_length=6, max_tokens=9)


def logprobs(params, model, batch, temperature=1.0):
    """Of whole rows, prompt and completion together, which the learner computes apart."""
    hidden_BLD = forward(params, model, batch["tokens"], batch["segments"], batch["positions"])
    return token_logprobs(params, model, hidden_BLD, batch["targets"], temperature=temperature)


@cache
def whole_rows(model):
    """The paper's g+ + g- in one line: -A grad log pi, by the token's weight; with the loss itself."""

    def loss(params, batch):
        return -jnp.sum(logprobs(params, model, batch)[0] * batch["weights"] * batch["advantage"][:, None])

    return jax.jit(jax.value_and_grad(loss))


def learner_of(model, params, balance="balanced", **changes):
    """Micro-batches of three rows, where the reference has four."""
    settings = Balance(balance, "step") if isinstance(balance, str) else balance
    return Learner(model, policy(**{"micro_rows": 3, **changes}), ROLLOUT, params, settings, make_mesh(1))


def rows_of(groups, aggregate="group_tokens"):
    return [row for rows in rows_by_group(groups, aggregate) for row in rows]


def loss_and_gradients(model, params, groups, sign=None):
    rows = [row for row in rows_of(groups) if sign is None or row.advantage * sign > 0]
    parts = [jax.tree.map(np.asarray, whole_rows(model)(params, batch)) for batch in batches(rows, 4, LENGTH)]
    return jax.tree.map(lambda *arrays: sum(arrays), *parts)


def gradients(model, params, groups, sign=None):
    return loss_and_gradients(model, params, groups, sign)[1]


def close(a, b, tolerance=1e-5):
    for leaf, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.asarray(leaf) == pytest.approx(np.asarray(other), abs=tolerance, rel=1e-3)


@pytest.fixture(scope="module")
def groups():
    return [group([1.0, 0.0, 0.0, 1.0], 1), group([0.0, None, 1.0, 0.0], 2)]


def with_one_prompt_each(groups):
    return [replace(g, rollouts=[replace(r, prompt_ids=[7, 8, g.position]) for r in g.rollouts]) for g in groups]


@pytest.mark.slow
def test_prompts_computed_once_give_the_gradients_of_whole_rows(model, params, groups):
    """Each side, whatever the order, widths and micro-batches; completions of one group share their prompt."""
    groups = [*with_one_prompt_each(groups[:1]), groups[1], group([0.0, 1.0, 1.0, 0.0], 3)]
    learner = learner_of(model, params)
    sides = learner._signed_gradients(rows_of(groups), False, {})
    for gradient, sign in zip(sides, (1, -1), strict=True):
        expected = gradients(model, params, groups, sign=sign)
        close(gradient, expected)
        assert size_of(expected) > 0


@pytest.mark.slow
def test_against_finite_differences(model, params, groups):
    """The gradient of -sum w A log pi, along a random direction."""
    rng = np.random.default_rng(3)
    direction = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), params)
    result = gradients(model, params, groups)
    along = sum(np.vdot(a, b) for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(direction), strict=True))
    step = 2e-4
    ahead, behind = (
        jax.tree.map(lambda p, d, sign=sign: np.asarray(p) + sign * step * d, params, direction) for sign in (1, -1)
    )
    values = [float(loss_and_gradients(model, at, groups)[0]) for at in (ahead, behind)]
    assert along == pytest.approx((values[0] - values[1]) / (2 * step), rel=2e-2)


@pytest.mark.slow
def test_a_balanced_step_splits_by_sign(model, params, groups):
    """The learner's norms of g+ and g- are those of the gradients of the rows of either sign."""
    learner = learner_of(model, params)
    metrics = learner.update(groups)
    for name, sign in (("norm_positive", 1), ("norm_negative", -1)):
        expected = size_of(gradients(model, params, groups, sign=sign))
        assert metrics[name] == pytest.approx(expected, rel=1e-4)
    assert metrics["balance_factor"] == pytest.approx(metrics["norm_positive"] / metrics["norm_negative"], rel=1e-4)


def size_of(tree):
    return np.sqrt(sum(float(np.sum(np.asarray(leaf) ** 2)) for leaf in jax.tree.leaves(tree)))


@pytest.mark.slow
def test_a_balance_over_groups_weighs_each_group_by_its_own_norms(model, params, groups):
    """Against the gradients of each group's rows of either sign, added as the paper's equation has it for a group."""
    groups, total, factors = with_one_prompt_each(groups), None, []
    for rows in rows_by_group(groups):
        plus, minus = (part_of(model, params, [row for row in rows if row.advantage * sign > 0]) for sign in (1, -1))
        factors.append(size_of(plus) / size_of(minus))
        balanced = jax.tree.map(lambda up, down: up + factors[-1] * down, plus, minus)
        total = balanced if total is None else jax.tree.map(np.add, total, balanced)
    learner = learner_of(model, params, Balance(over="group"))
    metrics = learner.update(groups)
    assert metrics["grad_norm"] == pytest.approx(size_of(total), rel=1e-4)
    assert metrics["balance_factor"] == pytest.approx(np.mean(factors), rel=1e-4)
    assert learner.factors == pytest.approx(factors, rel=1e-4)


@pytest.mark.slow
def test_a_group_whose_negatives_were_all_cut_has_no_factor(model, params, groups):
    """The mean of the metric, and the deciles of a run, are those of the groups that have one."""
    cut = group([1.0, 1.0, 0.0], 6)
    cut.rollouts[2].truncated = True
    learner = learner_of(model, params, Balance(over="group"), mask_truncated=True)
    metrics = learner.update([groups[0], cut])
    assert len(learner.factors) == 1
    assert metrics["balance_factor"] == pytest.approx(learner.factors[0]) == pytest.approx(1, abs=0.9)


def part_of(model, params, rows):
    (batch,) = batches(rows, 4, LENGTH)
    return jax.tree.map(np.asarray, whole_rows(model)(params, batch)[1])


@pytest.mark.slow
def test_an_update_that_is_not_finite_is_not_applied_and_too_many_stop(model, params, groups):
    """Parameters, moments and schedule stay; it is counted; the run goes on where it was; the third in a row stops."""
    learner, other = learner_of(model, params, skip_limit=1), learner_of(model, params, skip_limit=1)
    broken = [group([1.0, 0.0, 0.0, 1.0], 1), groups[1]]
    broken[0].rollouts[0].advantage = float("inf")
    metrics = learner.update(broken)
    assert metrics["skipped_updates"] == 1
    assert not {"grad_norm", "update_norm", "norm_positive"} & metrics.keys(), "not finite: left out"
    close(learner.trained, params, 0)
    after, expected = learner.update(groups), other.update(groups)
    assert after == expected | {"skipped_updates": 1.0}
    close((learner.trained, learner.state), (other.trained, other.state), 0)
    learner.update(broken)
    with pytest.raises(
        ConfigError, match=r"policy: 2 updates in a row .*\(steps 3 to 4\).*gradients of blocks\.attention\."
    ):
        learner.update(broken)
    close(learner.trained, other.trained, 0)


@pytest.mark.slow
def test_the_learner_has_the_samplers_temperature_or_its_own(model, params, groups):
    """Log-probabilities and their gradient at 0.5: of the logits divided by it, against numpy."""
    rows = rows_of(groups)[:4]
    (batch,) = batches(rows, 4, LENGTH)

    @jax.jit
    def both(params):
        hidden_BLD = forward(params, model, batch["tokens"], batch["segments"], batch["positions"])
        return logprobs(params, model, batch, 0.5), masked_logits(hidden_BLD, params["embedding"], model.vocabulary)

    (values_BL, entropy_BL), logits_BLV = both(params)
    logits_BLV = np.asarray(logits_BLV, np.float64) / 0.5
    log_BLV = logits_BLV - np.log(np.exp(logits_BLV).sum(axis=-1, keepdims=True))
    expected_BL = np.take_along_axis(log_BLV, batch["targets"][..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(values_BL, expected_BL, atol=1e-4)
    np.testing.assert_allclose(entropy_BL, -(np.exp(log_BLV) * log_BLV).sum(axis=-1), atol=1e-4)
    own = (policy(temperature=0.5), ROLLOUT.model_copy(update={"temperature": 0.9}))
    learner = Learner(model, *own, params, Balance("plain"), make_mesh(1))
    prompts, numbered = prompts_of(rows, ROLLOUT.prompt_length, 4, 1)
    (completions,) = completion_batches(numbered, ROLLOUT.max_tokens, lambda width: 4)
    prompt_states = learner.program.encode_prompts(learner.trained, {}, prompts)
    counts = learner.program.completion_gradients[False](
        params, {}, prompt_states, None, None, prompts["lengths"], completions
    )[2]
    weighs_BL = batch["weights"] > 0
    for name, side_B in (("positive", batch["advantage"] > 0), ("negative", batch["advantage"] < 0)):
        expected = expected_BL[weighs_BL & side_B[:, None]].mean()
        assert means_of(jax.device_get(counts))[f"logprob_{name}"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_an_importance_cap_weighs_each_token_and_the_metrics_are_always_there(model, params, groups):
    """Against whole rows with weights of their own: w min(pi / pi_sampled, C), from log-probabilities in numpy."""
    rng = np.random.default_rng(5)
    # Around the policy's own log-probabilities, so that some ratios are above the cap and others below.
    groups = [
        replace(
            g, rollouts=[replace(r, logprobs=-rng.uniform(4, 8, len(r.ids)).astype(np.float32)) for r in g.rollouts]
        )
        for g in groups
    ]
    (batch,) = batches(rows_of(groups), 8, LENGTH)
    values_BL = np.asarray(jax.jit(lambda params: logprobs(params, model, batch)[0])(params))
    ratio_BL, real_BL = np.exp(values_BL - batch["sampled"]), batch["weights"] > 0
    weighed = {**batch, "weights": batch["weights"] * np.minimum(ratio_BL, 1.5)}
    learner = learner_of(model, params, None, importance_cap=1.5)
    shared = {}
    close(learner._signed_gradients(rows_of(groups), False, shared)[0], whole_rows(model)(params, weighed)[1])
    metrics = means_of(jax.device_get(shared["counts"]))
    assert metrics["importance_weight"] == pytest.approx(ratio_BL[real_BL].mean(), rel=1e-4)
    assert 0 < metrics["importance_above_cap"] == pytest.approx((ratio_BL[real_BL] > 1.5).mean())
    learner_of(model, params)._signed_gradients(rows_of(groups), False, shared := {})
    metrics = means_of(jax.device_get(shared["counts"]))
    assert metrics["importance_weight"] == pytest.approx(ratio_BL[real_BL].mean(), rel=1e-4)
    assert metrics["importance_above_cap"] == pytest.approx((ratio_BL[real_BL] > 2).mean())


@pytest.mark.slow
def test_tapered_negatives_weigh_by_the_ratio_of_their_completion_and_only_off_policy(model, params, groups):
    """Against whole rows with the weights of TOPR, from log-probabilities in numpy; nothing is clipped."""
    rng = np.random.default_rng(5)
    (batch,) = batches(rows_of(groups), 8, LENGTH)
    values_BL = np.asarray(jax.jit(lambda params: logprobs(params, model, batch)[0])(params))
    around = iter(values_BL.mean() + rng.uniform(-0.3, 0.3, 8))
    groups = [
        replace(g, rollouts=[replace(r, logprobs=np.full(len(r.ids), next(around), np.float32)) for r in g.rollouts])
        for g in groups
    ]
    (batch,) = batches(rows_of(groups), 8, LENGTH)
    real_BL = batch["weights"] > 0
    ratio_B = np.exp(np.where(real_BL, values_BL - batch["sampled"], 0).sum(axis=1))
    weight_B = np.where(batch["advantage"] < 0, np.minimum(ratio_B, 1), 1)
    assert 0.01 < weight_B.min() < 0.9
    learner, weighed = learner_of(model, params, "tapered"), {**batch, "weights": batch["weights"] * weight_B[:, None]}
    for ratio, expected in ((True, weighed), (False, batch)):
        plus, minus = learner._signed_gradients(rows_of(groups), ratio, shared := {})
        close(jax.tree.map(np.add, plus, minus), whole_rows(model)(params, expected)[1])
        assert means_of(jax.device_get(shared["counts"]))["clip_share"] == 0


@pytest.mark.slow
def test_the_sampler_keeps_its_parameters_for_the_steps_asked_also_when_resumed(model, params, groups):
    learner = learner_of(model, params, "plain", sync_every=2)
    learner.update(groups)
    close(learner.sampling_params, params, 0)
    arrays, extra = (
        jax.tree.map(np.asarray, learner.state_to_save()[0]),
        json.loads(json.dumps(learner.state_to_save()[1])),
    )
    assert learner.update(groups)["clip_share"] > 0, "off-policy, for it was sampled before the first update"
    close(learner.sampling_params, learner.params, 0)
    resumed = learner_of(model, params, "plain", sync_every=2)
    resumed.restore(jax.tree.map(jnp.asarray, arrays), extra)
    close(resumed.sampling_params, params, 0)
    resumed.update(groups)
    close(
        (resumed.trained, resumed.state, resumed.sampling_params), (learner.trained, learner.state, learner.params), 0
    )


@pytest.mark.parametrize(("kind", "shares"), [("live", 2), ("drawn", 5)])
def test_groups_weigh_by_those_with_a_signal_or_by_all_that_were_drawn(kind, shares):
    """Two groups of five that were drawn: every token has 1 / (tokens of its group * groups counted)."""
    pair = [group([1.0, 0.0], 5), group([0.0, 1.0], 6)]
    for rows, weighed in zip(rows_by_group(pair, group_count=5 if kind == "drawn" else None), pair, strict=True):
        tokens = sum(len(rollout.ids) for rollout in weighed.rollouts)
        assert [row.weight for row in rows] == pytest.approx([1 / (tokens * shares)] * 2)


def test_what_was_cut_is_left_out_of_the_loss_and_of_its_tokens():
    cut = group([1.0, 0.0, 0.0], 5)
    cut.rollouts[1].truncated = True
    (rows,) = rows_by_group([cut], mask_truncated=True)
    kept = [cut.rollouts[0], cut.rollouts[2]]
    assert [row.advantage for row in rows] == [rollout.advantage for rollout in kept] == pytest.approx([2 / 3, -1 / 3])
    assert {row.weight for row in rows} == {1 / sum(len(rollout.ids) for rollout in kept)}
    for rollout in cut.rollouts:
        rollout.truncated = True
    assert rows_by_group([cut], mask_truncated=True) == []


@pytest.mark.slow
def test_the_learner_counts_its_updates_and_divides_by_the_groups_drawn(model, params, groups):
    """Half as many groups with a signal: half the gradient. The gradient's norm is taken before the clip."""
    learner = learner_of(model, params, "plain", group_weights="drawn")
    whole = learner.update(groups, len(groups))["grad_norm"]
    assert learner.update([], 3) == {}
    assert (learner.updates, learner.steps) == (1, 2)
    learner = learner_of(model, params, "plain", group_weights="drawn")
    assert learner.update(groups, 2 * len(groups))["grad_norm"] == pytest.approx(whole / 2, rel=1e-5)


def test_groups_without_signal_change_nothing(model, params):
    learner = learner_of(model, params)
    assert learner.update([group([1.0, 1.0, 1.0, 1.0]), group([None, 1.0, None, None])]) == {}
    close(learner.params, params, 0)


@pytest.mark.slow
def test_a_second_pass_is_clipped_unless_the_ratio_is_left_out(model, params, groups, caplog):
    """A warning says what leaving it out means: what was sampled plays no part."""
    assert learner_of(model, params, "plain", inner_epochs=3).update(groups)["clip_share"] > 0
    assert learner_of(model, params, "plain", inner_epochs=2, ratio=False).update(groups)["clip_share"] == 0
    assert "policy.ratio is false with policy.inner_epochs 2" in caplog.text


def test_a_forced_token_weighs_nothing(model, params):
    """The sampler inserts the end of a thinking budget: it has no term in the loss and no share of the tokens."""
    pair = group([1.0, 0.0], 5)
    rows = rows_of([pair])
    pair.rollouts[0].forced = 1
    masked = rows_of([pair])
    tokens = [sum(len(r.ids) for r in pair.rollouts), sum(len(r.ids) for r in pair.rollouts) - 1]
    assert [rows[1].weight, masked[1].weight] == pytest.approx([1 / n for n in tokens])
    (batch,) = batches(masked[:1], 1, LENGTH)
    start = len(pair.rollouts[0].prompt_ids) - 1
    assert batch["weights"][0, start + 1] == 0
    assert (batch["weights"][0] > 0).sum() == len(pair.rollouts[0].ids) - 1


@pytest.mark.slow
def test_named_parts_train_and_the_rest_is_shared_with_the_reference_of_the_kl(model, params, groups):
    groups = with_one_prompt_each(groups)
    learner = learner_of(model, params, kl=0.5, train=("blocks.attention",))
    before = learner.params
    assert learner.reference is learner.trained
    frozen = {id(leaf) for leaf in jax.tree.leaves(learner.frozen)}
    assert learner.update(groups)["kl"] == pytest.approx(0, abs=1e-6), "the policy still equals its reference"
    compiled = list(program_thread._spans.all)
    assert learner.update(groups[:1])["kl"] > 0
    assert program_thread._spans.all == compiled, "whatever the number of groups"
    after = learner.params
    for path, leaf in jax.tree_util.tree_leaves_with_path(after):
        leaf_before = next(v for p, v in jax.tree_util.tree_leaves_with_path(before) if p == path)
        if path[1:2] and path[1].key == "attention":
            assert np.any(np.asarray(leaf) != np.asarray(leaf_before))
        else:
            assert leaf is leaf_before
            assert id(leaf) in frozen, "the reference and the policy hold one array of what is frozen"
    assert set(learner.reference) == {"blocks"}
