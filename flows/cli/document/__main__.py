"""`python -m nautile.flows.cli.document > docs/commands.md`."""

import sys

from nautile.flows.cli.document.page import document

sys.stdout.write(document())
