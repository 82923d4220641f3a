"""Pages that browse texts: groups of rollouts, traces, training samples; distilled documents with their cost.

Texts are searched and sorted in SQL. Samples of a stage are in the catalog while it runs; the files of its artifacts
can be read once they are published.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st
from markupsafe import Markup

from nautile.common.text import counted, dollars
from nautile.flows.dashboard import cards, figures, queries, shared
from nautile.flows.dashboard.figures import Chart, layer, nominal, quantitative
from nautile.flows.dashboard.shared import ChosenRun
from nautile.store.catalog import CatalogRow
from nautile.tasks.engine.stage import stages_with

Fields = dict[str, Any]
KINDS = ("rollouts", "traces", "documents")
PARTS = {"reason": ("reasoning", 5), "answer": ("answer", 5), "follow": ("task", 5), "overall": ("overall", 100)}


def rollouts(chosen: ChosenRun | None) -> None:
    """Draw the page of rollouts: groups of completions of the RL stages, and the traces of self-distillation."""
    st.title("Rollouts and traces")
    choice = _choose_set(chosen, "rollouts")
    if choice is None:
        shared.nothing_yet(chosen, "No rollouts in this run yet.")
        return
    execution, name = choice
    first, second, third, fourth = st.columns([2, 2, 1, 3])
    order = first.selectbox("Order", queries.GROUP_ORDERS, key="order", bind="query-params")
    which = second.selectbox("Which", queries.GROUP_WHICH, key="which", bind="query-params")
    step = third.text_input("Step", placeholder="all", key="step", bind="query-params").strip()
    search = fourth.text_input("Search", placeholder="any text in the group", key="search", bind="query-params")
    if step and not step.isdigit():
        st.warning(f"Step {shared.escaped(step)} is no whole number; all steps are shown.")
        step = ""
    low, high, short, long, verdict = st.columns(5)
    limits = (
        low.number_input("Reward from", value=None, step=0.1, key="reward-from", bind="query-params"),
        high.number_input("Reward to", value=None, step=0.1, key="reward-to", bind="query-params"),
        short.number_input("Tokens from", value=None, min_value=0, step=1, key="tokens-from", bind="query-params"),
        long.number_input("Tokens to", value=None, min_value=0, step=1, key="tokens-to", bind="query-params"),
    )
    answers = verdict.selectbox("Answers", queries.ANSWERS, key="answers", bind="query-params")
    prompt = st.query_params.get("prompt", "")
    if prompt:  # one prompt over all steps, however the groups were chosen before
        order, which, step, search = "oldest step first", "all groups", "", ""
    how = "A step, or one prompt over the steps, is read from all of it."
    newest = order != "oldest step first"
    source, parameters, files = _source(execution, name, how, newest, step=step, prompt=prompt)
    if prompt:
        _over_steps(source, parameters, files, prompt)
    sql = queries.groups(source, order, which, answers=answers)
    st.caption(
        "A group is one prompt with its answers, the best first. Advantage: the reward above the group's mean, "
        "which is what the policy learns from. Steps are counted as in the charts. " + shared.rewards_of([execution])
    )

    def show(rows: Sequence[CatalogRow]) -> None:
        cards.show(_rollout_group(row, "" if prompt else _following(chosen, str(row["prompt"]))) for row in rows)

    values = (*parameters, *limits, prompt, step, step, search, search)
    show_pages("rollouts", show, sql, *values, files=files, unit="groups")


def _following(chosen: ChosenRun | None, prompt: str) -> str:
    """The address of the page with one prompt over all steps."""
    digest = hashlib.md5(prompt.encode("utf-8", "replace"), usedforsecurity=False).hexdigest()
    stage = st.query_params.get("stage")
    return shared.page_link("rollouts", run=chosen.run if chosen else None, stage=stage, prompt=digest)


def _over_steps(source: str, parameters: Sequence[Any], files: bool, prompt: str) -> None:
    """Draw the mean reward of one prompt over the steps, and the way back to all prompts."""
    rows = shared.query(queries.prompt_over_steps(source), *parameters, prompt, files=files)
    left, right = st.columns([4, 1], vertical_alignment="center")
    left.markdown(f"##### One prompt at {counted(len(rows), 'step')}")
    if right.button("All prompts", key="all-prompts"):
        del st.query_params["prompt"]
        st.rerun()
    if len(rows) > 1:
        x = quantitative("step", axis=figures.WHOLE, scale={"zero": False, "nice": False})
        y = quantitative("reward", title="mean reward", scale={"zero": False})
        tooltip = [quantitative("step"), quantitative("reward", format=".3f"), quantitative("answers")]
        line = layer({"type": "line", "point": True}, x=x, y=y, tooltip=tooltip)
        ends = f"{rows[0]['reward']:.2f} at step {rows[0]['step']} to {rows[-1]['reward']:.2f} at {rows[-1]['step']}"
        Chart(pd.DataFrame(rows), {**line, "height": 160}).show(f"Mean reward of the prompt: {ends}")


def training_samples(chosen: ChosenRun | None) -> None:
    """Draw the page of samples during training: each prompt with its texts at all sampled steps.

    The names of pretraining's sets contain the step: pretrain-200.
    """
    st.title("Training samples")
    stages = stages_with(lambda stage: stage.samples == "samples")
    executions = [execution for stage in stages for execution in chosen.executions(stage)] if chosen else []
    sets = [row["set"] for row in shared.query(queries.SAMPLE_SETS, executions)] if executions else []
    if not sets:
        shared.nothing_yet(chosen, "No samples in this run yet: `pretrain.sample_every` sets when they are taken.")
        return
    left, right = st.columns([1, 3])
    steps = sorted({int(digits) for name in sets if (digits := name.rpartition("-")[2]).isdigit()})
    step = left.text_input("Up to step", placeholder="all", key="step", bind="query-params").strip()
    search = right.text_input("Search", placeholder="any text in the record", key="search", bind="query-params")
    last = max((at for at in steps if step.isdigit() and at <= int(step)), default=None)
    if last is not None:
        st.caption(f"The samples of step {last:,}, the last taken by step {step}.")
    elif steps:
        st.caption(f"Samples were taken after step {', '.join(f'{at:,}' for at in steps)}.")

    def show(rows: Sequence[CatalogRow]) -> None:
        cards.show(_sample_group(row, last) for row in rows)

    sql = queries.groups(queries.ALL_SAMPLES, "oldest step first", by_step=False)
    values = (executions, *queries.EVERY_ANSWER, "", "", search, search)
    show_pages("samples", show, sql, *values, unit="prompts")


def documents(chosen: ChosenRun) -> None:
    """Draw the browser of distilled documents, and of rejected ones with their reasons."""
    choice = _choose_set(chosen, "documents")
    if choice is None:
        st.caption("No documents in this run yet.")
        return
    left, right = st.columns([1, 3])
    which = left.selectbox("Which", ("any", "rejected", "kept"), key="which", bind="query-params")
    search = right.text_input("Search", placeholder="any text in the record", key="search", bind="query-params")
    source, parameters, files = _source(*choice, "A search reads all of it.", search=search)

    def show(rows: Sequence[CatalogRow]) -> None:
        cards.show(_document(fields_of(row["fields"])) for row in rows)

    show_pages("documents", show, queries.texts(source, which=which), *parameters, search, search, files=files)


def show_pages(
    name: str,
    show: Callable[[Sequence[CatalogRow]], None],
    sql: str,
    *parameters: Any,
    files: bool = False,
    unit: str = "texts",
) -> None:
    """Draw one page of `queries.texts` or `queries.groups`, with paging buttons."""
    size = queries.GROUPS_PAGE if unit != "texts" else queries.PAGE
    if rows := shared.search_rows(name, sql, *parameters, size=size, files=files, unit=unit):
        show(rows)
    if files and unit == "texts" and rows and rows[0]["total"] == queries.FILE_ROWS:
        st.caption("Others may fit as well: narrow the search.")


def fields_of(text: str) -> Fields:
    """The fields of a JSON record; a record that is not an object becomes the field `text`."""
    fields = json.loads(text)
    return fields if isinstance(fields, dict) else {"text": json.dumps(fields)}


def _choose_set(chosen: ChosenRun | None, page: str) -> tuple[str, str] | None:
    """The execution and the set or file of texts chosen on a page of samples; None if there are none."""
    stages = stages_with(lambda stage: stage.samples == page)
    rows = [row for row in chosen.stages if row["stage"] in stages and row["execution"]] if chosen else []
    sets = {}
    for row in rows:
        execution = row["execution"]
        counts = {row["set"]: row["texts"] for row in shared.query(queries.SAMPLE_SETS, [execution])}
        the = "the first " if page == "documents" else ""  # which are shown while it works; the files have all
        sets[row["label"]] = {name: f"{name} ({the}{count:,})" for name, count in counts.items()}
        sets[row["label"]] |= {name: f"file {name}" for name in _files(execution)}
    by_label = {row["label"]: row["execution"] for row in rows if sets[row["label"]]}
    if not by_label:
        return None
    label = next(iter(by_label))
    left, right = st.columns([2, 3]) if len(by_label) > 1 else (None, st)
    if left is not None:
        picked = left.segmented_control("Stage", list(by_label), default=label, key="stage", bind="query-params")
        label = picked if picked in by_label else label
    titles = sets[label]
    # In the address by name, not bound: the title of a set has its count.
    first, requested = next(iter(titles)), st.query_params.get("set", "")
    index = list(titles).index(requested) if requested in titles else 0
    name = right.selectbox(
        "Set", list(titles), index, format_func=lambda name: titles.get(name, name), key=f"set-{label}"
    )
    name = name if name in titles else first
    st.query_params["set"] = [name] if name != first else []
    return by_label[label], name


def _source(
    execution: str, name: str, how: str, newest: bool = False, **narrowed: str
) -> tuple[str, tuple[Any, ...], bool]:
    """SQL of a set or file of texts, its parameters (`queries.lines_of`), and whether it reads a file.

    Of a long file the last lines are read where `newest`, else the first ones; the page says which, and `how` to reach
    the others.
    """
    path = _files(execution).get(name)
    if path is None:
        return queries.SAMPLES, ([execution], name), False
    rows = 0 if any(narrowed.values()) else shared.line_count(path)
    first = max(0, rows - queries.FILE_ROWS) if newest else 0
    if rows > queries.FILE_ROWS:
        last = first + queries.FILE_ROWS
        st.caption(f"Rows {first + 1:,} to {last:,} of {rows:,} in the file. {how}")
    return queries.FILE_LINES, queries.lines_of(path, first, **narrowed), True


def _files(execution: str) -> dict[str, Path]:
    """The JSON Lines files in the artifacts of an execution; links are not followed."""
    files: dict[str, Path] = {}
    for row in shared.query(queries.ARTIFACTS_OF, [execution]):
        if row["kind"] in KINDS:
            folder = shared.artifact_folder(row["id"])
            paths = sorted(Path(folder).glob("*.jsonl")) if folder else []
            files |= {path.name: path for path in paths if not path.is_symlink()}
    return files


def _rollout_group(row: CatalogRow, following: str = "") -> Markup:
    """The card of a group: its facts, the prompt, and its answers that fit the filter; equal answers share a card.

    `following`: the address of the prompt over all steps.
    """
    members = [fields_of(text) for text in row["members"]]
    # Sampled at a low temperature, half of a group may be one answer; it is shown once, with its count.
    distinct: dict[tuple[Any, ...], list[Fields]] = {}
    fitting = [fields for fields, fits in zip(members, row["fitting"], strict=True) if fits]
    for fields in fitting:
        distinct.setdefault((fields.get("text"), fields.get("reward")), []).append(fields)
    graded = [right for fields in members if (right := _right(fields)) is not None]
    rewards = [reward for fields in members if (reward := cards.number(fields, "reward")) is not None]
    facts = [f"round {row['round']:,}"] if row["round"] is not None else []
    facts += [f"step {row['step']:,}"] if row["step"] is not None else []
    facts += [str(members[0][name]) for name in ("task",) if members[0].get(name)]
    facts += [f"expected {members[0]['expected']}"] if members[0].get("expected") is not None else []
    facts += [f"{sum(graded):,} of {len(graded):,} right"] if graded else []
    facts += [f"mean reward {sum(rewards) / len(rewards):.2f} of 1"] if rewards else ["no rewards"]
    facts += [f"{len(fitting):,} of {len(members):,} answers fit the filter"] if len(fitting) < len(members) else []
    facts += [cards.link(following, "this prompt over the steps")] if following else []
    answers = (_rollout(same[0], len(same)) for same in distinct.values())
    return cards.group(facts, row["prompt"], answers)


def _right(fields: Fields) -> bool | None:
    """Whether the answer was graded as right; None if unknown. Without marks, the reward is the verdict: 0 or 1."""
    parts = fields.get("parts")
    value = cards.number(parts, "correct") if isinstance(parts, dict) else None
    if value is None and not (isinstance(parts, dict) and parts):
        value = cards.number(fields, "reward")
    return None if value not in (0, 1) else bool(value)


def _rollout(fields: Fields, times: int) -> Markup:
    right = _right(fields)
    reward, advantage = cards.number(fields, "reward"), cards.number(fields, "advantage")
    length = cards.number(fields, "length")
    verdict = {True: "right", False: "wrong", None: "not graded"}[right]
    facts = [f"{times:,} the same"] if times > 1 else []
    facts.append("no score" if reward is None else f"reward {reward:.2f} of 1")
    facts += [] if advantage is None else [f"advantage {advantage:+.2f}"]
    facts += [] if length is None else [f"{length:,.0f} tokens"]
    facts += ["cut off at the limit"] if fields.get("truncated") is True else []
    parts = fields["parts"] if isinstance(fields.get("parts"), dict) else {}
    marks = [
        f"{title} {value:g} of {most}"
        for name, (title, most) in PARTS.items()
        if (value := cards.number(parts, name)) is not None
    ]
    line = [Markup('<p class="facts">marks: {}</p>').format(", ".join(marks))] if marks else []
    return cards.card(right, verdict, facts, [*line, *cards.reply_blocks(str(fields.get("text") or ""))])


def _sample_group(row: CatalogRow, last: int | None) -> Markup:
    """The card of a prompt with the samples of all steps, or of step `last` only."""
    members = sorted(map(fields_of, row["members"]), key=lambda fields: cards.number(fields, "step") or 0)
    samples = [fields for fields in members if last is None or fields.get("step") == last]
    reference = next((str(fields["reference"]) for fields in members if fields.get("reference")), None)
    thinks = "<|think_start|>" in row["prompt"]  # else the prompt is a web text to continue
    answers = []
    for fields in samples:
        text = str(fields.get("text") or "")
        right = cards.same_answer(text, reference) if thinks and reference else None
        verdict = {True: "the reference's answer", False: "another answer", None: "continuation"}[right]
        answers.append(cards.card(right, verdict, [f"step {fields.get('step')}"], cards.reply_blocks(text, thinks)))
    if reference:
        answers.append(cards.card(None, "reference", ["as in the data"], cards.reply_blocks(reference, thinks)))
    sources = dict.fromkeys(str(fields["source"]) for fields in members if fields.get("source"))
    return cards.group(sources, row["prompt"], answers)


def _document(fields: Fields) -> Markup:
    reason, provenance = fields.get("rejected") or fields.get("reason"), fields.get("provenance")
    teacher = fields.get("teacher") or (provenance.get("teacher") if isinstance(provenance, dict) else None)
    difficulty = cards.number(fields, "difficulty")
    facts = [f"by {teacher or 'an unnamed teacher'}"]
    facts += [] if difficulty is None else [f"difficulty {difficulty:.2f} of 1"]
    if fields.get("answer") is None and fields.get("reply"):
        blocks = [Markup('<p class="facts">raw reply</p>'), cards.literal(str(fields["reply"]))]
    else:
        blocks = [Markup('<p class="facts">reasoning</p>'), cards.literal(fields.get("reasoning"), title="reasoning")]
        blocks += [Markup('<p class="facts">answer</p>'), cards.literal(fields.get("answer"), "answer")]
    verdict = f"rejected: {reason}" if reason else "kept"
    return cards.group([], fields.get("query"), [cards.card(not reason, verdict, facts, blocks)])


def distillation(chosen: ChosenRun | None) -> None:
    st.title("Distillation")
    executions = chosen.executions("distill") if chosen else []
    if chosen is None or not executions:
        settings = chosen.state.settings if chosen and chosen.state else {}
        has_none = "distill" in settings and settings["distill"] is None
        none = "This run's configuration has no [distill]."
        shared.nothing_yet(chosen, none if has_none else "No distillation in this run yet.")
        return
    artifacts = [row for row in shared.query(queries.ARTIFACTS_OF, executions) if row["kind"] == "documents"]
    newest = artifacts[-1] if artifacts else {"facts": "{}", "config": "{}"}
    facts, section = json.loads(newest["facts"]), json.loads(newest["config"]).get("distill", {})
    if not artifacts and chosen.state:
        # It has published nothing yet, so its limits are those of the run's settings.
        section = chosen.state.settings.get("distill") or {}
    if facts.get("stand_in"):
        st.warning(f"Stand-in: {shared.escaped(str(facts['stand_in']))}")
    _cost(executions, section)
    if facts:
        _mix(facts)
    st.subheader("Documents")
    documents(chosen)


def _cost(executions: list[str], section: dict[str, Any]) -> None:
    rows = shared.query(queries.CALLS, executions)
    # A call without a known price is not free: it has no dollars, and without any priced call the sum is "not known".
    costs = [row["dollars"] for row in rows if row["dollars"] is not None]
    budget = section.get("budget_dollars")
    columns = st.columns(4)
    unknown = sum(row["unknown_dollars"] or 0.0 for row in rows)
    more = f"at most {dollars(unknown)} more for replies that were cut, late or unreadable" if unknown else None
    columns[0].metric("paid", dollars(sum(costs)) if costs else "not known", more, delta_color="off")
    columns[1].metric("budget", dollars(budget) if budget else "no limit")
    columns[2].metric("attempts", f"{sum(row['attempts'] for row in rows):,}")
    columns[3].metric("completion tokens", f"{sum(row['tokens_out'] or 0 for row in rows):,}")
    if budget and costs:
        st.progress(min(1.0, sum(costs) / budget), text=f"{sum(costs) / budget:.0%} of the budget")
    if any(costs):
        st.markdown("##### Cost by teacher")
        cost_chart(rows, budget).show()
    st.dataframe(rows, hide_index=True, width="stretch", column_config=_CALLS, alt="Calls by stage and endpoint")
    with st.expander("Attempts by status"):
        statuses = shared.query(queries.CALL_STATUSES, executions)
        counts = ((row["endpoint"], row["status"], f"{row['attempts']:,}") for row in statuses)
        cards.show([cards.table(("endpoint", "status", "attempts"), counts)])


_CALLS = {
    **{
        name: st.column_config.NumberColumn(title, format="localized")
        for name, title in (
            ("attempts", "attempts"),
            ("tokens_in", "prompt tokens"),
            ("tokens_out", "completion tokens"),
        )
    },
    "remembered": st.column_config.NumberColumn("cached", help="Answered from the reply cache, without a call."),
    "dollars": st.column_config.NumberColumn("cost, $", format="%.4f"),
    "unknown_dollars": st.column_config.NumberColumn(
        "not certain, $", format="%.4f", help="The most that replies may have cost that were cut, late or unreadable."
    ),
    "median_s": st.column_config.NumberColumn("median, s", format="%.2f"),
    "p95_s": st.column_config.NumberColumn("95th percentile, s", format="%.2f"),
}


def cost_chart(rows: list[CatalogRow], budget: float | None) -> Chart:
    """Stacked bars of dollars per endpoint and purpose, and a line at the budget."""
    costs = [{**row, "dollars": row["dollars"] or 0.0, "purpose": row["purpose"] or "call"} for row in rows]
    dollars_axis = {"title": "dollars", "format": "$~g"}
    bars = layer(
        "bar",
        x=quantitative("dollars", aggregate="sum", axis=dollars_axis),
        y=nominal("endpoint", title=None),
        color=nominal("purpose", legend=figures.BELOW),
        tooltip=[
            nominal("endpoint"),
            nominal("purpose"),
            quantitative("dollars", aggregate="sum", title="dollars", format="$.4f"),
        ],
    )
    layers = [bars]
    if budget:  # marks without a value are unnamed groups for screen readers
        limit = {"data": {"values": [{"budget": budget, "label": "budget"}]}}
        red = figures.shade("#b00020", "#ff8182")
        rule = layer({"type": "rule", "color": red, "strokeDash": [4, 3]}, x=quantitative("budget"))
        mark = {"type": "text", "color": red, "align": "right", "dx": -4, "baseline": "top"}
        words = layer(mark, x=quantitative("budget"), y={"value": 0}, text=nominal("label"))
        layers += [{**limit, **rule}, {**limit, **words}]
    return Chart(pd.DataFrame(costs), {"layer": layers, "height": figures.ROW})


def _mix(facts: dict[str, Any]) -> None:
    left, right = st.columns(2, gap="large")
    teachers = [
        {"teacher": name, "outcome": outcome, "documents": count}
        for name, counts in facts.get("teachers", {}).items()
        for outcome, count in (("kept", counts["kept"]), ("rejected", counts["asked"] - counts["kept"]))
    ]
    count = quantitative("documents", axis={**figures.WHOLE, "title": "documents"})
    with left:
        st.subheader("Mix of teachers")
        color = nominal("outcome", legend=figures.BELOW)
        bars = layer("bar", x=count, y=nominal("teacher", title=None), color=color)
        Chart(pd.DataFrame(teachers), {**bars, "height": figures.ROW}).show()
    rejected = [{"reason": reason, "documents": count} for reason, count in facts.get("rejected", {}).items()]
    with right:
        st.subheader("Rejected, by reason")
        if rejected:
            bars = layer("bar", x=count, y=nominal("reason", sort="-x", title=None))
            Chart(pd.DataFrame(rejected), {**bars, "height": figures.ROW}).show()
        else:
            st.caption("None.")
