"""Find the copies in a corpus of any size from the documents' signatures alone, on disk and in constant memory.

The folder of a tokenised file holds, one value per document in the file's order:

    hashes.u8      uint64, little-endian: `data.screening.text_hash.text_hash`
    band-NN.u8     uint64, optional: a column of `data.screening.minhash.minhash_bands`
    verdicts.u1    uint8, written here: 0 kept, else the reason why not (`REASONS`)

Documents with equal hashes are exact copies. Documents with an equal value in at least one band are near copies, and so
are all that such pairs connect: a cluster. The first document of a cluster, in the order of the files, is kept; of a
cluster that shares anything with `against` (signatures of other sources, the same files) none is.

Each column of values (the hashes, then one band after the other) is one pass: it is cut into files by ranges of the
value, each small enough to be sorted in memory. A frequent value cannot swell a range, because equal values within
`BLOCK` documents are resolved before they are written. Sizes for 1.3 billion documents (FineWeb-Edu): hashes 10.4 GB
and bands 146 GB in the folders; while it runs 15.6 GB of ranges, 5.2 GB of parents and 1.3 GB of verdicts; in memory
some 200 MB, besides mapped pages that the system may take back.
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

from common.errors import ConfigError
from common.events import Emit
from common.files import file_size, write_atomically
from configs.base import fingerprint

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
ELSEWHERE = 0  # the number of every document of `against`; our own are numbered from 1

_TakePairs = Callable[[np.ndarray, np.ndarray], None]  # given (earlier, later): numbers of documents of equal value


@dataclass(frozen=True)
class CopyReport:
    """Documents examined, and how many were dropped by reason (`REASONS`)."""

    documents: int
    dropped: dict[str, int]

    @property
    def kept(self) -> int:
        return self.documents - sum(self.dropped.values())


def band_file(band: int) -> str:
    """The name of the file that holds one band's values."""
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
    """Write `verdicts.u1` into each of `folders`. `work`: a folder of this call's own, where a killed call is resumed.

    The same signatures give the same verdicts. Raises `ConfigError` for signature files that do not fit together.
    """
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
    marker, name = work / "units", fingerprint({"units": files}).encode()
    if not marker.is_file() or marker.read_bytes() != name:  # the folder holds the work on other signatures
        shutil.rmtree(work)
        work.mkdir(parents=True)
        write_atomically(marker, name)
    return _CopySearch(ours, others, work, emit, bands).run()


def read_verdicts(folder: Path) -> np.ndarray:
    """[documents] uint8 after `find_copies`: 0 for a document that is kept, else a key of `REASONS`."""
    verdicts = np.fromfile(folder / VERDICTS, np.uint8)
    if len(verdicts) * 8 != file_size(folder / HASHES):
        raise ConfigError(f"signatures: {folder / VERDICTS} and {HASHES} differ in documents; {_REBUILD}")
    return verdicts


def publish_signatures(folders: Sequence[Path], out: Path) -> int:
    """Write the signatures that later sources are compared with (`against`): each exact copy once, in order.

    Returns how many documents they are of.
    """
    files = [_open_signatures(folder) for folder in folders]
    bands = min((signatures.bands for signatures in files if signatures.documents), default=0)
    names = {None: HASHES, **{band: band_file(band) for band in range(bands)}}
    out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        opened = {band: stack.enter_context((out / f".{name}.tmp").open("wb")) for band, name in names.items()}
        for signatures in files:
            once = ~np.isin(read_verdicts(signatures.folder), (EXACT, EXACT_ELSEWHERE))
            for begin, end in _blocks(signatures.documents):
                for band, file in opened.items():
                    file.write(signatures.column(band, begin, end)[once[begin:end]].tobytes())
    for name in names.values():
        (out / f".{name}.tmp").replace(out / name)
    return (out / HASHES).stat().st_size // 8


@dataclass
class _CopySearch:
    """One search, a pass per column. Its folder `work` holds, so that a killed search resumes at the pass it was in:

    verdicts       uint8 per document: exact copies
    parents        union-find over near copies: the number of an earlier document of the same cluster, or its own
    pass-NN        an empty file for each pass that is done
    ranges/        the values of the running pass, by range
    settled.json   the report; the search is over
    """

    ours: list[_Signatures]
    others: list[_Signatures]
    work: Path
    emit: Emit
    bands: int

    def run(self) -> CopyReport:
        complete = all(file_size(s.folder / VERDICTS) == s.documents for s in self.ours)
        if complete and (self.work / "settled.json").is_file():
            return CopyReport(**json.loads((self.work / "settled.json").read_bytes()))
        verdicts = self._mapped("verdicts", np.dtype(np.uint8), np.zeros)
        parents = self._mapped("parents", self._number_type, np.arange) if self.bands else None

        def mark_copies(earlier: np.ndarray, later: np.ndarray) -> None:
            order = np.argsort(later)  # neighbours in the mapped file together
            verdicts[later[order]] = np.where(earlier[order] == ELSEWHERE, EXACT_ELSEWHERE, EXACT)

        for done, band in enumerate([None, *range(self.bands)]):
            self.emit("progress", done=done, total=1 + self.bands, unit="passes", note="finding duplicates")
            marker = self.work / f"pass-{done:02d}"
            if marker.exists():  # a pass that was cut off runs again: it finds the same pairs and changes nothing
                continue
            if band is None:
                self._pass(band, mark_copies)
                verdicts.flush()
            else:
                self._pass(band, lambda earlier, later: _join(parents, earlier, later))
                parents.flush()
            write_atomically(marker, b"")
        dropped = self._write_verdicts(verdicts, parents)
        report = CopyReport(sum(s.documents for s in self.ours), dropped)
        write_atomically(self.work / "settled.json", json.dumps(asdict(report)).encode())
        for leftover in (*self.work.glob("pass-*"), self.work / "verdicts", self.work / "parents"):
            leftover.unlink(missing_ok=True)
        return report

    @property
    def _number_type(self) -> np.dtype:
        return np.dtype("<u4" if sum(s.documents for s in self.ours) < 2**32 - 1 else "<u8")

    def _mapped(self, name: str, dtype: np.dtype, initial: Callable) -> np.memmap:
        """A mapped file of one value per document and one for `ELSEWHERE`; created with `initial` values if missing."""
        path, count = self.work / name, 1 + sum(s.documents for s in self.ours)
        if not path.is_file():
            with (self.work / f".{name}.tmp").open("wb") as file:
                for begin, end in _blocks(count):
                    values = initial(end - begin, dtype=dtype)
                    file.write((values + dtype.type(begin) if initial is np.arange else values).tobytes())
            (self.work / f".{name}.tmp").replace(path)
        return np.memmap(path, dtype, "r+")

    def _pass(self, band: int | None, take_pairs: _TakePairs) -> None:
        """Call `take_pairs` with all pairs of documents of equal value in a column, of which at least one is ours."""
        total = sum(s.documents for s in (*self.ours, *self.others))
        bits = max(0, min(MOST_RANGES, -(-total // RANGE)) - 1).bit_length()  # the highest of a value: its range
        folder = self.work / "ranges"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        # Distribute the values: each block is sorted, so a range is a slice of it. Copies within a block are resolved
        # here, and only the first of them is written.
        with ExitStack() as stack:
            files = [stack.enter_context((folder / f"{n:03d}").open("wb")) for n in range(1 << bits)]
            for values, numbers in self._column_blocks(band):
                values, numbers = _distinct(values, numbers, take_pairs)
                edges = np.searchsorted(values, np.arange(1, 1 << bits, dtype=np.uint64) << np.uint64(64 - bits))
                for file, (begin, end) in zip(files, pairwise([0, *edges.tolist(), len(values)]), strict=True):
                    entries = np.empty(end - begin, self._entry_type)
                    entries["value"], entries["number"] = values[begin:end], numbers[begin:end]
                    file.write(entries.tobytes())
        # Equal values of different blocks are now in the same file, in the order of their documents.
        for path in sorted(folder.iterdir()):
            entries = np.fromfile(path, self._entry_type)
            _distinct(entries["value"].copy(), entries["number"].copy(), take_pairs)
        shutil.rmtree(folder)

    @property
    def _entry_type(self) -> np.dtype:
        return np.dtype([("value", "<u8"), ("number", self._number_type)])

    def _column_blocks(self, band: int | None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(values, numbers) of a column block by block: the other sources first, then ours in their order."""
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
        """Write each folder's verdicts; an exact copy keeps that reason where it is a near copy too."""
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


def _distinct(values: np.ndarray, numbers: np.ndarray, take_pairs: _TakePairs) -> tuple[np.ndarray, np.ndarray]:
    """The first of each value with its number, by value; every later one goes to `take_pairs` with its predecessor."""
    order = np.argsort(values, kind="stable")  # stable: equal values stay in the order of their documents
    values, numbers = values[order], numbers[order]
    repeated = np.zeros(len(values), bool)
    repeated[1:] = values[1:] == values[:-1]
    later = np.flatnonzero(repeated & (numbers != ELSEWHERE))
    if len(later):
        take_pairs(numbers[later - 1], numbers[later])
    return values[~repeated], numbers[~repeated]


def _join(parents: np.ndarray, left: np.ndarray, right: np.ndarray) -> None:
    """Merge the clusters of each pair. A parent is the smaller number, so a root is the first of its cluster."""
    while len(left):
        left, right = _roots(parents, left), _roots(parents, right)
        apart = left != right
        left, right = left[apart], right[apart]
        # Of several pairs with one root only the last is written; the others are still apart in the next round.
        parents[np.maximum(left, right)] = np.minimum(left, right)


def _roots(parents: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The root of each number; its parent becomes that root, which shortens later searches."""
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
    """Size up the signature files in `folder`. Raises `ConfigError` if they are missing or do not fit together."""
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
