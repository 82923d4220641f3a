"""The card of a tuned model: its scores beside the baselines, how its answers are read, and its limits."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nautile.tasks.reporting.cards import card
from nautile.uses.labelled.titles import RECALL, arm_rows, points, recall_rows
from nautile.uses.tune.config import TuneConfig

MOST_CONFUSED = 10


def tuning_card(report: Mapping[str, Any], config: TuneConfig) -> str:
    """The text of card.md for a report (`uses.tune.report.run_tuning`)."""
    columns, rows = arm_rows(report)
    balance = report["data"]["balance"]
    facts: dict[str, Any] = {
        **report,
        "title": {"label": f"{len(report['labels'])} labels", "opinions": "shares of options"}.get(
            report["form"], report["form"]
        ),
        "start": config.start or "a checkpoint",
        "unit": config.data.source_column or ("article" if config.data.reader == "wikipedia_topics" else "text"),
        "columns": columns,
        "arms": rows,
        "leaked": ", ".join(f"{count:,} ({name})" for name, count in report["data"]["leaked"].items()),
        "balance": [
            # Forms without labels have a single row, under the empty name.
            (label or "all rows", *(balance[split].get(label, 0) for split in ("train", "validation", "test")))
            for label in sorted(set().union(*balance.values()))
        ],
        "noise": [(text, ", ".join(targets)) for text, targets in report["data"]["examples"]],
        "leads": [
            (arm["over"], points(arm["lead"]), f"{points(arm['low'])} to {points(arm['high'])}", f"{arm['p']:.2g}")
            for arm in report.get("leads", [])
        ],
    }
    # For labels also the most frequent confusions, and how the checkpoint turns logits into labels.
    if report["form"] == "label":
        names, counts = report["labels"], report["confusion"]
        pairs = [
            (names[target], names[prediction], count)
            for target, row in enumerate(counts)
            for prediction, count in enumerate(row)
            if count and target != prediction
        ]
        chosen = report["chosen"]
        facts |= {
            "recall": recall_rows(report),
            "recall_columns": RECALL,
            "confused": sorted(pairs, key=lambda pair: (-pair[2], pair[:2]))[:MOST_CONFUSED],
            "shots": chosen["shots"] or "all",
            "temperature": f"{chosen['temperature']:.3g}",
            "threshold": f"{chosen['threshold']:.3g}",
        }
    return card(
        "tuning_card.md.j2", {"tags": ["nautile", report["form"], report["method"]]}, facts, Path(__file__).parent
    )
