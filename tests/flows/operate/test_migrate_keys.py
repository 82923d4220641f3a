"""`nautile store migrate`: a store whose keys hold whole sections, as an earlier version wrote them, is adopted."""

import json
import shutil

import pytest

from common.errors import ConfigError
from common.files import write_json
from flows.cli.inspect import status
from flows.cli.why import explain
from flows.dag import build_dag
from flows.operate import migrate_keys
from store.artifacts import Store
from store.manifest import MANIFEST, stage_key, with_seal
from tests.support.stages.toy_dag import toy_dag

pytestmark = pytest.mark.usefixtures("toy_stages")


@pytest.fixture
def aged(made, tmp_path):
    """A copy of the toy chain's store with the keys of the earlier version."""
    shutil.copytree(made[0].root, tmp_path / "store")
    store, old_ids = Store(tmp_path / "store"), {}
    shutil.rmtree(store.root / "staging")
    for artifact in store.list():
        manifest = {name: value for name, value in artifact.manifest.items() if name != "seal"}
        manifest["inputs"] = {name: old_ids[full_id] for name, full_id in manifest["inputs"].items()}
        if "distill" in manifest["config"]:
            manifest["config"]["distill"]["relevance"] = 1.0  # an option that is gone
        manifest["key"] = stage_key(manifest["stage"], manifest["version"], manifest["config"], manifest["inputs"])
        old_ids[artifact.full_id] = f"{artifact.kind}/{manifest['key']}"
        write_json(artifact.folder / MANIFEST, with_seal(manifest))
        artifact.folder.rename(artifact.folder.with_name(manifest["key"]))
    return store


def digests(store: Store) -> dict[str, str]:
    return {artifact.manifest["label"] + artifact.kind: artifact.manifest["digest"] for artifact in store.list()}


def states(store: Store, toy) -> set[str]:
    return {row["state"] for row in status(store, toy)}


def test_every_artifact_gets_the_key_of_this_version(aged, toy):
    before = digests(aged)
    assert states(aged, toy) != {"made"}
    migrations = migrate_keys.plan(aged)
    assert digests(aged) == before  # planning changes nothing
    assert migrate_keys.apply(aged, migrations) == len(migrations) == 20
    assert states(aged, toy) == {"made"}
    assert digests(aged) == before
    assert {artifact.id: aged.verify(artifact) for artifact in aged.list() if aged.verify(artifact)} == {}
    assert migrate_keys.plan(aged) == []


def test_status_why_names_the_migration(aged, toy):
    rows = {row["label"]: row for row in explain(aged, toy)}
    first = rows["ingest:wikipedia"]
    assert first["nearest"] is not None
    assert (first["differences"], first["inputs"]) == ([], [])
    assert [line.split(":")[0] for line in rows["index"]["inputs"]] == ["exemplars"]


@pytest.mark.parametrize("stopped_at", [0, 1, 9])
@pytest.mark.parametrize("rewritten", [False, True])
def test_an_interrupted_migration_goes_on(aged, toy, stopped_at, rewritten):
    migrations = migrate_keys.plan(aged)
    migrate_keys.apply(aged, migrations[:stopped_at])
    if rewritten:  # killed between the two steps of the next
        write_json(migrations[stopped_at].folder / MANIFEST, migrations[stopped_at].manifest)
    migrate_keys.apply(aged, migrate_keys.plan(aged))
    assert states(aged, toy) == {"made"}


def test_unfinished_work_moves_along(aged, toy):
    """A step that was interrupted resumes under its new key, and its checkpoints name that key."""
    step = next(step for step in build_dag(toy, toy_dag) if step.label == "reason")
    (align,) = (a for a in aged.list("checkpoint") if a.manifest["label"] == "align")
    inputs = {"checkpoint": align, "questions": aged.list("questions")[0]}
    old = stage_key("reason", step.stage.version, step.section, {name: a.full_id for name, a in inputs.items()})
    for kind in step.outputs:
        for artifact in aged.list(kind):
            if artifact.manifest["label"] in ("reason", "self_distill"):
                shutil.rmtree(artifact.folder)
    staging = aged.staging(old)
    checkpoints = staging / "scratch" / "checkpoints"
    checkpoints.mkdir(parents=True)
    write_json(checkpoints / "identity.json", {"execution": old})
    write_json(
        staging / "request.json",
        {
            "stage": "reason",
            "module": step.stage.work.__module__,
            "attribute": step.stage.work.__name__,
            "section": step.section,
            "inputs": {name: str(artifact.folder) for name, artifact in inputs.items()},
        },
    )
    migrate_keys.apply(aged, migrate_keys.plan(aged))
    key = {step.label: step.key for step in build_dag(toy, toy_dag)}["reason"]
    moved = aged.root / "staging" / key / "scratch" / "checkpoints" / "identity.json"
    assert json.loads(moved.read_text(encoding="utf-8")) == {"execution": key}
    assert not staging.exists()


def test_a_store_in_use_is_refused_and_left_alone(aged):
    migrations = migrate_keys.plan(aged)
    with (
        aged.lock(migrations[3].folder.name),
        pytest.raises(ConfigError, match="a run uses this store; stop it"),
    ):
        migrate_keys.apply(aged, migrations)
    assert migrate_keys.plan(aged) == migrations


def test_what_was_made_again_stays_beside_the_old(aged):
    migrations = migrate_keys.plan(aged)
    first = migrations[0]
    shutil.copytree(first.folder, first.target)
    again = migrate_keys.plan(aged)
    assert (again[0].folder, again[0].obstacle) == (first.folder, f"{first.key[:12]} exists already")
    assert migrate_keys.apply(aged, again) == len(migrations) - 1


def test_what_was_migrated_once_is_migrated_again_by_a_later_version(aged, toy):
    """The manifest has the key of two versions ago; its own key is that of the version before this one."""
    migrate_keys.apply(aged, migrate_keys.plan(aged))
    before, ids = digests(aged), {}
    for artifact in aged.list():  # as a version of other keys has migrated them
        manifest = {name: value for name, value in artifact.manifest.items() if name != "seal"}
        manifest["inputs"] = {name: ids[full_id] for name, full_id in manifest["inputs"].items()}
        manifest["key"] = stage_key("other", 9, {}, {"old": artifact.full_id})
        manifest["former_key"] = stage_key("older", 1, {}, {"old": artifact.full_id})
        ids[artifact.full_id] = f"{artifact.kind}/{manifest['key']}"
        write_json(artifact.folder / MANIFEST, with_seal(manifest))
        artifact.folder.rename(artifact.folder.with_name(manifest["key"]))
    assert states(aged, toy) != {"made"}
    assert migrate_keys.apply(aged, migrate_keys.plan(aged)) == len(ids)
    assert states(aged, toy) == {"made"}
    assert digests(aged) == before
    assert migrate_keys.plan(aged) == []
