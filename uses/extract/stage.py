"""The `extract` stage: from a `checkpoint` and a table of texts to a JSON document for each row.

Replies are decoded by the schema's grammar, checked (valid by the schema; marked strings occur in the text), and
written as they come. A reply depends only on its text, the seed and the number of the row, so a killed run, which
continues with the missing rows, writes those of an uninterrupted one.
"""

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal

import jsonschema
from jsonschema.protocols import Validator

from nautile.common.errors import ConfigError
from nautile.common.events import Emit, silent
from nautile.common.files import write_json, write_text
from nautile.common.text import first_line, markdown_table, markdown_text
from nautile.data.chat_template import encode_prompt_end, parse_completion
from nautile.data.json_schema import (
    SPAN,
    Schema,
    entity_schema,
    parse_document,
    pointer_to,
    violation,
    with_spans,
)
from nautile.data.label_set import read_label_set
from nautile.data.tokenizer import tokenizer_for
from nautile.evals.running.rows import RowFile
from nautile.model.decoding.constrained import Constraint
from nautile.model.decoding.slots import Chunk, DecodeRequest, EngineEvent, Handle, RequestFailed
from nautile.tasks.engine.job import Job
from nautile.tasks.engine.stage import stage
from nautile.uses.labelled.config import ExtractConfig
from nautile.uses.labelled.prompts import beginning_ids
from nautile.uses.labelled.rows import entity_json
from nautile.uses.labelled.texts import read_texts, write_rows

if TYPE_CHECKING:
    from nautile.model.runtimes.load import Runtime

ROWS, REFUSED = "rows.parquet", "refused.jsonl"
MOST_DETAILS = 10  # on the card
WRITE_EVERY_S = 2.0
AHEAD = 2  # requests submitted per slot, so that no slot is idle
Reason = Literal["no_text", "too_long", "cut", "failed", "not_json", "schema", "span"]
REASONS: dict[Reason, str] = {
    "no_text": "the row has no text",
    "too_long": "text and reply do not fit into the context",
    "cut": "the reply reached its limit of tokens before its end",
    "failed": "the grammar exceeded its limits during decoding",
    "not_json": "the reply is not JSON",
    "schema": "the document is not valid by the schema",
    "span": "a string that must occur in the text does not",
}


@dataclass(frozen=True)
class Span:
    """A string of a document that occurs in the text: characters [start, end) of its first occurrence, and how many
    occurrences (`places`) it has."""

    path: str  # JSON pointer in the document
    start: int
    end: int
    places: int


@dataclass(frozen=True)
class Extraction:
    """The result of a reply. `document`: its JSON text as the model wrote it; None if it was refused for `reason`.

    cut: tokens of the text that did not fit; a text is answered whole or not at all, so only of one that is too long.
    """

    document: str | None
    spans: tuple[Span, ...] = ()
    reason: Reason | None = None
    detail: str = ""
    cut: int = 0


class ReplyChecker:
    """Checks replies against one schema, which `validator` implements.

    `spans`: "all" treats every string, except enumerations and constants, as if the schema marked it with `x-span`.
    """

    def __init__(self, validator: Validator, schema: Schema, spans: Literal["marked", "all"]) -> None:
        self._validator = validator
        marked = schema if spans == "marked" else with_spans(schema)
        # A validator whose keyword `x-span` reports an "error" for each string that it applies to, with its path.
        marker_class = jsonschema.validators.extend(type(validator), {SPAN: _mark})
        self._marker = marker_class(marked, format_checker=validator.format_checker)

    def check(self, text: str, reply: str) -> Extraction:
        """Check a complete reply to `text`."""
        try:
            value = parse_document(reply)
        except (ValueError, RecursionError) as error:
            return Extraction(None, reason="not_json", detail=first_line(error)[:200])
        # The JSON parser accepts deeper documents than jsonschema, which follows a recursive schema by recursion.
        try:
            return self._check_value(text, reply, value)
        except RecursionError:
            return Extraction(None, reason="schema", detail="/: is nested too deep to be checked")

    def _check_value(self, text: str, reply: str, value: Any) -> Extraction:
        """Check the parsed reply by the schema, and its marked strings against the text."""
        if (detail := violation(self._validator, value)) is not None:
            return Extraction(None, reason="schema", detail=detail)
        spans = []
        # A set, because several branches of the schema may mark the same string.
        for path, words in sorted(
            {(pointer_to(mark), mark.instance) for mark in _marks(self._marker.iter_errors(value))}
        ):
            if words not in text:
                return Extraction(None, reason="span", detail=f"{path}: {words[:200]!r}")
            if words:
                start = text.index(words)
                spans.append(Span(path, start, start + len(words), text.count(words)))
        return Extraction(reply, tuple(spans))


@stage("extract", version=3, outputs=("extracted",), accelerator=True)
def extract(job: Job) -> None:
    """Extract a document for each row that has no result yet; publish the valid documents and the refused rows."""
    config = job.part("extract", ExtractConfig)
    _, texts = read_texts(config.texts, job.file_digests[config.texts.path])
    extractor = extractor_for(job.inputs["checkpoint"], config, json.loads(config.json_schema))
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


class TagExtractor:
    """Extracts entities with the head of a checkpoint that was tuned on them; nothing is decoded."""

    unconstrained: None = None

    def __init__(self, folder: Path, config: ExtractConfig, runtime: "Runtime | None" = None) -> None:
        from nautile.uses.labelled.token_head import TokenTagger  # JAX takes seconds

        self._tagger, self._chunk = TokenTagger(folder, config.slots, runtime), 16 * config.slots

    def run(self, texts: Sequence[str | None], rows_path: Path, emit: Emit = silent) -> list[dict[str, Any]]:
        """The rows of `Extractor.run`; `tokens` are those of the text. A text that cannot be read whole is refused."""
        row_file = RowFile(rows_path)
        known_numbers = {row["number"] for row in row_file.rows}
        start, answered, tagger = time.monotonic(), 0, self._tagger
        for first in range(0, len(texts), self._chunk):
            chunk = list(enumerate(texts[first : first + self._chunk], first + 1))
            missing = [(number, text) for number, text in chunk if number not in known_numbers]
            counts = {number: tagger.tokens(text) for number, text in missing if text and text.strip()}
            whole = [
                (number, text)
                for number, text in missing
                if text and counts.get(number, 0) in range(1, tagger.longest + 1)
            ]
            found = dict(
                zip([number for number, _ in whole], tagger.entities([text for _, text in whole]), strict=True)
            )
            row_file.append(
                _row(
                    number,
                    self._extraction(text or "", found.get(number), counts.get(number, 0)),
                    "",
                    counts.get(number, 0),
                )
                for number, text in missing
            )
            answered += len(missing)
            emit("progress", done=len(row_file.rows), total=len(texts), unit="rows")
        if answered:
            emit("metric", name="extract/rows_per_second", step=0, value=answered / (time.monotonic() - start))
        return [dict(sorted(row.items())) for row in sorted(row_file.rows, key=lambda row: row["number"])]

    def _extraction(self, text: str, found: list[tuple[int, int, str]] | None, tokens: int) -> Extraction:
        if found is None:
            if not tokens:
                return Extraction(None, reason="no_text")
            longest = self._tagger.longest
            detail = f"{tokens} tokens, and {longest} are read"
            return Extraction(None, reason="too_long", detail=detail, cut=tokens - longest)
        spans = tuple(
            Span(f"/{number}/text", start, end, text.count(text[start:end]))
            for number, (start, end, _) in enumerate(found)
        )
        return Extraction(entity_json([(text[start:end], kind) for start, end, kind in found]), spans)


def extractor_for(
    folder: Path, config: ExtractConfig, schema: Schema, runtime: "Runtime | None" = None
) -> "Extractor | TagExtractor":
    """By the head of a checkpoint that was tuned so, unless the schema is another than that of its entities.

    `runtime`: of the folder, if it is loaded already.
    """
    labels = read_label_set(folder)
    by_head = labels is not None and labels.form == "entities" and labels.method == "head"
    if by_head and labels is not None and schema == entity_schema(labels.labels):
        return TagExtractor(folder, config, runtime)
    return Extractor(folder, config, schema, runtime)


def summary_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts as JSON data: rows, extracted, refused by reason, spans, tokens; texts that are too long, the excess."""
    refused = Counter(row["reason"] for row in rows if row["reason"])
    return {
        "rows": len(rows),
        "extracted": sum(row["reason"] is None for row in rows),
        "refused": {reason: refused[reason] for reason in REASONS if refused[reason]},
        "spans": sum(len(row["spans"]) for row in rows),
        "tokens": sum(row["tokens"] for row in rows),
        "cut": sum(bool(row["cut"]) for row in rows),
        "cut_tokens": sum(row["cut"] or 0 for row in rows),
    }


def card_of(
    summary: dict[str, Any],
    config: ExtractConfig,
    rows: Sequence[dict[str, Any]],
    unconstrained: Sequence[str] | None = (),
) -> str:
    """The card as Markdown. `unconstrained`: places in the schema whose strings are only checked, not constrained.

    None: nothing was decoded, a head has labelled the tokens.
    """
    outcomes = [("extracted", summary["extracted"])]
    outcomes += [(REASONS[reason], count) for reason, count in summary["refused"].items()]
    shares = [(name, count, f"{100 * count / summary['rows']:.1f} %") for name, count in outcomes]
    details = Counter((row["reason"], row["detail"]) for row in rows if row["detail"])
    common = [(count, reason, markdown_text(detail)) for (reason, detail), count in details.most_common(MOST_DETAILS)]
    constrained = "Decoding is constrained to parts of the text there"
    if unconstrained:
        places = ", ".join(f"`{markdown_text(place)}`" for place in unconstrained)
        constrained += f", except at {places} of the schema, which is only checked"
    how = f"Strings that are parts of the text: {config.spans}. {constrained}."
    if unconstrained is None:
        how = "They are those that a head on the tokens of the text has found; nothing was decoded."
    parts = [
        "# Extraction",
        f"{summary['rows']:,} rows, {summary['spans']:,} spans found in their texts, {summary['tokens']:,} tokens. "
        f"{how} A document is as good "
        "as the model that wrote it: it is valid by the schema and its spans occur in the text, but whether it states "
        "what the text states is not known.",
        markdown_table(("outcome", "rows", "share"), shares),
        "## Schema",
        f"```json\n{config.json_schema}\n```",
    ]
    if common:
        parts += ["## Most frequent refusals", markdown_table(("rows", "reason", "detail"), common)]
    return "\n\n".join(parts) + "\n"


class Extractor:
    """Extracts documents with a checkpoint or an ONNX export in `folder`.

    Raises `ConfigError`, before anything is decoded, for an unusable schema, or one whose shortest document does not
    fit. `runtime`: of the folder, if it is loaded already.
    """

    def __init__(self, folder: Path, config: ExtractConfig, schema: Schema, runtime: "Runtime | None" = None) -> None:
        # Imported here because the command imports this file, and JAX takes seconds.
        from nautile.model.runtimes.load import load_runtime, runtime_of

        self._config = config
        self._runtime = runtime or load_runtime(runtime_of(folder), folder)
        self._model, self._tokenizer = self._runtime.config, tokenizer_for(self._runtime.tokenizer)
        marked = schema if config.spans == "marked" else with_spans(schema)
        self._constraint = Constraint(self._tokenizer, marked, "extract.json_schema")
        self.unconstrained = self._constraint.unconstrained
        self._checker = ReplyChecker(self._constraint.validator, schema, config.spans)
        # The user's, else those that the checkpoint was tuned with, else the schema.
        labels = read_label_set(folder)
        tuned = labels.instructions if labels is not None and labels.form == "entities" else None
        as_text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
        schema_instructions = f"Write what the text says as JSON of this schema: {as_text}"
        instructions = config.instructions or (schema_instructions if tuned is None else tuned)
        self._beginning = beginning_ids(self._tokenizer, instructions)
        room = self._model.context - len(self._beginning) - len(encode_prompt_end(self._tokenizer, ""))
        least = self._constraint.least_tokens
        if config.max_tokens is not None and config.max_tokens < least:
            raise ConfigError(f"extract.max_tokens {config.max_tokens}: the shortest reply takes {least} tokens")
        if room < least:
            have, way_out = "the instructions", "shorten them"
            if instructions == schema_instructions:
                have = "the instructions, which are the whole schema where none are given,"
                way_out = 'give short ones with --instructions "…", since the schema is enforced in any case'
            raise ConfigError(
                f"extract: {have} leave {max(0, room)} tokens of a context of {self._model.context}, and the shortest "
                f"reply takes {least}; {way_out}"
            )

    def prompt(self, text: str) -> tuple[int, ...]:
        """The token ids of a text's prompt, up to the start of the thinking."""
        # Without the marker that ends the thinking: the decoder writes it, after at most `thinking` tokens.
        return (*self._beginning, *encode_prompt_end(self._tokenizer, text.strip())[:-1])

    def run(self, texts: Sequence[str | None], rows_path: Path, emit: Emit = silent) -> list[dict[str, Any]]:
        """Return a row for every text, in order: number (from 1), json, spans, reason, detail, reply, tokens, cut.

        Rows of the file at `rows_path` are not decoded again. Emits the metric `extract/rows_per_second`.
        """
        row_file = RowFile(rows_path)
        known_numbers = {row["number"] for row in row_file.rows}
        pending, refused_rows = [], []
        for number, text in enumerate(texts, 1):
            if number in known_numbers:
                continue
            request = self._request(number, text)
            if isinstance(request, DecodeRequest):
                pending.append((number, text or "", request))
            else:
                refused_rows.append(_row(number, request, "", 0))
        row_file.append(refused_rows)
        if pending:
            self._decode(pending, row_file, len(texts), emit)
        # Rows read from the file have their fields in another order than new ones.
        return [dict(sorted(row.items())) for row in sorted(row_file.rows, key=lambda row: row["number"])]

    def _request(self, number: int, text: str | None) -> DecodeRequest | Extraction:
        """The request for a text; or a refusal if there is no text, or no valid reply that fits."""
        if text is None or not text.strip():
            return Extraction(None, reason="no_text")
        config, prompt = self._config, self.prompt(text)
        room = self._model.context - len(prompt)
        limit = room if config.max_tokens is None else min(room, config.max_tokens)
        if limit < self._constraint.least_tokens:
            return Extraction(None, reason="too_long", cut=self._constraint.least_tokens - limit)
        if (constraint := self._constraint.within(text)) is None:
            return Extraction(
                None, reason="span", detail="no part of the text can be a string that the schema requires"
            )
        return DecodeRequest(
            prompt, limit, (config.seed, number), config.temperature, thinking_budget=config.thinking,
            constraint=constraint,
        )  # fmt: skip

    def _decode(
        self, pending: Sequence[tuple[int, str, DecodeRequest]], row_file: RowFile, total: int, emit: Emit
    ) -> None:
        """Decode the pending requests (number, text, request), and write a row as each reply is complete."""
        from nautile.model.decoding.engine import Engine

        emit("progress", done=total - len(pending), total=total, unit="rows", note="compiles the model's programs")
        tokenizer, slots = self._tokenizer, self._config.slots
        longest = max(len(request.prompt) for _, _, request in pending)
        stops = (tokenizer.im_end, tokenizer.end_of_text)
        programs = self._runtime.slots(stops, tokenizer.think_end, slots, longest)
        # The engine calls `listen` in its own thread; this thread takes the events from a queue.
        engine, events = Engine(programs, AHEAD * slots), SimpleQueue[tuple[Handle, EngineEvent]]()

        def listen(batch: list[tuple[Handle, EngineEvent]]) -> None:
            for item in batch:
                events.put(item)

        engine.start(listen)
        running: dict[Handle, tuple[int, str, list[int]]] = {}  # number, text, and the ids of the reply so far
        new_rows: list[dict[str, Any]] = []
        queue = iter(pending)
        first_event_at, written_at, answered = 0.0, time.monotonic(), 0
        try:
            while True:
                # Twice as many as can run: whenever a slot falls free, its next request is waiting already.
                while len(running) < AHEAD * slots and (item := next(queue, None)):
                    [handle] = engine.submit([item[2]])
                    running[handle] = (item[0], item[1], [])
                if not running:
                    break
                handle, event = events.get()
                first_event_at = first_event_at or time.monotonic()  # the rate does not count the compilation
                number, text, ids = running[handle]
                if isinstance(event, Chunk):
                    ids += event.ids
                    if not event.finish:
                        continue  # more of this reply follows
                    reply = parse_completion(tokenizer, ids).answer or ""
                    is_cut = event.finish == "length"
                    result = Extraction(None, reason="cut") if is_cut else self._checker.check(text, reply)
                # One request may fail by itself, where its grammar exceeds a limit; a failure of the engine ends the
                # run.
                elif isinstance(event, RequestFailed) and not engine.failure:
                    reply, result = tokenizer.decode(ids, specials=False), Extraction(None, reason="failed")
                else:
                    raise RuntimeError(engine.failure or f"unexpected {event}")
                del running[handle]
                new_rows.append(_row(number, result, reply, len(ids)))
                answered += 1
                # Every append is fsynced, so rows are collected for a moment.
                if time.monotonic() - written_at > WRITE_EVERY_S or not running:
                    row_file.append(new_rows)
                    new_rows, written_at = [], time.monotonic()
                    emit("progress", done=len(row_file.rows), total=total, unit="rows")
            row_file.append(new_rows)
        finally:
            engine.close()
        emit("progress", done=total, total=total, unit="rows")
        emit("metric", name="extract/rows_per_second", step=0, value=answered / (time.monotonic() - first_event_at))


def _row(number: int, result: Extraction, reply: str, tokens: int) -> dict[str, Any]:
    return {
        "number": number,
        "json": result.document,
        "spans": [asdict(span) for span in result.spans],
        "reason": result.reason,
        "detail": result.detail,
        "reply": reply if result.reason else "",
        "tokens": tokens,
        "cut": None if result.reason == "no_text" else result.cut,
    }


def _mark(
    validator: Validator, keyword: Any, instance: Any, schema: Schema
) -> Iterator[jsonschema.exceptions.ValidationError]:
    if keyword is True and isinstance(instance, str):
        yield jsonschema.ValidationError(SPAN)


def _marks(errors: Any) -> Iterator[jsonschema.exceptions.ValidationError]:
    """The marks among validation errors, including those inside `anyOf` and the like."""
    for error in errors:
        if error.validator == SPAN:
            yield error
        yield from _marks(error.context or ())
