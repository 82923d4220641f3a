"""The `classify` stage: from a `checkpoint` and a table of texts to a label for each row.

A chunk has the same rows whenever it is computed, so a killed and resumed run writes those of an uninterrupted one.
"""

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nautile.common.errors import ConfigError
from nautile.common.events import Emit, silent
from nautile.common.files import write_json, write_text
from nautile.common.text import markdown_table, markdown_text
from nautile.data.label_set import LabelSet, read_label_set
from nautile.evals.running.rows import RowFile
from nautile.tasks.engine.job import Job
from nautile.tasks.engine.stage import stage
from nautile.uses.labelled.config import ClassifyConfig
from nautile.uses.labelled.prompts import instructions_for
from nautile.uses.labelled.scores import (
    ABSTAINED,
    LABELLED,
    NO_TEXT,
    RECALL,
    UNTUNED,
    calibration_note,
    intervals,
    recall_rows,
    recalls,
    score_label_sets,
)
from nautile.uses.labelled.texts import gold_labels, read_texts, write_rows

if TYPE_CHECKING:
    from nautile.model.runtimes.load import Runtime

ROWS, EXAMPLES = "rows.parquet", "examples.jsonl"
CHUNK = 256  # rows
BINS = 10  # of the histogram of probabilities
MOST_EXAMPLES = 20  # of each outcome, half of them the most certain
LONGEST_EXAMPLE = 1000  # characters of a text
ANSWER = ("label", "probability", "abstained", "likeliest", "cut")
SEVERAL = ("labels", "probabilities")  # further fields of an answer where a text may have several labels
WITHOUT_TEXT = {**dict.fromkeys(ANSWER), "reason": "no_text"}


@stage("classify", version=4, outputs=("labelled",), accelerator=True)
def classify(job: Job) -> None:
    """Label each row that has no label yet; publish the rows, examples and a summary."""
    config = job.part("classify", ClassifyConfig)
    table, texts = read_texts(config.texts, job.file_digests[config.texts.path])
    classifier = TextClassifier(job.inputs["checkpoint"], config)
    gold = (
        gold_labels(table, config.texts.path, config.gold_column, classifier.labels, classifier.multi_label)
        if config.gold_column
        else None
    )
    rows = classifier.run(texts, job.scratch / "rows.jsonl", job.emit)
    out = job.output("labelled")
    write_rows(out / ROWS, rows)
    write_rows(out / EXAMPLES, classification_examples(rows, texts))
    summary = classification_summary(rows, classifier.labels, gold)
    write_json(out / "summary.json", summary)
    write_text(out / "card.md", classification_card(summary, classifier))
    for name in ("rows", "abstained", "no_text"):
        job.emit("metric", name=f"classify/{name}", step=0, value=summary[name])
    job.describe(
        "labelled",
        **summary,
        labels=list(classifier.labels),
        zero_shot=classifier.zero_shot,
        calibration=classifier.calibration,
        multi_label=classifier.multi_label,
    )


class TextClassifier:
    """Classifies with a checkpoint's folder: by the labels that it was tuned for, or by the user's, zero-shot by
    likelihood.

    threshold: the probability below which the model abstains; None: it never does. If a text may have several labels
    (`multi_label`) it has those that reach their own in `thresholds`. `runtime`: of the folder, if it is loaded
    already. Raises `ConfigError` for a label that the checkpoint was not tuned for, and if there are no labels at all.
    """

    def __init__(self, folder: Path, config: ClassifyConfig, runtime: "Runtime | None" = None) -> None:
        # Imported here because the command imports this file, and JAX takes seconds.
        from nautile.uses.labelled.predictor import LabelPredictor

        tuned = read_label_set(folder)
        self.zero_shot = bool(config.labels) and (tuned is None or tuned.form != "label")
        zero_shot_labels = None
        if self.zero_shot:
            zero_shot_labels = LabelSet(
                form="label", method="verbalised", labels=config.labels, longest=config.longest,
                instructions=instructions_for("label", config.instructions, config.labels),
            )  # fmt: skip
        self._predictor = LabelPredictor(folder, config.rows_at_once, zero_shot_labels, runtime)
        model_labels = self._predictor.labels.labels
        if unknown := [label for label in config.labels if label not in model_labels]:
            raise ConfigError(
                f"classify.labels: {unknown[0]!r} is unknown to this checkpoint, which was tuned for "
                f"{', '.join(model_labels)}"
            )
        self.labels = config.labels or model_labels
        # The user may ask for some of the labels, in another order: their columns are taken and shared out anew.
        self._columns = [model_labels.index(label) for label in self.labels]
        tuned_set = self._predictor.labels
        self.calibration = UNTUNED if self.zero_shot else calibration_note(tuned_set)
        self.multi_label = tuned_set.multi_label
        self.threshold = tuned_set.threshold if config.threshold is None else config.threshold
        self.thresholds: np.ndarray | None = None
        if self.multi_label:
            own = [(tuned_set.thresholds or ())[column] for column in self._columns]
            self.thresholds = np.array(own if config.threshold is None else [config.threshold] * len(self.labels))
            self.threshold = None

    def run(self, texts: Sequence[str | None], rows_path: Path, emit: Emit = silent) -> list[dict[str, Any]]:
        """Return a row for every text: number (from 1), label, probability, abstained, likeliest, cut and reason.

        `label` is None if the model abstains; `cut`: the tokens at the end of the text that are not read; a row without
        a text has only a `reason`. If a text may have several labels, also `labels`, and `probabilities` by label;
        `label` is then the likeliest, None if there is none. Rows of the file at `rows_path` are not computed again.
        Emits the metric `classify/rows_per_second`.
        """
        row_file = RowFile(rows_path)
        known_numbers = {row["number"] for row in row_file.rows}
        start, answered = time.monotonic(), 0
        without = WITHOUT_TEXT | dict.fromkeys(SEVERAL if self.multi_label else ())
        for first in range(0, len(texts), CHUNK):
            missing = [row for row in range(first, min(first + CHUNK, len(texts))) if row + 1 not in known_numbers]
            if missing:
                # The whole chunk is computed even if only some rows are missing, so that batches are always the same.
                numbered_texts = [
                    (row, text) for row, text in enumerate(texts[first : first + CHUNK], first) if text is not None
                ]
                rows = {
                    row: self._answer(row, text, shares)
                    for (row, text), shares in zip(numbered_texts, self._shares(numbered_texts), strict=True)
                }
                row_file.append(rows.get(row) or {"number": row + 1, **without} for row in missing)
                answered += len(missing)
                emit("progress", done=len(row_file.rows), total=len(texts), unit="rows")
        if answered:
            emit("metric", name="classify/rows_per_second", step=0, value=answered / (time.monotonic() - start))
        return [dict(sorted(row.items())) for row in sorted(row_file.rows, key=lambda row: row["number"])]

    def _shares(self, numbered_texts: Sequence[tuple[int, str]]) -> np.ndarray:
        """Probabilities of `labels`, float64 [texts, labels], normalised if one of more is given."""
        if not numbered_texts:
            return np.zeros((0, len(self.labels)))
        shares_NC = self._predictor.probabilities([text for _, text in numbered_texts])[:, self._columns]
        return shares_NC if self.multi_label else shares_NC / shares_NC.sum(axis=1, keepdims=True)

    def _answer(self, row: int, text: str, shares_C: np.ndarray) -> dict[str, Any]:
        best = int(shares_C.argmax())
        several = {}
        if self.thresholds is not None:
            given_C = shares_C >= self.thresholds
            labels = [label for label, given in zip(self.labels, given_C, strict=True) if given]
            best = int(np.where(given_C, shares_C, -1.0).argmax()) if labels else best
            several = {
                "labels": labels,
                "probabilities": {label: round(float(p), 6) for label, p in zip(self.labels, shares_C, strict=True)},
            }
        abstained = (
            not several["labels"] if several else self.threshold is not None and bool(shares_C[best] < self.threshold)
        )
        return {
            "number": row + 1,
            "label": None if abstained else self.labels[best],
            "probability": round(float(shares_C[best]), 6),
            "abstained": abstained,
            "likeliest": self.labels[best],
            "cut": self._predictor.tokens_cut(text),
            "reason": None,
            **several,
        }


def classification_summary(
    rows: Sequence[dict[str, Any]], labels: Sequence[str], gold: Sequence[Any] | None = None
) -> dict[str, Any]:
    """Counts as JSON data: rows, labelled (by label), abstained, without a text, cut; with `gold` labels also scores.

    `cut` counts texts, `cut_tokens` tokens. `confidence` has histograms of the probability. If a text may have several
    labels, `abstained` counts those without any, and `gold` has a list for each. The scores are `accuracy`, `macro_f1`
    and `recall` by label of the most likely label, with 95 % intervals, and `accuracy_covered` of labelled rows.
    """
    several = any(row.get("labels") is not None for row in rows)
    label_counts = Counter(
        label for row in rows if row["label"] is not None for label in (row["labels"] if several else [row["label"]])
    )
    summary: dict[str, Any] = {
        "rows": len(rows),
        "labelled": {label: label_counts[label] for label in labels},
        "abstained": sum(bool(row["abstained"]) for row in rows),
        "no_text": sum(row["reason"] is not None for row in rows),
        "cut": sum(row["cut"] > 0 for row in rows if row["reason"] is None),
        "cut_tokens": sum(row["cut"] for row in rows if row["reason"] is None),
        "confidence": {
            name: np.histogram([row["probability"] for row in rows if row["abstained"] is abstained], BINS, (0, 1))[
                0
            ].tolist()
            for name, abstained in (("labelled", False), ("abstained", True))
        },
    }
    pairs = [(row, label) for row, label in zip(rows, gold or (), strict=gold is not None) if row["reason"] is None]
    if pairs and several:
        has_NC = np.array([[label in own for label in labels] for _, own in pairs])
        given_NC = np.array([[label in row["labels"] for label in labels] for row, _ in pairs])
        scores = score_label_sets([given_NC.astype(float)], has_NC, [[0.5] * len(labels)])
        summary |= {name: scores[name] for name in ("accuracy", "micro_f1", "macro_f1")}
        summary["recall"] = recalls(given_NC, has_NC, labels)
    elif pairs:
        targets_N = np.array([labels.index(label) for _, label in pairs])
        predicted_N = np.array([labels.index(row["likeliest"]) for row, _ in pairs])
        accuracy, macro_f1 = intervals(predicted_N[None], targets_N, len(labels), 0)
        covered = [row["label"] == label for row, label in pairs if not row["abstained"]]
        summary["accuracy"], summary["macro_f1"] = accuracy._asdict(), macro_f1._asdict()
        summary["accuracy_covered"] = sum(covered) / len(covered) if covered else None
        summary["recall"] = recalls(predicted_N, targets_N, labels)
    return summary


def classification_examples(rows: Sequence[dict[str, Any]], texts: Sequence[str | None]) -> list[dict[str, Any]]:
    """The most and the least certain rows of each label, likewise of abstentions, and rows without a text.

    JSON data: kind (label, abstained or no_text), label, number, likeliest, probability, text (truncated).
    """
    by_outcome: dict[tuple[str, str], list[int]] = {}
    for position, row in enumerate(rows):
        kind = NO_TEXT if row["reason"] else ABSTAINED if row["abstained"] else LABELLED
        by_outcome.setdefault((kind, row["label"] or ""), []).append(position)
    examples = []
    for (kind, label), members in sorted(by_outcome.items()):
        # Most certain first; of many rows the first and the last half of `MOST_EXAMPLES` are kept.
        ordered = sorted(members, key=lambda position: (-(rows[position]["probability"] or 0.0), position))
        if len(ordered) > MOST_EXAMPLES:
            ordered = ordered[: MOST_EXAMPLES // 2] + ordered[-MOST_EXAMPLES // 2 :]
        examples += [
            {"kind": kind, "label": label, **{name: rows[i][name] for name in ("number", "likeliest", "probability")},
             "text": (texts[i] or "")[:LONGEST_EXAMPLE]}
            for i in ordered
        ]  # fmt: skip
    return examples


def cut_note(facts: dict[str, Any]) -> str:
    """A line on the texts of which only the beginning was read."""
    return f"of {facts['cut']:,} texts only the beginning was read, {facts['cut_tokens']:,} tokens were cut"


def classification_card(summary: dict[str, Any], classifier: TextClassifier) -> str:
    """The card as Markdown."""
    tuned = "" if classifier.zero_shot else "by a checkpoint that was tuned for them; "
    how = f"{tuned}{classifier.calibration}"
    never = "The model never abstains."
    if classifier.thresholds is not None:
        never = "A text has each label whose own probability reaches its threshold: " + ", ".join(
            f"{markdown_text(label)} {share:.3f}"
            for label, share in zip(classifier.labels, classifier.thresholds.tolist(), strict=True)
        )
        never += "."
    below = never if classifier.threshold is None else f"It abstains below a probability of {classifier.threshold:.3f}."
    rows = [(markdown_text(label), count) for label, count in summary["labelled"].items()]
    nothing = "(no label)" if classifier.multi_label else "(abstained)"
    rows += [(nothing, summary["abstained"]), ("(no text)", summary["no_text"])]
    cut = f" {cut_note(summary)}." if summary["cut"] else ""
    parts = [
        "# Labels",
        f"{summary['rows']:,} rows labelled {how}. {below}{cut}",
        markdown_table(("label", "rows"), rows),
    ]
    if "accuracy" in summary:
        value = {
            name: "{value:.3f} [{low:.3f}, {high:.3f}]".format(**summary[name])
            for name in ("accuracy", "micro_f1", "macro_f1")
            if name in summary
        }
        first = f"micro-F1 {value['micro_f1']}, the whole set right" if "micro_f1" in value else "accuracy"
        parts.append(f"Against the gold labels: {first} {value['accuracy']}, macro-F1 {value['macro_f1']} (95 %).")
        parts.append(markdown_table(RECALL, [(markdown_text(name), *cells) for name, *cells in recall_rows(summary)]))
    return "\n\n".join(parts) + "\n"
