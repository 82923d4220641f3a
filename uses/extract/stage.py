"""The `extract` stage: from a `checkpoint` and a table of texts to a JSON document for each row."""

import json

from nautile.common.files import write_json, write_text
from nautile.tasks.engine.job import Job
from nautile.tasks.engine.stage import stage
from nautile.uses.extract.report import card_of, summary_of
from nautile.uses.labelled.config import ExtractConfig
from nautile.uses.labelled.texts import read_texts, write_rows

ROWS, REFUSED = "rows.parquet", "refused.jsonl"


@stage("extract", version=2, outputs=("extracted",), accelerator=True)
def extract(job: Job) -> None:
    """Extract a document for each row that has no result yet; publish the valid documents and the refused rows."""
    # Imported here because every command imports this file, and JAX takes seconds.
    from nautile.uses.extract.runner import Extractor

    config = job.part("extract", ExtractConfig)
    _, texts = read_texts(config.texts, job.file_digests[config.texts.path])
    extractor = Extractor(job.inputs["checkpoint"], config, json.loads(config.json_schema))
    rows = extractor.run(texts, job.scratch / "rows.jsonl", job.emit)
    out = job.output("extracted")
    # The spans are JSON text in the table, because their number differs by row.
    write_rows(out / ROWS, [{**row, "spans": json.dumps(row["spans"], sort_keys=True)} for row in rows])
    refused = [{**row, "text": text} for row, text in zip(rows, texts, strict=True) if row["reason"]]
    write_rows(out / REFUSED, refused)
    summary = summary_of(rows)
    write_json(out / "summary.json", summary)
    write_text(out / "card.md", card_of(summary, config, rows, extractor.unconstrained))
    for name in ("rows", "extracted", "spans", "tokens"):
        job.emit("metric", name=f"extract/{name}", step=0, value=summary[name])
    job.describe("extracted", **summary)
