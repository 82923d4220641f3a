"""A reader of text: mailboxes. `reader = "mbox"`, `path = "*.mbox"` and `columns = { text = "body" }` in a source."""

import mailbox
from collections.abc import Iterator

from nautile.configs.readers import Reader
from nautile.data.records import Rejected


def rows(path: str) -> Iterator[dict[str, str] | Rejected]:
    """The messages of a file in their order; one that is no text keeps its number, and is counted with its reason."""
    for message in mailbox.mbox(path, create=False):
        parts = [part for part in message.walk() if part.get_content_type() == "text/plain"]
        try:
            body = "\n\n".join(part.get_payload(decode=True).decode() for part in parts)
        except UnicodeDecodeError:
            yield Rejected("invalid_utf8")
        else:
            yield {"body": body, "id": message.get("Message-ID", ""), "url": message.get("Archived-At", "")}


mbox = Reader(rows=rows, version=1)  # raise the version when the same file gives other rows
