"""The study of the balance: which cells it runs, and what its rules make of their figures."""

import pytest

from bench.studies.reinforce import (
    CONTROL,
    PLAIN,
    PRIMARY,
    ROOT,
    SAMPLES,
    SUPERVISED,
    SUPERVISED_ARM,
    TRACE_ARMS,
    baseline_of,
    best_rate,
    dose,
    figure,
    further_arms,
    markdown,
    policy_arms,
    primary,
    sweep_text,
)
from nautile.configs.load import load
from nautile.flows.sweep.arms import read_sweep
from tests.support.samples.evaluations import checkpoint


@pytest.fixture
def read(store, tmp_path):
    """read(arms, until, seed) -> the runs of a seed's sweep."""

    def call(arms, until, seed=1):
        file = tmp_path / f"arms-{seed}.toml"
        file.write_text(sweep_text(seed, [f"evaluate.samples={SAMPLES}"], arms, until), encoding="utf-8")
        return read_sweep(file, store).runs

    return call


def test_the_arms_of_a_seed_share_its_start_and_another_seed_has_another(read):
    arms = {**policy_arms(0.93), **TRACE_ARMS}
    starts = []
    for seed in (1, 2):
        runs = read(arms, "evaluate:reason", seed)
        keys = {run.arm: {step.label: step.key for step in run.prepared.steps} for run in runs}
        assert [*keys] == [*arms]
        assert {arm for arm, own in keys.items() if "reason" not in own} == {*TRACE_ARMS}
        ends = [own.get("reason") or own["self_distill"] for own in keys.values()]
        assert len(set(ends)) == len(arms)
        (start,) = {(own["ingest:synth"], own["pretrain"]) for own in keys.values()}
        starts += start
    assert len({*starts}) == 4


def test_supervised_training_goes_on_from_the_start(read, store):
    config = load(ROOT / "bench" / "studies" / "reinforce.toml").model_dump(mode="json")
    start = checkpoint(store, "start", model=config["model"], tokenizer=config["tokenizer"])
    (run,) = read({SUPERVISED: (*SUPERVISED_ARM, f'pretrain.start="{start.id}"')}, "evaluate:pretrain")
    pretrain = next(step for step in run.prepared.steps if step.label == "pretrain")
    assert start.full_id in pretrain.inputs.values()


@pytest.mark.parametrize(("phase", "arms", "baselines"), [("table", 8, 4), ("staleness", 10, 4)])
def test_the_further_arms_differ_and_each_has_its_baseline(read, phase, arms, baselines):
    settings = further_arms(phase)
    runs = read(settings, "evaluate:reason")
    ends = {step.key for run in runs for step in run.prepared.steps if step.label == "reason"}
    assert len(ends) == len(settings) == arms
    named = {baseline_of(phase, arm) for arm in settings}
    assert named < {*settings}
    assert len(named) == baselines


def rate_cell(arm, rate, seed, right, median=0.9):
    guard = [{"step": step, "correct": right, "n": 1000} for step in (50, 100, 150)]
    return {
        "phase": "rates", "arm": arm, "rate": rate, "seed": seed,
        "facts": {"guard": guard, "balance_factor": {"median": median}}, "metrics": {},
    }  # fmt: skip


def arm_cell(arm, seed, mean):
    return {
        "phase": "arms", "arm": arm, "seed": seed, "facts": {}, "metrics": {"processor_seconds": None},
        "greedy": {"accuracy": mean}, "sampled": {"accuracy": mean, "pass_at": {"8": {"accuracy": mean}}},
    }  # fmt: skip


def test_the_rate_is_the_best_of_both_arms_and_the_dose_is_its_median_factor():
    cells = [
        rate_cell(arm, rate, seed, right + 10 * seed, median)
        for arm, rates in ((PLAIN, {1e-4: 600, 2e-4: 700, 4e-4: 640}), (PRIMARY, {1e-4: 620, 2e-4: 650, 4e-4: 690}))
        for (rate, right), median in zip(rates.items(), (0.5, 0.8, 2.0), strict=True)
        for seed in (1, 2)
    ]
    assert best_rate(cells) == 2e-4
    assert dose(cells) == 0.8
    assert "| plain | 0.0002 | 71.0 | 72.0 | 71.5 |" in markdown(cells)
    ended = [arm_cell(PLAIN, 1, 0.7)]
    assert "a dot a seed" not in figure(cells)
    assert "a dot a seed" in figure(cells + ended)


@pytest.mark.parametrize(
    ("leads", "verdict"),
    [
        ([0.02, 0.021, 0.019, 0.022, 0.02], "The balance helps."),
        ([-0.03, -0.031, -0.029, -0.03, -0.03], "The balance hurts."),
        ([0.001, -0.001, 0.0, 0.001, -0.001], "The balance makes no difference that matters."),
        ([0.06, -0.05, 0.02, -0.03, 0.01], "Open."),
        ([0.02, 0.02, 0.02, 0.02], "No verdict: fewer than 5 seeds."),
    ],
)
def test_the_verdict_is_that_of_the_committed_rule(leads, verdict):
    cells = [arm_cell(CONTROL, seed, 0.7) for seed in range(len(leads))]
    cells += [arm_cell(PRIMARY, seed, 0.7 + lead) for seed, lead in enumerate(leads)]
    assert primary(cells).endswith(verdict)
    assert primary([*cells[: len(leads)]]) == "The primary contrast has not run."
