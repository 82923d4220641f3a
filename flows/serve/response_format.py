"""`response_format` of a chat request: the answer is a JSON object, or a document of a schema.

The constraint begins behind the thinking. A request that sets no `thinking_budget` gets one of half the tokens that the
shortest document leaves, so that the answer has room; 0 answers at once.
"""

import functools
import json
from dataclasses import replace

from common.errors import ConfigError
from data.tokenizer import Tokenizer
from flows.serve.protocol import ApiError, ResponseFormat
from model.decoding.constrained import Constraint
from model.decoding.requests import DecodeRequest

FIELD = "response_format"
REMEMBERED = 32  # compiled schemas


def constraint_for(tokenizer: Tokenizer, wanted: ResponseFormat | None) -> Constraint | None:
    """What the answer is held to; None if it is free. Raises `ApiError` 400 for a schema that is none or cannot be met.

    Compiling a schema may take a tenth of a second, so this belongs in a thread; equal schemas are compiled once.
    """
    if wanted is None or wanted.type == "text":
        return None
    schema = {"type": "object"} if wanted.json_schema is None else wanted.json_schema.content
    try:
        return _compiled(tokenizer, json.dumps(schema))
    except ConfigError as error:
        raise ApiError(400, str(error), FIELD, "invalid_schema") from None


def held_to(constraint: Constraint, request: DecodeRequest) -> DecodeRequest:
    """The request with the constraint, and a budget for its thinking. Raises `ApiError` 400 where no answer can fit."""
    spare = request.max_tokens - constraint.least_tokens
    if spare < 0:
        message = (
            f"max_tokens: {request.max_tokens} are too few for any answer of the {FIELD}, the shortest of which takes "
            f"{constraint.least_tokens}"
        )
        raise ApiError(400, message, "max_tokens")
    budget = spare // 2 if request.thinking_budget is None else request.thinking_budget
    return replace(request, constraint=constraint, thinking_budget=budget)


@functools.lru_cache(maxsize=REMEMBERED)
def _compiled(tokenizer: Tokenizer, schema: str) -> Constraint:
    return Constraint(tokenizer, json.loads(schema), f"{FIELD}.json_schema.schema")
