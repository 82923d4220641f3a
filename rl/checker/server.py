"""HTTP server of the checker: OpenAI's chat completions API on loopback, for the requests of `rl.judge.Judge`.

    python -m nautile.rl.checker.server --parent PID      prints the line {"url": ...} once it accepts requests

Any other request is refused with status 400. The sections of a request are data to mark, never instructions.
"""

import argparse
import json
import socket
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from nautile.data.endpoints.outgoing import read_fenced
from nautile.data.endpoints.own_server import CHECKER_MODEL, announce, child_arguments
from nautile.rl.checker.marks import marks
from nautile.rl.rubric import ANSWER, QUESTION, REASONING, REFERENCE, RUBRIC, VERSION

TITLES = ([QUESTION, REASONING, ANSWER], [QUESTION, REASONING, ANSWER, REFERENCE])


def completion(body: Any) -> str:
    """The reply to a request's JSON. Raises `ValueError` if it is not a judge's request."""
    try:
        system, user = (message["content"] for message in body["messages"])
        roles = [message["role"] for message in body["messages"]]
    except (TypeError, LookupError, ValueError):
        raise ValueError("not a judge's request: a system message with the rubric, then one user message") from None
    if roles != ["system", "user"] or system != RUBRIC:
        raise ValueError(f"the system message must be the rubric of the judge ({VERSION})")
    sections = read_fenced(user) if isinstance(user, str) else []
    if [title for title, _ in sections] not in TITLES:
        raise ValueError(f"the user message must have the sections {', '.join(TITLES[1])}; the last may be absent")
    question, reasoning, answer, *reference = (text for _, text in sections)
    return json.dumps(marks(question, reasoning, answer, next(iter(reference), None)))


async def _complete(request: Request) -> JSONResponse:
    try:
        text = completion(await request.json())
    except ValueError as error:  # JSON's own too
        return JSONResponse({"error": {"message": str(error), "type": "invalid_request_error"}}, 400)
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    # Zero tokens, not unknown ones: for unknown usage the client would reserve an estimate from its budget.
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    return JSONResponse({"object": "chat.completion", "model": CHECKER_MODEL, "choices": [choice], "usage": usage})


async def _list_models(request: Request) -> JSONResponse:
    return JSONResponse({"object": "list", "data": [{"id": CHECKER_MODEL, "object": "model"}]})


def main() -> None:
    """Serve on a free port until the parent process ends."""
    child_arguments(
        argparse.ArgumentParser(prog="python -m nautile.rl.checker.server", description="Serve the checker.")
    )
    routes = [
        Route("/v1/chat/completions", _complete, methods=["POST"]),
        Route("/v1/models", _list_models),
    ]
    # Listening before the address is announced: the first request finds an open port.
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    announce(f"http://127.0.0.1:{listener.getsockname()[1]}/v1")
    config = uvicorn.Config(Starlette(routes=routes), log_level="warning", access_log=False, lifespan="off", ws="none")
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
