"""Child process of a stage: `python -m nautile.tasks.engine.child_main REQUEST.json [FAN_OUT ITEM SLOT PARENT_PID]`.

Without further arguments it calls the stage's function. With a fan-out it processes one item, or lists the items if
ITEM is empty. Exit codes: `common.processes.ExitCode`. `error.json` beside the log holds the message of a failure;
standard output and error go to the log.
"""

import atexit
import importlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from concurrent.futures.thread import _threads_queues
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil

from nautile.common.environment import environment
from nautile.common.errors import ConfigError, Retryable
from nautile.common.events import Emit, silent
from nautile.common.extras import missing_extra
from nautile.common.files import is_full_or_read_only, not_writable, write_json
from nautile.common.processes import ExitCode, collector_paused, die_with_parent, give_way, thread_beside
from nautile.model.capacity.topology import chip_of
from nautile.store.events import EventWriter
from nautile.store.layout import ChildFiles, Layout, StagingFiles
from nautile.tasks.engine.child_process import STOP, check_same_plug_ins
from nautile.tasks.engine.errors import NotInstalled, NotWritable
from nautile.tasks.engine.fanout import Markers, emit_with_source, process_item, write_item_list
from nautile.tasks.engine.job import Job, check_inputs
from nautile.tasks.engine.progress import LoggedProgress
from nautile.tasks.engine.stage import Stage

logger = logging.getLogger("nautile.tasks.engine.child_main")
THREADS_S = 30.0  # that threads have to end after the work
USAGE_EVERY_S = 5.0  # interval of the measurements at first
MOST_POINTS = 500  # then the interval is 1/500 of the elapsed time, so that days of work add few rows
JOIN_S = 300  # how long the hosts wait for each other at the start


def usage_reported(request: dict[str, Any], source: str | None = None) -> AbstractContextManager[object]:
    """Emit the usage of this process and its children to the request's events until the block ends.

    Memory, cores, device memory and free disk go to a separate event file, because they are not progress of the stage
    and no live display shows them. The step of a measurement is the number of seconds since the execution began, so a
    resumed stage continues its curves. `source`: name of the worker, if the stage has several. Work that ends before
    the first measurement leaves no file.
    """
    return thread_beside("usage", _report_usage, request, source)


def _report_usage(request: dict[str, Any], source: str | None, stop: threading.Event) -> None:
    events, store = Path(request["events"]), Path(request["store"])
    suffix = "usage" if source is None else f"{source.replace(' ', '-')}-usage"
    path = events.with_name(f"{events.stem}-{suffix}{events.suffix}")
    execution_start = request.get("began", time.time())
    emit: EventWriter | None = None  # opened with the first measurement
    start = last = time.monotonic()
    priced = False  # the chips are written once
    # Rates are differences from here on: what the process used to start up is in none of them.
    last_cpu_s = _tree_usage()[1]
    # On a full disk the stage's own writes fail with a message; a lost measurement needs none.
    with suppress(OSError), ExitStack() as at_end:
        while not stop.wait(max(USAGE_EVERY_S, (last - start) / MOST_POINTS)):
            now = time.monotonic()
            resident, cpu_s = _tree_usage()
            figures = {
                "system/memory_bytes": resident,
                "system/cpu_cores": max(0.0, cpu_s - last_cpu_s) / (now - last),
                "system/device_bytes": _device_memory(),
                "system/store_free_bytes": psutil.disk_usage(str(store)).free,
            }
            if not priced and source is None and (chips := _chips(request.get("launch", {}))):
                figures, priced = figures | chips, True
            last, last_cpu_s = now, cpu_s
            if emit is None:
                emit = EventWriter(path, request["execution"], stage=request["stage"])
                at_end.callback(emit.close)
            step = max(0, int(time.time() - execution_start))
            rows = [
                {"name": name, "step": step, "value": value} for name, value in figures.items() if value is not None
            ]
            emit.many("metric", [row if source is None else {**row, "source": source} for row in rows])


def _tree_usage() -> tuple[int, float]:
    """Resident bytes and CPU seconds of this process and its running descendants."""
    resident, seconds = 0, 0.0
    root = psutil.Process()
    for process in (root, *root.children(recursive=True)):
        try:
            with process.oneshot():
                resident += process.memory_info().rss
                times = process.cpu_times()
        except psutil.Error:
            continue  # the process has ended meanwhile
        seconds += times.user + times.system
    return resident, seconds


def _jax() -> Any:
    """JAX, if its backend is initialised here, which looking at devices would do in a process that may not need it."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return sys.modules["jax"] if bridge is not None and bridge.backends_are_initialized() else None


def _device_memory() -> int | None:
    """Bytes in use on the first device; None if the backend does not report them or is not initialised here."""
    if (jax := _jax()) is None:
        return None
    statistics = jax.local_devices()[0].memory_stats() or {}
    return statistics.get("bytes_in_use")


def _chips(launch: Mapping[str, Any]) -> dict[str, float | None]:
    """The accelerators of this execution, on all hosts, and the price of one, as far as it is known; none of a CPU."""
    if (jax := _jax()) is None or jax.default_backend() == "cpu":
        return {}
    price, chip = launch.get("dollars_per_chip_hour"), chip_of(jax.devices()[0].device_kind)
    price = chip.price if price is None and chip else price
    return {"system/chips": jax.device_count(), "system/dollars_per_chip_hour": price}


def main(arguments: list[str]) -> int:
    """Run the stage's function of a request, or one part of its fan-outs; return the exit code."""
    request_path, *fan_out_part = arguments
    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    begin(int(fan_out_part[3]) if fan_out_part else request["parent"])
    return work(request, fan_out_part)


def begin(parent: int) -> None:
    """Tie this process to its parent, or to the launcher of the hosts, and set up its log."""
    # A process of a multi-host stage may run on another machine than its launcher, where the kernel cannot tell it of
    # the launcher's death. It reads the end of its standard input instead.
    if process_rank() is None:
        die_with_parent(parent)
    else:
        obey_launcher()
    signal.signal(signal.SIGTERM, _exit_on_sigterm)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("jax").setLevel(logging.WARNING)  # below, it logs each kind of device that is not present
    for name in ("httpx", "httpx2"):  # below, a line for each request: of millions, half a gigabyte
        logging.getLogger(name).setLevel(logging.WARNING)


def work(request: dict[str, Any], fan_out_part: list[str], remote: Mapping[str, Any] = {}) -> ExitCode:
    """Do the work of a request; return the exit code, and write `error.json` for a failure.

    `fan_out_part`: fan-out, item, slot and parent's PID as in `main`, or empty for the stage's function. `remote`: the
    fields of `Job` that need the store's remote, if it has one.
    """
    # Relative to the niceness that this process was started with.
    give_way(os.nice(0) + request["niceness"])
    staging = Path(request["staging"])
    # An item has a folder for its log, progress and error; the stage's function uses the staging folder.
    if fan_out_part and fan_out_part[1]:
        folder = Markers(staging, fan_out_part[0]).item_folder(fan_out_part[1])
    else:
        folder = staging
    # The child must be able to import whatever the parent could, modules of tests included.
    sys.path.extend(entry for entry in request["sys_path"] if entry not in sys.path)
    try:
        check_same_plug_ins(request)
        if fan_out_part:
            _run_fan_out_part(request, *fan_out_part[:3])
        else:
            _run_stage_function(request, process_rank(), remote)
    except ConfigError as error:
        return failed(folder, ExitCode.BAD_INPUT, error)
    except Retryable as error:
        return failed(folder, ExitCode.RETRY, error)
    except OSError as error:
        with suppress(OSError):  # the log may be on the disk that is full
            traceback.print_exc()
        # Only a full disk of the store is for the operator to solve; one elsewhere (/tmp, say) is an ordinary crash. An
        # error without a file name is of a write, and nearly all of a stage's writes go to the store.
        in_store = error.filename is None or str(error.filename).startswith((str(staging), request["store"]))
        if in_store and is_full_or_read_only(error):
            store_error = NotWritable(not_writable(Path(request["store"]), error))
            return failed(folder, ExitCode.BAD_INPUT, store_error)
        return failed(folder, ExitCode.FAILED, error)
    except Exception as error:
        if refusal := missing_extra(error):  # a retry would miss the same package
            return failed(folder, ExitCode.BAD_INPUT, refusal)
        traceback.print_exc()
        return failed(folder, ExitCode.FAILED, error)
    return ExitCode.DONE


def load_stage(module: str, attribute: str) -> Stage:
    """Import a stage by module and attribute. Raises `ConfigError` if it is not installed here, or is none."""
    try:
        loaded = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # the code of a plug-in may raise anything
        # A retry would find the same; on another host the run was started with more installed.
        raise NotInstalled(
            f"{module}, the module of the stage, cannot be imported on host {socket.gethostname()} ({error}): install "
            "there what is installed where the run was started"
        ) from error
    stage: Any = getattr(loaded, attribute, None)
    if not isinstance(stage, Stage):
        raise ConfigError(f"{module}.{attribute} is not a stage: @stage must decorate a module-level function")
    return stage


def process_rank() -> int | None:
    """Rank among the hosts' processes of one stage, as set by `host_environment`; None in a single-process stage."""
    rank = os.environ.get("NAUTILE_PROCESS")
    return None if rank is None else int(rank)


def obey_launcher() -> None:
    """Obey the hosts' launcher through standard input: a line `stop` acts as SIGTERM, the end of input as SIGKILL.

    The end of input is how a process on another host notices that the launcher has ended.
    """

    def follow() -> None:
        # Not through sys.stdin: a thread that blocks in it causes a fatal error when the interpreter exits.
        while data := os.read(0, 4096):
            if STOP in data:
                os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=follow, daemon=True).start()


def keep_compiled(compiled: Path, rank: int = 0) -> None:
    """Enable JAX's compilation cache in the store, shared by all its processes. Imports JAX."""
    with collector_paused():
        from nautile.model import compile_cache  # imports JAX, which most stages do not need

    compile_cache.enable_compile_cache(compiled)
    if rank:
        compile_cache.keep_on_every_process()


def _run_stage_function(request: dict[str, Any], rank: int | None, remote: Mapping[str, Any]) -> None:
    stage, staging = load_stage(request["module"], request["attribute"]), Path(request["staging"])
    if rank is not None:
        _join_hosts(rank, request["launch"]["silent_s"])
    if stage.accelerator:
        keep_compiled(Layout(request["store"]).compiled, rank or 0)
    if rank:
        # Only process 0 reports and publishes.
        stage.work(_job(request, stage, silent, rank, remote))
        return
    emit = EventWriter(Path(request["events"]), request["execution"], stage=stage.name, live=StagingFiles(staging).live)
    try:
        with usage_reported(request):
            job = _job(request, stage, LoggedProgress(emit), 0, remote)
            stage.work(job)
        check_inputs(staging, job.inputs)
        outputs = _written_outputs(stage, staging)
        # Last of all: from now on the work is complete, and the parent publishes it even if this process does not exit.
        write_json(StagingFiles(staging).done, {"outputs": outputs, "environment": environment()})
    finally:
        emit.close()


def _run_fan_out_part(request: dict[str, Any], name: str, item: str, slot: str) -> None:
    """Process `item` of the fan-out `name`, or list its items if `item` is empty."""
    stage, events = load_stage(request["module"], request["attribute"]), Path(request["events"])
    staging = Path(request["staging"])
    fan_out = next(fan_out for fan_out in stage.fan_outs if fan_out.name == name)
    live = ChildFiles(Markers(staging, name).item_folder(item) if item else staging).live
    # One event file per worker slot, not per item: thousands of files would slow the catalog down.
    path = events.with_name(f"{events.stem}-{slot}{events.suffix}")
    emit = EventWriter(path, request["execution"], stage=stage.name, live=live)
    try:
        if item:
            with usage_reported(request, source=f"worker {slot}"):
                process_item(fan_out, _job(request, stage, emit_with_source(emit, name, item), 0), item)
        else:
            write_item_list(fan_out, _job(request, stage, emit, 0))
    finally:
        emit.close()


def _join_hosts(rank: int, silent_s: float) -> None:
    """Join `jax.distributed`. JAX ends all processes when one has sent no heartbeat for `silent_s` seconds."""
    import jax

    coordinator = os.environ.get("NAUTILE_COORDINATOR")
    # Without one JAX detects the hosts of a TPU slice.
    jax.distributed.initialize(
        coordinator,
        int(os.environ["NAUTILE_PROCESSES"]) if coordinator else None,
        rank if coordinator else None,
        # Without a bind address the coordination service listens on every interface.
        coordinator_bind_address=coordinator if coordinator and coordinator.startswith("127.") else None,
        heartbeat_timeout_seconds=max(1, round(silent_s)),
        initialization_timeout=JOIN_S,
    )


def _job(request: dict[str, Any], stage: Stage, emit: Emit, rank: int, remote: Mapping[str, Any] = {}) -> Job:
    return Job(
        stage=stage.name,
        key=request["key"],
        execution=request["execution"],
        section=request["section"],
        inputs={name: Path(folder) for name, folder in request["inputs"].items()},
        staging=Path(request["staging"]),
        emit=emit,
        replies=Layout(request["store"]).replies,
        shared_disk="url" not in request,
        ask_again=request["ask_again"],
        process=rank,
        **remote,
    )


def _written_outputs(stage: Stage, staging: Path) -> list[str]:
    """The kinds that have files to publish. Raises `RuntimeError` if a required one has none."""
    folders = sorted(path for path in StagingFiles(staging).outputs.glob("*") if path.is_dir())
    kinds = [folder.name for folder in folders if any(path.is_file() for path in folder.rglob("*"))]
    if unknown := set(kinds) - set(stage.outputs):
        raise RuntimeError(f"stage {stage.name} wrote {sorted(unknown)}; its outputs are {list(stage.outputs)}")
    if missing := [kind for kind in stage.outputs if kind not in kinds and kind not in stage.optional]:
        raise RuntimeError(f"stage {stage.name} wrote nothing for {missing} (declare it `optional` if that may be)")
    return kinds


def failed(folder: Path, code: ExitCode, error: BaseException) -> ExitCode:
    """Log an error, write it to `error.json` for the parent, and return the code."""
    message = str(error) or type(error).__name__
    logger.error("%s", message)
    path = ChildFiles(folder).error_path
    if process_rank() is not None and path.exists():
        return code  # of several hosts the first error is the cause; the other hosts fail because they lost that host
    try:
        write_json(path, {"code": int(code), "type": type(error).__name__, "message": message})
    except OSError as problem:
        logger.error("error.json cannot be written: %s", problem)
    return code


def _exit_on_sigterm(number: int, frame: FrameType | None) -> None:
    """Raise an exception, so that `finally` blocks end the servers that the work has started."""
    raise SystemExit(128 + number)


def leave(code: int) -> NoReturn:
    if code and process_rank() is not None:
        # In a regular exit JAX would wait for the other hosts to end.
        logging.shutdown()
        os._exit(code)
    if left := _threads_left():
        logger.warning("the work is done; what it has started still runs and is ended: %s", ", ".join(left))
        atexit._run_exitfuncs()
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        logging.shutdown()
        os._exit(code)
    sys.exit(code)


def _threads_left() -> list[str]:
    """The names of threads that have not ended `THREADS_S` after the work, and for which Python would wait for ever.

    A plug-in or a library may have started them. Those of pools end by themselves at the exit.
    """
    others = {thread for thread in threading.enumerate() if not thread.daemon and thread not in _threads_queues}
    others.discard(threading.current_thread())
    deadline = time.monotonic() + THREADS_S
    for thread in others:
        thread.join(max(0.0, deadline - time.monotonic()))
    return sorted(thread.name for thread in others if thread.is_alive())


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
