"""Models of the HTTP API's responses for its OpenAPI description: OpenAI's bodies, and errors in OpenAI's format.

`flows.serve.responses` builds the bodies; a test validates them against these models.
"""

from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict


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


def documented(response: type[BaseModel], *errors: int, streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """The `responses` argument of a route: its body, and its error statuses."""
    body: dict[str, Any] = {"model": response, "description": "Done"}
    if streams:
        body["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
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
