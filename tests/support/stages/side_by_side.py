"""A stage that waits for the markers of other steps, fails, or writes down how many steps work beside it.

`NAUTILE_MARKERS` names the folder of the markers.
"""

import os
import time
from pathlib import Path
from typing import Any

from nautile.common.errors import ConfigError
from nautile.tasks.engine.job import Job
from nautile.tasks.engine.stage import stage

PATIENCE_S = 120.0


@stage("index", version=1, outputs=("mark",))
def marked(job: Job) -> None:
    """Write LABEL.begun, wait for the markers that the section names, fail if it says so, write LABEL.ended."""
    section, folder = job.section, Path(job.section["folder"])
    begun = folder / f"{section['step']}.begun"
    begun.write_text(f"{os.getpid()} {section['resource']}")
    deadline = time.monotonic() + PATIENCE_S
    while missing := [name for name in section["waits_for"] if not (folder / name).exists()]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{missing} did not come")
        time.sleep(0.02)
    if section["fails"]:
        raise ConfigError(f"{section['step']} has bad input")
    time.sleep(section["seconds"])
    users = [path for path in folder.glob("*.begun") if path.read_text().endswith(f" {section['resource']}")]
    at_work = [path for path in users if not path.with_suffix(".ended").exists()]
    (job.output("mark") / "at_work.txt").write_text(str(len(at_work)))
    begun.with_suffix(".ended").touch()


def section(label: str, resource: str, *waits_for: str, fails: bool = False, seconds: float = 0.0) -> dict[str, Any]:
    """The section of a step of the stage `marked`."""
    folder, waiting = os.environ["NAUTILE_MARKERS"], list(waits_for)
    return {
        "step": label, "resource": resource, "folder": folder, "waits_for": waiting, "fails": fails, "seconds": seconds
    }  # fmt: skip
