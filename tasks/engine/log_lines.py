"""Lines of a stage's log for another log: the warnings as they are written, and the last lines.

The child process of a stage has a log of its own in its staging folder. Prefect's page shows what `tasks.engine`
repeats of it. Text of a log may come from outside; callers make it `visible`.
"""

import re
from pathlib import Path

MOST_WARNINGS = 50  # of an attempt; a stage that warns of every row must not fill Prefect's database
MOST_BYTES = 1 << 20  # of one look; more has more warnings than are shown
# As `logging.basicConfig` of `tasks.engine.child_main` writes them: date, time, level, logger. Not the error that ends
# the process, by its own logger: whoever repeats these lines says it as the reason of the failure.
_WARNING = re.compile(r"\S+ \S+ (?P<line>(?!ERROR nautile\.tasks\.engine\.child_main:)(?:WARNING|ERROR|CRITICAL) .+)")


class WarningsOf:
    """Follow a log from its present end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = self._size()
        self._count = 0

    def new(self) -> list[str]:
        """The warnings and errors that were written since the last call, each its first line without the time.

        After `MOST_WARNINGS` a line says that more are in the log, and then none follows. A log that is gone has none.
        """
        if self._count > MOST_WARNINGS:
            return []
        try:
            with self._path.open("rb") as file:
                file.seek(self._place)
                content = file.read(MOST_BYTES)
        except OSError:
            return []
        text, newline, _ = content.rpartition(b"\n")
        # The beginning of a line is read again once it is whole; of one without an end it is skipped.
        self._place += len(text) + len(newline) or (len(content) if len(content) == MOST_BYTES else 0)
        found: list[str] = []
        for line in text.decode(errors="replace").splitlines():
            if match := _WARNING.match(line):
                self._count += 1
                if self._count > MOST_WARNINGS:
                    return [*found, f"more warnings follow in {self._path}"]
                found.append(match["line"])
        return found

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:
            return 0
