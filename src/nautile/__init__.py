"""Nautile: the pipeline of the Nautile-370M paper as a Python package.

    import nautile

    model = nautile.load("self_distill")          # a stage's newest checkpoint, an id, a folder, an export
    print(model.chat("What is 2 + 3?").answer)
    frame = nautile.open().runs()                 # what the store has recorded, as data frames
    run = nautile.run("local", until="pretrain")  # a run, in a process of its own
    run.wait()
    print(nautile.compare("align", "reason").scores)  # paired, with intervals

Each folder of the repository is a package below this one, by a link: `flows/dag.py` is `nautile.flows.dag`. Importing
`nautile` imports none of them, starts nothing and changes nothing of the process; `docs/python.md` has the recipes.
"""

import os
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from os import PathLike

    from nautile.comparison import Comparison
    from nautile.flows.device_plan import DevicePlan
    from nautile.flows.planning import Plan
    from nautile.language_model import LanguageModel
    from nautile.opened_store import OpenedStore
    from nautile.run_handle import RehearsalHandle, RunHandle, SweepHandle

__all__ = [
    "ConfigError", "Retryable", "RunFailed", "compare", "load", "open", "plan", "rehearse", "run", "sweep",
]  # fmt: skip


def load(
    name: "str | PathLike[str] | None" = None,
    *,
    store: "str | PathLike[str] | None" = None,
    show: bool | None = None,
) -> "LanguageModel":
    """Load a model: a checkpoint, or its export for onnxruntime, by whatever names it.

    `name`: a stage of training (its newest checkpoint), an artifact's id, a folder, `OWNER/NAME` or
    `OWNER/NAME@REVISION` of the Hub, None for the newest checkpoint. `store`: a folder or URL; None: `$NAUTILE_STORE`,
    else `./.nautile`. `show`: progress bars of long batches; None: in a terminal or a notebook. Raises `ConfigError` if
    there is none, and `Retryable` where the Hub does not answer.
    """
    from nautile.common.extras import extras_named

    with extras_named():
        from nautile.language_model import load_model

        return load_model(name, store, show)


def open(location: "str | PathLike[str] | None" = None) -> "OpenedStore":
    """Open a store to read what it has recorded. `location`: as `store` of `load`. Raises `ConfigError`."""
    from nautile.common.extras import extras_named

    with extras_named():
        from nautile.opened_store import OpenedStore

    return OpenedStore(location)


def run(
    config: "str | PathLike[str]" = "local",
    *,
    set: "Mapping[str, Any] | None" = None,
    start: str | None = None,
    until: str | None = None,
    only: str | None = None,
    force: bool = False,
    name: str | None = None,
    store: "str | PathLike[str] | None" = None,
) -> "RunHandle":
    """Start a run as `nautile run` does, in a process of its own, which ends with this one; returns its handle.

    `set`: settings, such as `{"reason.policy.steps": 20}`. `start`, `until`, `only`, `force`: as `--from`, `--until`,
    `--only` and `--force`. `name` must be one that no run of the store has. Raises `ConfigError` for a configuration or
    setting that is wrong, before anything is started.
    """
    from nautile.common.extras import extras_named

    with extras_named():
        from nautile.run_handle import RunHandle

    return RunHandle(config, set or {}, start, until, only, force, name, store)


def sweep(
    file: "str | PathLike[str]",
    *,
    parallel: int | None = None,
    many: bool = False,
    store: "str | PathLike[str] | None" = None,
) -> "SweepHandle":
    """Start a sweep as `nautile sweep` does, in a process of its own, which ends with this one; returns its handle.

    `file`: a TOML file, or the name of a shipped one. `parallel`: runs at a time. `many`: allow more than 20 runs.
    Raises `ConfigError` for anything wrong with any of its runs, before the first is started.
    """
    from nautile.common.extras import extras_named

    with extras_named():
        from nautile.run_handle import SweepHandle

    return SweepHandle(file, parallel, many, store)


def rehearse(
    config: "str | PathLike[str]",
    *,
    set: "Mapping[str, Any] | None" = None,
    spend: float = 0.0,
    full_model: bool = False,
    store: "str | PathLike[str] | None" = None,
) -> "RehearsalHandle":
    """Start a rehearsal as `nautile rehearse` does, in a process of its own, which ends with this one.

    `spend`: pay endpoints at most so many dollars; 0: only what is free. Raises `ConfigError` as `run`.
    """
    from nautile.common.extras import extras_named

    with extras_named():
        from nautile.run_handle import RehearsalHandle

    return RehearsalHandle(config, set or {}, spend, full_model, store)


@overload
def plan(
    config: "str | PathLike[str]", *, device: None = None, topology: str | None = None,
    set: "Mapping[str, Any] | None" = None, price: float | None = None, mfu: float | None = None,
    fsdp: int | None = None, quick: bool = False, row_lengths: "Sequence[int]" = (), online: bool = False,
    store: "str | PathLike[str] | None" = None,
) -> "Plan": ...  # fmt: skip
@overload
def plan(
    config: "str | PathLike[str]", *, device: str, set: "Mapping[str, Any] | None" = None, price: float | None = None,
    mfu: float | None = None, store: "str | PathLike[str] | None" = None,
) -> "DevicePlan": ...  # fmt: skip
def plan(
    config: "str | PathLike[str]", *, device: str | None = None, topology: str | None = None,
    set: "Mapping[str, Any] | None" = None, price: float | None = None, mfu: float | None = None,
    fsdp: int | None = None, quick: bool = False, row_lengths: "Sequence[int]" = (), online: bool = False,
    store: "str | PathLike[str] | None" = None,
) -> "Plan | DevicePlan":  # fmt: skip
    """Memory, time and cost of a configuration on chips that need not be here, as `nautile plan`; waits for it.

    `topology`: such as `"v4:2x4x4"` or `"h100:8"`; None: that of the configuration. `device`, such as `"rtx4090"`:
    instead, by formulas and without a compiler, every stage. `online`: ask the Hub and the endpoints, without paying.
    Where nothing can be compiled, `error` says why, and the rest is there. Raises `ConfigError` for a configuration,
    setting or device that is wrong.
    """
    from nautile.common.extras import extras_named

    with extras_named():
        from nautile.common.errors import ConfigError
        from nautile.configs.load import load as load_config
        from nautile.flows.device_plan import plan_device
        from nautile.flows.planning import plan_run
        from nautile.flows.sweep.arms import setting_words
        from nautile.store.mirror import open_store

    run_config, opened = load_config(os.fspath(config), setting_words(set or {})), open_store(_location(store))
    if device is None:
        return plan_run(
            run_config, opened, topology, price=price, mfu=mfu, fsdp=fsdp, largest=not quick, row_lengths=row_lengths,
            online=online,
        )  # fmt: skip
    if any((topology, fsdp, quick, row_lengths, online)):
        raise ConfigError("device estimates by formulas alone: leave out topology, fsdp, quick, row_lengths and online")
    return plan_device(run_config, opened, device, price, mfu)


def compare(
    first: str, *others: str, verdict: str = "strict", way: str = "generate",
    store: "str | PathLike[str] | None" = None,
) -> "Comparison":  # fmt: skip
    """Compare runs, or evaluations, with the first of them on the questions that both were asked, as data frames.

    Names: of runs by id or name; of evaluations by id, folder or stage (its newest). `verdict`: strict or lenient.
    `way`: generate or likelihood. Raises `ConfigError` for a name that is neither, and a run beside an evaluation.
    """
    from nautile.common.extras import extras_named

    with extras_named():
        from nautile.comparison import Comparison
        from nautile.store.mirror import open_store

    return Comparison(open_store(_location(store)), first, others, verdict, way)


def _location(store: "str | PathLike[str] | None") -> str | None:
    return None if store is None else os.fspath(store)


def __getattr__(name: str) -> Any:
    if name in ("ConfigError", "Retryable"):
        from nautile.common import errors

        return getattr(errors, name)
    if name == "RunFailed":
        from nautile.run_handle import RunFailed

        return RunFailed
    raise AttributeError(f"module 'nautile' has no attribute {name!r}")
