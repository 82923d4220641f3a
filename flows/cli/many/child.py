"""The process of a sweep's run: `nautile run` that ends when the sweep ends, also by SIGKILL.

python -m nautile.flows.cli.many.child PARENT run CONFIG ...
"""

import sys

from nautile.common.processes import die_with_parent
from nautile.flows.cli.main import script

if __name__ == "__main__":
    die_with_parent(int(sys.argv.pop(1)))
    script()
