"""Problems from a file of one's own: JSON lines of `question` and `answer`, and perhaps `task` and `rationale`.

The answer is checked by the graders of the evaluation, so numbers, fractions and expressions count by their value. A
hash of the question sets guard and held-out problems apart from those of training, as for generated ones.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from configs.reinforcement import ProblemsConfig
from configs.section import ConfigError
from data.reasoning import Problem, Split, split_of


def from_file(config: ProblemsConfig, seed: int, split: Split) -> Iterator[Problem]:
    """The distinct problems of one split, in the file's order. Raises `ConfigError` naming the line at fault."""
    if not config.path:
        raise ConfigError("problems.path: source 'jsonl' needs the file to read")
    path, seen = Path(config.path), set[str]()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"problems.path: {path} cannot be read ({error})") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        problem = _problem(path, number, line)
        if problem.question not in seen and split_of(problem.question) == split:
            seen.add(problem.question)
            yield problem


def _problem(path: Path, number: int, line: str) -> Problem:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}:{number}: not a line of JSON ({error})") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{path}:{number}: not an object with `question` and `answer`")
    texts = {name: row.get(name, default) for name, default in _FIELDS.items()}
    for name, text in texts.items():
        if isinstance(text, int | float) and not isinstance(text, bool) and name == "answer":
            text = texts[name] = str(text)
        if not isinstance(text, str):
            raise ConfigError(f"{path}:{number}: `{name}` is {text!r}, and must be text")
    for name in ("question", "answer"):
        if not texts[name].strip():
            raise ConfigError(f"{path}:{number}: no `{name}`: a problem needs a question and an answer to check")
    return Problem(texts["task"], number - 1, texts["question"].strip(), texts["answer"].strip(), texts["rationale"])


_FIELDS = {"question": "", "answer": "", "task": "file", "rationale": ""}
