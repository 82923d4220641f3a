"""A whole distillation under faults and a kill -9 in the middle: where every prompt and every cent ends.

    PYTHONPATH=. python bench/distil.py [--prompts 10000] [--json FILE]

The teacher is a server in another process: 50 ms an answer, 5 % 429, 2 % 500, 1 % that hang, 1 % cut in the body, 1 %
invalid JSON; 256 requests in flight. The process that distils is killed once half are answered and started again.
Printed: documents, rejects by reason, prompts that ended more or less than once, replies kept twice, the ledger's
cost beside the server's and what was on its way at the kill, and requests completed a second (the second life,
retrieval and all; of the pool alone, bench/endpoints.py).
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from measure import options, write_results

from data.distill.run import DOCUMENTS, REJECTED
from tests.support import distilling_process
from tests.support.fake_openai import own_process
from tests.support.replies import reply_rows

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


def main() -> None:
    asked = options(__doc__, prompts=10_000).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measured(asked.prompts, Path(folder))
    for name, value in result.items():
        print(f"{name}: {value}")
    write_results(result, asked.json)


if __name__ == "__main__":
    main()
