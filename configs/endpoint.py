"""The section of a chat endpoint: address, prices, limits, budget, and fallback endpoints."""

import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from nautile.configs.base import Operational, Section, Worker
from nautile.configs.vendors import VENDORS, Vendor, is_judge, known_kind

# Fields that every request has already, or that would change the response to several completions or a stream.
_NOT_EXTRA = {
    "model", "messages", "max_tokens", "max_completion_tokens", "temperature",
    "response_format", "grammar", "stream", "n",
}  # fmt: skip


class BatchConfig(Section):
    """The vendor's batch API: half the price, results within a day."""

    requests_per_job: PositiveInt = 10_000  # OpenAI accepts 50,000 per file
    jobs_at_once: PositiveInt = 4
    poll_s: PositiveFloat = 15.0  # first interval between two polls of a job; it doubles up to twenty times that
    give_up_hours: PositiveFloat = 26.0  # a job that takes longer counts as an outage: vendors promise 24 hours


class EndpointConfig(Section):
    """A chat endpoint. API keys come from environment variables and are never written anywhere.

    Limits that are None are learnt from the server's headers or its rate-limit errors. `fallback` lists the endpoints
    to use, in order, when this one is down or its own budget is spent, but only for the purposes in `fallback_for`: the
    scores of a judge or an evaluation must not come from another model unless the operator allows it.
    """

    # A vendor (`configs.vendors`): "openai" is any server with that API, "embedded" a small model on this machine,
    # "checker" a program that marks arithmetic, only usable as a judge, and always a stand-in.
    kind: Annotated[str, AfterValidator(known_kind)]
    model: str
    url: Operational[str] = ""  # the base URL, ending in /v1; empty: the vendor's own
    # A server for the stage to start on this machine, in place of a `url`: the words of a command that is run without a
    # shell, with `{port}` where it is told its port, as ["vllm", "serve", MODEL, "--port", "{port}"].
    command: Operational[Worker[tuple[str, ...]]] = ()
    start_s: Operational[PositiveFloat] = 900.0  # that the command may take until it serves: it loads the weights
    key_variable: Operational[str] = ""  # the NAME of the environment variable; empty: no key is sent
    concurrency: Operational[PositiveInt] = 8  # concurrent requests
    requests_per_minute: Operational[PositiveInt | None] = None
    tokens_per_minute: Operational[PositiveInt | None] = None  # of prompts and replies together
    timeout_s: Operational[PositiveFloat] = 120.0  # of one request
    # Of one request, before it counts as failed. Refusals for the rate (429) do not count: after those it is sent again
    # for as long as the endpoint answers any request.
    attempts: Operational[PositiveInt] = 5
    dollars_per_million_in: Operational[NonNegativeFloat] = 0.0  # tokens of prompts
    dollars_per_million_out: Operational[NonNegativeFloat] = 0.0  # tokens of replies
    # Limits of a stage's calls; 0: only the stage's own. What a request allows is reserved before it is sent. A vendor
    # that counts or charges more (reasoning beyond `max_tokens`, a prompt of its own) can exceed a limit by that, once
    # for each of the requests in flight: the next ones reserve as much more.
    budget_dollars: Operational[NonNegativeFloat] = 0.0
    budget_tokens: Operational[NonNegativeInt] = 0  # of prompts and replies together
    fallback: tuple[str, ...] = ()
    fallback_for: tuple[str, ...] = ("teacher",)
    mode: Operational[Literal["live", "batch"]] = "live"
    batch: Operational[BatchConfig] = BatchConfig()
    structured: Literal["json_schema", "grammar", "none"] = "json_schema"  # how structured replies are enforced
    extra: dict[str, Any] | None = None  # further fields of each request, such as `{ reasoning_effort = "low" }`
    token_limit: Literal["max_tokens", "max_completion_tokens"] | None = None  # name of that field; None: max_tokens
    omit: tuple[Literal["temperature", "seed"], ...] | None = None  # fields not to send: the model refuses them
    license: Operational[str] = ""  # licence of the model, or terms for its replies, for model and data cards
    stand_in: bool = False  # label all results that depend on it as those of a stand-in

    @model_validator(mode="before")
    @classmethod
    def _checker_is_a_stand_in(cls, fields: Any) -> Any:
        kind = fields.get("kind") if isinstance(fields, dict) else None
        if is_judge(kind):
            if fields.get("stand_in") is False:
                raise ValueError(f"kind {kind!r} is always a stand-in for an LLM judge: leave `stand_in` out")
            return {**fields, "stand_in": True}
        return fields

    @model_validator(mode="after")
    def _no_secrets(self) -> "EndpointConfig":
        # The model is not named in the messages: a key may stand in its place.
        refuse_secrets("endpoint", self.key_variable, self.url)
        for field, texts in (("model", (self.model,)), ("command", self.command)):
            if any(map(has_key_prefix, texts)):
                raise ValueError(
                    f"endpoint: `{field}` holds a key; put it into a variable and name that in `key_variable`"
                )
        if secret := next(secret_fields(self.extra or {}, "extra"), None):
            raise ValueError(
                f"endpoint for model {self.model!r}: `{secret}` holds a secret, which would be written to the store; "
                "put a key into an environment variable and name that in `key_variable`"
            )
        try:
            json.dumps(self.extra, allow_nan=False)
        except (TypeError, ValueError):
            raise ValueError("`extra` may hold what JSON has, and no dates, NaN or infinite numbers") from None
        return self

    @model_validator(mode="after")
    def _reachable(self) -> "EndpointConfig":
        if self.vendor.needs_url and not self.url and not self.command:
            raise ValueError(f"endpoint for model {self.model!r}: kind {self.kind!r} needs `url`, or a `command`")
        if self.command and (self.url or not self.vendor.needs_url):
            raise ValueError(
                f"endpoint for model {self.model!r}: `command` starts a server in place of a `url`, for a kind that "
                "needs one"
            )
        if self.command and not any("{port}" in word for word in self.command):
            raise ValueError(
                f"endpoint for model {self.model!r}: no word of `command` has {{port}}, the port to serve at"
            )
        if self.vendor.batch is None and self.mode == "batch":
            raise ValueError(f"endpoint for model {self.model!r}: kind {self.kind!r} has no batch interface")
        return self

    @model_validator(mode="after")
    def _fields_of_requests(self) -> "EndpointConfig":
        seeds = {VENDORS[name].seed_field for name in (*VENDORS.shipped, self.kind)}  # a gateway may take any of them
        if reserved := sorted({*(self.extra or ())} & (_NOT_EXTRA | seeds)):
            raise ValueError(f"endpoint for model {self.model!r}: `extra` may not set {', '.join(reserved)}")
        if self.token_limit is not None and not self.vendor.names_token_limit:
            raise ValueError(f"endpoint for model {self.model!r}: `token_limit` cannot be set for kind {self.kind!r}")
        return self

    @property
    def vendor(self) -> Vendor:
        """What is different at this endpoint's vendor."""
        return VENDORS[self.kind]

    @property
    def is_own(self) -> bool:
        """Whether the endpoint pool starts the server, on this machine, and ends it."""
        return bool(self.vendor.program or self.command)

    @property
    def has_price(self) -> bool:
        """Whether its tokens are charged for."""
        return bool(self.dollars_per_million_in or self.dollars_per_million_out)

    @property
    def address(self) -> str:
        """The base URL; empty for a program of this machine."""
        return self.url or self.vendor.url


def check_writer(field: str, name: str, endpoint: EndpointConfig) -> None:
    """Raise `ValueError` if the endpoint `name`, of which `field` wants texts, only marks answers."""
    if endpoint.vendor.judge_only:
        raise ValueError(f"{field}: {name!r} is of kind {endpoint.kind!r}, which marks answers and writes none")


def refuse_secrets(where: str, key_variable: str, url: str) -> None:
    """Raise `ValueError` if a field contains a secret: sections are written to manifests and shown in forms."""
    if key_variable and not is_variable_name(key_variable):
        raise ValueError(
            f"{where}: `key_variable` is the NAME of an environment variable, in capital letters such as "
            "OPENAI_API_KEY, not a key"
        )
    parts = urlsplit(url)
    if parts.username is not None or parts.query or parts.fragment or has_key_prefix(parts.path):
        raise ValueError(
            f"{where}: `url` may not contain a password or a query, nor a key; name the key's variable in "
            "`key_variable`"
        )
    # `port` raises ValueError for one that does not exist.
    is_usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and url.isprintable()
    if url and not is_usable:
        raise ValueError(f"{where}: `url` must be an address such as http://127.0.0.1:8000/v1")


def check_fallbacks(endpoints: dict[str, EndpointConfig]) -> None:
    """Raise `ValueError` if an endpoint falls back to itself, or to one that does not exist."""
    for name, config in endpoints.items():
        for other in config.fallback:
            if other not in endpoints or other == name:
                others = sorted(set(endpoints) - {name})
                raise ValueError(f"endpoints.{name}.fallback: no other endpoint {other!r}; the others are {others}")


def with_fallbacks(names: list[str], endpoints: dict[str, EndpointConfig]) -> list[str]:
    """`names` and the names of all their fallback endpoints, sorted."""
    return sorted({endpoint for name in names for endpoint in (name, *endpoints[name].fallback)})


# API keys that were written into a configuration, where only the NAME of a key's variable belongs: a configuration is
# recorded in events, requests, manifests and the catalog. What is refused is never repeated in a message.

# Capital letters, as POSIX has it: most keys mix letters of both cases, or are lower-case hexadecimal.
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,63}")
_LONGEST_WORD = 24  # letters between two underscores
_LONGEST_MIXED_WORD = 15  # the same for a word with digits in it, such as a key of capital letters and digits
_PREFIX = re.compile(
    r"(?i:\b(?:bearer|basic)\s+\S)|\b(?:sk|gsk|csk|hf|xai|nvapi|pplx|gh[oprsu]|github_pat|glpat|xox[abeprs])[-_][\w-]{4}"
    r"|\b(?:r8|fw|tgp_v1|dop_v1|whsec)_\w{4}|\bya29\.\w{4}|\b(?:AKIA|ASIA|AIza|eyJ)\w{8}"
)
_RUN = re.compile(r"(?=[0-9]*[A-Za-z])(?=[A-Za-z]*[0-9])[A-Za-z0-9]{16,}")  # letters and digits, as at random
_SECRET_NAME = re.compile(
    r"(?:.*_)?(?:api_?key|authorization|(?:access|auth|bearer|api|id)_token|secret|secret_key|password|passwd"
    r"|credentials?|cookie)|key|token|auth|bearer"
)
# Fields that identify a user or a cache, as digests or UUIDs.
_IDENTIFIERS = {"user", "safety_identifier", "prompt_cache_key", "cache_salt"}


def is_variable_name(text: str) -> bool:
    """Whether `text` can be the name of an environment variable for a secret, and not the secret itself."""
    if not _VARIABLE.fullmatch(text):
        return False
    words = text.split("_")
    return all(len(word) <= (_LONGEST_WORD if word.isalpha() else _LONGEST_MIXED_WORD) for word in words)


def is_like_key(text: str) -> bool:
    """Whether `text` contains something that looks like an API key: a known prefix, or a long run at random."""
    return bool(_PREFIX.search(text) or _RUN.search(text))


def has_key_prefix(text: str) -> bool:
    """Whether `text` contains a prefix that only keys have; for fields that may contain long identifiers."""
    return bool(_PREFIX.search(text))


def secret_fields(value: Any, path: str) -> Iterator[str]:
    """The paths of fields in JSON data that hold a secret, by their name or by their value."""
    if isinstance(value, dict):
        for name, field in value.items():
            plain = str(name).lower().replace("-", "_")
            if is_like_key(str(name)):
                yield path  # without the name, which is a key itself
            elif isinstance(field, str) and field and _SECRET_NAME.fullmatch(plain):
                yield f"{path}.{name}"
            elif plain not in _IDENTIFIERS:
                yield from secret_fields(field, f"{path}.{name}")
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from secret_fields(entry, path)
    elif isinstance(value, str) and is_like_key(value):
        yield path
