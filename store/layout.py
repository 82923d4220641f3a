"""The layout of a store: the paths of its folders (`Layout`) and of the files in a staging folder (`StagingFiles`).

    <root>/store.json                     {"layout": 1}
    <root>/artifacts/<kind>/<key>/        a live artifact: its files and manifest.json
    <root>/artifacts/<kind>/<key>.<n>/    one that a forced rerun replaced (superseded), kept for its lineage
    <root>/staging/<key>/                 work in progress; survives a crash, so that a retry resumes from it
    <root>/events/*.jsonl  replies/<model>/*.jsonl  logs/  locks/  catalog.duckdb

Other modules join no names of these folders: they ask here. The files of an artifact are named by the module that
writes its kind, those of `scratch`, `logs`, `cache` and `prefect` by who writes them.
"""

from pathlib import Path
from typing import Any

from nautile.common.files import read_json

# Folders that are at the remote too, under the same name.
STAGING, EVENTS, REPLIES = "staging", "events", "replies"
VERIFIED = "verified"
ARTIFACT_FOLDER = "artifacts"
# In a staging folder, for patterns of names.
CHECKPOINTS = "checkpoints"  # wherever a stage keeps its own (model/training/checkpoint.py)
STEPS = f"{CHECKPOINTS}/steps"
SCRATCH = "scratch"
FAN_OUTS, ITEM_LIST, DONE_ITEMS, RUNNING_ITEMS, FINISHED = "fan_outs", "list.json", "done", "items", "finished.json"
EXECUTION, LOG = "execution.json", "log.txt"


class Layout:
    """The folders and files of the store in the folder `root`, for a process that needs no more of it than a path."""

    def __init__(self, root: str | Path) -> None:
        self.root = root = Path(root).absolute()
        self.description = root / "store.json"  # the number of the store's layout
        self.artifacts = root / ARTIFACT_FOLDER  # `<kind>/<key>/` live artifacts, `<kind>/<key>.<n>/` superseded ones
        # The staging folders of all keys, and what is on its way in or out under a name with a dot.
        self.staging_root = root / STAGING
        self.events = root / EVENTS  # what processes have reported, in files of one event a line
        self.replies = root / REPLIES  # paid replies, in a folder for each model (data/endpoints/reply_cache.py)
        self.logs = root / "logs"  # what stages, services and commands have printed
        self.locks = root / "locks"  # the lock files of keys, runs, slots and of the catalog
        self.verified = root / VERIFIED  # stamps of large files that were verified (store/manifest.py)
        self.compiled = root / "compiled"  # JAX's compilation cache
        self.cache = root / "cache"  # what can be made again or fetched again
        self.sweeps = root / "sweeps"  # a record of each sweep
        self.rehearsals = root / "rehearsals"  # a record of each configuration's last one (flows/rehearsal.py)
        self.rehearsal_store = self.rehearsals / "rehearsed"  # their own store
        self.questions = root / "questions"  # a note for each run that waits for an answer (flows/operate/approval.py)
        self.prefect = root / "prefect"  # Prefect's own files, unless PREFECT_HOME names another folder
        self.services = root / "services.json"  # the processes that `nautile up` has started
        self.machine_path = root / "machine.json"  # the folder's id among those that share a remote (store/lease.py)
        self.catalog_path = root / "catalog.duckdb"  # the DuckDB file of `store.catalog.Catalog`
        self.digest_memory = root / "local_files.json"  # of `common.files.content_digests`

    def artifact_name(self, folder: Path) -> str:
        """The name `kind/key` of a live artifact's folder, or `kind/key.n`; `Store.get` accepts it."""
        return folder.relative_to(self.artifacts).as_posix()

    def staging_files(self, key: str) -> "StagingFiles":
        """The paths in the staging folder of `key`, which may not exist."""
        return StagingFiles(self.staging_root / key)

    def execution_log(self, stage: str, execution: str) -> Path:
        """The log of an execution, once its last attempt has ended."""
        return self.logs / f"{stage}-{execution}.txt"

    def rehearsal(self, digest: str) -> Path:
        """The record of the last rehearsal of a configuration, by the digest of what was rehearsed."""
        return self.rehearsals / f"{digest}.json"

    def stored_config(self, digest: str) -> Path:
        """The configuration of a run, by which a flow's parameter names it (flows/stored_configs.py)."""
        return self.root / "configurations" / f"{digest}.json"


class _In:
    """An attribute: the path of this name in the folder of a `ChildFiles`, made when it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, files: "ChildFiles", _: object) -> Path:
        return files.folder / self._name


class ChildFiles:
    """The files that one child writes for its parent: its log, its progress, and the error that ended it."""

    log = _In(LOG)
    live = _In("live.json")
    error_path = _In("error.json")

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def error(self) -> dict[str, Any] | None:
        """`type` and `message` of the error that ended the child; None if it could not write them."""
        error = read_json(self.error_path)
        # A child on another host may be of another version.
        texts = isinstance(error, dict) and all(isinstance(error.get(name), str) for name in ("type", "message"))
        return error if texts else None

    def clear(self) -> None:
        """Remove the error and progress of an earlier attempt."""
        for path in (self.error_path, self.live):
            path.unlink(missing_ok=True)

    def log_tail(self) -> str:
        """The last fifteen lines of the log, for a message."""
        try:
            with self.log.open("rb") as file:
                # Only the end of a log that may have gigabytes.
                file.seek(max(0, file.seek(0, 2) - 8192))
                return "\n".join(file.read().decode(errors="replace").splitlines()[-15:])
        except OSError:
            return ""


class StagingFiles(ChildFiles):
    """The paths in the staging folder of a key."""

    execution = _In(EXECUTION)  # the execution that works here, and its latest attempt
    request = _In("request.json")  # what the child is to do
    done = _In("done.json")  # exists once the work is complete: the kinds that it wrote
    retry = _In("retry.json")  # why the next attempt begins only later
    failure = _In("failure.json")  # why a run of a sweep has failed here, for its other runs
    publication = _In("publication.json")  # the id under which this machine publishes the outputs
    # {"at": time of the last snapshot sent or null, "error": why none could be sent since, or ""}
    uploads = _In("uploads.json")
    sent = _In("sent.json")  # {"snapshot": id, "files": name -> [bytes, ctime]} of the last snapshot sent
    lease = _In(f"{FAN_OUTS}/lease.json")  # which attempt's work items may still run
    scratch = _In(SCRATCH)  # resumable state that is not published
    checkpoints = _In(f"{SCRATCH}/{CHECKPOINTS}")  # of a training
    saved_steps = _In(f"{SCRATCH}/{STEPS}")  # a folder for each saved step of a training
    outputs = _In("output")  # a folder for each kind, published when the work is done

    @property
    def store_root(self) -> Path:
        """The root of the store that the folder is in."""
        return self.folder.parents[1]

    def of(self, key: str) -> "StagingFiles":
        """The files of another key of the store."""
        return StagingFiles(self.folder.with_name(key))

    def fan_out(self, name: str) -> Path:
        """The folder with the marker files of a fan-out (tasks/engine/fanout.py)."""
        return self.folder / FAN_OUTS / name

    def output(self, kind: str, process: int = 0) -> Path:
        """What becomes the artifact of a kind. `process`: of a multi-host stage, of which only 0 publishes."""
        return self.folder / "others" / str(process) / kind if process else self.outputs / kind

    def facts(self, kind: str) -> Path:
        """The facts for the manifest of a kind."""
        return self.folder / "facts" / f"{kind}.json"

    def digests(self, kind: str) -> Path:
        """The sha256 of files of a kind that were hashed while they were written."""
        return self.folder / "digests" / f"{kind}.json"
