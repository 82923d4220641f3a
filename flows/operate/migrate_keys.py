"""`nautile store migrate`: rename artifacts and unfinished work of an earlier version to the keys of this version.

Keys of earlier versions hashed all fields of a step's section; now they hash only the semantic fields. A manifest
records the section, the stage's version and the keys of the inputs, so the new key can be computed from it, inputs
first. The files of an artifact do not change: its manifest is rewritten, then its folder is renamed. The new manifest
records its `former_key`, so that an interrupted migration can be resumed.
"""

import glob
import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.files import read_json, sync_folder, write_json, write_text
from configs.keys import FILES, key_fields, with_local_files
from store.artifacts import Store
from store.catalog import Catalog
from store.manifest import KEY, MANIFEST, read_manifest, stage_key, with_seal
from tasks.engine.child_main import load_stage

FORMER = "former_key"


@dataclass(frozen=True)
class Migration:
    """A folder to rename: of an artifact, or with `kind` "staging" of unfinished work.

    `obstacle`: why it cannot be renamed, or empty. `manifest`: the manifest to write before the folder is renamed.
    """

    label: str
    kind: str
    folder: Path
    key: str
    obstacle: str = ""
    manifest: dict[str, Any] | None = None

    @property
    def target(self) -> Path:
        """The new path of the folder. The number of a superseded artifact is kept."""
        return self.folder.with_name(self.key + self.folder.name[len(self.key) :])


def plan(store: Store) -> list[Migration]:
    """List the folders whose key differs in this version, inputs first, without changes.

    Raises `ConfigError` for a store with a remote, whose objects cannot be renamed.
    """
    if store.url is not None:
        raise ConfigError(f"{store.location}: a store with a remote cannot be migrated: its objects cannot be renamed")
    migrations, new_ids = [], {}
    folders = (folder for *_, folder in store.folders())  # of superseded artifacts too
    manifests = [(manifest, folder) for folder in folders if (manifest := read_manifest(folder))]
    # An input is older than what was made from it, so its new id is known when it is needed.
    for manifest, folder in sorted(manifests, key=lambda entry: entry[0]["created"]):
        kind, label = manifest["kind"], manifest["label"]
        former_ids = [f"{kind}/{manifest['key']}"]
        if FORMER in manifest:
            former_ids.append(f"{kind}/{manifest[FORMER]}")
            new_ids[former_ids[-1]] = f"{kind}/{manifest['key']}"
            if folder.name.partition(".")[0] == manifest[FORMER]:  # interrupted before the folder was renamed
                migrations.append(Migration(label, kind, folder, manifest["key"]))
                continue
            # Else it was migrated, perhaps by an earlier version: its key may differ again.
        inputs = {name: new_ids.get(full_id, full_id) for name, full_id in manifest["inputs"].items()}
        try:
            section = _section_of(manifest["config"], datetime.fromisoformat(manifest["created"]).timestamp())
        except ConfigError as error:
            migrations.append(Migration(label, kind, folder, manifest["key"], str(error)))
            continue
        key = stage_key(manifest["stage"], manifest["version"], key_fields(section), inputs)
        if key != manifest["key"]:
            new_ids |= dict.fromkeys(former_ids, f"{kind}/{key}")
            changes = {"key": key, "inputs": inputs, "config": section, FORMER: manifest["key"]}
            body = {name: value for name, value in manifest.items() if name != "seal"} | changes
            migrations.append(_unless_taken(Migration(label, kind, folder, key, "", with_seal(body))))
    staged = (_staged(folder, new_ids) for folder in store.root.glob("staging/*"))
    return migrations + [migration for migration in staged if migration]


def apply(store: Store, migrations: list[Migration]) -> int:
    """Rename the folders without obstacle, rebuild the catalog, and return the number of renamed folders.

    Raises `ConfigError`, before any change, if a run uses the store.
    """
    pending = [migration for migration in migrations if not migration.obstacle]
    busy = [m.label for m in pending if store.lock(m.folder.name.partition(".")[0]).held_elsewhere()]
    if busy or any(store.run_lock(run).held_elsewhere() for run in store.begun_runs()):
        raise ConfigError(f"{store.root}: a run uses this store; stop it, then migrate")
    for migration in pending:
        if migration.kind == "staging":
            # RL checkpoints contain the key of their step.
            for path in migration.folder.glob("scratch/**/identity.json"):
                write_text(path, path.read_text(encoding="utf-8").replace(migration.folder.name, migration.key))
        elif migration.manifest is not None:
            # Manifest first, then the name of the folder: if the process is killed in between, `former_key` says that
            # only the renaming is left.
            write_json(migration.folder / MANIFEST, migration.manifest)
        migration.folder.rename(migration.target)
        sync_folder(migration.target.parent)
    if pending:
        Catalog(store).rebuild()
    return len(pending)


def _section_of(section: dict[str, Any], made: float) -> dict[str, Any]:
    """The section with the current digests of its local files. Raises `ConfigError` if a file changed since `made`."""
    complete = with_local_files({name: part for name, part in section.items() if name != FILES})
    if FILES not in section:
        for pattern in complete.get(FILES, {}):
            # Old manifests have no digests of local files. The file of today counts as the one of then only if it is
            # older than the artifact.
            newest = max(os.path.getmtime(path) for path in glob.glob(pattern, recursive=True) or [pattern])
            if newest > made:
                raise ConfigError(f"{pattern} changed after this artifact was made from it")
    return section if FILES in section else complete


def _staged(folder: Path, new_ids: dict[str, str]) -> Migration | None:
    """The migration of a staging folder; None if its key does not change, or if it has no request.json."""
    request = read_json(folder / "request.json")
    if not KEY.fullmatch(folder.name) or not isinstance(request, dict):
        return None
    label, created = request["stage"], (folder / "request.json").stat().st_mtime
    try:
        stage = load_stage(request["module"], request["attribute"])
        section = _section_of(request["section"], created)
    except ConfigError as error:
        return Migration(label, "staging", folder, folder.name, str(error))
    ids = {name: f"{Path(path).parent.name}/{Path(path).name}" for name, path in request["inputs"].items()}
    key = stage.key(section, {name: new_ids.get(full_id, full_id) for name, full_id in ids.items()})
    return None if key == folder.name else _unless_taken(Migration(label, "staging", folder, key))


def _unless_taken(migration: Migration) -> Migration:
    if not migration.target.exists():
        return migration
    obstacle = f"{migration.target.name[:12]} exists already"
    return Migration(migration.label, migration.kind, migration.folder, migration.key, obstacle)
