"""Checkpoints: weights to hand on (`save_weights`, `load_weights`), and the training state to resume from.

A training checkpoint is an Orbax step folder, written in the background and renamed into place when whole. Orbax checks
no content on reading, so a file of digests is put into each folder just before that rename, and a step whose bytes
differ from it is set aside in favour of the one before. Donating the saved buffers to the next step is safe: on a
device Orbax copies them before `save` returns, and on CPU JAX will not reuse a buffer that a numpy view still holds.
"""

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from common.errors import ConfigError, Retryable
from common.files import sha256_of, write_json
from model.weights.files import load_weights, save_weights

__all__ = ["TrainCheckpoints", "load_weights", "save_weights"]

logger = logging.getLogger(__name__)

DIGESTS = "digests.json"


class TrainCheckpoints:
    """The checkpoints of one training run, in `folder`: `identity.json`, `steps/<n>/` and `damaged/`.

    `identity` is plain JSON data: what the run is (model, data, vocabulary, optimizer ...). A folder begun under
    another one is refused with a `ConfigError` naming what differs. The newest `keep` steps are kept. Only the first of
    several processes writes the identity and the digests; Orbax has each write its own shards.
    """

    def __init__(self, folder: Path, keep: int, identity: dict[str, Any]) -> None:
        self.folder = folder.absolute()
        self._steps = self.folder / "steps"
        self._steps.mkdir(parents=True, exist_ok=True)
        self._check_identity(identity)
        self._saving: int | None = None
        # Orbax warns of options and layouts that are as they should be here; its errors are raised anyway.
        logging.getLogger("absl").setLevel(logging.ERROR)
        self._manager = ocp.CheckpointManager(
            self._steps,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                cleanup_tmp_directories=True,
                # Made in the background, folders that cannot be made leave every other thread waiting for 10 minutes.
                async_options=ocp.AsyncOptions(
                    post_finalization_callback=self._write_digests, create_directories_asynchronously=False
                ),
            ),
        )

    def save(self, step: int, state: Any, extra: dict[str, Any]) -> None:
        """Begin to save `state` (any pytree of arrays) and `extra` (JSON data) as `step`; returns once it is copied.

        Raises `Retryable` if this save or the one before it could not be written; the earlier steps stay intact.
        """
        self.wait()  # `_saving` belongs to one save at a time
        self._saving = step
        try:
            self._manager.save(
                step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), extra=ocp.args.JsonSave(extra))
            )
        except Exception as error:
            raise self._not_written(error) from error

    def wait(self) -> None:
        """Block until the last save is on disk; raises `Retryable` if it could not be written."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._not_written(error) from error
        if jax.process_index() == 0 and self._begun():
            # Only now: marked before the rename, a process killed between the two would leave a run without a step
            # that says it had one.
            (self.folder / "begun").touch()

    def latest(self) -> int | None:
        """The newest step whose files are what was written, or None if nothing was ever saved.

        Damaged newer ones are set aside and logged. Raises `ConfigError` if there are none left, for starting afresh
        must be somebody's decision.
        """
        self.wait()
        steps = sorted(self._manager.all_steps(), reverse=True)
        for step in steps:
            fault = _fault(self._steps / str(step))
            if fault is None:
                return step
            self._set_aside(step)
            logger.warning("checkpoint of step %d is damaged (%s): going back to the one before", step, fault)
        if steps or self._begun():
            raise ConfigError(
                f"{self.folder}: this run had saved checkpoints, and none is intact; restore them, or delete the "
                "folder to train from the start"
            )
        return None

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """The state saved as `step`, in the shapes, types and shardings of `like` (arrays or ShapeDtypeStructs).

        The mesh may be another than the one that saved. Raises `ConfigError` if the step does not fit `like`.
        """
        target = jax.tree.map(_abstract, like)
        try:
            restored = self._manager.restore(
                step, args=ocp.args.Composite(state=ocp.args.StandardRestore(target), extra=ocp.args.JsonRestore())
            )
        except (ValueError, KeyError, TypeError, FileNotFoundError) as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise ConfigError(
                f"{self._steps / str(step)}: does not hold the state expected here: {reason[0]}"
            ) from error
        return restored.state, restored.extra

    def close(self) -> None:
        """Wait for the last save and end the background threads."""
        self.wait()
        self._manager.close()

    def _check_identity(self, identity: dict[str, Any]) -> None:
        path = self.folder / "identity.json"
        wanted = json.loads(json.dumps(identity))
        if self._begun():
            try:
                found = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise ConfigError(f"{path}: cannot be read ({error}), so these checkpoints cannot be trusted") from None
            if differences := list(_differences(found, wanted)):
                raise ConfigError(
                    f"{self.folder}: its checkpoints were made by another run: {'; '.join(differences[:5])}. "
                    "Go back to that configuration, or delete the folder to train from the start"
                )
        elif jax.process_index() == 0:
            write_json(path, wanted)

    def _begun(self) -> bool:
        """Whether a step was ever completed here, even if its folder is gone since."""
        return (self.folder / "begun").exists() or any(step.name.isdigit() for step in self._steps.iterdir())

    def _write_digests(self) -> None:
        """Called by Orbax in its thread when the step's files are whole and not yet renamed into place."""
        if jax.process_index() != 0:
            return
        [folder] = self._steps.glob(f"{self._saving}.orbax-checkpoint-tmp*")
        write_json(folder / DIGESTS, {name: sha256_of(folder / name) for name in _payload(folder)})

    def _set_aside(self, step: int) -> None:
        place = self.folder / "damaged" / str(step)
        place.parent.mkdir(exist_ok=True)
        while place.exists():
            place = place.with_name(f"{place.name}-again")
        os.replace(self._steps / str(step), place)
        self._manager.reload()

    def _not_written(self, error: Exception) -> Retryable:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return Retryable(f"the checkpoint of step {self._saving} could not be written to {self.folder}: {lines[0]}")


def _fault(folder: Path) -> str | None:
    """What is wrong with a step folder: the first file that is missing or differs from its digest; None if nothing."""
    try:
        digests = json.loads((folder / DIGESTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"{DIGESTS} cannot be read"
    for name, digest in sorted(digests.items()):
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if sha256_of(path) != digest:
            return f"{name} has other bytes than were written"
    return None


def _payload(folder: Path) -> list[str]:
    """Files of a step, relative; the commit markers and the step's metadata are written about the same time as ours."""
    files = (path for path in folder.rglob("*") if path.is_file())
    late = {DIGESTS, "commit_success.txt", "_CHECKPOINT_METADATA"}
    return sorted(path.relative_to(folder).as_posix() for path in files if path.name not in late)


def _differences(found: Any, wanted: Any, where: str = "") -> Iterator[str]:
    """The leaves in which two trees of JSON data differ, as "model.width is 64 there and 128 here"."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for name in sorted(found.keys() | wanted.keys()):
            yield from _differences(found.get(name), wanted.get(name), f"{where}.{name}" if where else name)
    elif found != wanted:
        yield f"{where} is {json.dumps(found)} there and {json.dumps(wanted)} here"


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))
