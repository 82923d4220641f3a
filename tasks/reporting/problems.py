"""Problems whose verdict a stage changed, with the replies after every stage, to be read side by side.

They are not picked by hand: of the problems that became right at a stage, the one whose prompt has the smallest digest.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from common.text import visible
from evals.running.rows import SampleRow
from evals.tables.ladder import Ladder, RowsByStage, common_problems

LONGEST_PROMPT, LONGEST_REASONING, LONGEST_ANSWER = 1200, 800, 400  # characters


def changed_problems(ladder: Ladder, rows: RowsByStage) -> list[dict[str, Any]]:
    """At most one problem for each stage that could be compared: one that became right there, else one that became
    wrong, none where no verdict changed. `of`: how many changed in that way.
    """
    names = [stage["stage"] for stage in ladder["stages"]]
    shown: list[dict[str, Any]] = []
    for entry in ladder["stages"]:
        # What the ladder tested is compared again: it keeps the counts and not the problems.
        comparison = common_problems(rows[entry["over"]], rows[entry["stage"]]) if entry["test"] else None
        changed = comparison["changed"] if comparison else []
        changed = [row for row in changed if row["benchmark"] == ladder["benchmark"]]
        taken = {(problem["index"], problem["prompt"]) for problem in shown}
        for change, words in (("gained", "became right"), ("lost", "became wrong")):
            alike = [row for row in changed if row["change"] == change]
            free = [row for row in alike if (row["index"], visible(row["prompt"], LONGEST_PROMPT)) not in taken]
            if free:
                chosen = min(free, key=lambda row: hashlib.sha256(row["prompt"].encode(errors="replace")).digest())
                shown.append(_shown(chosen, names, rows) | {"stage": entry["stage"], "change": words, "of": len(alike)})
                break
    return shown


def _shown(chosen: Mapping[str, Any], names: Sequence[str], rows: RowsByStage) -> dict[str, Any]:
    """The problem of a changed row with the replies after every stage."""
    same = ("benchmark", "index", "prompt")
    asked = {
        stage: row for stage, of_stage in rows.items() for row in of_stage if all(row[n] == chosen[n] for n in same)
    }
    return {
        "id": chosen["id"],
        "index": chosen["index"],
        "prompt": visible(chosen["prompt"], LONGEST_PROMPT),
        "expected": visible(chosen["expected"], LONGEST_ANSWER),
        "replies": [_reply(name, asked.get(name)) for name in names],
    }


def _reply(stage: str, row: SampleRow | None) -> dict[str, Any]:
    """A reply to be shown; `good` is None where the problem was not asked."""
    if row is None or row["left_out"] is not None:
        verdict = "not evaluated" if row is None else f"not asked ({row['left_out'].replace('_', ' ')})"
        return {"name": stage, "good": None, "verdict": verdict, "reasoning": "", "answer": ""}
    problem = f" ({row['problem'].replace('_', ' ')})" if row["problem"] else ""
    return {
        "name": stage,
        "good": bool(row["strict"]),
        "verdict": "right" if row["strict"] else f"wrong{problem}",
        "reasoning": visible(row["reasoning"] or "", LONGEST_REASONING).strip() or "(none)",
        "answer": visible(row["answer"] or "", LONGEST_ANSWER).strip() or "(none)",
    }
