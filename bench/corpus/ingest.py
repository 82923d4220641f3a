"""Ingest of one file on one core, from Parquet to a published index, against bare tiktoken on the same text.

    python bench/corpus/ingest.py [--documents 1200] [--join 8] [--repeats 5] [--questions 20000] [--json FILE]

The text is Wikipedia's vital articles, `--join` of them per document (8: some 850 ids, the average of FineWeb-Edu),
written as a Parquet file with FineWeb-Edu's columns. "bare" is `tiktoken.Encoding.encode_ordinary_batch` on one thread,
on texts in memory. "ours" reads the file, checks each row, hashes, tokenises, finds copies, packs, writes, digests and
indexes; then again with decontamination, and with MinHash too. The forms are interleaved. Ratios are of medians, by
wall time and by processor time (which other work disturbs less). The questions are sentences of articles that are not
in the text.
"""

import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import tiktoken

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.measure import argument_parser, medians, print_rows, time_interleaved, write_results
from nautile.common.events import silent
from nautile.configs.model import TokenizerConfig
from nautile.data.screening.contamination import ContaminationIndex, HeldOutQuestion
from nautile.data.screening.corpus_copies import find_copies
from nautile.data.screening.duplicates import minhash_bands
from nautile.data.sources.local_files import read_parquet_batches
from nautile.data.sources.wikipedia import articles, web_record
from nautile.data.tokenizer import PATTERN, tokenizer_for
from nautile.data.tokens.build import CorpusPlan, DocumentChecks, pack_file, publish_tokens, tokenise_file

ROW_LENGTH = 1024


def documents(count: int, join: int) -> list[str]:
    """`count` documents of `join` articles each."""
    texts = [web_record(article).text for article in articles(0)[: count * join]]
    return ["\n\n".join(texts[first : first + join]) for first in range(0, len(texts), join)]


def questions(count: int, after: int) -> list[HeldOutQuestion]:
    """Sentences of the articles from the `after`-th on; of all of them, if those are too few."""
    sentences = [
        sentence
        for article in articles(0)[after:]
        for sentence in re.split(r"(?<=[.!?])\s+", article.extract)
        if len(sentence.split()) >= 13
    ]
    return [HeldOutQuestion("sentences", str(number), text) for number, text in enumerate(sentences[:count])]


def write_web(path: Path, texts: list[str]) -> None:
    """Write a Parquet file with the columns of FineWeb-Edu, in row groups of 1,000 like the original."""
    rows = [
        {"text": text, "id": f"<urn:uuid:{n:032x}>", "dump": "CC-MAIN-2024-10", "url": f"https://example.org/{n}",
         "file_path": f"s3://commoncrawl/crawl-data/CC-MAIN-2024-10/segments/{n}.warc.gz", "language": "en",
         "language_score": 0.95, "token_count": len(text) // 4, "score": 3.2, "int_score": 3}
        for n, text in enumerate(texts)
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=1000)


def ingest(file: Path, plan: CorpusPlan, checks: DocumentChecks, folder: Path) -> tuple[int, float]:
    """Ingest one file completely into an empty folder; returns the ids written, and bytes on disk per id."""
    unit, mark, out = folder / "00000", folder / "00000.json", folder / "out"
    tokenise_file(read_parquet_batches(file, plan.form, record_columns=("id", "url", "synth_id")), plan, checks, unit)
    find_copies([unit], (), folder / "settling", silent)
    pack_file(unit, 0, plan, mark, out)
    corpus = publish_tokens([unit], [mark], plan, out)
    tokens = corpus.index.total("tokens")
    return tokens, sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) / tokens


def measure(ranks: int, texts: list[str], held_out: list[HeldOutQuestion], repeats: int, folder: Path) -> dict:
    """Medians over `repeats` rounds, for one vocabulary."""
    config = TokenizerConfig(ranks=ranks)
    ours = tokenizer_for(config)
    # The same ranks in a plain tiktoken encoding, as the baseline.
    ranks_by_token = {token: rank for rank, token in ours._bytes.items()}
    bare = tiktoken.Encoding("bare", pat_str=PATTERN, mergeable_ranks=ranks_by_token, special_tokens=ours.specials)
    file = folder / "documents.parquet"
    write_web(file, texts)
    plan = CorpusPlan(config, "web", ROW_LENGTH, 4096, 0.01)
    contamination = ContaminationIndex(held_out)
    by_name: dict[str, tuple[int, float]] = {}

    def end_to_end(name: str, checks: DocumentChecks) -> Callable[[], None]:
        def work() -> None:
            # Removed inside the timed call, because a file must be ingested into an empty folder; that takes little.
            shutil.rmtree(folder / "ingest", ignore_errors=True)
            by_name[name] = ingest(file, plan, checks, folder / "ingest")

        return work

    kinds: dict[str, Callable[[], object]] = {
        "bare": lambda: bare.encode_ordinary_batch(texts, num_threads=1),
        "ours": end_to_end("ours", DocumentChecks()),
        "decontaminated": end_to_end("decontaminated", DocumentChecks(contamination)),
        "decontaminated, MinHash": end_to_end("decontaminated, MinHash", DocumentChecks(contamination, minhash_bands)),
    }
    # Ratios below are of medians.
    seconds = time_interleaved(kinds, repeats)
    tokens, disk = by_name["ours"]
    clock = medians(seconds)
    cores = {name: statistics.median(cpu for _, cpu in times) for name, times in seconds.items()}
    return {
        "ranks": ranks,
        "tokens": tokens,
        "disk_bytes_per_token": round(disk, 4),
        "tokens_per_second": {name: round(tokens / item) for name, item in clock.items()},
        "of_bare_by_clock": {name: round(clock["bare"] / entry, 3) for name, entry in clock.items()},
        "of_bare_by_processor": {name: round(cores["bare"] / core, 3) for name, core in cores.items()},
    }


def main() -> None:
    arguments = argument_parser(__doc__, documents=1200, join=8, repeats=5, questions=20_000).parse_args()
    texts = documents(arguments.documents, arguments.join)
    held_out = questions(arguments.questions, arguments.documents * arguments.join)
    results = []
    print(
        f"{len(texts)} documents, {sum(map(len, texts)) / len(texts):,.0f} characters each; {len(held_out)} questions"
    )
    for ranks in (100_256, 2048):
        with tempfile.TemporaryDirectory() as folder:
            result = measure(ranks, texts, held_out, arguments.repeats, Path(folder))
        results.append(result)
        print_rows({f"{ranks} ranks": [f"{name}: {value}" for name, value in result.items()]})
    write_results(results, arguments.json)


if __name__ == "__main__":
    main()
