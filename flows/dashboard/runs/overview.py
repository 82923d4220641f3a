"""The page Overview: the run's scores, problems and cost; then the table of all runs, and the steps of this run."""

import html
import json
from collections.abc import Iterator, Mapping
from itertools import product

import pandas as pd
import streamlit as st

from nautile.common.commands import shell_command
from nautile.common.text import amount, counted, dollars, duration, size, visible
from nautile.evals.scoring.scores import NOT_SCREENED
from nautile.evals.tables.ladder import Ladder
from nautile.flows.dashboard import cards, queries, shared
from nautile.flows.dashboard.runs import actions, graph, ladder, table
from nautile.flows.dashboard.runs.attention import Concern, attention, budgets, queue, spent, stand_ins
from nautile.flows.dashboard.shared import ChosenRun
from nautile.flows.run_state import RunState, StepState, scores_of
from nautile.store.catalog import CatalogRow
from nautile.store.mirror import open_store
from nautile.tasks.engine.stage import page_of, stages_with

_SPEEDS = ("tokens_per_second", "rollout_tokens_per_second")  # metrics of pretraining and of the RL stages


def page(chosen: ChosenRun | None) -> None:
    st.title("Overview")
    if chosen is None:
        st.caption(f"There is no run in {open_store().root} yet: `nautile run` starts one.")
        for item in queue():
            _show(item)
        _other_work()
        return
    # The order is that of an operator's questions: how does it stand, did it get better, what needs me, what does it
    # cost. The tables come last.
    folders = ladder.evaluation_folders(chosen)
    run_ladder = ladder.ladder_of(folders)
    if chosen.state:
        st.html(_heading(chosen.state))
    st.markdown(f"**{shared.escaped(ladder.verdict(run_ladder))}**")
    actions.controls(chosen)
    _figures(chosen, run_ladder, folders)
    for item in attention(chosen):
        _show(item)
    if chosen.state:
        st.html(graph.drawing(chosen.state.steps, chosen.run))
    left, right = st.columns([5, 3], gap="large")
    with left:
        ladder.show(run_ladder)
    with right:
        _money(chosen)
    table.show(chosen.run)
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


def _figures(chosen: ChosenRun, run_ladder: Ladder | None, folders: Mapping[str, str]) -> None:
    """Draw the key figures: score, difference from the run before, speed, time, cost."""
    columns = st.columns(5)
    last = ladder.last_score(run_ladder)
    unscreened = run_ladder is not None and run_ladder["not_screened"]
    score = chosen.state.score if chosen.state else None
    columns[0].metric(
        "score" + (f", after {last[0]}" if last else "") + (f" ({NOT_SCREENED})" if unscreened else ""),
        f"{100 * last[1]['accuracy']:.1f} %" if last else "not evaluated",
        f"{100 * score['gain']:+.1f} points over {score['over']}" if score and score["gain"] is not None else None,
        delta_color="off",
        delta_arrow="off",
        help="Share of the problems of Table 1's benchmark that are right, strictly graded. The gain is over the stage "
        "before.",
    )
    gain, why = _difference(chosen, run_ladder, folders)
    columns[1].metric(
        "against the run before",
        f"{100 * gain['lead']:+.1f} points" if gain else "none",
        f"95 % over problems: {100 * gain['low']:+.1f} to {100 * gain['high']:+.1f}" if gain else why,
        delta_color="off",
        delta_arrow="off",
        help="Paired on the problems that both runs have in their evaluations of the same stage.",
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


def _difference(
    chosen: ChosenRun, run_ladder: Ladder | None, folders: Mapping[str, str]
) -> tuple[dict[str, float] | None, str]:
    """The paired difference between the last score and that of the newest earlier run with the same evaluated stage.

    None, with the reason, if there is none.
    """
    last = ladder.last_score(run_ladder)
    summaries = shared.run_summaries()
    places = [place for place, row in enumerate(summaries) if row["run"] == chosen.run]
    if run_ladder is None or last is None or not places:
        return None, "nothing was evaluated yet"
    earlier = [row["run"] for row in summaries[places[0] + 1 :]][:20]
    scores = scores_of(shared.query, earlier)
    before = next((scores[run][last[0]] for run in earlier if last[0] in scores.get(run, {})), None)
    folder = shared.artifact_folder(before["evaluation"]) if before and before["evaluation"] else None
    if folder is None:
        return None, f"no earlier run has {last[0]}"
    # The same folder: a comparison with itself would read as "no change".
    if folder == folders[last[0]]:
        return None, "it reuses that evaluation"
    return ladder.difference(folder, folders[last[0]], run_ladder["benchmark"]), "no problem is in both"


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
    cost = spent(chosen.stages)
    limits = [budget for _, _, budget in budgets(chosen)]
    unknown = sum(row["unknown_dollars"] or 0.0 for row in chosen.stages if not row["reused"])
    more = [f"of {dollars(sum(limits))}" if limits else "no budget is set"]
    more += [f"at most {dollars(unknown)} more for lost replies"] if unknown else []
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
        if item.asks:
            actions.approve_button(item.run)


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
    frame = frame.drop(columns=[name for name in ("calls", "cost, $", "now", "peak memory") if not frame[name].any()])
    st.dataframe(
        frame.style.map(table.colour, subset=["state"]),
        hide_index=True,
        width="stretch",
        height="content",
        column_config=_COLUMNS,
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
        "begun (UTC)": row.get("begun"),
        "made": shared.lineage_link(next(iter(outputs.values()))) if outputs else None,
        "and": ", ".join(list(outputs)[1:]),
        "page": f"{stage_page}?run={run}" if stage_page and row else None,
    }


_COLUMNS = {
    "cost, $": st.column_config.NumberColumn("cost, $", format="%.4f"),
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
    rows = shared.query(queries.OTHER_WORK, 20)
    if not rows:
        return
    with st.expander(f"Estimates and single uses ({len(rows)})"):
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
