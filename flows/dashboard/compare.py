"""The page Compare: the chosen run with another run, or the arms of a sweep."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
import streamlit as st
from markupsafe import Markup

from nautile.common.errors import ConfigError
from nautile.common.text import counted, visible
from nautile.configs.changes import Change, describe_changes, short_names
from nautile.evals.benchmarks.registry import title_of
from nautile.evals.scoring.over_seeds import lead, limited, summary_of_shares
from nautile.flows.dashboard import cards, curves, queries, shared
from nautile.flows.dashboard.curves import Line
from nautile.flows.dashboard.figures import Chart, layer, nominal, quantitative
from nautile.flows.dashboard.shared import ChosenRun
from nautile.flows.run_state import STEPS, scores_of
from nautile.flows.sweep.comparisons import compare_runs, gain_lines, seed_lines, step_cells
from nautile.flows.sweep.report import (
    metric_cells,
    metric_heads,
    note,
    run_cells,
    saved_sweeps,
    spread_lines,
    sweep_report,
)
from nautile.store.catalog import CatalogBusy, CatalogRow
from nautile.store.mirror import open_store
from nautile.tasks.engine.stage import stages_with

CACHE_S = 10.0  # a comparison reads files of answers, so its result is cached
TWO_RUNS, SEVERAL, SWEEP = "Two runs", "Several runs", "A sweep"
MOST_FIELDS = 6  # settings in the table of several runs


def page(chosen: ChosenRun | None) -> None:
    """Draw the page: two runs side by side, several in a table, or the tables of a sweep."""
    st.title("Compare")
    sweeps = saved_sweeps(open_store())
    if chosen is None and not sweeps:
        shared.nothing_yet(chosen)
        return
    views = [TWO_RUNS, SEVERAL, *([SWEEP] if sweeps else [])]
    view = st.segmented_control("What", views, default=TWO_RUNS, key="view", bind="query-params") or TWO_RUNS
    if not sweeps:
        st.caption("`nautile sweep FILE` makes many runs from one file; its table will be here as well.")
    try:
        if view == SEVERAL:
            _several(chosen)
            return
        if view == SWEEP:
            _sweep(sweeps)
        else:
            _two_runs(chosen)
    except CatalogBusy:
        st.info("The catalog is being written to; this page will try again.")
    except ConfigError as error:
        st.error(shared.escaped(str(error)))


def _two_runs(chosen: ChosenRun | None) -> None:
    requested = next(iter(shared.runs_in_address("with")), "") if chosen else ""
    offered = shared.offered_runs("with", [requested] if requested else []) if chosen else {}
    titles = {run: title for run, title in offered.items() if chosen and run != chosen.run}
    if chosen is None or not titles:
        st.caption("There is no second run to compare with.")
        return
    first = list(titles).index(requested) if requested in titles else 0
    left, right = st.columns([3, 1], vertical_alignment="bottom")
    other = left.selectbox(
        "A: compared with", list(titles), index=first, format_func=lambda run: titles.get(run, run), key="other"
    )
    other = other if other in titles else next(iter(titles))
    st.query_params["with"] = other
    verdicts = ["strict", "lenient"]
    verdict = (
        right.segmented_control("Verdict", verdicts, default="strict", key="graded", bind="query-params") or "strict"
    )
    left.caption("B is the run that is chosen in the sidebar.")
    comparison = _compared(str(open_store().root), other, chosen.run, verdict)
    st.subheader("Settings")
    settings = comparison["settings"]
    if settings is None:
        st.caption("Unknown: one of the runs was made before settings were recorded.")
    elif not settings:
        st.caption("None differs.")
    else:
        st.text(describe_changes([Change(**change) for change in settings], None))
        cells = [[str(row[name]) for name in ("field", "before", "after")] for row in settings]
        cards.show([cards.table(["setting", "A", "B"], cells)])
    st.subheader("Scores on the same questions")
    for line in gain_lines(comparison):
        st.text(line)
    if comparison["scores"]:
        heads = ["after", "benchmark", "questions", "A", "B", "B leads by, points [95 %]", "p"]
        cards.show([cards.table(heads, map(_score_cells, comparison["scores"]))])
    for line in seed_lines(comparison):
        st.caption(shared.escaped(line))
    _curves(comparison, other, chosen.run)
    st.subheader("Time and cost")
    st.caption("Of what each step made, whichever run made it.")
    cells = [[label, *cells] for label, cells in step_cells(comparison)]
    cards.show([cards.table(["step", "A, time", "B, time", "A, paid", "B, paid"], cells)])


@st.cache_data(ttl=CACHE_S, max_entries=64, show_spinner=False)
def _compared(root: str, a: str, b: str, verdict: str) -> dict[str, Any]:
    return compare_runs(open_store(root), shared.fetch, a, b, verdict)


def _score_cells(row: dict[str, Any]) -> list[str]:
    lead = "" if row["same"] else f"{100 * row['lead']:+.1f} [{100 * row['low']:+.1f}, {100 * row['high']:+.1f}]"
    shares = [f"{100 * row[side]:.1f} %" for side in ("a", "b")]
    p = "the same evaluation" if row["same"] else f"{row['p']:.3g}"
    return [row["stage"], row["title"], f"{row['n']:,}", *shares, lead, p]


def _curves(comparison: dict[str, Any], a: str, b: str) -> None:
    """Curves of the metrics that both runs measured in one step."""
    measured: dict[str, list[str]] = {}
    for row in comparison["curves"]:
        measured.setdefault(row["stage"], []).append(row["metric"])
    if not measured:
        return
    st.subheader("Curves")
    stages = list(measured)
    stage = st.segmented_control("Step", stages, default=stages[0], key="curves", bind="query-params") or stages[0]
    metrics = measured.get(stage, [])
    lines = {
        row["execution"]: Line(f"{side}: {comparison['runs'][side.lower()]['name']}", run, stage)
        for side, run in (("A", a), ("B", b))
        for row in shared.query(STEPS, run)
        if row["label"] == stage and row["execution"]
    }
    _draw_curves(stage, metrics, lines)


def _draw_curves(stage: str, metrics: Sequence[str], lines: dict[str, Line]) -> None:
    selected = curves.choose_metrics(metrics, f"metrics-{stage}")
    curves.draw({name: (name,) for name in selected}, lines, curves.settings(tokens=False))


def _several(chosen: ChosenRun | None) -> None:
    """Any number of runs, each a row, or each group of those with the same value of a setting; then their curves."""
    titles = curves.choose_compared(chosen) if chosen else {}
    if len(titles) < 2:
        st.caption("Choose the runs to compare with the one in the sidebar; the address keeps them.")
        return
    groups = curves.choose_groups(list(titles))
    st.subheader("Scores")
    scores = scores_of(shared.query, list(titles))
    measured = dict.fromkeys((row["after"], row["benchmark"]) for stage in scores.values() for row in stage.values())
    if groups:
        cards.show(_group_tables(list(measured), groups, scores))
        st.caption("Over seeds: a seed of a group counts once, and runs that share an evaluation are one measurement.")
    else:
        cards.show([_run_table(list(measured), titles, scores)])
    steps = {run: shared.query(STEPS, run) for run in titles}
    labels = dict.fromkeys(row["label"] for rows in steps.values() for row in rows if row["execution"])
    lines = {label: curves.lines_of(titles, groups, "", label) for label in labels}
    metrics = {label: curves.metric_names(own) for label, own in lines.items() if len(own) > 1}
    # An evaluation measures one value each, which is in the table.
    trains = stages_with(lambda stage: stage.trains)
    stages = [label for label, names in metrics.items() if names and not label.startswith("evaluate")]
    stages.sort(key=lambda label: label not in trains)  # what is compared is mostly how they learnt
    if stages:
        st.subheader("Curves")
        stage = st.segmented_control("Step", stages, default=stages[0], key="curves", bind="query-params") or stages[0]
        _draw_curves(stage, metrics[stage], lines[stage])


def _run_table(
    measured: Sequence[tuple[str, str]], titles: Mapping[str, str], scores: Mapping[str, Mapping[str, CatalogRow]]
) -> Markup:
    """A row for each run: its score after each stage, and the settings that differ."""
    fields = curves.settings_that_differ(shared.query(queries.WHOLE_SETTINGS, list(titles)))
    paths = [queries.json_path(field) for field in fields[:MOST_FIELDS]]
    rows = shared.query(queries.RUN_SETTINGS, paths, list(titles))
    values = {row["run"]: row["chosen"] for row in rows}
    body = []
    for run, title in titles.items():
        own = {(row["after"], row["benchmark"]): row["accuracy"] for row in scores.get(run, {}).values()}
        cells = [f"{100 * own[place]:.1f} %" if place in own else "" for place in measured]
        chosen = values.get(run, [None] * len(fields[:MOST_FIELDS]))
        body.append([cards.link(shared.page_link("", run=run), title), *cells, *(visible(x or "", 60) for x in chosen)])
    more = len(fields) - MOST_FIELDS
    caption = f"{counted(more, 'more setting')} differ: all are in the list above." if more > 0 else ""
    heads = [f"after {after}, {title_of(benchmark)}" for after, benchmark in measured]
    names = short_names(fields[:MOST_FIELDS])
    return cards.table(["run", *heads, *(names[field] for field in fields[:MOST_FIELDS])], body, caption)


def _group_tables(
    measured: Sequence[tuple[str, str]], groups: Mapping[str, str], scores: Mapping[str, Mapping[str, CatalogRow]]
) -> Iterator[Markup]:
    """For each stage and benchmark a row a group: mean, interval and spread over seeds, and the lead over the first."""
    seeds = {
        row["run"]: row["chosen"][0] or "0" for row in shared.query(queries.RUN_SETTINGS, ["$.seed"], list(groups))
    }
    for after, benchmark in measured:
        values: dict[str, dict[str, float]] = {group: {} for group in groups.values()}
        evaluations: set[str] = set()
        for run, group in groups.items():
            row = scores.get(run, {}).get(after)
            if row and row["benchmark"] == benchmark and row["evaluation"] not in evaluations:
                evaluations.add(row["evaluation"])
                # Of two runs with one seed the first counts, as one measurement of that seed.
                values[group].setdefault(seeds.get(run, run), row["accuracy"])
        body = [[group, *_group_cells(own, next(iter(values.values())))] for group, own in values.items()]
        heads = ["group", "seeds", "mean", "95 % over seeds", "spread", "over the first group, points [95 %]"]
        yield cards.table(heads, body, f"After {after}, {title_of(benchmark)}")


def _group_cells(own: dict[str, float], first: dict[str, float]) -> list[str]:
    if not own:
        return ["0", "not evaluated", "", "", ""]
    over = summary_of_shares(own)
    interval = "not known"  # of one seed, or of equal values
    if over.low is not None and over.high is not None:
        interval = f"{100 * over.low:.1f} to {100 * over.high:.1f} %"
    spread = f"{100 * over.deviation:.1f} points" if over.deviation is not None else "one seed"
    lead_text = ""
    if own is not first and own.keys() & first.keys():
        test = limited(lead(first, own), -1.0, 1.0)
        lead_text = f"{100 * test.lead:+.1f}"
        if test.low is not None and test.high is not None:
            lead_text += f" [{100 * test.low:+.1f}, {100 * test.high:+.1f}], {len(test.seeds)} seeds"
    return [f"{len(own)}", f"{100 * over.mean:.1f} %", interval, spread, lead_text]


def _sweep(sweeps: dict[str, dict[str, Any]]) -> None:
    requested = st.query_params.get("sweep", "")
    if requested and requested not in sweeps:
        shared.warn_of_address("no sweep", requested)
    first = list(sweeps).index(requested) if requested in sweeps else 0
    name = st.selectbox("Sweep", list(sweeps), index=first, key="sweeps") or next(iter(sweeps))
    name = name if name in sweeps else next(iter(sweeps))
    st.query_params["sweep"] = name
    report = _reported(str(open_store().root), name)
    first_arm = report["arms"][0]["arm"]
    st.caption(
        shared.escaped(f"of {report['config']}, by {report['file']}; {report['verdict']}, after {report['after']}")
    )
    for metric in report["metrics"]:
        st.subheader(shared.escaped(metric["title"]))
        measured = [row for row in metric["arms"] if row["accuracy"] is not None]
        if measured:
            values = "; ".join(f"{row['arm']} {100 * row['accuracy']:.1f} %" for row in measured)
            intervals(measured).show(f"{metric['title']} with intervals: {values}")
        heads = metric_heads(metric, first_arm)
        cards.show([cards.table(heads, [metric_cells(row, first_arm) for row in metric["arms"]])])
        for line in spread_lines(metric):
            st.caption(shared.escaped(line))
    if report["metrics"]:
        st.caption(shared.escaped(note(report)))
    st.subheader("Runs")
    rows = [
        dict(zip(("run", "state", "steps", "time (own)", "paid (own)"), run_cells(row), strict=False))
        | {"settings": ", ".join(row["settings"]), "failed in": row["error"] or ""}
        | {"open": f"/?run={row['run']}" if row["run"] else None}
        for row in report["arms"]
    ]
    link = {"open": st.column_config.LinkColumn("open", display_text="open")}
    st.dataframe(rows, hide_index=True, width="stretch", height="content", column_config=link)
    st.caption("Own: of the steps that no run above has.")


@st.cache_data(ttl=CACHE_S, max_entries=64, show_spinner=False)
def _reported(root: str, name: str) -> dict[str, Any]:
    store = open_store(root)
    return sweep_report(store, saved_sweeps(store)[name], shared.fetch)


def intervals(rows: Sequence[dict[str, Any]]) -> Chart:
    """A line for each arm: its accuracy with the 95 % interval over seeds or problems, in the order of the sweep."""
    table = pd.DataFrame(rows)
    arm = nominal("arm", sort=list(table["arm"]), title=None, axis={"labelLimit": 320})
    over = " or ".join(sorted({row["over"] for row in rows}))
    share = {"axis": {"format": "%", "title": f"accuracy, 95 % interval over {over}"}, "scale": {"zero": False}}
    tooltip = [
        nominal("arm"),
        *(quantitative(field, format=".1%") for field in ("accuracy", "low", "high")),
        quantitative("n", title="questions", format=",d"),
        quantitative("seeds", format="d"),
        nominal("over", title="the interval is over"),
    ]
    span = layer({"type": "rule", "strokeWidth": 2}, y=arm, x=quantitative("low", **share), x2={"field": "high"})
    dots = layer(
        {"type": "point", "filled": True, "size": 70, "opacity": 1}, y=arm, x=quantitative("accuracy"), tooltip=tooltip
    )
    return Chart(table, {"layer": [span, dots], "height": 60 + 28 * len(table)})
