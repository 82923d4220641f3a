"""Packing loses nothing unseen: every token is in a row once, or counted as cropped."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nautile.data.tokens.shards import ConcatPacker, FirstFitPacker, PackedRows, packed_lengths

LENGTHS = st.lists(st.integers(0, 40), max_size=40)
ROW = st.integers(2, 24)


def numbered(lengths: list[int]) -> list[np.ndarray]:
    """Documents whose tokens are all different."""
    starts = np.cumsum([0, *lengths])
    return [np.arange(a, a + n, dtype=np.uint32) for a, n in zip(starts, lengths, strict=False)]


def rows_of(packed: PackedRows) -> list[list[np.ndarray]]:
    """Each row as its list of pieces."""
    pieces = np.split(packed.tokens, np.cumsum(packed.lengths)[:-1]) if len(packed.lengths) else []
    ends = np.cumsum(packed.pieces_per_row)
    return [pieces[end - n : end] for n, end in zip(packed.pieces_per_row, ends, strict=True)]


@given(lengths=LENGTHS, row=ROW)
def test_splitting_keeps_the_stream_and_fills_every_row_but_the_last(lengths, row):
    packer = ConcatPacker(row)
    documents = numbered(lengths)
    for document in documents:
        packer.add(document)
    packed = packer.finish()
    assert packed.tokens.tolist() == list(range(sum(lengths)))
    sizes = [sum(map(len, pieces)) for pieces in rows_of(packed)]
    assert sizes[:-1] == [row] * (len(sizes) - 1)
    assert packed.rows == packer.rows == -(-sum(lengths) // row)
    assert packed.padded_tokens == packed.rows * row - sum(lengths) < row
    assert (packed.documents, packed.cropped_tokens) == (sum(n > 0 for n in lengths), 0)
    starts = {int(document[0]) for document in documents if len(document)}
    for number, pieces in enumerate(rows_of(packed)):
        for position, piece in enumerate(pieces):
            assert int(piece[0]) in starts or position == 0  # a piece begins a document or a row
            assert len(starts & set(piece[1:].tolist())) == 0, number  # and holds no second one


@given(lengths=LENGTHS, row=ROW)
def test_fitting_never_cuts_a_document_that_fits_a_row(lengths, row):
    packer = FirstFitPacker(row)
    documents = numbered(lengths)
    for document in documents:
        packer.add(document, prompt=len(document) // 2)
    packed = packer.finish()
    pieces = {int(piece[0]): piece for pieces in rows_of(packed) for piece in pieces}
    assert len(pieces) == packed.documents == sum(n > 0 for n in lengths)
    for document in documents:
        if len(document):
            assert pieces[int(document[0])].tolist() == document[:row].tolist()
    assert packed.cropped_tokens == sum(max(0, n - row) for n in lengths)
    assert packed.cropped_documents == sum(n > row for n in lengths)
    assert all(sum(map(len, pieces)) <= row for pieces in rows_of(packed))
    assert len(packed.tokens) + packed.cropped_tokens == sum(lengths)
    assert packed.padded_tokens == packed.rows * row - len(packed.tokens)
    prompts = {int(p[0]): n for p, n in zip([p for r in rows_of(packed) for p in r], packed.prompts, strict=True)}
    assert all(prompts[int(d[0])] == min(row, len(d) // 2) for d in documents if len(d))


@given(lengths=st.lists(st.integers(1, 24), min_size=1, max_size=40), row=st.just(24))
def test_fitting_is_first_fit(lengths, row):
    packer = FirstFitPacker(row)
    free: list[int] = []
    expected = []
    for document in numbered(lengths):
        packer.add(document, prompt=0)
        position = next((i for i, room in enumerate(free) if room >= len(document)), len(free))
        if position == len(free):
            free.append(row)
        free[position] -= len(document)
        expected.append((position, int(document[0])))
    packed = rows_of(packer.finish())
    assert [(position, int(piece[0])) for position, pieces in enumerate(packed) for piece in pieces] == sorted(expected)
    half_empty = [pieces for pieces in packed if sum(map(len, pieces)) * 2 <= row]
    assert len(half_empty) <= 1


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=40), row=ROW)
def test_lengths_alone_give_the_fill_and_the_cropped_share_of_the_rows(lengths, row):
    packer = FirstFitPacker(row)
    for document in numbered(lengths):
        packer.add(document, 1)
    packed = packer.finish()
    expected = (len(packed.tokens) / (packed.rows * row), packed.cropped_documents / len(lengths))
    assert packed_lengths(np.array(lengths), row) == expected
