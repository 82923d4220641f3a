"""Run the command of the arguments; when standard input ends, end it and all processes that it has started.

The parent holds the other end of standard input and never writes: it closes when the parent ends, also by kill -9. This
process must lead a session, since its whole process group is ended: a server of models starts others, which hold the
accelerator's memory. It is run as a file and imports the standard library alone: the command may be of another
environment, so nothing of this one is in its path.
"""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

GRACE_S = 5.0  # that a server has to end by itself, as it should: it may hold shared memory


def main(command: list[str]) -> int:
    """Returns the exit code of the command, by that of a shell if a signal has ended it."""
    # With the descriptors that this process was given on purpose: by default none is inherited.
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, close_fds=False)
    parent_ended = threading.Event()

    def end_with_parent() -> None:
        while os.read(0, 1):
            pass
        parent_ended.set()
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        os.killpg(0, signal.SIGKILL)

    watch = threading.Thread(target=end_with_parent, daemon=True)
    watch.start()
    code = process.wait()
    if parent_ended.is_set():
        watch.join()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
