"""The `rescore` stage: stored rollouts under another reward, or a judge with another rubric, without sampling.

The rollouts are those of the artifact `rollouts`: every completion that a stage has sampled, with the groups that
carried no signal. Their replies are parsed from the sampled ids, as when they were sampled.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nautile.common.errors import ConfigError
from nautile.common.files import write_json, write_text
from nautile.common.text import markdown_table, markdown_text
from nautile.configs.rewards import DEFAULT_REWARD
from nautile.data.endpoints.own_server import stand_in_of
from nautile.data.endpoints.pool import EndpointPool
from nautile.data.tokenizer import tokenizer_for
from nautile.rl.judge import Judge
from nautile.rl.rewards import advantages, carries_signal
from nautile.tasks.engine.job import Job
from nautile.tasks.engine.stage import stage
from nautile.tasks.reinforce import AnswerScorer, JudgeScorer, rewarding
from nautile.uses.labelled.texts import write_rows
from nautile.uses.rescore.config import RescoreConfig

if TYPE_CHECKING:  # JAX takes seconds to import, and the command imports this file
    from nautile.rl.rollouts import Group

ROLLOUTS, ROWS, SUMMARY, CARD = "rollouts.jsonl", "rows.parquet", "summary.json", "card.md"
CHUNK = 64  # groups that are scored together, after which progress is shown
SIGNS = ("below", "at", "above")  # the mean of the group


@stage("rescore", version=1, outputs=("rescored",))
def rescore(job: Job) -> None:
    """Score every stored rollout again; publish a row for each, and what the new rewards change."""
    from nautile.model.weights.files import CONFIG, read_config
    from nautile.rl.rollouts import Group

    config = job.part("rescore", RescoreConfig)
    _, tokenizer = read_config(job.inputs["checkpoint"] / CONFIG)
    log = job.inputs["rollouts"] / ROLLOUTS
    total = sum(1 for _ in groups_of(log, config.group))  # before anybody is asked, so that all of it can be read
    rows: list[dict[str, Any]] = []
    facts: dict[str, Any] = {"reward": config.reward}
    with ExitStack() as stack:
        scorer: AnswerScorer | JudgeScorer
        if config.judge is not None:
            pool = stack.enter_context(EndpointPool(job.endpoints, job.reply_source, job.emit, config.budget_dollars))
            pool.check()
            judge = Judge(pool, config.judge)
            facts |= {"reward": "judge", "judge": judge.facts()}
            scorer = JudgeScorer(judge, config.judge, config.max_tokens)
        else:
            scorer = AnswerScorer(stack.enter_context(rewarding(job, config.reward or DEFAULT_REWARD)))
        chunk: list[tuple[Group, list[dict[str, Any]]]] = []
        for number, stored in enumerate(groups_of(log, config.group), 1):
            chunk.append((Group.of_rows(number - 1, stored, tokenizer_for(tokenizer)), stored))
            if len(chunk) == CHUNK or number == total:
                scorer.score([group for group, _ in chunk])
                rows += [row for group, stored in chunk for row in rescored_rows(group, stored, config)]
                chunk = []
                note = f"${pool.spent:.4f}" if config.judge is not None else ""
                job.emit("progress", done=number, total=total, unit="groups", note=note)
        if config.judge is not None:
            facts |= {"dollars": round(pool.spent, 6), "dollars_unknown": round(pool.unknown, 6)}
            endpoint = pool.config(config.judge.endpoint)
            facts["stand_in"] = stand_in_of(endpoint.kind, endpoint.model) if endpoint.stand_in else None
    summary = summary_of(rows) | facts
    out = job.output("rescored")
    write_rows(out / ROWS, rows)
    write_json(out / SUMMARY, summary)
    write_text(out / CARD, card(summary))
    job.describe("rescored", **summary)


def groups_of(log: Path, size: int) -> Iterator[list[dict[str, Any]]]:
    """The rows of each group of `size` rollouts, in the order of the log. Raises `ConfigError` for another log."""
    rows: list[dict[str, Any]] = []
    with log.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                rows.append(json.loads(line))
                same = (rows[-1]["question"], rows[-1]["step"]) == (rows[0]["question"], rows[0]["step"])
            except (ValueError, LookupError, TypeError) as error:
                raise ConfigError(f"{log}:{number}: not a stored rollout ({type(error).__name__}: {error})") from None
            if not same:
                raise ConfigError(f"{log}:{number}: a group of {size} rollouts has several questions")
            if len(rows) == size:
                yield rows
                rows = []
    if rows:
        raise ConfigError(f"{log}: its last group has {len(rows)} rollouts, and not {size}")


def rescored_rows(group: "Group", stored: Sequence[dict[str, Any]], config: RescoreConfig) -> list[dict[str, Any]]:
    """A row for each rollout of a group that was scored again: the reward and advantage of before, and now."""
    rewards = [rollout.reward for rollout in group.rollouts]
    return [
        {
            "step": row["step"],
            "group": group.position,
            "member": member,
            "task": row["task"],
            "question": row["question"],
            "text": row["text"],
            "old_reward": row["reward"],
            "new_reward": reward,
            "old_advantage": row["advantage"],
            "new_advantage": advantage,
            "old_parts": json.dumps(row["parts"], ensure_ascii=False),
            "new_parts": json.dumps(rollout.parts, ensure_ascii=False),
            "whole": "problem" in row,
        }
        for member, (row, rollout, reward, advantage) in enumerate(
            zip(stored, group.rollouts, rewards, advantages(rewards, config.advantage), strict=True)
        )
    ]


def summary_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the new rewards change, as JSON data.

    `agree`: rollouts with the same reward to 1e-9, of those with both. `correlation`: Pearson's and Spearman's over the
    same, None where one of the two rewards is constant. `signs`: rollouts by the sign of their advantage before and
    now. A group is live if a rollout of it has an advantage that is not zero.
    """
    from scipy.stats import pearsonr, spearmanr

    both = [
        (row["old_reward"], row["new_reward"]) for row in rows if None not in (row["old_reward"], row["new_reward"])
    ]
    old, new = [pair[0] for pair in both], [pair[1] for pair in both]
    varies = len(set(old)) > 1 and len(set(new)) > 1
    signs = Counter(
        (_sign(row["old_advantage"]), _sign(row["new_advantage"]))
        for row in rows
        if None not in (row["old_advantage"], row["new_advantage"])
    )
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    live = {
        when: {
            group for group, members in groups.items() if carries_signal([row[f"{when}_advantage"] for row in members])
        }
        for when in ("old", "new")
    }
    changed = sum(count for (before, now), count in signs.items() if before != now)
    return {
        "rollouts": len(rows),
        "groups": len(groups),
        "missing_old": sum(row["old_reward"] is None for row in rows),
        "missing_new": sum(row["new_reward"] is None for row in rows),
        "both": len(both),
        "mean_old": sum(old) / len(old) if both else None,
        "mean_new": sum(new) / len(new) if both else None,
        "agree": sum(math.isclose(a, b, rel_tol=0.0, abs_tol=1e-9) for a, b in both),
        "correlation": {
            "pearson": float(pearsonr(old, new).statistic) if varies else None,
            "spearman": float(spearmanr(old, new).statistic) if varies else None,
        },
        "signs": {before: {now: signs[before, now] for now in SIGNS} for before in SIGNS},
        "signs_changed": changed,
        "signs_compared": signs.total(),
        "live_old": len(live["old"]),
        "live_new": len(live["new"]),
        "live_both": len(live["old"] & live["new"]),
        "without_problem": sum(not row["whole"] for row in rows),
    }


def _sign(advantage: float) -> str:
    return SIGNS[(advantage > 0) - (advantage < 0) + 1]


def card(summary: dict[str, Any]) -> str:
    """The summary as Markdown."""

    def share(count: int, of: int) -> str:
        return f"{count:,} of {of:,}" + (f" ({100 * count / of:.1f} %)" if of else "")

    def number(value: float | None) -> str:
        return "unknown" if value is None else f"{value:.3f}"

    by = summary["reward"]
    if judge := summary.get("judge"):
        by = f"the judge {judge['model']} with the rubric {judge['rubric']}"
        by += f" (a stand-in: {summary['stand_in']})" if summary["stand_in"] else ""
    rollouts, groups, correlation = summary["rollouts"], summary["groups"], summary["correlation"]
    rows: list[tuple[str, str]] = [
        ("rollouts, groups", f"{rollouts:,}, {groups:,}"),
        ("no reward before", share(summary["missing_old"], rollouts)),
        ("no reward now", share(summary["missing_new"], rollouts)),
        ("mean reward before, now", f"{number(summary['mean_old'])}, {number(summary['mean_new'])}"),
        ("the same reward, of those with both", share(summary["agree"], summary["both"])),
        ("correlation (Pearson, Spearman)", ", ".join(map(number, correlation.values()))),
        ("advantages of another sign", share(summary["signs_changed"], summary["signs_compared"])),
        ("groups with a signal before", share(summary["live_old"], groups)),
        ("groups with a signal now", share(summary["live_new"], groups)),
        ("groups with a signal before and now", share(summary["live_both"], groups)),
    ]
    if "dollars" in summary:
        rows.append(("paid", f"${summary['dollars']:.4f}"))
    parts = [
        f"# Rollouts scored again by {markdown_text(by)}",
        markdown_table(("", ""), rows),
        "Rollouts by the sign of their advantage, that is by where they are to the mean of their group:",
        markdown_table(("before / now", *SIGNS), [(before, *summary["signs"][before].values()) for before in SIGNS]),
    ]
    if summary["without_problem"]:
        parts.append(
            f"{summary['without_problem']:,} rollouts were stored by an earlier version, without the kind, the options "
            "and the solution of their problem: the kind of their answer is guessed from its form."
        )
    return "\n\n".join(parts) + "\n"
