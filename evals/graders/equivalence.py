"""Grade mathematical equivalence with math-verify, in a process that is killed when a comparison takes too long.

math-verify's own time limit needs SIGALRM and so the main thread, and sympy can loop where no Python code can interrupt
it. The process is `python -m evals.graders.equivalence`: one JSON request per input line, one reply per output line. It
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
# What does not change a value. A space between digits does ("3 1/2" is not 31/2), unless it groups them ("1 000").
_NOISE = re.compile(
    r"\\left|\\right|\\[!,;:]|\$|(?<![0-9]) | (?![0-9])| (?=[0-9]{3}(?![0-9]))"
    r"|\\text(?=\{)|\\mathrm(?=\{)|(?<=[0-9])\.0+(?![0-9])"
)
_OPEN_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_MAX_LENGTH = 2000  # a longer text is not an answer, and parsing it would take long


class Equivalence:
    """Compare mathematical answers, each comparison within `limit_s` seconds. Thread-safe."""

    def __init__(self, limit_s: float = 5.0) -> None:
        self.limit_s = limit_s
        self.timeouts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def equal(self, expected: str, answer: str) -> bool:
        """Whether both are equivalent. Also False if the comparison timed out or its process died: see `timeouts`."""
        if _canonical(expected) == _canonical(answer):
            return True
        if max(len(expected), len(answer)) > _MAX_LENGTH or not answer.strip():
            return False
        with self._lock:
            verdict = self._ask({"expected": expected, "given": answer})
        if verdict is None:
            self.timeouts += 1
            logger.warning("no verdict within %.1f s on %r against %r", self.limit_s, answer[:80], expected[:80])
        return bool(verdict)

    def parses(self, expected: str) -> bool:
        """Whether `expected` is an expression that can be compared by value. Also False after a time-out."""
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
            assert process.stdin is not None  # both are pipes, see `_start`
            assert process.stdout is not None
            process.stdin.close()
            process.stdout.close()

    def _ask(self, request: dict[str, str]) -> bool | None:
        """Send a request to the process, started if need be; None if it did not reply in time and was killed."""
        if self._process is not None and self._process.poll() is not None:
            self.close()
        process = self._process or self._start()
        if process is None:
            return None
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        except OSError:
            self.close()
            return None
        line = self._line(process, self.limit_s)
        if line is None:  # killing the process is the only way to stop a comparison that takes too long
            self.close()
            return None
        return bool(json.loads(line))

    def _start(self) -> subprocess.Popen[bytes] | None:
        process = self._process = subprocess.Popen(
            [sys.executable, "-m", "evals.graders.equivalence", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
        )
        if self._line(process, START_S) is None:
            self.close()
            return None
        return process

    def _line(self, process: subprocess.Popen[bytes], limit_s: float) -> bytes | None:
        """Read the next line; None on time-out or end of file. Replies are a few bytes, so they arrive at once."""
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(limit_s):
                return None
        return process.stdout.readline() or None


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
    are_equal = (equivalence or shared()).equal
    candidates: list[str] = []
    # Each new candidate is compared with all before it, so their number is bounded.
    for span in _candidate_texts(reply.answer or "")[:8]:
        if not any(are_equal(candidate, span) for candidate in candidates):
            candidates.append(span)
    fallback = candidates or _candidate_texts(reply.reasoning)
    problem = issue_of(reply, candidates)
    lenient = bool(fallback) and are_equal(expected, fallback[-1])
    return Verdict(problem is None and lenient, lenient, " | ".join(candidates) or None, problem)


def _candidate_texts(text: str) -> list[str]:
    """The texts that may be the answer: answer spans, else `$…$` segments, else lines and alternatives ("or")."""
    spans = answer_spans(text)
    if spans:  # a formula inside a span without the words around it
        inner = [_SEGMENT.search(span) for span in spans]
        return [_group(m) if m else span for m, span in zip(inner, spans, strict=True)]
    if _OPEN_BOX.search(text):  # truncated inside a box: the content is incomplete
        return []
    segments = [_group(match) for match in _SEGMENT.finditer(text)]
    if segments:
        return segments
    return [part for part in re.split(r"\bor\b|\n", text.strip()) if part.strip()]


def _group(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None).strip()


def _canonical(text: str) -> str:
    """A form in which most equivalent answers are equal texts, so that math-verify is needed less often."""
    text = " ".join(text.replace("\\ ", " ").strip().rstrip(".").split())
    text = _NOISE.sub("", text).replace("dfrac", "frac").replace("tfrac", "frac")
    text = re.sub(r"\\(?:boxed|fbox)\{(.*)\}", r"\1", text).strip("{} ")
    # The letter of an option: "(C)" is C.
    text = re.sub(r"^\(([A-Z])\)$", r"\1", text)
    text = text.casefold() if len(text) > 1 and text.isalpha() else text  # words, not variable names
    number = numbers.parse_number(text) if re.fullmatch(r"-?[0-9][0-9,./]*", text) else None
    return str(number) if number else text


def _serve() -> None:
    """Main loop of the process: reply to requests until the input ends."""
    # A private copy of standard output, before everything else is turned away from it.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    # Libraries that print must not write between the replies.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    die_with_parent(int(sys.argv[1]))
    from math_verify import parse, verify

    def read(text: str, fallback: str = "first_match") -> list[object]:
        text = text.strip().strip("$")
        return parse(f"${text}$", parsing_timeout=None, raise_on_error=False, fallback_mode=fallback)

    replies.write("ready\n")
    for line in sys.stdin:
        request = json.loads(line)
        if "given" not in request:  # `parses`; without the fallback a text that is not an expression parses as nothing
            replies.write(json.dumps(bool(read(request["expected"], "no_fallback"))) + "\n")
            continue
        # Without math-verify's own time limits, which need the main thread: whoever asks kills this process instead.
        gold, answer = read(request["expected"]), read(request["given"])
        replies.write(json.dumps(bool(gold and answer and verify(gold, answer, timeout_seconds=None))) + "\n")


if __name__ == "__main__":
    _serve()
