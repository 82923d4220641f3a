"""Extract from many texts: replies held to the schema in a batching engine, checked, and kept as they come.

A row is written once, when its reply is checked; a run that was killed goes on with the rows that have none yet.
A reply depends on its text, the seed and the row's number alone, so the rows are those of a run that was not.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from common.errors import ConfigError
from common.events import Emit, silent
from configs.labelling import ExtractConfig
from data.chat_template import encode_prompt_end, parse_completion
from data.json_schema import Schema, with_spans
from data.labelled.label_set import LabelSet, read_label_set
from data.labelled.prompts import beginning_ids
from data.tokenizer import tokenizer_for
from evals.extraction.checks import Extraction, ReplyChecker
from evals.running.rows import RowFile
from model.decoding.constrained import Constraint
from model.decoding.engine import Engine
from model.decoding.requests import Chunk, DecodeRequest, EngineEvent, Handle, RequestFailed
from model.exports.onnx.folder import is_onnx_export
from model.runtimes.load import load_runtime

KEPT_S = 2.0  # seconds between two writes
AHEAD = 2  # requests for each slot, so that none is idle

SCHEMA_INSTRUCTIONS = "Write what the text says as JSON of this schema: {schema}"


class Extractor:
    """A checkpoint or an ONNX export in `folder` that extracts as `config` says.

    Raises `ConfigError` before anything is decoded where the schema is none, cannot be met, or its shortest document
    does not fit.
    """

    def __init__(self, folder: Path, config: ExtractConfig, schema: Schema) -> None:
        self._config = config
        self._runtime = load_runtime("onnx" if is_onnx_export(folder) else "jax", folder)
        self._model, self._tokenizer = self._runtime.config, tokenizer_for(self._runtime.tokenizer)
        marked = schema if config.spans == "marked" else with_spans(schema)
        self._constraint = Constraint(self._tokenizer, marked, "extract.json_schema")
        self.unheld = self._constraint.unheld
        self._checker = ReplyChecker(self._constraint.validator, schema, config.spans)
        instructions = instructions_of(config, read_label_set(folder), schema)
        self._beginning = beginning_ids(self._tokenizer, instructions)
        room = self._model.context - len(self._beginning) - len(encode_prompt_end(self._tokenizer, ""))
        least = self._constraint.least_tokens
        if config.max_tokens is not None and config.max_tokens < least:
            raise ConfigError(f"extract.max_tokens {config.max_tokens}: the shortest reply takes {least} tokens")
        if room < least:
            raise ConfigError(
                f"extract: the instructions leave {max(0, room)} tokens of a context of {self._model.context}, and the "
                f"shortest reply takes {least}; shorten `instructions` or the schema"
            )

    def prompt(self, text: str) -> tuple[int, ...]:
        """Ids of a text's prompt, up to the beginning of the thinking."""
        return (*self._beginning, *encode_prompt_end(self._tokenizer, text.strip())[:-1])

    def run(self, texts: Sequence[str | None], rows_path: Path, emit: Emit = silent) -> list[dict[str, Any]]:
        """A row for every text, in order: number (from 1), json, spans, reason, detail, reply, tokens.

        Those that the file at `rows_path` has already are not asked again. Emits `progress` and, if anything was
        asked, the metric `extract/rows_per_second`. Raises `RuntimeError` where the model fails.
        """
        kept = RowFile(rows_path)
        done = {row["number"] for row in kept.rows}
        waiting, rows = [], []
        for number, text in enumerate(texts, 1):
            if number in done:
                continue
            request = self._request(number, text)
            if isinstance(request, DecodeRequest):
                waiting.append((number, text or "", request))
            else:
                rows.append(_row(number, request, "", 0))
        kept.append(rows)
        if waiting:
            self._decode(waiting, kept, len(texts), emit)
        # Rows that an earlier process wrote have their fields in another order.
        return [dict(sorted(row.items())) for row in sorted(kept.rows, key=lambda row: row["number"])]

    def _request(self, number: int, text: str | None) -> DecodeRequest | Extraction:
        """The request for a text; why there is none where there is no text, or no reply that fits and can hold."""
        if text is None or not text.strip():
            return Extraction(None, reason="no_text")
        config, prompt = self._config, self.prompt(text)
        room = self._model.context - len(prompt)
        limit = room if config.max_tokens is None else min(room, config.max_tokens)
        if limit < self._constraint.least_tokens:
            return Extraction(None, reason="too_long")
        if (constraint := self._constraint.within(text)) is None:
            return Extraction(None, reason="span", detail="no part of the text can be what the schema asks for")
        return DecodeRequest(
            prompt, limit, (config.seed, number), config.temperature, thinking_budget=config.thinking,
            constraint=constraint,
        )  # fmt: skip

    def _decode(self, waiting: Sequence[tuple[int, str, DecodeRequest]], kept: RowFile, total: int, emit: Emit) -> None:
        emit("progress", done=total - len(waiting), total=total, unit="rows", note="compiles the model's programs")
        tokenizer, slots = self._tokenizer, self._config.slots
        longest = max(len(request.prompt) for _, _, request in waiting)
        stops = (tokenizer.im_end, tokenizer.end_of_text)
        programs = self._runtime.slots(stops, tokenizer.think_end, slots, longest)
        engine, events = Engine(programs, AHEAD * slots), SimpleQueue[tuple[Handle, EngineEvent]]()

        def listen(batch: list[tuple[Handle, EngineEvent]]) -> None:
            for item in batch:
                events.put(item)

        engine.start(listen)
        asked: dict[Handle, tuple[int, str, list[int]]] = {}
        fresh: list[dict[str, Any]] = []
        following = iter(waiting)
        started, written, answered = 0.0, time.monotonic(), 0
        try:
            while True:
                while len(asked) < AHEAD * slots and (item := next(following, None)):
                    [handle] = engine.submit([item[2]])
                    asked[handle] = (item[0], item[1], [])
                if not asked:
                    break
                handle, event = events.get()
                started = started or time.monotonic()  # the programs are compiled
                number, text, ids = asked[handle]
                if isinstance(event, Chunk):
                    ids += event.ids
                    if not event.finish:
                        continue
                    reply = parse_completion(tokenizer, ids).answer or ""
                    cut = event.finish == "length"
                    result = Extraction(None, reason="cut") if cut else self._checker.check(text, reply)
                elif isinstance(event, RequestFailed) and not engine.failure:
                    reply, result = tokenizer.decode(ids, specials=False), Extraction(None, reason="failed")
                else:
                    raise RuntimeError(engine.failure or f"unexpected {event}")
                del asked[handle]
                fresh.append(_row(number, result, reply, len(ids)))
                answered += 1
                if time.monotonic() - written > KEPT_S or not asked:
                    kept.append(fresh)
                    fresh, written = [], time.monotonic()
                    emit("progress", done=len(kept.rows), total=total, unit="rows")
            kept.append(fresh)
        finally:
            engine.close()
        emit("progress", done=total, total=total, unit="rows")
        emit("metric", name="extract/rows_per_second", step=0, value=answered / (time.monotonic() - started))


def instructions_of(config: ExtractConfig, labels: LabelSet | None, schema: Schema) -> str:
    """What stands before a text: the operator's, those that the checkpoint was tuned with, or the schema itself."""
    if config.instructions:
        return config.instructions
    if labels is not None and labels.form == "entities":
        return labels.instructions
    return SCHEMA_INSTRUCTIONS.format(schema=json.dumps(schema, ensure_ascii=False, separators=(",", ":")))


def _row(number: int, result: Extraction, reply: str, tokens: int) -> dict[str, Any]:
    return {
        "number": number,
        "json": result.document,
        "spans": [asdict(span) for span in result.spans],
        "reason": result.reason,
        "detail": result.detail,
        "reply": reply if result.reason else "",
        "tokens": tokens,
    }
