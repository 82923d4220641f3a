"""Grade mathematical equivalence with math-verify, in a process that is killed when a comparison takes too long.

math-verify's own limits need the main thread's alarm, and sympy can loop where no limit of Python reaches. The
process is `python -m evals.graders.equivalence`: one JSON request per input line, one reply per output line; it
ends with its parent.
"""

import atexit
import json
import logging
import os
import re
import selectors
import subprocess
import sys
import threading
from functools import cache

from common.processes import die_with_parent
from data.chat_template import ParsedReply
from evals.graders import numbers
from evals.graders.answer_spans import answer_spans
from evals.graders.grading import Verdict, issue_of

logger = logging.getLogger(__name__)
START_S = 120.0  # importing sympy on a busy machine
_SEGMENT = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_NOISE = re.compile(r"\\left|\\right|\\[!,;: ]|\$|\s|\\text(?=\{)|\\mathrm(?=\{)|(?<=[0-9])\.0+(?![0-9])")
_OPEN_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_MAX_LENGTH = 2000  # longer text is no answer, and parsing it takes the time


class Equivalence:
    """Compare mathematical answers, each comparison within `limit_s` seconds. Thread-safe."""

    def __init__(self, limit_s: float = 5.0) -> None:
        self.limit_s = limit_s
        self.timeouts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def equal(self, expected: str, given: str) -> bool:
        """Whether both are equivalent. False also when the comparison timed out or its process died: see `timeouts`."""
        if _canonical(expected) == _canonical(given):
            return True
        if max(len(expected), len(given)) > _MAX_LENGTH or not given.strip():
            return False
        with self._lock:
            verdict = self._ask({"expected": expected, "given": given})
        if verdict is None:
            self.timeouts += 1
            logger.warning("no verdict within %.1f s on %r against %r", self.limit_s, given[:80], expected[:80])
        return bool(verdict)

    def parses(self, expected: str) -> bool:
        """Whether `expected` is an expression that can be compared by value. False also after a time-out."""
        with self._lock:
            verdict = self._ask({"expected": expected})
        if verdict is None:
            self.timeouts += 1
        return bool(verdict)

    def close(self) -> None:
        """Kill the process; the next comparison starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()

    def _ask(self, request: dict[str, str]) -> bool | None:
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None and not self._start():
            return None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            self.close()
            return None
        line = self._line(self.limit_s)
        if line is None:
            self.close()
            return None
        return bool(json.loads(line))

    def _start(self) -> bool:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "evals.graders.equivalence", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
        )
        if self._line(START_S) is None:
            self.close()
            return False
        return True

    def _line(self, limit_s: float) -> bytes | None:
        """Read the next line; None on time-out or end of file. Replies are a few bytes, so one read gets all."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(limit_s):
                return None
        return self._process.stdout.readline() or None


@cache
def shared() -> Equivalence:
    """The process-wide instance, closed at exit."""
    instance = Equivalence()
    atexit.register(instance.close)
    return instance


def grade_math(reply: ParsedReply, expected: str, equivalence: Equivalence | None = None) -> Verdict:
    r"""Grade a mathematical answer.

    Strict: the answer spans (`\boxed{}`, …), else the `$…$` segments, else the whole answer, agree on one value.
    Lenient: the last of them is equivalent to `expected`; without an answer, that of the reasoning.
    """
    same = (equivalence or shared()).equal
    answered: list[str] = []
    for span in _stated(reply.answer or "")[:8]:
        if not any(same(other, span) for other in answered):
            answered.append(span)
    fallback = answered or _stated(reply.reasoning)
    problem = issue_of(reply, answered)
    lenient = bool(fallback) and same(expected, fallback[-1])
    return Verdict(problem is None and lenient, lenient, " | ".join(answered) or None, problem)


def _stated(text: str) -> list[str]:
    spans = answer_spans(text)
    if spans:
        inner = [_SEGMENT.search(span) for span in spans]
        return [_group(m) if m else span for m, span in zip(inner, spans, strict=True)]
    if _OPEN_BOX.search(text):  # cut inside its box: the content may be the beginning of something else
        return []
    segments = [_group(match) for match in _SEGMENT.finditer(text)]
    if segments:
        return segments
    return [part for part in re.split(r"\bor\b|\n", text.strip()) if part.strip()]


def _group(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None).strip()


def _canonical(text: str) -> str:
    text = _NOISE.sub("", text.strip().rstrip(".")).replace("dfrac", "frac").replace("tfrac", "frac")
    text = re.sub(r"\\(?:boxed|fbox)\{(.*)\}", r"\1", text).strip("{} ")
    text = re.sub(r"^\(([A-Z])\)$", r"\1", text)
    text = text.casefold() if len(text) > 1 and text.isalpha() else text  # words, not variable names
    number = numbers.parse_number(text) if re.fullmatch(r"-?[0-9][0-9,./]*", text) else None
    return str(number) if number else text


def _serve() -> None:
    """Main loop of the process: answer requests until the input ends."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    # Libraries that print must not write into the replies.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    die_with_parent(int(sys.argv[1]))
    from math_verify import parse, verify

    def read(text: str, fallback: str = "first_match") -> list[object]:
        text = text.strip().strip("$")
        return parse(f"${text}$", parsing_timeout=None, raise_on_error=False, fallback_mode=fallback)

    replies.write("ready\n")
    for line in sys.stdin:
        request = json.loads(line)
        if "given" not in request:  # a text that is no expression is not taken for itself here
            replies.write(json.dumps(bool(read(request["expected"], "no_fallback"))) + "\n")
            continue
        gold, given = read(request["expected"]), read(request["given"])
        replies.write(json.dumps(bool(gold and given and verify(gold, given, timeout_seconds=None))) + "\n")


if __name__ == "__main__":
    _serve()
