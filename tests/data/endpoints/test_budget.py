"""Spending limits: what is reserved, what is spent, and what no longer fits."""

import asyncio

import pytest

from nautile.data.endpoints.budget import NO_USAGE, Budget, SpendingLimit, Usage


def test_a_limit_waits_for_requests_in_flight_and_is_never_overrun():
    async def scenario():
        limit = SpendingLimit(Usage(10.0), Usage(1.0))
        assert await limit.reserve(Usage(6.0))
        second = asyncio.create_task(limit.reserve(Usage(6.0)))
        await asyncio.sleep(0.01)
        assert not second.done(), "the first may cost less than was reserved"
        await limit.settle(Usage(6.0), Usage(2.0))
        assert await second
        await limit.settle(Usage(6.0), Usage(6.0))
        assert not await limit.reserve(Usage(1.5))
        assert await limit.reserve(Usage(1.0))
        assert limit.spent.dollars == 9.0

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_tokens_have_a_limit_of_their_own_and_a_budget_names_the_limit_that_is_spent():
    async def scenario():
        own, shared = SpendingLimit(Usage(0.0, 100), name="own"), SpendingLimit(Usage(5.0), name="shared")
        budget = Budget(own, shared)
        assert await budget.reserve(Usage(1.0, 60)) is None
        assert not budget.fits(Usage(0.0, 41))
        await budget.settle(Usage(1.0, 60), Usage(4.5, 60))
        assert await budget.reserve(Usage(0.0, 41)) is own
        assert await budget.reserve(Usage(0.6, 1)) is shared
        assert own.fits(Usage(0.0, 40)), "what did not fit into the other is released"
        assert str(own) == "of own, 60 of 100 tokens are spent"

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_without_a_limit_everything_fits():
    async def scenario():
        limit = SpendingLimit()
        assert await limit.reserve(Usage(1e9, 10**12))
        await limit.settle(Usage(1e9, 10**12), Usage(1e9))
        assert limit.spent.dollars == 1e9
        assert limit.limit == NO_USAGE

    asyncio.run(scenario())


def test_a_limit_does_not_wait_for_a_reservation_that_nobody_sees_to():
    async def scenario():
        limit = SpendingLimit(Usage(10.0))
        limit.hold(Usage(6.0))
        await limit.park()
        assert not await limit.reserve(Usage(6.0)), "its money is still reserved: the job may yet be charged for"
        limit.unpark()
        waiting = asyncio.create_task(limit.reserve(Usage(6.0)))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await limit.park()
        assert not await waiting, "also where it is parked while another one waits"
        limit.unpark()
        await limit.settle(Usage(6.0), Usage(1.0))
        assert await limit.reserve(Usage(6.0))

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_what_may_have_been_spent_uses_the_limit_up_and_is_counted_apart():
    async def scenario():
        limit = SpendingLimit(Usage(10.0))
        assert await limit.reserve(Usage(6.0))
        await limit.settle(Usage(6.0), NO_USAGE, Usage(6.0))
        assert (limit.spent.dollars, limit.unknown.dollars) == (0.0, 6.0)
        assert not await limit.reserve(Usage(5.0))
        assert str(limit).startswith("of the budget, $0.0000 of $10 are spent, and $6.0000 may be")

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_a_warning_that_fails_leaves_nobody_waiting():
    def fails(limit):
        raise OSError("no space left")

    async def scenario():
        first = SpendingLimit(Usage(10.0), warn=fails)
        budget = Budget(first, SpendingLimit(Usage(10.0)))
        assert await budget.reserve(Usage(9.0)) is None
        waiting = asyncio.create_task(budget.reserve(Usage(5.0)))
        await asyncio.sleep(0.01)
        with pytest.raises(OSError, match="no space left"):
            await budget.settle(Usage(9.0), Usage(9.0))
        assert await waiting is first
        assert await budget.reserve(Usage(1.0)) is None, "in both limits the reservation was released"

    asyncio.run(asyncio.wait_for(scenario(), 120))
