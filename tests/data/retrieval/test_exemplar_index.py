import itertools
import json

import faiss
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nautile.common.errors import ConfigError
from nautile.configs.distill import IndexConfig
from nautile.data.records import SynthRecord
from nautile.data.retrieval import exemplar_index
from nautile.data.retrieval.embedders import Encoder
from nautile.data.retrieval.exemplar_index import (
    EXEMPLARS,
    FACTS,
    INDEX,
    VECTORS,
    ExemplarIndex,
    build_faiss_index,
    build_index,
    choose_kind,
    exact_nearest,
    recall_at,
    search_candidates,
)
from nautile.data.tokens.build import write_exemplars

ANIMALS = ["cat", "dog", "horse", "whale", "sparrow", "salmon", "frog", "spider", "bee", "shark"]
SUMS = ["What is 3 + 4?", "What is 9 - 2?"]


@pytest.fixture(scope="module")
def encoder():
    return Encoder()


@pytest.fixture(scope="module")
def built(encoder, tmp_path_factory):
    """built(queries) -> the folder of an index over exemplars of these queries."""

    def make(queries, config=IndexConfig()):
        folder = tmp_path_factory.mktemp("retrieval")
        records = [
            SynthRecord(query, "It lives.", "Yes.", exercise="memorization", synth_id=f"id/{number}")
            for number, query in enumerate(queries)
        ]
        write_exemplars(folder / "source.jsonl", records)
        build_index(folder / "source.jsonl", encoder, config, folder / "out")
        return folder / "out"

    return make


@pytest.fixture(scope="module")
def index(built, encoder):
    return ExemplarIndex(built([f"What does a {animal} eat?" for animal in ANIMALS] + SUMS), encoder)


def test_the_nearest_come_first_and_look_alike(index):
    (neighbours,) = index.nearest(["What do dogs like to eat?"], 5)
    assert neighbours[0].record.query == "What does a dog eat?"
    assert len(neighbours) == 5
    assert all(a.similarity >= b.similarity for a, b in itertools.pairwise(neighbours))
    (sums,) = index.nearest(["What is 5 + 1?"], 2)
    assert {neighbour.id for neighbour in sums} == {"id/10", "id/11"}


def test_the_prompt_itself_is_never_its_own_exemplar(index):
    (neighbours,) = index.nearest(["what does a  WHALE eat"], 5)
    assert len(neighbours) == 5
    assert "What does a whale eat?" not in [neighbour.record.query for neighbour in neighbours]


def test_many_copies_of_the_prompt_do_not_use_up_its_neighbours(built, encoder):
    queries = ["What does a cat eat?"] * 40 + [f"What does a {animal} eat?" for animal in ANIMALS[1:6]]
    (neighbours,) = ExemplarIndex(built(queries), encoder).nearest(["What does a cat eat?"], 5)
    assert {neighbour.index for neighbour in neighbours} == {40, 41, 42, 43, 44}


def test_neighbours_do_not_depend_on_how_many_queries_are_searched_together(index):
    queries = [f"Where do {animal}s live?" for animal in ANIMALS] * 3
    together = index.nearest(queries, 5)
    assert together == [index.nearest([query], 5)[0] for query in queries]


@pytest.mark.parametrize(
    ("name", "damage"),
    [(VECTORS, "flip"), (EXEMPLARS, "flip"), (FACTS, "flip"), (INDEX, "flip"), (INDEX, "cut"), (VECTORS, "gone")],
)
def test_a_damaged_index_is_refused_by_name(built, encoder, name, damage):
    folder = built(SUMS)
    path = folder / name
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content[:-30] if damage == "cut" else content[:40] + b"\x00\xff" + content[42:])
    with pytest.raises(ConfigError, match="only index"):
        ExemplarIndex(folder, encoder)


def test_an_index_of_another_model_is_refused(built, monkeypatch):
    folder = built(SUMS)
    other = Encoder()
    monkeypatch.setattr(other, "model", "another")
    with pytest.raises(ConfigError, match="not of another"):
        ExemplarIndex(folder, other)


def test_the_index_is_the_same_each_time_and_records_what_it_is(built):
    first, second = built(SUMS), built(SUMS)
    for name in (VECTORS, EXEMPLARS, FACTS, INDEX):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    facts = json.loads((first / FACTS).read_bytes())
    assert (facts["kind"], facts["count"], facts["recall"], facts["width"]) == ("exact", 2, 1.0, 384)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty"), (b"\x00\x01\x02", "is binary"), (b'{"a": 1}\n', "no usable record"), (None, "cannot be read")],
)
def test_exemplars_that_cannot_be_used_are_named(tmp_path, encoder, content, message):
    path = tmp_path / "exemplars.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"exemplars.*{message}"):
        build_index(path, encoder, IndexConfig(), tmp_path / "out")


def clustered(count, width=48, seed=0):
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(60, width))
    rows = centres[rng.integers(0, 60, count)] + 0.6 * rng.normal(size=(count, width))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture
def one_thread():
    """On a busy machine a second thread of FAISS only spins, for five times the work."""
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    yield
    faiss.omp_set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_an_approximate_index_reaches_its_recall_and_is_built_the_same_twice(monkeypatch):
    monkeypatch.setattr(exemplar_index, "RECALL_SAMPLE", 64)
    vectors = clustered(10_000, width=16)
    monkeypatch.setattr(exemplar_index, "DIMENSIONS_PER_BYTE", 4)
    config = IndexConfig(kind="ivf_pq")
    index, fit = build_faiss_index(vectors, config)
    assert fit.recall >= 0.95
    queries = clustered(80, width=16)
    truth = exact_nearest(vectors, queries, 5)
    again = faiss.deserialize_index(faiss.serialize_index(index))
    assert again.nprobe == fit.probes
    assert recall_at(search_candidates(again, queries, 60), vectors, queries, truth) >= 0.9, "probes are saved with it"
    twin, _ = build_faiss_index(vectors, config)
    assert faiss.serialize_index(twin).tobytes() == faiss.serialize_index(index).tobytes()


@pytest.mark.usefixtures("one_thread")
def test_a_copy_of_a_neighbour_is_as_near_as_it_and_no_miss():
    """Which of many equal vectors are proposed says nothing about the index; one that is farther is a miss."""
    points = np.eye(4, dtype=np.float32)
    vectors = np.repeat(points, 60, axis=0)
    truth = exact_nearest(vectors, points, 5)
    others = np.stack([np.arange(60 * n + 50, 60 * n + 60) for n in range(4)])
    assert not np.intersect1d(others, truth).size
    assert recall_at(others, vectors, points, truth) == 1.0
    others[0, 3:] = 100  # the copies of another vector
    assert recall_at(others, vectors, points, truth) == (3 + 5 * 3) / 20
    assert recall_at(np.full((4, 10), -1), vectors, points, truth) == 0.0


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_an_index_of_copies_is_built(monkeypatch):
    monkeypatch.setattr(exemplar_index, "RECALL_SAMPLE", 64)
    monkeypatch.setattr(exemplar_index, "DIMENSIONS_PER_BYTE", 4)
    vectors = np.repeat(clustered(200, width=16), 60, axis=0)
    _, fit = build_faiss_index(vectors, IndexConfig(kind="ivf_pq"))
    assert fit.recall >= 0.95


def test_a_recall_that_cannot_be_reached_is_refused(monkeypatch):
    monkeypatch.setattr(exemplar_index, "DIMENSIONS_PER_BYTE", 48)
    with pytest.raises(ConfigError, match=r"index.recall is 1, but ivf_pq over 10000 vectors reaches 0\.\d"):
        build_faiss_index(clustered(10_000), IndexConfig(kind="ivf_pq", recall=1.0))


def test_the_kind_follows_from_the_count():
    assert choose_kind(IndexConfig(), 199_999) == "exact"
    assert choose_kind(IndexConfig(), 200_000) == "ivf_pq"
    assert choose_kind(IndexConfig(exact_below=1), 4000) == "exact", "too few to train"
    assert choose_kind(IndexConfig(kind="exact"), 300_000) == "exact"
    with pytest.raises(ConfigError, match="needs 9984 exemplars"):
        choose_kind(IndexConfig(kind="ivf_pq"), 9983)
    with pytest.raises(ConfigError, match="needs vectors whose width 8 divides, not 12"):
        build_faiss_index(clustered(9984, width=12), IndexConfig(kind="ivf_pq"))


@given(st.integers(1, 60), st.integers(1, 5), st.integers(0, 50))
def test_brute_force_by_blocks_is_brute_force(count, wanted, seed):
    vectors = clustered(count, 8, seed)
    queries = clustered(3, 8, seed + 1)
    with pytest.MonkeyPatch.context() as patch:  # the fixture's patch would last over all of the examples
        patch.setattr(exemplar_index, "SEARCH_BLOCK", 7)
        positions = exact_nearest(vectors, queries, wanted)
    scores = queries @ vectors.T
    best = -np.sort(-scores, axis=1)[:, :wanted]
    np.testing.assert_allclose(np.take_along_axis(scores, positions, 1), best, rtol=1e-5)
