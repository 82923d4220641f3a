"""Summary and card of an extraction: rows by outcome, refusals, spans."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from nautile.common.text import markdown_table, markdown_text
from nautile.uses.extract.checks import REASONS
from nautile.uses.labelled.config import ExtractConfig

MOST_DETAILS = 10  # on the card


def summary_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts as JSON data: rows, extracted, refused by reason, spans, tokens."""
    refused = Counter(row["reason"] for row in rows if row["reason"])
    return {
        "rows": len(rows),
        "extracted": sum(row["reason"] is None for row in rows),
        "refused": {reason: refused[reason] for reason in REASONS if refused[reason]},
        "spans": sum(len(row["spans"]) for row in rows),
        "tokens": sum(row["tokens"] for row in rows),
    }


def card_of(
    summary: dict[str, Any], config: ExtractConfig, rows: Sequence[dict[str, Any]], unconstrained: Sequence[str] = ()
) -> str:
    """The card as Markdown. `unconstrained`: places in the schema whose strings are only checked, not constrained."""
    outcomes = [("extracted", summary["extracted"])]
    outcomes += [(REASONS[reason], count) for reason, count in summary["refused"].items()]
    shares = [(name, count, f"{100 * count / summary['rows']:.1f} %") for name, count in outcomes]
    details = Counter((row["reason"], row["detail"]) for row in rows if row["detail"])
    common = [(count, reason, markdown_text(detail)) for (reason, detail), count in details.most_common(MOST_DETAILS)]
    parts = [
        "# Extraction",
        f"{summary['rows']:,} rows, {summary['spans']:,} spans found in their texts, {summary['tokens']:,} tokens. "
        f"Strings that are parts of the text: {config.spans}. {_constraint_note(unconstrained)} A document is as good "
        "as the model that wrote it: it is valid by the schema and its spans occur in the text, but whether it states "
        "what the text states is not known.",
        markdown_table(("outcome", "rows", "share"), shares),
        "## Schema",
        f"```json\n{config.json_schema}\n```",
    ]
    if common:
        parts += ["## Most frequent refusals", markdown_table(("rows", "reason", "detail"), common)]
    return "\n\n".join(parts) + "\n"


def _constraint_note(unconstrained: Sequence[str]) -> str:
    if not unconstrained:
        return "Decoding is constrained to parts of the text there."
    places = ", ".join(f"`{markdown_text(place)}`" for place in unconstrained)
    return (
        f"Decoding is constrained to parts of the text there, except at {places} of the schema, which is only checked."
    )
