"""The `nautile` command with other times of a lease: $CHAOS_RENEW_S and $CHAOS_EXPIRES_S, in seconds.

A lease lasts five minutes, which a chaos run cannot wait for: who waits for one takes a silent holder for gone much
sooner. A holder itself counts on the usual time.
"""

import os
from collections.abc import Callable

from flows.cli.main import main
from store import lease

USUAL_S = lease.EXPIRES_S


class ImpatientLease(lease.Lease):
    """A lease that is waited for no longer than $CHAOS_EXPIRES_S."""

    def acquire(self, wait: Callable[[float], object], on_wait: Callable[[str], object]) -> None:
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
