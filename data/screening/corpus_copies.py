"""Find exact and near copies in a corpus from the documents' signatures, on disk and in constant memory.

The folder of a tokenised file holds, one value per document in the file's order:

    hashes.u8      uint64, little-endian: `data.screening.duplicates.text_hash`
    band-NN.u8     uint64, optional: a column of `data.screening.duplicates.minhash_bands`
    verdicts.u1    uint8, written here: 0 for a document that is kept, else the reason why it is dropped (`REASONS`)

Documents with equal hashes are exact copies. Documents with an equal value in at least one band are near copies; the
connected components of near copies are clusters. Of a cluster, the first document in the order of the files is kept, or
none if any of its values occurs in `against` (signature files of other sources, in the same format).

The algorithm makes one pass per column (the hashes, then each band): an external sort that distributes the values over
files by range, each small enough to be sorted in memory. A frequent value cannot make a range too large, because equal
values within `BLOCK` documents are merged before they are written. Sizes for 1.3 billion documents (FineWeb-Edu):
hashes 10.4 GB and bands 146 GB in the folders; temporary files 15.6 GB of ranges, 5.2 GB of parents and 1.3 GB of
verdicts; memory some 200 MB, not counting the page cache.
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from nautile.common.errors import ConfigError
from nautile.common.events import Emit
from nautile.common.files import file_size, write_atomically
from nautile.configs.base import fingerprint

HASHES, VERDICTS = "hashes.u8", "verdicts.u1"
KEPT, EXACT, NEAR, EXACT_ELSEWHERE, NEAR_ELSEWHERE = range(5)
REASONS = {
    EXACT: "duplicate",
    NEAR: "near_duplicate",
    EXACT_ELSEWHERE: "duplicate_elsewhere",
    NEAR_ELSEWHERE: "near_duplicate_elsewhere",
}
BLOCK = 1 << 20  # documents read at once
RANGE = 1 << 21  # values sorted at once
MOST_RANGES = 512  # files open at once
ELSEWHERE = 0  # document number of every document of `against`; our own are numbered from 1

_OnPairs = Callable[[np.ndarray, np.ndarray], None]  # called with (earlier, later): numbers of documents of equal value


@dataclass(frozen=True)
class CopyReport:
    """Documents examined, and how many were dropped by reason (`REASONS`)."""

    documents: int
    dropped: dict[str, int]

    @property
    def kept(self) -> int:
        return self.documents - sum(self.dropped.values())


def band_file(band: int) -> str:
    return f"band-{band:02d}.u8"


@dataclass(frozen=True)
class _Signatures:
    folder: Path
    documents: int
    bands: int  # 0 without bands

    def column(self, band: int | None, begin: int, end: int) -> np.ndarray:
        """The hashes (band None) or one band's values of documents `begin` to `end`."""
        path = self.folder / (HASHES if band is None else band_file(band))
        return np.fromfile(path, "<u8", end - begin, offset=begin * 8)


def find_copies(folders: Sequence[Path], against: Sequence[Path], work: Path, emit: Emit) -> CopyReport:
    """Write `verdicts.u1` into each of `folders`. A killed call resumes from the folder `work`, which is its own.

    The same signatures give the same verdicts. Raises `ConfigError` for signature files that do not match each other.
    """
    # All files must have the same number of bands, as far as they have documents and bands at all.
    ours, others = [_open_signatures(folder) for folder in folders], [_open_signatures(folder) for folder in against]
    widths = {signatures.bands for signatures in ours if signatures.documents}
    if len(widths) > 1:
        raise ConfigError(f"signatures: the files beside {folders[0]} differ in bands ({sorted(widths)}); {_REBUILD}")
    bands = widths.pop() if widths else 0
    others_bands = {signatures.bands for signatures in others if signatures.documents and signatures.bands}
    if bands and others_bands - {bands}:
        raise ConfigError(
            f"signatures: {against[0]} and the other sources have {sorted(others_bands)} bands, not {bands}"
        )
    work.mkdir(parents=True, exist_ok=True)
    files = [[str(s.folder), s.documents, s.bands] for s in (*ours, *others)]
    marker, name = work / "files", fingerprint({"files": files}).encode()
    if not marker.is_file() or marker.read_bytes() != name:  # the folder is empty, or of other signatures
        shutil.rmtree(work)
        work.mkdir(parents=True)
        write_atomically(marker, name)
    return _CopySearch(ours, others, work, emit, bands).run()


def read_verdicts(folder: Path) -> np.ndarray:
    """Read what `find_copies` wrote: uint8 [documents], 0 for a document that is kept, else a key of `REASONS`."""
    verdicts = np.fromfile(folder / VERDICTS, np.uint8)
    if len(verdicts) * 8 != file_size(folder / HASHES):
        raise ConfigError(f"signatures: {folder / VERDICTS} and {HASHES} differ in documents; {_REBUILD}")
    return verdicts


def publish_signatures(folders: Sequence[Path], out: Path) -> int:
    """Write the signatures that later sources are compared with, without exact copies; returns their documents."""
    files = [_open_signatures(folder) for folder in folders]
    bands = min((signatures.bands for signatures in files if signatures.documents), default=0)
    names: dict[int | None, str] = {None: HASHES, **{band: band_file(band) for band in range(bands)}}
    out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        out_files = {band: stack.enter_context((out / f".{name}.tmp").open("wb")) for band, name in names.items()}
        for signatures in files:
            is_first = ~np.isin(read_verdicts(signatures.folder), (EXACT, EXACT_ELSEWHERE))
            for begin, end in _blocks(signatures.documents):
                for band, file in out_files.items():
                    file.write(signatures.column(band, begin, end)[is_first[begin:end]].tobytes())
    for name in names.values():
        (out / f".{name}.tmp").replace(out / name)
    return (out / HASHES).stat().st_size // 8


@dataclass
class _CopySearch:
    """A search for copies, one pass per column. A killed search resumes at its current pass from the folder `work`:

    verdicts       uint8 per document: exact copies
    parents        union-find over near copies: the number of an earlier document of the same cluster, or its own
    pass-NN        an empty marker file for each finished pass
    ranges/        the values of the current pass, by range
    finished.json  the report of a finished search
    """

    ours: list[_Signatures]
    others: list[_Signatures]
    work: Path
    emit: Emit
    bands: int

    def run(self) -> CopyReport:
        complete = all(file_size(s.folder / VERDICTS) == s.documents for s in self.ours)
        if complete and (self.work / "finished.json").is_file():
            return CopyReport(**json.loads((self.work / "finished.json").read_bytes()))
        # Document n of ours is at index n of both files; index 0 is `ELSEWHERE`.
        verdicts = self._mapped("verdicts", np.dtype(np.uint8), np.zeros)
        parents = self._mapped("parents", self._number_type, np.arange) if self.bands else None

        def mark_copies(earlier: np.ndarray, later: np.ndarray) -> None:
            order = np.argsort(later)  # sequential access to the mapped file
            verdicts[later[order]] = np.where(earlier[order] == ELSEWHERE, EXACT_ELSEWHERE, EXACT)

        for number, band in enumerate([None, *range(self.bands)]):
            self.emit("progress", done=number, total=1 + self.bands, unit="passes", note="finding duplicates")
            marker = self.work / f"pass-{number:02d}"
            if marker.exists():  # an unfinished pass runs again from its start, which is idempotent
                continue
            if band is None:
                self._pass(band, mark_copies)
                verdicts.flush()
            else:
                assert parents is not None  # there is a band
                self._pass(band, lambda earlier, later: _join(parents, earlier, later))
                parents.flush()
            write_atomically(marker, b"")
        self.emit("progress", done=1 + self.bands, total=1 + self.bands, unit="passes", note="finding duplicates")
        dropped = self._write_verdicts(verdicts, parents)
        report = CopyReport(sum(s.documents for s in self.ours), dropped)
        write_atomically(self.work / "finished.json", json.dumps(asdict(report)).encode())
        for leftover in (*self.work.glob("pass-*"), self.work / "verdicts", self.work / "parents"):
            leftover.unlink(missing_ok=True)
        return report

    @property
    def _number_type(self) -> np.dtype:
        return np.dtype("<u4" if sum(s.documents for s in self.ours) < 2**32 - 1 else "<u8")

    def _mapped(self, name: str, dtype: np.dtype, initial: Callable) -> np.memmap:
        """A memory-mapped file with one value for `ELSEWHERE` and one per document; created by `initial` if missing."""
        path, count = self.work / name, 1 + sum(s.documents for s in self.ours)
        if not path.is_file():
            with (self.work / f".{name}.tmp").open("wb") as file:
                for begin, end in _blocks(count):
                    values = initial(end - begin, dtype=dtype)
                    file.write((values + dtype.type(begin) if initial is np.arange else values).tobytes())
            (self.work / f".{name}.tmp").replace(path)
        return np.memmap(path, dtype, "r+")

    def _pass(self, band: int | None, on_pairs: _OnPairs) -> None:
        """Call `on_pairs` with all pairs of documents of equal value in a column, of which at least one is ours."""
        total = sum(s.documents for s in (*self.ours, *self.others))
        bits = max(0, min(MOST_RANGES, -(-total // RANGE)) - 1).bit_length()  # a value's highest bits are its range
        folder = self.work / "ranges"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        # 1. Distribute the values: each block is sorted, so a range is a slice of it. Copies within a block are
        # reported here, and only the first of them is written.
        with ExitStack() as stack:
            files = [stack.enter_context((folder / f"{n:03d}").open("wb")) for n in range(1 << bits)]
            for values, numbers in self._column_blocks(band):
                values, numbers = _distinct(values, numbers, on_pairs)
                edges = np.searchsorted(values, np.arange(1, 1 << bits, dtype=np.uint64) << np.uint64(64 - bits))
                for file, (begin, end) in zip(files, pairwise([0, *edges.tolist(), len(values)]), strict=True):
                    entries = np.empty(end - begin, self._entry_type)
                    entries["value"], entries["number"] = values[begin:end], numbers[begin:end]
                    file.write(entries.tobytes())
        # 2. Sort each range: equal values of different blocks are in the same file, in the order of their documents.
        for path in sorted(folder.iterdir()):
            entries = np.fromfile(path, self._entry_type)
            _distinct(entries["value"].copy(), entries["number"].copy(), on_pairs)
        shutil.rmtree(folder)

    @property
    def _entry_type(self) -> np.dtype:
        return np.dtype([("value", "<u8"), ("number", self._number_type)])

    def _column_blocks(self, band: int | None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(values, document numbers) of a column in blocks: the other sources first, then ours in order."""
        for signatures in self.others:
            if band is None or signatures.bands:
                for begin, end in _blocks(signatures.documents):
                    yield signatures.column(band, begin, end), np.full(end - begin, ELSEWHERE, self._number_type)
        first = 1
        for signatures in self.ours:
            for begin, end in _blocks(signatures.documents):
                numbers = np.arange(first + begin, first + end, dtype=self._number_type)
                yield signatures.column(band, begin, end), numbers
            first += signatures.documents

    def _write_verdicts(self, exact: np.ndarray, parents: np.ndarray | None) -> dict[str, int]:
        """Write each folder's verdicts (exact goes before near); returns the dropped documents by reason."""
        counts: Counter[int] = Counter()
        first = 1
        for signatures in self.ours:
            verdicts = np.array(exact[first : first + signatures.documents])
            if parents is not None:
                numbers = np.arange(first, first + signatures.documents, dtype=self._number_type)
                roots = _roots(parents, numbers)
                near = np.where(roots == ELSEWHERE, NEAR_ELSEWHERE, np.where(roots == numbers, KEPT, NEAR))
                verdicts = np.where(verdicts == KEPT, near, verdicts).astype(np.uint8)
            write_atomically(signatures.folder / VERDICTS, verdicts.tobytes())
            counts.update(dict(enumerate(np.bincount(verdicts, minlength=5).tolist())))
            first += signatures.documents
        return {reason: counts[code] for code, reason in REASONS.items() if counts[code]}


def _distinct(values: np.ndarray, numbers: np.ndarray, on_pairs: _OnPairs) -> tuple[np.ndarray, np.ndarray]:
    """The distinct values, sorted, with their first documents; `on_pairs` gets each later one and its predecessor."""
    order = np.argsort(values, kind="stable")  # stable: equal values stay in the order of their documents
    values, numbers = values[order], numbers[order]
    repeated = np.zeros(len(values), bool)
    repeated[1:] = values[1:] == values[:-1]
    # Documents of other sources are all numbered `ELSEWHERE` and come first, so that they are found as `earlier`, never
    # as `later`: nothing is decided about them here.
    later = np.flatnonzero(repeated & (numbers != ELSEWHERE))
    if len(later):
        on_pairs(numbers[later - 1], numbers[later])
    return values[~repeated], numbers[~repeated]


def _join(parents: np.ndarray, left: np.ndarray, right: np.ndarray) -> None:
    """Union-find: merge the clusters of each pair. A parent has the smaller number, a root is a cluster's first."""
    while len(left):
        left, right = _roots(parents, left), _roots(parents, right)
        is_separate = left != right
        left, right = left[is_separate], right[is_separate]
        # If several pairs have the same root, numpy keeps only the last; the next round merges the others.
        parents[np.maximum(left, right)] = np.minimum(left, right)


def _roots(parents: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Union-find: the root of each number. Each number's parent is set to its root (path compression)."""
    roots = parents[numbers]
    while True:
        above = parents[roots]
        if (above == roots).all():
            break
        roots = above
    parents[numbers] = roots
    return np.asarray(roots)


def _blocks(count: int) -> Iterator[tuple[int, int]]:
    return ((begin, min(begin + BLOCK, count)) for begin in range(0, count, BLOCK))


def _open_signatures(folder: Path) -> _Signatures:
    """Count the documents and bands of the signature files in `folder`.

    Raises `ConfigError` if they are missing or their sizes differ.
    """
    hashes = file_size(folder / HASHES)
    if hashes is None or hashes % 8:
        problem = "is missing" if hashes is None else f"has {hashes} bytes"
        raise ConfigError(f"signatures: {folder / HASHES} {problem}; {_REBUILD}")
    documents, bands = hashes // 8, 0
    while (size := file_size(path := folder / band_file(bands))) is not None:
        if size != hashes:
            raise ConfigError(f"signatures: {path} has {size} bytes for {documents} documents; {_REBUILD}")
        bands += 1
    return _Signatures(folder, documents, bands)


_REBUILD = "build them again with `nautile run --force --only ingest`"
