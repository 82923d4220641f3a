"""A benchmark with a grader of its own: two results as one JSON object. `{ name = "json_sums" }` in `benchmarks`."""

import json
import random
from collections.abc import Iterator

from nautile.data.chat_template import ParsedReply
from nautile.data.reply_objects import reply_objects
from nautile.evals.benchmarks.catalogue import Benchmark
from nautile.evals.benchmarks.items import BenchmarkItem
from nautile.evals.benchmarks.schemas import Question
from nautile.evals.graders.grading import Verdict, verdict_of

ASK = 'Write the sum and the product of {} and {} as a JSON object with the keys "sum" and "product".'


def questions(seed: int, count: int) -> Iterator[Question]:
    """The same for the same seed, and the first ones the same however many are asked."""
    draw = random.Random(seed)
    for _ in range(count):
        a, b = draw.randint(2, 99), draw.randint(2, 99)
        yield Question(ASK.format(a, b), expected=canonical({"sum": a + b, "product": a * b}))


def canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def objects(text: str) -> list[str]:
    return list(dict.fromkeys(canonical(found.value) for found in reply_objects(text)))


def grade(item: BenchmarkItem, reply: ParsedReply) -> Verdict:
    """Strict: one object, with the right values. What it raises is a missing score, not a wrong one."""
    return verdict_of(reply, objects, lambda found: found == item.expected)


# In place of `build`: `hub`, `subset`, `split` and `commit`, or `path`, and `read`, a function from a record to a
# `Question`. In place of `grade`: `kind`, such as "number". Without a `version` the digest of this file is in the key.
json_sums = Benchmark(title="JSON sums", size=200, build=questions, grade=grade)
