"""Distillation's sections (paper §3.2, §3.3): the index of exemplars, prompt sets, teachers and checks of replies."""

from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from nautile.configs.base import Operational, Section, Seed, Share, TrainOn, Worker
from nautile.configs.endpoint import EndpointConfig, refuse_secrets
from nautile.configs.vendors import VENDORS, known_kind

_LOCAL = "minilm"


def _known_embedding(kind: str) -> str:
    if kind in VENDORS and VENDORS[kind].embeddings:
        return kind
    return known_kind(
        kind, [_LOCAL, *(name for name in VENDORS if name in VENDORS.plug_ins or VENDORS[name].embeddings)]
    )


class EmbeddingConfig(Section):
    """The embedding model of exemplars and prompts: MiniLM on this machine, or an OpenAI-compatible endpoint."""

    kind: Annotated[str, AfterValidator(_known_embedding)] = _LOCAL  # or a vendor (`configs.vendors`)
    model: str = "all-MiniLM-L6-v2-int8"
    width: PositiveInt = 384  # dimensions of a vector; an endpoint's vector of another width is an error
    url: Operational[str] = ""  # the base URL, ending in /v1; empty: the vendor's own
    key_variable: Operational[str] = ""  # the NAME of the environment variable; empty: no key is sent
    batch: Operational[PositiveInt] = 128  # texts in a request
    longest: PositiveInt = 16_000  # characters; longer texts are truncated, because servers refuse them
    concurrency: Operational[PositiveInt] = 4  # concurrent requests
    timeout_s: Operational[PositiveFloat] = 60.0  # of one request
    attempts: Operational[PositiveInt] = 6  # of one request
    dollars_per_million: Operational[NonNegativeFloat] = 0.0  # tokens

    @model_validator(mode="after")
    def _complete(self) -> "EmbeddingConfig":
        refuse_secrets("index.embedding", self.key_variable, self.url)
        vendor = VENDORS.get(self.kind)
        if vendor is not None and vendor.needs_url and not self.url:
            raise ValueError(f"index.embedding: kind {self.kind!r} needs `url` for model {self.model!r}")
        if vendor is None and (self.model, self.width) != ("all-MiniLM-L6-v2-int8", 384):
            raise ValueError("index.embedding: kind 'minilm' supports only all-MiniLM-L6-v2-int8 with 384 dimensions")
        return self

    @property
    def endpoint(self) -> EndpointConfig | None:
        """The endpoint that texts are sent to; None: MiniLM on this machine."""
        if self.kind == _LOCAL:
            return None
        return EndpointConfig(
            kind=self.kind,
            model=self.model,
            url=self.url,
            key_variable=self.key_variable,
            timeout_s=self.timeout_s,
        )


class IndexConfig(Section):
    """The vector index of the exemplars. "auto": exact search below `exact_below` vectors, else IVF-PQ."""

    embedding: Worker[EmbeddingConfig] = EmbeddingConfig()
    kind: Literal["auto", "exact", "ivf_pq"] = "auto"
    exact_below: PositiveInt = 200_000  # vectors
    recall: Share = 0.95  # minimum recall@5 against exact search, on a sample: enough cells are probed to reach it


class PromptSetConfig(Section):
    """A source of prompts, and how many of the run's prompts it provides.

    That is `count`, or a share by `weight` of the prompts that are left after all counts.

    `form` says where the prompt of a row is: "any" takes the first common column or conversation; "instruction" joins
    `instruction` and `input`; "messages" takes the first user turn; "columns" uses the column names in `columns`: of
    the `query`, of a `context` that follows it, and of a `passage` that only the teacher sees.
    """

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    source: Literal["wikipedia", "jsonl", "hub"]
    path: Worker[str] = ""  # Hub id, or a glob of files
    subset: str = ""  # of the Hub's dataset; empty: its default
    split: str = "train"
    revision: str = ""  # a commit of the Hub; no set of the Hub is read without one
    form: Literal["any", "instruction", "messages", "columns"] = "any"
    # Role -> name of the column.
    columns: Worker[dict[Literal["query", "context", "id", "passage", "reference"], str]] = {}
    frame: str | None = None  # a template around the query: "Write a short story: {query}"
    detokenise: bool | None = None  # undo a tokeniser's spaces and the marks of WritingPrompts: "[ WP ] It 's late ."
    weight: PositiveFloat = 1.0
    count: PositiveInt | None = None
    languages: tuple[str, ...] = ()  # ISO 639-1; empty: all
    license: Operational[str] = ""  # of the dataset, for the data card

    @model_validator(mode="after")
    def _complete(self) -> "PromptSetConfig":
        if (self.form == "columns") != ("query" in self.columns):
            raise ValueError(f"{self.label}: form 'columns' needs `columns` with a `query`; no other form has one")
        if self.frame is not None and self.frame.count("{query}") != 1:
            raise ValueError(f"{self.label}: `frame` {self.frame!r} must contain {{query}} exactly once")
        return self

    @property
    def label(self) -> str:
        """The name of the section in messages."""
        return f"prompt set {self.name!r}"


class TeacherConfig(Section):
    """A teacher (paper §3.3): a prompt goes to the first teacher whose `up_to` is at least the prompt's difficulty."""

    endpoint: Worker[str]
    up_to: Share = 1.0  # difficulty, 0 to 1
    template: str = ""  # prompt template; empty: "compact" for the embedded model, "full" for others


class ProbeConfig(Section):
    """Cheap endpoints that answer first, to estimate difficulty from how far they disagree or miss the reference.

    If an endpoint of the probe is then chosen as the teacher, its first reply becomes the document.
    """

    endpoints: Worker[tuple[str, ...]] = Field(min_length=1)
    samples: PositiveInt = 1  # answers of each endpoint
    weight: Share = 0.5  # of the probe in the difficulty; the remaining weight is the estimate from the prompt

    @model_validator(mode="after")
    def _compares(self) -> "ProbeConfig":
        if len(self.endpoints) * self.samples < 2:
            raise ValueError("distill.probe compares at least two answers: name two endpoints, or set `samples` to 2")
        return self


class DistillConfig(Section):
    """Paper §3.2, §3.3: retrieval-guided distillation on the SYNTH template."""

    prompts: PositiveInt  # of the whole run
    # Ask only until so many documents are accepted, in the order of the prompts; `prompts` and the budget bound it.
    accepted: PositiveInt | None = None
    prompt_sets: tuple[PromptSetConfig, ...] = (
        PromptSetConfig(name="wikipedia", source="wikipedia", license="CC BY-SA 4.0"),
    )
    # Of the drawn prompts and the requests. Not the run's seed, so that another one of those asks no teacher again.
    seed: Seed = 0
    neighbours: PositiveInt = 5  # exemplars shown with a prompt
    teachers: tuple[TeacherConfig, ...] = Field(min_length=1)
    probe: ProbeConfig | None = None
    max_tokens: PositiveInt = 160  # of a reply
    temperature: NonNegativeFloat = 0.0
    # Limits of what the stage pays; 0: none. See `EndpointConfig` for by how much a vendor's counts can exceed them.
    budget_dollars: Operational[Worker[NonNegativeFloat]] = 0.0
    budget_tokens: Operational[Worker[NonNegativeInt]] = 0  # of prompts and replies together
    max_rejected_share: Operational[Share] = 1.0  # of the replies; a larger share fails the stage
    same_language: bool = True  # reject a document in another language than its query, if both are certain
    near_duplicates: bool = True  # also drop prompts and documents that share a band of MinHash with an earlier one
    # Train on all targets of documents, or on those of the replies alone; in the key of `pretrain`, not of `distill`.
    train_on: TrainOn = "all"
    chunk: Operational[PositiveInt] = 1024  # prompts in a file; a resumed run repeats the checks of unfinished files

    @model_validator(mode="after")
    def _fits(self) -> "DistillConfig":
        if self.probe is not None and self.probe.samples > 1 and not self.temperature:
            raise ValueError("distill.temperature is 0, so all samples of the probe would be equal: set it above 0")
        names = [prompt_set.name for prompt_set in self.prompt_sets]
        if len(set(names)) < len(names) or not names:
            raise ValueError("distill.prompt_sets: at least one is needed, with different names")
        if self.accepted is not None and self.accepted > self.prompts:
            raise ValueError(
                f"distill.accepted is {self.accepted:,}, and {self.prompts:,} prompts give at most as many documents: "
                "raise distill.prompts above it, since some replies are rejected"
            )
        counted = sum(prompt_set.count or 0 for prompt_set in self.prompt_sets)
        has_weighted = any(prompt_set.count is None for prompt_set in self.prompt_sets)
        if counted > self.prompts or (counted < self.prompts and not has_weighted):
            raise ValueError(f"distill.prompts is {self.prompts}, but its prompt_sets count {counted} in all")
        return self

    @property
    def endpoints(self) -> list[str]:
        """The names of all endpoints that may be called."""
        teachers = [teacher.endpoint for teacher in self.teachers]
        return list(dict.fromkeys([*teachers, *(self.probe.endpoints if self.probe else ())]))
