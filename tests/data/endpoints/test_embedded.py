"""The embedded model itself: it starts, keeps to the grammar, replies the same each time, and ends with its parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nautile.common.errors import ConfigError, Retryable
from nautile.common.events import silent
from nautile.configs.distill import DistillConfig, PromptSetConfig, TeacherConfig
from nautile.configs.endpoint import EndpointConfig
from nautile.data.distill.checks import reject_reason
from nautile.data.distill.parse_reply import parse_reply
from nautile.data.distill.prompts import Prompt
from nautile.data.distill.teacher_prompt import COMPACT, TEMPLATES, teacher_request
from nautile.data.endpoints import embedded
from nautile.data.endpoints.chat_types import ChatReply
from nautile.data.endpoints.embedded import MODEL, model_file
from nautile.data.endpoints.own_server import OwnServerError
from nautile.data.endpoints.pool import EndpointPool
from nautile.data.records import SynthRecord
from nautile.data.retrieval.exemplar_index import Neighbour
from tests.support.servers.listening import listening

EMBEDDED = EndpointConfig(kind="embedded", model=MODEL, concurrency=2, structured="grammar")
CONFIG = DistillConfig(
    prompts=3,
    prompt_sets=(PromptSetConfig(name="articles", source="wikipedia"),),
    teachers=(TeacherConfig(endpoint="local"),),
)
NEAR = [Neighbour(n, SynthRecord(f"What is {n} + 4?", f"{n} + 4 = {n + 4}.", str(n + 4)), 0.5) for n in range(5)]
PROMPTS = [
    Prompt("a", "What is a hat?", "definition", "A hat is a head covering.", "We need to say what a hat is: "),
    Prompt("b", "Where is Cairo?", "place", "Cairo is the capital of Egypt.", "We need to say where Cairo is: "),
    Prompt("c", "What is iron?", "definition", "Iron is a metal that rusts.", "We need to say what iron is: "),
]


def gone(pid: int) -> bool:
    """Whether the process has ended (a zombie has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(condition) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.heavy
def test_the_teacher_answers_and_comes_back_after_a_crash(tmp_path):
    requests = [teacher_request(TEMPLATES[COMPACT], prompt, NEAR, "local", 120, 0.0, 0) for prompt in PROMPTS]
    with EndpointPool({"local": EMBEDDED}, tmp_path / "first.jsonl", silent) as pool:
        pool.check()
        replies = pool.ask(requests)
        assert all(isinstance(reply, ChatReply) for reply in replies)
        documents = [parse_reply(reply.text) for reply in replies]
        assert all(document.reasoning.startswith(p.opening) for document, p in zip(documents, PROMPTS, strict=True))
        kept = [
            reject_reason(document, reply.finish, prompt, NEAR, TEMPLATES[COMPACT], CONFIG)
            for document, reply, prompt in zip(documents, replies, PROMPTS, strict=True)
        ]
        assert kept.count(None) >= 2
        server = pool._endpoints["local"]._server
        first = [replica.process.pid for replica in server._replicas]
        assert [listening(pid) for pid in first] == [{"127.0.0.1"}] * len(first)
        os.kill(first[0], signal.SIGKILL)
        (again,) = pool.ask([teacher_request(TEMPLATES[COMPACT], PROMPTS[0], NEAR, "local", 121, 0.0, 0)])
        assert isinstance(again, ChatReply)
        assert again.text == replies[0].text, "the same reply from any replica, whatever it was sent before"
    wait_until(lambda: all(gone(pid) for pid in first))


@pytest.mark.slow
def test_a_replica_ends_with_a_parent_that_is_killed():
    program = (
        "import sys, time\n"
        "from nautile.data.endpoints.embedded import PROGRAM\n"
        "from nautile.data.endpoints.own_server import OwnServer\n"
        "endpoint = OwnServer(PROGRAM, 1)\n"
        "endpoint.spawn()\n"
        "endpoint.wait()\n"
        "sys.stdout.write(f'{endpoint._replicas[0].process.pid}\\n')\n"
        "sys.stdout.flush()\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        replica = int(parent.stdout.readline())
        assert not gone(replica)
        parent.kill()
    wait_until(lambda: gone(replica))


def test_a_model_that_is_not_installed_is_named(monkeypatch):
    assert model_file().stat().st_size > 90_000_000
    monkeypatch.setattr(embedded, "PACKAGE", "no-such-package")
    with pytest.raises(ConfigError, match="no-such-package"):
        model_file()


def test_a_server_that_does_not_start_is_a_crash_with_its_log_and_no_outage(monkeypatch, tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a model")
    monkeypatch.setattr(embedded, "model_file", lambda: broken)
    config = EMBEDDED.model_copy(update={"concurrency": 1})
    with EndpointPool({"local": config}, tmp_path / "replies.jsonl", silent) as pool:
        with pytest.raises(OwnServerError, match=r"did not start \(exit code 1\); its log ends:\n(.*\n)+.*broken.gguf"):
            pool.check()
        # Nor when one that has served does not come back.
        with pytest.raises(OwnServerError, match="did not start"):
            pool.ask([teacher_request(TEMPLATES[COMPACT], PROMPTS[0], NEAR, "local", 120, 0.0, 0)])
    assert not issubclass(OwnServerError, Retryable), "an outage would be waited for, a day by default"
