"""`response_format` of a chat request: constrain the answer to a JSON object, or to a document of a schema.

The constraint applies after the thinking. The default of `thinking_budget` is half of the tokens that the shortest
document leaves, so that the answer has room; 0 skips the thinking.
"""

import functools
import json
from dataclasses import replace

from nautile.common.errors import ConfigError
from nautile.data.tokenizer import Tokenizer
from nautile.flows.serve.protocol import ApiError, ResponseFormat
from nautile.model.decoding.constrained import Constraint
from nautile.model.decoding.slots import DecodeRequest

FIELD = "response_format"
CACHED_SCHEMAS = 32


def constraint_for(tokenizer: Tokenizer, response_format: ResponseFormat | None) -> Constraint | None:
    """The constraint of the answer; None for free text. Raises `ApiError` 400 for an invalid or unsatisfiable schema.

    Compiling a schema may take 0.1 s, so call this in a thread. Equal schemas are compiled once.
    """
    if response_format is None or response_format.type == "text":
        return None
    schema = {"type": "object"} if response_format.json_schema is None else response_format.json_schema.content
    try:
        return _compiled(tokenizer, json.dumps(schema))
    except ConfigError as error:
        raise ApiError(400, str(error), FIELD, "invalid_schema") from None


def constrained_request(constraint: Constraint, request: DecodeRequest) -> DecodeRequest:
    """The request with the constraint and a thinking budget. Raises `ApiError` 400 if no answer fits `max_tokens`."""
    spare = request.max_tokens - constraint.least_tokens
    if spare < 0:
        message = (
            f"max_tokens: {request.max_tokens} are too few for the {FIELD}, whose shortest answer has "
            f"{constraint.least_tokens} tokens"
        )
        raise ApiError(400, message, "max_tokens")
    budget = spare // 2 if request.thinking_budget is None else request.thinking_budget
    return replace(request, constraint=constraint, thinking_budget=budget)


@functools.lru_cache(maxsize=CACHED_SCHEMAS)
def _compiled(tokenizer: Tokenizer, schema: str) -> Constraint:
    return Constraint(tokenizer, json.loads(schema), f"{FIELD}.json_schema.schema")
