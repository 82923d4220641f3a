"""Faults that a shared store could have, each planted by a patch: the simulation of machines must find every one.

Each function makes one decision of the store's protocol wrong, as a plausible change to the code would.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from nautile.common.errors import ConfigError
from nautile.store import artifacts, mirror
from nautile.store.artifacts import Artifact
from nautile.store.lease import Lease
from nautile.store.mirror import MirroredStore, _manifest_name, payload_prefix
from nautile.store.remote import Remote
from nautile.tasks.engine import attempt, attempt_log

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


@fault
def lineage_names_the_newest_version(patch: Patch) -> None:
    publish = MirroredStore.publish

    def look_again(store: MirroredStore, *arguments: Any, inputs: Any, **options: Any) -> Artifact:
        newest = {name: store.get(artifact.full_id) for name, artifact in inputs.items()}
        return publish(store, *arguments, inputs=newest, **options)

    patch.setattr(MirroredStore, "publish", look_again)


@fault
def an_input_may_be_replaced_while_it_is_read(patch: Patch) -> None:
    patch.setattr(attempt, "check_inputs", lambda staging, inputs: None)


@fault
def an_upload_that_was_cut_off_counts_as_whole(patch: Patch) -> None:
    def missing(store: MirroredStore, artifact: Artifact, names: list[str]) -> list[str]:
        objects = store.remote.names(payload_prefix(artifact.manifest))
        return [name for name in names if name not in objects]

    send = MirroredStore._send

    def send_what_is_not_there(store: MirroredStore, artifact: Artifact, lease: Lease, again: bool) -> None:
        names, files = store.remote.names, artifact.manifest["files"]

        def trusted(folder: str) -> Any:
            return {n: replace(e, bytes=files[n]["bytes"]) if n in files else e for n, e in names(folder).items()}

        store.remote.names = trusted  # type: ignore[method-assign]
        try:
            send(store, artifact, lease, again)
        finally:
            del store.remote.names

    patch.setattr(MirroredStore, "_remote_mismatches", missing)
    patch.setattr(MirroredStore, "_send", send_what_is_not_there)


@fault
def a_lease_is_not_asked_for_before_publication(patch: Patch) -> None:
    patch.setattr(Lease, "confirm", Lease.check)


@fault
def a_lost_lease_is_renewed(patch: Patch) -> None:
    patch.setattr(Lease, "renew", lambda lease: lease._write("held"))


@fault
def an_upload_is_removed_without_its_end_being_recorded(patch: Patch) -> None:
    patch.setattr(MirroredStore, "end_upload", lambda store, version: True)


@fault
def what_was_removed_is_published_again(patch: Patch) -> None:
    patch.setattr(MirroredStore, "_is_removed", lambda store, version: False)
