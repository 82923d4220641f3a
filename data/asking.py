"""One request asked of one endpoint, now: attempt after attempt, each with its turn, its money and its ledger row."""

import asyncio
import time

from data.budget import NOTHING
from data.calls import CallError, ChatFailure, ChatReply, ChatRequest, call_row, dollars, most, used
from data.endpoint import Endpoint
from data.ledger import Ledger
from data.retry import Turn, backoff


async def ask_now(
    endpoint: Endpoint, request: ChatRequest, digest: str, ledger: Ledger, *, elsewhere: bool
) -> ChatReply | ChatFailure:
    """Ask until there is a reply, or no point in asking again. `elsewhere`: another endpoint can be asked instead.

    The reply is on disk when this returns. Raises `OSError` if it cannot be kept.
    """
    config, gate = endpoint.config, endpoint.gate
    reserved = most(config, request)
    error = CallError("outage", "it is down and waits for a probe")
    for attempt in range(1, config.attempts + 1):
        turn = await gate.admit(reserved.tokens, elsewhere=elsewhere)
        if turn is None:
            return endpoint.given_up(attempt - 1)
        if turn == "elsewhere":
            return ChatFailure("outage", f"endpoint {endpoint.name!r}: {error.message}", attempt - 1)
        try:
            if (spent_up := await endpoint.purse.reserve(reserved)) is not None:
                gate.abandoned(turn)
                return ChatFailure("budget", str(spent_up), attempt - 1)
        except asyncio.CancelledError:
            gate.abandoned(turn)
            raise
        spent, began = NOTHING, time.monotonic()
        try:
            outcome = await _attempt(endpoint, request, digest, turn)
            latency = time.monotonic() - began
            if isinstance(outcome, ChatReply):
                cost = dollars(config, outcome.tokens_in, outcome.tokens_out)
                spent = used(outcome, cost, reserved)
                row = call_row(
                    request, digest, endpoint.name, config, outcome, attempt=attempt, latency_s=latency, cost=cost
                )
                await ledger.record(row, outcome, spent)
                return outcome
        finally:
            await asyncio.shield(endpoint.purse.settle(reserved, spent))
        error = outcome
        row = call_row(request, digest, endpoint.name, config, error, attempt=attempt, latency_s=latency)
        await ledger.record(row)
        if not error.worth_another:
            return ChatFailure(error.reason, f"endpoint {endpoint.name!r}: {error.message}", attempt)
        if attempt < config.attempts and error.retry_after is None and not gate.open:
            await asyncio.sleep(backoff(attempt))  # else the gate makes it wait
    return ChatFailure(error.reason, f"endpoint {endpoint.name!r}: {error.message}", config.attempts)


async def _attempt(endpoint: Endpoint, request: ChatRequest, digest: str, turn: Turn) -> ChatReply | CallError:
    """Ask once; the turn is ended, whatever comes."""
    began = time.monotonic()
    try:
        said = await endpoint.complete(request)
    except CallError as error:
        endpoint.tell_gate(turn, error)
        return error
    except BaseException:
        endpoint.gate.abandoned(turn)
        raise
    total = None if said.tokens_in is None or said.tokens_out is None else said.tokens_in + said.tokens_out
    endpoint.gate.answered(turn, total)
    latency = time.monotonic() - began
    return ChatReply(said.text, said.finish, said.tokens_in, said.tokens_out, latency, False, digest, endpoint.name)
