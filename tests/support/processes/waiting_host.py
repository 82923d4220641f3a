"""A host of a stage that waits until its parent is gone: `python -m tests.support.processes.waiting_host`."""

import sys
import time

from nautile.tasks.engine.child_main import obey_launcher

if __name__ == "__main__":
    obey_launcher()
    sys.stdout.write("waiting\n")
    sys.stdout.flush()
    time.sleep(600)
