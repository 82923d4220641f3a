"""The `held_out` stage (paper §5): publish the benchmarks' questions, which are kept out of all training data.

It is the first stage of a run, so a benchmark that cannot be read fails the run before hours of work.
"""

from collections import Counter
from itertools import chain

from nautile.configs.evaluation import HeldOutPart
from nautile.data.screening.contamination import COMMON, NGRAM, SHORTEST, ContaminationIndex, write_questions
from nautile.data.tokens.losses import LOST, lost_records
from nautile.evals.benchmarks.held_out import questions
from nautile.evals.benchmarks.stand_ins import STAND_INS
from nautile.tasks.engine.job import Job
from nautile.tasks.engine.stage import stage


@stage("held_out", version=1, outputs=("questions",))
def held_out(job: Job) -> None:
    """Publish the questions of every benchmark, and count those too short or too common to search for in texts."""
    part = job.part("held_out", HeldOutPart)
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
