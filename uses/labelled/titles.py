"""Format the scores of a tuning as table rows; names of outcomes. It imports no JAX, so that displays start quickly."""

from collections.abc import Mapping
from typing import Any

TITLES = {
    "majority": "most frequent label",
    "tfidf": "TF-IDF + logistic regression",
    "minilm": "MiniLM + logistic regression",
    "head": "this model: head on the frozen model",
    "verbalised": "this model: likelihood of the labels",
    "full": "this model: all weights",
    "lora": "this model: LoRA",
}
MISSING = "—"
UNTUNED = "by the likelihood of each label's text, without tuning: the probabilities are not calibrated"
RECALL = ("Label", "Rows", "Of them right", "Recall, 95 %")
LABELLED, ABSTAINED, NO_TEXT = "label", "abstained", "no_text"  # kinds of outcomes of a classification


def arm_rows(report: Mapping[str, Any]) -> tuple[list[str], list[tuple[str, ...]]]:
    """(columns, rows) of the arms of a report; rates are in percent."""
    rows: list[tuple[str, ...]] = []
    # Forms other than labels have a loss before tuning, losses of baselines, and for entities the F1 of spans.
    if report["form"] != "label":
        before = f"before tuning ({report['unit']})"
        rows.append((before, MISSING, f"{report['before']['test']:.3f}", MISSING, MISSING))
        for name, value in report.get("baselines", {}).items():
            if name != "covered":
                loss = MISSING if value is None else f"{value:.3f}"
                rows.append((name.replace("_", " "), MISSING, loss, MISSING, MISSING))
        for arm in report["arms"]:
            # None where neither the model nor the data has any entity.
            f1 = [part["f1"] for part in arm["spans"] if part and part["f1"] is not None]
            mean_f1 = f"{100 * sum(f1) / len(f1):.1f}" if f1 else MISSING
            spread = f"{arm['low']:.3f} to {arm['high']:.3f}"
            rows.append((TITLES[arm["arm"]], shots_shown(arm), f"{arm['loss']:.3f}", spread, mean_f1))
        return ["Arm", "Shots", "Test loss", "Over the seeds", "Span F1"], rows
    for arm in report["arms"]:
        covered = MISSING if arm["accuracy_covered"] is None else f"{100 * arm['accuracy_covered']:.1f}"
        rows.append(
            (
                TITLES[arm["arm"]],
                shots_shown(arm),
                interval(arm["accuracy"]),
                interval(arm["macro_f1"]),
                f"{100 * arm['ece']:.1f}",
                f"{covered} of {100 * arm['coverage']:.0f}",
            )
        )
    return ["Arm", "Shots", "Accuracy", "Macro-F1", "Calibration error", "Accuracy of those covered"], rows


def recall_rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The rows of a table of recall by label, under the columns `RECALL`."""
    return [
        (
            str(part["label"]),
            f"{part['rows']:,}",
            f"{part['right']:,}",
            MISSING
            if part["recall"] is None
            else interval({"value": part["recall"], "low": part["interval"][0], "high": part["interval"][1]}),
        )
        for part in report.get("recall", ())
    ]


def calibration_note(rows: int | None, errors: int | None, calibrated: bool | None) -> str:
    """What is known about the calibration of a tuned model's probabilities, from its label set."""
    if calibrated is None:
        return "whether the probabilities are calibrated is not recorded"
    assert rows is not None
    assert errors is not None
    fitted = f"its {rows:,} validation rows, {errors:,} of them wrong"
    if calibrated:
        return f"the probabilities are calibrated on {fitted}"
    return f"whether the probabilities are calibrated is not known: {fitted}, do not show it"


def shots_shown(arm: Mapping[str, Any]) -> str:
    """The number of shots as text; 0 means all rows, or no examples for the likelihood of labels."""
    return str(arm["shots"] or ("none" if arm["arm"] == "verbalised" else "all"))


def interval(part: Mapping[str, float]) -> str:
    """A rate in percent with its interval."""
    return f"{100 * part['value']:.1f} [{100 * part['low']:.1f}, {100 * part['high']:.1f}]"


def points(value: float) -> str:
    """A difference of rates in points."""
    return f"{100 * value:+.1f}"
