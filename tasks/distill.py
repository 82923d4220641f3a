"""The `distill` stage (paper §3.2, §3.3): teachers write documents from prompts and their nearest exemplars."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import PositiveInt, TypeAdapter, ValidationError

from nautile.common.errors import ConfigError
from nautile.common.files import sha256_of
from nautile.configs.distill import DistillConfig, IndexConfig
from nautile.configs.endpoint import EndpointConfig
from nautile.configs.model import TokenizerConfig
from nautile.data.distill.prompts import check_prompt_set
from nautile.data.distill.run import DOCUMENTS, distill_prompts
from nautile.data.distill.stats import DistillStats, distill_facts
from nautile.data.distill.teacher_prompt import TEMPLATES, template_for
from nautile.data.endpoints.pool import EndpointPool
from nautile.data.retrieval.embedders import encoder_for
from nautile.data.retrieval.exemplar_index import ExemplarIndex
from nautile.data.screening.contamination import ContaminationIndex, read_questions
from nautile.data.sources.local_files import read_jsonl
from nautile.data.tokens.build import CorpusPlan, PublishedTokens, write_tokens
from nautile.data.tokens.losses import LOST
from nautile.tasks.engine.job import Job
from nautile.tasks.engine.stage import Calls, budget_limit, stage
from nautile.tasks.reporting.data_card import write_card

VALIDATION_SHARE = 0.01
ROWS_PER_SHARD = 4096
CHARACTERS_PER_TOKEN = 4  # a usual average for English; only where nothing was measured
LONGEST_QUERY = 1500  # assumed tokens of a prompt and its passage, without measured calls
SAMPLES = 3  # in the manifest: accepted documents, and rejected ones for each reason


def _calls(section: Mapping[str, Any], endpoints: Mapping[str, EndpointConfig]) -> Iterator[Calls]:
    """The requests of a distillation to its teachers and its difficulty probe.

    A teacher gets the prompts between the previous teacher's threshold of difficulty and its own; difficulty is assumed
    to be uniform in 0..1. With `accepted`, at least so many prompts are asked and at most all.
    """
    config = DistillConfig.model_validate(section["distill"])
    least = config.accepted or config.prompts

    def longest(name: str) -> tuple[int, int]:
        teacher = next((teacher for teacher in config.teachers if teacher.endpoint == name), config.teachers[0])
        template = template_for(teacher, endpoints[name])
        exemplar_characters = config.neighbours * sum(TEMPLATES[template.name].exemplar)
        return exemplar_characters // CHARACTERS_PER_TOKEN + LONGEST_QUERY, config.max_tokens

    below = 0.0
    for teacher in config.teachers:
        share, below = max(0.0, teacher.up_to - below), max(below, teacher.up_to)
        most = round(config.prompts * share)
        yield Calls("teacher", teacher.endpoint, least * share, most, longest(teacher.endpoint))
    for name in config.probe.endpoints if config.probe else ():
        assert config.probe is not None
        samples = config.probe.samples
        yield Calls("probe", name, least * samples, config.prompts * samples, longest(name))


def _limits(section: Mapping[str, Any]) -> list[str]:
    part = section["distill"]
    until = f"until {wanted:,} documents, of at most " if (wanted := part.get("accepted")) else ""
    return [f"{until}{part['prompts']:,} prompts", budget_limit(part)]


@stage(
    "distill",
    version=6,
    outputs=("documents", "tokens", "data_card"),
    page="distillation",
    samples="documents",
    heading="Distillation",
    limits=_limits,
    calls=_calls,
)
def distill(job: Job) -> None:
    """Check all inputs and endpoints, distil, tokenise, write the data card. A resumed run repeats no finished file."""
    # Everything that can be wrong is checked before the first call is paid for.
    config = job.part("distill", DistillConfig)
    for prompt_set in config.prompt_sets:
        check_prompt_set(prompt_set)
    encoder = encoder_for(job.part("index", IndexConfig).embedding, job.scratch / "vectors", job.emit)
    index = _index(job, encoder, config.neighbours)
    # Neither a prompt nor a document may overlap the benchmarks' questions; a run without benchmarks has none.
    questions = read_questions(job.inputs["questions"]) if "questions" in job.inputs else None
    screen = None if questions is None else ContaminationIndex(questions).screen
    budgets = config.budget_dollars, config.budget_tokens
    with EndpointPool(job.endpoints, job.reply_source, job.emit, *budgets) as pool:
        for teacher in config.teachers:
            template_for(teacher, pool.config(teacher.endpoint))
        pool.check()
        encoder.embedder.check()
        result = distill_prompts(
            config, pool, index, job.output("documents"), job.scratch, config.seed, job.emit, screen
        )
        counts = distill_facts(result.stats, config, pool)
    # From here on nothing is asked: the documents are complete, and only have to be tokenised.
    index.close()
    encoder.close()

    corpus = _tokenise(job)
    job.add_digests("tokens", {entry.file: entry.sha256 for entry in corpus.index.shards})
    _emit_metrics(job, result.stats, counts, corpus)

    # Describe the three artifacts: documents, tokens and the data card.
    samples = {name: rows[:SAMPLES] for name, rows in result.stats.samples.items()}
    documents = {
        **counts,
        "exemplars": len(index),
        "prompt_sets": result.prompts.facts(),
        "held_out": None if questions is None else len(questions),
        "contaminated": None if questions is None else dict(result.stats.contaminated),
    }
    if lost := result.prompts.lost(config.prompt_sets):
        documents[LOST] = lost
        job.emit("progress", done=result.stats.judged, total=config.prompts, unit="prompts", note=lost)
    job.describe("documents", **documents, samples=samples)
    job.describe("tokens", source="distilled", stand_in=counts["stand_in"], **corpus.facts())
    more = {"retrieval": index.facts, "rows": corpus.row_figures()}
    card = write_card(job.output("data_card"), documents | more, result.stats, config)
    job.describe("data_card", **card, documents=counts["documents"])


def _index(job: Job, encoder: Any, neighbours: int) -> ExemplarIndex:
    """Open the exemplar index. Raises `ConfigError` if it has fewer exemplars than each prompt needs."""
    folder = job.inputs["retrieval"]
    index = ExemplarIndex(folder, encoder)
    if len(index) < neighbours:
        raise ConfigError(
            f"exemplars of {folder}: {len(index)} usable records, but every prompt needs {neighbours}; "
            "raise `exemplars` of a source of form 'synth', or lower distill.neighbours"
        )
    return index


def _tokenise(job: Job) -> PublishedTokens:
    """Tokenise the documents into shards. Raises `ConfigError` for a bad `row_length`."""
    paths = sorted(job.output("documents").glob(DOCUMENTS))
    tokenizer = job.part("tokenizer", TokenizerConfig)
    try:
        row_length = TypeAdapter(PositiveInt).validate_python(job.section.get("row_length"))
    except ValidationError as error:
        raise ConfigError(f"stage distill: `row_length`: {error.errors()[0]['msg']}") from None
    plan = CorpusPlan(
        tokenizer=tokenizer,
        form="synth",
        row_length=row_length,
        rows_per_shard=ROWS_PER_SHARD,
        validation_share=VALIDATION_SHARE,
    )
    # The folder is named by the documents' digest, so that an earlier attempt's files are reused only for the same
    # documents.
    digest = hashlib.sha256(b"".join(bytes.fromhex(sha256_of(path)) for path in paths)).hexdigest()[:16]
    work = job.scratch / f"tokens-{digest}"
    work.mkdir(exist_ok=True)
    return write_tokens(lambda skip: read_jsonl(paths, "synth", skip), plan, work, job.output("tokens"), job.emit)


def _emit_metrics(job: Job, stats: DistillStats, counts: dict[str, Any], corpus: PublishedTokens) -> None:
    metrics: dict[str, float | None] = {
        "prompts": stats.prompts,
        "documents": stats.accepted,
        "accepted_share": counts["accepted_share"],
        "mean_difficulty": counts["mean_difficulty"],
        "dollars": counts["dollars"],
        "dollars_unknown": counts["dollars_unknown"],
        "tokens": corpus.facts()["tokens"],
        **{f"rejected_{reason}": count for reason, count in stats.rejected.items()},
    }
    for name, value in metrics.items():
        if value is not None:
            job.emit("metric", name=name, step=0, value=value)
