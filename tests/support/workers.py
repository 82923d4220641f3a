"""`--workers N`: tests in N processes, forked when all tests have been collected; each runs a file at a time.

Collecting imports nearly all that the project uses. That takes 10 s of processor time, which processes that each start
anew spend N times. A worker asks for the next file when it has done one, so files begin in the order of the collection.
Files that use the same server of the session are one worker's: it takes seconds to start, and as much while it is idle.
"""

import gc
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from warnings import WarningMessage

import pytest

from common.processes import die_with_parent

SERVERS = ("prefect_url", "server")  # fixtures of the session


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, help="run the tests in this many processes, a file at a time")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the collected tests in workers. None, for pytest to do it: without the option, or when collecting failed."""
    if not session.config.option.workers or session.config.option.collectonly or session.testsfailed:
        return None
    if others := [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]:
        raise pytest.UsageError(f"collecting the tests has started threads, which forked processes lack: {others}")
    gc.freeze()  # a collector that looks at what all workers share would write to it, and so copy it
    with _running(_Workers(session)) as workers:
        workers.follow()
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    return True


class _Workers:
    """The workers of a session and what is left for them to do, in the process that shows their reports."""

    def __init__(self, session: pytest.Session) -> None:
        self.session, self.hook = session, session.config.hook
        # Tests go by their places in the session's list, which every worker has.
        self.files = deque(_files(session.items))
        self.base = session.config._tmp_path_factory.getbasetemp()
        self.pids: dict[Connection, int] = {}
        self.left: dict[Connection, list[int]] = {}  # of the file that a worker is at
        self.started = 0

    def start(self) -> None:
        """Fork a worker."""
        parent, folder = os.getpid(), self.base / f"worker-{self.started}"
        ours, theirs = Pipe()
        pid = os.fork()
        if pid:
            theirs.close()
            self.pids[ours], self.left[ours], self.started = pid, [], self.started + 1
            return
        code = 1
        try:
            die_with_parent(parent)
            for other in (*self.pids, ours):
                other.close()
            _Worker(self.session, theirs, folder).work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def follow(self) -> None:
        """Answer the workers until all of them have ended. Each message is the name of a method here, and arguments."""
        while self.pids:
            for connection in wait(list(self.pids)):
                try:
                    name, *values = connection.recv()
                except EOFError:
                    self.ended(connection)
                else:
                    getattr(self, name)(connection, *values)

    def asked(self, connection: Connection) -> None:
        stopping = self.session.shouldfail or self.session.shouldstop
        self.left[connection] = self.files.popleft() if self.files and not stopping else []
        connection.send(self.left[connection])

    def reported(self, connection: Connection, data: dict[str, Any]) -> None:
        report = self.hook.pytest_report_from_serializable(config=self.session.config, data=data)
        self.hook.pytest_runtest_logreport(report=report)

    def warned(self, connection: Connection, text: str, kind: str, file: str, line: int, when: str, test: str) -> None:
        category = type(kind, (Warning,), {})
        values = {"warning_message": WarningMessage(category(text), category, file, line), "location": None}
        self.hook.pytest_warning_recorded.call_historic(kwargs={**values, "when": when, "nodeid": test})

    def finished(self, connection: Connection) -> None:
        item = self.session.items[self.left[connection].pop(0)]
        self.hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def ended(self, connection: Connection) -> None:
        """A worker has ended. The test that it was at has then failed, and another worker does the rest of its file."""
        _, status = os.waitpid(self.pids.pop(connection), 0)
        connection.close()
        left = self.left.pop(connection)
        if left and not self.session.shouldfail:
            item = self.session.items[left.pop(0)]
            text = f"the process of the test ended by itself: {os.waitstatus_to_exitcode(status)}"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
            self.hook.pytest_runtest_logreport(report=report)
            self.files.extendleft([left] if left else [])
            self.start()
        elif status and not left:
            raise RuntimeError(f"a worker ended between two files: {os.waitstatus_to_exitcode(status)}")


def _files(items: list[pytest.Item]) -> list[list[int]]:
    """The places of the tests of each file, and of files that use the same server together."""
    files: dict[Path, list[int]] = {}
    for place, item in enumerate(items):
        files.setdefault(item.path, []).append(place)
    together: dict[Path | pytest.FixtureDef, list[int]] = {}
    for path, places in files.items():
        fixtures = [items[place]._fixtureinfo.name2fixturedefs.get(name, ()) for place in places for name in SERVERS]
        servers = [definitions[-1] for definitions in fixtures if definitions and definitions[-1].scope == "session"]
        together.setdefault(next(iter(servers), path), []).extend(places)
    return list(together.values())


@contextmanager
def _running(workers: _Workers) -> Iterator[_Workers]:
    """Start the workers; at the end of the block, end those that are still there."""
    try:
        for _ in range(min(workers.session.config.option.workers, len(workers.files))):
            workers.start()
        yield workers
    finally:
        for pid in workers.pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            os.waitpid(pid, 0)


class _Worker:
    """A forked process, and the plugin that sends what pytest reports in it."""

    def __init__(self, session: pytest.Session, connection: Connection, folder: Path) -> None:
        self.session, self.config = session, session.config
        folder.mkdir()
        self.config._tmp_path_factory._basetemp = folder
        # The files into which output is captured are those of the parent, and so is the terminal.
        capture, terminal = map(self.config.pluginmanager.getplugin, ("capturemanager", "terminalreporter"))
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()
        terminal._tw._file = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - to the process's end
        self.connection: Connection | None = None  # pytest tells a new plugin of all warnings until now
        self.config.pluginmanager.register(self, "worker")
        self.connection = connection

    def work(self) -> None:
        """Run files until there are no more, then end what belongs to the session."""
        # As if a test without any folder or file came next, for that of another file cannot be known.
        between, item = SimpleNamespace(listchain=lambda: [self.session]), None
        while places := self.next_file():
            items = [self.session.items[place] for place in places]
            for item, following in zip(items, [*items[1:], between], strict=True):
                item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
                self.connection.send(("finished",))
                if self.session.shouldfail:
                    return
        if item:
            end = pytest.CallInfo.from_call(lambda: self.session._setupstate.teardown_exact(None), when="teardown")
            report = item.ihook.pytest_runtest_makereport(item=item, call=end)
            if report.failed:
                self.pytest_runtest_logreport(report)

    def next_file(self) -> list[int]:
        self.connection.send(("asked",))
        return self.connection.recv()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.connection.send(("reported", data))

    def pytest_warning_recorded(self, warning_message: WarningMessage, when: str, nodeid: str) -> None:
        text, kind = str(warning_message.message), warning_message.category.__name__
        place = warning_message.filename, warning_message.lineno
        if self.connection:
            self.connection.send(("warned", text, kind, *place, when, nodeid))
