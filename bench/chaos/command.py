"""The `nautile` command with shorter lease times: $CHAOS_RENEW_S and $CHAOS_EXPIRES_S, in seconds.

A lease expires after five minutes, too long for a chaos run. A process that waits for a lease uses the short time; the
holder keeps the usual one.
"""

import os
from collections.abc import Callable

from flows.cli.main import main
from store import lease

USUAL_S = lease.EXPIRES_S


class ImpatientLease(lease.Lease):
    """A lease whose waiting time is at most $CHAOS_EXPIRES_S."""

    def acquire(self, wait: Callable[[float], object], on_wait: Callable[[str], object]) -> None:
        # Only while waiting: the same constant is how long the holder's own lease lasts, and a short one would expire
        # under a slow renewal.
        lease.EXPIRES_S = float(os.environ.get("CHAOS_EXPIRES_S", USUAL_S))
        try:
            super().acquire(wait, on_wait)
        finally:
            lease.EXPIRES_S = USUAL_S


if __name__ == "__main__":
    from store import mirror

    lease.RENEW_S = float(os.environ.get("CHAOS_RENEW_S", lease.RENEW_S))
    mirror.Lease = ImpatientLease  # type: ignore[misc]
    main()
