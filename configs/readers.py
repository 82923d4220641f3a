"""Readers of text, by the `reader` of a source in `[[ingest.sources]]`: what reads it, and what its section needs.

A plug-in's module imports this file, so nothing may read the entries of `READERS` while modules are imported; the names
alone are known then. Code of this project is named by dotted references, because this package may not import it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nautile.configs.plugins import Registry


@dataclass(frozen=True)
class Reader:
    """One way to read text. A plug-in's reader needs `rows` alone.

    - `rows`: name of a file -> its rows, each a mapping from column to value, in the same order each time. A row of
      another form, or without a text, is counted as rejected, and so is a `data.records.Rejected` with its reason.
    - `files`: `path` of the section -> the names that `rows` is called with, each by a work item of its own. None:
      `path` is a name or a glob of local files, whose contents are in the key.
    - `version`: increases when the same files give other rows; it is in the key of a step that uses a plug-in's reader.
    """

    rows: Callable[[str], Iterable[Any]] | None = None
    files: Callable[[str], Sequence[str]] | None = None
    version: int | None = None
    corpus: str = "nautile.data.sources.corpus_source:Rows"  # a subclass of `Corpus` there
    form: Literal["web", "synth"] | None = None  # the only form that it gives
    needs_path: bool = True
    on_hub: bool = False  # `path` is a dataset of the Hub, at the commit `revision`
    generates: bool = False  # it has `tasks`, and draws its records by a seed
    takes_columns: bool = True  # whether a source may name its columns

    def __post_init__(self) -> None:
        if self.rows is None and self.corpus == Reader.corpus:
            raise ValueError("a reader needs `rows`, a function from the name of a file to its rows")

    @property
    def is_local(self) -> bool:
        """Whether `path` names files of this machine."""
        return self.needs_path and not self.on_hub and self.files is None


_FILES = "nautile.data.sources.corpus_source:LocalFiles"

READERS: Registry[Reader] = Registry(
    "readers",
    Reader,
    {
        "hub": Reader(corpus="nautile.data.sources.corpus_source:HubFiles", on_hub=True),
        # Files are read by their names' endings, whichever of the two a source names.
        "parquet": Reader(corpus=_FILES),
        "jsonl": Reader(corpus=_FILES),
        # Offline, from packages.
        "wikipedia": Reader(
            corpus="nautile.data.sources.corpus_source:Wikipedia",
            form="web", needs_path=False, takes_columns=False,
        ),
        "reasoning": Reader(
            corpus="nautile.data.sources.corpus_source:Reasoning",
            form="synth", needs_path=False, generates=True, takes_columns=False,
        ),
    },
)  # fmt: skip


def known_reader(name: str) -> str:
    """The name of a reader. Raises `ValueError` for any other."""
    if name not in READERS:
        raise ValueError(f"no reader {name!r}; the readers are {', '.join(READERS)}")
    return name


def reader_versions(name: str) -> dict[str, int | str]:
    """What the key of an ingest step holds of its reader: nothing of the first version of one of the project's own."""
    version = READERS.version(name)
    return {} if name in READERS.shipped and version == 1 else {name: version}


def is_on_hub(name: object) -> bool:
    """Whether a reader, perhaps one that is not installed here, is of datasets of the Hub."""
    return isinstance(name, str) and name in READERS.shipped and READERS[name].on_hub
