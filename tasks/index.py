"""The `index` stage (paper §3.2): embed the exemplars and build a search index that every distillation reuses."""

from nautile.configs.distill import IndexConfig
from nautile.data.retrieval.embedders import encoder_for
from nautile.data.retrieval.exemplar_index import EXEMPLARS, build_index
from nautile.tasks.engine.job import Job
from nautile.tasks.engine.stage import stage


@stage("index", version=1, outputs=("retrieval",))
def index(job: Job) -> None:
    """Embed and index the exemplars. A resumed run reuses the vectors computed so far."""
    config = job.part("index", IndexConfig)
    encoder = encoder_for(config.embedding, job.scratch / "vectors", job.emit)
    encoder.embedder.check()
    facts = build_index(job.inputs["exemplars"] / EXEMPLARS, encoder, config, job.output("retrieval"), job.emit)
    encoder.close()
    for name in ("count", "recall", "index_bytes"):
        job.emit("metric", name=name, step=0, value=facts[name])
    described = {name: value for name, value in facts.items() if name not in ("format", "kind", "sha256")}
    job.describe("retrieval", index_kind=facts["kind"], **described)
