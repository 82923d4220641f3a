"""The child process of a stage that needs the store's remote: `python -m nautile.tasks.engine.remote_child`.

It replaces `tasks.engine.child_main`, which so need not import the clients of remotes. Its arguments:

    REQUEST.json    on the machine of the run: some input files are only at the remote, and are read through a cache, or
                    it sends requests to endpoints, of which other hosts may send the same
    URL KEY         on a host that shares no disk with that machine: one process of a multi-host stage

Such a host has its own folder for the store (`$NAUTILE_STORE_CACHE` there) and gets everything from the URL: the
request, the inputs, and on the first host the checkpoints so far. The first host sends its checkpoints while it works
and its outputs at the end; `tasks.engine.multihost` fetches them.

    <url>/hosts/<key>/request.json    from the launching machine to the hosts
    <url>/hosts/<key>/live.json       the progress, from the first host
    <url>/hosts/<key>/error.json      the first error of any host
"""

import json
import logging
import sys
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from nautile.common.errors import ConfigError, Retryable
from nautile.common.files import read_json, write_json
from nautile.common.processes import ExitCode
from nautile.store.file_cache import FileCache
from nautile.store.layout import StagingFiles
from nautile.store.manifest import LARGEST_MANIFEST
from nautile.store.mirror import MirroredStore, open_store
from nautile.store.request_claims import RequestClaims
from nautile.store.staging_mirror import StagingMirror, host_files
from nautile.tasks.engine.child_main import RemoteAccess, begin, failed, leave, load_stage, process_rank, work

logger = logging.getLogger("nautile.tasks.engine.remote_child")

BYTES_PER_GIGABYTE = 10**9
LIVE_EVERY_S = 10.0


def main(arguments: list[str]) -> int:
    """Do the work of the request and return the exit code."""
    if len(arguments) == 2:
        begin(0)
        return _work_on_own_disk(*arguments)
    request = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    begin(request["parent"])
    return work(request, [], _access(open_remote(request["store"]), request))


def send_request(store: MirroredStore, request: dict[str, Any], execution: dict[str, Any]) -> None:
    """Write the request for the hosts to the remote, without paths of this machine.

    `execution`: the content of `execution.json`.
    """
    inputs = {name: store.artifact_name(Path(folder)) for name, folder in request["inputs"].items()}
    events = Path(request["events"]).name
    if execution["attempt"] == 1:
        StagingMirror(store.remote, Path(request["staging"])).remove()  # from an earlier execution of the key
    for_hosts = request | {"inputs": inputs, "events": events, "sys_path": [], "record": execution}
    folder = host_files(request["key"])
    # What an earlier attempt left there: its errors, and files of its items.
    store.remote.delete_folder(folder)
    store.remote.write(f"{folder}/request.json", json.dumps(for_hosts).encode())


def take_results(store: MirroredStore, request: dict[str, Any], code: int) -> None:
    """Fetch the outputs of the first host, or the error of the host that failed."""
    staging = Path(request["staging"])
    # Before anything else: whatever the exit code, this is what failed.
    error = store.remote.read_json(f"{host_files(request['key'])}/error.json", LARGEST_MANIFEST)
    if isinstance(error, dict):
        write_json(StagingFiles(staging).error_path, error)
    store.pull_events()
    if code == ExitCode.DONE and not StagingMirror(store.remote, staging).pull():
        raise Retryable(f"{store.url} does not have the outputs of the first host")


def watch_progress(store: MirroredStore, request: dict[str, Any], ended: threading.Event) -> None:
    """Fetch `live.json` and the events of the first host periodically, until `ended` is set."""
    while not ended.wait(LIVE_EVERY_S):
        try:
            live = store.remote.read_json(f"{host_files(request['key'])}/live.json", LARGEST_MANIFEST)
            if live is not None:
                write_json(StagingFiles(Path(request["staging"])).live, live, durable=False)
            store.pull_events()
        except (OSError, ConfigError, Retryable) as error:
            logger.info("progress could not be fetched; trying again: %s", error)


def _work_on_own_disk(url: str, key: str) -> int:
    """Work as one process of a multi-host stage on a host that shares no disk; return the exit code."""
    store, rank = open_remote(url), process_rank()
    folder = store.staging_files(key).folder
    mirror = StagingMirror(store.remote, folder, store.push_events)
    # Until `work` returns, whatever ends this process counts as a failure.
    code: int = ExitCode.FAILED
    try:
        request = _prepared_request(store, key, mirror if rank == 0 else None)
    except (ConfigError, Retryable) as error:
        store.staging(key)
        code = failed(folder, ExitCode.RETRY if isinstance(error, Retryable) else ExitCode.BAD_INPUT, error)
        _send_error(store, key)
        return code
    # Only the first host sends its staging folder and its progress; every host sends its error.
    ended = threading.Event()
    if rank == 0:
        mirror.start()
        threading.Thread(target=_send_progress, args=(store, key, ended), daemon=True).start()
    try:
        code = work(request, [], _access(store, request))
    finally:
        ended.set()
        if code:
            _send_error(store, key)
        if rank == 0:
            store.push_events()
            # Not published: the files stay at the remote, where the launching machine fetches them.
            mirror.stop(published=False)
    if rank == 0 and code == ExitCode.DONE:
        try:
            mirror.push()  # raises if files are still not sent
        except (ConfigError, Retryable) as error:
            return failed(folder, ExitCode.RETRY, error)
        store.discard(folder)
    return code


def request_of(store: MirroredStore, key: str) -> dict[str, Any]:
    """Read the request for hosts that share no disk, fetch its inputs, and fill in the paths of this host.

    The remote's artifacts are listed only if an input is not known here, because this runs once per work item.
    """
    store.prepare()
    request = store.remote.read_json(f"{host_files(key)}/request.json", LARGEST_MANIFEST)
    if not isinstance(request, dict):
        raise Retryable(f"{store.url}/{host_files(key)}/request.json does not exist: its run has ended")
    stage = load_stage(request["module"], request["attribute"])
    inputs = {}
    if not all(
        _is_known(store, artifact_id, request["record"]["inputs"][name])
        for name, artifact_id in request["inputs"].items()
    ):
        store.refresh()
    for name, artifact_id in request["inputs"].items():
        artifact = store.get(artifact_id)
        if not store.has_files(artifact):
            store.fetch(artifact, without=stage.on_demand.get(artifact.kind))
        inputs[name] = str(artifact.folder)
    events = str(store.events / request["events"])
    return request | {"inputs": inputs, "events": events, "store": str(store.root)}


def _is_known(store: MirroredStore, artifact_id: str, digest: str) -> bool:
    """Whether the artifact is known here with this content; it may have been written again since."""
    try:
        return bool(store.get(artifact_id).manifest["digest"] == digest)
    except ConfigError:
        return False


def _prepared_request(store: MirroredStore, key: str, mirror: StagingMirror | None) -> dict[str, Any]:
    """The request; with `mirror`, also fetch the work so far into the staging folder of this host."""
    request = request_of(store, key)
    folder = store.staging(key)
    if mirror:
        record = read_json(StagingFiles(folder).execution)
        # Work of an earlier execution on this host: another key's state would be mixed into this one's.
        if record is None or record["execution"] != request["execution"]:
            store.discard(folder)
        mirror.pull()
        store.staging(key)
        write_json(StagingFiles(folder).execution, request["record"])
    StagingFiles(folder).error_path.unlink(missing_ok=True)
    return request | {"staging": str(folder)}


def _send_error(store: MirroredStore, key: str) -> None:
    """Send this host's error, unless another host has sent one."""
    with suppress(OSError, ConfigError, Retryable):
        error = store.staging_files(key).error_path.read_bytes()
        # `create` fails if the object exists: the first error is the cause, later ones follow from it.
        store.remote.create(f"{host_files(key)}/error.json", error)


def _send_progress(store: MirroredStore, key: str, ended: threading.Event) -> None:
    """Send `live.json` and the events periodically, until `ended` is set."""
    while not ended.wait(LIVE_EVERY_S):
        try:
            live = store.staging_files(key).live
            if live.is_file():
                store.remote.write(f"{host_files(key)}/live.json", live.read_bytes())
            store.push_events()
        except (OSError, ConfigError, Retryable) as error:
            logger.info("progress could not be sent; trying again: %s", error)


def open_remote(location: str) -> MirroredStore:
    """The store at a URL, or at a folder of this machine that mirrors one."""
    store = open_store(location)
    assert isinstance(store, MirroredStore)
    return store


def _access(store: MirroredStore, request: dict[str, Any]) -> RemoteAccess:
    """The cache of this machine, of the size that the request names, and its claims on requests to endpoints."""
    files = FileCache(store, int(request["launch"]["cache_gigabytes"] * BYTES_PER_GIGABYTE))
    return RemoteAccess(files, partial(RequestClaims, store))


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
