"""Which documents of a corpus of any size are copies: settled from their signatures alone, on disk, in flat memory.

A unit folder holds, a row a document in the unit's order:

    hashes.u8      [documents] uint64, little-endian: `data.screening.text_hash.content_hash`
    bands.u8       [documents, bands] uint64, optional: `data.screening.minhash.Bands`
    verdicts.u1    [documents] uint8, written here: 0 kept, else why not (`REASONS`)

Equal hashes are exact copies; documents with an equal value in one band at least are near copies, and so is, one from
the other, what such pairs join. The first in the order of the units is kept; of those that share anything with
`against` (signatures of other sources, the same two files) none is.

Each column of values (the hashes, then a band at a time) is one pass: cut into files by ranges of the value, each
small enough to be sorted in memory. A heavy value cannot swell a range, for equal ones within a piece of `PIECE`
documents are settled before they are written. Sizes for 1.3 billion documents (FineWeb-Edu): hashes 10.4 GB and bands
146 GB in the units; for the time of settling 15.6 GB of ranges, 5.2 GB of parents and 1.3 GB of verdicts; in memory
some 200 MB, beside mapped pages that the system may take back. Bands are off where nothing writes them.
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
from common.files import write_atomically
from configs.base import fingerprint
from data.tokens.shards import file_size

HASHES, BANDS, VERDICTS = "hashes.u8", "bands.u8", "verdicts.u1"
KEPT, EXACT, NEAR, EXACT_ELSEWHERE, NEAR_ELSEWHERE = range(5)
REASONS = {
    EXACT: "duplicate",
    NEAR: "near_duplicate",
    EXACT_ELSEWHERE: "duplicate_elsewhere",
    NEAR_ELSEWHERE: "near_duplicate_elsewhere",
}
PIECE = 1 << 20  # documents read at once
RANGE = 1 << 21  # values sorted at once
MOST_RANGES = 512  # files open at once
ELSEWHERE = 0  # the number of every document of `against`; our own count from 1

_Pairs = Callable[[np.ndarray, np.ndarray], None]  # takes (before, later): numbers of documents of equal value


@dataclass(frozen=True)
class CopyReport:
    """What `find_copies` found: documents in all, and how many were dropped by reason (`REASONS`)."""

    documents: int
    dropped: dict[str, int]

    @property
    def kept(self) -> int:
        return self.documents - sum(self.dropped.values())


@dataclass(frozen=True)
class _Unit:
    folder: Path
    documents: int
    bands: int  # 0 where there are none

    def column(self, band: int | None, begin: int, end: int) -> np.ndarray:
        """The hashes (band None) or one band's values of documents `begin` to `end`."""
        if band is None:
            return np.fromfile(self.folder / HASHES, "<u8", end - begin, offset=begin * 8)
        rows = np.memmap(self.folder / BANDS, "<u8", "r", 0, (self.documents, self.bands))
        return np.array(rows[begin:end, band])


def find_copies(folders: Sequence[Path], against: Sequence[Path], work: Path, emit: Emit) -> CopyReport:
    """Write `verdicts.u1` into each of `folders`. `work` is this call's own: it is taken up where a killed one stopped.

    The same signatures give the same verdicts. Raises `ConfigError` for signature files that do not fit together.
    """
    ours, others = [_unit(folder) for folder in folders], [_unit(folder) for folder in against]
    widths = {unit.bands for unit in ours if unit.documents}
    if len(widths) > 1:
        raise ConfigError(f"signatures: {folders[0]} and its like differ in bands ({sorted(widths)}); make them again")
    bands = widths.pop() if widths else 0
    others_bands = {unit.bands for unit in others if unit.documents and unit.bands}
    if bands and others_bands - {bands}:
        raise ConfigError(f"signatures: {against[0]} and its like have {sorted(others_bands)} bands, not {bands}")
    work.mkdir(parents=True, exist_ok=True)
    _same_work(work, [[str(u.folder), u.documents, u.bands] for u in (*ours, *others)])
    settling = _Settling(ours, others, work, emit, bands)
    return settling.run()


def verdicts(folder: Path) -> np.ndarray:
    """[documents] uint8 of a settled unit: 0 for a document that is kept, else a key of `REASONS`."""
    found = np.fromfile(folder / VERDICTS, np.uint8)
    if len(found) * 8 != file_size(folder / HASHES):
        raise ConfigError(
            f"signatures: {folder / VERDICTS} and {HASHES} are not of the same documents; make them again"
        )
    return found


def publish_signatures(folders: Sequence[Path], out: Path) -> int:
    """Signatures of settled units for `against` of later sources: exact copies once, in order. Returns how many."""
    units = [_unit(folder) for folder in folders]
    with_bands = all(unit.bands for unit in units if unit.documents)
    out.mkdir(parents=True, exist_ok=True)
    for name, width in ((HASHES, 1), (BANDS, None)):
        if width is None and not with_bands:
            continue
        with (out / f".{name}.tmp").open("wb") as file:
            for unit in units:
                once = ~np.isin(verdicts(unit.folder), (EXACT, EXACT_ELSEWHERE))
                shape = (unit.documents, width or unit.bands)
                for begin, end in _pieces(unit.documents):
                    rows = np.memmap(unit.folder / name, "<u8", "r", 0, shape)[begin:end]
                    file.write(rows[once[begin:end]].tobytes())
        (out / f".{name}.tmp").replace(out / name)
    return (out / HASHES).stat().st_size // 8


@dataclass
class _Settling:
    ours: list[_Unit]
    others: list[_Unit]
    work: Path
    emit: Emit
    bands: int

    def run(self) -> CopyReport:
        whole = all(file_size(unit.folder / VERDICTS) == unit.documents for unit in self.ours)
        if whole and (self.work / "settled.json").is_file():
            return CopyReport(**json.loads((self.work / "settled.json").read_bytes()))
        verdicts = self._mapped("verdicts", np.dtype(np.uint8), np.zeros)
        parents = self._mapped("parents", self._number, np.arange) if self.bands else None
        for done, band in enumerate([None, *range(self.bands)]):
            self.emit("progress", done=done, total=1 + self.bands, unit="passes", note="settling duplicates")
            mark = self.work / f"pass-{done:02d}"
            if mark.exists():  # a pass that was cut off is done again: it finds the same pairs and changes nothing
                continue
            if band is None:
                self._pass(band, lambda first, later: _mark_copies(verdicts, first, later))
                verdicts.flush()
            else:
                self._pass(band, lambda first, later: _join(parents, first, later))
                parents.flush()
            write_atomically(mark, b"")
        dropped = self._publish(verdicts, parents)
        settled = CopyReport(sum(unit.documents for unit in self.ours), dropped)
        write_atomically(self.work / "settled.json", json.dumps(asdict(settled)).encode())
        for leftover in (*self.work.glob("pass-*"), self.work / "verdicts", self.work / "parents"):
            leftover.unlink(missing_ok=True)
        return settled

    @property
    def _number(self) -> np.dtype:
        return np.dtype("<u4" if sum(unit.documents for unit in self.ours) < 2**32 - 1 else "<u8")

    def _mapped(self, name: str, dtype: np.dtype, initial: Callable) -> np.memmap:
        """A file of one value a document and one for `ELSEWHERE`, mapped; filled when it is not there yet."""
        path, count = self.work / name, 1 + sum(unit.documents for unit in self.ours)
        if not path.is_file():
            with (self.work / f".{name}.tmp").open("wb") as file:
                for begin, end in _pieces(count):
                    made = initial(end - begin, dtype=dtype)
                    file.write((made + dtype.type(begin) if initial is np.arange else made).tobytes())
            (self.work / f".{name}.tmp").replace(path)
        return np.memmap(path, dtype, "r+")

    def _pass(self, band: int | None, pairs: _Pairs) -> None:
        """Tell `pairs` of every two documents, of which one at least is ours, with an equal value in a column."""
        total = sum(unit.documents for unit in (*self.ours, *self.others))
        bits = max(0, min(MOST_RANGES, -(-total // RANGE)) - 1).bit_length()
        folder = self.work / "ranges"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        with ExitStack() as stack:
            files = [stack.enter_context((folder / f"{n:03d}").open("wb")) for n in range(1 << bits)]
            for values, numbers in self._columns(band):
                values, numbers = _firsts(values, numbers, pairs)
                edges = np.searchsorted(values, np.arange(1, 1 << bits, dtype=np.uint64) << np.uint64(64 - bits))
                for file, (begin, end) in zip(files, pairwise([0, *edges.tolist(), len(values)]), strict=True):
                    entries = np.empty(end - begin, self._entry)
                    entries["value"], entries["number"] = values[begin:end], numbers[begin:end]
                    file.write(entries.tobytes())
        for path in sorted(folder.iterdir()):
            entries = np.fromfile(path, self._entry)
            _firsts(entries["value"].copy(), entries["number"].copy(), pairs)
        shutil.rmtree(folder)

    @property
    def _entry(self) -> np.dtype:
        return np.dtype([("value", "<u8"), ("number", self._number)])

    def _columns(self, band: int | None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(values, numbers) of a column piece by piece: the other sources first, then ours in their order."""
        for unit in self.others:
            if band is None or unit.bands:
                for begin, end in _pieces(unit.documents):
                    yield unit.column(band, begin, end), np.full(end - begin, ELSEWHERE, self._number)
        before = 1
        for unit in self.ours:
            for begin, end in _pieces(unit.documents):
                numbers = np.arange(before + begin, before + end, dtype=self._number)
                yield unit.column(band, begin, end), numbers
            before += unit.documents

    def _publish(self, verdicts: np.ndarray, parents: np.ndarray | None) -> dict[str, int]:
        counts: Counter[int] = Counter()
        before = 1
        for unit in self.ours:
            found = np.array(verdicts[before : before + unit.documents])
            if parents is not None:
                numbers = np.arange(before, before + unit.documents, dtype=self._number)
                roots = _roots(parents, numbers)
                near = np.where(roots == ELSEWHERE, NEAR_ELSEWHERE, np.where(roots == numbers, KEPT, NEAR))
                found = np.where(found == KEPT, near, found).astype(np.uint8)
            write_atomically(unit.folder / VERDICTS, found.tobytes())
            counts.update(dict(enumerate(np.bincount(found, minlength=5).tolist())))
            before += unit.documents
        return {reason: counts[code] for code, reason in REASONS.items() if counts[code]}


def _firsts(values: np.ndarray, numbers: np.ndarray, pairs: _Pairs) -> tuple[np.ndarray, np.ndarray]:
    """The first of each value with its number, by value; `pairs` is told of every later one with the one before it."""
    order = np.argsort(values, kind="stable")  # stable: equal values stay in the order of their documents
    values, numbers = values[order], numbers[order]
    again = np.zeros(len(values), bool)
    again[1:] = values[1:] == values[:-1]
    later = np.flatnonzero(again & (numbers != ELSEWHERE))
    if len(later):
        pairs(numbers[later - 1], numbers[later])
    return values[~again], numbers[~again]


def _mark_copies(verdicts: np.ndarray, first: np.ndarray, later: np.ndarray) -> None:
    order = np.argsort(later)  # neighbours in the file together
    first, later = first[order], later[order]
    verdicts[later] = np.where(first == ELSEWHERE, EXACT_ELSEWHERE, EXACT)


def _join(parents: np.ndarray, one: np.ndarray, other: np.ndarray) -> None:
    """Put the clusters of each pair together. A parent is the smaller number, so a root is the first of its cluster."""
    while len(one):
        one, other = _roots(parents, one), _roots(parents, other)
        apart = one != other
        one, other = one[apart], other[apart]
        # Of several partners of one root the last written wins; the others are still apart in the next round.
        parents[np.maximum(one, other)] = np.minimum(one, other)


def _roots(parents: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The root of each number; the ways there are shortened."""
    roots = parents[numbers]
    while True:
        above = parents[roots]
        if (above == roots).all():
            break
        roots = above
    parents[numbers] = roots
    return np.asarray(roots)


def _pieces(count: int) -> Iterator[tuple[int, int]]:
    return ((begin, min(begin + PIECE, count)) for begin in range(0, count, PIECE))


def _unit(folder: Path) -> _Unit:
    """What a unit folder holds. Raises `ConfigError` where its files are missing or do not fit together."""
    hashes, bands = file_size(folder / HASHES), file_size(folder / BANDS)
    if hashes is None or hashes % 8:
        found = "is missing" if hashes is None else f"has {hashes} bytes"
        raise ConfigError(f"signatures: {folder / HASHES} {found}; make them again")
    documents = hashes // 8
    if bands and (not documents or bands % hashes):
        raise ConfigError(f"signatures: {folder / BANDS} has {bands} bytes for {documents} documents; make them again")
    return _Unit(folder, documents, bands // hashes if bands else 0)


def _same_work(work: Path, units: list[list[object]]) -> None:
    """Empty `work` if it was begun for other signatures than these."""
    mark, name = work / "units", fingerprint({"units": units}).encode()
    if not mark.is_file() or mark.read_bytes() != name:
        shutil.rmtree(work)
        work.mkdir(parents=True)
        write_atomically(mark, name)
