"""The `distill` stage (paper §3.2, §3.3): teachers write documents from prompts and their nearest exemplars."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import PositiveInt, TypeAdapter, ValidationError

from nautile.common.errors import ConfigError
from nautile.common.files import sha256_of, write_json, write_text
from nautile.common.text import amount, size, visible
from nautile.configs.distill import DistillConfig, IndexConfig
from nautile.configs.endpoint import EndpointConfig
from nautile.data.distill.prompts import check_prompt_set
from nautile.data.distill.run import DOCUMENTS, distill_prompts
from nautile.data.distill.stats import BINS, DistillStats, distill_facts
from nautile.data.distill.teacher_prompt import TEMPLATES, template_for
from nautile.data.endpoints.pool import EndpointPool
from nautile.data.retrieval.embedders import encoder_for
from nautile.data.retrieval.exemplar_index import EXEMPLARS, ExemplarIndex, build_index
from nautile.data.screening.contamination import ContaminationIndex, read_questions
from nautile.data.sources.local_files import read_jsonl
from nautile.data.tokens.build import CorpusPlan, PublishedTokens, write_tokens
from nautile.data.tokens.losses import LOST
from nautile.data.tokens.source_reading import share_text
from nautile.evals.tables.results import MISSING, ResultTable
from nautile.tasks.engine.job import Job
from nautile.tasks.engine.stage import Calls, budget_limit, stage
from nautile.tasks.reporting.render import (
    BarChart,
    Paragraph,
    ReportBlock,
    ReportSection,
    Samples,
    TimeChart,
    html_page,
    markdown,
)
from nautile.tasks.tokenizer import tokenizer_of

VALIDATION_SHARE = 0.01
ROWS_PER_SHARD = 4096
CHARACTERS_PER_TOKEN = 4  # a usual average for English; only where nothing was measured
LONGEST_QUERY = 1500  # assumed tokens of a prompt and its passage, without measured calls
REHEARSED_PROMPTS = 4  # of each set
SAMPLES = 3  # in the manifest: accepted documents, and rejected ones for each reason
TITLE = "Data card: distilled documents"


def _index_rehearsal(settings: Mapping[str, Any]) -> dict[str, Any]:
    """An exact index: the cells of the other kind need thousands of exemplars."""
    return {"index": settings["index"] | {"kind": "exact"}}


@stage("index", version=1, outputs=("retrieval",), rehearsal=_index_rehearsal)
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


def _rehearsal(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A few prompts of each set, for the same teachers; a share of so few replies may be rejected by chance."""
    part = settings["distill"]
    sets = [{**prompt_set, "count": REHEARSED_PROMPTS} for prompt_set in part["prompt_sets"]]
    few = {"prompts": REHEARSED_PROMPTS * len(sets), "accepted": None, "prompt_sets": sets}
    return {"distill": part | few | {"max_rejected_share": max(0.9, part["max_rejected_share"])}}


@stage(
    "distill",
    version=6,
    outputs=("documents", "tokens", "data_card"),
    page="distillation",
    samples="documents",
    heading="Distillation",
    limits=_limits,
    calls=_calls,
    rehearsal=_rehearsal,
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
    try:
        row_length = TypeAdapter(PositiveInt).validate_python(job.section.get("row_length"))
    except ValidationError as error:
        raise ConfigError(f"stage distill: `row_length`: {error.errors()[0]['msg']}") from None
    plan = CorpusPlan(
        tokenizer=tokenizer_of(job),
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


Facts = Mapping[str, Any]


def write_card(folder: Path, facts: Facts, stats: DistillStats, config: DistillConfig) -> dict[str, Any]:
    """Write the card into `folder`; returns the facts for its manifest.

    `facts`: those of the documents, with `prompt_sets`, `retrieval`, `held_out` (None: no question was held out) and
    `rows` (`PublishedTokens.row_figures`). How often they are read is known only to a pretraining.
    """
    rejected = tuple(
        Samples(f"Rejected: {reason.replace('_', ' ')}", [_sample(reason, row) for row in rows[:3]])
        for reason, rows in sorted(stats.samples.items())
        if reason != "kept"
    )
    sections = [
        ReportSection("What it is", tuple(_counts(facts))),
        ReportSection("Prompts", tuple(_prompts(facts, stats, config))),
        ReportSection("Teachers and difficulty", tuple(_teachers(facts, stats, config))),
        ReportSection("Rejected", tuple(_rejected(facts))),
        ReportSection("Hostile text", tuple(_hostile(facts, stats))),
        ReportSection("Lengths and languages", tuple(_lengths(facts, stats))),
        ReportSection("Cost", tuple(_cost(facts, stats))),
        ReportSection(
            "Examples of kept documents",
            (Samples("Kept", [_sample("kept", row) for row in stats.samples.get("kept", [])]),),
        ),
        ReportSection("Examples of rejected replies", rejected),
    ]
    # Sections without content are left out of the pages; the JSON file has everything.
    filled_sections = [section for section in sections if section.blocks]
    subtitle = f"{amount(facts['documents'])} documents out of {amount(facts['prompts'])} prompts."
    counts = {name: value for name, value in stats.to_json().items() if name not in ("curve", "samples")}
    write_json(folder / "data_card.json", {**facts, "counts": counts, "curve": stats.curve, "samples": stats.samples})
    write_text(folder / "data_card.md", markdown(TITLE, subtitle, filled_sections))
    write_text(folder / "data_card.html", html_page(TITLE, subtitle, filled_sections))
    return {"sections": [section.title for section in filled_sections], "stand_in": facts["stand_in"]}


def _counts(facts: Facts) -> Iterator[ReportBlock]:
    if facts["stand_in"]:
        yield Paragraph(f"A stand-in wrote these documents: {facts['stand_in']}.")
    if facts["budget_exhausted"]:
        yield Paragraph("The budget was spent before every prompt was sent.")
    if wanted := facts.get("wanted"):
        yield Paragraph(
            f"Prompts were asked until {amount(wanted)} documents were accepted: {amount(facts['prompts'])}."
        )
    if facts["unanswered"]:
        reasons = ", ".join(f"{count} {reason}" for reason, count in facts["unanswered"].items())
        yield Paragraph(
            f"{sum(facts['unanswered'].values())} prompts got no reply ({reasons}); they may be asked again."
        )
    # Without held-out questions nothing was searched for, which is not the same as finding nothing.
    retrieval, held_out = facts["retrieval"], facts["held_out"]
    decontaminated = "no benchmark was held out: contamination is unknown"
    if held_out is not None:
        decontaminated = f"prompts and documents, against {amount(held_out)} questions of the benchmarks"
    rows = {
        "prompts": amount(facts["prompts"]),
        "documents": amount(facts["documents"]),
        "kept share": MISSING if facts["accepted_share"] is None else f"{facts['accepted_share']:.1%}",
        "dollars": f"{facts['dollars']:.2f}",
        "dollars that may have been charged": f"{facts['dollars_unknown']:.2f}, for replies that were cut, late or "
        "unreadable",
        "exemplars": f"{amount(retrieval['count'])}, {facts['neighbours']} nearest to each prompt",
        "retrieval": f"{retrieval['kind']} index over {retrieval['model']}, recall@5 {retrieval['recall']:.3f}, "
        f"{size(retrieval['index_bytes'])}",
        "decontaminated": decontaminated,
        "rows filled": share_text(facts["rows"]["fill"]),
        "documents cropped to a row": share_text(facts["rows"]["cropped_share"]),
        "targets in replies": f'{share_text(facts["rows"].get("reply_share"))}, which train_on = "replies" trains on',
        "replies without token counts": amount(facts["replies_without_token_counts"]),
    }
    yield ResultTable("Counts", ("What", "Value"), tuple(rows.items()))


def _prompts(facts: Facts, stats: DistillStats, config: DistillConfig) -> Iterator[ReportBlock]:
    rows = []
    for prompt_set in config.prompt_sets:
        left_out = facts["prompt_sets"].get(prompt_set.name, {}).get("left_out", {})
        reasons = (
            ", ".join(f"{amount(count)} {reason.replace('_', ' ')}" for reason, count in left_out.items()) or "none"
        )
        parts = (prompt_set.path or prompt_set.source, prompt_set.subset, prompt_set.revision[:12])
        origin = visible(" ".join(part for part in parts if part), 120)
        counts = (amount(stats.sets[prompt_set.name]), amount(stats.sets_kept[prompt_set.name]))
        rows.append((prompt_set.name, origin, prompt_set.license or MISSING, *counts, reasons))
    yield ResultTable(
        "Prompt sets", ("Set", "From", "Licence", "Prompts", "Documents", "Rows left out"), tuple(rows), (), ()
    )
    if len(stats.kinds) > 1:
        yield BarChart(
            "prompts by kind", {"prompts": stats.kinds}, tuple(dict(stats.kinds.most_common())), "", "prompts"
        )


def _teachers(facts: Facts, stats: DistillStats, config: DistillConfig) -> Iterator[ReportBlock]:
    names = ("model", "template", "up_to", "asked", "kept", "tokens_in", "tokens_out")
    rows = tuple(
        (name, *(amount(teacher[key]) if isinstance(teacher[key], int) else str(teacher[key]) for key in names))
        for name, teacher in facts["teachers"].items()
    )
    yield ResultTable("Teachers", ("Teacher", *(name.replace("_", " ") for name in names)), rows)
    # How prompts were distributed over the teachers, and the thresholds of difficulty that decided it.
    mix = {"asked": stats.asked, "kept": stats.kept}
    yield BarChart("mix by teacher", mix, tuple(facts["teachers"]), "", "prompts")
    edges = tuple(f"{number / BINS:.2f}" for number in range(BINS))
    ranked = sorted(config.teachers, key=lambda teacher: teacher.up_to)
    lines = tuple((teacher.up_to, f"up to {teacher.up_to:g}: {teacher.endpoint}") for teacher in ranked)
    histogram = {"prompts": stats.difficulties}
    yield BarChart("difficulty and thresholds", histogram, edges, "difficulty", "prompts", 1 / BINS, lines)
    if config.probe:
        probes = ", ".join(config.probe.endpoints)
        yield Paragraph(
            f"Difficulty probes: {probes}, {config.probe.samples} answers each, weight {config.probe.weight:g}. "
            f"{amount(stats.unprobed)} prompts got no answer from them."
        )
        yield BarChart(
            "disagreement of the probes", {"prompts": stats.probes}, edges, "disagreement", "prompts", 1 / BINS
        )


def _rejected(facts: Facts) -> Iterator[ReportBlock]:
    rejected = facts["rejected"]
    if rejected:
        named = {reason.replace("_", " "): count for reason, count in rejected.items()}
        yield BarChart("rejected, by reason", {"replies": named}, tuple(named), "", "prompts")
        total = sum(rejected.values())
        rows = tuple((name, amount(count), f"{count / facts['prompts']:.1%}") for name, count in named.items())
        yield ResultTable(
            "Rejected, by reason", ("Reason", "Prompts", "Share"), (*rows, ("all", amount(total), "")), (), ()
        )


def _hostile(facts: Facts, stats: DistillStats) -> Iterator[ReportBlock]:
    """Signs of prompt injection: in how many prompts and where they occur, and how many of these became documents."""
    yield Paragraph(
        "Queries, passages and exemplars are other people's text. Chat markers in them are broken before they are "
        "sent, and each stands in a section or on a line of its own, as data. Counted here: prompts with text that "
        "looks as if it were meant for a model."
    )
    rows = []
    for name, count in sorted(stats.hostile.items()):
        sign, place = name.split("/")
        share = f"{count / facts['prompts']:.2%}"
        rows.append((sign, place, amount(count), share, amount(stats.hostile_kept[name])))
    columns = ("Sign", "Where", "Prompts", "Share", "Of them documents")
    yield ResultTable("Signs of injection", columns, tuple(rows or [("none", MISSING, "0", "0.00%", "0")]))


def _lengths(facts: Facts, stats: DistillStats) -> Iterator[ReportBlock]:
    for name, counts in (("reasoning", stats.reasoning_words), ("answer", stats.answer_words)):
        if counts:
            named = {f"{low}-{2 * int(low) - 1}": counts[low] for low in sorted(counts, key=int)}
            yield BarChart(f"length of the {name}", {"documents": named}, tuple(named), "words", "documents")
    rows = tuple((code.replace("?", "unknown"), amount(count)) for code, count in facts["languages"].items())
    if rows:
        yield ResultTable("Languages of the documents", ("Language", "Documents"), rows)


def _cost(facts: Facts, stats: DistillStats) -> Iterator[ReportBlock]:
    rows = tuple((purpose, f"{cost:.4f}") for purpose, cost in facts["dollars_by_purpose"].items())
    if rows:
        yield ResultTable("Dollars by purpose", ("Purpose", "Dollars"), rows)
    total, points = 0.0, []
    # The points of all processes in the order of time; each has the dollars since its own last one.
    for time, dollars in sorted(map(tuple, stats.curve)):
        total += dollars
        points.append((time, total))
    if points and total:
        yield TimeChart("cost over time", tuple(points), "dollars")
    elif points:
        yield Paragraph("The endpoints have no price in the configuration: nothing was paid.")


def _sample(verdict: str, row: Mapping[str, Any]) -> dict[str, Any]:
    text = "\n\n".join(str(row[part]) for part in ("reasoning", "answer", "reply") if row.get(part))
    head = f"{verdict.replace('_', ' ')}; {row['teacher']}, difficulty {row['difficulty']:g}"
    sample = {"verdict": visible(head), "good": verdict == "kept", "prompt": visible(row["query"], 1000)}
    return sample | {"text": visible(text, 2000) if text.strip() else "(unreadable)"}
