"""Add files that no stage of this store made, such as an imported checkpoint, to the store as an artifact.

Its key is a digest of the files, so the same files are the same artifact in every store.
"""

import logging
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nautile.common.errors import ConfigError
from nautile.common.files import sha256_of, writing
from nautile.common.input_files import check_regular, open_regular
from nautile.store.artifacts import Artifact, Store
from nautile.store.layout import StagingFiles
from nautile.store.manifest import ADDED, stage_key
from nautile.store.mirror import MirroredStore

logger = logging.getLogger(__name__)


def add_files(store: Store, kind: str, folder: Path, names: Sequence[str], facts: dict[str, Any]) -> Artifact:
    """Copy the files `names` of `folder` into an artifact; returns the existing one if it has the same, intact files.

    `facts` go into its manifest, with the folder as `origin`. Raises `ConfigError` for a link, which could bring any
    file of this machine into the store and its remote, if a file cannot be read or changes while it is copied, or if
    the store cannot be written.
    """
    check_plain(folder, names)
    try:
        digests = {name: sha256_of(folder / name, follow_links=False) for name in sorted(names)}
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be read ({error.strerror})") from None
    section = {"kind": kind, "files": digests}
    key = stage_key(ADDED, 1, section, {})
    with store.lock(key), store.lease(key, time.sleep, _say_who) as lease:
        store.refresh(held=key)
        try:
            artifact = store.find(kind, key)
        except ConfigError:
            artifact = None  # its manifest is damaged: it is replaced
        if artifact is None or store.verify(artifact, remote=False):
            artifact = _publish(store, kind, key, lease.fence, folder, section, facts)
        # Also an artifact that exists: an earlier attempt may have failed here.
        if isinstance(store, MirroredStore):
            store.push([artifact])
    return artifact


def check_plain(folder: Path, names: Iterable[str]) -> None:
    """Raise `ConfigError` unless all `names` are regular files below `folder` that no link leads to.

    To be called before anything of the folder is read.
    """
    try:
        for name in sorted(names):
            place = folder  # which the operator named, so it may be a link
            for part in Path(name).parts[:-1]:
                place /= part
                if place.is_symlink():
                    raise ConfigError(f"{place}: is a link, not a folder; put the folder itself there")
            check_regular(folder / name, follow_links=False)
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be read ({error.strerror})") from None


def _say_who(host: str) -> None:
    logger.warning("waiting: %s adds the same files", host)


def _publish(
    store: Store, kind: str, key: str, fence: int, folder: Path, section: dict[str, Any], facts: dict[str, Any]
) -> Artifact:
    digests = section["files"]
    staging = store.staging(key)
    try:
        output = StagingFiles(staging).output(kind)
        with writing(store.root):
            for name in digests:
                (output / name).parent.mkdir(parents=True, exist_ok=True)
                with (
                    open_regular(folder / name, follow_links=False) as source,
                    (output / name).open("xb") as target,
                ):
                    shutil.copyfileobj(source, target)
        # The digests are the key, and `publish` does not read the files again: what was digested must be what was
        # copied.
        if changed := [name for name, digest in digests.items() if sha256_of(output / name) != digest]:
            raise ConfigError(f"{folder / changed[0]}: changed while it was copied; add it again")
        return store.publish(
            kind,
            key,
            output,
            stage=ADDED,
            version=1,
            config=section,
            inputs={},
            fence=fence,
            facts={**facts, "origin": str(folder.absolute())},
            label=f"{ADDED}:{folder.absolute().name}",
            supersede=True,
            digests=digests,
        )
    finally:
        store.discard(staging)
