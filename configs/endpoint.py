"""A chat endpoint's section: its address, prices, limits and budget, and which endpoints replace it when it is down."""

import re
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from configs.base import Operational, Section

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
# What a request has anyway, or what would make its answer another than one completion in one piece.
_NOT_EXTRA = {"model", "messages", "max_tokens", "max_completion_tokens", "temperature", "seed", "random_seed"}
_NOT_EXTRA |= {"response_format", "grammar", "stream", "n"}
OWN_KINDS = ("embedded", "checker")  # served by processes that the pool starts on this machine


class BatchConfig(Section):
    """The vendor's batch interface: half the price, and an answer within a day."""

    requests_per_job: PositiveInt = 10_000  # OpenAI takes 50,000 in a file
    bytes_per_job: PositiveInt = 100 * 2**20  # OpenAI takes 200 MB in a file
    jobs_at_once: PositiveInt = 4
    price_factor: NonNegativeFloat = 0.5  # of the live price
    poll_s: PositiveFloat = 15.0  # seconds to the first look at a job, doubling up to twenty times that
    give_up_hours: PositiveFloat = 26.0  # a job without an end by then is an outage: the vendors promise 24 hours


class EndpointConfig(Section):
    """A chat endpoint. Keys come from the environment, by name, and are never written anywhere.

    Limits that are None are learnt from the server's headers, or from its refusals. `fallback` names the endpoints to
    use instead, in order, when this one is down or its own budget is spent, for the purposes in `fallback_for` alone: a
    judge's or an evaluation's numbers must not come from another model unless the operator says so.
    """

    # "openai": any server with that protocol; "embedded": a small model on this machine; "checker": a program that
    # marks arithmetic, for a judge alone, always a stand-in.
    kind: Literal["openai", "mistral", "embedded", "checker"]
    model: str
    url: Operational[str] = ""  # openai: the base URL, ending in /v1
    key_variable: Operational[str] = ""  # the NAME of the environment variable; empty: no key is sent
    concurrency: Operational[PositiveInt] = 8  # requests under way together
    requests_per_minute: Operational[PositiveInt | None] = None
    tokens_per_minute: Operational[PositiveInt | None] = None  # of prompts and replies together
    timeout_s: Operational[PositiveFloat] = 120.0  # of one request
    attempts: Operational[PositiveInt] = 5  # at one request, before it counts as failed
    dollars_per_million_in: Operational[NonNegativeFloat] = 0.0  # tokens of prompts
    dollars_per_million_out: Operational[NonNegativeFloat] = 0.0  # tokens of replies
    budget_dollars: Operational[NonNegativeFloat] = 0.0  # a hard limit of a stage's calls; 0: none but the stage's own
    budget_tokens: Operational[NonNegativeInt] = 0  # the same, of prompts and replies together
    fallback: tuple[str, ...] = ()
    fallback_for: tuple[str, ...] = ("teacher",)
    mode: Operational[Literal["live", "batch"]] = "live"
    batch: Operational[BatchConfig] = BatchConfig()
    structured: Literal["json_schema", "grammar", "none"] = "json_schema"  # how replies are held to a form
    extra: dict[str, Any] | None = None  # more fields of each request, as `{ reasoning_effort = "low" }`
    token_limit: Literal["max_tokens", "max_completion_tokens"] | None = None  # that field's name; None: max_tokens
    omit: tuple[Literal["temperature", "seed"], ...] | None = None  # fields that are not sent: the model refuses them
    license: Operational[str] = ""  # licence of the model or terms of its replies, for cards
    stand_in: bool = False  # labels every result that rests on it

    @model_validator(mode="before")
    @classmethod
    def _checker_is_a_stand_in(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and fields.get("kind") == "checker":
            if fields.get("stand_in") is False:
                raise ValueError("kind 'checker' is always a stand-in for an LLM judge: leave `stand_in` out")
            return {**fields, "stand_in": True}
        return fields

    @model_validator(mode="after")
    def _no_secrets(self) -> "EndpointConfig":
        refuse_secrets(f"endpoint for model {self.model!r}", self.key_variable, self.url)
        return self

    @model_validator(mode="after")
    def _reachable(self) -> "EndpointConfig":
        if self.kind == "openai" and not self.url:
            raise ValueError(f"endpoint for model {self.model!r}: kind 'openai' needs `url`")
        if self.kind in OWN_KINDS and self.mode == "batch":
            raise ValueError(f"endpoint for model {self.model!r}: kind {self.kind!r} has no batch interface")
        return self

    @model_validator(mode="after")
    def _fields_of_requests(self) -> "EndpointConfig":
        if taken := sorted({*(self.extra or ())} & _NOT_EXTRA):
            raise ValueError(f"endpoint for model {self.model!r}: `extra` may not set {', '.join(taken)}")
        if self.kind == "mistral" and self.token_limit is not None:
            raise ValueError(f"endpoint for model {self.model!r}: kind 'mistral' has no other `token_limit`")
        return self


def refuse_secrets(where: str, key_variable: str, url: str) -> None:
    """Raise `ValueError` if one of them holds a key: sections are written into manifests and shown in forms."""
    if key_variable and not _VARIABLE.fullmatch(key_variable):
        raise ValueError(f"{where}: `key_variable` is the NAME of an environment variable, not a key")
    parts = urlsplit(url)
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError(
            f"{where}: `url` may hold no password and no query; keys come from the environment, by `key_variable`"
        )


def check_fallbacks(endpoints: dict[str, EndpointConfig]) -> None:
    """Raise `ValueError` if an endpoint falls back on itself, or on one that does not exist."""
    for name, config in endpoints.items():
        for other in config.fallback:
            if other not in endpoints or other == name:
                others = sorted(set(endpoints) - {name})
                raise ValueError(f"endpoints.{name}.fallback: no other endpoint {other!r}; the others are {others}")


def with_fallbacks(names: list[str], endpoints: dict[str, EndpointConfig]) -> list[str]:
    """`names` with the names of every endpoint that may answer in their place; sorted."""
    return sorted({endpoint for name in names for endpoint in (name, *endpoints[name].fallback)})
