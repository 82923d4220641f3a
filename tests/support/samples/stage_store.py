"""Small artifacts for tests of the store."""

import hashlib
from pathlib import Path
from typing import Any

from nautile.store.artifacts import Artifact, Store
from nautile.store.manifest import with_seal


def key_of(word: str) -> str:
    """Some key, the same for the same word."""
    return hashlib.sha256(word.encode()).hexdigest()


def filled(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def published(store: Store, kind: str, word: str, files: dict[str, str] | None = None, **fields: Any) -> Artifact:
    """Publish `files` under the key of `word`, as a stage would."""
    key = key_of(word)
    given = {"stage": "toy", "version": 1, "config": {"word": word}, "inputs": {}, "facts": {"rows": 3}} | fields
    source = filled(store.staging(key) / "output" / kind, files or {"a.txt": word, "deep/b.txt": "b"})
    return store.publish(kind, key, source, **given)


def flip_byte(path: Path, position: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(bytes(data))


def damage(store: Store) -> dict[str, list[str]]:
    """id -> damaged files of every artifact whose manifest can be read, superseded ones too. Whole ones map to []."""
    return {artifact.id: store.verify(artifact) for artifact in store.list(superseded=True)}


def manifest_of(**fields: Any) -> dict[str, Any]:
    """A sealed manifest of no artifact in particular, with `fields` in place of its own."""
    plain = {
        "format": 1,
        "kind": "tokens",
        "key": key_of("x"),
        "stage": "toy",
        "version": 1,
        "config": {},
        "inputs": {},
    }
    plain |= {"input_executions": {}, "outputs": ["tokens"], "files": {}, "digest": key_of("y"), "facts": {"rows": 3}}
    plain |= {"commit": None, "created": "2026-01-02T03:04:05+00:00", "execution": "e1", "run": "", "label": "toy"}
    return with_seal(plain | {"host": "here", "fence": 0} | fields)
