import re
import subprocess
import sys
from socket import gethostname

import pytest

from nautile.common.errors import ConfigError
from nautile.common.events import silent
from nautile.common.files import read_json
from nautile.configs.evaluation import ReportConfig
from nautile.configs.training import JudgeConfig
from nautile.tasks.engine.child_main import load_stage
from nautile.tasks.engine.job import Job
from nautile.tasks.engine.progress import StageUpdate, notify, subscribe
from nautile.tasks.engine.stage import stage


@pytest.fixture
def job(tmp_path):
    section = {
        "seeds": {"data": 3},
        "report": {"samples": 2},
        "judge": {"endpoint": "j", "answer_weight": 1.5},
    }
    return Job("report", "0" * 64, "e1", section, {}, tmp_path / "staging", silent)


def test_a_part_of_the_section_comes_validated(job):
    assert job.part("report", ReportConfig) == ReportConfig(samples=2)
    with pytest.raises(ConfigError, match=r"stage report: `judge\.answer_weight`: .*less than or equal to 1"):
        job.part("judge", JudgeConfig)
    with pytest.raises(
        ConfigError, match=r"the section of stage report has no `model`; it has \['judge', 'report', 'seeds'\]"
    ):
        job.part("model", ReportConfig)


def test_scratch_and_outputs_are_folders_that_stay(job):
    (job.scratch / "a").write_text("kept")
    (job.output("report") / "report.html").write_text("page")
    assert (job.scratch / "a").read_text() == "kept"
    assert job.output("report") == job.staging / "output/report"
    for name in ("../report", "Report", ""):
        with pytest.raises(ValueError, match="not a valid name of an output"):
            job.output(name)


def test_facts_add_up(job):
    job.describe("report", rows=3, stand_ins=["a"])
    job.describe("report", rows=4)
    assert read_json(job.staging / "facts/report.json") == {"rows": 4, "stand_ins": ["a"]}


def test_a_seed_is_the_section_s_or_zero(job):
    assert (job.seed("data"), job.seed("weights")) == (3, 0)
    assert Job("x", "", "", {}, {}, job.staging, silent).seed("data") == 0


def test_only_a_stage_can_be_loaded():
    assert load_stage("tests.support.stages.stage_sums", "sums").name == "sums"
    with pytest.raises(ConfigError, match=r"tests\.support\.stages\.stage_sums\.section is not a stage"):
        load_stage("tests.support.stages.stage_sums", "section")


@pytest.mark.parametrize("module", ["no_such_plugin", "tests.no_such_module"])
def test_a_stage_that_is_not_installed_on_a_host_is_no_crash(module):
    """It is not retried, and the message names the host."""
    with pytest.raises(ConfigError, match=rf"{module}, the module of the stage, .* on host {re.escape(gethostname())}"):
        load_stage(module, "sums")


def test_a_stage_without_a_version_has_to_be_a_plug_in():
    """Whose source stands for it (tests/flows/test_plugin_stage.py)."""
    with pytest.raises(ConfigError, match="stage 'new' declares no `version`, and is none of NAUTILE_PLUGINS"):
        stage("new", outputs=("numbers",)).key({}, {})


def test_listeners_hear_until_they_unsubscribe():
    updates = []
    unsubscribe = subscribe(updates.append)
    first = StageUpdate("s", "s:1", "running", done=5, total=20)
    notify(first)
    unsubscribe()
    unsubscribe()
    notify(StageUpdate("s", "s:1", "done"))
    assert updates == [first]
    assert first.share == 0.25
    assert StageUpdate("s", "s", "running", done=5).share is None
    assert StageUpdate("s", "s", "running", done=30, total=20).share == 1.0


PROCESS = """
import atexit, concurrent.futures, sys, threading
from nautile.tasks.engine import child_main
child_main.THREADS_S = 0.1
atexit.register(print, "exit function")
concurrent.futures.ThreadPoolExecutor().submit(int)
threading.Thread(target=threading.Event().wait, name="of a plug-in").start()
child_main.leave(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [0, 3])
def test_a_thread_that_a_plug_in_has_started_does_not_hold_a_process_whose_work_is_done(code):
    ended = subprocess.run([sys.executable, "-c", PROCESS, str(code)], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (code, "exit function\n")
    assert ended.stderr.strip().endswith("still runs and is ended: of a plug-in")
