"""The retrieval artifact of distillation (paper §3.2): exemplars, their vectors and a FAISS index over them.

    exemplars.jsonl    SYNTH records, one JSON object a line
    vectors.f4         [exemplars, width] float32: the embedding of each record's query, of length one
    index.faiss        the serialised FAISS index
    retrieval.json     metadata: format, model, width, count, kind, recall, sha256 of the files above

FAISS only proposes candidates; `ExemplarIndex` ranks them by exact cosine similarity with the memory-mapped
`vectors.f4`, so a product code of 48 bytes a vector is enough. Below `IndexConfig.exact_below` vectors the search is
exact, from there on IVF-PQ: at 10,000 vectors (bench/corpus/retrieval.py) it reaches a recall@5 of 0.97 with 1 MB in
memory. The number of probed cells is doubled until the configured recall against exact search, measured on a sample, is
reached. The same exemplars give the same bytes.

FAISS is imported inside functions, because it takes 0.5 s and every command that plans a run imports this module.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nautile.common.errors import ConfigError
from nautile.common.events import Emit, silent
from nautile.common.files import sha256_of, write_atomically
from nautile.configs.distill import IndexConfig
from nautile.data.records import SynthRecord, from_dict, to_dict
from nautile.data.retrieval.embedders import Encoder
from nautile.data.sources.local_files import read_jsonl

if TYPE_CHECKING:
    import faiss

FORMAT = "nautile-retrieval-1"
EXEMPLARS, VECTORS, INDEX, FACTS = "exemplars.jsonl", "vectors.f4", "index.faiss", "retrieval.json"
REBUILD = "build it again with `nautile run --force --only index`"

ENCODE_BLOCK = 1024  # exemplars encoded at once
NEAR_DUPLICATE = 0.97  # cosine similarity; a question and its copy with other punctuation have about 0.98
SPARE_NEIGHBOURS = 8  # searched beyond the requested count, to replace near-duplicates
SIMILARITY_DIGITS = 5  # similarities are rounded before ranking, so that the order does not depend on rounding errors

SEARCH_BLOCK = 65_536  # vectors read at once; bounds the memory for the mapped file
CANDIDATES_PER_NEIGHBOUR = 10  # candidates of an approximate index that are ranked exactly, per requested neighbour
RECALL_NEIGHBOURS = 5  # recall@5: the paper (§3.2) retrieves five exemplars
RECALL_SAMPLE = 256  # vectors whose neighbours are compared with the exact ones
DIMENSIONS_PER_BYTE = 8  # of a vector's product code: MiniLM's 384 dimensions take 48 bytes
POINTS_PER_CELL = 64  # training vectors per cell; FAISS warns below 39
LEAST_TRAINING_VECTORS = 39 * 256  # FAISS's minimum for a product code of 256 centres
FIRST_PROBES, MOST_PROBES = 16, 4096  # cells probed by a search


@dataclass(frozen=True)
class Neighbour:
    """An exemplar near a prompt: its position among the exemplars, its record, and its cosine similarity."""

    index: int
    record: SynthRecord
    similarity: float

    @property
    def id(self) -> str:
        """The record's own id, or its position in the exemplars."""
        return self.record.synth_id or f"exemplar/{self.index}"


@dataclass(frozen=True)
class IndexFit:
    """The result of `build_faiss_index`: kind, cells probed per search (None: exact), recall@5 against exact search."""

    kind: str
    probes: int | None
    recall: float


def build_index(source: Path, encoder: Encoder, config: IndexConfig, out: Path, emit: Emit = silent) -> dict[str, Any]:
    """Index the records of the JSON-lines file `source` by their queries, into the folder `out`; return its facts.

    Raises `ConfigError` for a file that cannot be read or has no usable record.
    """
    import faiss

    out.mkdir(parents=True, exist_ok=True)
    count, unusable = 0, 0
    block: list[SynthRecord] = []
    with (out / f".{EXEMPLARS}.tmp").open("wb") as exemplars, (out / f".{VECTORS}.tmp").open("wb") as vectors:

        def flush() -> None:
            vectors.write(encoder.encode([record.query for record in block]).astype("<f4").tobytes())
            exemplars.write("".join(json.dumps(to_dict(r), ensure_ascii=True) + "\n" for r in block).encode())
            block.clear()

        # 1. Embed the exemplars block by block; both files are written under temporary names.
        for record in read_jsonl([source], "synth"):
            if not isinstance(record, SynthRecord):
                unusable += 1
                continue
            block.append(record)
            count += 1
            if len(block) == ENCODE_BLOCK:
                flush()
                emit("progress", done=count, total=None, unit="exemplars", note="embedding")
        flush()
    if not count:
        raise ConfigError(f"exemplars {source}: no usable record ({unusable} unusable); see `exemplars` of the source")
    for name in (EXEMPLARS, VECTORS):
        (out / f".{name}.tmp").replace(out / name)
    # 2. Build the FAISS index over the vectors, and write the metadata last.
    emit("progress", done=count, total=count, unit="exemplars", note="building the index")
    index, fit = build_faiss_index(_map_vectors(out / VECTORS, count, encoder.width), config)
    write_atomically(out / INDEX, faiss.serialize_index(index).data)
    facts: dict[str, Any] = {"format": FORMAT, "model": encoder.model, "width": encoder.width}
    facts |= {"count": count, "unusable": unusable, "kind": fit.kind, "effort": fit.probes, "recall": fit.recall}
    facts |= {"index_bytes": (out / INDEX).stat().st_size}
    facts |= {"sha256": {name: sha256_of(out / name) for name in (EXEMPLARS, VECTORS, INDEX)}}
    write_atomically(out / FACTS, (json.dumps(facts, indent=1, sort_keys=True) + "\n").encode())
    return facts


class ExemplarIndex:
    """An open retrieval artifact. The constructor raises `ConfigError` if it is damaged or of another model."""

    def __init__(self, folder: Path, encoder: Encoder) -> None:
        import faiss

        self.facts = _read_facts(folder, encoder)
        self._encoder = encoder
        self._vectors = _map_vectors(folder / VECTORS, self.facts["count"], encoder.width)
        try:
            self._index = faiss.deserialize_index(np.fromfile(folder / INDEX, np.uint8))
        except RuntimeError as error:
            raise ConfigError(f"retrieval index {folder}: {INDEX} is damaged ({error}); {REBUILD}") from None
        self._file = (folder / EXEMPLARS).open("rb")
        ends = np.cumsum([len(line) for line in self._file], dtype=np.int64)
        self._starts = np.concatenate([[0], ends])  # byte offset of each record's line
        if not len(ends) == self._index.ntotal == len(self):
            raise ConfigError(f"retrieval index {folder}: {EXEMPLARS}, {INDEX} and {FACTS} differ in count; {REBUILD}")

    def __len__(self) -> int:
        return self.facts["count"]

    def close(self) -> None:
        self._file.close()

    def record(self, position: int) -> SynthRecord:
        """Read the exemplar at a position from the file."""
        self._file.seek(int(self._starts[position]))
        line = self._file.read(int(self._starts[position + 1] - self._starts[position]))
        record = from_dict(json.loads(line), "synth")
        assert isinstance(record, SynthRecord), "only such records were written"
        return record

    def nearest(self, queries: Sequence[str], count: int) -> list[list[Neighbour]]:
        """The `count` nearest exemplars of each query, nearest first, without near-duplicates of the query."""
        vectors = self._encoder.encode(queries)
        neighbours: list[list[Neighbour]] = [[] for _ in queries]
        factor = 1 if self.facts["kind"] == "exact" else CANDIDATES_PER_NEIGHBOUR
        unfinished, ranked_count = list(range(len(queries))), count + SPARE_NEIGHBOURS
        while unfinished:  # one iteration, unless a query has more near-duplicates than there are spare neighbours
            candidates = search_candidates(self._index, vectors[unfinished], ranked_count * factor)
            for number, positions in zip(unfinished, candidates, strict=True):
                ranked = self._rank(vectors[number], positions[positions >= 0])[:ranked_count]
                neighbours[number] = self._without_copies(queries[number], ranked, count)
            unfinished = [
                number for number in unfinished if len(neighbours[number]) < count and ranked_count < len(self)
            ]
            ranked_count *= 4
        return neighbours

    def _rank(self, query: np.ndarray, positions: np.ndarray) -> list[tuple[float, int]]:
        """(similarity, position) of each candidate, most similar first, ties by position."""
        positions = np.sort(positions)
        # einsum and not a matrix product, whose rounding depends on the number of rows: the result would depend on
        # the other candidates.
        similarities = np.einsum("nw,w->n", self._vectors[positions], query)
        rounded = (round(float(similarity), SIMILARITY_DIGITS) for similarity in similarities)
        return sorted(zip(rounded, positions.tolist(), strict=True), key=lambda pair: (-pair[0], pair[1]))

    def _without_copies(self, query: str, ranked: list[tuple[float, int]], count: int) -> list[Neighbour]:
        """The first `count` candidates that are neither near-duplicates of `query` nor have the same words."""
        words, neighbours = _words(query), []
        for similarity, position in ranked:
            if similarity < NEAR_DUPLICATE and _words((record := self.record(position)).query) != words:
                neighbours.append(Neighbour(position, record, similarity))
            if len(neighbours) == count:
                break
        return neighbours


def _read_facts(folder: Path, encoder: Encoder) -> dict[str, Any]:
    """Read `retrieval.json`; check the files' digests and the embedding model against it."""
    try:
        facts = json.loads((folder / FACTS).read_bytes())
        if facts["format"] != FORMAT:
            raise ConfigError(f"retrieval index {folder}: format {facts['format']!r}, not {FORMAT!r}; {REBUILD}")
        damaged = [name for name, digest in facts["sha256"].items() if sha256_of(folder / name) != digest]
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"retrieval index {folder}: cannot be read ({error}); {REBUILD}") from None
    if damaged:
        raise ConfigError(f"retrieval index {folder}: {', '.join(damaged)}: the digest differs; {REBUILD}")
    if (facts["model"], facts["width"]) != (encoder.model, encoder.width):
        raise ConfigError(f"retrieval index {folder}: is of {facts['model']}, not of {encoder.model}; {REBUILD}")
    return facts


def _map_vectors(path: Path, count: int, width: int) -> np.ndarray:
    return np.memmap(path, "<f4", "r", 0, (count, width))


def _words(text: str) -> str:
    """Normalise `text` to its words, without case, punctuation and spacing."""
    return " ".join("".join(c if c.isalnum() else " " for c in text.casefold()).split())


def choose_kind(config: IndexConfig, count: int) -> str:
    """The kind of index for `count` vectors. Raises `ConfigError` if there are too few to train the configured one."""
    if config.kind == "auto":
        return "exact" if count < max(config.exact_below, LEAST_TRAINING_VECTORS) else "ivf_pq"
    if config.kind == "ivf_pq" and count < LEAST_TRAINING_VECTORS:
        raise ConfigError(
            f"index.kind 'ivf_pq' needs {LEAST_TRAINING_VECTORS} exemplars to be trained, there are {count}; "
            "use 'exact' or 'auto'"
        )
    return config.kind


def build_faiss_index(vectors: np.ndarray, config: IndexConfig) -> tuple[Any, IndexFit]:
    """Build the index over `vectors` [count, width].

    Raises `ConfigError` if IVF-PQ does not reach `config.recall` with any number of probed cells.
    """
    import faiss

    kind = choose_kind(config, len(vectors))
    index = faiss.IndexFlatIP(vectors.shape[1]) if kind == "exact" else _train_ivf_pq(vectors)
    for start in range(0, len(vectors), SEARCH_BLOCK):
        index.add(np.ascontiguousarray(vectors[start : start + SEARCH_BLOCK], np.float32))
    if isinstance(index, faiss.IndexFlatIP):
        return index, IndexFit(kind, None, 1.0)
    # Measure the recall for vectors spread over the set. Each finds itself too, hence one more neighbour.
    sample = np.unique(np.linspace(0, len(vectors) - 1, RECALL_SAMPLE).astype(np.int64))
    queries = np.ascontiguousarray(vectors[sample], np.float32)
    truth = exact_nearest(vectors, queries, RECALL_NEIGHBOURS + 1)
    cells, probes = int(index.nlist), FIRST_PROBES
    while True:
        probes = min(probes, cells)
        index.nprobe = probes  # FAISS saves it with the index
        candidates = search_candidates(index, queries, (RECALL_NEIGHBOURS + 1) * CANDIDATES_PER_NEIGHBOUR)
        recall = recall_at(candidates, vectors, queries, truth)
        if recall >= config.recall:
            return index, IndexFit(kind, probes, round(recall, 4))
        if probes == cells or probes >= MOST_PROBES:
            raise ConfigError(
                f"index.recall is {config.recall:g}, but {kind} over {len(vectors)} vectors reaches {recall:.3f}; "
                "lower it, or set index.kind to 'exact'"
            )
        probes *= 2


def _train_ivf_pq(vectors: np.ndarray) -> "faiss.IndexIVFPQ":
    """Train an IVF-PQ index on vectors spread over the set; no vector is added yet."""
    import faiss

    count, width = vectors.shape
    if width % DIMENSIONS_PER_BYTE:
        raise ConfigError(
            f"index.kind 'ivf_pq' needs vectors whose width {DIMENSIONS_PER_BYTE} divides, not {width}; set 'exact'"
        )
    # FAISS advises between 4 and 16 times the square root of the number of vectors, and enough of them to train a cell.
    cells = 4 * math.isqrt(count)
    cells = max(1, min(cells, count // POINTS_PER_CELL))
    index = faiss.IndexIVFPQ(faiss.IndexFlatL2(width), width, cells, width // DIMENSIONS_PER_BYTE, 8)
    training = min(count, max(LEAST_TRAINING_VECTORS, cells * POINTS_PER_CELL))
    sample = np.linspace(0, count - 1, training).astype(np.int64)
    index.train(np.ascontiguousarray(vectors[sample]))  # FAISS seeds its k-means with a constant
    return index


def search_candidates(index: Any, queries: np.ndarray, count: int) -> np.ndarray:
    """Positions of the `count` nearest vectors of each query by the index, [queries, count]; -1 if there are fewer."""
    return index.search(np.ascontiguousarray(queries, np.float32), min(count, index.ntotal))[1]


def exact_nearest(vectors: np.ndarray, queries: np.ndarray, count: int) -> np.ndarray:
    """Positions of the nearest vectors by brute force, block by block, [queries, count]."""
    scores = np.full((len(queries), 0), 0, np.float32)
    positions = np.zeros((len(queries), 0), np.int64)
    for start in range(0, len(vectors), SEARCH_BLOCK):
        block = queries @ np.asarray(vectors[start : start + SEARCH_BLOCK]).T
        # Merge the best so far with this block and keep the best `count`, so that memory stays constant.
        scores = np.concatenate([scores, block], axis=1)
        block_positions = np.broadcast_to(np.arange(start, start + block.shape[1]), block.shape)
        positions = np.concatenate([positions, block_positions], axis=1)
        best = np.argsort(-scores, axis=1, kind="stable")[:, :count]
        scores, positions = np.take_along_axis(scores, best, 1), np.take_along_axis(positions, best, 1)
    return positions


def recall_at(candidates: np.ndarray, vectors: np.ndarray, queries: np.ndarray, truth: np.ndarray) -> float:
    """Recall@k: share of the k best candidates after exact ranking that are as near as the true neighbours.

    `truth`: positions of the k nearest vectors, [queries, k]. Any vector that is as near as the farthest of them
    counts: of equally near vectors, such as copies of one, another choice is no miss.
    """
    hits = 0
    for row, query, expected in zip(candidates, queries, truth, strict=True):
        positions = np.unique(row[row >= 0])
        least = np.min(vectors[expected] @ query) - 10.0**-SIMILARITY_DIGITS
        hits += min(truth.shape[1], int(np.count_nonzero(vectors[positions] @ query >= least)))
    return hits / truth.size
