"""The glossary of metrics: every name that the code reports is in it, and its table is read whole."""

import ast
from pathlib import Path

import pytest

from nautile.common.metrics import GLOSSARY, metric

ROOT = Path(__file__).resolve().parents[2]
REPORTERS = ("data", "evals", "model", "rl", "tasks", "uses")


def literal_names():
    """The names in calls such as `emit("metric", name="loss", ...)`, and in `self._metric("loss", ...)`."""
    for package in REPORTERS:
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            for node in ast.walk(ast.parse(text)) if "metric" in text else ():
                if not isinstance(node, ast.Call):
                    continue
                first = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
                names = [keyword.value for keyword in node.keywords if keyword.arg == "name"]
                if first == "metric" and names and isinstance(names[0], ast.Constant):
                    yield str(names[0].value), path
                elif isinstance(node.func, ast.Attribute) and node.func.attr == "_metric" and first:
                    yield str(first), path


def test_every_metric_that_is_reported_by_name_is_in_the_glossary():
    names = dict(literal_names())
    assert {"loss", "guard_accuracy", "learning_rate"} <= names.keys()
    assert {name: str(path) for name, path in names.items() if not metric(name).what} == {}


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("rejected_too_short", "Rejected: too short"),
        ("tokenise_skipped", "Skipped: tokenise"),
        ("evaluate/held_out/accuracy_lenient", "Lenient accuracy on held out"),
        ("made_up", "made up"),
    ],
)
def test_a_family_of_metrics_is_named_by_its_member(name, title):
    assert metric(name).title == title


def test_schedules_and_validation_are_never_smoothed():
    assert not any(metric(name).smooth for name in ("learning_rate", "validation_loss", "validation_bits_per_byte"))
    assert metric("loss").smooth


def test_every_entry_of_the_table_is_read():
    assert all(entry.title and entry.what for section in GLOSSARY.values() for entry in section.values())
    lines = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").splitlines()
    assert sum(line.startswith("|") for line in lines) == sum(len(section) + 2 for section in GLOSSARY.values())
