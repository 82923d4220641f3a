"""Where replies are kept. Apart from the cache that reads them, for each process of a stage imports it."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ReplySource:
    """Where replies are kept, and for which execution of a stage new ones are paid.

    `ask_again`: only this execution's own replies are used. `adopt`: a file of replies that this execution wrote before
    they were shared; they are moved into the folder.
    """

    folder: Path
    execution: str = ""
    ask_again: bool = False
    adopt: Path | None = None
