"""The versions of parsers and graders, and the source that they stand for."""

import ast
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

import nautile.evals
from nautile.evals.benchmarks.registry import BENCHMARKS
from nautile.evals.benchmarks.stand_ins import HELD_OUT
from nautile.evals.benchmarks.versions import GRADERS, versions

KNOWN = Path(__file__).with_name("sources.json")
FOLDER = Path(nautile.evals.__file__).parent
FILES = ["benchmarks/catalogue.py", "benchmarks/items.py", "benchmarks/schemas.py", "benchmarks/stand_ins.py"]


def shape(node: Any) -> Any:
    """The code of a syntax tree without comments and docstrings, in any version of Python."""
    if isinstance(node, list):
        return [
            shape(part) for part in node if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))
        ]
    if isinstance(node, ast.AST):
        fields = {
            name: shape(value) for name, value in ast.iter_fields(node) if name not in ("version", "type_comment")
        }
        return [type(node).__name__, {name: value for name, value in fields.items() if value not in (None, [])}]
    return repr(node)


def sources() -> dict[str, str]:
    files = [*FILES, *sorted(path.relative_to(FOLDER).as_posix() for path in (FOLDER / "graders").glob("*.py"))]
    trees = {name: shape(ast.parse((FOLDER / name).read_text(encoding="utf-8"))) for name in files}
    return {name: hashlib.sha256(json.dumps(tree).encode()).hexdigest()[:16] for name, tree in trees.items()}


def test_parsers_and_graders_are_those_that_their_versions_stand_for():
    """Raise the versions of those whose questions or verdicts change, so that they are evaluated again; then write
    the digests: `python -m tests.evals.benchmarks.test_versions`."""
    assert sources() == json.loads(KNOWN.read_text(encoding="utf-8"))


def test_a_benchmark_has_the_versions_of_its_parser_and_of_its_graders():
    assert versions(["arc", "gsm8k"]) == {
        "arc_easy": {"questions": 1, "choice": 2},
        "arc_challenge": {"questions": 1, "choice": 2},
        "gsm8k": {"questions": 1, "number": 3},
    }
    assert versions(["no such benchmark"]) == {}
    assert versions([HELD_OUT])[HELD_OUT].keys() == {"questions", "number", "math", "choice", "text"}


def test_every_answer_kind_has_a_grader_with_a_version():
    used = {kind for kinds in versions(BENCHMARKS).values() for kind in kinds}
    assert used == {"questions", *GRADERS}


@pytest.mark.parametrize("name", ["wiki_choice", "wiki_trivia", "instructions"])
def test_a_stand_in_declares_the_kinds_of_its_answers(name):
    assert {item.kind for item in BENCHMARKS[name].build(0, 3)} == {BENCHMARKS[name].kind}


if __name__ == "__main__":
    KNOWN.write_text(json.dumps(sources(), indent=1) + "\n", encoding="utf-8")
