"""Tables at the width of a usual terminal: none has letters under each other, and what is to be copied is whole."""

from io import StringIO
from types import SimpleNamespace

from rich.console import Console

from nautile.flows.cli.tables import lineage_tree, service_table, waiting_table
from nautile.flows.render import FittingTable, query_table


def shown(table, width=80):
    out = StringIO()
    Console(file=out, width=width).print(table, crop=False)
    return out.getvalue().splitlines()


def test_a_table_that_fits_stands_as_one_and_a_long_text_in_it_folds():
    lines = shown(query_table(["label", "state", "error"], [("reason", "failed", "no " * 40), ("align", "done", None)]))
    assert lines[0].split() == ["label", "state", "error"]
    assert lines[-1].split() == ["align", "done"]
    assert len(lines) == 4
    assert all(len(line) <= 80 for line in lines)


def test_a_wide_one_turns_sideways_with_every_value_in_one_piece():
    columns = [f"column{number}" for number in range(12)]
    rows = [tuple(f"value-{row}-{number}" for number in range(12)) for row in range(2)]
    lines = shown(query_table(columns, rows))
    assert len(lines) == 25  # a line each, and an empty one between the rows
    assert lines[0] == "column0   value-0-0"
    assert lines[13] == "column0   value-1-0"
    assert len(shown(query_table(columns, rows), width=200)) == 3
    assert len(shown(query_table(columns, []))) > 0


def test_the_columns_that_matter_least_are_left_out_before_a_table_turns():
    table = FittingTable("run", "state", "changes", least=("changes", "state"))
    table.add_row("a" * 30, "done", "steps 24 -> 4" * 9)
    assert shown(table, width=60)[0].split() == ["run", "state"]
    assert shown(table, width=60)[-1] == "too narrow for: changes (`--json` has them)"
    assert shown(table, width=34)[0].split() == ["run"]
    assert shown(table, width=100)[0].split() == ["run", "state", "changes"]


def test_paths_and_questions_are_not_broken():
    log = f"/{'folder/' * 20}logs/server.log"
    service = SimpleNamespace(name="server", url="http://127.0.0.1:4200/api", pid=12, log=log)
    assert f"log      {log}" in shown(service_table([service]))
    note = {"run": "11112222-3333", "label": "pretrain", "since": "2026-11-22T08:00:00+00:00", "message": "cost? " * 30}
    (question,) = [line for line in shown(waiting_table([note]), width=60) if line.startswith("question")]
    assert question.count("cost?") == 30


def lineage(edges, root):
    row = {"stage": "toy", "calls": 0, "cached_calls": 0, "files": {"a": {}}, "bytes": 8, "commit": None}
    row["configuration"] = "toy"
    return [row | {"id": root, "name": None, "made": None}] + [
        row | {"id": source, "name": "x", "made": target} for source, target in edges
    ]


def test_a_lineage_longer_than_the_stack_or_in_a_circle_is_a_tree():
    chain = [(f"tokens/{number + 1}", f"tokens/{number}") for number in range(3000)]
    lines = shown(lineage_tree(lineage(chain, "tokens/0")), width=1000)
    assert len(lines) == 102
    assert lines[-1].endswith("… (`--json` has all of it)")
    lines = shown(lineage_tree(lineage([("b", "a"), ("c", "b"), ("a", "c"), ("c", "a")], "a")))
    assert [" ".join(line.split()[1:]).lstrip("─ ") for line in lines[1:]] == [
        "b toy, read as x, 1 file, 8 B",
        "└── c toy, read as x, 1 file, 8 B",
        "└── a toy, read as x, as above",
        "c toy, read as x, as above",
    ]


def test_a_lineage_has_files_configuration_and_commit_and_an_input_with_two_names_once():
    commit = "0123456789abcdef0123-dirty"
    rows = [row | {"commit": commit} for row in lineage([("t", "a"), ("t", "a"), ("u", "a"), ("v", "u")], "a")]
    rows[2] |= {"name": "y"}
    rows[3] |= {"files": {"one": {}, "two": {}}, "configuration": "base"}
    rows[4] |= {"commit": "fedcba9876543210", "calls": 3}
    assert [line.lstrip("│├└─ ") for line in shown(lineage_tree(rows), width=200)] == [
        "a  toy, 1 file, 8 B, configuration toy, commit 0123456789ab-dirty",
        "t  toy, read as x and y, 1 file, 8 B",
        "u  toy, read as x, 2 files, 8 B, configuration base",
        "v  toy, read as x, 1 file, 8 B, 3 calls, configuration toy, commit fedcba987654",
    ]
