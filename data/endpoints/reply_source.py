"""Where replies are stored. A module of its own, because every process of a stage imports it, but not the cache."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class HostClaims(Protocol):
    """Claims on the requests of a model among hosts that share no folder (store/request_claims.py)."""

    def acquire(self, digest: str) -> bool:
        """Claim a request; False while another host has claimed it. May take a request to the store's remote."""
        ...

    def release(self, digest: str, *, answered: bool) -> None:
        """End a claim, and let another host send the request if it has no reply."""
        ...


@dataclass(frozen=True)
class ReplySource:
    """The folder of cached replies, and the execution of a stage that new replies are charged to.

    `ask_again`: use only this execution's own replies. `claims`: model -> the claims among hosts, if the
    replies are shared with other hosts.
    """

    folder: Path
    execution: str = ""
    ask_again: bool = False
    claims: Callable[[str], HostClaims] | None = None
