"""Hard spending limits in dollars and tokens.

What a request allows is reserved before it is sent; its actual cost is booked when it ends. So a limit is kept, except
that a vendor may count or charge more than a request allows: then it is exceeded by at most that, for the requests in
flight, because the next ones reserve as much more (`Endpoint.learn_cost`). If the cost is unknown (the reply was cut
off, timed out or is unreadable, and vendors charge for most of these), the whole reservation counts as used, and is
reported separately as unknown.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Usage:
    """Dollars, and tokens of prompts and replies together."""

    dollars: float = 0.0
    tokens: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(self.dollars + other.dollars, self.tokens + other.tokens)

    def __sub__(self, other: "Usage") -> "Usage":
        return Usage(self.dollars - other.dollars, self.tokens - other.tokens)


NO_USAGE = Usage()
WARNING_SHARE = 0.8  # of a limit


class SpendingLimit:
    """One `limit` (0: no limit of that kind) and how much of it is used. To be used from one event loop.

    `spent`: cost of replies; `unknown`: the maximum cost of attempts without a reply. `warn` is called once, when 80 %
    is used.
    """

    def __init__(
        self,
        limit: Usage = NO_USAGE,
        spent: Usage = NO_USAGE,
        name: str = "the budget",
        warn: "Callable[[SpendingLimit], None] | None" = None,
        unknown: Usage = NO_USAGE,
    ) -> None:
        self.limit, self.spent, self.unknown, self.name, self._warn = limit, spent, unknown, name, warn
        self._reserved = NO_USAGE
        self._holds = self._parked = 0  # open reservations, and those of them that will not be settled soon
        self._changed = asyncio.Condition()

    def hold(self, amount: Usage) -> None:
        """Reserve `amount` even if it exceeds the limit, for a request that an earlier process has sent."""
        self._reserved, self._holds = self._reserved + amount, self._holds + 1

    async def park(self) -> None:
        """Mark a reservation as paused: its request is not being worked on, so `reserve` does not wait for it."""
        self._parked += 1
        await self.notify()

    def unpark(self) -> None:
        """End the pause of a reservation that was parked: work on its request continues."""
        self._parked -= 1

    async def reserve(self, amount: Usage) -> bool:
        """Reserve `amount`, waiting while requests in flight may still turn out cheaper than their reservations.

        Returns False if it does not fit even after all of them have ended.
        """
        if not self.fits(amount):
            async with self._changed:
                # Any reservation that is settled may make room. Those that are parked will not be settled while we
                # wait, so if there are no others, waiting is of no use.
                await self._changed.wait_for(lambda: self.fits(amount) or self._holds == self._parked)
        if fits := self.fits(amount):
            self.hold(amount)
        return fits

    async def settle(self, reserved: Usage, spent: Usage, unknown: Usage = NO_USAGE) -> None:
        """Release a reservation and book the cost, known and unknown. Raises what `warn` raises, after the booking."""
        await Budget(self).settle(reserved, spent, unknown)

    def book(self, reserved: Usage, spent: Usage, unknown: Usage) -> None:
        """As `settle`, without waking the tasks that wait in `reserve`."""
        self.spent, self.unknown, self._holds = self.spent + spent, self.unknown + unknown, self._holds - 1
        # Float sums drift, so without reservations the sum is set to exactly zero.
        self._reserved = self._reserved - reserved if self._holds else NO_USAGE

    async def notify(self) -> None:
        if self.limit != NO_USAGE:
            async with self._changed:
                self._changed.notify_all()

    def warn_once(self) -> None:
        if self._warn is not None and self.spent_share >= WARNING_SHARE:
            warn, self._warn = self._warn, None
            warn(self)

    def fits(self, amount: Usage) -> bool:
        needed = self.spent + self.unknown + self._reserved + amount
        dollars_fit = not self.limit.dollars or needed.dollars <= self.limit.dollars + 1e-12  # a tolerance for rounding
        return dollars_fit and (not self.limit.tokens or needed.tokens <= self.limit.tokens)

    @property
    def spent_share(self) -> float:
        """The used share of the dollars or of the tokens, whichever is larger; 0 without a limit."""
        usage = self.spent + self.unknown
        dollar_share = usage.dollars / self.limit.dollars if self.limit.dollars else 0.0
        return max(dollar_share, usage.tokens / self.limit.tokens if self.limit.tokens else 0.0)

    def __str__(self) -> str:
        parts = []
        if self.limit.dollars:
            parts.append(f"${self.spent.dollars:.4f} of ${self.limit.dollars:g}")
        if self.limit.tokens:
            parts.append(f"{self.spent.tokens:,} of {self.limit.tokens:,} tokens")
        unknown = []
        if self.limit.dollars and self.unknown.dollars:
            unknown.append(f"${self.unknown.dollars:.4f}")
        if self.limit.tokens and self.unknown.tokens:
            unknown.append(f"{self.unknown.tokens:,} tokens")
        note = f", and {' and '.join(unknown)} may be, on replies that were cut, late or unreadable" if unknown else ""
        return f"of {self.name}, {' and '.join(parts)} are spent{note}"


class Budget:
    """All limits that a request must fit into: its endpoint's own, then the pool's. Methods as those of one, in all."""

    def __init__(self, *limits: SpendingLimit) -> None:
        self._limits = limits

    def fits(self, amount: Usage) -> bool:
        return all(limit.fits(amount) for limit in self._limits)

    def hold(self, amount: Usage) -> None:
        for limit in self._limits:
            limit.hold(amount)

    async def reserve(self, amount: Usage) -> SpendingLimit | None:
        """Reserve in all limits. Returns None, or the limit that does not allow it (then nothing is reserved)."""
        # If a later limit has no room, or the task is cancelled, what the earlier ones hold is given back.
        for index, limit in enumerate(self._limits):
            try:
                fits = await limit.reserve(amount)
            except asyncio.CancelledError:
                await self._release(index, amount)
                raise
            if not fits:
                await self._release(index, amount)
                return limit
        return None

    async def settle(self, reserved: Usage, spent: Usage, unknown: Usage = NO_USAGE) -> None:
        for limit in self._limits:
            # All limits are booked before anybody is woken: a task that wakes sees none of this cost or all of it.
            limit.book(reserved, spent, unknown)
        for limit in self._limits:
            await limit.notify()
        # Last, because it may fail (it writes an event, and a disk may be full).
        for limit in self._limits:
            limit.warn_once()

    async def park(self) -> None:
        for limit in self._limits:
            await limit.park()

    def unpark(self) -> None:
        for limit in self._limits:
            limit.unpark()

    async def _release(self, count: int, amount: Usage) -> None:
        for limit in self._limits[:count]:
            await limit.settle(amount, NO_USAGE)
