"""A server that a stage starts by the operator's command: it serves, its log is shown, and it ends with the stage."""

import logging
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from pydantic import ValidationError

from nautile.common.errors import ConfigError
from nautile.configs.endpoint import EndpointConfig
from nautile.configs.load import load
from nautile.data.endpoints.chat_types import ChatReply, ChatRequest
from nautile.data.endpoints.own_server import ServerCommand
from nautile.flows.dag import build_dag
from nautile.flows.readiness import missing_settings, remote_endpoints

ROOT = Path(__file__).parents[3]
FAKE = ("env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "tests.support.servers.fake_openai")
SERVES = (*FAKE, '{"port": {port}, "stays": true}')
# As a server for models does, it starts another process, which does not end with it.
WITH_WORKER = ("sh", "-c", 'sleep 6000 & echo loading >&2; exec "$@"', "sh", *SERVES)


def endpoint(*command: str, **more) -> EndpointConfig:
    return EndpointConfig(kind="openai", model="fake", command=command, **{"start_s": 300, **more})


def request(number: int = 0) -> ChatRequest:
    return ChatRequest("gpu", ({"role": "user", "content": f"What is {number} + 1?"},), 32)


def group_of(pool) -> list[psutil.Process]:
    """The processes of the endpoint's server."""
    leader = psutil.Process(pool._endpoints["gpu"]._server._replicas[0].process.pid)
    return [leader, *leader.children(recursive=True)]


def all_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive


@pytest.mark.slow
def test_it_serves_what_it_prints_is_in_the_log_and_it_ends_with_the_pool(pool_for, caplog):
    with caplog.at_level(logging.INFO):
        pool = pool_for(gpu=endpoint(*WITH_WORKER))
        pool.check()
        assert isinstance(pool.ask([request()])[0], ChatReply)
    assert "fake: loading" in caplog.messages
    processes = group_of(pool)
    assert len(processes) == 3, "the one that watches, the server, and its worker"
    # It has crashed: the next request has it again.
    processes[1].kill()
    all_gone(processes[:2])
    assert isinstance(pool.ask([request(1)])[0], ChatReply)
    processes += group_of(pool)
    pool.close()
    all_gone(processes)


@pytest.mark.slow
def test_it_ends_with_a_stage_that_is_killed():
    program = (
        "import sys, time\n"
        "from nautile.data.endpoints.own_server import OwnServer, ServerCommand\n"
        "server = OwnServer(ServerCommand('fake', tuple(sys.argv[1:]), 300))\n"
        "server.spawn()\n"
        "server.wait()\n"
        "sys.stdout.write(f'{server._replicas[0].process.pid}\\n')\n"
        "sys.stdout.flush()\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, *WITH_WORKER], stdout=subprocess.PIPE) as stage:
        leader = psutil.Process(int(stage.stdout.readline()))
        processes = [leader, *leader.children(recursive=True)]
        assert len(processes) == 3
        stage.kill()
    all_gone(processes)


def test_a_command_that_dies_at_once_is_refused_with_its_last_lines(pool_for):
    dies = endpoint("sh", "-c", "echo no room for the model on port {port}; exit 3")
    said = r"'gpu': `command`: .* did not start \(exit code 3\); its log ends:\nno room"
    with pytest.raises(ConfigError, match=said):
        pool_for(gpu=dies).check()


def test_one_that_never_answers_is_given_up_and_ended(pool_for):
    pool = pool_for(gpu=endpoint("sh", "-c", "echo loading {port}; exec sleep 6000", start_s=0.5))
    with pytest.raises(ConfigError, match=r"did not start within 0.5 s \(`start_s`\); its log ends:\nloading \d+"):
        pool.check()
    processes = group_of(pool)
    pool.close()
    all_gone(processes)


@pytest.mark.slow
def test_one_that_serves_another_model_is_refused_by_the_names_that_it_serves(pool_for):
    with pytest.raises(ConfigError, match=r"'gpu': no model 'fake' at .*; there are other"):
        pool_for(gpu=endpoint(*FAKE, '{"port": {port}, "stays": true, "models": ["other"]}')).check()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"command": ["vllm", "serve"]}, r"no word of `command` has \{port\}"),
        ({"command": ["vllm", "{port}"], "url": "http://127.0.0.1:1/v1"}, "in place of a `url`"),
        ({"command": ["x", "{port}"], "kind": "embedded"}, "for a kind that needs one"),
        ({"command": ["x", "--port={port}", "--api-key=sk-0123456789abcdef"]}, "`command` holds a key"),
        ({}, "needs `url`, or a `command`"),
    ],
)
def test_a_section_that_cannot_work_is_refused(fields, said):
    with pytest.raises(ValidationError, match=said):
        EndpointConfig(**{"kind": "openai", "model": "fake", **fields})


def test_its_step_takes_the_accelerator_and_the_plan_names_a_program_that_is_missing():
    """The command is in no key: the model's replies are the same wherever it runs."""
    plain = 'kind = "openai", model = "m", '
    sections = {
        where: load("local", [f"endpoints.smollm2={{{plain}{address}}}"])
        for where, address in (("far", 'url = "http://a/v1"'), ("here", 'command = ["no-such-program", "{port}"]'))
    }
    far, here = ({step.label: step for step in build_dag(config)} for config in sections.values())
    assert (far["distill"].resource, here["distill"].resource) == ("network", "accelerator")
    assert far["distill"].key == here["distill"].key
    (line,) = [line for line in missing_settings(list(here.values())) if "smollm2" in line]
    assert line == "endpoints.smollm2: `command`: there is no program 'no-such-program' on this machine"
    assert remote_endpoints(list(here.values())) == {}
    assert ServerCommand("m", (sys.executable,), 1).faults() == []
