"""`python -m flows.cli.document > docs/commands.md`."""

import sys

from flows.cli.document.page import document

sys.stdout.write(document())
