"""A survey of ten thousand personas and twenty questions as one job, killed half-way and resumed.

    NAUTILE_STORE=FOLDER python bench/uses/survey_job.py CHECKPOINT [--personas 10000] [--orders 2] [--kill-at 0.5]
        [--work FOLDER] [--write FILE]

Writes a survey of twenty questions and the margins that personas are drawn from, runs `nautile simulate`, kills it with
SIGKILL once `--kill-at` of the personas are answered, and runs the same command again. A chunk of personas is a file of
the job's scratch folder. Unchanged inodes and times of these files show that no chunk was computed twice. Processor
seconds and memory are those of the command with all of its descendants.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.measure import argument_parser
from common.files import write_json
from tasks.simulate import CHUNK

SCALE = ("strongly disagree", "disagree", "neither agree nor disagree", "agree", "strongly agree")
STATEMENTS = (
    "More should be spent on parks.", "Buses should be free.", "Shops should open on Sundays.",
    "The town needs a second library.", "Cars should be kept out of the centre.", "School should begin later.",
    "Homework does more harm than good.", "Most news can be trusted.", "Taxes are too high.",
    "New homes should be built on fields.", "Neighbours help each other here.", "The streets are safe at night.",
    "Machines will take more work than they make.", "People should eat less meat.", "Voting should be a duty.",
    "The young have it harder than their parents.", "Museums should cost nothing.", "Dogs belong on a lead.",
    "Working from home is as good as an office.", "Science makes life better.",
)  # fmt: skip
MARGINS = {
    "age": {str(age): 1 / 72 for age in range(18, 90)},
    "sex": {"a woman": 0.51, "a man": 0.49},
    "region": {"north": 0.3, "south": 0.3, "east": 0.2, "west": 0.2},
    "school": {"no degree": 0.2, "a school degree": 0.5, "a university degree": 0.3},
    "work": {
        "a nurse": 0.1, "a clerk": 0.2, "a driver": 0.1, "a teacher": 0.1, "a cook": 0.1, "retired": 0.2,
        "a student": 0.1, "without work": 0.1,
    },
}  # fmt: skip
PERSONA = "I am {age} years old, {sex} from the {region}. I have {school} and am {work}."
POLL_S = 5.0  # between two measurements of the job


def main():
    parser = argument_parser(__doc__, personas=10_000, orders=2, kill_at=0.5, work="survey-job", write=None)
    parser.add_argument("checkpoint")
    arguments = parser.parse_args()
    work = Path(arguments.work).resolve()
    work.mkdir(parents=True, exist_ok=True)
    survey, margins = write_survey(work)
    command = [
        "nautile", "simulate", str(survey), arguments.checkpoint, "--personas", str(margins),
        "-n", str(arguments.personas), "--by", "age,region", "--orders", str(arguments.orders), "--json",
    ]  # fmt: skip
    start = time.time()
    # The first run is killed, the second one resumes; a chunk that was rewritten would have another inode or time.
    first = run_and_watch(command, work / "first.log", arguments.kill_at * arguments.personas, arguments.personas)
    second = run_and_watch(command, work / "second.log", None, arguments.personas)
    unchanged_chunks = {name: first["chunks"][name] == second["chunks"].get(name) for name in first["chunks"]}
    summary = json.loads((work / "second.log").read_text(encoding="utf-8"))
    result = {
        "personas": summary["personas"],
        "questions": len(STATEMENTS),
        "orders": arguments.orders,
        "left_out": summary["left_out"],
        "artifact": summary["artifact"],
        "rows": summary["personas"] * len(STATEMENTS),
        "wall_s": time.time() - start,
        "parts": [{name: value for name, value in part.items() if name != "chunks"} for part in (first, second)],
        "chunks": {
            "before_kill": len(unchanged_chunks),
            "kept": sum(unchanged_chunks.values()),
            "in_all": len(second["chunks"]),
        },
        "cores": os.cpu_count(),
    }
    print(json.dumps(result, indent=1))
    if arguments.write:
        write_json(Path(arguments.write), result)


def write_survey(work):
    """Write the survey and the margins as TOML; returns both paths."""
    lines = ['name = "town"', 'title = "Twenty statements about a town"', 'preface = "A town asks its people."']
    lines += [f"persona = {json.dumps(PERSONA)}", "[bands]", "age = [30, 45, 60]"]
    for number, statement in enumerate(STATEMENTS, 1):
        lines += ["[[questions]]", f'name = "q{number}"', f"text = {json.dumps(statement)}"]
        lines += [f"options = {json.dumps(SCALE)}", "ordered = true"]
    survey, margins = work / "town.toml", work / "margins.toml"
    survey.write_text("\n".join(lines) + "\n", encoding="utf-8")
    tables = [
        f"[margins.{field}]\n" + "".join(f"{json.dumps(value)} = {share}\n" for value, share in shares.items())
        for field, shares in MARGINS.items()
    ]
    margins.write_text("\n".join(tables), encoding="utf-8")
    return survey, margins


def run_and_watch(command, log, kill_after, people):
    """Run a command; kill it once `kill_after` of `people` are answered, if given. Returns times, memory and chunks."""
    staging = Path(os.environ["NAUTILE_STORE"]) / "staging"
    start, seconds, peak, chunks = time.time(), {}, 0, {}
    with log.open("wb") as out, log.with_suffix(".err").open("wb") as err:
        job = subprocess.Popen(command, stdout=out, stderr=err)
        killed = False
        while job.poll() is None:
            time.sleep(POLL_S)
            peak = max(peak, measure_processes(job.pid, seconds))
            # Inode and time of every chunk: a chunk that was computed again would be a new file.
            for path in staging.glob("*/scratch/chunks/*.parquet"):
                stat = path.stat()
                chunks[path.name] = [stat.st_ino, stat.st_mtime_ns]
            if kill_after is not None and CHUNK * len(chunks) >= kill_after and job.poll() is None:
                job.send_signal(signal.SIGKILL)
                killed = True
                job.wait()
    if job.returncode and not killed:
        sys.exit(f"{command} failed: {log.with_suffix('.err').read_text(encoding='utf-8')[-2000:]}")
    return {
        "wall_s": time.time() - start,
        "cpu_s": sum(seconds.values()),
        "peak_MiB": peak / 2**20,
        "killed": killed,
        "personas": min(CHUNK * len(chunks), people),  # the last chunk may be smaller
        "chunks": chunks,
    }


def measure_processes(pid, seconds):
    """Update `seconds` with the processor seconds of a process and its descendants; returns their resident bytes."""
    resident = 0
    try:
        for process in [parent := psutil.Process(pid), *parent.children(recursive=True)]:
            times = process.cpu_times()
            seconds[process.pid] = times.user + times.system
            resident += process.memory_info().rss
    except psutil.Error:  # it has ended
        return resident
    return resident


if __name__ == "__main__":
    main()
