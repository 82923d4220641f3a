"""The rows of the read commands, from the toy chain's store and from empty, partial and damaged stores."""

import json
import os
import shutil

import jax
import numpy as np
import pytest

from nautile.common.errors import ConfigError
from nautile.common.files import write_json
from nautile.configs.model import TokenizerConfig
from nautile.flows.cli import inspect
from nautile.flows.cli.tables import status_table
from nautile.flows.dag import build_dag
from nautile.flows.named import add_model, checkpoint_artifact, checkpoint_folder
from nautile.model.nautile import shapes
from nautile.model.weights.files import load_weights, save_weights
from nautile.store.artifacts import Store
from nautile.store.catalog import Catalog
from nautile.store.manifest import now
from nautile.store.named import named_or_newest
from nautile.tasks.engine.progress import write_retry_note
from tests.model.conftest import tiny_config
from tests.support.samples.stage_store import filled, flip_byte, key_of, published
from tests.support.stages.toy_dag import toy_dag

TOKENIZER = TokenizerConfig(ranks=256)
MODEL = tiny_config(blocks=1, pattern="SA", context=16)

pytestmark = pytest.mark.usefixtures("toy_stages")


@pytest.fixture
def copy(made, tmp_path):
    """A copy of the store that the test may damage."""
    shutil.copytree(made[0].root, tmp_path / "store")
    return Store(tmp_path / "store")


def states(store, toy):
    return {row["label"]: row["state"] for row in inspect.status(store, toy)}


def test_status_of_a_complete_chain(made, toy):
    store, outputs = made
    rows = inspect.status(store, toy)
    assert {row["state"] for row in rows} == {"made"}
    assert {row["label"]: set(row["artifacts"]) for row in rows} == {
        label: set(kinds.values()) for label, kinds in outputs.items()
    }
    assert {row["seconds"] for row in rows} == {1.5}


def test_status_tells_running_from_interrupted_and_not_made(copy, toy):
    key = {step.label: step.key for step in build_dag(toy, toy_dag)}
    for label in ("align", "reason", "self_distill"):
        for kind in ("checkpoint", "rollouts", "traces"):
            shutil.rmtree(copy.root / "artifacts" / kind / key[label], ignore_errors=True)
        shutil.rmtree(copy.root / "staging" / key[label], ignore_errors=True)
    copy.staging(key["align"])
    copy.staging(key["reason"])
    with copy.lock(key["align"]):
        state = states(copy, toy)
    assert (state["align"], state["reason"], state["self_distill"]) == ("running", "interrupted", "not made")
    assert state["pretrain"] == "made"
    write_retry_note(copy.staging(key["reason"]), "trying again at 12:00:00", 5.0)
    rows = {row["label"]: row for row in inspect.status(copy, toy)}
    assert (rows["reason"]["state"], rows["reason"]["progress"]) == ("waiting", {"note": "trying again at 12:00:00"})
    assert (
        "trying again at 12:00:00"
        in status_table(list(rows.values())).columns[3]._cells[list(rows).index("reason")].plain
    )


def test_status_names_a_damaged_manifest(copy, made, toy):
    flip_byte(copy.get(made[1]["reason"]["rollouts"]).path / "manifest.json")
    row = next(row for row in inspect.status(copy, toy) if row["label"] == "reason")
    assert row["state"] == "damaged"
    assert "manifest.json" in row["error"]


def test_a_stage_that_made_no_update_says_so(store, toy):
    reason = next(step for step in build_dag(toy, toy_dag) if step.label == "reason")
    for kind in reason.outputs:
        facts = {"no_update": "all 8 groups had equal rewards"} if kind == "checkpoint" else {}
        source = filled(store.staging(reason.key) / "output" / kind, {"a.txt": "a"})
        about = {"stage": "reason", "version": 1, "config": {}, "inputs": {}, "facts": facts}
        store.publish(kind, reason.key, source, **about)
    row = next(row for row in inspect.status(store, toy) if row["label"] == "reason")
    assert (row["state"], row["progress"]["note"]) == ("made", "no update: all 8 groups had equal rewards")
    assert "no update: all 8 groups had equal rewards" in status_table([row]).columns[3]._cells[0].plain


def test_verify_beside_a_publication_reports_no_damage(store, monkeypatch):
    published(store, "tokens", "in", {"a.txt": "old"})
    check, replaced = Store.verify, []

    def verify_while_a_run_replaces_it(self, artifact, **options):
        if not replaced:
            replaced.append(published(store, "tokens", "in", {"a.txt": "new"}, supersede=True))
        return check(self, artifact, **options)

    monkeypatch.setattr(Store, "verify", verify_while_a_run_replaces_it)
    assert inspect.verify(store, None)["damaged"] == {}
    assert len(replaced) == 1


def test_verify_names_damage_in_files_and_manifests(copy, made):
    _, outputs = made
    flip_byte(copy.get(outputs["distill"]["documents"]).path / "documents.jsonl")
    flip_byte(copy.get(outputs["align"]["rollouts"]).path / "manifest.json")
    documents = outputs["distill"]["documents"]
    assert inspect.show(copy, documents)["damaged"] == ["documents.jsonl (its digest differs)"]
    result = inspect.verify(copy, None)
    assert result["artifacts"] == 21
    assert result["damaged"] == {
        outputs["distill"]["documents"]: ["documents.jsonl (its digest differs)"],
        outputs["align"]["rollouts"]: ["manifest.json"],
    }
    assert result["remedies"] == {
        outputs["distill"]["documents"]: "run its stage again: `nautile run CONFIG --only distill --force`",
        outputs["align"]["rollouts"]: "`nautile run CONFIG` names the stage to run again",
    }


def test_the_digits_of_a_key_name_the_artifact_of_the_kind_that_is_wanted(store):
    """A self-distillation has its traces under the same key."""
    checkpoint, traces = published(store, "checkpoint", "one"), published(store, "traces", "one")
    digits = checkpoint.key[:8]
    assert named_or_newest(store, "checkpoint", digits).id == checkpoint.id
    assert named_or_newest(store, "traces", digits).id == traces.id
    with pytest.raises(ConfigError, match="is ambiguous"):
        store.get(digits)
    with pytest.raises(ConfigError, match=r"is not of kind report"):
        named_or_newest(store, "report", checkpoint.id)
    with pytest.raises(ConfigError, match="no artifact"):
        named_or_newest(store, "checkpoint", "fffffff")


def test_a_checkpoint_of_elsewhere_is_added_once_it_is_known_to_be_one(tmp_path):
    folder = tmp_path / "imported"
    save_weights(folder, jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes(MODEL)), MODEL, TOKENIZER)
    store = Store(tmp_path / "store")
    artifact = add_model(store, folder, "checkpoint")
    assert store.get(artifact.id) == artifact
    assert (artifact.kind, artifact.manifest["facts"]["origin"]) == ("checkpoint", str(folder))
    assert load_weights(artifact.path)[1] == MODEL
    assert Catalog(store).query("SELECT label FROM artifacts") == [{"label": "add:imported"}]
    with pytest.raises(ConfigError, match="--kind tokens: only a checkpoint or an export can be added"):
        add_model(store, folder, "tokens")
    flip_byte(folder / "weights.safetensors", 20)
    with pytest.raises(ConfigError, match=r"weights\.safetensors"):
        add_model(store, folder, "checkpoint")
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read"):
        add_model(store, tmp_path, "checkpoint")
    assert store.list() == [artifact]


@pytest.mark.parametrize(
    ("kind", "name"),
    [("checkpoint", name) for name in ("config.json", "weights.safetensors", "labels.json", "head.safetensors")]
    + [("export", name) for name in ("digests.json", "config.json", "prompt.onnx")],
)
@pytest.mark.parametrize("hostile", ["link", "FIFO"])
def test_a_folder_with_links_or_fifos_is_refused_before_it_is_read(tmp_path, kind, name, hostile):
    folder = tmp_path / "theirs"
    save_weights(folder, jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes(MODEL)), MODEL, TOKENIZER)
    (folder / "digests.json").write_text(json.dumps({"sha256": {"config.json": "0" * 64, "prompt.onnx": "0" * 64}}))
    path = folder / name
    if path.exists():
        path.rename(tmp_path / "elsewhere")
    else:
        (tmp_path / "elsewhere").write_text("root:x:0:0")
    os.mkfifo(path) if hostile == "FIFO" else path.symlink_to(tmp_path / "elsewhere")
    store = Store(tmp_path / "store")
    with pytest.raises(ConfigError, match=rf"{name}: is a {hostile}, not a regular file"):
        add_model(store, folder, kind)
    assert not store.root.exists()


@pytest.mark.parametrize("name", ["runs.csv", "runs", "runs.jsonl"])
def test_a_table_is_not_exported_as_parquet_under_another_name(made, tmp_path, name):
    with pytest.raises(ConfigError, match=rf"{name}: tables are written as Parquet, so name a file that ends in .parq"):
        inspect.export(made[0], "runs", tmp_path / name, overwrite=False)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_is_named_by_its_stage_and_a_name_that_is_almost_one_is_suggested(store):
    for stage in ("pretrain", "align"):
        published(store, "checkpoint", stage, stage=stage)
    assert named_or_newest(store, "checkpoint", "pretrain").manifest["stage"] == "pretrain"
    Catalog(store).ingest()
    assert inspect.show(store, "align")["stage"] == inspect.lineage(store, "align")[0]["stage"] == "align"
    with pytest.raises(ConfigError, match="no checkpoint of reason in"):
        named_or_newest(store, "checkpoint", "reason")
    with pytest.raises(ConfigError, match="did you mean 'self_distill'"):
        inspect.show(store, "sefl_distill")


def test_the_newest_checkpoint_is_none_of_a_sweep_unless_there_is_no_other(store):
    """The last arm of a sweep may have trained for two steps."""
    store.sweeps.mkdir()
    published(store, "checkpoint", "of both", stage="reason")  # which the sweep reused
    run = {"begun": now(), "steps": [{"key": key_of(word)} for word in ("of both", "arm")]}
    write_json(store.sweeps / "lr.json", {"runs": [run]})
    arm = published(store, "checkpoint", "arm", stage="reason")
    own = store.find("checkpoint", key_of("of both"))
    assert named_or_newest(store, "checkpoint") == named_or_newest(store, "checkpoint", "reason") == own
    write_json(store.sweeps / "lr.json", {"runs": [run | {"begun": "2026-01-01T00:00:00+00:00"}]})
    assert named_or_newest(store, "checkpoint") == named_or_newest(store, "checkpoint", "reason") == arm


def test_an_export_of_the_store_is_a_model_by_its_id_too(store, monkeypatch):
    """`nautile chat export/ID --runtime onnx`, as `nautile store add --kind export` prints the id."""
    monkeypatch.setenv("NAUTILE_STORE", str(store.root))
    added = published(store, "export", "onnx")
    assert checkpoint_folder(added.id) == added.path
    assert checkpoint_artifact(store, added.id) == (added, added.path)
