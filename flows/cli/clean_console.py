"""The console of the command line, which prints texts of other machines, models and servers without their controls."""

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from nautile.common.text import visible


class CleanConsole(Console):
    """A Rich console that replaces terminal escapes and direction overrides in everything it prints.

    Commands print names, notes, errors and documents that anyone may have written: an escape in one could retitle the
    terminal, write to the clipboard or hide a line. Rich removes a few control characters only. Its own, such as those
    that move the cursor in a live display, are segments of another kind.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As Rich does, with every text cleaned."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)
