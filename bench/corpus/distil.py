"""A whole distillation under faults and a kill -9: how each prompt ends, and what it costs.

    PYTHONPATH=. python bench/corpus/distil.py [kill slow verdicts] [--prompts 10000] [--json FILE]

kill: the teacher is a server in another process: 50 ms an answer, 5 % 429, 2 % 500, 1 % that hang, 1 % cut in the body,
1 % invalid JSON; 256 requests in flight. The distilling process is killed once half of the prompts are answered, and
started again. Prints documents, rejects by reason, prompts that ended more or less than once, replies stored twice, the
ledger's cost beside the server's and the cost in flight at the kill, and requests per second (after the restart,
retrieval included; bench/corpus/endpoints.py measures the pool alone).

slow: the prompts in a window over four teachers, one of them 20 times slower than the others; the time of each fast
teacher for its prompts, compared with its own pace. Prompts are prepared without retrieval, which would be the limit on
two cores. verdicts: replies of 3 kB parsed and checked per second.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.measure import argument_parser, write_results
from common.events import silent
from configs.distill import DistillConfig, TeacherConfig
from data.distill.ask import PreparedPrompt, Teachers
from data.distill.prompts import Prompt
from data.distill.run import DOCUMENTS, REJECTED
from data.distill.stats import FIRST_JUDGED
from data.distill.teacher_prompt import FULL, TEMPLATES
from data.distill.verdicts import VerdictProcesses, judge_reply
from data.distill.window import OpenFile, PromptWindow
from data.endpoints.pool import EndpointPool
from data.records import SynthRecord
from data.retrieval.exemplar_index import Neighbour
from data.sources.wikipedia import articles
from tests.support.processes import distilling_process
from tests.support.samples.replies import reply_rows
from tests.support.servers.fake_openai import own_process

FAULTS = {"429": 0.05, "500": 0.02, "hang": 0.01, "cut": 0.01, "invalid": 0.01}
DELAY_S = 0.05


def start_distilling(url: str, folder: Path, prompts: int) -> subprocess.Popen:
    """Start the distilling process."""
    command = [sys.executable, distilling_process.__file__, url, str(folder), str(prompts)]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})


def count_ends(folder: Path) -> Counter[str]:
    """Number of documents and rejects of each prompt."""
    return Counter(
        json.loads(line)["provenance"]["prompt"]
        for pattern in (DOCUMENTS, REJECTED)
        for path in (folder / "out").glob(pattern)
        for line in path.open()
    )


def kill_and_resume(prompts: int, folder: Path) -> dict[str, object]:
    """One distillation, killed half-way and resumed."""
    distilling_process.write_index(folder)
    with own_process(faults=FAULTS, per_million=distilling_process.PRICES, delay_s=DELAY_S) as server:
        # The first process is killed once half of the prompts are answered; the second one resumes.
        with start_distilling(server.url, folder, prompts) as process:
            while server.counts()["answered"] < prompts // 2 and process.poll() is None:
                time.sleep(0.1)
            process.kill()
        at_kill, start = server.counts(), time.monotonic()
        if code := start_distilling(server.url, folder, prompts).wait():
            raise SystemExit(f"the restarted process ended with exit code {code}")
        seconds, counts = time.monotonic() - start, server.counts()
    report = json.loads((folder / "counts.json").read_text())
    digests = [row["digest"] for row in reply_rows(folder / "replies")]
    ends_by_prompt = count_ends(folder)
    # Answers that the server sent, but that were not on disk at the kill.
    in_flight = counts["answered"] - len(set(digests))
    return {
        "prompts": prompts,
        "killed_after": at_kill["answered"],
        "documents": report["accepted"],
        "rejected": report["rejected"],
        "prompts_that_ended_once": sum(count == 1 for count in ends_by_prompt.values()),
        "prompts_that_ended_more_often": sum(count > 1 for count in ends_by_prompt.values()),
        "prompts_lost": prompts - len(ends_by_prompt),
        "replies_kept_twice": len(digests) - len(set(digests)),
        "answers_on_their_way_at_the_kill": in_flight,
        "dollars_in_the_ledger": report["dollars"],
        "dollars_at_the_server": counts["dollars"],
        "dollars_on_their_way": in_flight * counts["dollars"] / counts["answered"],
        "statuses": counts["statuses"],
        "per_s": (counts["answered"] - at_kill["answered"]) / seconds,
    }


@dataclass(frozen=True)
class EvenTeachers(Teachers):
    """Prompts whose difficulty is their number, without retrieval."""

    def prepare(self, prompts: Sequence[Prompt]) -> list[PreparedPrompt]:
        return [PreparedPrompt(p, [], int(p.query.split()[-1]) % 100 / 100) for p in prompts]


def one_slow_teacher(prompts: int, folder: Path) -> dict[str, object]:
    """Three teachers with 100 requests/s each, and one with 5, which gets one prompt in 25."""
    names, delays = ("fast0", "fast1", "fast2", "slow"), (0.08, 0.08, 0.08, 1.6)
    # Difficulty is spread evenly (`EvenTeachers`), so these bounds are the shares of the prompts: 32 in a hundred for
    # each fast teacher, and 4 for the slow one.
    limits = (0.31, 0.63, 0.95, 1.0)
    chunk = 512
    for begin in range(0, prompts, chunk):
        rows = [Prompt(f"p{n}", f"What is the number after {n}", "instruction") for n in range(begin, begin + chunk)]
        path = folder / f"prompts-{begin // chunk:05d}.jsonl"
        path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows[: prompts - begin]))
    with ExitStack() as stack:
        servers = [stack.enter_context(own_process(delay_s=delay)) for delay in delays]
        endpoints = {
            name: distilling_process.endpoint(server.url, concurrency=8)
            for name, server in zip(names, servers, strict=True)
        }
        teachers = tuple(TeacherConfig(endpoint=n, up_to=limit) for n, limit in zip(names, limits, strict=True))
        config = DistillConfig(prompts=prompts, chunk=chunk, teachers=teachers)
        pool = stack.enter_context(EndpointPool(endpoints, folder / "replies", silent))
        files: list[OpenFile] = []
        teachers_of_all = EvenTeachers(config, pool, None, 1)
        window = PromptWindow(teachers_of_all, FIRST_JUDGED, lambda result: None, lambda: None)
        window.run(sorted(folder.glob("prompts-*.jsonl")), lambda file: 0, files.append)
        counts = [server.counts() for server in servers]
    assert sum(len(file.results) for file in files) == prompts
    return {
        name: {
            "answered": count["answered"],
            "seconds": round(count["seconds"], 2),
            # What it would need alone, with eight requests at a time, over what it took: 1 means that the slow teacher
            # held nothing up.
            "of_its_own_pace": round(count["answered"] * delay / 8 / count["seconds"], 3),
        }
        for name, count, delay in zip(names, counts, delays, strict=True)
    }


def verdicts(count: int) -> dict[str, object]:
    """Verdicts per second on replies of Wikipedia sentences with five exemplars, in this and in worker processes."""
    texts = [article.extract for article in articles()[:2000]]
    config = DistillConfig(prompts=count, teachers=(TeacherConfig(endpoint="t"),))
    items = []
    for n in range(count):
        words = " ".join(texts[(10 * n + k) % len(texts)] for k in range(6)).split()
        reply = json.dumps({"reasoning": " ".join(words[:300]), "answer": " ".join(words[300:420]) or "none"})
        records = [
            SynthRecord(texts[(n + k) % 2000][:200], " ".join(texts[(n * k + j) % 2000] for j in range(3)), texts[n])
            for k in range(5)
        ]
        near = [Neighbour(k, record, 0.5) for k, record in enumerate(records)]
        items.append((reply, "stop", Prompt(f"p{n}", texts[n % 2000][:150], "fact"), near, TEMPLATES[FULL]))
    judge_reply(*items[0], config)  # loads the language identification model
    start, cpu = time.monotonic(), time.process_time()
    expected = [judge_reply(*item, config) for item in items]
    cpu, seconds = time.process_time() - cpu, time.monotonic() - start
    with VerdictProcesses(config) as processes:
        list(
            map(Future.result, [processes.judge(*item) for item in items[:50]])
        )  # waits until the processes have started
        start = time.monotonic()
        from_processes = [future.result() for future in [processes.judge(*item) for item in items]]
        seconds_in_processes = time.monotonic() - start
    assert from_processes == expected
    kilobytes = sum(len(item[0]) for item in items) / count / 1000
    rates = {"per_s": count / seconds, "per_cpu_s": count / cpu, "per_s_in_processes": count / seconds_in_processes}
    return {"kB": round(kilobytes, 2), **rates, "reasons": dict(Counter(verdict.reason for verdict in expected))}


def main() -> None:
    parser = argument_parser(__doc__, prompts=10_000)
    parser.add_argument("parts", nargs="*", default=["kill", "slow", "verdicts"])
    arguments = parser.parse_args()
    result: dict[str, object] = {}
    for part, run in {"kill": kill_and_resume, "slow": one_slow_teacher}.items():
        if part in arguments.parts:
            with tempfile.TemporaryDirectory() as folder:
                result |= run(arguments.prompts, Path(folder))
    if "verdicts" in arguments.parts:
        result["verdicts"] = verdicts(1000)
    for name, value in result.items():
        print(f"{name}: {value}")
    write_results(result, arguments.json)


if __name__ == "__main__":
    main()
