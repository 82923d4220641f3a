"""How a child of a stage is called, and how its end is understood; the same for a whole stage and for one unit of it.

The request is a file in the staging folder, so that a process on another host needs to be told only where it lies. It
holds no environment variable of the parent's: keys stay in the environment of each host.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from configs.section import ConfigError, Retryable
from store.durable import read_json
from tasks import launch
from tasks.child import Exit
from tasks.launch import NotWritable
from tasks.stage import StageCrash

# XLA on CPU takes and gives back its temporaries at each step. Kept by the allocator, on huge pages, they are not
# mapped anew each time: 22 ms to 3 ms for an `exp` of 33 MB, and a local training step takes two thirds of the time.
ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 36),
    "MALLOC_TOP_PAD_": str(1 << 28),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


@dataclass(frozen=True)
class Traces:
    """Where one child leaves its traces: log.txt, live.json, error.json."""

    folder: Path

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    @property
    def live(self) -> Path:
        return self.folder / "live.json"

    def error(self) -> str | None:
        """What the child said of its failure, if it could say anything."""
        error = read_json(self.folder / "error.json")
        return error["message"] if isinstance(error, dict) else None

    def of_the_store(self) -> bool:
        """Whether that failure was of the disk, not of what was worked on."""
        error = read_json(self.folder / "error.json")
        return isinstance(error, dict) and error["type"] == NotWritable.__name__

    def forget(self) -> None:
        """Take away what the attempt before said."""
        for name in ("error.json", "live.json"):
            (self.folder / name).unlink(missing_ok=True)

    def tail(self, lines: int = 15) -> str:
        """The last lines of the log, for a message."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, 2) - 8192))
                return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""


def command(module: str, *arguments: str) -> list[str]:
    """-P: a folder named `data` or `model` where the command was typed must not be taken for one of ours."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment(store: str, *, accelerator: bool) -> dict[str, str]:
    """This process's environment with what a child needs to find the code and the store."""
    settings = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "NAUTILE_STORE": store}
    here = str(Path(launch.__file__).resolve().parents[1])
    settings["PYTHONPATH"] = os.pathsep.join(filter(None, [here, settings.get("PYTHONPATH")]))
    if not accelerator:
        settings["JAX_PLATFORMS"] = "cpu"  # the accelerator is for the stages that ask for it
    for name, value in ALLOCATOR.items():
        settings.setdefault(name, value)
    return settings


def judge(ended: Exit, traces: Traces, who: str) -> None:
    """Raise what the exit code means, if not success. `who` begins the message of a crash."""
    if ended.code == launch.OK:
        return
    said = traces.error()
    if ended.code == launch.BAD_INPUT and said:
        raise ConfigError(said)
    if ended.code == launch.RETRY and said:
        raise Retryable(said)
    raise crash(ended, traces, who)


def crash(ended: Exit, traces: Traces, who: str) -> StageCrash:
    """The end of a child that gave no verdict of its own."""
    how = f"was ended by signal {-ended.code}" if ended.code < 0 else f"ended with exit code {ended.code}"
    if ended.code == -9:
        how += " (SIGKILL: out of memory?)"
    said = traces.error()
    return StageCrash(
        f"{who}: its process {how}{': ' + said if said else ''}. "
        f"The log is {traces.log}; its last lines:\n{traces.tail()}"
    )


def merged(log: Path, into: Path, heading: str) -> None:
    """Move what stands in `log` to the end of `into`, under a heading."""
    try:
        text = log.read_bytes()
    except FileNotFoundError:
        return
    if text:
        with into.open("ab") as file:
            file.write(f"--- {heading}\n".encode() + text)
    log.unlink(missing_ok=True)
