"""The empty stage of bench/operation/overhead.py: its child process finds it here by import."""

from tasks.engine.job import Job
from tasks.engine.stage import stage


@stage("empty", version=1, outputs=("nothing",))
def empty(job: Job) -> None:
    (job.output("nothing") / "nothing.txt").write_text("nothing\n", encoding="utf-8")
