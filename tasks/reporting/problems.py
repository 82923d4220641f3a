"""Select problems whose verdict a stage changed, with the replies after every stage, for reading side by side.

The selection is not by hand: of the problems that became right at a stage, the prompt with the smallest digest.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from nautile.common.text import visible
from nautile.evals.running.rows import SampleRow
from nautile.evals.tables.ladder import Ladder, RowsByStage, common_problems

LONGEST_PROMPT, LONGEST_REASONING, LONGEST_ANSWER = 1200, 800, 400  # characters


def changed_problems(ladder: Ladder, rows: RowsByStage) -> list[dict[str, Any]]:
    """At most one problem per stage that could be compared: one that became right, else one that became wrong.

    None for a stage at which no verdict changed. `of`: the number of problems that changed in the same way.
    """
    names = [stage["stage"] for stage in ladder["stages"]]
    problems: list[dict[str, Any]] = []
    for entry in ladder["stages"]:
        # The comparison of the ladder is repeated, because the ladder has only its counts.
        comparison = common_problems(rows[entry["over"]], rows[entry["stage"]]) if entry["test"] else None
        changed = comparison["changed"] if comparison else []
        changed = [row for row in changed if row["benchmark"] == ladder["benchmark"]]
        # A problem is shown once, even if its verdict changed at several stages.
        used_problems = {(problem["index"], problem["prompt"]) for problem in problems}
        for change, words in (("gained", "became right"), ("lost", "became wrong")):
            candidates = [row for row in changed if row["change"] == change]
            unused = [
                row for row in candidates if (row["index"], visible(row["prompt"], LONGEST_PROMPT)) not in used_problems
            ]
            if unused:
                chosen = min(unused, key=lambda row: hashlib.sha256(row["prompt"].encode(errors="replace")).digest())
                facts = {"stage": entry["stage"], "change": words, "of": len(candidates)}
                problems.append(_with_replies(chosen, names, rows) | facts)
                break
    return problems


def _with_replies(chosen: Mapping[str, Any], names: Sequence[str], rows: RowsByStage) -> dict[str, Any]:
    """The problem of a changed row with the replies after every stage."""
    fields = ("benchmark", "index", "prompt")
    row_by_stage = {
        stage: row
        for stage, stage_rows in rows.items()
        for row in stage_rows
        if all(row[field] == chosen[field] for field in fields)
    }
    return {
        "id": chosen["id"],
        "index": chosen["index"],
        "prompt": visible(chosen["prompt"], LONGEST_PROMPT),
        "expected": visible(chosen["expected"], LONGEST_ANSWER),
        "replies": [_reply(name, row_by_stage.get(name)) for name in names],
    }


def _reply(stage: str, row: SampleRow | None) -> dict[str, Any]:
    """A reply for display; `good` is None if the problem was not asked, or its reply could not be graded."""
    if row is None or row["left_out"] is not None:
        verdict = "not evaluated" if row is None else row["left_out"].replace("_", " ")
        if row is not None and row.get("output") is None:
            verdict = f"not asked ({verdict})"
        return {"name": stage, "good": None, "verdict": verdict, "reasoning": "", "answer": ""}
    problem = f" ({row['problem'].replace('_', ' ')})" if row["problem"] else ""
    return {
        "name": stage,
        "good": bool(row["strict"]),
        "verdict": "right" if row["strict"] else f"wrong{problem}",
        "reasoning": visible(row["reasoning"] or "", LONGEST_REASONING).strip() or "(none)",
        "answer": visible(row["answer"] or "", LONGEST_ANSWER).strip() or "(none)",
    }
