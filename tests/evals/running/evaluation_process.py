"""A process that evaluates slowly enough to be killed: `python evaluation_process.py ROWS LOG PAUSE_S`.

It answers sums, writes every question it is asked into LOG, and prints a line a batch.
"""

import sys
import time

from nautile.data.chat_template import ParsedReply
from nautile.evals.benchmarks.items import BenchmarkItem
from nautile.evals.running.answerers import Answer
from nautile.evals.running.runner import evaluate

ITEMS = [BenchmarkItem("sums", n, str(n), f"What is {n} + {n * n}?", "number", str(n + n * n)) for n in range(48)]


class Adder:
    name, batch = "adder", 4

    def __init__(self, log: str, pause_s: float) -> None:
        self._log, self._pause_s = log, pause_s

    def answer(self, prompts, seeds):
        time.sleep(self._pause_s)
        with open(self._log, "a") as log:
            log.writelines(f"{seed[-1]}\n" for seed in seeds)
        totals = [str(n + n * n + n % 3) for *_, n in seeds]  # two of three are wrong
        return [Answer(ParsedReply("", total, True, True), total, False, 1, 1, self._pause_s) for total in totals]


def main(rows: str, log: str, pause_s: str) -> None:
    from pathlib import Path

    def emit(kind, **fields):
        if kind == "progress":
            sys.stdout.write(f"{fields['done']}\n")
            sys.stdout.flush()

    evaluate(Adder(log, float(pause_s)), ITEMS, Path(rows), seed=1, emit=emit)


if __name__ == "__main__":
    main(*sys.argv[1:])
