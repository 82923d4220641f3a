"""Evaluation: throughput of the runner and of the graders, and a real benchmark by the bundled model.

    python bench/decoding/evaluation.py throughput CHECKPOINT [--items 64] [--batch 32] [--max-tokens 64] [--repeats 3]
    python bench/decoding/evaluation.py graders [--answers 2000]
    python bench/decoding/evaluation.py benchmark NAME FILE OUT [--items 100] [--max-tokens 256] [--replicas 2]

`throughput` asks one checkpoint the same held-out problems in three forms, interleaved: by the runner in batches, and
one prompt at a time with a program of one row (the strongest loop) and with the batch's program. Programs are compiled
before timing; medians over the repeats; CPU time is printed too, for busy machines. `benchmark` needs a file in the
Hub's schema and stores its rows in OUT, so that it can be resumed.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from configs.base import TaskConfig
from configs.endpoint import EndpointConfig
from configs.evaluation import BenchmarkChoice, EvaluateConfig
from configs.training import ProblemsConfig
from data.chat_template import ParsedReply
from data.endpoints.pool import EndpointPool
from evals.benchmarks.loading import items_for
from evals.benchmarks.stand_ins import held_out, wiki_choice
from evals.graders import grading
from evals.graders.equivalence import Equivalence, grade_math
from evals.graders.instructions import grade_instructions
from evals.running.answerers import CheckpointAnswerer, EndpointAnswerer
from evals.running.likelihood import CheckpointScorer, with_options
from evals.running.runner import evaluate, score_options
from evals.scoring.scores import summarise
from evals.tables.breakdown import breakdown
from evals.tables.results import to_markdown


def throughput(arguments: argparse.Namespace) -> None:
    """Tokens a second, batched and one prompt at a time; then questions a second by likelihood of their options."""
    tasks = tuple(TaskConfig(name=name) for name in ("chain_sum", "leg_counting"))
    items = held_out(ProblemsConfig(tasks=tasks, count=arguments.items), seed=1)
    shape = {"benchmarks": (), "max_tokens": arguments.max_tokens, "prompt_length": arguments.prompt_length}
    # Form -> (rows of the program, prompts at a time, problems).
    # The last form is the slowest and gets only eight problems: its rate is known after these.
    forms = {
        f"batch {arguments.batch}": (arguments.batch, arguments.batch, items),
        "one prompt at a time, a program of one row": (1, 1, items),
        f"one prompt at a time, a program of {arguments.batch}": (arguments.batch, 1, items[:8]),
    }
    answerers = {}
    for name, (rows, size, _) in forms.items():
        answerers[name] = CheckpointAnswerer(arguments.checkpoint, EvaluateConfig(batch=rows, **shape))
        # The program keeps its rows, but gets fewer prompts: the loop with a program that is too wide for it.
        answerers[name].batch = size
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in forms}
    for repeat in range(arguments.repeats + 1):  # the first compiles
        for name, (_, _, problems) in forms.items():
            with tempfile.TemporaryDirectory() as folder:
                start, cpu = time.perf_counter(), time.process_time()
                rows = evaluate(answerers[name], problems, Path(folder) / "rows.jsonl", seed=1)
                seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
            tokens = sum(row["tokens_out"] or 0 for row in rows)
            if repeat:
                rates[name].append((tokens / seconds, tokens / cpu))
    print(f"{len(items)} problems, up to {arguments.max_tokens} tokens each, {os.cpu_count()} cores, medians")
    medians = {name: [statistics.median(item) for item in zip(*rate, strict=True)] for name, rate in rates.items()}
    for name, (by_clock, by_work) in medians.items():
        print(f"{name:44s} {by_clock:9.1f} tokens/s  {by_work:9.1f} tokens per CPU second")
    # The first form is the batched one; the others are the baselines.
    batched, *singles = medians.values()
    for name, single in zip(list(forms)[1:], singles, strict=True):
        print(
            f"batched over {name}: {batched[0] / single[0]:.1f} by the clock, {batched[1] / single[1]:.1f} by CPU time"
        )
    scorer = CheckpointScorer(arguments.checkpoint, EvaluateConfig(batch=arguments.batch, **shape))
    choices = with_options(wiki_choice(1, arguments.items))
    for _ in range(2):  # the first compiles
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            score_options(scorer, choices, Path(folder) / "rows.jsonl")
            seconds = time.perf_counter() - start
    print(f"likelihood             {len(choices) / seconds:9.1f} questions/s, four options each")


ANSWERS = ["The answer is 12.", "12 or 13", "\\boxed{\\frac{1}{2}}", "C", "Paris", "no comma here", "x = $1,234.50", ""]


def graders(arguments: argparse.Namespace) -> None:
    """Answers graded per second, by kind of answer; medians of three."""
    replies = [
        ParsedReply("", f"{ANSWERS[n % len(ANSWERS)]}{'' if n % 3 else f' {n}'}", True, True)
        for n in range(arguments.answers)
    ]
    equivalence = Equivalence()
    equivalence.equal("1/2", "\\frac{2}{4}")  # starts its process
    instructions = (
        ["punctuation:no_comma", "length_constraints:number_sentences"],
        [{}, {"num_sentences": 2, "relation": "at least"}],
    )
    kinds = {
        "number": (replies, lambda reply: grading.grade_number(reply, "12")),
        "choice": (replies, lambda reply: grading.grade_choice(reply, "C", "ABCD", ("knife", "fork", "spoon", "cup"))),
        "alias": (replies, lambda reply: grading.grade_exact(reply, ["Paris", "City of Light"])),
        "math (its process)": (replies[:200], lambda reply: grade_math(reply, "\\frac{1}{2}", equivalence)),
        "instructions": (replies[:500], lambda reply: grade_instructions(reply, "Write.", *instructions)),
    }
    for name, (kind_replies, grade) in kinds.items():
        rates = []
        for _ in range(3):
            start = time.perf_counter()
            for reply in kind_replies:
                grade(reply)
            rates.append(len(kind_replies) / (time.perf_counter() - start))
        print(f"{name:20s} {statistics.median(rates):10,.0f} answers/s")
    equivalence.close()


def benchmark(arguments: argparse.Namespace) -> None:
    """Evaluate a benchmark's records by the bundled SmolLM2-135M: scores as JSON and as tables."""
    choice = BenchmarkChoice(name=arguments.name, path=str(arguments.file), items=arguments.items)
    items = [item for entry in items_for(choice, arguments.seed).values() for item in entry]
    config = EvaluateConfig(benchmarks=(choice,), max_tokens=arguments.max_tokens, batch=8)
    endpoint = EndpointConfig(
        kind="embedded", model="SmolLM2-135M-Instruct", concurrency=arguments.replicas, stand_in=True
    )
    arguments.out.mkdir(parents=True, exist_ok=True)

    def emit(kind: str, **fields: object) -> None:
        if kind == "progress":
            print(f"{time.strftime('%H:%M:%S')} {fields['done']}/{fields['total']}", flush=True)

    with EndpointPool({"smollm2": endpoint}, arguments.out / "replies", lambda *_, **__: None) as pool:
        answerer = EndpointAnswerer(pool, "smollm2", config)
        rows = evaluate(answerer, items, arguments.out / "rows.jsonl", arguments.seed, emit)
    scores = summarise(rows, answerer.name, config.model_dump(mode="json"), column="")
    (arguments.out / "scores.json").write_text(json.dumps(scores, indent=1))
    for table in breakdown(scores):
        print(to_markdown(table))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    parser = commands.add_parser("throughput")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--items", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--prompt-length", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.set_defaults(run=throughput)
    parser = commands.add_parser("graders")
    parser.add_argument("--answers", type=int, default=2000)
    parser.set_defaults(run=graders)
    parser = commands.add_parser("benchmark")
    parser.add_argument("name")
    parser.add_argument("file", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--items", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.set_defaults(run=benchmark)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
