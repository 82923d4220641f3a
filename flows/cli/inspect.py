"""Data of the read commands (`status`, `artifacts`, `show` ...) and of `nautile store`: rows for tables and --json.

`status --why` tells how a step's key differs from that of the most similar artifact in the store.
"""

import json
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nautile.common.commands import shell_command
from nautile.common.errors import ConfigError
from nautile.common.files import read_json
from nautile.common.text import did_you_mean
from nautile.data.tokens.losses import LOST
from nautile.flows.listings import listed_artifacts
from nautile.flows.operate.questions import waiting
from nautile.flows.run_state import PLAN, reading
from nautile.store.artifacts import Artifact, Store, short_id
from nautile.store.catalog import Catalog, CatalogRow
from nautile.store.events import read_live
from nautile.store.manifest import ABSENT, ADDED, KEY, MANIFEST, MIRRORED
from nautile.store.mirror import MirroredStore
from nautile.store.named import trained_by
from nautile.store.staging_mirror import upload_note
from nautile.store.views import LAST_ATTEMPTS, RELATIONS
from nautile.tasks.engine.progress import read_retry_note

if TYPE_CHECKING:  # imported by the functions that need them: they load every stage, for each list of artifacts
    from nautile.configs.operation import RetentionConfig
    from nautile.configs.schema import RunConfig
    from nautile.flows.dag import Step

VERIFYING = 4  # artifacts that are verified at a time
READ_AGAIN = 5  # how often an artifact is verified that runs keep replacing


def status(store: Store, config: "RunConfig") -> list[CatalogRow]:
    """The state of each step of the configuration's DAG, a row per step.

    `state`: made, damaged (its manifest cannot be read; only `verify` checks the files), running, waiting (between two
    attempts, or for an approval), interrupted (its work is kept), failed, or not made.
    """
    from nautile.flows.dag import dag_in

    store.refresh()
    # Locks, staging folders and the catalog are enough, so this also works after a crash and on a shared disk.
    approval_notes = _approval_notes(store)
    steps = dag_in(store, config)
    keys = [step.key for step in steps]
    with reading(store) as query:
        last = {row["key"]: row for row in query(LAST_ATTEMPTS, keys)}
    rows = []
    for step in steps:
        damage, artifacts = None, []
        try:
            artifacts = [artifact for kind in step.outputs if (artifact := store.find(kind, step.key))]
        except ConfigError as error:
            damage = str(error)
        last_run = last.get(step.key, {})
        staging = store.staging_files(step.key)
        live = read_live(staging.live)
        # The order matters: a damaged or complete artifact counts more than what its staging folder says.
        state = "not made"
        if damage:
            state = "damaged"
        elif len(artifacts) == len(step.outputs):
            facts = [artifact.manifest["facts"] for artifact in artifacts]
            notes = [f"no update: {own['no_update']}" for own in facts if own.get("no_update")]
            notes += [own[LOST] for own in facts if LOST in own]
            state, live = "made", {"note": "; ".join(notes)} if notes else {}
        elif note := approval_notes.get(step.key):
            state, live = "waiting", {"note": note}
        elif store.root.exists() and store.lock(step.key).held_elsewhere():
            # The only sure sign of work: a killed process releases its lock, whatever its last row says.
            state = "running"
        elif note := read_retry_note(staging.folder):
            state, live = "waiting", {"note": note}
        elif staging.folder.is_dir():
            # The last attempt recorded a failure, or had no time to record anything.
            state = "failed" if last_run.get("state") == "failed" else "interrupted"
        rows.append(
            {
                "label": step.label,
                "state": state,
                "key": step.key,
                "artifacts": [artifact.id for artifact in artifacts],
                "start": next((store.get(full_id).id for full_id in step.stored_inputs.values()), None),
                "progress": {name: live[name] for name in ("done", "total", "unit", "note") if name in live},
                "upload": upload_note(staging.folder) or None if state not in ("made", "damaged", "not made") else None,
                "started": last_run.get("started"),
                "seconds": last_run.get("seconds"),
                "error": damage or (last_run.get("error") if state == "failed" else None),
            }
        )
    return rows


def _approval_notes(store: Store) -> dict[str, str]:
    """Key of each step that waits for an approval -> a note with the command that approves it."""
    notes: dict[str, str] = {}
    for note in waiting(store):
        run = note["run"]
        # The key is in the plan of the run's newest start, because a restart may have other settings.
        with reading(store) as query:
            plans = query(PLAN, run)
        steps = json.loads(plans[0]["steps"] or "[]") if plans else []
        commands = [shell_command("nautile", command, run[:8]) for command in ("approve", "status")]
        command = "for an answer: `{}` (`{}` shows the question)".format(*commands)
        notes |= {step["key"]: command for step in steps if step["label"] == note["label"]}
    return notes


def artifacts(
    store: Store,
    kind: str | None = None,
    superseded: bool = False,
    *,
    match: str = "",
    sort: str = "created",
    most: int | None = None,
) -> tuple[list[CatalogRow], int]:
    """The last `most` artifacts of the list, from the catalog, a row each; and how many the list has.

    Oldest first, or with `sort="bytes"` smallest first. `superseded`: include replaced ones. `match`: only those with
    all of its words in the id, the label of the step, or the id or name of the run.
    """
    with reading(store) as query:
        found = listed_artifacts(query, match, kind=kind, replaced=superseded, order=sort, limit=most)
        kinds = set() if found else {row["kind"] for row in query("SELECT DISTINCT kind FROM artifacts")}
    # An empty list for a misspelt kind would read as an empty store.
    if kind and not found and kind not in kinds:
        raise ConfigError(
            f"no artifacts of kind {kind!r}{did_you_mean(kind, kinds)}; "
            f"there are {', '.join(sorted(kinds)) or 'none of any kind'}"
        )
    rows = []
    for row in reversed(found):
        folder = store.artifacts / row["kind"] / (row["key"] + (f".{row['superseded']}" if row["superseded"] else ""))
        fields = {name: row[name] for name in ("id", "stage", "bytes", "superseded", "key")}
        fields |= {"files": row["file_count"], "execution": row["published_as"]}
        created = row["created"].replace(tzinfo=UTC).isoformat(timespec="microseconds")
        rows.append(fields | {"created": created, "path": str(folder), "at": _at(store, folder)})
    return rows, found[0]["total"] if found else 0


def show(store: Store, artifact_id: str) -> dict[str, Any]:
    """The manifest of an artifact with its path, location (`at`) and damaged files; reads every byte."""
    store.refresh()
    artifact = trained_by(store, artifact_id) or store.get(artifact_id)
    return {
        "id": artifact.id,
        "path": str(artifact.folder),
        "at": _at(store, artifact.folder),
        "damaged": store.verify(artifact),
        **artifact.manifest,
    }


def lineage(store: Store, artifact_id: str) -> list[CatalogRow]:
    """The artifact and all artifacts it was made from; `made` is the id of the artifact that read this one."""
    columns = (
        "depth",
        "name",
        "made",
        "id",
        "kind",
        "stage",
        "created",
        "bytes",
        "commit",
        "calls",
        "cached_calls",
        "key",
        "execution",
        "configuration",
    )
    store.refresh()
    if checkpoint := trained_by(store, artifact_id):
        artifact_id = checkpoint.full_id
    return [
        {name: row[name] for name in columns} | {name: json.loads(row[name] or "{}") for name in ("config", "files")}
        for row in Catalog(store).lineage(artifact_id)
    ]


def sql(store: Store, query: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Update the catalog and run a read-only query on it; returns its columns and rows."""
    with _catalog(store).caught_up() as reader:
        return reader.select(query)


def verify(store: Store, artifact_id: str | None, *, remote: bool = True) -> dict[str, Any]:
    """Compare the files of one artifact or of all with their digests; `remote`: also the remote copies.

    Returns `artifacts`: the number of checked artifacts; `damaged`: id -> names of damaged files; `remedies`: id ->
    what to do; `events_left_out`: event file -> the number of its events that are not in the catalog. An artifact whose
    manifest cannot be read counts as damaged.
    """
    store.refresh()
    if artifact_id:
        artifact = store.get(artifact_id)
        checked = {artifact.id: store.verify(artifact, remote=remote)}
    else:
        # A folder whose manifest cannot be read is in no list of artifacts, and is the one that must be reported.
        folders = store.folders()
        # In threads: digests, reads and requests to a remote all work beside Python.
        with ThreadPoolExecutor(max_workers=VERIFYING) as pool:
            damages = pool.map(lambda found: _damage(store, found, remote), folders)
            checked = {
                short_id(kind, key, number): damage
                for (kind, key, number, _), damage in zip(folders, damages, strict=True)
                if damage is not None
            }
        if remote and isinstance(store, MirroredStore):
            checked |= {name: ["manifest.json at the remote"] for name in store.unusable_manifests()}
    damaged = {name: files for name, files in checked.items() if files}
    left_out = {}
    if store.root.exists():
        with _catalog(store).caught_up() as reader:
            left_out = reader.left_out()
    return {
        "artifacts": len(checked),
        "damaged": damaged,
        "remedies": {name: _remedy(store, name) for name in damaged},
        "events_left_out": left_out,
    }


def _damage(store: Store, found: tuple[str, str, int, Path], remote: bool) -> list[str] | None:
    """The damaged files of the artifact in a folder; None if there is none any more.

    Runs may publish meanwhile: then the folder has moved, and another version may have its path.
    """
    *_, folder = found
    damage = [MANIFEST]
    for _ in range(READ_AGAIN):
        artifact = store.read(*found)
        damage = store.verify(artifact, remote=remote) if artifact else [MANIFEST]
        if not folder.is_dir():
            return None
        if not damage:
            break
        current = store.read(*found)
        if (current.manifest if current else None) == (artifact.manifest if artifact else None):
            break
    return damage


def _remedy(store: Store, artifact_id: str) -> str:
    """What to do about a damaged artifact, with the command."""
    try:
        artifact = store.get(artifact_id)
    except ConfigError:
        # `KEY.1` is a superseded artifact: no live key depends on it, so it may simply go.
        if "." in artifact_id:
            return "it was replaced: `nautile store gc` removes it"
        # Without a manifest there is no label to put into the command.
        return "`nautile run CONFIG` names the stage to run again"
    label = artifact.manifest["label"]
    if artifact.manifest["stage"] == ADDED:
        return "add it again: `nautile store add FOLDER`"
    if artifact.superseded:
        command = shell_command("nautile", "run", "CONFIG", "--from", label, "--force")
        return f"it was replaced: `{command}`, then `nautile store gc` removes it"
    return f"run its stage again: `{shell_command('nautile', 'run', 'CONFIG', '--only', label, '--force')}`"


def garbage(
    store: Store,
    days: float,
    dry_run: bool,
    rules: "RetentionConfig",
    unfinished: Sequence[str],
    replies: Sequence[str],
) -> list[CatalogRow]:
    """Remove files that are not needed and update the catalog; returns a row per path. `dry_run`: only list them."""
    from nautile.store.garbage import collect, find_garbage

    store.refresh()
    items = find_garbage(store, stale_days=days, rules=rules, unfinished=unfinished, replies=replies)
    if not dry_run:
        # What could not be removed (a lock was taken in the meantime) is not in the result.
        items = collect(store, items)
        if store.catalog_path.exists():
            Catalog(store).ingest()
    return [{"path": str(item.path.relative_to(store.root)), "bytes": item.bytes, "why": item.reason} for item in items]


def push(store: Store, artifact_id: str | None = None) -> list[CatalogRow]:
    """Send missing artifacts to the remote, or all files of one artifact; returns a row per artifact sent."""
    mirrored = _mirrored(store)
    if artifact_id is None:
        return [row_of(artifact) for artifact in mirrored.push_all()]
    store.refresh()
    return [row_of(artifact) for artifact in mirrored.push([store.get(artifact_id)], again=True)]


def fetch(store: Store, artifact_id: str) -> CatalogRow:
    """Download an artifact's files from the remote; returns its row."""
    mirrored = _mirrored(store)
    store.refresh()
    artifact = store.get(artifact_id)
    mirrored.fetch(artifact)
    return row_of(artifact)


def export(store: Store, table: str, out: Path, overwrite: bool) -> dict[str, int]:
    """Write a table or view to the Parquet file `out`, or with `all` each of them to `out/<name>.parquet`.

    Returns name -> number of rows. Raises `ConfigError` if the name of `out` says that it is of another format.
    """
    if table != "all" and out.suffix.lower() != ".parquet":
        raise ConfigError(f"{out}: tables are written as Parquet, so name a file that ends in .parquet")
    catalog = _catalog(store)
    catalog.catch_up()
    if table != "all":
        return {table: catalog.export(table, out, overwrite=overwrite)}
    files = {name: out / f"{name}.parquet" for name in RELATIONS}
    # A refusal must leave no half of an export behind.
    if existing := [path for path in files.values() if path.exists() and not overwrite]:
        raise ConfigError(f"{existing[0]} exists already: name another folder, or pass --overwrite")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}") from error
    return {name: catalog.export(name, path, overwrite=overwrite) for name, path in files.items()}


def _catalog(store: Store) -> Catalog:
    """The catalog, with the events of the remote. Raises `ConfigError` if there is no store."""
    store.refresh(events=True)
    if not store.root.exists():
        raise ConfigError(f"no store at {store.root}: `nautile run` creates it, NAUTILE_STORE names another")
    return Catalog(store)


def row_of(artifact: Artifact) -> CatalogRow:
    """The row of an artifact in `nautile artifacts`."""
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
        "at": _at(artifact.store, artifact.folder),
    }


def _at(store: Store, folder: Path) -> str:
    """Where the files of the artifact in a folder are: `here`, `remote`, or `both`."""
    if not isinstance(store, MirroredStore):
        return "here"
    if (folder / ABSENT).exists():
        return "remote"
    return "both" if (folder / MIRRORED).exists() else "here"


def _mirrored(store: Store) -> MirroredStore:
    if not isinstance(store, MirroredStore):
        raise ConfigError(f"the store {store.root} has no remote: set NAUTILE_STORE to a URL (s3://bucket/prefix)")
    return store


def explain(store: Store, config: "RunConfig", only: str | None = None) -> list[CatalogRow]:
    """Explain each step, or only the step labelled `only`: one row per step.

    `nearest` is the id of the artifact that the step is compared with; None if the step is in the store, or if the
    store has no artifact of its stage. `differences` has a line for each value, file or stage version that changes the
    key, `inputs` a line for each input that does. Raises `ConfigError` for an unknown step.
    """
    from nautile.flows.dag import dag_in

    store.refresh()
    dag = dag_in(store, config)
    if only is not None and only not in (labels := [step.label for step in dag]):
        raise ConfigError(f"no step {only!r}{did_you_mean(only, labels)}; there are {', '.join(labels)}")
    artifacts = store.list()
    rows = []
    for step in dag:
        if only not in (None, step.label):
            continue
        row: CatalogRow = {"label": step.label, "state": "not made", "nearest": None, "differences": [], "inputs": []}
        rows.append(row)
        if all(store.find(kind, step.key) for kind in step.outputs):
            row["state"] = "made"
            continue
        earlier = [a for a in artifacts if a.manifest["stage"] == step.stage.name and a.key != step.key]
        # Reversed, because `min` takes the first of equals: the newest.
        compared = [(section_differences(step, a), input_differences(step, a), a) for a in reversed(earlier)]
        if compared:  # the artifact with the fewest differences; ties: first the same step, then the newest
            row["differences"], row["inputs"], nearest = min(
                compared, key=lambda c: (len(c[0]), len(c[1]), c[2].manifest["label"] != step.label)
            )
            row["nearest"] = nearest.id
    return rows


def section_differences(step: "Step", artifact: Artifact) -> list[str]:
    """Differences in stage version and semantic fields between `artifact` and `step`, a line each."""
    from nautile.configs.keys import key_fields

    manifest = artifact.manifest
    lines = []
    if manifest["version"] != step.stage.number:
        lines.append(f"stage {step.stage.name}: version {manifest['version']} -> {step.stage.number}")
    # Only the fields that are in keys. An operational change is no reason to run again, so it is no answer here.
    before, after = _flat(key_fields(manifest["config"])), _flat(key_fields(step.section))
    for name in sorted(before.keys() | after.keys()):
        values = before.get(name), after.get(name)
        if values[0] == values[1]:
            continue
        # Digests of local files stand in the section; the digits themselves tell nobody anything.
        if all(KEY.fullmatch(str(value)) for value in values):
            lines.append(f"{name}: the file's content changed")
        else:
            lines.append(f"{name}: {' -> '.join('not set' if value is None else repr(value) for value in values)}")
    return lines


def input_differences(step: "Step", artifact: Artifact) -> list[str]:
    """Differences in inputs between `artifact` and `step`, a line each."""
    lines = []
    for name in sorted(artifact.manifest["inputs"].keys() | step.inputs.keys()):
        before, after = artifact.manifest["inputs"].get(name), step.inputs.get(name)
        if before != after:
            ids = (short_id(*full_id.split("/")) if full_id else "none" for full_id in (before, after))
            lines.append(f"{name}: {' -> '.join(ids)}")
    return lines


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested JSON data: dotted name -> value."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {name: leaf for key, part in items for name, leaf in _flat(part, f"{prefix}.{key}").items()}
    return {prefix.removeprefix("."): value}


def publish_snapshot(store: Store, config: "RunConfig", argument: str, step: int | None) -> Artifact:
    """Publish the checkpoint of training step `step` (None: the newest) that the pretraining of `config` has saved.

    Raises `ConfigError`, with the saved steps, if that step is not saved.
    """
    from nautile.flows.selection import Selection, prepare_run
    from nautile.tasks.engine.attempt import run_stage
    from nautile.tasks.engine.stage import RunContext
    from nautile.tasks.pretrain import snapshot

    [pretrain] = prepare_run(config, Selection(only="pretrain"), store, argument).steps
    staging = store.staging_files(pretrain.key)
    saved = sorted(int(path.name) for path in staging.saved_steps.glob("*") if path.name.isdigit())
    if not saved or step not in (None, *saved):
        available = f"it has {', '.join(map(str, saved))}" if saved else "it is finished, or has not saved any yet"
        raise ConfigError(f"the pretraining of {argument} has no saved step{f' {step}' if step else ''}: {available}")
    number = step or saved[-1]
    context = RunContext(f"snapshot-{uuid.uuid4().hex[:8]}", str(store.root), config=config.name)
    # A forced pretraining has the same key and begins anew: a snapshot of the one before is not its own.
    execution = (read_json(staging.execution) or {}).get("execution")
    section = {"of": pretrain.key, "execution": execution, "step": number}
    outputs = run_stage(snapshot, section, pretrain.inputs, context)
    return store.get(outputs["checkpoint"])
