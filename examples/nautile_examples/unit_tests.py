"""A slow reward: the share of a problem's tests that the written Python function passes. `reward = "unit_tests"`.

The `answer` of a problem, of the kind `text`, has its tests, a line each: `assert double(2) == 4`.
"""

import re
import resource
import subprocess
import sys

from nautile.data.sources.reasoning_gym import Problem
from nautile.rl.rewards import SampledReply, reward

SECONDS, MEGABYTES = 2, 512
CODE = re.compile(r"```(?:python)?\n(.*?)```", re.DOTALL)
PASSED = "passed 7c1d"  # in the way of no program that prints something else


def limit() -> None:
    """Of time, memory, files and processes. It is no sandbox: run code that nobody has read in a container."""
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEGABYTES << 20, MEGABYTES << 20))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


@reward(time_limit_s=60, workers=2)
def unit_tests(problem: Problem, reply: SampledReply) -> float | None:
    """Each test is a process of its own, so that one that hangs fails alone."""
    code = "\n".join(CODE.findall(reply.answer or ""))
    tests = problem.answer.splitlines()
    return sum(passes(f"{code}\n{test}\nprint({PASSED!r})") for test in tests) / len(tests)


def passes(program: str) -> bool:
    command = [sys.executable, "-I", "-c", program]
    try:
        done = subprocess.run(command, capture_output=True, timeout=2 * SECONDS, preexec_fn=limit, env={}, text=True)
    except (subprocess.TimeoutExpired, UnicodeDecodeError):
        return False
    return done.returncode == 0 and done.stdout.endswith(f"{PASSED}\n")
