"""The page Overview: the run's scores, problems and cost; then the table of all runs, and the steps of this run."""

import html
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import streamlit as st

from nautile.common.commands import shell_command
from nautile.common.errors import ConfigError
from nautile.common.files import read_json
from nautile.common.text import amount, chips_text, counted, dollars, duration, size, visible
from nautile.configs.changes import describe_changes, read_changes
from nautile.configs.stages import TRAINED
from nautile.evals.running.rows import read_rows
from nautile.evals.scoring.scores import NOT_SCREENED
from nautile.evals.tables.ladder import Ladder, common_problems, gain_with_interval, ladder, p_value
from nautile.flows.dashboard import cards, figures, queries, shared
from nautile.flows.dashboard.figures import Chart, layer, nominal, quantitative, shade
from nautile.flows.dashboard.graph import drawing
from nautile.flows.dashboard.shared import CACHE_S, ChosenRun
from nautile.flows.listings import listed_runs
from nautile.flows.notes import read_note, write_note
from nautile.flows.operate import questions, run_actions
from nautile.flows.operate.notifications import NEAR_BUDGET
from nautile.flows.run_state import (
    LIVE,
    RunState,
    StepState,
    last_score,
    output_of,
    scores_of,
)
from nautile.store.catalog import CatalogRow
from nautile.store.mirror import open_store
from nautile.store.views import run_seconds
from nautile.tasks.engine.errors import LOG_LINES
from nautile.tasks.engine.stage import page_of, stages_with

_SPEEDS = ("tokens_per_second", "rollout_tokens_per_second")  # metrics of pretraining and of the RL stages


@dataclass(frozen=True)
class Concern:
    """A problem that needs the operator: its title, its text, and the command that helps."""

    level: Literal["error", "warning", "info"]
    title: str
    text: str = ""
    command: str = ""
    run: str = ""  # id of the run
    log: str = ""  # the last lines of the log, folded
    asks: bool = False  # whether the run waits for an approval


def page(chosen: ChosenRun | None) -> None:
    st.title("Overview")
    if chosen is None:
        shared.nothing_yet(chosen)
        for item in queue():
            _show(item)
        _other_work()
        return
    # The order is that of an operator's questions: how does it stand, did it get better, what needs me. Of a run that
    # ended badly the last comes first.
    folders = evaluation_folders(chosen)
    run_ladder = ladder_of(folders)
    if chosen.state:
        st.html(_heading(chosen.state))
    ended_badly = chosen.state is not None and chosen.state.state in ENDED_BADLY
    if ended_badly:
        for item in attention(chosen):
            _show(item)
    gain, why = _difference(chosen, run_ladder, folders)
    st.markdown(f"**{shared.escaped(verdict(run_ladder, gain, _score(chosen)))}**")
    controls(chosen)
    _figures(chosen, run_ladder, gain, why)
    if not ended_badly:
        for item in attention(chosen):
            _show(item)
    if chosen.state:
        st.html(drawing(chosen.state.steps, chosen.run))
    left, right = st.columns([5, 3], gap="large")
    with left:
        show_ladder(run_ladder)
    with right:
        _money(chosen)
    show_runs(chosen.run)
    _steps(chosen)
    _other_work()


def _heading(state: RunState) -> str:
    """The heading of the run as HTML with escaped texts: its state, name and begin, and what its running steps do."""
    sign, words, *colours = shared.LOOKS.get(state.state, ("?", state.state, *shared.OTHER_LOOK))
    facts = [f"run {state.run[:8]}", f"{state.finished} of {len(state.steps)} steps finished"]
    if state.begun:
        facts.append(f"begun {state.begun:%Y-%m-%d %H:%M} UTC")
    running = [_doing(step) for step in state.steps if step.state == "running"]
    chip = f"border:1px solid;border-radius:6px;padding:1px 8px;{shared.coloured(*colours)}"
    return (
        f'<div style="font-size:15px;line-height:26px"><span style="{chip}">{sign} {html.escape(words)}</span> '
        f"<b>{html.escape(visible(state.name or state.config, 120))}</b> · {html.escape(' · '.join(facts))}"
        + "".join(f"<br><b>▸</b> {html.escape(visible(line))}" for line in running)
        + "</div>"
    )


def _doing(step: StepState) -> str:
    """The progress of a running step: counts, speed, note, elapsed time, time left."""
    parts = []
    if step.done is not None and step.total is not None:
        parts.append(f"{amount(step.done)} of {amount(step.total)} {step.unit}".rstrip())
    if speed := next((step.metrics[name] for name in _SPEEDS if name in step.metrics), None):
        parts.append(f"{amount(speed)} tokens/s")
    parts += [step.note] if step.note else []
    parts += [f"{duration(step.elapsed_s)} so far"] if step.elapsed_s is not None else []
    parts += [f"{duration(step.left_s)} left"] if step.left_s is not None else []
    parts += [f"longer than last time ({duration(step.longer_than)})"] if step.longer_than is not None else []
    return f"{step.label}: {', '.join(parts)}"


def _figures(chosen: ChosenRun, run_ladder: Ladder | None, gain: Mapping[str, float] | None, why: str) -> None:
    """Draw the key figures: score, difference from the run before (or why there is none), speed, time, cost."""
    columns = st.columns(5)
    score = _score(chosen)
    unscreened = run_ladder is not None and run_ladder["not_screened"]
    columns[0].metric(
        "score" + (f", after {score['after']}" if score else "") + (f" ({NOT_SCREENED})" if unscreened else ""),
        f"{100 * score['accuracy']:.1f} %" if score else "not evaluated",
        f"{100 * score['gain']:+.1f} points over {score['over']}" if score and score["gain"] is not None else None,
        delta_color="off",
        delta_arrow="off",
        help="Share of the problems of Table 1's benchmark that are right, strictly graded. The gain is over the stage "
        "before.",
    )
    columns[1].metric(
        "against the run before",
        f"{100 * gain['lead']:+.1f} points" if gain else "none",
        f"over problems {100 * gain['low']:+.1f} to {100 * gain['high']:+.1f}" if gain else why,
        delta_color="off",
        delta_arrow="off",
        help="Paired on the problems that both runs have in their evaluations of the same stage; with the 95 % "
        "interval over problems.",
    )
    columns[2].metric(*_speed(chosen), help="Of the running stage, else of the last training.")
    label, value, more = _time(chosen)
    columns[3].metric(
        label,
        value,
        more,
        delta_color="off",
        delta_arrow="off",
        help="From its first start to its end. Time left: the longest path through the unfinished steps, each with the "
        "time of its last execution.",
    )
    _money_figure(chosen, columns[4])


def _score(chosen: ChosenRun) -> CatalogRow | None:
    """The score of the run as everywhere else, from the catalog: the files of the evaluation may be gone."""
    return chosen.state.score if chosen.state else None


def _difference(
    chosen: ChosenRun, run_ladder: Ladder | None, folders: Mapping[str, str]
) -> tuple[dict[str, float] | None, str]:
    """The paired difference between the last score and that of the newest earlier run with the same evaluated stage.

    None, with the reason, if there is none.
    """
    last = last_measured(run_ladder)
    if run_ladder is None or last is None:
        return None, "its answers are not here" if _score(chosen) else "nothing was evaluated yet"
    rows = shared.query(queries.RUNS_BEFORE, [chosen.run])
    own = (row for row in rows if (row["after"], row["benchmark"]) == (last[0], run_ladder["benchmark"]))
    earlier = next((row["earlier"] for row in own), None)
    folder = shared.artifact_folder(earlier) if earlier else None
    if folder is None:
        return None, f"no earlier run has {last[0]}"
    # The same folder: a comparison with itself would read as "no change".
    if folder == folders[last[0]]:
        return None, "it reuses that evaluation"
    return difference(folder, folders[last[0]], run_ladder["benchmark"]), "no problem is in both"


def _speed(chosen: ChosenRun) -> tuple[str, str]:
    # A running stage has its newest speed in live.json; for the others the last value is in the catalog.
    for step in chosen.state.steps if chosen.state else ():
        for name in _SPEEDS:
            if step.state == "running" and name in step.metrics:
                return f"tokens/s, {step.label}", amount(step.metrics[name])
    for stage, name in product(stages_with(lambda stage: stage.trains), _SPEEDS):
        executions = chosen.executions(stage)
        rows = shared.query(queries.LAST_VALUE, executions, name) if executions else []
        if rows and rows[0]["value"] is not None:
            return f"tokens/s, {stage}", amount(rows[0]["value"])
    return "tokens/s", "not measured"


def _time(chosen: ChosenRun) -> tuple[str, str, str | None]:
    """Label, value and addition of the time figure: the time left of a live run, else the time that it took."""
    state = chosen.state
    took = duration(state.seconds) if state and state.seconds is not None else ""
    left = state.time_left() if state else None
    if left is None:
        return "time", took or "not known", None
    seconds, unknown = left
    parts = [f"{took} so far"] if took else []
    parts += [f"{counted(unknown, 'step')} of unknown time"] if unknown else []
    value = f"{'over ' if unknown else ''}{duration(seconds)}" if seconds else "not known"
    return "time left", value, "; ".join(parts) or None


def _money_figure(chosen: ChosenRun, place: st.delta_generator.DeltaGenerator) -> None:
    cost, own = spent(chosen.stages), [row for row in chosen.stages if not row["reused"]]
    hours, chips = (sum(v) if (v := known(own, name)) else None for name in ("chip_hours", "chip_dollars"))
    limits = [budget for _, _, budget in budgets(chosen)]
    unknown = sum(row["unknown_dollars"] or 0.0 for row in chosen.stages if not row["reused"])
    more = [f"of {dollars(sum(limits))}" if limits else "no budget is set"]
    more += [f"at most {dollars(unknown)} more for lost replies"] if unknown else []
    more += [chips_text(hours, chips)] if hours is not None else []
    text = dollars(cost) if cost is not None else "no paid calls"
    place.metric("paid for calls", text, "; ".join(more), delta_color="off", delta_arrow="off")


def _money(chosen: ChosenRun) -> None:
    """Draw the cost compared with each budget, and the calls by stage."""
    st.markdown(
        "##### What does it cost?",
        help="Calls include cached ones, which were answered from the store without cost.",
    )
    for stage, cost, budget in budgets(chosen):
        text = f"{stage}: {dollars(cost)} of {dollars(budget)} ({cost / budget:.0%})"
        st.progress(min(1.0, cost / budget), text=shared.escaped(text))
    rows = [
        [
            row["label"],
            f"{row['calls']:,}",
            f"{row['cached'] or 0:,}",
            dollars(row["dollars"]) if row["dollars"] is not None else "",
        ]
        for row in chosen.stages
        if row["calls"]
    ]
    if rows:
        cards.show([cards.table(["stage", "calls", "cached", "cost"], rows)])
    else:
        st.caption("No step of this run called an endpoint.")


def _show(item: Concern) -> None:
    """Draw the card of a problem that needs the operator."""
    sign = {"error": "✗", "warning": "!", "info": "i"}[item.level]
    with st.container(border=True, key=f"attention-{item.level}-{abs(hash(item))}"):
        st.markdown(f"**{sign} {shared.escaped(item.title)}**")
        if item.text:
            cards.show_text(item.text)
        if item.command:
            cards.show_text(item.command, "command")
        if item.log:
            with st.expander("The last lines of its log"):
                cards.show_text(item.log)
        if item.asks and answers(item.run) and st.button("Approve", type="primary", key=f"approve-{item.run}"):
            _do("approved: the run continues", lambda: questions.approve(open_store(), item.run, None))


def _steps(chosen: ChosenRun) -> None:
    """Draw the table of the run's steps, including those to come."""
    st.subheader("Steps of this run")
    if notes := stand_ins(chosen):
        st.caption("Stand-ins in this run: " + "; ".join(shared.escaped(text) for text in notes))
    if link := shared.prefect_link(chosen.run):
        st.link_button("This run in Prefect", link)
    steps = (
        chosen.state.steps
        if chosen.state
        else [StepState(r["label"], r["stage"], r["state"], row=r) for r in chosen.stages]
    )
    if not steps:
        st.caption("It has none: it ended before it had a plan.")
        return
    frame = pd.DataFrame([_step_row(step, chosen.run) for step in steps])
    # Nullable integers: with a missing value pandas would make floats of the column, and show 3.0 calls.
    frame = frame.astype({"attempts": "Int64", "calls": "Int64"})
    frame = frame.drop(
        columns=[name for name in ("calls", "cost, $", "chips, $", "now", "peak memory") if not frame[name].any()]
    )
    st.dataframe(
        frame.style.map(colour, subset=["state"]),
        hide_index=True,
        width="stretch",
        height="content",
        column_config=_STEP_COLUMNS,
        placeholder="",
    )
    st.caption(f"The log of a step: `{shell_command('nautile', 'logs', chosen.run[:8], '--stage', 'STEP')}`.")


def _step_row(step: StepState, run: str) -> CatalogRow:
    row: CatalogRow = step.row or {}
    outputs = json.loads(row.get("outputs") or "{}")
    stage_page = page_of(step.stage)
    time = duration(step.elapsed_s) if step.elapsed_s is not None else ""
    if not time and step.state == "coming" and step.expected_s is not None:
        time = "from the store" if step.expected_s == 0 else f"about {duration(step.expected_s)}"
    return {
        "step": step.label,
        "state": shared.STATE_MARKS.get(step.state, step.state),
        "now": _doing(step).partition(": ")[2] if step.state == "running" else visible(step.note),
        "time": time,
        "attempts": row.get("attempts"),
        "peak memory": size(row["peak_bytes"]) if row.get("peak_bytes") else "",
        "calls": row.get("calls"),
        "cost, $": row.get("dollars"),
        "chips, $": row.get("chip_dollars"),
        "begun (UTC)": row.get("begun"),
        "made": shared.lineage_link(next(iter(outputs.values()))) if outputs else None,
        "and": ", ".join(list(outputs)[1:]),
        "page": f"{stage_page}?run={run}" if stage_page and row else None,
    }


_STEP_COLUMNS = {
    "cost, $": st.column_config.NumberColumn("cost, $", format="%.4f"),
    "chips, $": st.column_config.NumberColumn("chips, $", format="%.2f"),
    "calls": st.column_config.NumberColumn("calls", format="localized", help="Every request, cached ones included."),
    "begun (UTC)": st.column_config.DatetimeColumn("begun (UTC)", format="YYYY-MM-DD HH:mm:ss"),
    "made": st.column_config.LinkColumn("made", display_text=r"artifact=(.*)"),
    "and": st.column_config.TextColumn("also made", help="Kinds with the same digits."),
    "now": st.column_config.TextColumn("now", width=320),
    "time": st.column_config.TextColumn("time", width=110),
    "attempts": st.column_config.NumberColumn("attempts", format="%d", width=75),
    "page": st.column_config.LinkColumn("curves", display_text="open"),
}


def _other_work() -> None:
    """Draw the list of estimates and single uses of a model, which are not pipeline runs."""
    newest = shared.query(queries.OTHER_WORK, queries.LISTED, 0)
    if not newest:
        return
    with st.expander(f"Estimates and single uses ({newest[0]['total']:,})"):
        rows = shared.search_rows("work", queries.OTHER_WORK, size=queries.LISTED, unit="of them")
        st.dataframe(list(_work_rows(rows)), hide_index=True, width="stretch")


def _work_rows(rows: list[CatalogRow]) -> Iterator[CatalogRow]:
    for row in rows:
        yield {
            "what": visible(row["label"]),
            "state": shared.STATE_MARKS.get(row["state"], row["state"]),
            "begun (UTC)": row["started"],
            "time": duration(row["seconds"]) if row["seconds"] is not None else "",
            "why": visible((row["error"] or "").partition("\n")[0], 200),
            "log": shell_command("nautile", "logs", row["run"]),
        }


def answers(run: str) -> bool:
    """Whether a button can approve the run: it waits on the server that was started with this page."""
    api, note = run_actions.server_beside(open_store()), shared.questions().get(run)
    return api is not None and note is not None and note["api"] == api


def controls(chosen: ChosenRun) -> None:
    """Draw the buttons to cancel a live run, to retry a failed one, and to edit the run's note, where allowed."""
    api = run_actions.server_beside(open_store())
    # No buttons rather than buttons that fail: a dashboard that somebody started alone has no server to talk to.
    if api is None or chosen.state is None:
        return
    with st.container(horizontal=True, key="controls"):
        # Prefect could mark a terminal's run as cancelled, but nothing would end its process.
        if _has_deployment(api, chosen.run):
            if chosen.state.state in ("running", "waiting"):
                with st.popover("Cancel the run"):
                    st.markdown("Its processes end; finished work is kept, and a retry resumes from there.")
                    if st.button("Yes, cancel it", key=f"cancel-{chosen.run}"):
                        _do("the run is being cancelled", lambda: run_actions.cancel(api, chosen.run))
            elif chosen.state.state != "done" and st.button("Retry", type="primary", key=f"retry-{chosen.run}"):
                _do("the run will start again", lambda: run_actions.retry(api, chosen.run))
        with st.popover("Note and tags"):
            _note_form(chosen.run)


def _note_form(run: str) -> None:
    note = read_note(open_store(), run)
    with st.form(f"note-{run}", border=False):
        text = st.text_area("Note", note["text"], max_chars=2000)
        tags = st.text_input("Tags, comma-separated", ", ".join(note["tags"]))
        if st.form_submit_button("Save"):
            new_tags = [tag.strip() for tag in tags.split(",") if tag.strip()]
            _do("saved", lambda: write_note(open_store(), run, text, new_tags, []))


@st.cache_data(ttl=CACHE_S, max_entries=64, show_spinner=False)
def _has_deployment(api: str, run: str) -> bool:
    return run_actions.has_deployment(api, run)


def _do(message: str, action: Callable[[], object]) -> None:
    """Carry out the action of a button, and show `message` or the error."""
    with shared.one_connection() as reader:
        reader.close()  # the action may write the catalog
    try:
        action()
    except ConfigError as error:
        st.error(shared.escaped(str(error)))
        return
    st.cache_data.clear()
    st.toast(message)


ENDED_BADLY = ("failed", "cancelled", "interrupted", "silent")  # states of a run
POOR_JUDGE = 0.7  # share of pairs in which a judge prefers the right answer; 0.5 is chance


def queue() -> Iterator[Concern]:
    """The runs that wait in the server of `nautile up` for a process, as far as they have no record yet."""
    runs = shared.queued_runs()
    known = {row["run"] for row in shared.query(queries.KNOWN_RUNS, [run["id"] for run in runs])} if runs else set()
    if runs is None:
        yield Concern("info", "Runs that wait for a process are not known: the server of `nautile up` does not answer")
    if queued := [run for run in runs or () if run["id"] not in known]:
        lines = [f"{run['name']}, due at {run['since'][:16].replace('T', ' ')} UTC" for run in queued]
        title = f"{len(queued)} {'run waits' if len(queued) == 1 else 'runs wait'} in Prefect for a process"
        yield Concern("info", title, visible("\n".join(lines)), shell_command("nautile", "runs"))


def attention(chosen: ChosenRun) -> Iterator[Concern]:
    """The problems that need the operator, most urgent first: approvals of all runs, then those of the chosen run."""
    # A run that waits blocks until somebody answers, whichever run the reader has chosen.
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
    yield from _of_checkpoints(chosen)
    yield from _of_curves(chosen)


def _of_curves(chosen: ChosenRun) -> Iterator[Concern]:
    """The steps with curves that do what they should not (`common.curve_checks`)."""
    for step in chosen.state.steps if chosen.state else ():
        if step.warnings:
            text = "\n".join(visible(warning, 300) for warning in step.warnings)
            yield Concern("warning", f"Curves of {step.label} to look at", text)


def _ended_badly(state: RunState) -> Iterator[Concern]:
    """The failed, cancelled or interrupted steps of a run, or the run itself, with the command that resumes it."""
    # A run that was refused at its start has no steps, and the same form would be refused again.
    resume = state.resume or (shell_command("nautile", "run", state.config or "CONFIG") if state.steps else "")
    # While the run goes on, only a failure is news: the others are of an earlier start, to be retried.
    if state.state == "running":
        failed = [step for step in state.steps if step.state == "failed"]
    else:
        failed = [step for step in state.steps if step.state in ("failed", "interrupted", "cancelled")]
    for step in failed:
        # The reason and the command fit on a screen; the log's lines, often two screens of traceback, are folded.
        error, _, log = ((step.row.get("error") if step.row else "") or "no reason was recorded").partition(LOG_LINES)
        advice = "Finished work is kept. Fix what the message names, then continue:"
        text = f"{visible(error)}\n{advice}" if step.state == "failed" else "Finished work is kept. Continue with:"
        level: Literal["error", "info"] = "error" if step.state == "failed" else "info"
        yield Concern(level, f"{step.label} {step.state}", text, resume, state.run, visible(log))
    # The run ended between two steps, or before the first: then the run itself is the problem to show.
    if state.state == "silent":
        text = "It began on another machine, and nothing was heard of it for two days. If it is lost, continue with:"
        yield Concern("warning", "Nothing was heard of the run", text, resume, state.run)
    elif not failed and state.state in ("failed", "cancelled", "interrupted"):
        reason = visible(state.error) if state.error else "Finished work is kept. Continue with:"
        level = "error" if state.state == "failed" else "info"
        title = "The run failed" if state.state == "failed" else f"The run was {state.state}"
        yield Concern(level, title, reason, resume, state.run)


def _of_checkpoints(chosen: ChosenRun) -> Iterator[Concern]:
    """Judges whose calibration AUC is below `POOR_JUDGE`, then stages whose model is the one of the stage before."""
    checkpoints = [(row, facts) for row, facts in shared.facts_of(chosen.executions()) if row["kind"] == "checkpoint"]
    for row, facts in checkpoints:
        auc = shared.nested(facts, "calibration", "auc", "overall")
        if isinstance(auc, (int, float)) and auc < POOR_JUDGE:
            judge = visible(shared.nested(facts, "judge", "model") or "the judge", 80)
            yield Concern(
                "warning",
                f"The judge of {row['stage']} is poor",
                f"{judge} prefers a right answer to a wrong one with probability {auc:.2f}; 0.5 is chance, and below "
                f"{POOR_JUDGE} its marks teach little. Name another in {row['stage']}.judge.",
            )
    for row, facts in checkpoints:
        if reason := facts.get("no_update"):
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
    costs = known([row for row in stages if not row["reused"]], "dollars")
    return sum(costs) if costs else None


def known(stages: Iterable[CatalogRow], name: str) -> list[float]:
    """The values of a column that are not NULL."""
    return [row[name] for row in stages if row[name] is not None]


def stand_ins(chosen: ChosenRun) -> list[str]:
    """The stand-ins for the paper's data and models in the chosen run."""
    facts = [facts for _, facts in shared.facts_of(chosen.executions())]
    return list(dict.fromkeys(text for own in facts if isinstance(text := own.get("stand_in"), str)))


Folders = dict[str, str]  # stage -> folder of the evaluation after it


def evaluation_folders(chosen: ChosenRun) -> Folders:
    """Stage -> folder of the run's evaluation of it, for the stages that train."""
    folders = {}
    for row in chosen.stages:
        stage = row["label"].partition(":")[2]
        if row["stage"] != "evaluate" or stage not in TRAINED or "evaluation" not in chosen.outputs(row):
            continue
        # Not by the id in the outputs: a forced run has perhaps made another evaluation of the same id since.
        with suppress(ConfigError):  # damaged, or not to be had from the remote
            if artifact := output_of(open_store(), row, "evaluation"):
                folders[stage] = str(artifact.path)
    return folders


def ladder_of(folders: Folders) -> Ladder | None:
    """The ladder of the evaluations in these folders; cached."""
    return _ladder(folders, [shared.execution_of(folder) for folder in folders.values()])


@st.cache_data(max_entries=256, show_spinner=False)
def _ladder(folders: Folders, executions: list[str]) -> Ladder | None:
    # `executions` are part of the cache key.
    scores = {stage: read_json(Path(folder) / "scores.json") for stage, folder in folders.items()}
    files = {stage: Path(folder) / "rows.jsonl" for stage, folder in folders.items()}
    rows = {stage: read_rows(file) for stage, file in files.items() if file.exists()}
    return ladder({stage: score for stage, score in scores.items() if score}, rows)


def last_measured(run_ladder: Ladder | None) -> tuple[str, Mapping[str, Any]] | None:
    """The last evaluated stage, and its score; None without any."""
    measured = [entry for entry in run_ladder["stages"] if entry["score"]] if run_ladder else []
    return (measured[-1]["stage"], measured[-1]["score"]) if measured else None


def difference(before: str, after: str, benchmark: str) -> dict[str, Any] | None:
    """The paired test of two evaluations on their common problems, by their folders; None if they have none. Cached."""
    return _ladder_difference(before, after, benchmark, [shared.execution_of(folder) for folder in (before, after)])


@st.cache_data(max_entries=256, show_spinner=False)
def _ladder_difference(before: str, after: str, benchmark: str, executions: list[str]) -> dict[str, Any] | None:
    # `executions` are part of the cache key.
    files = [Path(folder) / "rows.jsonl" for folder in (before, after)]
    if not all(file.exists() for file in files):
        return None
    comparison = common_problems(*(read_rows(file) for file in files))
    return comparison["benchmarks"].get(benchmark) if comparison else None


def verdict(
    run_ladder: Ladder | None, before: Mapping[str, float] | None = None, score: CatalogRow | None = None
) -> str:
    """One sentence: whether the stages after pretraining made the model better.

    `before`: the paired difference from the run before; where it is beyond chance, the sentence says so too. `score`:
    that of the catalog, which stays when the files of an evaluation are gone.
    """
    if last_measured(run_ladder) is None and score:
        return (
            f"{100 * score['accuracy']:.1f} % after {score['after']}. The files of its evaluation are not in this "
            "store, so it is not known whether that is a gain beyond chance."
        )
    words = _verdict(run_ladder)
    if before is None or before["low"] <= 0 <= before["high"]:
        return words
    word = "better" if before["low"] > 0 else "worse"
    return f"{words} It is {word} than the run before: {gain_with_interval(before)} points."


def _verdict(run_ladder: Ladder | None) -> str:
    last = last_measured(run_ladder)
    if run_ladder is None or last is None:
        return "No stage has been evaluated yet, so it is not known whether the model got better."
    stage, score = last
    figure = f"{100 * score['accuracy']:.1f} % of {score['n']:,} problems are right after {stage}"
    measured = [entry for entry in run_ladder["stages"] if entry["score"]]
    total = run_ladder["total"] or (
        {"over": measured[0]["stage"], "test": measured[-1]["test"]} if measured[1:] else None
    )
    if total is None:
        return f"{figure}; no earlier stage was evaluated, so there is no gain to judge yet."
    test = total["test"]
    if not test:
        return f"{figure}. Whether that is a gain over {total['over']} is unknown: their answers were not stored."
    if test["low"] > 0:
        words = "Better than its start"
    elif test["high"] < 0:
        words = "Worse than its start"
    else:
        words = "No change from its start beyond chance"
    return f"{words}: {figure}, {gain_with_interval(test)} points over {total['over']} (p {p_value(test)})."


def ladder_chart(run_ladder: Ladder) -> Chart:
    """Chart of the accuracy after each stage with its 95 % interval, and of the paper's figures for its model."""
    rows = []
    for entry in run_ladder["stages"]:
        score = entry["score"]
        row = {"stage": entry["stage"], "paper": entry["paper"] and entry["paper"] / 100, "what": entry["title"]}
        if score:
            low, high = score["interval"]
            text = f"{100 * score['accuracy']:.1f} %"
            row |= {"accuracy": score["accuracy"], "low": low, "high": high, "n": score["n"], "text": text}
        rows.append(row)
    table = pd.DataFrame(rows, columns=["stage", "what", "paper", "accuracy", "low", "high", "n", "text"])
    x = nominal("stage", sort=list(table["stage"]), title=None, axis={"labelAngle": 0, "labelFontSize": 12})
    tooltip = [
        nominal("what", title="row of Table 1"),
        quantitative("accuracy", format=".1%"),
        quantitative("low", title="95 % interval over problems from", format=".1%"),
        quantitative("high", title="to", format=".1%"),
        quantitative("n", title="problems", format=",d"),
        quantitative("paper", title="the paper, GSM8K", format=".1%"),
    ]
    share = {"format": "%", "title": "right, strict", "tickCount": 4}
    base = {"x": x, "tooltip": tooltip}
    # A stage that was not evaluated has a place on the axis and no bar: a bar of height zero would be read as 0 %.
    measured = {"transform": [{"filter": "isValid(datum.accuracy)"}]}
    span = layer(
        {"type": "rule", "strokeWidth": 2, "color": shade("#0b4fa8", "#ffffff")},
        **base,
        y=quantitative("low"),
        y2={"field": "high"},
    )
    labels = layer(
        {"type": "text", "dy": -7, "fontWeight": "bold", "fontSize": 12, "color": shade("#262730", "#e6edf3")},
        x=x,
        y=quantitative("high"),
        text=nominal("text"),
    )
    layers = [
        layer(
            {"type": "bar", "color": shade("#9cc2f0", "#2f6fb5"), "size": 44},
            **base,
            y=quantitative("accuracy", axis=share),
        ),
        {**span, **measured},
        layer(
            {"type": "tick", "color": shade("#7a4b00", "#f0b458"), "thickness": 2, "width": 44},
            **base,
            y=quantitative("paper"),
        ),
        {**labels, **measured},
    ]
    return Chart(table, {"layer": layers, "height": 150})


def show_ladder(run_ladder: Ladder | None) -> None:
    """Draw the chart with its caption; the page shows the verdict above."""
    st.markdown("##### After each stage")
    if run_ladder is None:
        st.caption("The ladder appears once a stage was evaluated on the held-out problems or GSM8K.")
        return
    ladder_chart(run_ladder).show(verdict(run_ladder))
    stand_in = f" Stand-in: {run_ladder['stand_in']}." if run_ladder["stand_in"] else ""
    stand_in += "".join(f" {run_ladder['title']}: {note}." for note in run_ladder["not_screened"])
    st.caption(
        shared.escaped(
            f"{run_ladder['title']}: right after each stage, with 95 % intervals over problems. Brown: the "
            f"paper's 371 M model on GSM8K.{stand_in}"
        )
    )


_FIELD = re.compile(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)*")  # the path of a setting, as `--set` takes it
USUAL = ("seed", "reason.policy.steps", "align.policy.steps", "pretrain.optimizer.peak")


def show_runs(chosen: str | None) -> None:
    """Draw the table of runs and its controls. `chosen`: the run that the page shows."""
    title, order_place, right, left = st.columns([2, 2, 3, 4], vertical_alignment="center")
    title.subheader("All runs")
    order = order_place.selectbox(
        "Order", queries.RUN_ORDERS, key="order-runs", bind="query-params", label_visibility="collapsed"
    )
    search = right.text_input(
        "Search runs",
        key="find",
        bind="query-params",
        placeholder="search: name, change, state, tag, note",
        label_visibility="collapsed",
    )
    order = queries.RUN_ORDERS[order or "newest first"]

    def page_of(limit: int, offset: int) -> list[CatalogRow]:
        return listed_runs(open_store(), shared.query, search, order=order, limit=limit, offset=offset)

    summaries = shared.paged_rows("runs", page_of, (search, order), size=queries.LISTED, unit="runs")
    if not summaries:
        st.caption("No run fits the search.")
        return
    changed = [change.field for row in summaries for change in read_changes(row["changes"])]
    parameters = left.multiselect(
        "Settings shown",
        list(dict.fromkeys([*changed, *USUAL])),
        accept_new_options=True,
        key="settings",
        bind="query-params",
        placeholder="columns of settings: reason.policy.steps",
        label_visibility="collapsed",
    )
    rows = table_of_runs(summaries, [field for field in parameters if _FIELD.fullmatch(field)], chosen)
    frame = pd.DataFrame(rows)
    empty = [name for name in ("cost", "chips", "tags", "notes", "changed", "after") if not frame[name].any()]
    empty += [name for name in ("score", "gain", "difference") if frame[name].isna().all()]
    frame = frame.drop(columns=empty)
    styled = frame.style.map(colour, subset=["state"])
    st.dataframe(styled, hide_index=True, width="stretch", column_config=_RUN_COLUMNS, row_height=32, placeholder="")
    st.caption(
        "Score: share of the held-out problems (GSM8K where it was asked) that are right after the last stage that was "
        "evaluated. Cost: calls that the run paid for. "
        "A click on a heading sorts this page, the list above all runs; a setting that is chosen above becomes a "
        "column, and the page's address keeps it; "
        "`nautile note RUN TEXT --tag NAME` writes notes."
    )


_RUN_COLUMNS = {
    "show": st.column_config.LinkColumn("run", display_text="open", width=55),
    "state": st.column_config.TextColumn("state", width=100),
    "begun": st.column_config.DatetimeColumn("begun (UTC)", format="YYYY-MM-DD HH:mm", width=120),
    "steps": st.column_config.TextColumn("steps", width=70),
    "score": st.column_config.NumberColumn("score, %", format="%.1f", width=70),
    "gain": st.column_config.NumberColumn("gain, points", format="%+.1f", help="Over the stage before, in this run."),
    "difference": st.column_config.NumberColumn(
        "over the run before", format="%+.1f", help="Points, against the run before that was evaluated after it."
    ),
    "after": st.column_config.TextColumn("after", width=85, help="The last stage that was evaluated."),
    "minutes": st.column_config.NumberColumn(
        "time, min", format="%.1f", width=75, help="From its first start to its end, over restarts."
    ),
    "cost": st.column_config.NumberColumn("cost, $", format="%.4f"),
    "chips": st.column_config.NumberColumn("chips, $", format="%.2f"),
    "tags": st.column_config.ListColumn("tags", width=110),
    "notes": st.column_config.TextColumn("notes", width=200),
    "changed": st.column_config.TextColumn("changed", width=190),
}


def table_of_runs(summaries: Sequence[CatalogRow], fields: Sequence[str], chosen: str | None) -> list[dict[str, Any]]:
    """The rows of the table for rows of `listed_runs`. `fields`: paths of settings to add as columns."""
    runs = [row["run"] for row in summaries]
    scores = scores_of(shared.query, runs)
    costs = {row["run"]: row for row in shared.query(queries.RUN_COSTS, runs)}
    before = {(row["run"], row["after"], row["benchmark"]): row for row in shared.query(queries.RUNS_BEFORE, runs)}
    settings: dict[str, list[str | None]] = {}
    if fields:
        paths = [queries.json_path(field) for field in fields]
        settings = {row["run"]: row["chosen"] for row in shared.query(queries.RUN_SETTINGS, paths, runs)}
    rows = []
    for row in summaries:
        run = row["run"]
        score = last_score(scores.get(run)) or {}
        other = before.get((run, score["after"], score["benchmark"]), {}) if score else {}
        # A reused evaluation that is compared with itself would read as "no change".
        earlier = other.get("before") if other.get("earlier") != score.get("evaluation") else None
        seconds = run_seconds(row, row["current_state"] in LIVE)
        changes = describe_changes(read_changes(row["changes"]))
        rows.append(
            {
                "show": f"/?run={run}",
                "state": shared.STATE_MARKS.get(row["current_state"], row["current_state"]),
                "name": visible(row["name"] or row["config"] or run[:8]) + (" (shown)" if run == chosen else ""),
                "begun": row["begun"],
                "steps": f"{row['finished']} of {row['planned'] or row['stages']}",
                "after": score.get("after", "") + (f" ({NOT_SCREENED})" if score.get("not_screened") else ""),
                "score": 100 * score["accuracy"] if score else None,
                "gain": None if score.get("gain") is None else 100 * score["gain"],
                "difference": 100 * (score["accuracy"] - earlier) if earlier is not None else None,
                "minutes": None if seconds is None else seconds / 60,
                "cost": costs.get(run, {}).get("dollars"),
                "chips": costs.get(run, {}).get("chip_dollars"),
                "changed": changes,
                **{field: value for field, value in zip(fields, settings.get(run, [None] * len(fields)), strict=True)},
                "tags": json.loads(row["tags"] or "[]"),
                "notes": visible(row["note"] or ""),
            }
        )
    return rows


def colour(state: str) -> str:
    """The CSS of a cell with a state in the form of `STATE_MARKS`."""
    _, _, text, ground = next((look for look in shared.LOOKS.values() if state == f"{look[0]} {look[1]}"), ("",) * 4)
    # A table of Streamlit is a canvas, so that the server chooses.
    text, ground = figures.shade(text, ground), figures.shade(ground, text)
    return f"color: {text}; background-color: {ground}" if text else ""
