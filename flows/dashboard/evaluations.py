"""The page Evaluations: Tables 1 and 2 with the paper's figures, the history of each benchmark, and the problems."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import streamlit as st
from markupsafe import Markup

from nautile.common.errors import ConfigError
from nautile.common.files import read_json
from nautile.common.text import counted
from nautile.evals.scoring.scores import marked_title
from nautile.evals.tables.results import GAIN, MISSING, ResultTable, table_1, table_2
from nautile.flows.dashboard import cards, figures, queries, samples, shared
from nautile.flows.dashboard.figures import Chart, layer, nominal, quantitative, temporal
from nautile.flows.dashboard.shared import ChosenRun
from nautile.flows.listings import words_of
from nautile.store.catalog import CatalogRow
from nautile.store.mirror import open_store
from nautile.tasks.engine.stage import stages_with

WHICH = ("any", "right", "wrong", "not graded", "strict and lenient differ", "unfinished")


def page(chosen: ChosenRun | None) -> None:
    st.title("Evaluations")
    own_executions = [row["execution"] for row in chosen.stages if row["execution"]] if chosen else []
    if not shared.query(queries.EVALUATIONS, [], 1, 0):
        st.caption("No evaluation in the store yet.")
        return
    evaluations = _with_scores(shared.query(queries.EVALUATIONS_OF, own_executions) if own_executions else [])
    # A run is joined to its evaluations by execution: an evaluation that it reused was made by another run.
    labels = {row["execution"]: row["label"] for row in chosen.stages} if chosen else {}
    by_stage = {labels[row["execution"]].partition(":")[2]: row for row in evaluations if row["execution"] in labels}
    trained = stages_with(lambda stage: stage.trains)
    scores = {stage: by_stage[stage]["scores"] for stage in trained if stage in by_stage}
    if scores:
        _show_table(measured_only(table_1(scores)))
    else:
        st.caption("This run has no evaluation yet; those of the store are below.")
    own = {stage: by_stage[stage] for stage in (*trained, *sorted(by_stage)) if stage in by_stage}
    named = {f"{stage} · {row['id']}": row for stage, row in own.items()}
    if own:
        with st.container(horizontal=True):
            for name, stage in zip(named, own, strict=True):
                run = chosen.run if chosen else None
                st.link_button(f"Problems after {stage}", shared.page_link("evaluations", run=run, evaluation=name))
    st.subheader("Benchmarks over time")
    st.caption(
        "Strict accuracy with its 95 % interval over problems. A line joins the stages of one run; runs, whose "
        "configurations may differ, are never joined. Dashed: chance level. A click on a point opens its problems."
    )
    search = st.text_input(
        "Evaluations of", placeholder="configuration, stage, run or id", key="history", bind="query-params"
    )
    # As many files of scores are read as a page of evaluations has, so that a page costs the same at every size.
    page_rows = shared.search_rows(
        "history", queries.EVALUATIONS, words_of(search), size=queries.LISTED, unit="evaluations"
    )
    listed = _with_scores(page_rows)
    _history([*listed, *(row for row in evaluations if row["id"] not in {other["id"] for other in listed})])
    # The picker offers this run's evaluations by stage, or, before it has any, those of the store by id.
    named = named or {row["id"]: row for row in listed}
    if requested := st.query_params.get("evaluation", ""):  # of another run, by its address
        asked = _with_scores(shared.query(queries.EVALUATION, requested))
        if not asked and requested not in named:
            shared.warn_of_address("no evaluation", requested)
        named |= {row["id"]: row for row in asked}
    if not named:
        return
    st.subheader("Problems")
    picked = st.selectbox("Evaluation", list(named), key="evaluation", bind="query-params")
    row = named.get(picked) or next(iter(named.values()))
    with st.expander("This evaluation beside the paper's Table 2"):
        _show_table(measured_only(table_2({str(row["scores"].get("model") or row["id"]): row["scores"]})))
    st.link_button("Where these scores come from", shared.lineage_link(row["id"]))
    _problems(row)


def _with_scores(rows: Sequence[CatalogRow]) -> list[CatalogRow]:
    """The rows of evaluations that are on this machine, each with its `scores`."""
    return [{**row, "scores": scores} for row in rows if (scores := _scores_of(row["id"], row["execution"] or ""))]


def _scores_of(evaluation: str, execution: str) -> dict[str, Any]:
    """`scores.json` of an evaluation; empty if it is not on this machine."""
    try:
        return _read_scores(evaluation, execution)
    except ConfigError:
        return {}


@st.cache_data(max_entries=512, show_spinner=False)
def _read_scores(evaluation: str, execution: str) -> dict[str, Any]:
    """Read `scores.json`, cached without time limit. Raises `ConfigError`, not cached, if the evaluation is not here.

    `execution`: part of the cache key, because a forced run makes the evaluation again.
    """
    return read_json(open_store().get(evaluation).path / "scores.json") or {}


def measured_only(table: ResultTable) -> ResultTable:
    """The table without rows that were not measured and without columns that are then empty.

    A note lists the rows that are left out, because missing is not zero.
    """
    # The columns are partly the paper's figures: a row counts as measured by its first column of ours.
    ours = [place for place, name in enumerate(table.columns) if name not in _NOT_OURS and not name.startswith("Paper")]
    first = ours[1] if len(ours) > 1 else 0
    rows = [row for row in table.rows if row[first] not in (MISSING, "")]
    left_out = [row[0] for row in table.rows if row not in rows]
    column_indices = [
        place
        for place in range(len(table.columns))
        if place == 0 or not rows or any(row[place] not in (MISSING, "") for row in rows)
    ]
    notes = (*table.notes, f"Not measured: {', '.join(left_out)}.") if left_out else table.notes
    return replace(
        table,
        columns=tuple(table.columns[place] for place in column_indices),
        rows=tuple(tuple(row[place] for place in column_indices) for row in rows),
        notes=notes,
    )


_NOT_OURS = (GAIN, "Difference", "What differs", "n", "Lenient")


def _show_table(table: ResultTable) -> None:
    """Draw a table of the paper with its notes; its cells wrap."""
    st.subheader(table.title)
    cards.show([cards.table(table.columns, table.rows)])
    for note in table.notes:
        st.caption(shared.escaped(note))


def _history(evaluations: Sequence[CatalogRow]) -> None:
    """Draw a chart of accuracies over time for each measured benchmark."""
    points = [
        {
            "benchmark": benchmark,
            "evaluation": row["id"],
            "run": row["run"] or row["id"],
            "configuration": row["config"] or "not of a run",
            "made": row["created"],
            "after": (row["label"] or "").partition(":")[2] or "no stage",
            "title": marked_title(score),
            "stand_in": score.get("stand_in") or "",
            "not_screened": score.get("not_screened") or "",
            "accuracy": score["accuracy"],
            "low": score["interval"][0],
            "high": score["interval"][1],
            "chance": score.get("chance") or None,
            "n": score["n"],
            "link": shared.page_link("evaluations", evaluation=row["id"]),
        }
        for row in evaluations
        for benchmark, score in row["scores"].get("benchmarks", {}).items()
        if score.get("accuracy") is not None
    ]
    if not points:
        st.caption("No score was measured yet.")
        return
    columns = st.columns(2, gap="large")
    for index, benchmark in enumerate(sorted({point["benchmark"] for point in points})):
        own = [point for point in points if point["benchmark"] == benchmark]
        with columns[index % 2]:
            marked = next((point for point in own if point["not_screened"]), own[0])
            st.markdown(f"##### {shared.escaped(marked['title'])}")
            if own[0]["stand_in"]:
                st.caption(f"Stand-in: {shared.escaped(own[0]['stand_in'])}")
            for note, count in Counter(point["not_screened"] for point in own if point["not_screened"]).items():
                st.caption(f"{note[:1].upper()}{note[1:]}: {count} of {counted(len(own), 'evaluation')}")
            newest = max(own, key=lambda point: point["made"])
            text = f"{newest['title']}: {len(own)} evaluations, the newest {newest['accuracy']:.1%}"
            history(own).show(text)


def history(points: Sequence[CatalogRow]) -> Chart:
    """Chart of one benchmark over time: a point with its interval per evaluation; lines join the stages of a run."""
    table = pd.DataFrame(points).sort_values("made")
    table["made"] = pd.to_datetime(table["made"])
    clock = figures.clock(table["made"], 4) | {"labelAngle": 0}
    x = temporal("made", title="evaluated (UTC)", axis=clock, scale={"type": "utc", "padding": 16})
    share = {"format": "%", "title": "accuracy, strict"}
    legend = {**figures.BELOW, "symbolOpacity": 1, "columns": 2}
    color = nominal("after", sort=stages_with(lambda stage: stage.trains), legend=legend, scale=figures.COLOURS)
    tooltip = [
        *(nominal(field) for field in ("evaluation", "configuration", "after")),
        *(quantitative(field, format=".1%") for field in ("accuracy", "low", "high")),
        quantitative("n", format=",d"),
    ]
    if table.get("not_screened", pd.Series(dtype=str)).any():
        tooltip.append(nominal("not_screened", title="screening"))
    linked = {"href": nominal("link")} if "link" in table else {}
    y, joined = quantitative("accuracy"), {"type": "line", "opacity": 0.4, "color": "#888888"}
    span = {"y": quantitative("low", axis=share), "y2": {"field": "high"}}
    dots = {"type": "point", "filled": True, "size": 70, "opacity": 1}
    # Line, interval, point: a mark that is drawn later lies on top, and the point must be clickable.
    layers = [
        layer(joined, x=x, y=y, detail=nominal("run")),
        layer({"type": "rule", "strokeWidth": 1.5}, x=x, **span, color=color),
        layer(dots, x=x, y=y, color=color, tooltip=tooltip, **linked),
    ]
    if table["chance"].notna().any():  # a mark without values is an unnamed group for screen readers
        chance = {"type": "rule", "strokeDash": [4, 3], "color": "#888888"}
        layers.append(layer(chance, y=quantitative("chance", aggregate="max")))
    return Chart(table, {"layer": layers, "height": 300})


def _problems(row: CatalogRow) -> None:
    counts = {row["set"]: row["texts"] for row in shared.query(queries.SAMPLE_SETS, [row["execution"]])}
    if not counts:
        st.caption("Its problems are not in this store's catalog.")
        return
    left, middle, right = st.columns([1, 1, 2])
    name = left.selectbox("Benchmark", list(counts), key="benchmark", bind="query-params")
    which = middle.selectbox("Verdict", WHICH, key="verdict", bind="query-params")
    search = right.text_input("Search", placeholder="any text in the record", key="search", bind="query-params")

    def show(rows: Sequence[CatalogRow]) -> None:
        cards.show(_problem(samples.fields_of(row["fields"])) for row in rows)

    sql = queries.texts(queries.SAMPLES, which=which)
    samples.show_pages("evaluation", show, sql, [row["execution"]], name, search, search)


def _problem(fields: dict[str, Any]) -> Markup:
    """The card of a problem: its prompt, the answer and the expected answer."""
    strict, lenient = (fields.get(name) for name in ("strict", "lenient"))
    right = strict if isinstance(strict, bool) else None
    verdict = {True: "right", False: "wrong", None: "not graded"}[right]
    facts = [str(fields[name]) for name in ("category", "id") if fields.get(name)]
    about = [f"expected {fields.get('expected')}"]
    about += [f"read as {fields['parsed']}"] if fields.get("parsed") is not None else ["no answer was read"]
    about += ["right where the last candidate counts"] if lenient is True and right is False else []
    about += [str(fields["problem"])] if fields.get("problem") else []
    about += ["cut off at the limit"] if fields.get("truncated") is True else []
    # Scored by likelihood, the model wrote nothing: what it did is a log-probability for each choice.
    if fields.get("way") == "likelihood" and isinstance(fields.get("logprobs"), list):
        options = zip(map(str, fields.get("options") or ()), fields["logprobs"], strict=False)
        choices = cards.table(("choice", "log-probability"), ((text, f"{value:.2f}") for text, value in options))
        return cards.group(facts, fields.get("prompt"), [cards.card(right, verdict, about, [choices])])
    blocks = cards.reply_blocks(str(fields.get("output") or ""))
    return cards.group(facts, fields.get("prompt"), [cards.card(right, verdict, about, blocks)])
