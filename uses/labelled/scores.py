"""Scores of a classifier over several seeds, calibration of its probabilities, abstention, and tables of all these.

Validation rows that are all right would be best explained by probabilities of 1. So the temperature is fitted as if one
more row had been wrong, and a classifier counts as calibrated only where its validation rows show it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax

from nautile.data.label_set import LabelSet
from nautile.evals.scoring.intervals import wilson

TEMPERATURES = (0.05, 100.0)
# What validation rows must have to show a calibration: without errors nothing says how often a probability is wrong.
SHOWING_ROWS, SHOWING_ERRORS = 100, 5
DRAWS = 1000
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
RECALL = ("Label", "Rows", "Of them right", "Recall, 95 %", "Given", "Precision, 95 %")
IMBALANCED = 3  # times as many rows of the commonest label as of the rarest: then the rarest has a column of its own
LABELLED, ABSTAINED, NO_TEXT = "label", "abstained", "no_text"  # kinds of outcomes of a classification


def threshold_for_coverage(probabilities_NC: np.ndarray, coverage: float) -> float:
    """The highest threshold at which at least the share `coverage` of the rows gets a label."""
    confidence_N = np.sort(probabilities_NC.max(axis=1))[::-1]
    # The confidence of the last row that must be covered; other rows of the same confidence are covered too.
    # Rounded, because 0.55 * 100 is a little more than 55.
    covered = int(np.ceil(round(coverage * len(confidence_N), 6)))
    return float(confidence_N[covered - 1]) if covered else 1.0


def threshold_for_accuracy(probabilities_NC: np.ndarray, targets_N: np.ndarray, accuracy: float) -> float | None:
    """The lowest threshold at which at least the share `accuracy` of the labelled rows is right; None if none is."""
    confidence_N = probabilities_NC.max(axis=1)
    right_N = probabilities_NC.argmax(axis=1) == targets_N
    order = np.argsort(-confidence_N, kind="stable")
    accuracy_N = np.cumsum(right_N[order]) / np.arange(1, len(order) + 1)
    # Rows of equal confidence pass a threshold together, so only the last of them can be the limit.
    last_N = np.append(np.diff(confidence_N[order]) < 0, True)
    good = np.flatnonzero((accuracy_N >= accuracy) & last_N)
    return float(confidence_N[order[good[-1]]]) if len(good) else None


def selective(probabilities_NC: np.ndarray, targets_N: np.ndarray, threshold: float) -> tuple[float, float | None]:
    """(share of rows with a label, accuracy on these rows); the accuracy is None if no row has a label."""
    covered_N = probabilities_NC.max(axis=1) >= threshold
    right_N = probabilities_NC.argmax(axis=1) == targets_N
    return float(covered_N.mean()), float(right_N[covered_N].mean()) if covered_N.any() else None


def fit_temperature(logits_NC: np.ndarray, targets_N: np.ndarray) -> float:
    """The temperature T that minimises -Σ log softmax(logits / T)[target] (Guo et al. 2017, arXiv:1706.04599, §4.2).

    The targets are smoothed as by Platt (1999): of N rows each has the right label with the weight (N + 1) / (N + 2),
    and the others share the rest. T is within `TEMPERATURES`. Raises `ValueError` without rows.
    """
    if not len(targets_N):
        raise ValueError("a temperature cannot be fitted without rows")
    rows, labels = np.arange(len(targets_N)), logits_NC.shape[1]
    rest = 1 / (len(targets_N) + 2) / max(1, labels - 1)
    weights_NC = np.full(logits_NC.shape, rest)
    weights_NC[rows, targets_N] = 1 - rest * (labels - 1)

    def loss(log_temperature: float) -> float:
        return float(-(weights_NC * log_softmax(logits_NC / np.exp(log_temperature), axis=1)).sum(axis=1).mean())

    # On a logarithmic scale, on which halving and doubling are equally far.
    low, high = np.log(TEMPERATURES)
    return float(np.exp(minimize_scalar(loss, bounds=(low, high), method="bounded").x))


def probabilities(logits_NC: np.ndarray, temperature: float | None) -> np.ndarray:
    """softmax(logits / temperature), float64 [N, C]; None stands for a temperature of 1."""
    return softmax(np.asarray(logits_NC, np.float64) / (temperature or 1.0), axis=1)


def calibration_evidence(logits_NC: np.ndarray, targets_N: np.ndarray, temperature: float) -> dict[str, Any]:
    """What the rows on which a temperature was fitted say about the probabilities, as fields of a `LabelSet`.

    `calibrated`: there are `SHOWING_ROWS` rows and `SHOWING_ERRORS` errors, the temperature is not at its limit, and
    the mean probability of the given labels lies in the interval of the accuracy.
    """
    shares_NC = probabilities(logits_NC, temperature)
    rows, right = len(targets_N), int((shares_NC.argmax(axis=1) == targets_N).sum())
    low, high = wilson(right, rows)
    is_inside = 1.01 * TEMPERATURES[0] < temperature < 0.99 * TEMPERATURES[1]
    is_right = low <= float(shares_NC.max(axis=1).mean()) <= high
    has_enough = rows >= SHOWING_ROWS and rows - right >= SHOWING_ERRORS
    calibrated = has_enough and is_inside and is_right
    return {"validation_rows": rows, "validation_errors": rows - right, "calibrated": calibrated}


def reliability(probabilities_NC: np.ndarray, targets_N: np.ndarray, bins: int = 15) -> list[dict[str, float]]:
    """The non-empty bins of a reliability diagram, of equal width, by the probability of the most likely label.

    Each has the `count`, the mean `confidence` and the `accuracy` of the predictions with a confidence in [low, high).
    """
    confidence_N = probabilities_NC.max(axis=1)
    right_N = probabilities_NC.argmax(axis=1) == targets_N
    index_N = np.minimum((confidence_N * bins).astype(int), bins - 1)
    parts = []
    for b in np.unique(index_N).tolist():
        inside = index_N == b
        means = {"confidence": float(confidence_N[inside].mean()), "accuracy": float(right_N[inside].mean())}
        parts.append({"low": b / bins, "high": (b + 1) / bins, "count": int(inside.sum()), **means})
    return parts


def expected_calibration_error(probabilities_NC: np.ndarray, targets_N: np.ndarray) -> float:
    """Σ share of a bin · |accuracy - confidence| (Guo et al. 2017, equation 3), 0 to 1."""
    parts = reliability(probabilities_NC, targets_N)
    return sum(part["count"] * abs(part["accuracy"] - part["confidence"]) for part in parts) / len(targets_N)


class Interval(NamedTuple):
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


def score_seeds(
    probabilities_SNC: Sequence[np.ndarray],
    targets_N: np.ndarray,
    thresholds_S: Sequence[float],
    seed: int = 0,
    rare: int | None = None,
) -> dict[str, Any]:
    """Scores of S runs on the same N rows, as JSON data.

    `accuracy` and `macro_f1` are means over the runs, with intervals over runs and rows. `ece`, `coverage` and
    `accuracy_covered` (on the rows whose probability reaches `thresholds_S`; None if none) are means over the runs.
    `rare_recall`: with the index of a label its recall, with an interval; None if no row has it.
    """
    labels = probabilities_SNC[0].shape[1]
    predicted_SN = np.stack([p.argmax(axis=1) for p in probabilities_SNC])
    accuracy, macro_f1 = intervals(predicted_SN, targets_N, labels, seed)
    covered = [selective(p, targets_N, t) for p, t in zip(probabilities_SNC, thresholds_S, strict=True)]
    accuracies = [share for _, share in covered if share is not None]
    rare_N = targets_N == rare
    rare_recall = intervals(predicted_SN[:, rare_N], targets_N[rare_N], labels, seed)[0] if rare_N.any() else None
    return {
        "rows": len(targets_N),
        "seeds": len(predicted_SN),
        "rare_recall": rare_recall and rare_recall._asdict(),
        "accuracy": accuracy._asdict(),
        "macro_f1": macro_f1._asdict(),
        "accuracy_by_seed": [float((row == targets_N).mean()) for row in predicted_SN],
        "ece": float(np.mean([expected_calibration_error(p, targets_N) for p in probabilities_SNC])),
        "coverage": float(np.mean([share for share, _ in covered])),
        "accuracy_covered": float(np.mean(accuracies)) if accuracies else None,
    }


def intervals(predicted_SN: np.ndarray, targets_N: np.ndarray, labels: int, seed: int) -> tuple[Interval, Interval]:
    """Accuracy and macro-F1 as means over the S runs, with bootstrap intervals over runs and rows.

    Resamples of rows that are all right, or all wrong, are so too. So the interval of the accuracy is at least Wilson's
    over the rows, and that of a macro-F1 of 0 or 1 the mean of Wilson's of each label's recall. Macro-F1 leaves out
    labels that have neither rows nor predictions, as scikit-learn does.
    """
    rng = np.random.default_rng(seed)
    # Runs and rows are both resampled: another seed gives another run, and the test rows are a sample too.
    seeds, rows = predicted_SN.shape
    samples = np.zeros((DRAWS, 2))
    for draw in range(DRAWS):
        runs, items = rng.integers(seeds, size=seeds), rng.integers(rows, size=rows)
        samples[draw] = _means(predicted_SN[runs][:, items], targets_N[items], labels)
    low, high = np.quantile(samples, [0.025, 0.975], axis=0)
    accuracy, macro_f1 = _means(predicted_SN, targets_N, labels)
    # Rounded: the mean over runs may exceed the rows by an error of rounding.
    wilson_low, wilson_high = wilson(min(rows, round(accuracy * rows, 6)), rows)
    f1_low, f1_high = float(low[1]), float(high[1])
    if f1_low == f1_high:
        parts = [part["interval"] for part in recalls(predicted_SN[0], targets_N, range(labels)) if part["rows"]]
        f1_low = min(f1_low, sum(part[0] for part in parts) / len(parts))
        f1_high = max(f1_high, sum(part[1] for part in parts) / len(parts))
    return (
        Interval(accuracy, min(float(low[0]), wilson_low), max(float(high[0]), wilson_high)),
        Interval(macro_f1, f1_low, f1_high),
    )


def recalls(predicted_N: np.ndarray, targets_N: np.ndarray, labels: Sequence[Any]) -> list[dict[str, Any]]:
    """For each label the rows that have it, those that are `given` it, the `right` ones, recall, precision, intervals.

    Arrays of indices, or bool [N, labels] where a row may have several. Intervals are Wilson's, 95 %; recall is None
    for a label without rows, precision for one that no row is given.
    """
    columns = range(len(labels))
    has_NC, given_NC = (
        values if values.ndim == 2 else values[:, None] == np.array(columns) for values in (targets_N, predicted_N)
    )
    counts = zip(has_NC.sum(axis=0), given_NC.sum(axis=0), (has_NC & given_NC).sum(axis=0), strict=True)
    result = []
    for label, (rows, given, right) in zip(labels, ((int(a), int(b), int(c)) for a, b, c in counts), strict=True):
        recall, interval = (right / rows, list(wilson(right, rows))) if rows else (None, None)
        precision, bounds = (right / given, list(wilson(right, given))) if given else (None, None)
        result.append(
            {"label": label, "rows": rows, "right": right, "recall": recall, "interval": interval, "given": given,
             "precision": precision, "precision_interval": bounds}
        )  # fmt: skip
    return result


def rarest(counts: Mapping[str, int]) -> str | None:
    """The label with the fewest rows, if the commonest has `IMBALANCED` times as many; else None."""
    fewest = min(counts, key=lambda label: (counts[label], label), default=None)
    return fewest if fewest is not None and max(counts.values()) >= IMBALANCED * counts[fewest] else None


def sigmoid_pairs(logits_NC: np.ndarray) -> np.ndarray:
    """Logits of independent labels as logits of "not given" and "given", [N · C, 2]: softmax is then the sigmoid."""
    flat = np.asarray(logits_NC, np.float64).ravel()
    return np.stack([np.zeros_like(flat), flat], axis=1)


def label_probabilities(logits_NC: np.ndarray, temperature: float | None) -> np.ndarray:
    """sigmoid(logits / temperature), float64 [N, C]: the probability of each label by itself."""
    return probabilities(sigmoid_pairs(logits_NC), temperature)[:, 1].reshape(np.shape(logits_NC))


def best_thresholds(shares_NC: np.ndarray, has_NC: np.ndarray) -> list[float]:
    """For each label the probability from which it is given, of the highest F1; 0.5 for a label without rows.

    Midway to the next lower probability, so that an equal text of another run falls on the same side.
    """
    result = []
    for shares_N, has_N in zip(shares_NC.T, has_NC.T, strict=True):
        order = np.argsort(-shares_N, kind="stable")
        ordered = shares_N[order]
        right = np.cumsum(has_N[order])
        f1 = 2 * right / (np.arange(1, len(order) + 1) + max(1, int(has_N.sum())))
        f1[:-1][ordered[:-1] == ordered[1:]] = -1.0  # equal probabilities pass a threshold together
        best = int(f1.argmax())
        following = ordered[best + 1] if best + 1 < len(ordered) else 0.0
        result.append(float((ordered[best] + following) / 2) if has_N.any() else 0.5)
    return result


def score_label_sets(
    shares_SNC: Sequence[np.ndarray], has_NC: np.ndarray, thresholds_SC: Sequence[Sequence[float]], seed: int = 0
) -> dict[str, Any]:
    """Scores of S runs on the same N rows that may have several labels, as JSON data, means over the runs.

    `accuracy`: of rows whose set of labels is exactly right (subset accuracy); `micro_f1` over all decisions;
    `macro_f1` over the labels that have rows or are given; 95 % intervals over runs and rows. `ece`: of the decisions.
    """
    given_SNC = np.stack([p >= np.asarray(t) for p, t in zip(shares_SNC, thresholds_SC, strict=True)])
    seeds, rows = given_SNC.shape[:2]

    def figures(given_SNC: np.ndarray, has_NC: np.ndarray) -> list[float]:
        right_SC = (given_SNC & has_NC).sum(axis=1)
        total_SC = given_SNC.sum(axis=1) + has_NC.sum(axis=0)
        present_SC = total_SC > 0
        f1_SC = np.where(present_SC, 2 * right_SC / np.maximum(total_SC, 1), 0.0)
        exact = float((given_SNC == has_NC).all(axis=2).mean())
        micro = float((2 * right_SC.sum(axis=1) / np.maximum(total_SC.sum(axis=1), 1)).mean())
        return [exact, micro, float((f1_SC.sum(axis=1) / np.maximum(present_SC.sum(axis=1), 1)).mean())]

    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(DRAWS):
        runs, items = rng.integers(seeds, size=seeds), rng.integers(rows, size=rows)
        samples.append(figures(given_SNC[runs][:, items], has_NC[items]))
    values, (low, high) = figures(given_SNC, has_NC), np.quantile(samples, [0.025, 0.975], axis=0)
    # As for one label: resamples of rows that are all right are so too, so Wilson's is the least.
    wilson_low, wilson_high = wilson(min(rows, round(values[0] * rows, 6)), rows)
    low[0], high[0] = min(low[0], wilson_low), max(high[0], wilson_high)
    names = ("accuracy", "micro_f1", "macro_f1")
    pairs = [np.stack([1 - p.ravel(), p.ravel()], axis=1) for p in shares_SNC]
    return {
        "rows": rows,
        "seeds": seeds,
        **{n: Interval(v, float(a), float(b))._asdict() for n, v, a, b in zip(names, values, low, high, strict=True)},
        "accuracy_by_seed": [float((given_NC == has_NC).all(axis=1).mean()) for given_NC in given_SNC],
        "ece": float(np.mean([expected_calibration_error(p, has_NC.ravel().astype(int)) for p in pairs])),
    }


def lead(right_SN: np.ndarray, other_SN: np.ndarray, seed: int = 0) -> dict[str, float]:
    """The lead in accuracy over another arm on the same N rows (S runs, or one): `lead`, `low`, `high` and `p`.

    The bootstrap resamples runs and rows, the two arms' answers to a row together; p is twice the share of draws in
    which the lead is zero or reversed, at least 1 / DRAWS. True in an array: the row is right.
    """
    rng = np.random.default_rng(seed)
    difference_SN = right_SN.astype(float) - other_SN
    seeds, rows = difference_SN.shape
    leads = np.zeros(DRAWS)
    for draw in range(DRAWS):
        runs, items = rng.integers(seeds, size=seeds), rng.integers(rows, size=rows)
        leads[draw] = difference_SN[runs][:, items].mean()
    low, high = np.quantile(leads, [0.025, 0.975])
    if low == high:
        # All rows differ alike, mostly not at all: as wide as if one more had been won or lost (`intervals.paired`).
        half = 1.96 / (rows + 2)
        low, high = max(-1.0, low - half), min(1.0, high + half)
    p = max(2 * min(float(np.mean(leads <= 0)), float(np.mean(leads >= 0))), 1 / DRAWS)
    return {"lead": float(difference_SN.mean()), "low": float(low), "high": float(high), "p": min(1.0, p)}


def confusion(predicted_N: np.ndarray, targets_N: np.ndarray, labels: int) -> np.ndarray:
    """Counts [right label, predicted label]."""
    return np.bincount(targets_N * labels + predicted_N, minlength=labels * labels).reshape(labels, labels)


def _means(predicted_SN: np.ndarray, targets_N: np.ndarray, labels: int) -> tuple[float, float]:
    """Accuracy and macro-F1, each the mean over the runs."""
    seeds = len(predicted_SN)
    cells = (np.arange(seeds)[:, None] * labels + targets_N) * labels + predicted_SN
    counts_SCC = np.bincount(cells.ravel(), minlength=seeds * labels * labels).reshape(seeds, labels, labels)
    right_SC = np.diagonal(counts_SCC, axis1=1, axis2=2)
    total_SC = counts_SCC.sum(axis=1) + counts_SCC.sum(axis=2)
    present_SC = total_SC > 0
    f1_SC = np.where(present_SC, 2 * right_SC / np.maximum(total_SC, 1), 0.0)
    return float(right_SC.sum() / predicted_SN.size), float((f1_SC.sum(axis=1) / present_SC.sum(axis=1)).mean())


def arm_rows(report: Mapping[str, Any]) -> tuple[list[str], list[tuple[str, ...]]]:
    """(columns, rows) of the arms of a report; rates are in percent."""
    rows: list[tuple[str, ...]] = []
    # Forms other than labels have a loss before tuning, losses of baselines, and for entities the F1 of spans.
    if report["form"] != "label":
        if "before" in report:  # a head has nothing before its tuning
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
    if report.get("multi_label"):
        for arm in report["arms"]:
            figures = [interval(arm[name]) for name in ("accuracy", "micro_f1", "macro_f1")]
            rows.append((TITLES[arm["arm"]], shots_shown(arm), *figures, f"{100 * arm['ece']:.1f}"))
        return ["Arm", "Shots", "Whole set right", "Micro-F1", "Macro-F1", "Calibration error"], rows
    rare = report.get("rarest")
    for arm in report["arms"]:
        covered = MISSING if arm["accuracy_covered"] is None else f"{100 * arm['accuracy_covered']:.1f}"
        rows.append(
            (
                TITLES[arm["arm"]],
                shots_shown(arm),
                interval(arm["accuracy"]),
                interval(arm["macro_f1"]),
                *([interval(arm["rare_recall"]) if arm.get("rare_recall") else MISSING] if rare else []),
                f"{100 * arm['ece']:.1f}",
                f"{covered} of {100 * arm['coverage']:.0f}",
            )
        )
    columns = ["Arm", "Shots", "Accuracy", "Macro-F1", *([f"Recall of {rare}"] if rare else [])]
    return [*columns, "Calibration error", "Accuracy of those covered"], rows


def recall_rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The rows of a table of recall by label, under the columns `RECALL`."""
    return [
        (
            str(part["label"]),
            f"{part['rows']:,}",
            f"{part['right']:,}",
            _share(part["recall"], part["interval"]),
            # A report of an earlier version has no precision.
            f"{part['given']:,}" if "given" in part else MISSING,
            _share(part.get("precision"), part.get("precision_interval")),
        )
        for part in report.get("recall", ())
    ]


def _share(value: float | None, bounds: Sequence[float] | None) -> str:
    """A share with its interval; a dash for None."""
    return MISSING if value is None or not bounds else interval({"value": value, "low": bounds[0], "high": bounds[1]})


def calibration_note(labels: LabelSet) -> str:
    """What is known about the calibration of a tuned model's probabilities, from its label set."""
    if labels.calibrated is None:
        return "whether the probabilities are calibrated is not recorded"
    assert labels.validation_rows is not None
    kind = "decisions on validation rows" if labels.multi_label else "validation rows"
    fitted = f"its {labels.validation_rows:,} {kind}, {labels.validation_errors:,} of them wrong"
    if labels.calibrated:
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
