"""The `classify` stage: from a `checkpoint` and a table of texts to a label for each row."""

from nautile.common.files import write_json, write_text
from nautile.tasks.engine.job import Job
from nautile.tasks.engine.stage import stage
from nautile.uses.labelled.config import ClassifyConfig
from nautile.uses.labelled.texts import gold_labels, read_texts, write_rows

ROWS, EXAMPLES = "rows.parquet", "examples.jsonl"


@stage("classify", version=3, outputs=("labelled",), accelerator=True)
def classify(job: Job) -> None:
    """Label each row that has no label yet; publish the rows, examples and a summary."""
    # Imported here because every command imports this file, and JAX takes seconds.
    from nautile.uses.classify.classifier import (
        TextClassifier,
        classification_card,
        classification_examples,
        classification_summary,
    )

    config = job.part("classify", ClassifyConfig)
    table, texts = read_texts(config.texts, job.file_digests[config.texts.path])
    classifier = TextClassifier(job.inputs["checkpoint"], config)
    gold = gold_labels(table, config.texts.path, config.gold_column, classifier.labels) if config.gold_column else None
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
    )
