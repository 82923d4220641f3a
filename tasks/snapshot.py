"""The `snapshot` stage (`nautile store snapshot`): publish a saved step of an unfinished pretraining."""

from nautile.common.errors import ConfigError
from nautile.common.files import read_json
from nautile.configs.base import OptimizerConfig
from nautile.configs.model import ModelConfig, TokenizerConfig
from nautile.store.layout import StagingFiles
from nautile.tasks.engine.job import Job
from nautile.tasks.engine.stage import stage


@stage("snapshot", version=1, outputs=("checkpoint",))
def snapshot(job: Job) -> None:
    """Write the weights that a pretraining saved as a `checkpoint`.

    `section["of"]` is the key of the pretraining, `section["step"]` the saved step. The inputs are the pretraining's.
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
    tokenizer = TokenizerConfig(ranks=identity["tokenizer"]["ranks"])
    save_weights(job.output("checkpoint"), state.params, model, tokenizer)
    facts = {"steps": job.section["step"], "rows_drawn": extra.get("rows_drawn", {})}
    job.describe("checkpoint", **facts, of=job.section["of"], stand_ins=[])
