"""The child process of a stage some of whose input files are at the store's remote: opens them through a cache.

`python -m tasks.engine.remote_child REQUEST.json`, in place of `tasks.engine.child_main`, which need not import what
reaches a remote.
"""

import json
import logging
import os
import sys
from pathlib import Path

from common.files import RemoteFiles
from store.file_cache import FileCache
from store.mirror import MirroredStore, open_store
from tasks.engine.child_main import main as run_request
from tasks.engine.child_main import process_rank

BYTES_PER_GIGABYTE = 10**9


def remote_files(request_path: str) -> RemoteFiles:
    """The cache of this machine, of the size that the request names."""
    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    store = open_store(request["store"])
    assert isinstance(store, MirroredStore)
    return FileCache(store, int(request["launch"]["cache_gigabytes"] * BYTES_PER_GIGABYTE))


def main() -> int:
    """Do the work of the request; return the exit code."""
    return run_request(sys.argv[1:], remote_files(sys.argv[1]))


if __name__ == "__main__":
    code = main()
    if code and process_rank() is not None:
        logging.shutdown()
        os._exit(code)
    sys.exit(code)
