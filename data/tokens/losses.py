"""What a step lost of its input, in one line: files skipped, and rows or records left out, with reason and path.

The step ends with this line, and the artifact has it as the fact `lost`, which `nautile status` shows.
"""

from collections import Counter
from collections.abc import Mapping, Sequence, Sized
from typing import Literal, get_args

RowRejectReason = Literal["no_text", "invalid_utf8", "too_long", "not_json", "not_an_object", "wrong_type"]
READ_REASONS: tuple[str, ...] = get_args(RowRejectReason)  # rows that cannot be read; filters have reasons of their own
LOST = "lost"  # the name of the line among the facts of an artifact
SHOWN_REASON = 160  # characters of the reason of the first file


def losses_line(files: Mapping[str, int], skipped: Mapping[str, str], rejected: Mapping[str, Counter[str]]) -> str:
    """The line, empty if nothing was lost: `lost: 1 of 5 files (b.jsonl: is empty); 2 of 90 rows (2 not_json; ...)`.

    `files`: rows that were read of each file, by path; `skipped`: the reason of each file that was not read, by path;
    `rejected`: rows by reason, of each file that was read. Rows that a filter dropped were asked for and are not lost.
    """
    parts = []
    if skipped:
        path, reason = next(iter(sorted(skipped.items())))
        reason = reason.partition("\n")[0].removeprefix(f"{path}: ")[:SHOWN_REASON]
        listed = len(files) + len(skipped)
        parts.append(f"{len(skipped):,} of {listed:,} files ({path}: {reason}{_more(skipped)})")
    lost = {path: Counter({r: n for r, n in rows.items() if r in READ_REASONS}) for path, rows in rejected.items()}
    lost = {path: counts for path, counts in sorted(lost.items()) if counts}
    if lost:
        reasons = sum(lost.values(), Counter[str]())
        counts = ", ".join(f"{count:,} {reason}" for reason, count in reasons.most_common())
        place = f"in {next(iter(lost))}{_more(lost)}"
        parts.append(f"{reasons.total():,} of {sum(files.values()):,} rows ({counts}; {place})")
    return f"lost: {'; '.join(parts)}" if parts else ""


def lost_records(messages: Sequence[str], total: int) -> str:
    """The same line for `total` records of benchmarks, of which those with a message are left out."""
    if not messages:
        return ""
    first = messages[0].partition("\n")[0][:SHOWN_REASON]
    return f"lost: {len(messages):,} of {total:,} records ({first}{_more(messages)})"


def _more(items: Sized) -> str:
    return f", and {len(items) - 1:,} more" if len(items) > 1 else ""
