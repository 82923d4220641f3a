"""The layout of a store: the paths of its folders (`Layout`) and of the files in a staging folder (`StagingFiles`).

    <root>/store.json                     {"layout": 1}
    <root>/artifacts/<kind>/<key>/        a live artifact: its files and manifest.json
    <root>/artifacts/<kind>/<key>.<n>/    one that a forced rerun replaced (superseded), kept for its lineage
    <root>/staging/<key>/                 work in progress; survives a crash, so that a retry resumes from it
    <root>/events/*.jsonl  replies/<model>/*.jsonl  logs/  locks/  catalog.duckdb

Other modules join no names of these folders: they ask here. The files of an artifact are named by the module that
writes its kind, those of `scratch`, `logs`, `cache` and `prefect` by who writes them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from nautile.common.files import read_json

# Folders that are at the remote too, under the same name.
STAGING, EVENTS, REPLIES = "staging", "events", "replies"
# In a staging folder, for patterns of names.
CHECKPOINTS = "checkpoints"  # wherever a stage keeps its own (model/training/checkpoint.py)
STEPS = f"{CHECKPOINTS}/steps"
SCRATCH = "scratch"
FAN_OUTS, ITEM_LIST, DONE_ITEMS, RUNNING_ITEMS, FINISHED = "fan_outs", "list.json", "done", "items", "finished.json"
EXECUTION, LOG = "execution.json", "log.txt"


class Layout:
    """The folders and files of the store in the folder `root`, for a process that needs no more of it than a path."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).absolute()

    @property
    def description(self) -> Path:
        """The number of the store's layout."""
        return self.root / "store.json"

    @property
    def artifacts(self) -> Path:
        """`<kind>/<key>/` for each live artifact, `<kind>/<key>.<n>/` for each superseded one."""
        return self.root / "artifacts"

    def artifact_name(self, folder: Path) -> str:
        """The name `kind/key` of a live artifact's folder, or `kind/key.n`; `Store.get` accepts it."""
        return folder.relative_to(self.artifacts).as_posix()

    @property
    def staging_root(self) -> Path:
        """The staging folders of all keys, and what is on its way in or out under a name with a dot."""
        return self.root / STAGING

    def staging_files(self, key: str) -> "StagingFiles":
        """The paths in the staging folder of `key`, which may not exist."""
        return StagingFiles(self.staging_root / key)

    @property
    def events(self) -> Path:
        """What processes have reported, in files of one event a line."""
        return self.root / EVENTS

    @property
    def replies(self) -> Path:
        """Paid replies, in a folder for each model (data/endpoints/reply_cache.py)."""
        return self.root / REPLIES

    @property
    def logs(self) -> Path:
        """What stages, services and commands have printed."""
        return self.root / "logs"

    def execution_log(self, stage: str, execution: str) -> Path:
        """The log of an execution, once its last attempt has ended."""
        return self.logs / f"{stage}-{execution}.txt"

    @property
    def locks(self) -> Path:
        """The lock files of keys, runs, slots and of the catalog."""
        return self.root / "locks"

    @property
    def verified(self) -> Path:
        """Stamps of large files that were verified (store/verify.py)."""
        return self.root / "verified"

    @property
    def compiled(self) -> Path:
        """JAX's compilation cache."""
        return self.root / "compiled"

    @property
    def cache(self) -> Path:
        """What can be made again or fetched again."""
        return self.root / "cache"

    @property
    def sweeps(self) -> Path:
        """A record of each sweep."""
        return self.root / "sweeps"

    def stored_config(self, digest: str) -> Path:
        """The configuration of a run, by which a flow's parameter names it (flows/stored_configs.py)."""
        return self.root / "configurations" / f"{digest}.json"

    @property
    def questions(self) -> Path:
        """A note for each run that waits for an answer (flows/operate/approval.py)."""
        return self.root / "questions"

    @property
    def prefect(self) -> Path:
        """Prefect's own files, unless PREFECT_HOME names another folder."""
        return self.root / "prefect"

    @property
    def services(self) -> Path:
        """The processes that `nautile up` has started."""
        return self.root / "services.json"

    @property
    def machine_path(self) -> Path:
        """The id of this folder among those that share a remote (store/lease.py)."""
        return self.root / "machine.json"

    @property
    def catalog_path(self) -> Path:
        """The DuckDB file of `store.catalog.Catalog`."""
        return self.root / "catalog.duckdb"

    @property
    def digest_memory(self) -> Path:
        """The cache file of `common.files.content_digests`, for local files that configurations name."""
        return self.root / "local_files.json"


@dataclass(frozen=True)
class ChildFiles:
    """The files that one child writes for its parent: log.txt, live.json (progress), error.json."""

    folder: Path

    @property
    def log(self) -> Path:
        return self.folder / LOG

    @property
    def live(self) -> Path:
        return self.folder / "live.json"

    @property
    def error_path(self) -> Path:
        return self.folder / "error.json"

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


@dataclass(frozen=True)
class StagingFiles(ChildFiles):
    """The paths in the staging folder of a key.

    execution.json  request.json  live.json  error.json  retry.json  failure.json  done.json  log.txt
    publication.json  uploads.json  sent.json
    fan_outs/<fan-out>/  scratch/  output/<kind>/  others/<process>/<kind>/  facts/<kind>.json  digests/<kind>.json
    """

    @property
    def store_root(self) -> Path:
        """The root of the store that the folder is in."""
        return self.folder.parents[1]

    def of(self, key: str) -> Self:
        """The files of another key of the store."""
        return type(self)(self.folder.with_name(key))

    @property
    def execution(self) -> Path:
        """The execution that works here, and its latest attempt."""
        return self.folder / EXECUTION

    @property
    def request(self) -> Path:
        """What the child is to do."""
        return self.folder / "request.json"

    @property
    def done(self) -> Path:
        """Exists once the work is complete: the kinds that it wrote."""
        return self.folder / "done.json"

    @property
    def retry(self) -> Path:
        """Why the next attempt begins only later."""
        return self.folder / "retry.json"

    @property
    def failure(self) -> Path:
        """Why a run of a sweep has failed here, for the other runs of the sweep."""
        return self.folder / "failure.json"

    @property
    def publication(self) -> Path:
        """The id under which this machine publishes the outputs."""
        return self.folder / "publication.json"

    @property
    def uploads(self) -> Path:
        """{"at": time of the last snapshot sent or null, "error": why none could be sent since, or ""}."""
        return self.folder / "uploads.json"

    @property
    def sent(self) -> Path:
        """{"snapshot": id, "files": name -> [bytes, ctime]} of the last snapshot sent."""
        return self.folder / "sent.json"

    @property
    def lease(self) -> Path:
        """Which attempt's work items may still run."""
        return self.folder / FAN_OUTS / "lease.json"

    def fan_out(self, name: str) -> Path:
        """The folder with the marker files of a fan-out (tasks/engine/fanout.py)."""
        return self.folder / FAN_OUTS / name

    @property
    def scratch(self) -> Path:
        """Resumable state that is not published."""
        return self.folder / SCRATCH

    @property
    def checkpoints(self) -> Path:
        """The checkpoints of a training."""
        return self.scratch / CHECKPOINTS

    @property
    def saved_steps(self) -> Path:
        """A folder for each saved step of a training."""
        return self.scratch / STEPS

    @property
    def outputs(self) -> Path:
        """A folder for each kind, published when the work is done."""
        return self.folder / "output"

    def output(self, kind: str, process: int = 0) -> Path:
        """What becomes the artifact of a kind. `process`: of a multi-host stage, of which only 0 publishes."""
        return self.folder / "others" / str(process) / kind if process else self.outputs / kind

    def facts(self, kind: str) -> Path:
        """The facts for the manifest of a kind."""
        return self.folder / "facts" / f"{kind}.json"

    def digests(self, kind: str) -> Path:
        """The sha256 of files of a kind that were hashed while they were written."""
        return self.folder / "digests" / f"{kind}.json"
