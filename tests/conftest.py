"""Environment of all tests, set before anything imports JAX; stores and Prefect servers, which several folders use."""

import fcntl
import gc
import os
import re
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadGroupScheduling

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Looking for plugins in the metadata of 250 packages takes each process that imports pydantic 25 ms; there are none.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
# A shell starts background jobs with SIGINT ignored, and children inherit that: the tests of Ctrl-C would never end.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The tests compute little, so optimised compilation costs more than it saves: XLA takes 11 s for a gradient of a tiny
# model, 7 s with the first flag, 2.5 s with the second too (it selects the older fusion code). The third takes 15 % of
# the processor time that is left: a program is not cut into parts that cores would compile side by side.
# One compilation cache for all tests and the processes that they start, kept between runs, also of what compiles fast:
# the processes of a test compile the same hundred small programs.
XLA_FLAGS = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
)
os.environ.setdefault("XLA_FLAGS", " ".join(XLA_FLAGS))
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

# A store syncs each file to disk, for which a test would wait thousands of times: temporary folders are in memory where
# there is room. The folder of a test that has passed is removed (pyproject.toml), so a run needs a few hundred MB.
IN_MEMORY, ROOM = Path("/dev/shm"), 8 << 30
if IN_MEMORY.is_dir() and os.access(IN_MEMORY, os.W_OK) and shutil.disk_usage(IN_MEMORY).free >= ROOM:
    may_run = not os.statvfs(IN_MEMORY).f_flag & os.ST_NOEXEC  # tests start programs that they have written
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(IN_MEMORY if may_run else tempfile.gettempdir()))

# In the order of their names, or of their numbers of tests as xdist has it, a file of minutes would begin among the
# last, and all other workers wait for it. Measured with `--durations=0`.
LONGEST_FIRST = Path(__file__).with_name("support") / "longest_first.txt"

# On a busy machine an example may take seconds to draw or to check: no reason to fail. `make test-all` draws more and
# other examples in each run, and prints a failing one with the line that repeats it; all other runs draw the same ones.
fixed = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fixed", fixed)
settings.register_profile("random", fixed, max_examples=100, derandomize=False, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

# Importable from the repository's root, which is on the path for `tests.support`: a second copy of each class.
SHORT_NAMES = {path.name for path in (Path(__file__).parents[1] / "src" / "nautile").iterdir() if path.is_symlink()}

BuildOnce = Callable[[str, Callable[[Path], None]], Path]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out a file whose mark deselects all its tests: each worker imports every file that it collects."""
    left_out = re.fullmatch(r"not (\w+)(?: and not (\w+))?", config.option.markexpr or "")
    if collection_path.suffix != ".py" or not left_out:
        return None
    own = re.search(r"^pytestmark = .*(?:\n    .*)*", collection_path.read_text(encoding="utf-8"), re.MULTILINE)
    return bool(own and any(f"pytest.mark.{mark}" in own[0] for mark in left_out.groups())) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if twice := [name for name, count in Counter(item.nodeid for item in items).items() if count > 1]:
        raise pytest.UsageError(f"several tests have one name, of which xdist would run one: {twice}")
    names = LONGEST_FIRST.read_text(encoding="utf-8").split()
    order = {Path(__file__).parents[1] / name: place for place, name in enumerate(names)}
    items.sort(key=lambda item: order.get(item.path, len(order)))
    # Prefect's server takes seconds to start, and as much while it is idle.
    serving = {item.path for item in items if "prefect_url" in getattr(item, "fixturenames", ())}
    for item in items:
        if item.path in serving:
            item.add_marker(pytest.mark.xdist_group("prefect"))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadGroupScheduling:
    """Give workers a file at a time, and all files that use the session's Prefect server to one worker."""

    class Files(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            group = super()._split_scope(nodeid)
            return nodeid.partition("::")[0] if group == nodeid else group

    return Files(config, log)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Keep bytes and long strings out of the names of tests.

    All workers have to collect one list, and an archive holds the time of its making. A name is sent with each report,
    and stands in the environment of each process that the test starts: ten megabytes do not fit there.
    """
    if isinstance(val, str) and len(val) > 100:
        return f"{val[:40].encode('unicode_escape').decode()}... ({len(val)} characters)"
    return argname if isinstance(val, bytes) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from the millions of objects of imported packages: it takes 15 % of what follows."""
    from nautile.common.processes import collector_paused

    with collector_paused():
        return (yield)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    if short := sorted(SHORT_NAMES & sys.modules.keys()):
        pytest.fail(f"imported as {', '.join(short)}, and not as a part of nautile: `from nautile.{short[0]} import`")


def pytest_sessionfinish() -> None:
    """Collect garbage while xdist still waits for this worker, so that faults of finalizers are shown.

    pytest does it as the process ends; in a worker with all programs of JAX that takes longer than xdist waits, and its
    interruption was printed as a fault.
    """
    gc.collect()
    gc.freeze()
    if catalog := sys.modules.get("nautile.store.catalog"):
        catalog.hide_leak_report()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say that a run left heavy tests out. Read off the sources: with xdist only workers collect."""
    if "not heavy" in (config.option.markexpr or ""):
        root = Path(__file__).parent
        paths = [path for path in root.rglob("test_*.py") if "pytest.mark.heavy" in path.read_text(encoding="utf-8")]
        what = "several hosts, browsers, services, large downloads, whole commands of many seconds"
        terminalreporter.write_line(f"left out ({what}): tests in {len(paths)} files. `make test-all` runs them.")


@pytest.fixture
def store(tmp_path):
    """An empty store that can be written."""
    from nautile.store.artifacts import Store

    store = Store(tmp_path / "store")
    store.prepare()
    return store


@pytest.fixture(scope="session")
def object_store_address():
    from tests.support.servers.object_store import object_store

    with object_store() as address:
        yield address


@pytest.fixture
def machine(object_store_address, monkeypatch, tmp_path):
    """`machine("a")`: a store with a remote as the machine of that name has it, all with one remote of this test."""
    import s3fs

    from nautile.store.mirror import open_store
    from tests.support.servers.object_store import CREDENTIALS, bucket

    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", object_store_address)
    s3fs.S3FileSystem.clear_instance_cache()
    url = f"s3://{bucket()}/run"

    def make(name):
        monkeypatch.setenv("NAUTILE_STORE_CACHE", str(tmp_path / name))
        store = open_store(url)
        store.prepare()
        return store

    yield make
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def pair(machine):
    return machine("a"), machine("b")


@pytest.fixture
def quick_retries(monkeypatch):
    """Pauses of endpoints in hundredths of a second, and an outage after a third of one."""
    from nautile.common.retry import Backoff
    from nautile.data.endpoints import circuit_breaker

    monkeypatch.setattr(circuit_breaker, "BACKOFF", Backoff(first_s=0.01))
    monkeypatch.setattr(circuit_breaker, "OUTAGE_S", 0.3)


@pytest.fixture(scope="session")
def build_once(tmp_path_factory) -> BuildOnce:
    """`build_once(name, build)`: a copy of the folder that `build(folder)` fills once for all workers of a run."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def once(name: str, build: Callable[[Path], None]) -> Path:
        original, complete = shared / f"{name}-original", shared / f"{name}-complete"
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not complete.exists():
                shutil.rmtree(original, ignore_errors=True)
                original.mkdir()
                build(original)
                complete.touch()
        return shutil.copytree(original, tmp_path_factory.mktemp(name) / "copy", symlinks=True)

    return once


@pytest.fixture(scope="session")
def made(build_once):
    """A store in which the toy chain has run, and label -> kind -> artifact id. It is shared: who writes copies it."""
    from nautile.common.files import read_json, write_json
    from nautile.configs.load import load
    from nautile.store.artifacts import Store
    from tests.support.stages.toy_chain import make_all
    from tests.support.stages.toy_stages import TOY

    folder = build_once("made", lambda folder: write_json(folder / "made.json", make_all(folder / "store", load(TOY))))
    return Store(folder / "store"), read_json(folder / "made.json")


@pytest.fixture(scope="session")
def prefect_home(build_once) -> Path:
    """A home of Prefect whose database has all its tables: creating them takes most of a server's first start."""

    from tests.support.servers.prefect_server import running_server

    def build(folder: Path) -> None:
        with running_server(folder):
            pass

    return build_once("prefect", build)


@pytest.fixture(scope="session")
def prefect_url(prefect_home, tmp_path_factory) -> Iterator[str]:
    """A Prefect server of this test session."""
    from tests.support.servers.prefect_server import running_server

    # A copy: others copy the database too, which they must not do while a server writes to it.
    with running_server(shutil.copytree(prefect_home, tmp_path_factory.mktemp("prefect") / "home")) as url:
        yield url
