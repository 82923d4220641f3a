import itertools

import numpy as np
import pytest

from configs.section import ConfigError
from data import embeddings
from data.embeddings import WIDTH, Encoder
from data.exemplars import write_exemplars
from data.records import SynthRecord
from data.retrieval import ExemplarIndex, read_exemplars

ANIMALS = ["cat", "dog", "horse", "whale", "sparrow", "salmon", "frog", "spider", "bee", "shark"]


@pytest.fixture(scope="module")
def encoder():
    return Encoder()


def exemplar(query, number=0):
    return SynthRecord(query, "It lives.", "Yes.", exercise="memorization", synth_id=f"id/{number}")


@pytest.fixture(scope="module")
def index(encoder):
    queries = [f"What does a {animal} eat?" for animal in ANIMALS] + ["What is 3 + 4?", "What is 9 - 2?"]
    return ExemplarIndex.build([exemplar(query, n) for n, query in enumerate(queries)], encoder)


def test_vectors_have_length_one_and_do_not_depend_on_their_neighbours(encoder):
    texts = ["A cat sat.", "The economy of Chile rests on copper. " * 20, "", "A cat sat."]
    vectors = Encoder().encode(texts)
    assert vectors.shape == (4, WIDTH)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert (vectors[0] == vectors[3]).all()
    assert (vectors[1] == Encoder().encode([texts[1]])[0]).all()
    assert Encoder().encode([]).shape == (0, WIDTH)


def test_vectors_tell_meaning(encoder):
    cat, kitten, sum_ = encoder.encode(["The cat sleeps.", "A kitten is asleep.", "Two and two are four."])
    assert cat @ kitten > 0.6 > 0.3 > cat @ sum_


def test_kept_vectors_are_not_made_again(tmp_path, monkeypatch):
    first = Encoder(tmp_path).encode(["one", "two"])
    calls = []
    monkeypatch.setattr(Encoder, "_vector", lambda self, text: calls.append(text) or np.zeros(WIDTH, np.float32))
    again = Encoder(tmp_path)
    assert (again.encode(["two", "one"]) == first[::-1]).all()
    assert calls == []
    again.encode(["three"])
    assert calls == ["three"]


def test_a_damaged_or_foreign_file_of_vectors_is_made_again(tmp_path, monkeypatch):
    Encoder(tmp_path).encode(["one"])
    (path,) = tmp_path.glob("*.npz")
    path.write_bytes(path.read_bytes()[:100])
    assert Encoder(tmp_path).encode(["one"]).shape == (1, WIDTH)
    monkeypatch.setattr(embeddings, "MODEL", "another")
    assert Encoder(tmp_path)._known == {}


def test_a_package_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(embeddings, "_WEIGHTS", ("no-such-package", "model.onnx"))
    with pytest.raises(ConfigError, match="no-such-package"):
        Encoder().encode(["text"])


def test_the_nearest_come_first_and_look_alike(index, encoder):
    (found,) = index.nearest(["What do dogs like to eat?"], encoder, 5)
    assert next(one.record.query for one in found) == "What does a dog eat?"
    assert len(found) == 5
    assert all(a.similarity >= b.similarity for a, b in itertools.pairwise(found))
    (sums,) = index.nearest(["What is 5 + 1?"], encoder, 2)
    assert {one.id for one in sums} == {"id/10", "id/11"}


def test_the_prompt_itself_is_never_its_own_exemplar(index, encoder):
    (found,) = index.nearest(["what does a  WHALE eat"], encoder, 5)
    assert len(found) == 5
    assert "What does a whale eat?" not in [one.record.query for one in found]


def test_many_copies_of_the_prompt_do_not_use_up_its_neighbours(encoder):
    copies = [exemplar("What does a cat eat?", n) for n in range(40)]
    others = [exemplar(f"What does a {animal} eat?", 100 + n) for n, animal in enumerate(ANIMALS[1:6])]
    (found,) = ExemplarIndex.build(copies + others, encoder).nearest(["What does a cat eat?"], encoder, 5)
    assert {one.index for one in found} == {40, 41, 42, 43, 44}


def test_neighbours_do_not_depend_on_how_many_are_asked_about(index, encoder):
    queries = [f"Where do {animal}s live?" for animal in ANIMALS] * 3
    together = index.nearest(queries, encoder, 5)
    assert together == [index.nearest([query], encoder, 5)[0] for query in queries]


def test_an_index_is_saved_and_loaded(index, encoder, tmp_path):
    index.save(tmp_path)
    query = ["What do bees eat?"]
    assert ExemplarIndex.load(tmp_path).nearest(query, encoder, 5) == index.nearest(query, encoder, 5)


@pytest.mark.parametrize("name", ["vectors.faiss", "exemplars.jsonl", "retrieval.json"])
def test_a_damaged_index_is_refused_by_name(index, tmp_path, name):
    index.save(tmp_path)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-30])
    with pytest.raises(ConfigError, match=tmp_path.name):
        ExemplarIndex.load(tmp_path)


def test_exemplars_fewer_than_a_prompt_needs_are_refused(tmp_path):
    write_exemplars(tmp_path / "exemplars.jsonl", [exemplar(f"q{n}") for n in range(4)])
    assert len(read_exemplars(tmp_path, 4)) == 4
    with pytest.raises(ConfigError, match="4 usable records"):
        read_exemplars(tmp_path, 5)
