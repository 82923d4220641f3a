"""A whole distillation under faults and a kill -9 in the middle: where every prompt and every cent ends.

    PYTHONPATH=. python bench/corpus/distil.py [kill slow verdicts] [--prompts 10000] [--json FILE]

kill: the teacher is a server in another process: 50 ms an answer, 5 % 429, 2 % 500, 1 % that hang, 1 % cut in the body,
1 % invalid JSON; 256 requests in flight. The process that distils is killed once half are answered and started again.
Printed: documents, rejects by reason, prompts that ended more or less than once, replies kept twice, the ledger's
cost beside the server's and what was on its way at the kill, and requests completed a second (the second life,
retrieval and all; of the pool alone, bench/corpus/endpoints.py).

slow: the prompts in a window, over four teachers of which one is 20 times slower than the others; how long each of the
fast ones took for its prompts, against how long it takes for them at its own pace. Prompts are prepared without
retrieval, which would set the pace on two cores. verdicts: replies of 3 kB parsed and checked a second.
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

from bench.measure import options, write_results
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


def started(url: str, folder: Path, prompts: int) -> subprocess.Popen:
    """The process that distils."""
    command = [sys.executable, distilling_process.__file__, url, str(folder), str(prompts)]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})


def ends(folder: Path) -> Counter[str]:
    """How often each prompt became a document or a reject."""
    return Counter(
        json.loads(line)["provenance"]["prompt"]
        for pattern in (DOCUMENTS, REJECTED)
        for path in (folder / "out").glob(pattern)
        for line in path.open()
    )


def measured(prompts: int, folder: Path) -> dict[str, object]:
    """One run, killed half-way."""
    distilling_process.write_index(folder)
    with own_process(faults=FAULTS, per_million=distilling_process.PRICES, delay_s=DELAY_S) as server:
        with started(server.url, folder, prompts) as process:
            while server.counts()["answered"] < prompts // 2 and process.poll() is None:
                time.sleep(0.1)
            process.kill()
        before, began = server.counts(), time.monotonic()
        if code := started(server.url, folder, prompts).wait():
            raise SystemExit(f"the second life ended with {code}")
        took, counts = time.monotonic() - began, server.counts()
    report = json.loads((folder / "counts.json").read_text())
    kept = [row["digest"] for row in reply_rows(folder / "replies")]
    times = ends(folder)
    lost = counts["answered"] - len(set(kept))
    return {
        "prompts": prompts,
        "killed_after": before["answered"],
        "documents": report["accepted"],
        "rejected": report["rejected"],
        "prompts_that_ended_once": sum(count == 1 for count in times.values()),
        "prompts_that_ended_more_often": sum(count > 1 for count in times.values()),
        "prompts_lost": prompts - len(times),
        "replies_kept_twice": len(kept) - len(set(kept)),
        "answers_on_their_way_at_the_kill": lost,
        "dollars_in_the_ledger": report["dollars"],
        "dollars_at_the_server": counts["dollars"],
        "dollars_on_their_way": lost * counts["dollars"] / counts["answered"],
        "statuses": counts["statuses"],
        "per_s": (counts["answered"] - before["answered"]) / took,
    }


@dataclass(frozen=True)
class EvenTeachers(Teachers):
    """Prompts whose difficulty is their number, without retrieval."""

    def prepare(self, prompts: Sequence[Prompt]) -> list[PreparedPrompt]:
        return [PreparedPrompt(p, [], int(p.query.split()[-1]) % 100 / 100) for p in prompts]


def slow(prompts: int, folder: Path) -> dict[str, object]:
    """Three teachers of 100 requests/s and one of 5, which has one prompt in 25."""
    names, delays = ("fast0", "fast1", "fast2", "slow"), (0.08, 0.08, 0.08, 1.6)
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
        window = PromptWindow(EvenTeachers(config, pool, None, 1), FIRST_JUDGED, lambda reason: None)
        window.run(sorted(folder.glob("prompts-*.jsonl")), files.append)
        counts = [server.counts() for server in servers]
    assert sum(len(file.results) for file in files) == prompts
    return {
        name: {
            "answered": count["answered"],
            "seconds": round(count["seconds"], 2),
            "of_its_own_pace": round(count["answered"] * delay / 8 / count["seconds"], 3),
        }
        for name, count, delay in zip(names, counts, delays, strict=True)
    }


def verdicts(count: int) -> dict[str, object]:
    """Replies of Wikipedia's sentences, with five exemplars shown; in this process, and in those of a large run."""
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
    judge_reply(*items[0], config)  # loads the model of languages
    began, cpu = time.monotonic(), time.process_time()
    here = [judge_reply(*item, config) for item in items]
    cpu, took = time.process_time() - cpu, time.monotonic() - began
    with VerdictProcesses(config) as processes:
        list(map(Future.result, [processes.judge(*item) for item in items[:50]]))  # they have started
        began = time.monotonic()
        elsewhere = [future.result() for future in [processes.judge(*item) for item in items]]
        processes_took = time.monotonic() - began
    assert elsewhere == here
    kilobytes = sum(len(item[0]) for item in items) / count / 1000
    rates = {"per_s": count / took, "per_cpu_s": count / cpu, "per_s_in_processes": count / processes_took}
    return {"kB": round(kilobytes, 2), **rates, "reasons": dict(Counter(verdict.reason for verdict in here))}


def main() -> None:
    parser = options(__doc__, prompts=10_000)
    parser.add_argument("parts", nargs="*", default=["kill", "slow", "verdicts"])
    asked = parser.parse_args()
    result: dict[str, object] = {}
    for part, run in {"kill": measured, "slow": slow}.items():
        if part in asked.parts:
            with tempfile.TemporaryDirectory() as folder:
                result |= run(asked.prompts, Path(folder))
    if "verdicts" in asked.parts:
        result["verdicts"] = verdicts(1000)
    for name, value in result.items():
        print(f"{name}: {value}")
    write_results(result, asked.json)


if __name__ == "__main__":
    main()
