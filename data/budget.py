"""A hard limit in dollars: money is set aside for a request before it is sent, so that no answer can overrun it."""

import asyncio


class Budget:
    """`limit` dollars (0: no limit), of which `spent` are gone. To be used from one event loop."""

    def __init__(self, limit: float, spent: float = 0.0) -> None:
        self.limit, self.spent = limit, spent
        self._reserved = 0.0
        self._settled = asyncio.Condition()

    async def reserve(self, dollars: float) -> bool:
        """Set `dollars` aside; waits while requests under way may still cost less than was set aside for them.

        False: even then it would not fit.
        """
        if not self.limit:
            return True
        async with self._settled:
            await self._settled.wait_for(lambda: self._fits(dollars) or not self._reserved)
            if not self._fits(dollars):
                return False
            self._reserved += dollars
            return True

    async def settle(self, reserved: float, spent: float) -> None:
        """Give back what `reserve` set aside and count what was really spent."""
        async with self._settled:
            self.spent += spent
            if self.limit:
                # Sums of floats drift: nothing under way must mean nothing reserved.
                self._reserved = 0.0 if self._reserved - reserved < 1e-12 else self._reserved - reserved
            self._settled.notify_all()

    def _fits(self, dollars: float) -> bool:
        return self.spent + self._reserved + dollars <= self.limit + 1e-12
