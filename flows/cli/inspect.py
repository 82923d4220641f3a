"""What the read commands show, as plain data: the plan's state, artifacts, one artifact, lineage, a query's rows."""

from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.files import read_json
from configs.operation import RetentionConfig
from configs.schema import RunConfig
from flows.dag import Step, build_dag
from store.artifacts import Artifact, Store
from store.catalog import Catalog
from store.garbage import collect, find_garbage
from store.mirror import MirroredStore, open_store
from store.schema import TABLES

Row = dict[str, Any]

_LAST_RUNS = """
SELECT key, state, attempt, started, seconds, error FROM runs
WHERE NOT reused QUALIFY row_number() OVER (PARTITION BY key ORDER BY started DESC, time DESC) = 1
"""


def status(store: Store, config: RunConfig) -> list[Row]:
    """A row for each execution of the plan: made, damaged (its manifest cannot be read; `verify` reads the files too),
    running, interrupted (its work is kept), failed, or not made."""
    store.refresh()
    last = {row["key"]: row for row in _fresh(store).query(_LAST_RUNS)} if store.root.exists() else {}
    rows = []
    for step in build_dag(config):
        found, damage = _found(store, step)
        ran = last.get(step.key, {})
        staging = store.root / "staging" / step.key
        live = read_json(staging / "live.json") or {}
        state = "not made"
        if damage:
            state = "damaged"
        elif len(found) == len(step.outputs):
            state = "made"
        elif store.root.exists() and store.lock(step.key).held_elsewhere():
            state = "running"
        elif staging.is_dir():
            state = "failed" if ran.get("state") == "failed" else "interrupted"
        rows.append(
            {
                "label": step.label,
                "state": state,
                "key": step.key,
                "artifacts": [artifact.id for artifact in found],
                "progress": {name: live[name] for name in ("done", "total", "unit", "note") if name in live},
                "started": ran.get("started"),
                "seconds": ran.get("seconds"),
                "error": damage or (ran.get("error") if state == "failed" else None),
            }
        )
    return rows


def artifacts(store: Store, kind: str | None, superseded: bool) -> list[Row]:
    """A row for each artifact, oldest first."""
    store.refresh()
    found = store.list(kind, superseded=superseded)
    if kind and not found and kind not in (kinds := {name for name, *_ in store.folders()}):
        raise ConfigError(f"no artifacts of kind {kind!r}; there are {', '.join(sorted(kinds)) or 'none of any kind'}")
    return [_row(artifact) for artifact in found]


def show(store: Store, artifact_id: str) -> Row:
    """The whole manifest, the path, where its files are, and what damage there is (every byte is read)."""
    store.refresh()
    artifact = store.get(artifact_id)
    return {
        "id": artifact.id,
        "path": str(artifact.folder),
        "at": _at(artifact),
        "damaged": store.verify(artifact),
        **artifact.manifest,
    }


def lineage(store: Store, artifact_id: str) -> list[Row]:
    """What the artifact was made from, itself first, as rows that nest: `made` is the id of what read it."""
    wanted = ("depth", "name", "made", "id", "kind", "stage", "created", "bytes", "commit", "calls", "key", "execution")
    store.refresh()
    return [{name: row[name] for name in wanted} for row in Catalog(store).lineage(artifact_id)]


def sql(store: Store, query: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Columns and rows of a read-only query over the catalog, brought up to date first."""
    return _fresh(store).select(query)


def verify(store: Store, artifact_id: str | None, *, remote: bool = True) -> Row:
    """`artifacts`: how many were checked; `damaged`: id -> its damaged files by name; `remedies`: id -> what to do.

    Every byte is read. Without an id all are checked, those whose manifests cannot be read included; `remote`: at the
    remote too.
    """
    store.refresh()
    if artifact_id:
        artifact = store.get(artifact_id)
        checked = {artifact.id: store.verify(artifact, remote=remote)}
    else:
        readable = {artifact.folder: artifact for artifact in store.list(superseded=True)}
        checked = {}
        for kind, key, number, folder in store.folders():
            name = f"{kind}/{key[:12]}" + (f".{number}" if number else "")
            whole = folder in readable
            checked[name] = store.verify(readable[folder], remote=remote) if whole else ["manifest.json"]
        if remote and isinstance(store, MirroredStore):
            checked |= {name: ["manifest.json at the remote"] for name in store.unusable_manifests()}
    damaged = {name: files for name, files in checked.items() if files}
    return {"artifacts": len(checked), "damaged": damaged, "remedies": {name: _remedy(store, name) for name in damaged}}


def _remedy(store: Store, artifact_id: str) -> str:
    try:
        artifact = store.get(artifact_id)
    except ConfigError:
        if "." in artifact_id:
            return "it was replaced: `nautile store gc` removes it"
        return "`nautile run CONFIG` says which stage is to be made anew"
    label = artifact.manifest["label"]
    if artifact.superseded:
        return f"it was replaced: `nautile run CONFIG --from {label} --force`, then `nautile store gc` removes it"
    return f"make it anew: `nautile run CONFIG --only {label} --force`"


def garbage(store: Store, days: float, dry_run: bool, rules: RetentionConfig = RetentionConfig()) -> list[Row]:
    """A row for each thing that went, or with `dry_run` would go. The catalog follows."""
    store.refresh()
    found = find_garbage(store, stale_days=days, rules=rules)
    if not dry_run:
        found = collect(store, found)
        if store.catalog_path.exists():
            Catalog(store).ingest()
    return [{"path": str(item.path.relative_to(store.root)), "bytes": item.bytes, "why": item.reason} for item in found]


def push(store: Store, artifact_id: str | None = None) -> list[Row]:
    """A row for each artifact that was sent to the remote. With an id that one, all its files once more."""
    mirrored = _mirrored(store)
    if artifact_id is None:
        return [_row(artifact) for artifact in mirrored.push_all()]
    store.refresh()
    return [_row(artifact) for artifact in mirrored.push([store.get(artifact_id)], again=True)]


def fetch(store: Store, artifact_id: str) -> Row:
    """The row of an artifact whose files are now here."""
    mirrored = _mirrored(store)
    store.refresh()
    artifact = store.get(artifact_id)
    mirrored.fetch(artifact)
    return _row(artifact)


def export(store: Store, table: str, out: Path, overwrite: bool) -> dict[str, int]:
    """Table -> rows written to the Parquet file `out`, or with table `all` to `out/<table>.parquet`."""
    catalog = _fresh(store)
    if table != "all":
        return {table: catalog.export(table, out, overwrite=overwrite)}
    files = {one.name: out / f"{one.name}.parquet" for one in TABLES}
    if there := [path for path in files.values() if path.exists() and not overwrite]:
        raise ConfigError(f"{there[0]} is there already: name another folder, or say --overwrite")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}") from error
    return {name: catalog.export(name, path, overwrite=overwrite) for name, path in files.items()}


def latest_report(store: Store, artifact_id: str | None = None) -> Artifact:
    """The report named, else the newest one. Raises `ConfigError` if there is none."""
    if artifact_id:
        store.refresh()
        return store.get(artifact_id if "/" in artifact_id else f"report/{artifact_id}")
    store.refresh()
    found = store.list("report")
    if not found:
        raise ConfigError(f"no report in {store.root} yet: `nautile run` makes one")
    return found[-1]


def checkpoint_folder(name: str | None) -> Path:
    """Where the checkpoint lies that is meant: a folder, an id in the store, or (None) the newest in the store."""
    if name and (Path(name) / "config.json").is_file():
        return Path(name)
    if name and Path(name).is_dir():
        raise ConfigError(f"{name}: no checkpoint there: a folder with config.json and weights.safetensors is meant")
    store = open_store()
    store.refresh()
    if name:
        found = store.get(name)
        if found.kind != "checkpoint":
            raise ConfigError(f"{found.id} is no checkpoint: `nautile artifacts checkpoint` lists them")
        return found.path
    checkpoints = store.list("checkpoint")
    if not checkpoints:
        raise ConfigError(f"no checkpoint in {store.root} yet: `nautile run` makes some; or name a folder")
    return checkpoints[-1].path


def parameters(config: RunConfig) -> dict[str, int]:
    """Parameters of the model by part."""
    from model.nautile import parameter_counts

    return parameter_counts(config.model)


def _found(store: Store, step: Step) -> tuple[list[Artifact], str | None]:
    """Its artifacts that are there, and what is said of one whose manifest is damaged."""
    try:
        return [a for kind in step.outputs if (a := store.find(kind, step.key))], None
    except ConfigError as error:
        return [], str(error)


def _fresh(store: Store) -> Catalog:
    store.refresh(events=True)
    if not store.root.exists():
        raise ConfigError(f"no store at {store.root} yet: `nautile run` makes one, NAUTILE_STORE names another")
    catalog = Catalog(store)
    catalog.ingest()
    return catalog


def _row(artifact: Artifact) -> Row:
    return {
        "id": artifact.id,
        "stage": artifact.manifest["stage"],
        "bytes": artifact.bytes,
        "files": len(artifact.manifest["files"]),
        "created": artifact.manifest["created"],
        "superseded": artifact.superseded,
        "key": artifact.key,
        "execution": artifact.execution,
        "path": str(artifact.folder),
        "at": _at(artifact),
    }


def _at(artifact: Artifact) -> str:
    """Where its files are: here, both (here and at the remote), or remote."""
    if not isinstance(artifact.store, MirroredStore) or not artifact.store.is_mirrored(artifact):
        return "here"
    return "both" if artifact.store.has_files(artifact) else "remote"


def _mirrored(store: Store) -> MirroredStore:
    if not isinstance(store, MirroredStore):
        raise ConfigError(f"the store {store.root} has no remote: set NAUTILE_STORE to a URL (s3://bucket/prefix)")
    return store
