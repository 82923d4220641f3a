"""Problems that need the operator: a run that waits for an approval, a failure, a poor judge, a stage that
changed nothing, a nearly spent budget.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nautile.common.commands import shell_command
from nautile.common.text import dollars, visible
from nautile.flows.dashboard import queries, shared
from nautile.flows.dashboard.shared import ChosenRun
from nautile.flows.operate.notifications import NEAR_BUDGET
from nautile.flows.run_state import RunState
from nautile.store.catalog import CatalogRow

POOR_JUDGE = 0.7  # share of pairs in which a judge prefers the right answer; 0.5 is chance


@dataclass(frozen=True)
class Concern:
    """A problem that needs the operator: its title, its text, and the command that helps."""

    level: Literal["error", "warning", "info"]
    title: str
    text: str = ""
    command: str = ""
    run: str = ""  # id of the run
    asks: bool = False  # whether the run waits for an approval


def queue() -> Iterator[Concern]:
    """The runs that wait in the server of `nautile up` for a process, as far as they have no record yet."""
    known, runs = shared.run_titles(), shared.queued_runs()
    if runs is None:
        yield Concern("info", "Runs that wait for a process are not known: the server of `nautile up` does not answer")
    if queued := [run for run in runs or () if run["id"] not in known]:
        lines = [f"{run['name']}, due at {run['since'][:16].replace('T', ' ')} UTC" for run in queued]
        title = f"{len(queued)} {'run waits' if len(queued) == 1 else 'runs wait'} in Prefect for a process"
        yield Concern("info", title, visible("\n".join(lines)), shell_command("nautile", "runs"))


def attention(chosen: ChosenRun) -> Iterator[Concern]:
    """The problems that need the operator, most urgent first: approvals of all runs, then those of the chosen run."""
    # Approvals of all runs, because a run that waits blocks until somebody answers, whichever run the reader has
    # chosen.
    for run, note in shared.questions().items():
        other = "" if run == chosen.run else f" (run {run[:8]}, another than this)"
        yield Concern(
            "warning",
            f"{note['label']} waits for your answer{other}",
            note["message"],
            shell_command("nautile", "approve", run[:8]),
            run,
            asks=True,
        )
    yield from queue()
    if state := chosen.state:
        yield from _ended_badly(state)
        yield from (
            Concern("info", f"{step.label} waits", step.note)
            for step in state.steps
            # What waits for an approval is above already, with its question.
            if step.state == "waiting" and not (state.question and state.question["label"] == step.label)
        )
        for what, spent, budget in budgets(chosen):
            if spent >= NEAR_BUDGET * budget:
                yield Concern(
                    "warning",
                    f"{what} has used {spent / budget:.0%} of its budget",
                    f"{dollars(spent)} of {dollars(budget)}. It ends at the limit with what it has by then; raise "
                    f"{what.partition(':')[0]}.budget_dollars and run it again for more: replies are kept.",
                )
    yield from _poor_judges(chosen)
    yield from _without_update(chosen)


def _ended_badly(state: RunState) -> Iterator[Concern]:
    """The failed, cancelled or interrupted steps of a run, or the run itself, with the command that resumes it."""
    # A run that was refused at its start has no steps, and the same form would be refused again.
    resume = state.resume or (shell_command("nautile", "run", state.config or "CONFIG") if state.steps else "")
    # While the run goes on, only a failure is news: cancelled and interrupted steps are those of an earlier start, to
    # be retried.
    if state.state == "running":
        failed = [step for step in state.steps if step.state == "failed"]
    else:
        failed = [step for step in state.steps if step.state in ("failed", "interrupted", "cancelled")]
    for step in failed:
        error = visible((step.row.get("error") if step.row else "") or "no reason was recorded")
        advice = "Finished work is kept. Fix what the message names, then continue:"
        text = f"{error}\n{advice}" if step.state == "failed" else "Finished work is kept. Continue with:"
        level: Literal["error", "info"] = "error" if step.state == "failed" else "info"
        yield Concern(level, f"{step.label} {step.state}", text, resume, state.run)
    # The run ended between two steps, or before the first: then the run itself is the problem to show.
    if state.state == "silent":
        text = "It began on another machine, and nothing was heard of it for two days. If it is lost, continue with:"
        yield Concern("warning", "Nothing was heard of the run", text, resume, state.run)
    elif not failed and state.state in ("failed", "cancelled", "interrupted"):
        reason = visible(state.error) if state.error else "Finished work is kept. Continue with:"
        level = "error" if state.state == "failed" else "info"
        title = "The run failed" if state.state == "failed" else f"The run was {state.state}"
        yield Concern(level, title, reason, resume, state.run)


def _poor_judges(chosen: ChosenRun) -> Iterator[Concern]:
    """Judges of the chosen run whose calibration AUC is below `POOR_JUDGE`."""
    for row in shared.query(queries.ARTIFACTS_OF, chosen.executions()):
        facts = json.loads(row["facts"])
        auc = shared.nested(facts, "calibration", "auc", "overall")
        if row["kind"] == "checkpoint" and isinstance(auc, (int, float)) and auc < POOR_JUDGE:
            judge = visible(shared.nested(facts, "judge", "model") or "the judge", 80)
            yield Concern(
                "warning",
                f"The judge of {row['stage']} is poor",
                f"{judge} prefers a right answer to a wrong one with probability {auc:.2f}; 0.5 is chance, and below "
                f"{POOR_JUDGE} its marks teach little. Name another in {row['stage']}.judge.",
            )


def _without_update(chosen: ChosenRun) -> Iterator[Concern]:
    """Stages of the chosen run that made no update, so that their model is the one of the stage before."""
    for row in shared.query(queries.ARTIFACTS_OF, chosen.executions()):
        if row["kind"] == "checkpoint" and (reason := json.loads(row["facts"]).get("no_update")):
            yield Concern(
                "warning",
                f"{row['stage']} made no update",
                f"Its model is the one that it began with: {visible(str(reason), 200)}.",
            )


def budgets(chosen: ChosenRun) -> Iterator[tuple[str, float, float]]:
    """(step, dollars spent by this run, budget) for each step of the chosen run that has a budget.

    The budget of evaluations is that of each endpoint's model; those of checkpoints call no endpoint.
    """
    settings: Mapping[str, Any] = chosen.state.settings if chosen.state else {}
    for row in chosen.stages:
        section = settings.get(row["stage"])
        budget = section.get("budget_dollars") if isinstance(section, Mapping) else None
        # Of a run of another version it need not be a number.
        if isinstance(budget, (int, float)) and budget > 0 and (row["stage"] != "evaluate" or row["calls"]):
            yield row["label"], spent([row]) or 0.0, float(budget)


def spent(stages: Iterator[CatalogRow] | list[CatalogRow]) -> float | None:
    """Dollars spent on calls of stages that this run did not reuse; None if no call has a known price."""
    costs = [row["dollars"] for row in stages if row["dollars"] is not None and not row["reused"]]
    return sum(costs) if costs else None


def stand_ins(chosen: ChosenRun) -> list[str]:
    """The stand-ins for the paper's data and models in the chosen run."""
    facts = [json.loads(row["facts"]) for row in shared.query(queries.ARTIFACTS_OF, chosen.executions())]
    return list(dict.fromkeys(text for fact in facts if isinstance(text := fact.get("stand_in"), str)))
