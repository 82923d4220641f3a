"""Pretraining as a stage: `tokens` artifacts in, by source name, one `checkpoint` out."""

from common.errors import ConfigError
from configs.model import ModelConfig
from configs.training import PretrainConfig
from data.tokens.shards import read_index
from tasks.engine.job import Job
from tasks.engine.stage import stage


@stage("pretrain", version=1, outputs=("checkpoint",), accelerator=True, multihost=True)
def pretrain(job: Job) -> None:
    """Train on the inputs that the mixtures name. The tokenizer is that of the tokens, on which all must agree."""
    # Imported here because every command imports this file for the DAG, and JAX takes seconds.
    from model.training.loop import train

    if not job.inputs:
        raise ConfigError("stage pretrain: no input tokens; ingest at least one source first")
    config, model = job.part("pretrain", PretrainConfig), job.part("model", ModelConfig)
    tokenizer = read_index(next(iter(job.inputs.values()))).tokenizer
    facts = train(config, model, tokenizer, dict(job.inputs), job.scratch, job.output("checkpoint"), job.seed, job.emit)
    job.describe("checkpoint", **facts, stand_ins=[])
