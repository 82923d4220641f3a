"""Where replies are stored. A module of its own, because every process of a stage imports it, but not the cache."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ReplySource:
    """The folder of cached replies, and the execution of a stage that new replies are charged to.

    `ask_again`: use only this execution's own replies. `adopt`: a file of replies of this execution from an earlier
    version, in which executions did not share them; its rows are moved into the folder.
    """

    folder: Path
    execution: str = ""
    ask_again: bool = False
    adopt: Path | None = None
