"""Weights: the same bytes, faults named. Training checkpoints: identity, retention, damage, failed writes."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import JsonCheckpointHandler
from safetensors.numpy import load_file, save_file

from nautile.common.errors import ConfigError, Retryable
from nautile.configs.base import OptimizerConfig
from nautile.configs.model import TokenizerConfig
from nautile.model.nautile import shapes
from nautile.model.sharding import make_mesh
from nautile.model.training import checkpoint
from nautile.model.training.checkpoint import GatheredCheckpoints, TrainCheckpoints
from nautile.model.training.optimizer import build
from nautile.model.weights.files import load_weights, save_weights
from tests.model.conftest import tiny_config
from tests.support.samples.stage_store import flip_byte

TOKENIZER = TokenizerConfig(ranks=256)
ROOT = Path(__file__).parents[3]
IDENTITY = {"model": {"width": 32, "blocks": 2}, "data": {"web": "aa"}, "seed": 0}


def random_params():
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32), shapes(tiny_config()))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    save_weights(folder, random_params(), tiny_config(), TOKENIZER)
    return folder


def test_weights_round_trip_to_the_same_bytes(saved, tmp_path):
    params, model, tokenizer = load_weights(saved)
    assert (model, tokenizer) == (tiny_config(), TOKENIZER)
    jax.tree.map(np.testing.assert_array_equal, params, random_params())
    reordered = {name: params[name] for name in reversed(params)}
    save_weights(tmp_path, jax.tree.map(jnp.asarray, reordered), model, tokenizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "weights.safetensors"]
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (saved / path.name).read_bytes()


def tensors(change):
    def apply(folder):
        arrays = load_file(folder / "weights.safetensors")
        change(arrays)
        save_file(arrays, folder / "weights.safetensors")

    return apply


def config(**changes):
    def apply(folder):
        table = json.loads((folder / "config.json").read_text())
        for name, value in changes.items():
            table = {**table, name: value} if name == "format" else {**table, "model": {**table["model"], name: value}}
        (folder / "config.json").write_text(json.dumps(table))

    return apply


NORM = "blocks.attention.norm1"
FAULTS = {
    r"config\.json: cannot be read": lambda folder: (folder / "config.json").unlink(),
    r"config\.json: cannot be read as": lambda folder: (folder / "config.json").write_text("{"),
    r"config\.json: lacks one of": lambda folder: (folder / "config.json").write_text("{}"),
    r"config\.json: format 7": config(format=7),
    r"config\.json: `width`": config(width=-1),
    r"weights\.safetensors: is missing, so ": lambda folder: (folder / "weights.safetensors").unlink(),
    r"cannot be read as weights": lambda folder: (folder / "weights.safetensors").write_bytes(b"\x08\x00"),
    r"lacks the parameter `blocks\.attention\.norm1`": tensors(lambda arrays: arrays.pop(NORM)),
    r"unknown parameter `extra`": tensors(lambda arrays: arrays.update(extra=np.zeros(3, np.float32))),
    r"norm1` is F32 of shape \(3,\); .* F32 of shape \(2, 32\)": tensors(
        lambda arrays: arrays.update({NORM: np.zeros(3, np.float32)})
    ),
    r"norm1` is F16": tensors(lambda arrays: arrays.update({NORM: arrays[NORM].astype(np.float16)})),
    r"shape \(256, 32\); .* F32 of shape \(384, 32\)": config(vocabulary=300),
}  # fmt: skip


@pytest.mark.parametrize("message", FAULTS)
def test_weights_that_do_not_fit_are_refused_by_name(saved, tmp_path, message):
    folder = shutil.copytree(saved, tmp_path / "copy")
    FAULTS[message](folder)
    with pytest.raises(ConfigError, match=message) as error:
        load_weights(folder)
    assert str(folder) in str(error.value)


def state_of(seed, name="muon"):
    """Parameters and the state of an optimizer with masked parts, filled with numbers."""
    rng = np.random.default_rng(seed)
    params = {
        "embedding": np.zeros((8, 4)),
        "blocks": {"sca_0": {"in_proj": np.zeros((2, 4, 4)), "norm": np.zeros((2, 4))}},
    }
    empty = {"params": params, "opt_state": build(OptimizerConfig(name=name), 10).init(params), "step": np.int32(0)}
    return jax.tree.map(lambda leaf: jnp.asarray(rng.standard_normal(np.shape(leaf)), jnp.float32), empty)


@pytest.fixture
def checkpoints(tmp_path):
    opened = TrainCheckpoints(tmp_path / "run", keep=2, identity=IDENTITY)
    yield opened
    opened.close()


def reopened(checkpoints, identity=IDENTITY):
    checkpoints.close()
    return TrainCheckpoints(checkpoints.folder, keep=2, identity=identity)


def test_states_come_back_exactly_and_the_newest_are_kept(checkpoints):
    assert checkpoints.latest() is None
    donate = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf * 2, state), donate_argnums=0)
    for step in (1, 2, 3):
        state = state_of(step)
        checkpoints.save(step, state, {"seconds": step / 3})
        jax.block_until_ready(donate(state))
    again = reopened(checkpoints)
    assert again.latest() == 3
    assert sorted(path.name for path in (again.folder / "steps").iterdir()) == ["2", "3"]
    state, extra = again.restore(2, state_of(0))
    assert extra == {"seconds": 2 / 3}
    assert jax.tree.structure(state) == jax.tree.structure(state_of(2))
    jax.tree.map(np.testing.assert_array_equal, state, state_of(2))
    again.close()


def test_the_json_data_of_a_step_are_those_at_the_call(checkpoints, monkeypatch):
    """The caller goes on with its lists of losses and its counters while a thread writes the step."""
    written, changed = JsonCheckpointHandler._save_fn, threading.Event()

    async def late(handler, content, directory):
        changed.wait()
        await written(handler, content, directory)

    monkeypatch.setattr(JsonCheckpointHandler, "_save_fn", late)
    losses = [2.5]
    checkpoints.save(1, state_of(1), {"losses": losses})
    losses.append(2.0)
    changed.set()
    checkpoints.wait()
    assert checkpoints.restore(1, state_of(0))[1] == {"losses": [2.5]}


def test_a_step_is_on_disk_before_it_replaces_the_one_before(checkpoints, monkeypatch):
    """A machine that loses power must not have deleted the step before for files that it had yet to write."""
    synced, sync = set(), os.fsync

    def record(descriptor):
        synced.add(os.fstat(descriptor).st_ino)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    save_and_wait(checkpoints, 1)
    step = checkpoints.folder / "steps" / "1"
    listed = json.loads((step / "digests.json").read_text())
    folders = {step, *((step / name).parent for name in listed)}
    assert [path for path in (*map(step.joinpath, listed), *folders) if path.stat().st_ino not in synced] == []


def test_another_run_is_refused_with_the_differences(checkpoints):
    save_and_wait(checkpoints, 1)
    other = {"model": {"width": 64, "blocks": 2}, "data": {"web": "aa", "synth": "bb"}, "seed": 0}
    with pytest.raises(ConfigError) as error:
        reopened(checkpoints, other)
    assert 'data.synth is null there and "bb" here; model.width is 32 there and 64 here' in str(error.value)


def test_an_identity_counts_only_after_a_save(checkpoints):
    other = reopened(checkpoints, {"seed": 1})
    assert other.latest() is None
    other.close()


def biggest(folder):
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize("harm", ["flip", "cut", "missing", "no digests"])
def test_a_damaged_newest_step_is_skipped(checkpoints, caplog, harm):
    for step in (1, 2):
        checkpoints.save(step, state_of(step), {"step": step})
    checkpoints.wait()
    newest = checkpoints.folder / "steps" / "2"
    victim = biggest(newest)
    match harm:
        case "flip":
            flip_byte(victim, victim.stat().st_size // 2)
        case "cut":
            victim.write_bytes(victim.read_bytes()[:-1])
        case "missing":
            victim.unlink()
        case "no digests":
            (newest / "digests.json").unlink()
    again = reopened(checkpoints)
    assert again.latest() == 1
    assert "checkpoint of step 2 is damaged" in caplog.text
    assert (again.folder / "damaged" / "2").is_dir()
    state, extra = again.restore(1, state_of(0))
    jax.tree.map(np.testing.assert_array_equal, state, state_of(1))
    assert extra == {"step": 1}
    again.save(2, state_of(5), {})  # the number is free again
    assert again.latest() == 2
    again.close()


def test_a_step_that_the_disk_cannot_read_is_skipped(checkpoints, monkeypatch):
    for step in (1, 2):
        save_and_wait(checkpoints, step)
    digest = checkpoint.sha256_of

    def read(path):
        if "/steps/2/" in str(path):
            raise OSError(errno.EIO, "Input/output error")
        return digest(path)

    again = reopened(checkpoints)
    monkeypatch.setattr(checkpoint, "sha256_of", read)
    assert again.latest() == 1
    again.close()


def test_each_process_skips_a_damaged_step_though_one_alone_can_move_it(checkpoints):
    for step in (1, 2):
        save_and_wait(checkpoints, step)
    flip_byte(biggest(checkpoints.folder / "steps" / "2"))
    first = reopened(checkpoints)
    second = TrainCheckpoints(first.folder, keep=2, identity=IDENTITY)
    assert (first.latest(), second.latest()) == (1, 1)
    for opened in (first, second):
        opened.close()


@pytest.mark.parametrize("gone", ["damaged", "deleted"])
def test_no_intact_step_is_an_error_and_never_a_fresh_start(checkpoints, gone):
    save_and_wait(checkpoints, 1)
    step = checkpoints.folder / "steps" / "1"
    if gone == "damaged":
        flip_byte(biggest(step))
    else:
        shutil.rmtree(step)
    again = reopened(checkpoints)
    with pytest.raises(ConfigError, match="none is intact"):
        again.latest()
    again.close()


def test_a_state_of_another_shape_is_refused(checkpoints):
    checkpoints.save(1, state_of(1), {})
    with pytest.raises(ConfigError, match="does not hold the state expected here"):
        checkpoints.restore(1, state_of(1, name="adamw"))


def save_and_wait(checkpoints, step):
    checkpoints.save(step, state_of(step), {})
    checkpoints.wait()


def test_a_save_that_cannot_be_written_is_retryable(tmp_path):
    checkpoints = TrainCheckpoints(tmp_path / "run", keep=2, identity=IDENTITY)
    save_and_wait(checkpoints, 1)
    kept = tmp_path / "kept"
    (checkpoints.folder / "steps").rename(kept)
    (checkpoints.folder / "steps").write_text("no folder any more")
    with pytest.raises(Retryable, match="checkpoint of step 2 could not be written"):
        save_and_wait(checkpoints, 2)
    assert (kept / "1" / "digests.json").is_file()


def test_states_of_hosts_without_a_shared_disk_are_those_of_any_other(checkpoints):
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state_of(1))
    save_and_wait(checkpoints, 1)
    checkpoints.close()
    gathered = GatheredCheckpoints(checkpoints.folder, 2, IDENTITY, make_mesh(1))
    assert gathered.latest() == 1
    restored, extra = gathered.restore(1, like)
    assert extra == {}
    jax.tree.map(np.testing.assert_array_equal, restored, state_of(1))
    gathered.save(2, jax.tree.map(np.asarray, state_of(2)), {"tokens": 7})
    gathered.close()
    again = reopened(checkpoints)
    assert again.latest() == 2
    restored, extra = again.restore(2, like)
    again.close()
    assert extra == {"tokens": 7}
    jax.tree.map(np.testing.assert_array_equal, restored, state_of(2))


DIES = """
import os, sys
from pathlib import Path
import numpy as np
from nautile.model.training.checkpoint import TrainCheckpoints

class Dies(TrainCheckpoints):
    def _write_digests(self):
        super()._write_digests()
        os._exit(9)

checkpoints = Dies(Path(sys.argv[1]), 2, {"seed": 0})
checkpoints.save(1, {"weights": np.ones(3)}, {})
checkpoints.wait()
"""


@pytest.mark.slow
def test_a_first_save_killed_just_before_its_rename_leaves_a_run_that_starts_fresh(tmp_path):
    assert subprocess.run([sys.executable, "-c", DIES, str(tmp_path)], cwd=ROOT).returncode == 9
    assert [path.name.startswith("1.orbax") for path in (tmp_path / "steps").iterdir()] == [True]
    checkpoints = TrainCheckpoints(tmp_path, 2, {"seed": 0})
    assert checkpoints.latest() is None
    checkpoints.close()
