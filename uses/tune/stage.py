"""The `tune` stage: from a `checkpoint` and labelled rows to a tuned `checkpoint` and its scores (`tuning`)."""

from nautile.common.files import write_text
from nautile.tasks.engine.job import Job
from nautile.tasks.engine.stage import stage
from nautile.uses.label.stage import LABELS
from nautile.uses.labelled.config import TuneConfig
from nautile.uses.tune.splits import read_splits


@stage("tune", version=2, outputs=("checkpoint", "tuning"), accelerator=True)
def tune(job: Job) -> None:
    """Split the rows, tune for each number of shots and each seed, compare with the baselines, write the card."""
    # Imported here because every command imports this file, and JAX takes seconds.
    from nautile.model.weights.files import load_weights
    from nautile.uses.tune.tuner import LabelTuning, run_tuning, tuning_card

    config = job.part("tune", TuneConfig)
    if config.data.reader == "labels":
        # The rows are the artifact of a `label` stage, not a file of the user's.
        data = config.data.model_copy(update={"reader": "jsonl", "path": str(job.inputs["labels"] / LABELS)})
        config = config.model_copy(update={"data": data})
    # Read the rows before the weights, which take longer, so that errors in the rows show at once.
    splits = read_splits(config, job.scratch / "fetched", job.file_digests)
    params, model, tokenizer = load_weights(job.inputs["checkpoint"])
    run = LabelTuning(params, model, tokenizer, config, splits, job.scratch, {"execution": job.key}, job.emit)
    report = run_tuning(run, job.output("checkpoint"), job.output("tuning"))
    write_text(job.output("tuning") / "card.md", tuning_card(report, config))
    facts = {name: report[name] for name in ("form", "method", "rows", "chosen", "arms")}
    job.describe("tuning", **facts)
    job.describe("checkpoint", form=report["form"], method=report["method"], labels=len(report["labels"]))
