"""Grade mathematical answers by value, within a limit of time for a reply.

An answer is taken apart here (`evals.graders.answer_forms`); single values that are no plain numbers are compared by
SymPy, in a process that is killed when it takes too long (`evals.graders.expressions`).
"""

import atexit
import json
import logging
import os
import selectors
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

from nautile.common.errors import Retryable
from nautile.common.processes import module_command
from nautile.data.chat_template import ParsedReply
from nautile.evals.graders.answer_forms import AnswerForm, equal, read
from nautile.evals.graders.grading import Verdict, issue_of
from nautile.evals.graders.math_answers import candidates
from nautile.evals.graders.notation import MAX_LENGTH, written_number

logger = logging.getLogger(__name__)
START_S = 120.0  # importing sympy on a busy machine
_MOST_SHOWN = 8  # candidates of a verdict that are shown


class NoComparison(Exception):
    """A comparison has no result: its process hung or died, or SymPy raised."""


@dataclass
class TimeLeft:
    """The seconds that are left for the comparisons of one reply."""

    left_s: float


class Equivalence:
    """Compare mathematical answers, those of one reply within `limit_s` seconds together. Thread-safe.

    `failures` counts the comparisons without a result.
    """

    def __init__(self, limit_s: float = 10.0) -> None:
        self.limit_s = limit_s
        self.failures = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def budget(self) -> TimeLeft:
        """The time for a new reply."""
        return TimeLeft(self.limit_s)

    def equal(self, expected: str, answer: str, budget: TimeLeft | None = None) -> bool | None:
        """Whether both are equivalent; None if that could not be found out within the budget.

        Raises `Retryable` if the process cannot be started, because then no answer at all can be compared.
        """
        if not answer.strip() or max(len(expected), len(answer)) > MAX_LENGTH:
            return False
        time_left = budget or self.budget()
        try:
            return equal(read(expected), read(answer), lambda question, a, b: self._ask(question, a, b, time_left))
        except NoComparison as error:
            self.failures += 1
            logger.warning("%r was not compared with %r: %s", answer[:80], expected[:80], error)
            return None

    def reads(self, expected: str) -> bool | None:
        """Whether every part of `expected` can be compared, by value or as words; None after a failure."""
        try:
            return len(expected) <= MAX_LENGTH and self._reads(read(expected), self.budget())
        except NoComparison:
            self.failures += 1
            return None

    def close(self) -> None:
        """Kill the process; the next comparison starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            assert process.stdin is not None  # both are pipes, see `_start`
            assert process.stdout is not None
            with suppress(BrokenPipeError):  # a request that the process did not live to read
                process.stdin.close()
            process.stdout.close()

    def _reads(self, form: AnswerForm, budget: TimeLeft) -> bool:
        if form.kind == "words":
            return bool(form.text)
        if form.kind != "value":
            return all(self._reads(part, budget) for part in form.parts)
        # A number in a base and a set of numbers are compared as they are written.
        as_written = any(word.startswith("base ") for word in form.unit) or form.text.startswith("\\mathbb{")
        return as_written or written_number(form.text) is not None or self._ask("reads", form.text, "", budget)

    def _ask(self, question: str, a: str, b: str, budget: TimeLeft) -> bool:
        """Ask the process, started if need be. Raises `NoComparison` without a reply in time."""
        if budget.left_s <= 0:
            raise NoComparison(f"no result within {self.limit_s:g} s for a reply")
        request = json.dumps({"question": question, "a": a, "b": b}).encode() + b"\n"
        with self._lock:
            # A process that ends amid a comparison may have been killed by somebody: it has a second try.
            for _ in range(2):
                process = self._running()
                assert process.stdin is not None
                start = time.monotonic()
                try:
                    process.stdin.write(request)
                    process.stdin.flush()
                    line = self._line(process, max(0.0, budget.left_s))
                except BrokenPipeError:
                    line = b""
                budget.left_s -= time.monotonic() - start
                if line is None:  # killing the process is the only way to stop a comparison that takes too long
                    self.close()
                    raise NoComparison(f"no result within {self.limit_s:g} s for a reply")
                if line:
                    if (result := json.loads(line)) is None:
                        raise NoComparison("SymPy failed")
                    return bool(result)
                self.close()
            raise NoComparison("its process died twice")

    def _running(self) -> subprocess.Popen[bytes]:
        """The process, started if there is none. Raises `Retryable` if it does not start."""
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is not None:
            return self._process
        process = self._process = subprocess.Popen(
            module_command("nautile.evals.graders.expressions", str(os.getpid())),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Sets in one order and random numbers of one seed, so that a verdict is the same in every process.
            env={**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONHASHSEED": "0"},
        )
        if not (line := self._line(process, START_S)):
            # At the end of its output it may not have ended yet, a moment later it has.
            reason = f"did not start within {START_S:g} s" if line is None else f"ended with exit code {process.wait()}"
            self.close()
            raise Retryable(f"the process that compares mathematical answers {reason}; the same command goes on")
        return process

    def _line(self, process: subprocess.Popen[bytes], limit_s: float) -> bytes | None:
        """Read the next line: None on time-out, empty at the end. Replies are a few bytes, so they arrive at once."""
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(limit_s):
                return None
        return process.stdout.readline()


@cache
def shared() -> Equivalence:
    """The process-wide instance, closed at exit."""
    instance = Equivalence()
    atexit.register(instance.close)
    return instance


def grade_math(reply: ParsedReply, expected: str, equivalence: Equivalence | None = None) -> Verdict:
    r"""Grade a mathematical answer.

    Strict: the answer spans (`\boxed{}`, …), else the `$…$` segments, else the whole answer, agree on one value.
    Lenient: the last of them is equivalent to `expected`; without an answer, that of the reasoning. A result that
    depends on a comparison without one is None.
    """
    comparisons = equivalence or shared()
    budget = comparisons.budget()
    several = len(expected) <= MAX_LENGTH and read(expected).kind in ("list", "sequence", "union")
    texts = candidates(reply.answer or "", several)
    fallback = texts or candidates(reply.reasoning, several)
    right = comparisons.equal(expected, fallback[-1], budget) if fallback else False
    # All others are compared with the last one, until one differs.
    others = [text for text in dict.fromkeys(texts) if text != texts[-1]]
    agree: bool | None = True
    equal_to_last = set[str]()
    for text in others:
        agree = comparisons.equal(texts[-1], text, budget)
        if not agree:
            break
        equal_to_last.add(text)
    distinct = [text for text in others if text not in equal_to_last] + texts[-1:]
    problem = issue_of(reply, distinct if agree is False else texts[-1:])
    shown = " | ".join(distinct[-_MOST_SHOWN:]) or None
    if problem is not None:
        return Verdict(False, right, shown, problem)
    if right is None or (right and agree is None):
        return Verdict(None, right, shown, "not_graded")
    return Verdict(bool(right), right, shown, None)
