"""The `questions` artifact: every held-out question as a line of `questions.jsonl`, and what reads it.

Whatever may be trained on is screened against these: each source, the distilled documents, the problems to reinforce.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from configs.section import ConfigError
from data.decontaminate import Contamination, HeldOut
from data.shards import write_atomically

QUESTIONS = "questions.jsonl"


def write_questions(folder: Path, questions: Iterable[HeldOut]) -> None:
    """Write the artifact's file, a question a line, in the order given."""
    lines = [json.dumps(asdict(question), sort_keys=True, ensure_ascii=False) + "\n" for question in questions]
    write_atomically(folder / QUESTIONS, "".join(lines).encode("utf-8", "replace"))


def read_questions(folder: Path) -> list[HeldOut]:
    """The questions of an artifact. Raises `ConfigError` naming the line that is not one."""
    path = folder / QUESTIONS
    try:
        lines = path.read_bytes().decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"questions artifact {path}: cannot be read ({error}); make it again: {_AGAIN}") from None
    questions = []
    for number, line in enumerate(lines, 1):
        try:
            if line:
                questions.append(HeldOut(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"questions artifact {path}: line {number} is no question ({error}); {_AGAIN}") from None
    return questions


def contamination_of(folder: Path | None) -> Contamination | None:
    """What screens texts against the questions of an artifact; None where there is none."""
    return None if folder is None else Contamination(read_questions(folder))


_AGAIN = "`nautile run --force --only held_out`"
