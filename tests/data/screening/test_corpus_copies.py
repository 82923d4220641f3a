"""The search for copies on disk, against a naive form that compares every two documents, and across kills."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nautile.common.errors import ConfigError
from nautile.common.events import silent
from nautile.data.screening import corpus_copies
from nautile.data.screening.corpus_copies import (
    EXACT,
    EXACT_ELSEWHERE,
    KEPT,
    NEAR,
    NEAR_ELSEWHERE,
    REASONS,
    find_copies,
    publish_signatures,
    read_verdicts,
)

Document = tuple[int, tuple[int, ...]]  # its hash, its band values

FEW = st.integers(0, 12).map(lambda n: n * 0x1357_9BDF_0246_8ACE % 2**64)  # spread over the ranges, often equal
DOCUMENT = st.tuples(FEW, st.tuples(FEW, FEW))
FILES = st.lists(st.lists(DOCUMENT, max_size=8), max_size=4)


def write(folder: Path, documents: list[Document], *, bands: bool = True) -> Path:
    """Write signatures, with a file for each band or without bands."""
    folder.mkdir(parents=True)
    np.array([digest for digest, _ in documents], "<u8").tofile(folder / "hashes.u8")
    if bands and documents:
        for number, column in enumerate(np.array([values for _, values in documents], "<u8").T):
            column.tofile(folder / f"band-{number:02d}.u8")
    return folder


def write_all(root: Path, files: list[list[Document]], *, bands: bool = True) -> list[Path]:
    return [write(root / str(n), file, bands=bands) for n, file in enumerate(files)]


def naive(files: list[list[Document]], against: list[list[Document]], *, bands: bool) -> list[int]:
    """The verdict of each document in turn: clusters are grown until no two of them share a band value."""
    ours, others = [d for file in files for d in file], [d for file in against for d in file]
    verdicts, seen = [], set()
    for digest, _ in ours:
        copy = EXACT if digest in seen else EXACT_ELSEWHERE if digest in {d[0] for d in others} else KEPT
        verdicts.append(copy)
        seen.add(digest)
    if not bands:
        return verdicts
    cluster = list(range(1, len(ours) + 1)) + [0] * len(others)
    for _ in cluster:
        for a, (_, left) in enumerate(ours):
            for b, (_, right) in enumerate(ours + others):
                if any(x == y for x, y in zip(left, right, strict=True)):
                    cluster[a] = cluster[b] = min(cluster[a], cluster[b])
    near = [
        NEAR_ELSEWHERE if root == 0 else NEAR if root != n else KEPT for n, root in enumerate(cluster[: len(ours)], 1)
    ]
    return [copy or close for copy, close in zip(verdicts, near, strict=True)]


@pytest.mark.slow
@settings(max_examples=60)
@given(
    files=FILES,
    against=FILES,
    bands=st.booleans(),
    block=st.sampled_from([1, 3, 100]),
)
def test_the_verdicts_are_those_of_comparing_every_two(tmp_path_factory, files, against, bands, block):
    root = tmp_path_factory.mktemp("copies")
    folders, others = (
        write_all(root / name, part, bands=bands) for name, part in (("ours", files), ("others", against))
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_copies, "BLOCK", block)
        patch.setattr(corpus_copies, "RANGE", 2)  # several ranges even for so few
        report = find_copies(folders, others, root / "work", silent)
    expected = naive(files, against, bands=bands)
    assert [v for folder in folders for v in read_verdicts(folder).tolist()] == expected
    assert report.documents == len(expected)
    assert report.dropped == {REASONS[c]: expected.count(c) for c in REASONS if c in expected}
    assert report.kept == expected.count(KEPT)


def test_a_kill_between_passes_changes_nothing(tmp_path, monkeypatch):
    """Interrupted in the middle of every pass, then resumed: the verdicts are those of an uninterrupted search."""
    draw = np.random.default_rng(0)
    files = [[(int(h), tuple(map(int, b))) for h, *b in draw.integers(0, 300, (200, 4), "u8")] for _ in range(3)]
    whole = write_all(tmp_path / "whole", files)
    expected = find_copies(whole, [], tmp_path / "work", silent)
    parts = write_all(tmp_path / "parts", files)
    original = corpus_copies._CopySearch._pass
    cuts = []

    def cut(self, band, on_pairs):
        calls = 0

        def fragile(earlier, later):
            nonlocal calls
            calls += 1
            if (band, calls) not in cuts and calls == 2:
                cuts.append((band, calls))
                raise KeyboardInterrupt
            on_pairs(earlier, later)

        original(self, band, fragile)

    monkeypatch.setattr(corpus_copies._CopySearch, "_pass", cut)
    for _ in range(4):
        with pytest.raises(KeyboardInterrupt):
            find_copies(parts, [], tmp_path / "again", silent)
    assert find_copies(parts, [], tmp_path / "again", silent) == expected
    assert len(cuts) == 4
    for uncut, resumed in zip(whole, parts, strict=True):
        assert (uncut / "verdicts.u1").read_bytes() == (resumed / "verdicts.u1").read_bytes()


def test_a_finished_search_is_not_repeated_but_lost_verdicts_are_written_again(tmp_path, monkeypatch):
    folders = write_all(tmp_path / "ours", [[(1, (1,)), (1, (2,))], [(3, (2,))]])
    events = []
    report = find_copies(folders, [], tmp_path / "work", lambda _, **fields: events.append(fields))
    assert [event["done"] for event in events] == [0, 1, 2]
    assert events[-1]["total"] == 2  # a finished search is not shown as one of half its passes
    passes = []
    original = corpus_copies._CopySearch._pass
    monkeypatch.setattr(corpus_copies._CopySearch, "_pass", lambda *a: (passes.append(a), original(*a)))
    assert find_copies(folders, [], tmp_path / "work", silent) == report
    assert not passes
    (folders[1] / "verdicts.u1").unlink()
    assert find_copies(folders, [], tmp_path / "work", silent) == report
    assert read_verdicts(folders[1]).tolist() == [NEAR]
    more = [*folders, write(tmp_path / "ours" / "2", [(3, (9,))])]
    assert find_copies(more, [], tmp_path / "work", silent).dropped == {"duplicate": 2, "near_duplicate": 1}


def test_published_signatures_hold_each_text_once_and_find_it_again(tmp_path):
    first = write_all(tmp_path / "first", [[(1, (1, 2)), (1, (1, 2)), (5, (1, 9))], [(5, (1, 9)), (7, (7, 7))]])
    find_copies(first, [], tmp_path / "work-1", silent)
    assert publish_signatures(first, tmp_path / "signatures") == 3
    assert np.fromfile(tmp_path / "signatures" / "hashes.u8", "<u8").tolist() == [1, 5, 7]
    second = write_all(tmp_path / "second", [[(5, (3, 3)), (8, (8, 9)), (9, (4, 7)), (9, (4, 7))]])
    find_copies(second, [tmp_path / "signatures"], tmp_path / "work-2", silent)
    assert read_verdicts(second[0]).tolist() == [EXACT_ELSEWHERE, NEAR_ELSEWHERE, NEAR_ELSEWHERE, EXACT]


def test_each_band_is_read_once(tmp_path, monkeypatch):
    """A pass reads its own column: none of the bytes of the others."""
    folders = write_all(tmp_path / "ours", [[(n, (n, n + 1, n + 2)) for n in range(10)]] * 3)
    sizes = []
    read = np.fromfile

    def counted(path, dtype, count=-1, **offset):
        values = read(path, dtype, count, **offset)
        sizes.extend([values.nbytes] if "band-" in str(path) else [])
        return values

    monkeypatch.setattr(corpus_copies.np, "fromfile", counted)
    find_copies(folders, [], tmp_path / "work", silent)
    assert sum(sizes) == 3 * 3 * 10 * 8


def test_no_documents_at_all(tmp_path):
    folders = write_all(tmp_path / "ours", [[], []])
    assert find_copies(folders, [], tmp_path / "work", silent).documents == 0
    assert publish_signatures(folders, tmp_path / "signatures") == 0
    assert find_copies([], [tmp_path / "signatures"], tmp_path / "other", silent).kept == 0


def test_signatures_that_do_not_fit_are_refused_by_name(tmp_path):
    good = write(tmp_path / "good", [(1, (1, 2)), (2, (3, 4))])
    torn = write(tmp_path / "torn", [(1, (1, 2)), (2, (3, 4))])
    (torn / "band-01.u8").write_bytes(bytes(24))
    with pytest.raises(ConfigError, match=r"torn/band-01.u8 has 24 bytes for 2 documents"):
        find_copies([torn], [], tmp_path / "work", silent)
    narrow = write(tmp_path / "narrow", [(1, (1,))])
    with pytest.raises(ConfigError, match="differ in bands"):
        find_copies([good, narrow], [], tmp_path / "work", silent)
    with pytest.raises(ConfigError, match="narrow and the other sources have"):
        find_copies([good], [narrow], tmp_path / "work", silent)
    with pytest.raises(ConfigError, match=r"nowhere/hashes.u8 is missing"):
        find_copies([tmp_path / "nowhere"], [], tmp_path / "work", silent)
    find_copies([good], [], tmp_path / "work", silent)
    (good / "verdicts.u1").write_bytes(bytes(1))
    with pytest.raises(ConfigError, match="differ in documents"):
        read_verdicts(good)
