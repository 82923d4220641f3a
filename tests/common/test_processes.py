"""common/processes.py: a child ends with its parent, however that ends; free ports can be bound."""

import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import httpx
import httpx2
import psutil
import pytest

from nautile.common import processes
from nautile.common.errors import ConfigError
from nautile.common.processes import (
    ExitCode,
    free_port,
    give_session_way,
    give_way,
    loopback_direct,
    module_command,
    url_host,
)
from tests.support.servers.http_server import FakeServer, Response

ROOT = Path(__file__).resolve().parents[2]
CHILD = "import sys, time; from nautile.common.processes import die_with_parent; die_with_parent(int(sys.argv[1])); "
PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


def test_a_command_begins_again_once_on_huge_pages():
    """As the same process, with its arguments."""
    code = "import os, sys; from nautile.common import processes as p; print(os.getpid(), flush=True); " + (
        "p.restart_on_huge_pages(); print(*sys.argv[1:], os.environ['GLIBC_TUNABLES'])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    for given, starts in (environment, 2), (environment | {"GLIBC_TUNABLES": "glibc.malloc.perturb=0"}, 1):
        command = [sys.executable, "-c", code, "chat", "a b"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, env=given, text=True) as child:
            out, _ = child.communicate(timeout=60)
        tunables = given.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
        assert out.splitlines() == [str(child.pid)] * starts + [f"chat a b {tunables}"]


def test_a_child_imports_nothing_from_its_working_directory(tmp_path):
    """Not our packages and not those of a library: a user may have folders of any name."""
    for name in ("nautile", "store", "json"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('imported from the working directory')")
    done = subprocess.run(
        module_command("nautile.common.processes"), cwd=tmp_path, timeout=60, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


USUAL = """
import json, os, signal, sys
from nautile.common.processes import begin_as_usual
begin_as_usual()
print("text")
file = open(sys.argv[1], "w")
os.write(1, b"of a library"), os.write(2, b"of a library")
child = os.posix_spawn("/bin/sh", ["sh", "-c", "echo x; exit 3"], {})
json.dump([file.fileno() > 2, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])], file)
"""


@pytest.mark.parametrize("closed", ["", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_process_begins_as_usual_whatever_started_it(tmp_path, closed):
    """No file gets the number of a stream, and the exit code of a child is known though SIGCHLD was ignored."""
    command = f'trap "" CHLD; exec "$0" -P -c "$1" "$2" {closed}'
    arguments = ["bash", "-c", command, sys.executable, USUAL, str(tmp_path / "file")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(arguments, capture_output=True, timeout=60, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "file").read_text() == "[true, 3]"


def test_a_child_ends_when_its_parent_is_killed():
    child = CHILD + "print('ready', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", PARENT, child], stdout=subprocess.PIPE, cwd=ROOT) as parent:
        process = psutil.Process(int(parent.stdout.readline()))
        os.kill(parent.pid, signal.SIGKILL)
        process.wait(timeout=120)
    assert not process.is_running()


def test_a_child_whose_parent_is_gone_already_ends_at_once():
    done = subprocess.run([sys.executable, "-c", CHILD + "sys.exit(0)", "1"], cwd=ROOT, timeout=120)
    assert done.returncode == ExitCode.FAILED


@pytest.mark.parametrize(
    ("given", "direct"),
    [
        ({}, None),
        ({"PATH": "/bin", "NO_PROXY": "a.example"}, None),
        ({"HTTP_PROXY": ""}, None),
        ({"HTTP_PROXY": "http://p:3128"}, "localhost,127.0.0.1,::1"),
        ({"https_proxy": "http://p:3128", "no_proxy": "a.example, 127.0.0.1"}, "a.example,127.0.0.1,localhost,::1"),
        ({"ALL_PROXY": "socks5://p:1080", "NO_PROXY": ".b.example"}, ".b.example,localhost,127.0.0.1,::1"),
        ({"ALL_PROXY": "socks5://p:1080", "NO_PROXY": "*"}, None),
    ],
    ids=str,
)
def test_addresses_of_this_machine_are_excepted_from_proxies(given, direct):
    assert loopback_direct(given) == ({} if direct is None else {"NO_PROXY": direct, "no_proxy": direct})


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:9", "socks5://127.0.0.1:9", "socks5h://127.0.0.1:9"])
def test_clients_reach_this_machine_whatever_proxy_is_set(monkeypatch, proxy):
    """A proxy that does not answer: what is sent to it fails."""

    class Here(FakeServer):
        def respond(self, request):
            return Response(body=b"here")

    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        for spelling in (name, name.lower()):
            monkeypatch.delenv(spelling, raising=False)
    monkeypatch.setenv("ALL_PROXY", proxy)
    if proxy.startswith("http:"):
        monkeypatch.setenv("http_proxy", proxy)
    for name, value in loopback_direct(os.environ).items():
        monkeypatch.setenv(name, value)
    with Here() as server:
        opener = urllib.request.build_opener()
        assert opener.open(server.url, timeout=30).read() == b"here"
        for library in (httpx, httpx2):
            with library.Client() as client:
                assert client.get(server.url, timeout=30).content == b"here"
    with httpx.Client() as client, pytest.raises(httpx.HTTPError):
        client.get("http://elsewhere.invalid", timeout=30)


def test_a_free_port_can_be_bound_and_no_outgoing_connection_takes_it(monkeypatch):
    port = free_port()
    assert port < 32_768  # the first port that Linux gives to a connection
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        monkeypatch.setattr(processes, "_SERVER_PORTS", range(port, port + 1))
        with pytest.raises(OSError, match="in use"):
            free_port()


@pytest.mark.parametrize("host", ["no.such.invalid", "", "a" * 70 + ".example", "é" * 70])
def test_a_name_that_is_no_address_is_refused_by_its_option(host):
    with pytest.raises(ConfigError, match=f"--host {host} --port 1: cannot listen there"):
        processes.listen(host, 1)


def test_a_port_whose_owner_is_just_ending_is_waited_for():
    with processes.listen("127.0.0.1", 0) as owner:
        port = owner.getsockname()[1]
        threading.Timer(0.2, owner.close).start()
        with processes.listen("127.0.0.1", port) as listener:
            assert listener.getsockname()[1] == port


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a nice value is the whole process's")
def test_a_thread_that_gives_way_takes_what_it_starts_along_and_no_other():
    own, seen = os.getpriority(os.PRIO_PROCESS, 0), []

    def work():
        for niceness in (own + 3, own + 1):  # what a user began with more stays
            give_way(niceness)
            seen.append(os.getpriority(os.PRIO_PROCESS, 0))
        with subprocess.Popen(["sleep", "600"], start_new_session=True) as child:
            give_session_way(child.pid)
            seen.append(os.getpriority(os.PRIO_PROCESS, child.pid))
            group = Path(f"/proc/{child.pid}/autogroup")
            if group.exists():  # a kernel that schedules by sessions
                assert group.read_text().split()[1:] == ["nice", str(own + 3)]
            child.kill()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [own + 3] * 3
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


def test_an_ipv6_address_has_brackets_in_a_url():
    assert (url_host("::1"), url_host("127.0.0.1"), url_host("gpu-box")) == ("[::1]", "127.0.0.1", "gpu-box")
