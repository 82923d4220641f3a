"""What the server takes: OpenAI's two kinds of request, checked field by field, and its way of saying what is wrong.

A field that this server does not know, or cannot honour, is refused by name: an answer that ignores half of what was
asked looks like an answer. Beyond OpenAI's: `top_k` and `thinking_budget`.
"""

import json
import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

MOST_STOPS = 16
_UNSUPPORTED = ("frequency_penalty", "presence_penalty", "logit_bias", "best_of")
_SEVERAL = {
    "prompt": "a text, a list of texts, a list of token ids, or a list of such lists",
    "stop": f"a text of 1 to 256 characters, or a list of at most {MOST_STOPS} such texts",
    "content": "a text, or a list of parts of type text",
}
Stop = Annotated[str, Field(min_length=1, max_length=256)]
TokenId = Annotated[int, Field(ge=0)]


class ApiError(Exception):
    """An answer that is an error, in OpenAI's shape."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers or {}

    def body(self) -> dict[str, Any]:
        kind = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
        return {
            "error": {
                "message": self.message,
                "type": kind.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }


class _Asked(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Asked):
    include_usage: bool = False


class _Request(_Asked):
    """What both kinds share. `user` and `metadata` are taken and mean nothing here."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    thinking_budget: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def usage_wanted(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(_Request):
    """`POST /v1/completions`: text or token ids go on as they stand, with no chat template around them."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if self.prompt and isinstance(self.prompt[0], int) else self.prompt

    @model_validator(mode="after")
    def _something_wanted(self) -> "CompletionRequest":
        if not self.prompt or not all(self.prompts):
            raise ValueError("`prompt` is empty")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("`max_tokens` 0 goes with `echo`: nothing else would be in the answer")
        return self


class TextPart(_Asked):
    type: Literal["text"]
    text: str


class Message(_Asked):
    role: Literal["system", "developer", "user"]
    content: str | list[TextPart]
    name: str | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(_Request):
    """`POST /v1/chat/completions`: one question, for the model is trained on single turns."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _one_turn(self) -> "ChatRequest":
        roles = [message.role for message in self.messages]
        if roles[-1] != "user" or "user" in roles[:-1]:
            raise ValueError(
                "`messages` must be one user message, which system messages may precede: the model is trained on "
                "single turns"
            )
        if self.max_tokens and self.max_completion_tokens:
            raise ValueError("`max_tokens` and `max_completion_tokens` are one thing: set one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("`top_logprobs` goes with `logprobs`: true")
        return self

    @property
    def query(self) -> str:
        """The question, with what the system messages say before it."""
        return "\n\n".join(text for message in self.messages if (text := message.text))


class TokenizeRequest(_Asked):
    """`POST /tokenize`, as vLLM has it."""

    prompt: str
    add_special_tokens: bool = False
    model: str | None = None


class DetokenizeRequest(_Asked):
    """`POST /detokenize`, as vLLM has it."""

    tokens: list[TokenId]
    model: str | None = None


Asked = TypeVar("Asked", bound=_Asked)


def parse(kind: type[Asked], body: bytes) -> Asked:
    """The request in a body. Raises `ApiError` 400 naming the field."""
    try:
        table = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {str(error).splitlines()[0]}", code="invalid_json") from None
    try:
        return kind.model_validate(table)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise _invalid([str(part) for part in first["loc"]], first["type"], first["msg"]) from None


def _invalid(path: list[str], kind: str, said: str) -> ApiError:
    """Pydantic's first complaint, as one line that begins with the field."""
    said = said.removeprefix("Value error, ")
    if not path:
        named = re.match(r"`(\w+)`", said)
        return ApiError(400, said, param=named[1] if named else None)
    name = path[0]
    if kind == "extra_forbidden":
        said = "this server knows no such field"
    elif name in _UNSUPPORTED:
        said = "not supported here: leave it out"
    for one in path:
        if one in _SEVERAL:  # of a field that may be several things pydantic tells what is amiss with the first of them
            return ApiError(400, f"{'.'.join(path[: path.index(one) + 1])}: must be {_SEVERAL[one]}", param=name)
    return ApiError(400, f"{'.'.join(path)}: {said[:1].lower()}{said[1:]}", param=name)
