"""Requests and responses of the HTTP API as pydantic models with OpenAI's fields, and errors in OpenAI's format.

Unknown and unsupported fields are errors that name the field, because a client could not see that a reply ignored them.
`top_k` and `thinking_budget` are extensions of OpenAI's fields. The responses are there for the OpenAPI description:
`flows.serve.responses` builds the bodies, and a test validates them against these models.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar, cast

from fastapi import FastAPI, HTTPException
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_STOPS = 16  # OpenAI allows 4; each costs a search per token here
_UNSUPPORTED = {
    *("frequency_penalty", "presence_penalty", "logit_bias", "best_of", "suffix", "store", "modalities", "audio"),
    *("tools", "tool_choice", "functions", "function_call", "prediction", "web_search_options", "reasoning_effort"),
    "verbosity",
}
_ServiceTier = Literal["auto", "default", "flex", "scale", "priority"]
# Messages for union types, where pydantic reports only the error of the first member.
_UNIONS = {
    "prompt": "a text, a list of texts, a list of token ids, or a list of such lists",
    "stop": f"a text of 1 to 256 characters, or a list of at most {MAX_STOPS} such texts",
    "content": "a text, or a list of parts of type text",
}
Stop = Annotated[str, Field(min_length=1, max_length=256)]
TokenId = Annotated[int, Field(ge=0)]
_Item = TypeVar("_Item")
# A list that is refused for its first wrong item: a body of 4 MiB has a million, each with an error of a kilobyte.
_Every = Annotated[list[_Item], Field(fail_fast=True)]


class ApiError(HTTPException):
    """An error response. `body()`: its JSON in OpenAI's format. `param`: the invalid field."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.message, self.param, self.code = message, param, code

    def body(self) -> dict[str, Any]:
        types = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
        kind = types.get(self.status_code, "invalid_request_error")
        # A message may quote a name from the request, which JSON lets hold half a surrogate pair, and UTF-8 does not.
        message, param = (
            text and text.encode("utf-8", "replace").decode("utf-8") for text in (self.message, self.param)
        )
        return {"error": {"message": message, "type": kind, "param": param, "code": self.code}}


def invalid_request(errors: Sequence[dict[str, Any]]) -> ApiError:
    """A 400 with the first error of a `RequestValidationError`, as one line that begins with the field's name."""
    error = errors[0]
    if error["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {error['ctx']['error']}", code="invalid_json")
    path = [str(part) for part in error["loc"][1:]]  # behind "body"
    message = error["msg"].removeprefix("Value error, ")
    if not path:  # raised by a validator of the whole model, whose message begins with `field`
        field = re.match(r"`(\w+)`", message)
        return ApiError(400, message if field else f"the body: {message}", param=field[1] if field else None)
    if error["type"] == "extra_forbidden":
        message = "unknown field"
    elif path[0] in _UNSUPPORTED:
        message = "not supported: omit it"
    # The path behind a union names the member that pydantic tried first (`prompt.str`); cut there, it names the field.
    for depth, name in enumerate(path):
        if name in _UNIONS:
            path, message = path[: depth + 1], f"must be {_UNIONS[name]}"
            break
    return ApiError(400, f"{'.'.join(path)}: {message[:1].lower()}{message[1:]}", param=path[0])


class _Body(BaseModel):
    """A strict model: numbers as strings, fractions for counts, unknown fields and NaN are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Body):
    include_usage: bool = False
    include_obfuscation: bool | None = None  # pads OpenAI's chunks against observers of their sizes; no effect here


class SamplingRequest(_Body):
    """Fields of both completion routes.

    `model`: the served model or nothing; other names are an error. Fields of OpenAI's clients are accepted where they
    have no effect here: `user`, `metadata`, identifiers, the vendor's tiers, and others with the value that asks for
    nothing.
    """

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    thinking_budget: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: _ServiceTier | None = None
    store: Literal[False] | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(SamplingRequest):
    """`POST /v1/completions`: continue texts or token ids without a chat template."""

    prompt: str | _Every[str] | _Every[TokenId] | _Every[_Every[TokenId]]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    suffix: None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        token_ids = bool(self.prompt) and isinstance(self.prompt[0], int)
        return cast("list[str] | list[list[int]]", [self.prompt] if token_ids else self.prompt)

    @model_validator(mode="after")
    def _not_empty(self) -> "CompletionRequest":
        if not self.prompt or not all(self.prompts):
            raise ValueError("`prompt` is empty")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("`max_tokens` 0 needs `echo`: the reply would be empty")
        return self


class TextPart(_Body):
    type: Literal["text"]
    text: str


class Message(_Body):
    role: Literal["system", "developer", "user"]
    content: str | _Every[TextPart]
    name: str | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class JsonSchema(_Body):
    """A JSON schema of the answer. `strict` has no effect: the answer always matches the schema."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    content: dict[str, Any] | bool = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(_Body):
    """The format of the answer: text, a JSON object, or a document that matches a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _complete(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("`json_schema` must be set for the type json_schema, and only for it")
        return self


class ChatCompletionRequest(SamplingRequest):
    """`POST /v1/chat/completions`: one question, because the model is trained on single turns."""

    messages: Annotated[_Every[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none"] | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: Literal["none"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    audio: None = None
    prediction: None = None
    web_search_options: None = None
    reasoning_effort: None = None
    verbosity: None = None

    @model_validator(mode="after")
    def _single_turn(self) -> "ChatCompletionRequest":
        roles = [message.role for message in self.messages]
        if roles[-1] != "user" or "user" in roles[:-1]:
            raise ValueError(
                "`messages` must be one user message, optionally after system messages: the model is trained on "
                "single turns"
            )
        if self.max_tokens and self.max_completion_tokens:
            raise ValueError("`max_tokens` and `max_completion_tokens` mean the same: set one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("`top_logprobs` needs `logprobs`: true")
        return self

    @property
    def query(self) -> str:
        """The texts of the system messages and of the user message, joined."""
        return "\n\n".join(text for message in self.messages if (text := message.text))


class TokenizeRequest(_Body):
    """`POST /tokenize`, as in vLLM."""

    prompt: str
    add_special_tokens: bool = False
    model: str | None = None


class DetokenizeRequest(_Body):
    """`POST /detokenize`, as in vLLM."""

    tokens: _Every[TokenId]
    model: str | None = None


class _Response(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDetail(_Response):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(_Response):
    error: ErrorDetail


class ModelObject(_Response):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(_Response):
    object: Literal["list"]
    data: list[ModelObject]


class ServerState(_Response):
    status: Literal["starting", "ok", "failed"]
    model: str
    slots: int
    busy: int
    waiting: int
    tokens: int
    error: str | None


class TokenizerInfo(_Response):
    eos_token: str
    bos_token: str | None
    pad_token: str
    model_max_length: int
    fingerprint: str


class TokenizeResponse(_Response):
    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeResponse(_Response):
    prompt: str


class ReasoningDetails(_Response):
    reasoning_tokens: int


class TextUsage(_Response):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatUsage(TextUsage):
    completion_tokens_details: ReasoningDetails


class TokenLogprob(_Response):
    token: str
    logprob: float
    bytes: list[int]


class ScoredToken(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(_Response):
    content: list[ScoredToken]
    refusal: None
    reasoning_content: list[ScoredToken]


class ChatMessage(_Response):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str
    refusal: None


class ChatChoice(_Response):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(_Response):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: ChatUsage


class TextLogprobs(_Response):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class TextChoice(_Response):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]


class TextCompletion(_Response):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: TextUsage


_ERRORS = {
    400: "A field is wrong, or the body is not JSON",
    401: "The API key is missing or wrong",
    404: "No such model or path",
    413: "The body is too large",
    415: "The content type is not application/json",
    429: "The queue is full",
    500: "The answer does not meet its schema",
    503: "The server is stopping, or the model failed",
}


_EVENT = {  # each server-sent event of a streamed answer
    "type": "object",
    "properties": {
        "data": {"type": "string", "description": "A chunk as JSON, an error as JSON, or [DONE] at the end"}
    },
    "required": ["data"],
}


def documented(response: type[BaseModel], *errors: int, streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """The `responses` argument of a route: its body, and its error statuses."""
    body: dict[str, Any] = {"model": response, "description": "Done"}
    if streams:
        body["content"] = {"text/event-stream": {"itemSchema": _EVENT}}
    failures: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorResponse, "description": _ERRORS[status]} for status in sorted(errors)
    }
    return {200: body, **failures}


def described(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI description of the server, without FastAPI's errors of status 422, which are 400 here."""
    description = get_openapi(title=app.title, version=app.version, routes=app.routes)
    parts = description["components"]
    for name in ("HTTPValidationError", "ValidationError"):
        parts["schemas"].pop(name, None)
    for operation in (operation for path in description["paths"].values() for operation in path.values()):
        operation["responses"].pop("422", None)
        if app.state.key is not None and "401" in operation["responses"]:
            parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            operation["security"] = [{"key": []}]
    return description
