"""One stage in several processes, local or each started on its host; one that dies or hangs ends all of them."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from nautile.common.errors import ConfigError, Retryable
from nautile.common.processes import ExitCode, free_port
from nautile.configs.operation import LaunchConfig
from nautile.configs.vendors import VENDORS
from nautile.tasks.engine.attempt import run_stage
from nautile.tasks.engine.errors import StageCrash
from nautile.tasks.engine.multihost import HostProcess, check_commit, host_command, wait_for_hosts
from nautile.tasks.engine.ray_cluster import RayHost
from nautile.tasks.engine.stage import RunContext
from tests.support.plug_ins import add_plug_in
from tests.support.stages.stage_parent import wait_for
from tests.support.stages.stage_psum import psum
from tests.support.stages.stage_sums import section, sums

REPOSITORY = Path(__file__).parents[3]
TEMPLATE = (
    "gcloud compute tpus tpu-vm ssh nautile --zone=us-central2-b --worker={host} "
    f"'--command=cd {REPOSITORY} && exec env {{member}}'"
)
ACME = "from nautile.configs.vendors import Vendor\n\nacme = Vendor()\n"
pytestmark = pytest.mark.slow


@pytest.fixture
def here(monkeypatch):
    """Two processes on this machine."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    return LaunchConfig(processes=2, stages=("psum",), silent_s=8)


@pytest.fixture
def hosts(here, tmp_path, monkeypatch):
    """Three processes, each started through the stand-in for gcloud as on a host of its own."""
    monkeypatch.setenv("GCLOUD_LOG", str(tmp_path / "gcloud.log"))
    monkeypatch.setenv("PATH", f"{REPOSITORY / 'tests' / 'support' / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return here.model_copy(update={"processes": 3, "command": TEMPLATE, "coordinator": f"127.0.0.1:{free_port()}"})


def run_psum(store, launch, fault="", host=1):
    context = RunContext("r1", str(store.root), label="psum", launch=launch)
    return store.get(run_stage(psum, {"fault": fault, "host": host}, {}, context)["numbers"])


def members():
    """The hosts' processes that this test started."""
    mine = psutil.Process().children(recursive=True)
    return [process for process in mine if "nautile.tasks.engine.child_main" in " ".join(_line(process))]


def _line(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.heavy
def test_a_host_that_dies_ends_the_others_and_the_next_attempt_runs_on_all(store, here):
    with pytest.raises(Retryable, match="host 1 of 2 ended by signal 9"):
        run_psum(store, here, "dies")
    wait_for(lambda: not members())
    assert (run_psum(store, here, "dies").path / "sum.txt").read_text() == "3.0"


@pytest.mark.heavy
def test_a_host_that_hangs_ends_the_others_and_the_next_attempt_runs_on_all(store, hosts, tmp_path):
    with pytest.raises(Retryable, match=f"of 3 ended by SIGABRT, .* sends no heartbeat for {hosts.silent_s:g} s"):
        run_psum(store, hosts, "hangs")
    wait_for(lambda: not members())
    commands = (tmp_path / "gcloud.log").read_text().splitlines()
    assert sorted(line.partition("--worker=")[2][0] for line in commands) == ["0", "1", "2"]
    assert all("--zone=us-central2-b" in line and "NAUTILE_PROCESSES=3" in line for line in commands)
    artifact = run_psum(store, hosts, "hangs")
    assert (artifact.path / "sum.txt").read_text() == "6.0"
    assert artifact.manifest["facts"]["processes"] == 3
    assert artifact.manifest["facts"]["environment"]["devices"] == "3 x cpu"
    assert [path.name for path in artifact.path.iterdir() if path.name != "manifest.json"] == ["sum.txt"]
    [log] = (store.root / "logs").glob("psum-*.txt")
    for host in range(3):
        assert f"[host {host}] process {host} of 3" in log.read_text()


@pytest.mark.parametrize(
    ("codes", "expected", "message"),
    [
        ((0, 0, 0), ExitCode.DONE, None),
        ((None, -signal.SIGKILL, None), ExitCode.RETRY, "host 1 of 3 ended by signal 9"),
        ((None, 128 + signal.SIGKILL, None), ExitCode.RETRY, "host 1 of 3 ended with exit code 137"),
        ((None, None, 255), ExitCode.RETRY, "host 2 of 3 ended with exit code 255"),
        ((None, 3, None), ExitCode.FAILED, "host 1 of 3 ended with exit code 3"),
        ((-signal.SIGABRT, None, None), ExitCode.RETRY, "host 0 of 3 ended by SIGABRT"),
        ((128 + signal.SIGABRT, None, None), ExitCode.RETRY, "host 0 of 3 ended by SIGABRT"),
        ((-signal.SIGABRT, ExitCode.FAILED, None), ExitCode.FAILED, None),
        ((ExitCode.RETRY, ExitCode.BAD_INPUT, -signal.SIGKILL), ExitCode.BAD_INPUT, None),
        ((ExitCode.RETRY, ExitCode.RETRY, 0), ExitCode.RETRY, None),
    ],
)
def test_exit_codes_of_the_hosts_decide_about_the_stage(codes, expected, message):
    hosts = [HostProcess(host, SimpleNamespace(poll=lambda code=code: code)) for host, code in enumerate(codes)]
    code, text = wait_for_hosts(hosts, 8)
    assert code == expected
    assert text is None if message is None else text.startswith(message)


class LateHost(RayHost):
    """A host of a Ray cluster that answers, or is known to be lost, on its third call."""

    def __init__(self, host, code, problem=""):
        self.host, self.code, self.later, self.problem, self.calls = host, code, problem, "", 0

    def poll(self):
        self.calls += 1
        if self.calls == 3:
            self.problem = self.later
        return self.code

    def answered_since(self, moment):
        return self.calls >= 3


@pytest.mark.parametrize(
    ("problem", "expected", "message"),
    [("", ExitCode.FAILED, None), ("its node died", ExitCode.RETRY, "host 1 of 2 is lost: its node died")],
)
def test_a_crash_is_judged_when_every_host_has_answered_or_is_lost(problem, expected, message):
    crashed, other = LateHost(0, ExitCode.FAILED), LateHost(1, None, problem)
    assert wait_for_hosts([crashed, other], 8) == (expected, message)
    assert other.calls == 3


@pytest.mark.heavy
def test_an_error_of_the_stage_is_reported_as_by_one_process(store, here):
    with pytest.raises(StageCrash, match="it failed here"):
        run_psum(store, here, "crashes", host=0)
    with pytest.raises(ConfigError, match="bad input there"):
        run_psum(store, here, "refuses")
    wait_for(lambda: not members())


@pytest.mark.heavy
def test_no_host_stays_when_the_launcher_is_killed(store, hosts):
    failed = []

    def run():
        try:
            run_psum(store, hosts.model_copy(update={"processes": 2}), "waits")
        except StageCrash as error:
            failed.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    wait_for(lambda: list((store.root / "staging").glob("*/scratch/tried-1")))
    [launcher] = [
        p for p in psutil.Process().children(recursive=True) if "nautile.tasks.engine.multihost" in " ".join(_line(p))
    ]
    left = members()
    assert len(left) >= 2
    launcher.send_signal(signal.SIGKILL)
    thread.join()
    assert "was ended by signal 9" in failed[0]
    gone, alive = psutil.wait_procs(left, timeout=120)
    assert not alive, gone


def test_the_template_is_filled_in_word_by_word():
    launch = LaunchConfig(processes=2, command="ssh host-{host} 'cd nautile && git checkout {commit} && {member}'")
    request = {"launch": launch.model_dump(mode="json"), "commit": "a" * 40}
    check_commit(request)
    words = host_command(request, Path("/shared/a b/request.json"), 1)
    assert words[:2] == ["ssh", "host-1"]
    assert words[2].endswith(
        "NAUTILE_PROCESSES=2 NAUTILE_PROCESS=1 .venv/bin/python -P -m nautile.tasks.engine.child_main "
        "'/shared/a b/request.json'"
    )
    assert f"git checkout {'a' * 40} &&" in words[2]


@pytest.mark.heavy
def test_a_host_with_another_source_of_a_plug_in_is_refused_and_one_with_the_same_works(
    store, hosts, tmp_path, monkeypatch
):
    """Before the stage begins, and for good: a plug-in that is no package is named on each host, and is compared."""
    two = hosts.model_copy(update={"processes": 2})
    for host in range(2):
        (tmp_path / f"host-{host}").mkdir()
        (tmp_path / f"host-{host}" / "plugged_acme.py").write_text(ACME)
    (tmp_path / "here").mkdir()
    add_plug_in(monkeypatch, tmp_path / "here", VENDORS, "acme", ACME)
    own = two.command.replace("exec env {member}", f"exec env PYTHONPATH={tmp_path}/host-{{host}} {{member}}")
    launch = two.model_copy(update={"command": own})
    artifact = run_psum(store, launch)
    assert (artifact.path / "sum.txt").read_text() == "3.0"
    (tmp_path / "host-1" / "plugged_acme.py").write_text(f"{ACME}# edited\n")
    refused = r"host \S+ has another source of the plug-in vendors=plugged_acme:acme: install there the file"
    with pytest.raises(ConfigError, match=refused):
        run_psum(store, launch, "another key")
    assert not list((store.root / "staging").glob("*/scratch/*"))


@pytest.mark.parametrize("commit", [None, "a" * 40 + "-dirty", "abc; rm -rf /"])
def test_hosts_take_only_what_is_committed(commit):
    launch = LaunchConfig(processes=2, command="ssh host-{host} 'git checkout {commit} && {member}'")
    with pytest.raises(ConfigError, match=r"commit and push the changes"):
        check_commit({"launch": launch.model_dump(mode="json"), "commit": commit})


@pytest.mark.parametrize(
    ("command", "message"),
    [("ssh {machine} {member}", "launch.command: only {host}"), ("ssh {host} run", "must contain {member}")],
)
def test_a_template_that_cannot_work_is_refused(command, message):
    with pytest.raises(ValueError, match=message):
        LaunchConfig(processes=2, command=command)


def test_a_stage_that_runs_in_one_process_only_is_refused(store):
    context = RunContext("r1", str(store.root), label="sums", launch=LaunchConfig(processes=2, stages=("sums",)))
    with pytest.raises(ConfigError, match=r"launch\.stages lists 'sums', which runs in one process only"):
        run_stage(sums, section(1), {}, context)


def test_a_host_without_its_launcher_ends():
    """By the end of its standard input, whatever it is doing."""
    program = "import time; from nautile.tasks.engine import child_main; child_main.obey_launcher(); "
    program += "print(1, flush=True); time.sleep(600)"
    member = subprocess.Popen(
        [sys.executable, "-c", program], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert member.stdout.readline() == b"1\n"
    member.stdin.close()
    assert member.wait(timeout=240) == -signal.SIGKILL
