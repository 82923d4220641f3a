"""Checkpoints of the training state, to resume from. (For weights to publish, see `model.weights.files`.)

A checkpoint is an Orbax step folder, written in the background and renamed into place when complete. Orbax does not
verify contents on reading, so a file of digests is added to each folder just before that rename; a step that does not
match its digests is skipped in favour of the one before. Donating the saved buffers to the next training step is safe:
on a device Orbax copies them before `save` returns, and on CPU JAX does not reuse a buffer while a numpy view holds it.
"""

import copy
import json
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from nautile.common.errors import ConfigError, Retryable
from nautile.common.files import sha256_of, sync_folder, write_json
from nautile.common.text import first_line
from nautile.model.processes import arrays_of_first, on_first
from nautile.model.sharding import whole_on_hosts

logger = logging.getLogger(__name__)

DIGESTS = "digests.json"


class TrainCheckpoints:
    """The checkpoints of one training run, in `folder`: `identity.json`, `steps/<n>/` and `damaged/`.

    `identity` is JSON data: the settings that define the run (model, data, vocabulary, optimizer, ...). A folder with
    checkpoints of another identity is refused with a `ConfigError` that names the differences. Only the newest `keep`
    steps remain. Of several processes only the first writes the identity and the digests; each writes its own shards
    through Orbax, unless `processes` names others.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        identity: dict[str, Any],
        processes: ocp.options.MultiprocessingOptions | None = None,
    ) -> None:
        self.folder = folder.absolute()
        self._steps = self.folder / "steps"
        self._steps.mkdir(parents=True, exist_ok=True)
        self._check_identity(identity)
        self._saving: int | None = None
        # Orbax warns about options and layouts that are intended here; its errors are raised anyway.
        logging.getLogger("absl").setLevel(logging.ERROR)
        self._manager = ocp.CheckpointManager(
            self._steps,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                # Orbax refuses to create folders for a part of the processes; `mkdir` above has made this one.
                create=processes is None,
                multiprocessing_options=processes or ocp.options.MultiprocessingOptions(),
                cleanup_tmp_directories=True,
                # If Orbax fails to create a folder in the background, every other thread waits 10 minutes for it.
                async_options=ocp.AsyncOptions(
                    post_finalization_callback=self._write_digests, create_directories_asynchronously=False
                ),
            ),
        )

    def save(self, step: int, state: Any, extra: dict[str, Any]) -> None:
        """Start saving `state` (any pytree of arrays) and `extra` (JSON data) as `step`; return once they are copied.

        Raises `Retryable` if this save or the one before could not be written; the earlier steps stay intact.
        """
        self.wait()  # one save at a time: `_saving` is its step
        self._saving = step
        extra = copy.deepcopy(extra)  # Orbax writes it in a thread, while the caller changes its own
        try:
            self._manager.save(
                step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), extra=ocp.args.JsonSave(extra))
            )
        except Exception as error:
            raise self._not_written(error) from error

    def wait(self) -> None:
        """Wait until the last save is on disk. Raises `Retryable` if it could not be written."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._not_written(error) from error
        if jax.process_index() == 0 and self._begun():
            # Only after the rename: else a kill between the two would leave a run marked as begun without any step.
            (self.folder / "begun").touch()

    def latest(self) -> int | None:
        """The newest step whose files match their digests; None if nothing was ever saved.

        Damaged steps that are newer are moved to `damaged/` and logged. Raises `ConfigError` if steps were saved and
        none is intact: starting from scratch is the operator's decision.
        """
        self.wait()
        steps = sorted(self._manager.all_steps(), reverse=True)
        for step in steps:
            # Newest first, and only until one is intact: to digest gigabytes takes seconds each.
            fault = _fault(self._steps / str(step))
            if fault is None:
                return step
            self._move_to_damaged(step)
            logger.warning("checkpoint of step %d is damaged (%s): going back to the step before it", step, fault)
        if steps or self._begun():
            raise ConfigError(
                f"{self.folder}: this run had saved checkpoints, and none is intact; restore them, or delete the "
                "folder to train from the start"
            )
        return None

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """Load the state saved as `step`, with the shapes, types and shardings of `like` (arrays or ShapeDtypeStructs).

        The mesh may differ from the one that saved it. Raises `ConfigError` if the step does not fit `like`.
        """
        target = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None)), like
        )
        try:
            restored = self._manager.restore(
                step, args=ocp.args.Composite(state=ocp.args.StandardRestore(target), extra=ocp.args.JsonRestore())
            )
        except (ValueError, KeyError, TypeError, FileNotFoundError) as error:
            raise ConfigError(
                f"{self._steps / str(step)}: does not hold the state expected here: {first_line(error)}"
            ) from error
        return restored.state, restored.extra

    def close(self) -> None:
        """Wait for the last save and end the background threads."""
        self.wait()
        self._manager.close()

    def _check_identity(self, identity: dict[str, Any]) -> None:
        """Compare with `identity.json`, or write it if nothing has been saved yet."""
        path = self.folder / "identity.json"
        current = json.loads(json.dumps(identity))  # as it will be read back: tuples become lists
        if self._begun():
            try:
                saved = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise ConfigError(f"{path}: cannot be read ({error}), so these checkpoints cannot be trusted") from None
            if differences := list(_differences(saved, current)):
                raise ConfigError(
                    f"{self.folder}: its checkpoints were made by another run: {'; '.join(differences[:5])}. "
                    "Go back to that configuration, or delete the folder to train from the start"
                )
        elif jax.process_index() == 0:
            write_json(path, current)

    def _begun(self) -> bool:
        """Whether a step was ever completed here, even if its folder has been deleted since."""
        return (self.folder / "begun").exists() or any(step.name.isdigit() for step in self._steps.iterdir())

    def _write_digests(self) -> None:
        """Called by Orbax in its thread when the files of a step are complete, before they are renamed into place."""
        if jax.process_index() != 0:
            return
        # Orbax writes into a temporary folder until all files are complete.
        [folder] = self._steps.glob(f"{self._saving}.orbax-checkpoint-tmp*")
        # Orbax writes these at about the same time as the digests, so they are left out.
        unstable = {DIGESTS, "commit_success.txt", "_CHECKPOINT_METADATA"}
        paths = sorted(folder.rglob("*"))
        names = [path.relative_to(folder).as_posix() for path in paths if path.is_file() and path.name not in unstable]
        # All is on disk before the rename: Orbax then deletes the oldest step, which may be the only other one.
        digests = {name: sha256_of(folder / name, sync=True) for name in names}
        for subfolder in filter(Path.is_dir, paths):
            sync_folder(subfolder)
        write_json(folder / DIGESTS, digests)

    def _move_to_damaged(self, step: int) -> None:
        target = self.folder / "damaged" / str(step)
        target.parent.mkdir(exist_ok=True)
        # The same step can be damaged again after a restart.
        while target.exists():
            target = target.with_name(f"{target.name}-again")
        with suppress(FileNotFoundError):  # another process of the run has moved it
            os.replace(self._steps / str(step), target)
        self._manager.reload()

    def _not_written(self, error: Exception) -> Retryable:
        return Retryable(
            f"the checkpoint of step {self._saving} could not be written to {self.folder}: {first_line(error)}"
        )


def read_step(folder: Path, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
    """Load the state and `extra` of a step without changing `folder`, which a run may be using.

    `like`: as for `TrainCheckpoints.restore`. Raises `ConfigError` if the step is not there or damaged.
    """
    if fault := _fault(folder / "steps" / str(step)):
        raise ConfigError(f"{folder}: the checkpoint of step {step} is damaged ({fault})")
    with ocp.CheckpointManager(folder / "steps", options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        saved = manager.restore(
            step, args=ocp.args.Composite(state=ocp.args.StandardRestore(like), extra=ocp.args.JsonRestore())
        )
    return saved.state, saved.extra


def _fault(folder: Path) -> str | None:
    """Describe the first file of a step that is missing or does not match its digest; None if the step is intact."""
    try:
        digests = json.loads((folder / DIGESTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"{DIGESTS} cannot be read"
    for name, digest in sorted(digests.items()):
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        try:
            if sha256_of(path) != digest:
                return f"{name} differs from what was written"
        except OSError as error:  # a fault of the disk, or another process is moving the step
            return f"{name} cannot be read: {error.strerror}"
    return None


def _differences(saved: Any, current: Any, path: str = "") -> Iterator[str]:
    """Describe each leaf in which two JSON trees differ, as "model.width is 64 there and 128 here"."""
    if isinstance(saved, dict) and isinstance(current, dict):
        for name in sorted(saved.keys() | current.keys()):
            yield from _differences(saved.get(name), current.get(name), f"{path}.{name}" if path else name)
    elif saved != current:
        yield f"{path} is {json.dumps(saved)} there and {json.dumps(current)} here"


class GatheredCheckpoints:
    """`TrainCheckpoints` for hosts without a shared disk; all processes call it together.

    The first gathers and saves the whole state, and broadcasts it at a resume. The files are the same, so either class
    resumes from the other's. The first host needs memory for the state (4.5 GB for 371 M parameters with Adam).
    """

    def __init__(self, folder: Path, keep: int, identity: dict[str, Any], mesh: jax.sharding.Mesh) -> None:
        self._mesh = mesh
        # Orbax would wait for all processes at its barriers; it is told that there is one.
        first_only = ocp.options.MultiprocessingOptions(active_processes={0}, barrier_sync_key_prefix="first-host")
        self._first = TrainCheckpoints(folder, keep, identity, first_only) if jax.process_index() == 0 else None

    def save(self, step: int, state: Any, extra: dict[str, Any]) -> None:
        """Start saving `state` and `extra` as `step`; return once the state is copied."""
        gathered = whole_on_hosts(state, self._mesh)
        if self._first:
            self._first.save(step, gathered, extra)

    def wait(self) -> None:
        """Wait until the last save is on the first host's disk."""
        if self._first:
            self._first.wait()

    def latest(self) -> int | None:
        """The newest intact step; None if nothing was ever saved."""
        return on_first(lambda: self._first.latest() if self._first else None)

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """Load the state saved as `step`, with the shapes, types and shardings of `like`."""
        # The other processes contribute zeros of the same shapes to the broadcast.
        state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like)
        extra: dict[str, Any] = {}
        if self._first:
            state, extra = self._first.restore(step, state)

        def shard(full: np.ndarray, target: Any) -> jax.Array:
            return jax.make_array_from_callback(full.shape, target.sharding, lambda index: full[index])

        return jax.tree.map(shard, arrays_of_first(state), like), on_first(lambda: extra)

    def close(self) -> None:
        """Wait for the last save and end the background threads."""
        if self._first:
            self._first.close()


def open_checkpoints(
    folder: Path, keep: int, identity: dict[str, Any], mesh: jax.sharding.Mesh, *, shared_disk: bool
) -> TrainCheckpoints | GatheredCheckpoints:
    """The checkpoints of a run; `shared_disk` says whether all its processes see the same `folder`."""
    if shared_disk:
        return TrainCheckpoints(folder, keep, identity)
    return GatheredCheckpoints(folder, keep, identity, mesh)
