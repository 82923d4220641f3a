"""A sweep's file: the runs it asks for, and what it is refused for before anything runs."""

import re
from pathlib import Path

import pytest

from nautile.common.errors import ConfigError
from nautile.configs.load import changed
from nautile.flows.sweep.arms import planned, read_sweep, toml_value
from nautile.flows.sweep.execute import command
from nautile.flows.sweep.report import saved_sweeps
from tests.support.samples.evaluations import checkpoint
from tests.support.stages.toy_cli import ROOT
from tests.support.stages.toy_stages import TOY

GRID = '[grid]\n"reason.policy.steps" = [3, 30]\n'


@pytest.fixture
def read(store, tmp_path, toy_stages):
    """Read a sweep over the toy configuration, from the rest of its text."""

    def call(text, many=False):
        (tmp_path / "try out.toml").write_text(f'config = "{TOY}"\n{text}', encoding="utf-8")
        return read_sweep(tmp_path / "try out.toml", store, many)

    return call


def test_a_grid_is_every_combination_and_each_seed_a_run(read):
    sweep = read(f'seeds = [0, 7]\nset = ["report.samples=2"]\n{GRID}reason.objective = ["plain", "balanced"]\n')
    assert [run.title for run in sweep.runs[:3]] == [
        "steps=3, objective=plain seed 0",
        "steps=3, objective=plain seed 7",
        "steps=3, objective=balanced seed 0",
    ]
    last = sweep.runs[-1]
    assert last.run_name == last.config.name == "try-out.steps-30-objective-balanced.seed7"
    assert (last.config.reason.policy.steps, last.config.reason.objective, last.config.seed) == (30, "balanced", 7)
    assert last.config.report.samples == 2
    assert len(sweep.runs) == 8
    assert sweep.after == "evaluate:self_distill"


def test_named_arms_and_a_configuration_beside_the_file(read, store, tmp_path):
    (tmp_path / "base.toml").write_text(f'extends = "{TOY}"\nseed = 5\n', encoding="utf-8")
    text = 'config = "base.toml"\nuntil = "evaluate:reason"\n[[arms]]\nname = "as it is"\n'
    (tmp_path / "s.toml").write_text(
        f'{text}[[arms]]\nname = "short"\nset = ["reason.policy.steps=1"]\n', encoding="utf-8"
    )
    sweep = read_sweep(tmp_path / "s.toml", store)
    assert [(run.title, run.config.seed) for run in sweep.runs] == [("as it is", 5), ("short", 5)]
    assert sweep.after == "evaluate:reason"
    assert [step.label for step in sweep.runs[0].prepared.steps][-1] == "evaluate:reason"


def test_files_of_one_name_have_records_of_their_own(read, store, tmp_path):
    first = read(GRID)
    first.save(store)
    elsewhere = tmp_path / "elsewhere" / "try out.toml"
    elsewhere.parent.mkdir()
    elsewhere.write_text(f'config = "{TOY}"\n{GRID}', encoding="utf-8")
    second = read_sweep(elsewhere, store)
    second.save(store)
    assert re.fullmatch(r"try-out-[0-9a-f]{6}", second.name)
    assert second.runs[0].run_name == f"{second.name}.steps-3"
    assert read(GRID).name == first.name == "try-out"
    assert read_sweep(elsewhere, store).name == second.name
    assert {record["file"] for record in saved_sweeps(store).values()} == {str(first.file), str(elsewhere)}
    first.file.unlink()  # moved: the name is free
    assert read_sweep(elsewhere, store).name == "try-out"


def test_the_plan_says_what_comes_from_another_arm(read, store):
    first, second = planned(read(GRID), store)["runs"]
    assert first["shared"] == second["reused"] == []
    assert second["computed"] == ["reason", "evaluate:reason", "self_distill", "evaluate:self_distill", "report"]
    assert first["computed"] == second["shared"] + second["computed"]


ARMS = '[[arms]]\nname = "a"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"sedes = [1]\n{GRID}", r"unknown key `sedes` \(did you mean 'seeds'\?\)"),
        ("", r"write either \[grid\] or \[\[arms\]\]"),
        (GRID + ARMS, r"either \[grid\] or \[\[arms\]\], not both"),
        ("[grid]\n", "grid: it is empty"),
        ('[grid]\n"reason.policy.steps" = []\n', "grid.reason.policy.steps: it has no value"),
        (ARMS + ARMS, "two arms are named 'a'"),
        (ARMS + '[[arms]]\nname = "a b"\nset = ["seed=1"]\n[[arms]]\nname = "a-b"\n', "names too similar"),
        (ARMS + '[[arms]]\nname = "b"\nset = ["reason.policy.micro_rows=3"]\n', "arms 'a' and 'b' make the same"),
        ('[grid]\n"reason.policy.steps" = [3, 3]\n', "two arms are named 'steps=3'"),
        ('[grid]\n"reason.policy.stops" = [3, 30]\n', r"arm 'stops=3': .*did you mean 'steps'"),
        ('[grid]\n"reason.policy.steps" = [3, "x"]\n', "arm 'steps=x': .*`reason.policy.steps`"),
        (f"seeds = [1, 1]\n{GRID}", "seeds: a seed is listed twice"),
        ('seeds = [1, 2]\n[grid]\n"seed" = [3]\n', "sets `seed`, which the sweep itself sets"),
        (f'set = ["name=x"]\n{GRID}', "sets `name`"),
        (f"seeds = {list(range(11))}\n{GRID}", "22 runs; pass --yes"),
        (f'until = "reson"\n{GRID}', "no stage 'reson'.*did you mean 'reason'"),
        (f'until = "index"\n{GRID}', "the arms have no common evaluation"),
        (f'after = "self"\n{GRID}', "no evaluation of 'self'.*; every arm has pretrain, align"),
        (f'way = "sampled"\n{GRID}', "strict of sampled answers, and an arm asks for 0; set evaluate.samples"),
        (f'way = "sampled"\nverdict = "pass@3"\nset = ["evaluate.samples=2"]\n{GRID}', "an arm asks for 2"),
        (f'verdict = "pass@3"\n{GRID}', 'verdict pass@3: needs several answers to a question: add way = "sampled"'),
        (f'benchmarks = ["heldout"]\n{GRID}', r"'heldout' is not evaluated in every arm \(did you mean 'held_out'\?\)"),
    ],
)
def test_what_is_wrong_is_one_message_before_anything_runs(read, store, text, message):
    with pytest.raises(ConfigError, match=message) as refused:
        read(text)
    assert "\n" not in str(refused.value)
    assert store.list() == []


def test_many_runs_are_wanted_by_yes(read):
    assert len(read(f"seeds = {list(range(11))}\n{GRID}", many=True).runs) == 22


@pytest.mark.parametrize(
    "value", [True, 3, 1e-5, -0.5, "off", "3", 'a"b\\ \x7f\n😀', [1, "x"], {"a": {"b": [1.5]}}, []]
)
def test_a_value_of_a_grid_passes_through_set_unchanged(value):
    assert changed({}, [f"x={toml_value(value)}"]) == {"x": value}


@pytest.mark.parametrize(
    ("file", "arms"),
    [
        ("table1_rates", ["learning_rate=3e-05, objective=plain", "learning_rate=3e-05, objective=balanced"]),
        ("grpo_arms", ["plain", "balanced-step"]),
    ],
)
def test_the_sweeps_of_the_studies_begin_from_one_checkpoint(store, file, arms):
    checkpoint(store, "start")
    sweep = read_sweep(ROOT / "bench" / "studies" / f"{file}.toml", store)
    assert list(dict.fromkeys(run.arm for run in sweep.runs))[:2] == arms
    assert {tuple(step.label for step in run.prepared.steps) for run in sweep.runs} == {
        ("held_out", "reason", "evaluate:reason")
    }
    assert len({run.prepared.steps[1].inputs["checkpoint"] for run in sweep.runs}) == 1


def test_an_arm_with_an_evaluation_of_its_own_ends_there(read):
    text = '[[arms]]\nname = "a"\n[[arms]]\nname = "b"\nset = ["pretrain.batch_rows=2"]\nafter = "pretrain"\n'
    sweep = read(text)
    assert sweep.after == "evaluate:self_distill"
    assert [step.label for step in sweep.runs[1].prepared.steps][-1] == "evaluate:pretrain"
    assert [run["after"] for run in sweep.record()["runs"]] == ["evaluate:self_distill", "evaluate:pretrain"]
    other = read(f'until = "evaluate:reason"\n{text}')
    assert [command(other, run)[-2:] for run in other.runs] == [
        ["--until", "evaluate:reason"],
        ["--until", "evaluate:pretrain"],
    ], "the processes end where the plan does"
    with pytest.raises(ConfigError, match="every arm has an `after` of its own"):
        read('[[arms]]\nname = "a"\nafter = "align"\n[[arms]]\nname = "b"\nafter = "reason"\n')
    with pytest.raises(ConfigError, match=r"arm 'b': .*evaluate:alignn"):
        read(text.replace('"pretrain"\n', '"alignn"\n'))


def test_the_shipped_sweep_is_found_by_its_name_and_its_controls_share_the_start(store):
    sweep = read_sweep(Path("local_controls"), store)
    labels = {run.arm: [step.label for step in run.prepared.steps] for run in sweep.runs}
    assert len(sweep.runs) == 20
    assert labels["supervised"][-1] == "evaluate:pretrain"
    assert not {"align", "reason"} & set(labels["self_distill"])
    for seed in range(1, 6):
        keys = {run.arm: {s.label: s.key for s in run.prepared.steps} for run in sweep.runs if run.seed == seed}
        assert len({keys[arm]["pretrain"] for arm in ("ladder", "plain", "self_distill")}) == 1
        assert keys["ladder"]["align"] == keys["plain"]["align"]
        # Another seed asks no teacher again, and measures by the same problems.
        for label in ("distill", "held_out"):
            assert keys["ladder"][label] == sweep.runs[0].prepared.steps[[*labels["ladder"]].index(label)].key
    with pytest.raises(ConfigError, match=r"no sweep 'local_control' .did you mean 'local_controls'"):
        read_sweep(Path("local_control"), store)


def test_the_shipped_study_trains_every_arm_from_the_added_weights(store):
    """In the order in which the page lists them; arms of other stages leave those of the others out."""
    added = checkpoint(store, "published", stage="add")
    sweep = read_sweep(Path("study_370m"), store, many=True)
    labels = {run.arm: [step.label for step in run.prepared.steps][1:] for run in sweep.runs}
    assert labels.pop("supervised") == ["supervise", "evaluate:supervise"]
    for arm in ("self-distillation", "self-distillation, unweighted"):
        assert labels.pop(arm) == ["self_distill", "evaluate:self_distill"]
    assert len(labels) == 9
    assert {tuple(own) for own in labels.values()} == {("reason", "evaluate:reason")}
    assert {run.prepared.steps[1].inputs["checkpoint"] for run in sweep.runs} == {added.full_id}
    assert {run.config.model.compute_dtype for run in sweep.runs} == {"bfloat16"}
    drawn = [run.config.self_distill.problems.count for run in sweep.runs if run.arm.startswith("self")]
    assert {16 * 300} == {*drawn}, "as many completions as 300 updates of 16 problems"
