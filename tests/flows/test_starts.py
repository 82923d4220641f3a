"""A step that begins from a checkpoint of the store: which one is meant, and what that does to the DAG."""

import json
import shutil

import pytest

from nautile.common.errors import ConfigError
from nautile.configs.load import load
from nautile.configs.schema import RunConfig
from nautile.flows.cli import inspect
from nautile.flows.cli.inspect import publish_snapshot
from nautile.flows.cli.tables import status_table
from nautile.flows.dag import Need, build_dag, resolve_starts
from nautile.flows.planning import plan_pretraining
from nautile.flows.selection import Selection, prepare_run
from nautile.store.artifacts import Store
from nautile.tasks.pretrain import START
from tests.support.stages.toy_chain import make_all
from tests.support.stages.toy_dag import toy_dag

PARTS = ("model", "tokenizer")


def starting(config: RunConfig, **starts: str) -> RunConfig:
    sections = {name: {**getattr(config, name).model_dump(), "start": start} for name, start in starts.items()}
    return RunConfig.model_validate({**config.model_dump(), **sections})


def steps_of(config: RunConfig, store: Store) -> dict:
    return {step.label: step for step in build_dag(resolve_starts(config, store), toy_dag)}


@pytest.fixture
def store(made, tmp_path):
    """A copy of the store in which the toy chain has run: these tests add to it."""
    return Store(shutil.copytree(made[0].root, tmp_path / "store"))


@pytest.fixture(scope="module")
def ids(made):
    """label -> full id of its checkpoint."""
    store, outputs = made
    return {label: store.get(kinds["checkpoint"]).full_id for label, kinds in outputs.items() if "checkpoint" in kinds}


def test_reason_begins_from_the_checkpoint_that_is_named(toy, store, ids):
    """By a prefix; the key has the full id, and what only led to the replaced checkpoint is left out."""
    steps = steps_of(starting(toy, reason=ids["pretrain"][:20]), store)
    assert steps["reason"].stored_inputs == {"checkpoint": ids["pretrain"]}
    assert steps["reason"].needs == {"questions": Need("held_out", "questions")}
    left = ["held_out", "reason", "evaluate:reason", "self_distill", "evaluate:self_distill", "report"]
    assert list(steps) == left
    assert set(steps["report"].needs.values()) == {Need(e, kind) for e in left[:-1] for kind in steps[e].outputs}
    again = steps_of(starting(toy, reason=ids["pretrain"]), store)
    assert [step.key for step in again.values()] == [step.key for step in steps.values()]
    assert steps["reason"].key != steps_of(toy, store)["reason"].key
    assert "start" not in steps["reason"].section["reason"]


def test_the_step_before_by_its_id_gives_the_same_key(toy, store, ids):
    """Where a checkpoint comes from is not in the key of what begins from it."""
    same = steps_of(starting(toy, reason=ids["align"]), store)
    assert same["reason"].key == steps_of(toy, store)["reason"].key


@pytest.fixture
def described(toy, store, ids):
    """`described(model={...})`: give the checkpoint of align a config.json of the toy's shape, with changes."""

    def describe(**changes):
        saved = {part: getattr(toy, part).model_dump(mode="json") | changes.get(part, {}) for part in PARTS}
        (store.get(ids["align"]).folder / "config.json").write_text(json.dumps(saved), encoding="utf-8")

    describe()
    return describe


def test_a_pretraining_branches_and_keeps_its_tokens(toy, store, ids, described):
    usual = steps_of(toy, store)
    steps = steps_of(starting(toy, pretrain=ids["align"]), store)
    assert list(steps) == list(usual)
    assert steps["pretrain"].stored_inputs == {START: ids["align"]}
    assert steps["pretrain"].needs == usual["pretrain"].needs
    assert steps["distill"].key == usual["distill"].key
    assert steps["pretrain"].key != usual["pretrain"].key


def test_newest_is_of_a_label_or_of_no_step_that_this_run_does(toy, store, ids):
    for start in ("newest", "newest:align"):
        assert steps_of(starting(toy, reason=start), store)["reason"].stored_inputs == {"checkpoint": ids["align"]}
    assert steps_of(starting(toy, self_distill="newest:pretrain"), store)["self_distill"].stored_inputs == {
        "checkpoint": ids["pretrain"]
    }


@pytest.mark.parametrize(
    ("step", "start", "message"),
    [
        ("align", "checkpoint/000000", r"align\.start: no artifact 'checkpoint/000000' in .*nautile artifacts"),
        ("reason", "newest:added", r"reason\.start: no checkpoint of added in "),
        ("align", "newest:reason", r"align\.start: this run makes a checkpoint of reason itself.*give an id"),
        ("pretrain", "newest", r"pretrain\.start: no checkpoint, other than of pretrain, supervise, align"),
    ],
)
def test_a_start_that_is_not_there_is_refused(toy, store, step, start, message):
    with pytest.raises(ConfigError, match=message):
        resolve_starts(starting(toy, **{step: start}), store)


def test_an_ambiguous_prefix_is_refused_with_the_candidates(toy, store):
    first = {key[0]: key for kind, key, *_ in store.folders("checkpoint")}
    twins = next(iter(first.values()))
    (store.root / "artifacts" / "checkpoint" / (twins[0] + "0" * 63)).mkdir()
    with pytest.raises(ConfigError, match=rf"align\.start: .*{twins[0]}' is ambiguous .*give more digits"):
        resolve_starts(starting(toy, align=f"checkpoint/{twins[0]}"), store)


@pytest.mark.parametrize("start", ["evaluation/ab", "checkpoint/", "checkpoint/xyz", "newest:", "../x"])
def test_other_texts_are_refused_as_the_configuration_is_read(tmp_path, start):
    file = tmp_path / "my.toml"
    file.write_text(f'extends = "local.toml"\n[reason]\nstart = "{start}"\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r'`reason\.start`: .* must be "checkpoint/ID", "newest", "newest:LABEL"'):
        load(file)


@pytest.mark.parametrize(
    ("part", "field", "message"),
    [("model", "width", r"has model\.width 1, and this run \d+"), ("tokenizer", "ranks", r"has tokenizer\.ranks 1, ")],
)
def test_a_pretraining_does_not_begin_from_another_shape(toy, store, ids, described, part, field, message):
    described(model={"context": 7})  # may differ
    assert steps_of(starting(toy, pretrain=ids["align"]), store)["pretrain"].stored_inputs == {START: ids["align"]}
    described(**{part: {field: 1}})
    with pytest.raises(ConfigError, match=r"pretrain\.start: checkpoint/\w{12} " + message):
        resolve_starts(starting(toy, pretrain=ids["align"]), store)


@pytest.mark.slow
def test_status_and_a_run_show_it_and_the_lineage_has_it(toy, toy_stages, store, ids):
    config = starting(toy, reason=ids["pretrain"])
    made_now = make_all(store.root, resolve_starts(config, store))
    artifact = store.get(made_now["reason"]["checkpoint"])
    assert artifact.manifest["inputs"]["checkpoint"] == ids["pretrain"]
    rows = inspect.status(store, config)
    assert {row["label"]: row["start"] for row in rows}["reason"] == ids["pretrain"][:23]
    assert status_table(rows).columns[3]._cells[1].plain.endswith(f"(from {ids['pretrain'][:23]})")
    run = prepare_run(config, Selection(first="reason", last="reason"), store)
    assert [step.stored_inputs for step in run.steps] == [{"checkpoint": ids["pretrain"]}]


def test_a_snapshot_is_of_a_saved_step_with_the_inputs_of_the_pretraining(toy, toy_stages, store, monkeypatch):
    step = steps_of(toy, store)["pretrain"]
    with pytest.raises(ConfigError, match=r"pretraining of my\.toml has no saved step: it is finished"):
        publish_snapshot(store, toy, "my.toml", None)
    for number in (8, 12):
        (store.root / "staging" / step.key / "scratch" / "checkpoints" / "steps" / str(number)).mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"has no saved step 9: it has 8, 12"):
        publish_snapshot(store, toy, "my.toml", 9)
    asked, keys = [], []

    def run_stage(stage, section, inputs, context):
        asked.append((stage.name, section, inputs))
        keys.append(stage.key(section, inputs))
        return {"checkpoint": store.list("checkpoint")[0].id}

    monkeypatch.setattr("nautile.tasks.engine.attempt.run_stage", run_stage)
    for number in (None, 8):
        publish_snapshot(store, toy, "my.toml", number)
    tokens = store.list("checkpoint")[0].manifest["inputs"]
    about = {"of": step.key, "execution": None}
    assert asked == [("snapshot", {**about, "step": number}, tokens) for number in (12, 8)]
    # The same step of a forced pretraining, which has the key and begins anew, is another artifact: it must not be the
    # one that was published of the execution before.
    for execution in ("first", "forced", "forced"):
        store.staging_files(step.key).execution.write_text(json.dumps({"execution": execution}))
        publish_snapshot(store, toy, "my.toml", 8)
    assert keys[-3] != keys[-2] == keys[-1]


def test_plans_that_differ_in_the_mesh_are_not_the_same_artifact(toy, store, monkeypatch):
    keys = set()

    def run_stage(stage, section, inputs, context):
        keys.add(stage.key(section, inputs))
        return {"plan": store.list("checkpoint")[0].id}

    monkeypatch.setattr("nautile.flows.planning.run_stage", run_stage)
    for fsdp in (1, 2, 2):
        plan_pretraining(store, toy, "local", 0.4, fsdp, False, print)
    assert len(keys) == 2


def test_a_step_can_start_from_an_earlier_stage_of_the_same_run(toy, store):
    """The stages between are left out; the stage that it starts from is made as ever, and evaluated."""
    steps = steps_of(starting(toy, self_distill="pretrain"), store)
    usual = steps_of(toy, store)
    assert steps["self_distill"].needs["checkpoint"] == Need("pretrain", "checkpoint")
    assert not {"align", "reason", "evaluate:align", "evaluate:reason"} & set(steps)
    for label in ("pretrain", "evaluate:pretrain"):
        assert steps[label].key == usual[label].key
    assert steps["self_distill"].key != usual["self_distill"].key
    assert "start" not in steps["self_distill"].section["self_distill"]
    # The stage before is where it starts anyway.
    assert steps_of(starting(toy, reason="align"), store)["reason"].key == usual["reason"].key


@pytest.mark.parametrize(("stage", "start"), [("align", "align"), ("align", "reason"), ("pretrain", "pretrain")])
def test_a_start_that_is_no_earlier_stage_is_refused(toy, stage, start):
    with pytest.raises(ValueError, match=f"{stage}.start: '{start}' is no earlier stage of this run"):
        starting(toy, **{stage: start})
