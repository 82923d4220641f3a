"""What it costs to look for copies and for benchmark questions, relative to bare tiktoken on the same text.

    python bench/corpus/deduplicate.py [--questions 75000] [--megabytes 4] [--settle 1000000 10000000] [--bands 0]

Text: Wikipedia summaries, six to a document. Questions: sentences of other summaries, one word in twelve exchanged,
some behind a common opening. Each round times every form once, so that all meet the same machine; the medians of nine
rounds are told. `datasketch` and the Aho-Corasick automata are timed on a part of the text, for they are slow.
Wants `datasketch`, `ahocorasick-rs` and `pyahocorasick`, which nothing else here does.
`find_copies`: random hashes, every tenth document a copy, in units of 100,000; time, and the peak memory of a process
of its own. The automaton finds anchors of six words, one in eight, in text without anything but letters and digits.
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

from bench.measure import in_turns, options
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


def made_questions(count: int) -> list[HeldOutQuestion]:
    draw = random.Random(0)
    sentences = [s for a in articles(1)[3000:] for s in re.split(r"(?<=[.!?])\s+", a.extract) if len(s) > 40]
    collected = []
    for number in range(count):
        words = draw.choice(sentences).split()
        kind = draw.random()
        if kind < 0.3:
            words = words[: draw.randint(5, 14)]
        elif kind >= 0.6:
            words += draw.choice(sentences).split()
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
        for begin, end in zip(block.first[:-1], block.first[1:], strict=True):
            signature = datasketch.MinHash(BANDS * ROWS, SEED, hashfunc=int, scheme="affine64")
            signature.update_batch(grams(block.values[begin:end], WORDS).tolist())


def costs(questions: list[HeldOutQuestion], texts: list[str]) -> None:
    bare_tiktoken = tokenizer_for(TokenizerConfig()).encode  # `encode_ordinary` and nothing else
    begun = time.process_time()
    held = ContaminationIndex(questions)
    print(f"{len(questions):,} questions indexed in {time.process_time() - begun:.1f} s of one core")
    text_hits = held.screen(texts)
    print(
        f"{sum(map(bool, text_hits))} of {len(texts)} documents overlap a question; those are left out of what follows"
    )
    texts = [text for text, hits in zip(texts, text_hits, strict=True) if not hits]
    patterns = anchors(questions)
    rust = ahocorasick_rs.BytesAhoCorasick([pattern.encode() for pattern in patterns])
    automaton = ahocorasick.Automaton(ahocorasick.STORE_INTS)
    for number, pattern in enumerate(patterns):
        automaton.add_word(pattern, number)
    automaton.make_automaton()
    few = texts[: max(1, len(texts) // 20)]
    packed = ["".join(re.findall(r"\w+", text.casefold())) for text in few]
    raw = [text.encode() for text in packed]
    forms = {
        "tiktoken": (texts, lambda: [bare_tiktoken(text) for text in texts]),
        "content hash": (texts, lambda: [text_hash(text) for text in texts]),
        "words as arrays": (texts, lambda: list(words_of(texts))),
        "screen": (texts, lambda: held.screen(texts)),
        "MinHash, rensa": (texts, lambda: minhash_bands(texts)),
        "MinHash, datasketch": (few, lambda: with_datasketch(few)),
        "Aho-Corasick, ahocorasick-rs": (few, lambda: [rust.find_matches_as_indexes(r, overlapping=True) for r in raw]),
        "Aho-Corasick, pyahocorasick": (few, lambda: [list(automaton.iter(text)) for text in packed]),
    }
    taken = in_turns({name: work for name, (_, work) in forms.items()}, ROUNDS)
    per_byte = {
        name: statistics.median(processor for _, processor in taken[name]) / sum(len(text.encode()) for text in over)
        for name, (over, _) in forms.items()
    }
    for name, cost in per_byte.items():
        share = cost / per_byte["tiktoken"]
        print(f"{name:30s} {1e-6 / cost:8.1f} MB/s  {100 * share:6.1f} % of tiktoken's time")


def settle_one(count: int, width: int) -> None:
    """Settle `count` made-up documents here and print one line of it."""
    draw = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        units, earlier = [], draw.integers(0, 2**63, 100_000).astype("<u8")
        for number in range(0, count, 100_000):
            unit = Path(folder) / f"{number:012d}"
            unit.mkdir()
            hashes = draw.integers(0, 2**63, 100_000).astype("<u8")
            hashes[::10] = earlier[::10]
            (unit / HASHES).write_bytes(hashes.tobytes())
            for band in range(width):
                values = draw.integers(0, 2**63, 100_000).astype("<u8")
                values[5::20] = hashes[::20] if band == 0 else values[5::20]
                (unit / band_file(band)).write_bytes(values.tobytes())
            units.append(unit)
            earlier = hashes
        begun = time.perf_counter()
        settled = find_copies(units, [], Path(folder) / "work", silent)
        seconds = time.perf_counter() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"settle {count:,}, {width} bands: {seconds:.1f} s, {peak:.0f} MiB at most, {settled.dropped}")


def main() -> None:
    parser = options(__doc__, questions=75_000, megabytes=2.0, settle=[1_000_000, 10_000_000], bands=0)
    parser.add_argument(SETTLE, type=int, default=None, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.settle_one is not None:
        settle_one(asked.settle_one, asked.bands)
        return
    for count in asked.settle:  # first, while this process is small: a child begins with its parent's largest memory
        command = [sys.executable, __file__, SETTLE, str(count), "--bands", str(asked.bands)]
        subprocess.run(command, check=True)
    costs(made_questions(asked.questions), documents(asked.megabytes))


if __name__ == "__main__":
    main()
