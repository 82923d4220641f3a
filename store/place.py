"""Where a store is: a folder here, or a URL of an object store with a folder here that work goes on in.

`NAUTILE_STORE` names it. With a URL (s3://bucket/prefix, gs://…, any that fsspec writes to) staging, catalog, locks and
event files stay in the cache folder, `NAUTILE_STORE_CACHE` or one under ~/.cache/nautile that is named after the URL.
The cache remembers the URL in `remote.json`, so a child process that is only told the folder knows the remote too.
"""

import hashlib
import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import fsspec

from configs.section import ConfigError
from store.durable import read_json, write_json

RECORD = "remote.json"
# They take no writes, end with the process, or are no object store: nothing that another machine could read back.
_NO_STORE = {"memory", "http", "https", "data", "zip", "tar", "github", "git", "blockcache", "filecache", "simplecache"}


def place_of(root: str) -> tuple[Path, str | None]:
    """The folder that `root` means and the URL it mirrors, if any. Raises `ConfigError` for an impossible one."""
    parts = urlsplit(root)
    if "://" not in root or parts.scheme == "file":
        if parts.scheme == "file" and parts.netloc not in ("", "localhost"):
            raise ConfigError(f"NAUTILE_STORE {root!r}: a file:// URL names a path on this machine (file:///path)")
        path = Path(unquote(parts.path) if parts.scheme == "file" else root).expanduser().absolute()
        return path, _recorded(path)
    url = _checked(root.rstrip("/"))
    cache = os.environ.get("NAUTILE_STORE_CACHE")
    path = Path(cache).expanduser().absolute() if cache else _default_cache(url)
    if (other := _recorded(path)) not in (None, url):
        raise ConfigError(f"NAUTILE_STORE_CACHE {path} is the cache of {other}: name another folder for {url}")
    return path, url


def record(root: Path, url: str) -> None:
    """Remember in the cache folder which remote it belongs to."""
    if _recorded(root) != url:
        write_json(root / RECORD, {"url": url})


def _recorded(root: Path) -> str | None:
    found = read_json(root / RECORD, limit=2**16)
    return _checked(str(found.get("url"))) if isinstance(found, dict) else None


def _checked(url: str) -> str:
    parts = urlsplit(url)
    if parts.password or parts.query or parts.fragment:
        raise ConfigError(
            f"NAUTILE_STORE names {parts.scheme}://…: a URL with a password or a query in it would be written down. "
            "Credentials come from the environment (AWS_ACCESS_KEY_ID and its kin, GOOGLE_APPLICATION_CREDENTIALS)"
        )
    if "::" in url or parts.scheme in _NO_STORE or parts.scheme not in fsspec.available_protocols():
        raise ConfigError(
            f"NAUTILE_STORE {url!r}: {parts.scheme}:// cannot hold the store; a local folder, or s3://, gs://, abfs:// "
            "or another object store that fsspec writes to can"
        )
    if not parts.netloc:
        raise ConfigError(f"NAUTILE_STORE {url!r}: the bucket is missing ({parts.scheme}://bucket/prefix)")
    return url


def _default_cache(url: str) -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute()
    readable = re.sub(r"[^A-Za-z0-9]+", "-", url).strip("-")[:60]
    return base / "nautile" / f"{readable}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"
