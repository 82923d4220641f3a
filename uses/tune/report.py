"""Run a tuning of any form; write its report (`tuning.json`), for labels also `rows.parquet`, and its card."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from nautile.common.files import atomic_path, write_json
from nautile.tasks.reporting.card import card
from nautile.uses.labelled.config import TuneConfig
from nautile.uses.labelled.scores import (
    RECALL,
    arm_rows,
    calibration_note,
    confusion,
    lead,
    points,
    probabilities,
    recall_rows,
    recalls,
    reliability,
)
from nautile.uses.tune.fine_tune import kept_losses
from nautile.uses.tune.replies import tune_replies
from nautile.uses.tune.tuner import ABSTAINS, ArmRun, LabelTuner, LabelTuning

TUNING, ROWS = "tuning.json", "rows.parquet"
PRETRAINED_ON = "The run's own pretraining has read these articles: a figure here says nothing about unseen text."
MOST_CONFUSED = 10


def run_tuning(run: LabelTuning, checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Tune, write the checkpoint into `checkpoint` and the report into `folder`; returns the report, JSON data.

    `arms`: the scores of each method or baseline and number of shots. `chosen`: the run that became the checkpoint.
    For labels also `confusion` [right][predicted], `recall` by label, `reliability` and `leads` (over each baseline at
    the same shots, by a paired bootstrap over seeds and rows), all on the test rows.
    """
    config, splits = run.config, run.splits
    report: dict[str, Any] = {
        "form": config.form,
        "method": config.method,
        "labels": list(splits.labels),
        "rows": {name: len(getattr(splits, name)) for name in ("train", "validation", "test")},
        "data": asdict(splits.report),
        "notes": [PRETRAINED_ON] if config.data.reader == "wikipedia_topics" else [],
    }
    if config.form == "label":
        # Fit all arms, write the checkpoint, and score on the test rows.
        tuner = LabelTuner(run, checkpoint)
        runs = tuner.arms()
        labels, chosen = tuner.finish(runs)
        report |= {
            "arms": tuner.scores(runs),
            "learning_rates": kept_losses(config, run.work),
            "leads": _leads(tuner, runs, chosen),
            "chosen": {
                "shots": chosen.shots,
                "seed": chosen.seed,
                "temperature": labels.temperature,
                "threshold": labels.threshold,
                "validation_loss": chosen.validation_loss,
                "calibrated": labels.calibrated,
            },
        }
        note = calibration_note(labels.validation_rows, labels.validation_errors, labels.calibrated)
        report["notes"].append(f"{note[0].upper()}{note[1:]}.")
        if config.accuracy is not None and chosen.threshold == ABSTAINS:
            cause = f"No threshold reaches the accuracy {config.accuracy} on the validation rows"
            report["notes"].append(f"{cause}: the model always abstains.")
        # Predictions of the chosen run on the test rows: confusion matrix, reliability diagram, a row for each text.
        probabilities_TC = probabilities(chosen.test_TC, chosen.temperature)
        predicted_T = probabilities_TC.argmax(axis=1)
        report["confusion"] = confusion(predicted_T, tuner.targets_T, len(splits.labels)).tolist()
        report["recall"] = recalls(predicted_T, tuner.targets_T, splits.labels)
        report["reliability"] = [asdict(part) for part in reliability(probabilities_TC, tuner.targets_T)]
        rows = {
            "text": [row.text for row in tuner.test],
            "label": [row.target for row in tuner.test],
            "given": [splits.labels[i] for i in predicted_T],
            "probability": probabilities_TC.max(axis=1),
            "abstained": probabilities_TC.max(axis=1) < chosen.threshold,
        }
        with atomic_path(folder / ROWS) as temporary:
            pyarrow.parquet.write_table(pyarrow.table(rows), temporary)
    else:
        report |= tune_replies(run, checkpoint)
    # A note for each search over learning rates.
    for shots, losses in report["learning_rates"].items():
        by_rate = ", ".join(f"{rate}: {loss:.3f}" for rate, loss in losses.items())
        best = min(losses, key=losses.__getitem__)
        heading = f"Learning rate at {shots if shots != '0' else 'all'} shots"
        report["notes"].append(f"{heading}: {best}, by the loss on the validation rows ({by_rate} nats).")
    write_json(folder / TUNING, report)
    return report


def _leads(tuner: LabelTuner, runs: list[ArmRun], chosen: ArmRun) -> list[dict[str, Any]]:
    """The tuned model's lead over each baseline with the same shots, on the same rows."""

    def is_right(arm: str) -> np.ndarray:
        """Which rows each seed of an arm has right, bool [seeds, rows]."""
        arm_runs = [run for run in runs if (run.arm, run.shots) == (arm, chosen.shots)]
        return np.stack([run.test_TC.argmax(axis=1) == tuner.targets_T for run in arm_runs])

    # All seeds of the chosen method, not only the chosen one, which was chosen for its result.
    model_right = is_right(chosen.arm)
    return [{"over": name, **lead(model_right, is_right(name))} for name in tuner.run.config.baselines]


def tuning_card(report: Mapping[str, Any], config: TuneConfig) -> str:
    """The text of card.md for a report of `run_tuning`."""
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
