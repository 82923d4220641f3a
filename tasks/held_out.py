"""The `held_out` stage (paper §5): publish the benchmarks' questions, which are kept out of all training data.

It is the first stage of a run, so a benchmark that cannot be read fails the run before hours of work.
"""

from collections import Counter
from functools import reduce
from itertools import chain

from nautile.configs.evaluation import HeldOutConfig
from nautile.data.screening.contamination import (
    COMMON,
    NGRAM,
    SHORTEST,
    ContaminationIndex,
    read_questions,
    write_questions,
)
from nautile.data.tokens.losses import LOST, lost_records
from nautile.evals.benchmarks.loading import check_benchmark, questions
from nautile.evals.benchmarks.stand_ins import STAND_INS
from nautile.store.artifacts import Artifact
from nautile.tasks.engine.job import Job
from nautile.tasks.engine.stage import stage


def _check(part: HeldOutConfig) -> None:
    for choice in part.benchmarks:
        check_benchmark(choice, "held_out.benchmarks")


@stage("held_out", version=1, outputs=("questions",), check=_check)
def held_out(job: Job) -> None:
    """Publish the questions of every benchmark, and count those too short or too common to search for in texts."""
    part = job.part("held_out", HeldOutConfig)
    bad_rows: dict[str, list[str]] = {}
    held_out_questions = list(questions(part.benchmarks, job.seed("evaluation"), bad_rows))
    write_questions(job.output("questions"), held_out_questions)
    screen = ContaminationIndex(held_out_questions)
    messages = list(chain.from_iterable(bad_rows.values()))
    count = len(held_out_questions)
    lost = lost_records(messages, count + len(messages))
    if lost:  # a question that is not known cannot be kept out of the training data
        job.emit("progress", done=count, total=count, unit="questions", note=lost)
    counts = dict(sorted(Counter(question.benchmark for question in held_out_questions).items()))
    job.describe(
        "questions",
        **({LOST: lost} if lost else {}),
        questions=count,
        benchmarks=counts,
        too_short=screen.too_short,
        boilerplate=screen.boilerplate,
        rule={"words": NGRAM, "shortest": SHORTEST, "boilerplate_above": COMMON},
        stand_ins=[STAND_INS[name].title for name in counts if name in STAND_INS],
    )
    for name, value in {"questions": count, "too_short": screen.too_short}.items():
        job.emit("metric", name=name, step=0, value=value)


def screened_for(checkpoint: Artifact) -> set[str]:
    """The questions that all training text of a checkpoint was screened for, by the artifacts that it was made from.

    Empty if some of the text was not screened, is of a checkpoint from elsewhere, or is no longer in the store.
    """
    seen, ids = {checkpoint.full_id}, [checkpoint.full_id]
    held_out_lists: list[set[str]] = []
    while ids:
        artifact = checkpoint.store.find(*ids.pop().split("/"))
        if artifact is None:
            return set()
        inputs = set(artifact.manifest["inputs"].values())
        kinds = {full_id.partition("/")[0] for full_id in inputs}
        if artifact.kind == "questions":
            held_out_lists.append({question.text for question in read_questions(artifact.path)})
        elif artifact.kind in ("tokens", "checkpoint") and not kinds & {"questions", "tokens"}:
            return set()
        ids += inputs - seen
        seen |= inputs
    return reduce(set.intersection, held_out_lists) if held_out_lists else set()
