"""A reward in processes of its own: real processes, a real server, and what they do at their worst."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from nautile.common.errors import ConfigError, Retryable
from nautile.configs.rewards import REWARDS
from nautile.data.endpoints.reply_source import ReplySource
from nautile.data.sources.reasoning_gym import Problem
from nautile.rl.reward_runner import RewardRunner
from nautile.rl.rewards import Reward, SampledReply
from tests.support.plug_ins import add_plug_in
from tests.support.servers.http_server import FakeServer, json_response

EXAMPLES = Path(__file__).parents[2] / "examples" / "nautile_examples"
PROBLEM = Problem("file", 0, "1 + 1?", "2", "")

BY_LENGTH = """
import os, subprocess, time
from nautile.common.errors import ConfigError, Retryable
from nautile.rl.rewards import Reward

def score(problem, reply):
    with open(os.environ["ASKED"], "a") as asked:
        asked.write(f"{reply.length}\\n")
    match reply.length:
        case 2: return None
        case 3: return float("inf")
        case 4: return "much"
        case 5: raise SystemExit
        case 6: os._exit(7)
        case 7:
            child = subprocess.Popen(["sleep", "10000"])
            with open(os.environ["ASKED"] + ".child", "w") as file: file.write(str(child.pid))
            while True: pass
        case 8: raise Retryable("the verifier is away")
        case 9: raise ConfigError("VERIFIER_URL is not set")
        case 10 | 11: time.sleep(0.1)  # a slow call, whose result is on disk before the next
    return reply.length / 8

by_length = Reward(score, time_limit_s=3.0)
"""


def completion(length, answer="2"):
    return PROBLEM, SampledReply("", answer, True, True, length, False)


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """The lengths that the reward `by_length` was asked about, by all of its processes."""
    path = tmp_path / "asked"
    monkeypatch.setenv("ASKED", str(path))
    add_plug_in(monkeypatch, tmp_path, REWARDS, "by_length", BY_LENGTH)
    return lambda: [int(line) for line in path.read_text(encoding="utf-8").split()]


def runs(pid):
    """Whether a process is there, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition):
    while not condition():
        time.sleep(0.02)


@pytest.mark.slow
def test_what_is_late_raises_ends_or_is_no_number_is_missing_with_its_reason_and_the_others_are_not(asked, tmp_path):
    events = []
    source = ReplySource(tmp_path / "replies", "first")
    with RewardRunner("by_length", source, lambda kind, **row: events.append(row)) as runner:
        assert runner.score([completion(length) for length in range(1, 8)]) == [0.125] + [None] * 6
        assert runner.missing == {"none": 1, "no_number": 1, "raised": 2, "process_ended": 1, "late": 1}
        child = int((tmp_path / "asked.child").read_text(encoding="utf-8"))
        wait_until(lambda: not runs(child))  # with all that it had started
        assert runner.score([completion(1), completion(10), completion(10)]) == [0.125, 1.25, 1.25]
    said = {row["status"]: row["error"] for row in events if "error" in row}
    assert said["late"] == "no result within 3 s"
    assert said["process_ended"] == "its process ended (exit code 7)"
    assert {row["cached"] for row in events[-2:]} == {True, False}
    # A resumed run has the same rewards and asks nothing; another asks only for what it does not know.
    for execution, again in (("first", []), ("second", [4, 5])):
        before = len(asked())
        with RewardRunner("by_length", ReplySource(tmp_path / "replies", execution)) as runner:
            assert runner.score([completion(length) for length in (1, 2, 4, 5, 10)]) == [0.125, None, None, None, 1.25]
        assert asked()[before:] == again


@pytest.mark.slow
@pytest.mark.parametrize(("length", "error", "said"), [(8, Retryable, "is away"), (9, ConfigError, "VERIFIER_URL is")])
def test_an_outage_and_a_fault_of_the_configuration_stop_the_stage(asked, tmp_path, length, error, said):
    with RewardRunner("by_length", ReplySource(tmp_path / "replies")) as runner, pytest.raises(error, match=said):
        runner.score([completion(1), completion(length)])


def test_a_reward_that_cannot_be_imported_in_its_process_is_refused_by_name(asked, tmp_path, monkeypatch):
    with RewardRunner("by_length", ReplySource(tmp_path / "replies")) as runner:
        monkeypatch.delenv("NAUTILE_PLUGINS")
        with pytest.raises(ConfigError, match=r"^reward 'by_length': its process did not start"):
            runner.score([completion(1)])


KILLED = """
import sys
from pathlib import Path
from nautile.configs.rewards import REWARDS
from nautile.data.endpoints.reply_source import ReplySource
from nautile.rl.reward_runner import RewardRunner
from tests.rl.test_reward_runner import completion
with RewardRunner("by_length", ReplySource(Path(sys.argv[1]), "first")) as runner:
    runner.score([completion(length) for length in (10, 7, 11)])
"""


@pytest.mark.slow
def test_after_kill_9_its_processes_end_and_a_resumed_run_asks_for_nothing_twice(asked, tmp_path, monkeypatch):
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2]), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "replies")], env=os.environ | {"PYTHONPATH": path}
    )
    child = tmp_path / "asked.child"
    wait_until(lambda: child.exists() and child.read_text(encoding="utf-8"))
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not runs(int(child.read_text(encoding="utf-8"))))
    with RewardRunner("by_length", ReplySource(tmp_path / "replies", "first")) as runner:
        assert runner.score([completion(length) for length in (10, 11)]) == [1.25, 1.375]
    assert asked() == [10, 7, 11]


class Verifier(FakeServer):
    """Scores answers by their length, and no empty one; the first request has a passing fault."""

    def __init__(self):
        self.sizes, self._lock = [], threading.Lock()

    def respond(self, request):
        items = request.json()["items"]
        with self._lock:
            self.sizes.append(len(items))
            if len(self.sizes) == 1:
                return json_response({"error": "busy"}, 503)
        return json_response({"scores": [len(item["answer"]) or None for item in items]})


@pytest.mark.slow
def test_a_verifier_over_http_is_asked_in_batches_several_at_once_and_again_after_a_fault(tmp_path, monkeypatch):
    add_plug_in(monkeypatch, tmp_path, REWARDS, "http_verifier", (EXAMPLES / "http_verifier.py").read_text("utf-8"))
    completions = [completion(index, "x" * index) for index in range(70)]
    with Verifier() as server:
        monkeypatch.setenv("VERIFIER_URL", server.url)
        with RewardRunner("http_verifier", ReplySource(tmp_path / "replies")) as runner:
            assert runner.score(completions) == [None, *range(1, 70)]
    assert sorted(server.sizes) in ([6, 6, 32, 32], [6, 32, 32, 32])
    with (
        RewardRunner("http_verifier", ReplySource(tmp_path / "replies")) as runner,
        pytest.raises(Retryable, match="no verifier at http"),
    ):
        runner.score([completion(71, "another")])


@pytest.mark.slow
def test_a_unit_test_runner_gives_the_share_of_tests_that_pass(tmp_path, monkeypatch):
    add_plug_in(monkeypatch, tmp_path, REWARDS, "unit_tests", (EXAMPLES / "unit_tests.py").read_text("utf-8"))
    problem = Problem("file", 0, "Write double(x).", "assert double(2) == 4\nassert double(0) == 0", "", "text")
    answers = {
        "```python\ndef double(x):\n    return 2 * x\n```": 1.0,
        "```python\ndef double(x):\n    return x + 2\n```": 0.5,
        "```python\nexit(0)\n```": 0.0,
        "```python\ndef double(x):\n    return 'x' * 10**10\n```": 0.0,
        "no code": 0.0,
    }
    replies = [(problem, SampledReply("", answer, True, True, 9, False)) for answer in answers]
    with RewardRunner("unit_tests", ReplySource(tmp_path / "replies")) as runner:
        assert runner.score(replies) == list(answers.values())


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"workers": True}, {"attempts": 1.5}, {"time_limit_s": 0}])
def test_an_entry_that_cannot_be_called_is_refused_when_it_is_made(wrong):
    with pytest.raises(ValueError, match=f"`{next(iter(wrong))}` is "):
        Reward(len, **wrong)


def test_a_cached_reward_is_a_line_of_the_form_of_a_reply(asked, tmp_path):
    with RewardRunner("by_length", ReplySource(tmp_path / "replies", "first")) as runner:
        runner.score([completion(1)])
    (path,) = (tmp_path / "replies" / "reward-by_length").glob("*.jsonl")
    row = json.loads(path.read_text(encoding="utf-8"))
    assert (row["text"], row["dollars"], row["execution"]) == ("0.125", 0.0, "first")
