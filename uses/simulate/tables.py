"""The tables and the card of a simulated survey. A model's figure is always shown beside the baselines."""

from collections.abc import Mapping
from typing import Any

from nautile.common.text import markdown_table, markdown_text

ARMS = {
    "model": "the model",
    "uniform": "uniform: each option alike",
    "majority": "majority: everybody takes the commonest option",
    "overall": "the overall human distribution, for every group",
    "regression": "logistic regression on the demographics",
    "forest": "random forest on the demographics",
    "humans": "humans against humans: the same people resampled",
}
FIGURES = {
    "similarity": "1 − JSD",
    "wasserstein": "Wasserstein",
    "group_similarity": "1 − JSD by group",
    "group_wasserstein": "Wasserstein by group",
    "gap": "gap of groups",
    "slope": "steerability: slope",
    "cosine": "steerability: cosine",
    "rank": "rank correlation",
}
NOT_FOR = (
    "It is no poll: nobody was asked. Do not report a figure as what people, or a group of people, think.",
    "Do not use it where a decision about people, a policy, an election or a market depends on it, nor in place of "
    "asking them. Where humans were asked, use their answers.",
    "Do not use it to write to, persuade or rate persons or groups: a persona is a template, and what a model has it "
    "say repeats what its training text says about such people, stereotypes included.",
    "Do not carry it over to other questions, people, countries or times than those it was compared on.",
)
NOTHING_TO_COMPARE = (
    "There is nothing to compare with: this survey has no human answers. Whether these shares are like those of any "
    "people is not known; beside them stands only what a model without any opinion gives (uniform)."
)
READING = (
    "1 − JSD: 1 where two distributions are equal. Wasserstein: 0 where equal, 1 at the ends of the scale (ordered "
    "questions only). Gap: between the group of a field that is met best and worst. Slope: 1 where a group's "
    "distribution moves from everybody's as far as that of humans, 0 where it does not; cosine: the direction "
    "alone. Humans against humans is what chance among so many humans leaves: an arm within its interval is as close "
    "as these humans can tell."
)


def score_rows(summary: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(columns, rows) of the scores: a row for each arm, with the intervals; figures that no arm has are left out."""
    scores = summary["scores"]
    names = [name for name in FIGURES if any(score.get(name) for score in scores.values())]
    rows = [[ARMS[arm], *(_with_interval(scores[arm].get(name)) for name in names)] for arm in ARMS if arm in scores]
    return ["", *(FIGURES[name] for name in names)], rows


def scores_table(summary: Mapping[str, Any]) -> str:
    """The scores as Markdown; empty without human answers."""
    return markdown_table(*score_rows(summary)) if summary["compared"] else ""


def people_counts(cell: Mapping[str, Any]) -> str:
    """How many personas and humans a group has, as far as that is known."""
    counts = []
    for name, word in (("model", "personas"), ("humans", "humans")):
        arm = cell["arms"].get(name)
        if arm is not None and arm["people"] is not None:
            effective = f", weighted as {arm['effective']:,.0f} alike" if "effective" in arm else ""
            counts.append(f"{arm['people']:,} {word}{effective}")
    return ", ".join(counts) or "published shares"


def question_tables(summary: Mapping[str, Any], groups: bool = True) -> str:
    """A table for each question and group: the share of each option in percent, of the model and of every baseline."""
    parts = []
    for question in summary["questions"]:
        parts.append(f"### {markdown_text(question['text'])}")
        for cell in question["cells"]:
            if not cell["by"] or groups:
                parts.append(_cell_table(question, cell))
    return "\n\n".join(parts)


def report(summary: Mapping[str, Any]) -> str:
    """The content of `tables.md`."""
    parts = [f"# {markdown_text(summary['title'])}, answered by {markdown_text(summary['model'])}", _who(summary)]
    if summary["compared"]:
        parts += [scores_table(summary), READING, _winners(summary)]
    else:
        parts.append(NOTHING_TO_COMPARE)
    return "\n\n".join([*parts, "## Distributions", question_tables(summary)]) + "\n"


def card(summary: Mapping[str, Any]) -> str:
    """The card: what was done, what the figures must not be used for, and how close they are to humans."""
    humans = summary["humans"]
    parts = [
        f"# {markdown_text(summary['title'])}, simulated",
        f"{markdown_text(summary['model'])}, a language model, answered as each of {summary['personas']:,} personas.",
        "## What these figures must not be used for",
        "\n".join(f"- {line}" for line in NOT_FOR),
        "## How they were made",
        _who(summary),
        f"The probability of an option is the likelihood of the {summary['answer']} of each option over the sum of all "
        "options', averaged over orders of the options; nothing is sampled. Intervals (95 % unless set otherwise) are "
        "of a bootstrap over people.",
        "## How close they are to humans",
    ]
    if summary["compared"]:
        parts += [scores_table(summary), READING, _winners(summary)]
        parts.append(
            f"Humans: {markdown_text(humans['source'])}. Licence: {markdown_text(humans['licence'] or 'not stated')}."
        )
    else:
        parts.append(NOTHING_TO_COMPARE)
    parts += ["## Preference for places", _bias(summary)]
    return "\n\n".join(parts) + "\n"


def _cell_table(question: Mapping[str, Any], cell: Mapping[str, Any]) -> str:
    arms = {name: cell["arms"][name] for name in ARMS if name in cell["arms"]}
    who = "everybody" if not cell["by"] else f"{markdown_text(cell['by'])}: {markdown_text(cell['group'])}"
    heading = f"**{who}** ({people_counts(cell)})"
    if "humans" not in arms:
        heading += "; no human answers: nothing to compare with"
    rows = []
    for i, option in enumerate(question["options"]):
        # Shares of published groups have no interval, which is then left out of their cells.
        shares = [f"{100 * arm['shares'][i]:.1f}" for arm in arms.values()]
        intervals = [
            f" [{100 * arm['low'][i]:.1f}, {100 * arm['high'][i]:.1f}]" if "low" in arm else "" for arm in arms.values()
        ]
        rows.append([markdown_text(option), *(f"{share}{ends}" for share, ends in zip(shares, intervals, strict=True))])
    names = {"humans": "humans", "overall": "all humans"}
    return f"{heading}\n\n" + markdown_table(["", *(names.get(name, name) for name in arms)], rows)


def _with_interval(figure: Mapping[str, float] | None) -> str:
    if not figure:
        return "–"
    return f"{figure['value']:.3f} [{figure['low']:.3f}, {figure['high']:.3f}]"


def _who(summary: Mapping[str, Any]) -> str:
    """Sentences about the personas, and about the humans that they are compared with."""
    humans = summary["humans"]
    left_out = summary["left_out"]
    lines = [f"{summary['personas']:,} personas from {markdown_text(summary['personas_source'])}."]
    if left_out:
        lines.append(f"{left_out:,} of them are longer than the model's context and were left out.")
    if humans["kind"] == "the same people":
        lines.append(
            f"They are {humans['judged']:,} held-out respondents, judged by their own answers; baselines know the "
            f"other {humans['train']:,}."
        )
    elif humans["kind"] == "held-out respondents":
        lines.append(
            f"They are compared with {humans['judged']:,} held-out respondents; baselines know the other "
            f"{humans['train']:,}."
        )
    elif humans["kind"] == "published shares":
        lines.append(
            "They are compared with published shares. There are no single respondents, so no regression or forest "
            "could be fitted, and the overall arm is made of the figures that it is compared with."
        )
        if "humans" not in summary["scores"]:
            lines.append(
                "How many humans answered is not published, so nothing says how far chance moves their shares."
            )
    if humans.get("weighted"):
        lines.append(
            "The respondents count by their survey weights; numbers of people are unweighted. Their effective sample "
            f"size is {humans['effective']:,.0f} (Kish)."
        )
    if without := {name: count for name, count in humans.get("missing", {}).items() if count}:
        counted = ", ".join(f"{markdown_text(name)} {count:,}" for name, count in without.items())
        lines.append(f"Respondents without an answer, who are left out of that question: {counted}.")
    if humans.get("unmatched_groups"):
        named = "; ".join(markdown_text(group) for group in humans["unmatched_groups"])
        lines.append(f"No persona is in these published groups, which are not compared: {named}.")
    return " ".join(lines)


def _winners(summary: Mapping[str, Any]) -> str:
    """Which baselines are at least as close to humans as the model."""
    # The harder comparison where there is one: everybody's shares are easier to meet than those of each group.
    figure = "group_similarity" if summary["scores"]["model"].get("group_similarity") else "similarity"
    model = summary["scores"]["model"][figure]
    if not model:
        return ""
    ahead = [
        ARMS[arm].partition(":")[0]
        for arm in ARMS
        if arm not in ("model", "humans")
        and (score := summary["scores"].get(arm, {}).get(figure))
        and score["value"] >= model["value"]
    ]
    if not ahead:
        return f"In {FIGURES[figure]} the model is closer to humans than every baseline."
    return f"In {FIGURES[figure]} these are at least as close to humans as the model: {'; '.join(ahead)}."


def _bias(summary: Mapping[str, Any]) -> str:
    rows = [
        [markdown_text(name), str(bias["orders"]), "yes" if bias["balanced"] else "no", f"{bias['bias']:.3f}",
         f"{bias['spread']:.3f}", " ".join(f"{share:.3f}" for share in bias["by_place"])]
        for name, bias in summary["position_bias"].items()
    ]  # fmt: skip
    note = (
        "Mean probability by the place of an option in the list, over all personas and orders: alike for a model "
        "without such a preference. Bias: the largest distance from that; spread: mean total variation between one "
        "order and the mean. Where the orders are not balanced, places also show which options are liked."
    )
    return (
        markdown_table(["question", "orders", "balanced", "bias", "spread", "by place"], rows or [["–"] * 6])
        + f"\n\n{note}"
    )
