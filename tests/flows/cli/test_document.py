"""docs/commands.md is that of the code, and what `--json` prints keeps the fields of its version."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from nautile.flows.cli.document import OUTPUTS, VERSION, document, schema_of
from nautile.flows.operate import questions
from nautile.flows.operate.reconcile import Reconciled
from nautile.flows.sweep.comparisons import compare_evaluations
from nautile.flows.uses import COMMANDS
from nautile.store.artifacts import Store
from tests.support.samples.evaluations import checkpoint, evaluation

PAGE = Path(__file__).parents[3] / "docs" / "commands.md"
FROZEN = Path(__file__).parent / f"json_{VERSION}.json"  # the schemas of a version, as it was first documented


@pytest.mark.skipif(not COMMANDS, reason="the page has the commands of the uses")
def test_the_page_of_commands_is_current():
    assert PAGE.read_text(encoding="utf-8") == document(), "python -m nautile.flows.cli.document > docs/commands.md"


def lost(old: Any, new: Any, path: str) -> list[str]:
    """What an older schema promises and a newer one does not; descriptions do not count."""
    if isinstance(old, dict) and isinstance(new, dict):
        names = old.keys() - {"description"}
        return [gone for name in sorted(names) for gone in lost(old[name], new.get(name), f"{path}.{name}")]
    if path.endswith(".required") and isinstance(old, list):
        return [f"{path}: {name}" for name in old if name not in (new or ())]
    return [] if old == new else [path]


def test_within_a_version_fields_are_only_added():
    old = json.loads(FROZEN.read_text(encoding="utf-8"))
    new = {name: schema_of(output) for name, output in OUTPUTS.items()}
    assert lost(old, new, "") == [], "raise nautile.flows.cli.terminal.JSON_VERSION, and freeze the new schemas"


def test_a_field_that_is_gone_or_of_another_type_is_noticed():
    before = {"properties": {"id": {"type": "string"}, "n": {"type": "integer"}}, "required": ["id", "n"]}
    after = {"properties": {"id": {"type": "string"}, "n": {"type": "number"}, "m": {}}, "required": ["id"]}
    assert lost(before, after, "row") == ["row.properties.n.type", "row.required: n"]


def test_a_comparison_an_approval_and_a_cleanup_have_their_documented_fields(toy, store, monkeypatch):
    ids = [
        evaluation(store, toy, checkpoint(store, name), lambda item, n=n: item.index < n).id
        for name, n in (("good", 30), ("bad", 9))
    ]
    rows = {
        "compare": compare_evaluations(store, *ids, "strict", "generate"),
        "approve RUN": {"run": "r", "api": None, "label": "", "message": ""},
        "reconcile": [Reconciled("stage", "pretrain", "marked interrupted").row()],
    }
    for name, value in rows.items():
        TypeAdapter(OUTPUTS[name]).validate_json(json.dumps(value, default=str), strict=True)
    with pytest.raises(ValidationError, match="extra_forbidden"):
        TypeAdapter(OUTPUTS["reconcile"]).validate_python([{**rows["reconcile"][0], "more": 1}])
    assert questions.waiting(Store(store.root)) == []
