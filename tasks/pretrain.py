"""The `pretrain` stage: from `tokens` artifacts, by source name, and an optional start to a `checkpoint`."""

from collections.abc import Mapping
from glob import glob
from pathlib import Path
from typing import Any

from nautile.common.errors import ConfigError
from nautile.common.files import read_json
from nautile.common.text import amount
from nautile.configs.base import OptimizerConfig
from nautile.configs.model import ModelConfig
from nautile.configs.training import PretrainConfig
from nautile.data.tokens.shards import read_index
from nautile.store.layout import StagingFiles
from nautile.store.manifest import read_manifest
from nautile.tasks.engine.job import Job
from nautile.tasks.engine.stage import Curve, stage
from nautile.tasks.rehearsal import STEPS

START = "start.checkpoint"  # name of the input to start from; the dot keeps it apart from names of sources

REHEARSED_BATCH = 2  # rows; at least one for each accelerator
_ACCELERATORS = ("/dev/nvidia[0-9]*", "/dev/accel*", "/dev/vfio/[0-9]*")
_GROUPED = {"memory_heads": "query_heads", "attention_heads": "kv_heads"}  # heads -> those that they may share


def _limits(section: Mapping[str, Any]) -> list[str]:
    return [f"{amount(sum(phase['tokens'] for phase in section['pretrain']['phases']))} tokens to train on"]


def _rehearsal(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Two steps of each phase, with a model of one block that has the same layers, precision and vocabulary.

    Each is saved, validated and sampled from. The width follows from the smallest heads that any pattern allows. What
    the stage would start from is of the model's own shape, so that it starts anew.
    """
    part, model = settings["pretrain"], settings["model"]
    devices = sum(len(glob(pattern)) for pattern in _ACCELERATORS)  # counted without JAX, which takes seconds
    rows = min(max(REHEARSED_BATCH, devices), part["batch_rows"])
    phases = [{**p, "tokens": STEPS * rows * settings["ingest"]["row_length"]} for p in part["phases"]]
    few = {"phases": phases, "batch_rows": rows, "micro_rows": None, "fsdp": 1, "start": None}
    few |= {name: min(STEPS, part[name]) for name in ("validate_every", "validation_rows", "sample_every")}
    grouped = {name: 1 if model[name] < model[heads] else 2 for heads, name in _GROUPED.items()}
    width = 32 * model["spectral_samples"]
    small = {"blocks": 1, "width": width, "feed_forward": 2 * width, "memory_heads": 2, "attention_heads": 2, **grouped}
    return {"pretrain": part | few | {"save_every": 1, "log_every": 1}, "model": model | small}


@stage(
    "pretrain",
    version=1,
    outputs=("checkpoint",),
    accelerator=True,
    multihost=True,
    on_demand={"tokens": "shards/"},
    trains=True,
    page="training",
    heading="Pretraining",
    curves=(
        Curve("loss", ("loss",), "nats per token"),
        Curve("validation bits per byte", ("validation_bits_per_byte",), "bits per byte"),
        Curve("gradient norm", ("gradient_norm",), "norm"),
        Curve("speed", ("tokens_per_second",), "tokens/s"),
    ),
    limits=_limits,
    rehearsal=_rehearsal,
)
def pretrain(job: Job) -> None:
    """Train on the sources that the mixtures name. All of them must have been tokenised by one tokenizer."""
    # Imported here because every command imports this file for the DAG, and JAX takes seconds.
    from nautile.model.training.loop import Pretraining, Start, train

    sources = {name: folder for name, folder in job.inputs.items() if name != START}
    if not sources:
        raise ConfigError("stage pretrain: no input tokens; ingest at least one source first")
    config, model = job.part("pretrain", PretrainConfig), job.part("model", ModelConfig)
    # Any source will do: the loader refuses sources of different tokenizers.
    tokenizer = read_index(next(iter(sources.values())), whole=job.remote_files is None).tokenizer
    start = None
    if START in job.inputs:
        start = Start(job.inputs[START], rows_before(job.inputs[START], sources))
    seeds = {"data_seed": job.seed("data"), "weights_seed": job.seed("weights")}
    train_on = job.section.get("train_on", {})
    pretraining = Pretraining(config, model, tokenizer, sources, **seeds, start=start, train_on=train_on)
    out = job.output("checkpoint")
    facts = train(pretraining, job.scratch, out, job.emit, job.remote_files, shared_disk=job.shared_disk)
    job.describe("checkpoint", **facts, stand_ins=[])


def rows_before(start: Path, sources: dict[str, Path]) -> dict[str, int]:
    """Count the rows of each source that the checkpoint has been trained on, those before its own start included.

    Only sources with exactly the same tokens count: with the same data seed their order is the same, so this run can
    continue after those rows.
    """
    # A checkpoint from elsewhere has no manifest, and has read nothing of these sources as far as is known.
    manifest = read_manifest(start) or {"facts": {}, "inputs": {}}
    return {
        name: rows
        for name, rows in manifest["facts"].get("rows_drawn", {}).items()
        if name in sources and manifest["inputs"].get(name) == f"tokens/{sources[name].name}"
    }


@stage("snapshot", version=1, outputs=("checkpoint",))
def snapshot(job: Job) -> None:
    """Write the weights that a pretraining saved as a `checkpoint`.

    `section["of"]` is the key of the pretraining, `["execution"]` its execution, and `["step"]` the saved step. The
    inputs are the pretraining's.
    """
    # Imported here because every command imports the stages, and JAX takes seconds.
    from nautile.model.training.checkpoint import read_step
    from nautile.model.training.step import state_like
    from nautile.model.weights.files import save_weights

    # The saved steps lie in the staging folder of the pretraining, beside that of this job.
    folder = StagingFiles(job.staging).of(job.section["of"]).checkpoints
    identity = read_json(folder / "identity.json")
    if identity is None:
        raise ConfigError(f"{folder} has no saved steps of a pretraining: it was published or removed meanwhile")
    model = ModelConfig.model_validate(identity["model"])
    like = state_like(model, OptimizerConfig.model_validate(identity["pretrain"]["optimizer"]))
    state, extra = read_step(folder, job.section["step"], like)
    tokens = next(folder for name, folder in job.inputs.items() if name != START)
    tokenizer = read_index(tokens, whole=False).tokenizer
    save_weights(job.output("checkpoint"), state.params, model, tokenizer)
    facts = {"steps": job.section["step"], "rows_drawn": extra.get("rows_drawn", {})}
    job.describe("checkpoint", **facts, of=job.section["of"], stand_ins=[])
