"""The four seeds: which steps each of them moves, and what stays the same with another `seed`."""

from itertools import islice

import pytest

from nautile.common.errors import ConfigError
from nautile.configs.base import SeedName
from nautile.configs.load import load, load_own
from nautile.configs.schema import RunConfig
from nautile.configs.sweep import SweepConfig
from nautile.data.sources.reasoning_gym import derived_seed, problems
from nautile.evals.benchmarks.stand_ins import held_out
from nautile.flows.dag import Step, build_dag
from nautile.rl.problems import load as load_problems
from nautile.rl.problems import load_references

LATER = ["pretrain", "evaluate:pretrain", "align", "evaluate:align", "reason", "evaluate:reason", "self_distill"]
LATER += ["evaluate:self_distill", "report"]
RL = LATER[2:]


@pytest.fixture(scope="module")
def local() -> RunConfig:
    """Its exemplars come from a source of their own, with a seed of its own, before the text that the seed draws."""
    return load("local")


def steps_of(config: RunConfig) -> dict[str, Step]:
    return {step.label: step for step in build_dag(config)}


def moved(config: RunConfig, **update) -> list[str]:
    """Labels whose keys move with `update`, in the order of the run."""
    before, after = steps_of(config), steps_of(RunConfig.model_validate({**config.model_dump(), **update}))
    return [label for label, step in before.items() if step.key != after[label].key]


def own_seeds(config: RunConfig) -> dict[str, list[str]]:
    """Step -> the seeds in its own section, so not through its inputs."""
    seeds = {}
    for label, step in steps_of(config).items():
        source = step.section.get("ingest", {}).get("source", {})
        seeds[label] = [*step.section.get("seeds", {}), *(["source"] if source.get("seed") is not None else [])]
    return seeds


def test_each_step_has_the_seeds_that_it_uses(local):
    assert own_seeds(local) == {
        "held_out": ["evaluation"],
        "ingest:fineweb_edu": [],
        "ingest:exemplars": ["source"],
        "ingest:synth": ["source"],
        "index": [],
        "distill": [],
        "pretrain": ["data", "weights"],
        "align": ["data", "sampling"],
        "reason": ["data", "sampling"],
        "self_distill": ["data", "sampling"],
        **{label: ["evaluation"] for label in LATER if label.startswith("evaluate:")},
        "report": [],
    }


def test_the_seeds_that_move_each_step_of_the_local_run(local):
    """Through its inputs as well. What was held out, the exemplars, the index and the paid documents stay."""
    assert moved(local, seed=5) == ["ingest:synth", *LATER]
    assert moved(local, seeds={"data": 5}) == ["ingest:synth", *LATER]
    assert moved(local, seeds={"weights": 5}) == LATER
    assert moved(local, seeds={"sampling": 5}) == RL
    # Its benchmarks are generated, and all texts are screened for their questions.
    assert moved(local, seeds={"evaluation": 5}) == list(steps_of(local))


def test_the_seeds_that_move_each_step_of_the_published_run():
    """No seed ingests a corpus or asks a teacher again; that of the evaluation trains nothing again either."""
    config = load("nautile_370m")
    assert moved(config, seed=5) == LATER
    assert moved(config, seeds={"data": 5}) == LATER
    assert moved(config, seeds={"weights": 5}) == LATER
    assert moved(config, seeds={"sampling": 5}) == RL
    assert moved(config, seeds={"evaluation": 5}) == [
        label for label in LATER if label.startswith("evaluate:") or label == "report"
    ]


def test_a_seed_of_its_own_is_not_that_of_the_run(local):
    assert moved(local, seed=5, seeds=dict.fromkeys(["data", "weights", "sampling"], local.seed)) == []
    config = RunConfig.model_validate({**local.model_dump(), "seed": 5, "seeds": {"sampling": 9}})
    expected: dict[SeedName, int] = {"data": 5, "weights": 5, "sampling": 9, "evaluation": 0}
    assert config.effective_seeds == expected


def test_a_distillation_is_asked_again_by_its_own_seed(local):
    assert moved(local, distill={**local.distill.model_dump(), "seed": 1})[0] == "distill"


def test_a_start_needs_no_seed_of_weights(local):
    start = {"start": f"checkpoint/{'0' * 64}"}
    started = RunConfig.model_validate({**local.model_dump(), "pretrain": {**local.pretrain.model_dump(), **start}})
    assert "pretrain" not in moved(started, seeds={"weights": 5})
    assert "pretrain" in moved(started, seeds={"data": 5})


def questions(tasks, seed, split, count):
    return {problem.question for problem in islice(problems(tasks, seed, split), count)}


@pytest.mark.slow
def test_no_problem_is_in_two_of_text_reinforcement_and_test_with_any_seed(local):
    tested = {item.question for item in held_out(local.evaluate.held_out, local.seeds.evaluation)}
    texts, drawn = set(), set()
    for seed in range(2):
        source = local.ingest.sources[2]
        texts |= questions(source.tasks, derived_seed(seed, source.name), "train", 300)
        few = local.reason.problems.model_copy(update={"count": 150})
        drawn |= {problem.question for problem in load_problems(few, derived_seed(seed, "reason"))}
    assert len(tested) == local.evaluate.held_out.count
    assert not tested & (texts | drawn)
    assert not texts & drawn


def test_seeds_in_a_row_draw_other_problems(local):
    tasks = local.reason.problems.tasks
    first, second = (questions(tasks, seed, "train", 200) for seed in (1, 2))
    assert len(first & second) < 20


def test_judges_are_calibrated_on_the_same_problems_with_every_seed(local):
    """They do not take a seed at all; here, that they are problems with an answer of the stage's own kinds."""
    known = load_references(local.align.problems, 16)
    assert known == load_references(local.align.problems, 16)
    assert len(known) == 16
    assert {problem.task for problem in known} <= {task.name for task in local.align.problems.tasks}
    assert all(problem.answer for problem in known)


@pytest.mark.parametrize("value", ["x", "true", "1.0", "1.5", "-1", '"1"', "2147483648", "[1]"])
@pytest.mark.parametrize("field", ["seed", "seeds.data", "seeds.evaluation", "distill.seed", "ingest.sources.1.seed"])
def test_a_seed_that_is_no_whole_number_is_refused_in_one_line(field, value):
    with pytest.raises(ConfigError, match=rf"local\.toml: `{field}`: Input should be [^\n]*$"):
        load("local", [f"{field}={value}"])


@pytest.mark.parametrize("value", ['"x"', "true", "1.0", "-1"])
def test_a_sweep_refuses_it_too(tmp_path, value):
    path = tmp_path / "sweep.toml"
    path.write_text(f'config = "local"\nseeds = [0, {value}]\n[grid]\n"reason.policy.steps" = [1]\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"sweep\.toml: `seeds\.1`: Input should be [^\n]*$"):
        load_own(path, SweepConfig)


def test_a_source_that_is_not_generated_takes_no_seed():
    with pytest.raises(ConfigError, match="source 'fineweb_edu': reader 'wikipedia' draws no records by a `seed`"):
        load("local", ["ingest.sources.0.seed=1"])


def test_a_seed_of_evaluation_alone_is_set_by_name():
    with pytest.raises(ConfigError, match=r"unknown key `seeds\.evalution` \(did you mean 'evaluation'\?\)"):
        load("local", ["seeds.evalution=1"])
