"""Nautile: the pipeline of the Nautile-370M paper as a Python package.

    import nautile

    model = nautile.load("self_distill")          # a stage's newest checkpoint, an id, a folder, an export
    print(model.chat("What is 2 + 3?").answer)
    frame = nautile.open().runs()                 # what the store has recorded, as data frames
    run = nautile.run("local", until="pretrain")  # a run, in a process of its own
    run.wait()

Each folder of the repository is a package below this one, by a link: `flows/dag.py` is `nautile.flows.dag`. Importing
`nautile` imports none of them, starts nothing and changes nothing of the process; `docs/python.md` has the recipes.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

    from nautile.language_model import LanguageModel
    from nautile.opened_store import OpenedStore
    from nautile.run_handle import RunHandle

__all__ = ["ConfigError", "Retryable", "RunFailed", "load", "open", "run"]


def load(name: "str | PathLike[str] | None" = None, *, store: "str | PathLike[str] | None" = None) -> "LanguageModel":
    """Load a model: a checkpoint, or its export for onnxruntime, by whatever names it.

    `name`: a stage of training (its newest checkpoint), an artifact's id, a folder, None for the newest checkpoint.
    `store`: a folder or URL; None: `$NAUTILE_STORE`, else `./.nautile`. Raises `ConfigError` if there is none.
    """
    from nautile.common.extras import extras_named

    with extras_named():
        from nautile.language_model import load_model

        return load_model(name, store)


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


def __getattr__(name: str) -> Any:
    if name in ("ConfigError", "Retryable"):
        from nautile.common import errors

        return getattr(errors, name)
    if name == "RunFailed":
        from nautile.run_handle import RunFailed

        return RunFailed
    raise AttributeError(f"module 'nautile' has no attribute {name!r}")
