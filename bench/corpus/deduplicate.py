"""Cost of finding copies and benchmark questions, relative to bare tiktoken on the same text.

    python bench/corpus/deduplicate.py [--questions 75000] [--megabytes 4] [--settle 1000000 10000000] [--bands 0]

Text: Wikipedia summaries, six per document. Questions: sentences of other summaries with one word in twelve replaced,
some after a common opening. Each round times every form once; medians of nine rounds. `datasketch` and the Aho-Corasick
automata are slow and timed on a part of the text. Needs `datasketch`, `ahocorasick-rs` and `pyahocorasick`, the extra
`bench`. `find_copies`: random hashes, every tenth document a copy, in files of 100,000; its time, and the peak memory
of a separate process. The automaton finds anchors of six words, one in eight, in text reduced to letters and digits.
"""

import argparse
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ahocorasick
import ahocorasick_rs
import datasketch
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.measure import argument_parser, time_interleaved
from common.events import silent
from configs.model import TokenizerConfig
from data.screening.contamination import ContaminationIndex, HeldOutQuestion
from data.screening.corpus_copies import HASHES, band_file, find_copies
from data.screening.minhash import BANDS, ROWS, SEED, WORDS, minhash_bands
from data.screening.text_hash import text_hash
from data.screening.words import grams, words_of
from data.sources.wikipedia import articles
from data.tokenizer import tokenizer_for

ROUNDS = 9
OPENINGS = ("Which of the following best describes ", "According to the passage, ", "What is ", "Who was ", "")
SETTLE = "--settle-one"


def questions_from_articles(count: int) -> list[HeldOutQuestion]:
    draw = random.Random(0)
    sentences = [s for a in articles(1)[3000:] for s in re.split(r"(?<=[.!?])\s+", a.extract) if len(s) > 40]
    collected = []
    for number in range(count):
        words = draw.choice(sentences).split()
        kind = draw.random()
        # As benchmarks are: three in ten short, four of two sentences, the rest as they come.
        if kind < 0.3:
            words = words[: draw.randint(5, 14)]
        elif kind >= 0.6:
            words += draw.choice(sentences).split()
        # A word in twelve is replaced, so that the screen must find overlaps that are not verbatim.
        words = [word if draw.random() > 1 / 12 else draw.choice(words) for word in words]
        text = draw.choice(OPENINGS) + " ".join(words) + "?"
        collected.append(HeldOutQuestion(f"benchmark {number % 11}", str(number), text))
    return collected


def documents(megabytes: float) -> list[str]:
    texts = [article.extract for article in articles(1)[:3000]]
    result, size = [], 0
    for place in range(0, 3000, 6):
        result.append("\n\n".join(texts[place : place + 6]))
        size += len(result[-1].encode())
        if size > megabytes * 1e6:
            break
    return result


def anchors(questions: list[HeldOutQuestion]) -> list[str]:
    result = set()
    for question in questions:
        words = re.findall(r"\w+", question.text.casefold())
        result |= {"".join(words[n : n + 6]) for n in range(0, max(1, len(words) - 5), 8)}
    return sorted(result - {""})


def with_datasketch(texts: list[str]) -> None:
    for block in words_of(texts):
        # datasketch gets the same hashed grams as our MinHash: only the signatures are compared, not the reading of
        # words.
        for begin, end in zip(block.first[:-1], block.first[1:], strict=True):
            signature = datasketch.MinHash(BANDS * ROWS, SEED, hashfunc=int, scheme="affine64")
            signature.update_batch(grams(block.values[begin:end], WORDS).tolist())


def costs(questions: list[HeldOutQuestion], texts: list[str]) -> None:
    bare_tiktoken = tokenizer_for(TokenizerConfig()).encode  # `encode_ordinary` and nothing else
    start = time.process_time()
    index = ContaminationIndex(questions)
    print(f"{len(questions):,} questions indexed in {time.process_time() - start:.1f} s of one core")
    # Documents with a hit take another path afterwards; the usual document has none.
    text_hits = index.screen(texts)
    print(f"{sum(map(bool, text_hits))} of {len(texts)} documents overlap a question; they are left out below")
    texts = [text for text, hits in zip(texts, text_hits, strict=True) if not hits]
    # The two Aho-Corasick automata, over the anchors of all questions.
    patterns = anchors(questions)
    rust = ahocorasick_rs.BytesAhoCorasick([pattern.encode() for pattern in patterns])
    automaton = ahocorasick.Automaton(ahocorasick.STORE_INTS)
    for number, pattern in enumerate(patterns):
        automaton.add_word(pattern, number)
    automaton.make_automaton()
    sample = texts[: max(1, len(texts) // 20)]
    packed = ["".join(re.findall(r"\w+", text.casefold())) for text in sample]
    raw = [text.encode() for text in packed]
    forms = {
        "tiktoken": (texts, lambda: [bare_tiktoken(text) for text in texts]),
        "content hash": (texts, lambda: [text_hash(text) for text in texts]),
        "words as arrays": (texts, lambda: list(words_of(texts))),
        "screen": (texts, lambda: index.screen(texts)),
        "MinHash, rensa": (texts, lambda: minhash_bands(texts)),
        "MinHash, datasketch": (sample, lambda: with_datasketch(sample)),
        "Aho-Corasick, ahocorasick-rs": (
            sample,
            lambda: [rust.find_matches_as_indexes(r, overlapping=True) for r in raw],
        ),
        "Aho-Corasick, pyahocorasick": (sample, lambda: [list(automaton.iter(text)) for text in packed]),
    }
    timings = time_interleaved({name: work for name, (_, work) in forms.items()}, ROUNDS)
    # Cost per byte, because the slow forms run on a sample of the text.
    per_byte = {
        name: statistics.median(processor for _, processor in timings[name]) / sum(len(text.encode()) for text in over)
        for name, (over, _) in forms.items()
    }
    for name, cost in per_byte.items():
        share = cost / per_byte["tiktoken"]
        print(f"{name:30s} {1e-6 / cost:8.1f} MB/s  {100 * share:6.1f} % of tiktoken's time")


def settle_one(count: int, width: int) -> None:
    """Find the copies among `count` random documents in this process, and print one line of results."""
    draw = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        units, earlier = [], draw.integers(0, 2**63, 100_000).astype("<u8")
        for number in range(0, count, 100_000):
            unit = Path(folder) / f"{number:012d}"
            unit.mkdir()
            hashes = draw.integers(0, 2**63, 100_000).astype("<u8")
            # Every tenth document is an exact copy of one in the file before.
            hashes[::10] = earlier[::10]
            (unit / HASHES).write_bytes(hashes.tobytes())
            for band in range(width):
                values = draw.integers(0, 2**63, 100_000).astype("<u8")
                # In the first band every twentieth document agrees with another one of its file: a near copy.
                values[5::20] = hashes[::20] if band == 0 else values[5::20]
                (unit / band_file(band)).write_bytes(values.tobytes())
            units.append(unit)
            earlier = hashes
        start = time.perf_counter()
        copies = find_copies(units, [], Path(folder) / "work", silent)
        seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"settle {count:,}, {width} bands: {seconds:.1f} s, {peak:.0f} MiB at most, {copies.dropped}")


def main() -> None:
    parser = argument_parser(__doc__, questions=75_000, megabytes=2.0, settle=[1_000_000, 10_000_000], bands=0)
    parser.add_argument(SETTLE, type=int, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.settle_one is not None:
        settle_one(arguments.settle_one, arguments.bands)
        return
    for count in arguments.settle:  # first: a child inherits the peak memory of its parent
        command = [sys.executable, __file__, SETTLE, str(count), "--bands", str(arguments.bands)]
        subprocess.run(command, check=True)
    costs(questions_from_articles(arguments.questions), documents(arguments.megabytes))


if __name__ == "__main__":
    main()
