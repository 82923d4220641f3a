"""A batched reward that a server gives: `reward = "http_verifier"`, with VERIFIER_URL in the environment of the run.

The server is sent {"items": [{"question": …, "answer": …}, …]} and answers {"scores": [0.5, null, …]}.
"""

import os

import httpx

from nautile.common.errors import ConfigError, Retryable
from nautile.data.sources.reasoning_gym import Problem
from nautile.rl.rewards import SampledReply, reward


@reward(batch=32, time_limit_s=120, workers=4, attempts=3)
def http_verifier(problems: list[Problem], replies: list[SampledReply]) -> list[float | None]:
    """A server that is not there stops the stage, which is tried again later; any other fault is no reward."""
    if not (url := os.environ.get("VERIFIER_URL")):
        raise ConfigError("VERIFIER_URL is not set: it is the address of the verifier")
    items = [{"question": p.question, "answer": r.answer} for p, r in zip(problems, replies, strict=True)]
    try:
        response = httpx.post(url, json={"items": items}, timeout=100)
    except httpx.ConnectError as error:
        raise Retryable(f"no verifier at {url} ({error})") from None
    return response.raise_for_status().json()["scores"]
