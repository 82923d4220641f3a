"""A replaced artifact whose files were damaged gets them back from the one that was made in its place.

A stage is a function of its key, so most of what a forced rerun makes is byte for byte what it replaces. The replaced
one stays for its lineage; without this a flipped byte in it would be found by every later verification.
"""

import logging
import os
import shutil
from pathlib import Path

from common.files import sha256_of, sync_folder
from store import manifest as manifests
from store.verify import damaged_files

logger = logging.getLogger(__name__)


def damaged_in(root: Path, folder: Path) -> list[str]:
    """Which files of the artifact in `folder` are damaged or missing; what was digested before is not read again.

    Empty, too, where there is no manifest that can be read, for nothing is known of its files, and where none of them
    lies here at all, for then it is no damage.
    """
    manifest = manifests.read_manifest(folder)
    if manifest is None or not any((folder / name).exists() for name in manifest["files"]):
        return []
    try:
        damaged = damaged_files(root, folder, manifest["files"], trust=True)
    except FileNotFoundError:
        return []  # another process has put it aside meanwhile
    told = (said.rpartition(" (")[0] for said in damaged)
    return [name for name in told if name in manifest["files"]]


def mend(replaced: Path, live: Path, damaged: list[str]) -> list[str]:
    """Copy into folder `replaced` those of its `damaged` files that `live` holds as they were; returns their names."""
    old = manifests.read_manifest(replaced)
    mended = []
    for name in damaged if old else ():
        if not (live / name).is_file() or sha256_of(live / name) != old["files"][name]["sha256"]:
            continue
        (replaced / name).parent.mkdir(parents=True, exist_ok=True)
        temporary = (replaced / name).with_name(f".{Path(name).name}.mending.tmp")
        shutil.copyfile(live / name, temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(replaced / name)
        sync_folder((replaced / name).parent)
        mended.append(name)
    if mended:
        logger.info("%s: %s got back from what replaced it", replaced.name, ", ".join(mended[:5]))
    return mended
