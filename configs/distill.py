"""Distillation's sections (paper §3.2, §3.3): the index of exemplars, prompt sets, teachers, probes and checks."""

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from configs.base import Section, Share
from configs.endpoint import refuse_secrets

REMOVED_KEYS = ("relevance", "candidates", "consistency", "quality")  # of [distill]


class EmbeddingConfig(Section):
    """What makes the vectors of exemplars and prompts: MiniLM on this machine, or an OpenAI-compatible endpoint."""

    kind: Literal["minilm", "openai"] = "minilm"
    model: str = "all-MiniLM-L6-v2-int8"
    width: PositiveInt = 384  # numbers a vector: a reply of any other width is refused
    url: str = ""  # openai: the base URL, ending in /v1
    key_variable: str = ""  # the NAME of the environment variable; empty: no key is sent
    batch: PositiveInt = 128  # texts a request
    longest: PositiveInt = 16_000  # characters: longer texts are cut, for servers refuse them
    concurrency: PositiveInt = 4
    timeout_s: PositiveFloat = 60.0
    attempts: PositiveInt = 6
    dollars_per_million: NonNegativeFloat = 0.0

    @model_validator(mode="after")
    def _complete(self) -> "EmbeddingConfig":
        refuse_secrets("index.embedding", self.key_variable, self.url)
        if self.kind == "openai" and not self.url:
            raise ValueError(f"index.embedding: kind 'openai' needs `url` for model {self.model!r}")
        if self.kind == "minilm" and (self.model, self.width) != ("all-MiniLM-L6-v2-int8", 384):
            raise ValueError("index.embedding: kind 'minilm' is all-MiniLM-L6-v2-int8 of 384 numbers and no other")
        return self


class IndexConfig(Section):
    """The index over the exemplars' vectors. "auto": exact below `exact_below` vectors, IVF-PQ from there on."""

    embedding: EmbeddingConfig = EmbeddingConfig()
    kind: Literal["auto", "exact", "ivf_pq"] = "auto"
    exact_below: PositiveInt = 200_000
    lists: PositiveInt | None = None  # ivf_pq: cells; None: 4 times the square root of the vectors
    code_bytes: PositiveInt = 48  # ivf_pq: of a vector's product code, refined by one byte a dimension
    recall: Share = 0.95  # least recall@5 against exact, on a sample; more cells are probed until it is reached

    @model_validator(mode="before")
    @classmethod
    def _refuse_removed(cls, values: Any) -> Any:
        """HNSW was removed: exact search serves small sets and IVF-PQ, with less memory, large ones."""
        if isinstance(values, dict):
            if values.get("kind") == "hnsw":
                raise ValueError("index.kind 'hnsw' was removed; use 'auto', 'exact' or 'ivf_pq'")
            for name in ("links", "build_effort"):
                if name in values:
                    raise ValueError(f"index.{name} was removed with kind 'hnsw'; delete the line")
        return values


class PromptSetConfig(Section):
    """Where prompts come from, and how many of the run's: `count`, or by `weight` a part of what the counts leave.

    `form`: "any" takes a row's first usual column or conversation, "instruction" joins `instruction` and `input`,
    "messages" the first user turn, "columns" what `columns` maps (query, and if given id, passage, reference).
    """

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    source: Literal["wikipedia", "jsonl", "hub"]
    path: str = ""  # Hub id, or a glob of files
    subset: str = ""
    split: str = "train"
    revision: str = ""  # a commit of the Hub; no set of the Hub is read without one
    form: Literal["any", "instruction", "messages", "columns"] = "any"
    columns: dict[Literal["query", "id", "passage", "reference"], str] = {}
    weight: PositiveFloat = 1.0
    count: PositiveInt | None = None
    languages: tuple[str, ...] = ()  # ISO 639-1; empty: all
    license: str = ""

    @model_validator(mode="after")
    def _complete(self) -> "PromptSetConfig":
        if (self.form == "columns") != ("query" in self.columns):
            raise ValueError(f"prompt set {self.name!r}: `columns` with a `query` goes with form 'columns' alone")
        return self


class TeacherConfig(Section):
    """A teacher and the difficulty (0..1) up to which it is chosen (paper §3.3)."""

    endpoint: str
    up_to: Share = 1.0
    template: str = ""  # of its prompt; empty: the compact one for the embedded model, the full one for others


class ProbeConfig(Section):
    """Cheap endpoints that are asked first: how far their answers disagree, or miss the reference, is difficulty too.

    Each is asked `samples` times. A probe's first reply is the document itself where that endpoint is then chosen.
    """

    endpoints: tuple[str, ...] = Field(min_length=1)
    samples: PositiveInt = 1
    weight: Share = 0.5  # of what the probe says in the difficulty; the rest is worked out from the prompt

    @model_validator(mode="after")
    def _compares(self) -> "ProbeConfig":
        if len(self.endpoints) * self.samples < 2:
            raise ValueError("distill.probe: at least two answers are compared: two endpoints, or `samples` of 2")
        return self


class DistillConfig(Section):
    """Paper §3.2, §3.3: retrieval-guided distillation on the SYNTH template."""

    prompts: PositiveInt
    prompt_sets: tuple[PromptSetConfig, ...] = (
        PromptSetConfig(name="wikipedia", source="wikipedia", license="CC BY-SA 4.0"),
    )
    neighbours: PositiveInt = 5
    teachers: tuple[TeacherConfig, ...] = Field(min_length=1)
    probe: ProbeConfig | None = None
    max_tokens: PositiveInt = 160
    temperature: NonNegativeFloat = 0.0
    budget_dollars: NonNegativeFloat = 0.0  # 0: none; a hard stop
    budget_tokens: NonNegativeInt = 0  # the same, of prompts and replies together
    max_rejected_share: Share = 1.0
    overlap_limit: Share = 0.5  # share of a reply's 8-grams that may also stand in its neighbours
    longest_answer: PositiveInt | None = None  # characters of reasoning and answer; None: twice the template's bounds
    same_language: bool = True  # a document must be in the language of its query, where both are sure
    near_duplicates: bool = True  # also drop prompts and documents that share a band of MinHash with an earlier one
    chunk: PositiveInt = 1024  # prompts under way together, and documents a file: what a kill throws away at most

    @model_validator(mode="before")
    @classmethod
    def _no_removed_keys(cls, fields: Any) -> Any:
        for name in REMOVED_KEYS if isinstance(fields, dict) else ():
            if name in fields:
                raise ValueError(f"distill.{name} was removed, and nothing replaces it: delete the key")
        return fields

    @model_validator(mode="after")
    def _fits(self) -> "DistillConfig":
        if self.probe is not None and self.probe.samples > 1 and not self.temperature:
            raise ValueError("distill.temperature is 0: one question asked several times would get one reply")
        names = [one.name for one in self.prompt_sets]
        if len(set(names)) < len(names) or not names:
            raise ValueError("distill.prompt_sets: there must be one at least, each with a name of its own")
        counted = sum(one.count or 0 for one in self.prompt_sets)
        open_sets = any(one.count is None for one in self.prompt_sets)
        if counted > self.prompts or (counted < self.prompts and not open_sets):
            raise ValueError(f"distill.prompts is {self.prompts}, but its prompt_sets count {counted} together")
        return self

    @property
    def endpoints(self) -> list[str]:
        """The names of all endpoints that may be asked."""
        teachers = [teacher.endpoint for teacher in self.teachers]
        return list(dict.fromkeys([*teachers, *(self.probe.endpoints if self.probe else ())]))
