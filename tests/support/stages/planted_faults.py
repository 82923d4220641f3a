"""Faults that a shared store could have, each planted by a patch: the simulation of machines must find every one.

Each function makes one decision of the store's protocol wrong, as a plausible change to the code would. With a seed
these were found by the 2nd to 9th history of 12 steps. Not here, because 25 to 40 histories found nothing: a lease that
is not checked before publication or renewed after its loss (the order by fences still holds), an upload that was cut
off and counts as whole, lineage that names the newest version.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from nautile.common.errors import ConfigError
from nautile.store import artifacts, mirror
from nautile.store.artifacts import Artifact
from nautile.store.lease import Lease
from nautile.store.mirror import MirroredStore, _manifest_name, payload_prefix
from nautile.store.remote import Remote
from nautile.tasks.engine import attempt_log

Patch = pytest.MonkeyPatch
FAULTS: dict[str, Callable[[Patch], None]] = {}


def fault(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
    FAULTS[plant.__name__] = plant
    return plant


@fault
def versions_are_ordered_by_wall_clocks(patch: Patch) -> None:
    def by_clock(entries: Any) -> tuple[str, str]:
        return entries["created"], entries["execution"]

    patch.setattr(mirror, "version_order", by_clock)
    patch.setattr(artifacts, "version_order", by_clock)


@fault
def creation_overwrites(patch: Patch) -> None:
    def overwrite(remote: Remote, name: str, data: bytes) -> bool:
        remote.write(name, data)
        return True

    patch.setattr(Remote, "create", overwrite)


@fault
def creation_looks_and_then_writes(patch: Patch) -> None:
    def look_and_write(remote: Remote, name: str, data: bytes) -> bool:
        if remote.read(name, 2**20) is not None:
            return False
        remote.write(name, data)
        return True

    patch.setattr(Remote, "create", look_and_write)


@fault
def the_manifest_is_written_before_the_files(patch: Patch) -> None:
    send = MirroredStore._send

    def manifest_first(store: MirroredStore, artifact: Artifact, lease: Lease, again: bool) -> None:
        if not store._is_removed(artifact.version_id):
            store.remote.create(_manifest_name(artifact.version_id), mirror.json.dumps(artifact.manifest).encode())
        send(store, artifact, lease, again)

    patch.setattr(MirroredStore, "_send", manifest_first)


@fault
def files_are_removed_before_their_manifest(patch: Patch) -> None:
    def files_first(store: MirroredStore, artifact: Artifact) -> None:
        store.remote.delete_folder(payload_prefix(artifact.manifest))
        store.remote.write(_manifest_name(artifact.version_id), mirror.REMOVED)

    patch.setattr(MirroredStore, "remove_from_remote", files_first)


@fault
def a_refused_deletion_counts_as_done(patch: Patch) -> None:
    delete = Remote.delete

    def delete_if_allowed(remote: Remote, names: Any) -> None:
        for name in list(names):
            with suppress(ConfigError):
                delete(remote, [name])

    patch.setattr(Remote, "delete", delete_if_allowed)


@fault
def work_taken_over_keeps_its_id(patch: Patch) -> None:
    patch.setattr(attempt_log, "execution_after_takeover", lambda execution, fence: execution)
