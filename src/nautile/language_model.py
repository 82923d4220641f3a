"""A loaded model: generation, chat, log-probabilities, classification and extraction, by JAX or onnxruntime."""

import json
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
from pydantic import BaseModel, ValidationError
from pydantic.errors import PydanticInvalidForJsonSchema

from nautile.common.errors import ConfigError
from nautile.common.extras import extras_named
from nautile.common.text import first_line, visible
from nautile.data.chat_template import encode_prompt, parse_completion
from nautile.data.tokenizer import tokenizer_for
from nautile.flows.chat import Chat, ChatAnswer, ChatSettings, chat_sampling
from nautile.flows.named import checkpoint_folder
from nautile.model.decoding.cache import length_buckets
from nautile.model.decoding.generate import Completion
from nautile.model.decoding.sampling import Sampling
from nautile.model.runtimes.load import load_runtime, runtime_of
from nautile.progress import progress_bar
from nautile.store.mirror import open_store
from nautile.uses.labelled.config import ClassifyConfig, ExtractConfig, TextsConfig

ROWS = 16  # texts in a batch: with fewer than that one, with more several batches
PROMPTS = 256  # whose continuations are scored in one call of the scorer
SHORTEST = 32  # tokens of the shortest prompt that a program is compiled for
# Sections name a file; here the texts are given.
_GIVEN = TextsConfig(reader="jsonl", path="given")
Use = TypeVar("Use", ClassifyConfig, ExtractConfig)


def load_model(
    name: str | os.PathLike[str] | None, store: str | os.PathLike[str] | None, show: bool | None
) -> "LanguageModel":
    """See `nautile.load`."""
    opened = open_store(os.fspath(store) if store is not None else None)
    return LanguageModel(checkpoint_folder(None if name is None else os.fspath(name), opened), show=show)


class LanguageModel:
    """The model in a folder: a checkpoint, which JAX runs, or an ONNX export, which onnxruntime runs.

    Methods take one text or several, and return one result or a list. Equal texts and seeds give equal results,
    whatever else is in the batch. They may be called from several threads, which wait for each other. `show`: progress
    bars; None: of more than one batch, in a terminal or a notebook. Raises `ConfigError` for a folder that cannot be
    read.
    """

    def __init__(self, folder: str | os.PathLike[str], *, show: bool | None = None) -> None:
        self.folder, self.show = Path(folder), show
        self.runtime = runtime_of(self.folder)
        self._loaded = load_runtime(self.runtime, self.folder)
        self.config = self._loaded.config
        self.name = self._loaded.name
        self.tokenizer = tokenizer_for(self._loaded.tokenizer)
        self._samplers: dict[tuple[Sampling, int, int], Any] = {}
        self._scorer: Any = None
        self._chats: dict[ChatSettings, Chat] = {}
        self._uses: dict[str, Any] = {}  # classifiers and extractors by their sections
        self._busy = threading.Lock()  # a scorer keeps state, and two batches would only slow each other
        self.refused: dict[int, str] = {}  # number of a text of the last `extract` -> why it has no document

    def __repr__(self) -> str:
        return f"<nautile model {self.name}, {self.runtime}, context {self.config.context}>"

    @overload  # a text is a sequence of texts as well, so the first form must be the one that is looked at first
    def generate(  # type: ignore[overload-overlap]
        self, prompts: str, *, max_tokens: int = 128, temperature: float = 0.7, top_k: int = 0, top_p: float = 1.0,
        seed: int = 0,
    ) -> str: ...  # fmt: skip
    @overload
    def generate(
        self, prompts: Sequence[str], *, max_tokens: int = 128, temperature: float = 0.7, top_k: int = 0,
        top_p: float = 1.0, seed: int = 0,
    ) -> list[str]: ...  # fmt: skip
    def generate(
        self, prompts: str | Sequence[str], *, max_tokens: int = 128, temperature: float = 0.7, top_k: int = 0,
        top_p: float = 1.0, seed: int = 0,
    ) -> str | list[str]:  # fmt: skip
        """The texts that continue `prompts`, without the chat template; up to `max_tokens` or the end of the text.

        Raises `ConfigError` for a setting out of range, and a prompt that leaves no room for `max_tokens`.

        >>> len(model.generate(["The sea is", "Two and"], max_tokens=4, seed=1))
        2
        """
        sampling = Sampling(
            max_tokens, temperature, top_k, top_p, stop_ids=(self.tokenizer.end_of_text, self.tokenizer.im_end)
        )
        texts = _texts("generate", prompts)
        completions = self._complete([self.tokenizer.encode(text) for text in texts], sampling, seed)
        written = [self.tokenizer.decode(each.ids.tolist(), specials=False) for each in completions]
        return written[0] if isinstance(prompts, str) else written

    @overload
    def chat(  # type: ignore[overload-overlap]
        self, messages: str, *, max_tokens: int | None = None, temperature: float = 0.7, top_k: int = 0,
        top_p: float = 1.0, thinking_budget: int | None = None, seed: int = 0,
    ) -> ChatAnswer: ...  # fmt: skip
    @overload
    def chat(
        self, messages: Sequence[str], *, max_tokens: int | None = None, temperature: float = 0.7, top_k: int = 0,
        top_p: float = 1.0, thinking_budget: int | None = None, seed: int = 0,
    ) -> list[ChatAnswer]: ...  # fmt: skip
    def chat(
        self, messages: str | Sequence[str], *, max_tokens: int | None = None, temperature: float = 0.7, top_k: int = 0,
        top_p: float = 1.0, thinking_budget: int | None = None, seed: int = 0,
    ) -> ChatAnswer | list[ChatAnswer]:  # fmt: skip
        """The replies to messages, each a conversation of its own: `.thinking` and `.answer`, None if it was cut.

        `max_tokens` None: three quarters of the context. `thinking_budget`: tokens after which the thinking is ended.

        >>> reply = model.chat("What is 2 + 3?", max_tokens=24, thinking_budget=4)
        >>> reply.answer == "".join(model.stream("What is 2 + 3?", max_tokens=24, thinking_budget=4))
        True
        """
        texts = _texts("chat", messages)
        settings = ChatSettings(max_tokens, temperature, top_k, top_p, thinking_budget, seed)
        sampling = chat_sampling(self.tokenizer, self.config.context, settings)
        answers = []
        completions = self._complete([encode_prompt(self.tokenizer, text) for text in texts], sampling, seed)
        for text, completion in zip(texts, completions, strict=True):
            reply = parse_completion(self.tokenizer, completion.ids.tolist())
            answers.append(ChatAnswer(text, reply.reasoning, reply.answer, len(completion.ids), reply.finished))
        return answers[0] if isinstance(messages, str) else answers

    def stream(self, message: str, **settings: Any) -> Iterator[str]:
        """The answer to a message, piece by piece while it is generated. `settings`: those of `chat`."""
        chosen = ChatSettings(**settings)
        if (chat := self._chats.get(chosen)) is None:
            chat = self._chats[chosen] = Chat(self._loaded, chosen)
        [text] = _texts("stream", message)
        for added in chat.ask(ChatAnswer(text), 1):
            if added.answer:
                yield added.answer

    def logprobs(self, prompts: str | Sequence[str], continuations: str | Sequence[str]) -> np.ndarray:
        """Σ log p(token) of each continuation after its prompt, in nats: float64 [texts].

        One prompt serves all continuations. Raises `ConfigError` where prompt and continuation exceed the context.

        >>> model.logprobs("Two and two are", [" four", " five", " fish"]).shape
        (3,)
        """
        ends, begins = _texts("logprobs", continuations), _texts("logprobs", prompts)
        begins = begins * len(ends) if isinstance(prompts, str) else begins
        if len(begins) != len(ends):
            raise ConfigError(f"logprobs: {len(begins)} prompts and {len(ends)} continuations: give one for each")
        # What a prompt's continuations share is computed once; a text of its own begins after the end of another.
        by_prompt: dict[str, list[int]] = {}
        for number, begin in enumerate(begins):
            by_prompt.setdefault(begin, []).append(number)
        groups = [
            (self.tokenizer.encode(begin) or [self.tokenizer.end_of_text], [self.tokenizer.encode(ends[n]) for n in of])
            for begin, of in by_prompt.items()
        ]
        sums_N, members = np.zeros(len(ends)), list(by_prompt.values())
        with self._busy, self._bar("logprobs", len(ends)) as done:
            self._scorer = self._scorer or self._loaded.scorer(ROWS)
            for start in range(0, len(groups), PROMPTS):
                part = slice(start, start + PROMPTS)
                for of, found in zip(members[part], self._scorer.logprobs((), groups[part]), strict=True):
                    sums_N[of] = found
                done(sum(map(len, members[: part.stop])))
        return sums_N

    def classify(
        self, texts: str | Sequence[str], labels: Sequence[str] = (), *, instructions: str = "",
        threshold: float | None = None,
    ) -> Any:  # fmt: skip
        """A row for each text: `label` (None below `threshold`), `probability`, `likeliest`, `cut`.

        `labels`: needed unless the model was tuned for some; then the likeliest by the model's own judgement.

        >>> model.classify("a cat", ["sum", "animal"], instructions="?")["label"] in ("sum", "animal")
        True
        """
        with extras_named():
            from nautile.uses.classify.stage import TextClassifier

        section = _section(
            ClassifyConfig, "classify", labels=tuple(_texts("classify: labels", labels)), instructions=instructions,
            threshold=threshold, rows_at_once=ROWS,
        )  # fmt: skip
        rows = self._rows("classify", texts, section, lambda: TextClassifier(self.folder, section, self._loaded))
        return _like(texts, [{name: value for name, value in row.items() if name != "number"} for row in rows])

    def extract(
        self, texts: str | Sequence[str], schema: type[BaseModel] | dict[str, Any], *, instructions: str = "",
        max_tokens: int | None = None, temperature: float = 0.0, seed: int = 0,
    ) -> Any:  # fmt: skip
        """What each text says in the form of `schema`: instances of a pydantic class, or the data of a JSON schema.

        None where no valid document could be had (`refused` of the last call says why, by the number of the text from
        0). Raises `ConfigError` for a schema that decoding cannot be held to.

        >>> shape = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
        >>> found = model.extract(["7 boats"], shape, instructions="n", max_tokens=24)
        >>> len(found)
        1
        """
        with extras_named():
            from nautile.uses.extract.stage import REASONS, extractor_for

        model, shape = (None, schema) if isinstance(schema, dict) else (schema, _json_schema(schema))
        try:
            as_text = json.dumps(shape)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"extract: the schema cannot be written as JSON: {error}") from None
        section = _section(
            ExtractConfig, "extract", json_schema=as_text, instructions=instructions, max_tokens=max_tokens,
            temperature=temperature, seed=seed, slots=ROWS,
        )  # fmt: skip
        rows = self._rows("extract", texts, section, lambda: extractor_for(self.folder, section, shape, self._loaded))
        self.refused = {row["number"] - 1: REASONS[row["reason"]] for row in rows if row["reason"]}
        documents: list[Any] = []
        for row in rows:
            try:
                read = json.loads if model is None else model.model_validate_json
                documents.append(None if row["json"] is None else read(row["json"]))
            except ValidationError as error:  # a validator of the class, which no JSON schema can say
                self.refused[row["number"] - 1] = f"{error.title}: {error.errors()[0]['msg']}"
                documents.append(None)
        return _like(texts, documents)

    def _complete(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int) -> list[Completion]:
        """Completions of token ids, in batches of prompts of similar length, so that few programs are compiled."""
        room = self.config.context - sampling.max_tokens
        if sampling.max_tokens >= self.config.context:
            raise ConfigError(
                f"max_tokens {sampling.max_tokens} leaves no room for a prompt in a context of {self.config.context}"
            )
        for number, prompt in enumerate(prompts):
            if not 0 < len(prompt) <= room:
                raise ConfigError(
                    f"text {number} has {len(prompt)} tokens, and there is room for 1 to {room}: shorten it, or lower "
                    "max_tokens"
                )
        # A text that is given again has another sample, whatever stands between; the first has that of a chat.
        asked = Counter[tuple[int, ...]]()
        seeds = []
        for prompt in prompts:
            asked[tuple(prompt)] += 1
            seeds.append((seed, asked[tuple(prompt)]))
        rows = 1 if len(prompts) == 1 else ROWS
        buckets = length_buckets(room, min(SHORTEST, room))
        found: dict[int, Any] = {}  # completions of either runtime
        with self._busy, self._bar("texts", len(prompts)) as done:
            for shorter, length in zip([0, *buckets], buckets, strict=False):
                members = [n for n, prompt in enumerate(prompts) if shorter < len(prompt) <= length]
                for start in range(0, len(members), rows):
                    batch = members[start : start + rows]
                    sampler = self._samplers.get((sampling, rows, length))
                    if sampler is None:
                        sampler = self._samplers[sampling, rows, length] = self._loaded.sampler(sampling, rows, length)
                    completions = sampler([prompts[n] for n in batch], [seeds[n] for n in batch])
                    found |= dict(zip(batch, completions, strict=True))
                    done(len(found))
        return [found[n] for n in range(len(prompts))]

    def _rows(
        self, what: str, texts: str | Sequence[str], section: BaseModel, make: Callable[[], Any]
    ) -> list[dict[str, Any]]:
        """The rows of a use. Its file of finished rows, for a stage that is killed, is dropped."""
        listed, key = _texts(what, texts), f"{what} {section.model_dump_json()}"
        with (
            self._busy,
            tempfile.TemporaryDirectory(prefix="nautile-") as folder,
            self._bar(what, len(listed)) as done,
        ):
            use = self._uses.get(key) or self._uses.setdefault(key, make())

            def emit(kind: str, **fields: Any) -> None:
                if kind == "progress":
                    done(fields["done"])

            rows: list[dict[str, Any]] = use.run(listed, Path(folder) / "rows.jsonl", emit)
            return rows

    @contextmanager
    def _bar(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """A bar for `total` texts; it yields what is called with the number of those that are done."""
        with progress_bar(what, False if self.show is None and total <= ROWS else self.show) as update:
            yield lambda done: update(done / max(total, 1), f"{what}: {done:,} of {total:,}") if update else None


def _section(kind: type[Use], what: str, **fields: Any) -> Use:
    """The section of a use. Raises `ConfigError` with the first field that is wrong."""
    try:
        return kind(texts=_GIVEN, **fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or what
        raise ConfigError(f"{what}: {where}: {first['msg'].removeprefix('Value error, ')}") from None


def _json_schema(schema: Any) -> dict[str, Any]:
    """The JSON schema of a pydantic class. Raises `ConfigError` if it is none, or has none."""
    if not (isinstance(schema, type) and issubclass(schema, BaseModel)):
        raise ConfigError(
            f"extract: schema is {visible(repr(schema), 80)}: give a pydantic class, or a JSON schema as dict"
        )
    try:
        return schema.model_json_schema()
    except PydanticInvalidForJsonSchema as error:
        raise ConfigError(f"extract: {schema.__name__} has no JSON schema: {first_line(error)}") from None


def _texts(what: str, texts: str | Iterable[str]) -> list[str]:
    """The texts as a list. Raises `ConfigError` if one is no text."""
    if not isinstance(texts, str | Iterable) or isinstance(texts, bytes | Mapping):
        raise ConfigError(f"{what}: needs a text or a list of texts, not {type(texts).__name__}")
    listed = [texts] if isinstance(texts, str) else list(texts)
    for number, text in enumerate(listed):
        if not isinstance(text, str):
            raise ConfigError(f"{what}: text {number} is {type(text).__name__}, not str")
    return listed


def _like(given: str | Sequence[str], results: list[Any]) -> Any:
    return results[0] if isinstance(given, str) else results
