"""The child side of a stage: `python -m tasks.engine.child_main REQUEST.json [ROUND UNIT SLOT PARENT]`.

With a round it does one unit of it, or lists them if the unit's name is empty; else it calls the stage's function.
Exit codes: 0 done, 2 the operator's input is bad (`ConfigError`), 75 worth a retry (`Retryable`); anything else is a
crash. `error.json` beside the log holds the message; standard output and error go to the log.
"""

import importlib
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

from common.errors import ConfigError, Retryable
from common.events import Emit, silent
from common.files import is_full_or_read_only, not_writable, write_json
from common.processes import ExitCode, die_with_parent
from store.events import EventWriter
from tasks.engine.errors import NotWritable
from tasks.engine.fanout import Markers, from_unit, process_item, write_item_list
from tasks.engine.job import Job
from tasks.engine.stage import Stage

STOP, BEAT = b"stop\n", b"\x1ebeat\n"  # from the leader of a group to its members, and back

logger = logging.getLogger("tasks.engine.child_main")


def main(arguments: list[str] | None = None) -> int:
    """Do one stage's work, or a part of it, as the request says; return the exit code."""
    name, *part = sys.argv[1:] if arguments is None else arguments
    request = json.loads(Path(name).read_text(encoding="utf-8"))
    process = membership()
    if process is None:
        die_with_parent(int(part[3]) if part else request["parent"])
    else:
        follow(request["launch"]["silent_s"] / 10)
    signal.signal(signal.SIGTERM, _terminated)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    staging = Path(request["staging"])
    traces = Markers.of(staging, part[0]).work(part[1]) if part and part[1] else staging
    try:
        _work(request, staging, process, part)
    except ConfigError as error:
        return _failed(traces, ExitCode.BAD_INPUT, error)
    except Retryable as error:
        return _failed(traces, ExitCode.RETRY, error)
    except OSError as error:
        traceback.print_exc()
        if is_full_or_read_only(error) and _inside(error.filename, staging):
            return _failed(traces, ExitCode.BAD_INPUT, NotWritable(not_writable(Path(request["store"]), error)))
        return _failed(traces, ExitCode.FAILED, error)
    except Exception as error:
        traceback.print_exc()
        return _failed(traces, ExitCode.FAILED, error)
    return ExitCode.DONE


def load_stage(module: str, attribute: str) -> Stage:
    """Import the stage by its dotted place. Raises `ConfigError` if there is none."""
    found: Any = getattr(importlib.import_module(module), attribute, None)
    if not isinstance(found, Stage):
        raise ConfigError(f"{module}.{attribute} is not a stage: @stage must decorate a module-level function")
    return found


def membership() -> int | None:
    """Which of several processes this is; None if it works alone. `tasks.engine.multihost` sets the environment."""
    found = os.environ.get("NAUTILE_PROCESS")
    return None if found is None else int(found)


def follow(beat_s: float) -> None:
    """Obey the group's leader: standard input says `stop`, and its end means that the leader is gone.

    Tell it in turn that this process is alive: a line every `beat_s` seconds, from a thread of its own.
    """

    def listen() -> None:
        # Not through sys.stdin: a reader that waits in it is a fatal error as the interpreter ends.
        while heard := os.read(0, 4096):
            if STOP in heard:
                os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGKILL)

    def beat() -> None:
        while True:
            os.write(1, BEAT)
            time.sleep(beat_s)

    threading.Thread(target=listen, daemon=True).start()
    threading.Thread(target=beat, daemon=True).start()


def _join(process: int) -> None:
    """Make this process one of JAX's; on a TPU slice, without a coordinator, the devices know each other."""
    import jax

    count, coordinator = int(os.environ["NAUTILE_PROCESSES"]), os.environ.get("NAUTILE_COORDINATOR")
    if coordinator:
        here = coordinator if coordinator.startswith("127.") else None  # else the service listens on every address
        jax.distributed.initialize(coordinator, count, process, coordinator_bind_address=here)
    else:
        jax.distributed.initialize()


def _work(request: dict[str, Any], staging: Path, process: int | None, part: list[str]) -> None:
    # The child must find what the parent found, a test's modules included.
    sys.path.extend(entry for entry in request["sys_path"] if entry not in sys.path)
    stage = load_stage(request["module"], request["attribute"])
    if part:
        _work_part(request, staging, stage, part)
        return
    if process is not None:
        _join(process)
    if stage.accelerator:
        from model.compile_cache import enable_compile_cache  # imports JAX, which the other stages have no use for

        enable_compile_cache(Path(request["store"]) / "compiled")
    if process:
        stage.work(_job(request, staging, stage, silent, process))
        return
    emit = EventWriter(Path(request["events"]), request["execution"], stage=stage.name, live=staging / "live.json")
    try:
        stage.work(_job(request, staging, stage, emit, 0))
        write_json(staging / "done.json", {"outputs": _written(stage, staging)})
    finally:
        emit.close()


def _work_part(request: dict[str, Any], staging: Path, stage: Stage, part: list[str]) -> None:
    name, unit, slot, _ = part
    step = next(step for step in stage.fan_outs if step.name == name)
    events = Path(request["events"])
    live = (Markers.of(staging, name).work(unit) if unit else staging) / "live.json"
    path = events.with_name(f"{events.stem}-{slot}{events.suffix}")
    emit = EventWriter(path, request["execution"], stage=stage.name, live=live)
    try:
        if unit:
            process_item(step, _job(request, staging, stage, from_unit(emit, name, unit), 0), unit)
        else:
            write_item_list(step, _job(request, staging, stage, emit, 0))
    finally:
        emit.close()


def _job(request: dict[str, Any], staging: Path, stage: Stage, emit: Emit, process: int) -> Job:
    return Job(
        stage=stage.name,
        key=request["key"],
        execution=request["execution"],
        section=request["section"],
        inputs={name: Path(folder) for name, folder in request["inputs"].items()},
        staging=staging,
        emit=emit,
        process=process,
    )


def _written(stage: Stage, staging: Path) -> list[str]:
    """The kinds that have content to publish. Raises `RuntimeError` if one that must be written was not."""
    folders = sorted(path for path in (staging / "output").glob("*") if path.is_dir())
    written = [folder.name for folder in folders if any(path.is_file() for path in folder.rglob("*"))]
    if unknown := set(written) - set(stage.outputs):
        raise RuntimeError(f"stage {stage.name} wrote {sorted(unknown)}; its outputs are {list(stage.outputs)}")
    if missing := [kind for kind in stage.outputs if kind not in written and kind not in stage.optional]:
        raise RuntimeError(f"stage {stage.name} wrote nothing for {missing} (declare it `optional` if that may be)")
    return written


def _failed(staging: Path, code: int, error: BaseException) -> int:
    text = str(error) or type(error).__name__
    logger.error("%s", text)
    told = staging / "error.json"
    if membership() is not None and told.exists():
        return code  # the first of several processes says why; without it the others fail in its wake
    try:
        write_json(told, {"code": code, "type": type(error).__name__, "message": text})
    except OSError as problem:
        logger.error("error.json cannot be written: %s", problem)
    return code


def _inside(path: object, folder: Path) -> bool:
    return path is None or str(path).startswith(str(folder))


def _terminated(number: int, frame: FrameType | None) -> None:
    """SIGTERM unwinds like an exception, so that servers the work started are ended by their own `finally`."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    code = main()
    if code and membership() is not None:
        # Torn down in the usual way, JAX would wait for the others to end as well.
        logging.shutdown()
        os._exit(code)
    sys.exit(code)
