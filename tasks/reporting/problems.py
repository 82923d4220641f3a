"""Problems whose verdict a stage changed, with the replies after every stage, to be read side by side.

They are not picked by hand: of the problems that became right at a stage, the one whose prompt has the smallest digest.
"""

import hashlib
from typing import Any

from common.text import visible
from evals.running.rows import SampleRow
from evals.tables.ladder import Ladder, RowsByStage, common_problems

LONGEST_PROMPT, LONGEST_REASONING, LONGEST_ANSWER = 1200, 800, 400  # characters


def changed_problems(ladder: Ladder, rows: RowsByStage) -> list[dict[str, Any]]:
    """At most one problem for each stage that could be compared: one that became right there, else one that became
    wrong, none where no verdict changed. `of`: how many changed in that way.
    """
    shown: list[dict[str, Any]] = []
    taken: set[tuple[int, str]] = set()
    for entry in ladder["stages"]:
        if not entry["test"]:
            continue
        comparison = common_problems(rows[entry["over"]], rows[entry["stage"]])
        changed = (
            [row for row in comparison["changed"] if row["benchmark"] == ladder["benchmark"]] if comparison else []
        )
        for change, words in (("gained", "became right"), ("lost", "became wrong")):
            alike = [row for row in changed if row["change"] == change]
            free = [row for row in alike if (row["index"], row["prompt"]) not in taken]
            if free:
                chosen = min(free, key=lambda row: hashlib.sha256(row["prompt"].encode(errors="replace")).digest())
                taken.add((chosen["index"], chosen["prompt"]))
                about = {"stage": entry["stage"], "change": words, "of": len(alike), "id": chosen["id"]}
                about["prompt"] = visible(chosen["prompt"], LONGEST_PROMPT)
                about["expected"] = visible(chosen["expected"], LONGEST_ANSWER)
                names = [stage["stage"] for stage in ladder["stages"]]
                asked = {
                    stage: row
                    for stage, of_stage in rows.items()
                    for row in of_stage
                    if all(row[name] == chosen[name] for name in ("benchmark", "index", "prompt"))
                }
                names = [stage["stage"] for stage in ladder["stages"]]
                about["replies"] = [_reply(name, asked.get(name)) for name in names]
                shown.append(about)
                break
    return shown


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
