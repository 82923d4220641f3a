"""Which documents are copies, settled on disk: against a form that compares every two, and across kills."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import data.screening.corpus_copies as duplicates
from common.errors import ConfigError
from common.events import silent
from data.screening.corpus_copies import (
    EXACT,
    EXACT_ELSEWHERE,
    KEPT,
    NEAR,
    NEAR_ELSEWHERE,
    REASONS,
    find_copies,
    publish_signatures,
    verdicts,
)

Document = tuple[int, tuple[int, ...]]  # its hash, its band values

FEW = st.integers(0, 12).map(lambda n: n * 0x1357_9BDF_0246_8ACE % 2**64)  # spread over the ranges, often equal
DOCUMENT = st.tuples(FEW, st.tuples(FEW, FEW))
UNITS = st.lists(st.lists(DOCUMENT, max_size=8), max_size=4)


def write(folder: Path, documents: list[Document], bands: bool = True) -> Path:
    folder.mkdir(parents=True)
    (folder / "hashes.u8").write_bytes(np.array([d[0] for d in documents], "<u8").tobytes())
    if bands:
        (folder / "bands.u8").write_bytes(np.array([d[1] for d in documents], "<u8").tobytes())
    return folder


def write_all(root: Path, units: list[list[Document]], bands: bool = True) -> list[Path]:
    return [write(root / str(n), unit, bands) for n, unit in enumerate(units)]


def naive(units: list[list[Document]], against: list[list[Document]], bands: bool) -> list[int]:
    """The verdict of each document in turn: clusters are grown until no two of them share a band value."""
    ours, others = [d for unit in units for d in unit], [d for unit in against for d in unit]
    found, met = [], set()
    for digest, _ in ours:
        copy = EXACT if digest in met else EXACT_ELSEWHERE if digest in {d[0] for d in others} else KEPT
        found.append(copy)
        met.add(digest)
    if not bands:
        return found
    cluster = list(range(1, len(ours) + 1)) + [0] * len(others)
    for _ in cluster:
        for a, (_, one) in enumerate(ours):
            for b, (_, other) in enumerate(ours + others):
                if any(x == y for x, y in zip(one, other, strict=True)):
                    cluster[a] = cluster[b] = min(cluster[a], cluster[b])
    near = [
        NEAR_ELSEWHERE if root == 0 else NEAR if root != n else KEPT for n, root in enumerate(cluster[: len(ours)], 1)
    ]
    return [copy or close for copy, close in zip(found, near, strict=True)]


@settings(max_examples=60)
@given(units=UNITS, against=UNITS, bands=st.booleans(), piece=st.sampled_from([1, 3, 100]))
def test_the_verdicts_are_those_of_comparing_every_two(tmp_path_factory, units, against, bands, piece):
    root = tmp_path_factory.mktemp("settle")
    folders, others = write_all(root / "ours", units, bands), write_all(root / "others", against, bands)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(duplicates, "PIECE", piece)
        patch.setattr(duplicates, "RANGE", 2)  # several ranges even for so few
        settled = find_copies(folders, others, root / "work", silent)
    expected = naive(units, against, bands)
    assert [v for folder in folders for v in verdicts(folder).tolist()] == expected
    assert settled.documents == len(expected)
    assert settled.dropped == {REASONS[c]: expected.count(c) for c in REASONS if c in expected}
    assert settled.kept == expected.count(KEPT)


def test_a_kill_between_passes_changes_nothing(tmp_path, monkeypatch):
    """Cut off at every pass and in the middle of one, then gone on with: the verdicts are those of one go."""
    draw = np.random.default_rng(0)
    units = [[(int(h), tuple(map(int, b))) for h, *b in draw.integers(0, 300, (200, 4), "u8")] for _ in range(3)]
    whole = write_all(tmp_path / "whole", units)
    expected = find_copies(whole, [], tmp_path / "work", silent)
    parts = write_all(tmp_path / "parts", units)
    original = duplicates._Settling._pass
    cuts = []

    def cut(self, band, pairs):
        calls = 0

        def fragile(one, other):
            nonlocal calls
            calls += 1
            if (band, calls) not in cuts and calls == 2:
                cuts.append((band, calls))
                raise KeyboardInterrupt
            pairs(one, other)

        original(self, band, fragile)

    monkeypatch.setattr(duplicates._Settling, "_pass", cut)
    for _ in range(4):
        with pytest.raises(KeyboardInterrupt):
            find_copies(parts, [], tmp_path / "again", silent)
    assert find_copies(parts, [], tmp_path / "again", silent) == expected
    assert len(cuts) == 4
    for one, other in zip(whole, parts, strict=True):
        assert (one / "verdicts.u1").read_bytes() == (other / "verdicts.u1").read_bytes()


def test_settled_work_is_not_done_again_but_lost_verdicts_are(tmp_path, monkeypatch):
    folders = write_all(tmp_path / "ours", [[(1, (1,)), (1, (2,))], [(3, (2,))]])
    settled = find_copies(folders, [], tmp_path / "work", silent)
    passes = []
    original = duplicates._Settling._pass
    monkeypatch.setattr(duplicates._Settling, "_pass", lambda *a: (passes.append(a), original(*a)))
    assert find_copies(folders, [], tmp_path / "work", silent) == settled
    assert not passes
    (folders[1] / "verdicts.u1").unlink()
    assert find_copies(folders, [], tmp_path / "work", silent) == settled
    assert verdicts(folders[1]).tolist() == [NEAR]
    more = [*folders, write(tmp_path / "ours" / "2", [(3, (9,))])]
    assert find_copies(more, [], tmp_path / "work", silent).dropped == {"duplicate": 2, "near_duplicate": 1}


def test_published_signatures_hold_each_text_once_and_find_it_again(tmp_path):
    first = write_all(tmp_path / "first", [[(1, (1, 2)), (1, (1, 2)), (5, (1, 9))], [(5, (1, 9)), (7, (7, 7))]])
    find_copies(first, [], tmp_path / "work-1", silent)
    assert publish_signatures(first, tmp_path / "signatures") == 3
    assert np.fromfile(tmp_path / "signatures" / "hashes.u8", "<u8").tolist() == [1, 5, 7]
    second = write_all(tmp_path / "second", [[(5, (3, 3)), (8, (8, 9)), (9, (4, 7)), (9, (4, 7))]])
    find_copies(second, [tmp_path / "signatures"], tmp_path / "work-2", silent)
    assert verdicts(second[0]).tolist() == [EXACT_ELSEWHERE, NEAR_ELSEWHERE, NEAR_ELSEWHERE, EXACT]


def test_no_documents_at_all(tmp_path):
    folders = write_all(tmp_path / "ours", [[], []])
    assert find_copies(folders, [], tmp_path / "work", silent).documents == 0
    assert publish_signatures(folders, tmp_path / "signatures") == 0
    assert find_copies([], [tmp_path / "signatures"], tmp_path / "other", silent).kept == 0


def test_signatures_that_do_not_fit_are_refused_by_name(tmp_path):
    good = write(tmp_path / "good", [(1, (1, 2)), (2, (3, 4))])
    torn = write(tmp_path / "torn", [(1, (1, 2)), (2, (3, 4))])
    (torn / "bands.u8").write_bytes(bytes(24))
    with pytest.raises(ConfigError, match=r"torn/bands.u8 has 24 bytes for 2 documents"):
        find_copies([torn], [], tmp_path / "work", silent)
    narrow = write(tmp_path / "narrow", [(1, (1,))])
    with pytest.raises(ConfigError, match="differ in bands"):
        find_copies([good, narrow], [], tmp_path / "work", silent)
    with pytest.raises(ConfigError, match="narrow and its like have"):
        find_copies([good], [narrow], tmp_path / "work", silent)
    with pytest.raises(ConfigError, match=r"nowhere/hashes.u8 is missing"):
        find_copies([tmp_path / "nowhere"], [], tmp_path / "work", silent)
    find_copies([good], [], tmp_path / "work", silent)
    (good / "verdicts.u1").write_bytes(bytes(1))
    with pytest.raises(ConfigError, match="are not of the same documents"):
        verdicts(good)
