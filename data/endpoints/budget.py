"""Hard limits in dollars and tokens: both are set aside for a request before it is sent, so no answer can overrun."""

import asyncio
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


class SpendingLimit:
    """`limit` (0: none of that kind), of which `spent` is gone. To be used from one event loop."""

    def __init__(self, limit: Usage = NO_USAGE, spent: Usage = NO_USAGE, name: str = "the budget") -> None:
        self.limit, self.spent, self.name = limit, spent, name
        self._reserved, self._under_way = NO_USAGE, 0
        self._settled = asyncio.Condition()

    def hold(self, amount: Usage) -> None:
        """Set `amount` aside though it may not fit: it was asked for by an earlier process."""
        self._reserved, self._under_way = self._reserved + amount, self._under_way + 1

    async def reserve(self, amount: Usage) -> bool:
        """Set `amount` aside; waits while what is under way may still cost less than was set aside for it.

        False: even then it would not fit.
        """
        if not self.fits(amount):
            async with self._settled:
                await self._settled.wait_for(lambda: self.fits(amount) or not self._under_way)
        if fits := self.fits(amount):
            self.hold(amount)
        return fits

    async def settle(self, reserved: Usage, spent: Usage) -> None:
        """Give back what was set aside and count what was really spent."""
        self.spent, self._under_way = self.spent + spent, self._under_way - 1
        # Sums of floats drift: nothing under way must mean nothing reserved.
        self._reserved = self._reserved - reserved if self._under_way else NO_USAGE
        if self.limit != NO_USAGE:
            async with self._settled:
                self._settled.notify_all()

    def fits(self, amount: Usage) -> bool:
        """Whether `amount` could be set aside now."""
        most = self.spent + self._reserved + amount
        dollars = not self.limit.dollars or most.dollars <= self.limit.dollars + 1e-12
        return dollars and (not self.limit.tokens or most.tokens <= self.limit.tokens)

    def __str__(self) -> str:
        """What is left of it, for a message."""
        said = []
        if self.limit.dollars:
            said.append(f"${self.spent.dollars:.4f} of ${self.limit.dollars:g}")
        if self.limit.tokens:
            said.append(f"{self.spent.tokens:,} of {self.limit.tokens:,} tokens")
        return f"of {self.name}, {' and '.join(said)} are spent"


class Budget:
    """Several budgets that are asked together: an endpoint's own, then the pool's."""

    def __init__(self, *budgets: SpendingLimit) -> None:
        self._budgets = budgets

    def fits(self, amount: Usage) -> bool:
        """Whether `amount` could be set aside now in all of them."""
        return all(budget.fits(amount) for budget in self._budgets)

    def hold(self, amount: Usage) -> None:
        for budget in self._budgets:
            budget.hold(amount)

    async def reserve(self, amount: Usage) -> SpendingLimit | None:
        """As `SpendingLimit.reserve`; the budget that it does not fit into, None if it is set aside in all."""
        for index, budget in enumerate(self._budgets):
            try:
                fits = await budget.reserve(amount)
            except asyncio.CancelledError:
                await self._undo(index, amount)
                raise
            if not fits:
                await self._undo(index, amount)
                return budget
        return None

    async def settle(self, reserved: Usage, spent: Usage) -> None:
        for budget in self._budgets:
            await budget.settle(reserved, spent)

    async def _undo(self, count: int, amount: Usage) -> None:
        for budget in self._budgets[:count]:
            await budget.settle(amount, NO_USAGE)
