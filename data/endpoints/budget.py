"""Hard limits in dollars and tokens. The most that a request may cost is reserved before it is sent, so no reply can
overrun a limit; what it did cost is booked when it ends."""

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
    """A `limit` (0: no limit of that kind), of which `spent` is used up. To be used from one event loop.

    `warn` is called once, when 80 % of it is spent.
    """

    def __init__(
        self,
        limit: Usage = NO_USAGE,
        spent: Usage = NO_USAGE,
        name: str = "the budget",
        warn: "Callable[[SpendingLimit], None] | None" = None,
    ) -> None:
        self.limit, self.spent, self.name, self._warn = limit, spent, name, warn
        self._reserved, self._in_flight = NO_USAGE, 0
        self._settled = asyncio.Condition()

    def hold(self, amount: Usage) -> None:
        """Reserve `amount` though it may not fit: an earlier process sent the request already."""
        self._reserved, self._in_flight = self._reserved + amount, self._in_flight + 1

    async def reserve(self, amount: Usage) -> bool:
        """Reserve `amount`. Waits while requests in flight may still cost less than was reserved for them.

        False: it does not fit even when all of them have ended.
        """
        if not self.fits(amount):
            async with self._settled:
                await self._settled.wait_for(lambda: self.fits(amount) or not self._in_flight)
        if fits := self.fits(amount):
            self.hold(amount)
        return fits

    async def settle(self, reserved: Usage, spent: Usage) -> None:
        """Release a reservation and book what was spent."""
        self.spent, self._in_flight = self.spent + spent, self._in_flight - 1
        # Sums of floats drift: nothing in flight must mean nothing reserved.
        self._reserved = self._reserved - reserved if self._in_flight else NO_USAGE
        if self._warn is not None and self.spent_share >= WARNING_SHARE:
            self._warn(self)
            self._warn = None
        if self.limit != NO_USAGE:
            async with self._settled:
                self._settled.notify_all()

    def fits(self, amount: Usage) -> bool:
        """Whether `amount` could be reserved now."""
        needed = self.spent + self._reserved + amount
        dollars = not self.limit.dollars or needed.dollars <= self.limit.dollars + 1e-12
        return dollars and (not self.limit.tokens or needed.tokens <= self.limit.tokens)

    @property
    def spent_share(self) -> float:
        """The share that is spent, of dollars or tokens, whichever is more; 0 without a limit."""
        dollars = self.spent.dollars / self.limit.dollars if self.limit.dollars else 0.0
        return max(dollars, self.spent.tokens / self.limit.tokens if self.limit.tokens else 0.0)

    def __str__(self) -> str:
        """What is spent of it, for a message."""
        parts = []
        if self.limit.dollars:
            parts.append(f"${self.spent.dollars:.4f} of ${self.limit.dollars:g}")
        if self.limit.tokens:
            parts.append(f"{self.spent.tokens:,} of {self.limit.tokens:,} tokens")
        return f"of {self.name}, {' and '.join(parts)} are spent"


class Budget:
    """All limits that a request must fit into: its endpoint's own, then the pool's."""

    def __init__(self, *limits: SpendingLimit) -> None:
        self._limits = limits

    def fits(self, amount: Usage) -> bool:
        """Whether `amount` could be reserved now in all of them."""
        return all(limit.fits(amount) for limit in self._limits)

    def hold(self, amount: Usage) -> None:
        """As `SpendingLimit.hold`, in all of them."""
        for limit in self._limits:
            limit.hold(amount)

    async def reserve(self, amount: Usage) -> SpendingLimit | None:
        """As `SpendingLimit.reserve`; the limit that it does not fit into, None once it is reserved in all of them."""
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

    async def settle(self, reserved: Usage, spent: Usage) -> None:
        """As `SpendingLimit.settle`, in all of them."""
        for limit in self._limits:
            await limit.settle(reserved, spent)

    async def _release(self, count: int, amount: Usage) -> None:
        for limit in self._limits[:count]:
            await limit.settle(amount, NO_USAGE)
