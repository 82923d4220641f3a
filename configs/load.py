"""TOML to `RunConfig`: `extends`, one-line errors naming the field, and the slice of it that each stage depends on."""

import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from common.errors import ConfigError
from common.files import read_bounded_text
from configs.endpoint import with_fallbacks
from configs.evaluation import MADE_TO_NUMBER
from configs.schema import RunConfig

MOST_EXTENDED = 20
STAGES = (
    "held_out",
    "ingest",
    "index",
    "distill",
    "pretrain",
    "align",
    "reason",
    "self_distill",
    "evaluate",
    "report",
)


def load(name: str | Path) -> RunConfig:
    """Read a configuration by path, or by the name of one that ships here (`local`, `spark`, `nautile_370m`).

    Raises `ConfigError` with one message naming the file and the field.
    """
    path = locate(name)
    try:
        return RunConfig.model_validate(_read(path, seen=()))
    except ValidationError as error:
        raise ConfigError(f"{path}: {_first(error)}") from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deep") from None


def locate(name: str | Path) -> Path:
    """The file that `name` means: itself if it exists, else `configs/<name>.toml` of the installation."""
    path = Path(name)
    if path.is_file():
        return path
    shipped = Path(str(resources.files("configs"))) / f"{path.name.removesuffix('.toml')}.toml"
    if path.parent == Path(".") and shipped.is_file():
        return shipped
    known = sorted(p.stem for p in shipped.parent.glob("*.toml"))
    raise ConfigError(
        f"no configuration {str(name)!r}: not a file here, and none of the shipped ones ({', '.join(known)})"
    )


def stage_section(config: RunConfig, stage: str, source: str | None = None) -> dict[str, Any]:
    """What `stage` depends on, as plain JSON data: its own section and the shared parts it reads, nothing else.

    This is what its key hashes: a change in `reason` must not touch the key of `pretrain`. `source` picks the one
    source of an ingest, or the endpoint whose model an evaluation asks.
    """
    dump = config.model_dump(mode="json")
    if stage not in STAGES:
        raise ConfigError(f"no stage {stage!r}; there are {', '.join(STAGES)}")
    section: dict[str, Any] = {"seed": config.seed, stage: _held_out(dump) if stage == "held_out" else dump[stage]}
    if stage == "ingest":
        chosen = [s for s in dump["ingest"]["sources"] if s["name"] == source]
        if not chosen:
            raise ConfigError(f"ingest: no source {source!r}; there are {[s.name for s in config.ingest.sources]}")
        section["ingest"] = {name: dump["ingest"][name] for name in ("row_length", "deduplicate")}
        section["ingest"]["source"] = chosen[0]
    if stage in ("ingest", "distill"):
        section["tokenizer"] = dump["tokenizer"]
    if stage == "distill":
        section["row_length"] = config.ingest.row_length
        section["index"] = dump["index"]
    if stage == "pretrain":
        section["model"] = dump["model"]
    if stage == "evaluate":
        _choose_model(config, section, source)
    used = {"distill": config.distill.endpoints, "align": [config.align.judge.endpoint]}
    if stage in used:
        section["endpoints"] = {name: dump["endpoints"][name] for name in with_fallbacks(used[stage], config.endpoints)}
    return section


def _held_out(dump: dict[str, Any]) -> dict[str, Any]:
    """The benchmarks, all items of each: how many are asked matters only where they are made to that number."""
    benchmarks = dump["evaluate"]["benchmarks"]
    return {"benchmarks": [one if one["name"] in MADE_TO_NUMBER else {**one, "items": None} for one in benchmarks]}


def _choose_model(config: RunConfig, section: dict[str, Any], endpoint: str | None) -> None:
    """Of `evaluate.models` an evaluation depends on the one it asks (None: on none, it asks a checkpoint)."""
    models = {model["endpoint"]: model for model in section["evaluate"].pop("models")}
    if endpoint is not None:
        if endpoint not in models:
            raise ConfigError(f"evaluate: no model {endpoint!r}; there are {sorted(models)}")
        section["model_under_test"] = models[endpoint]
        section["endpoints"] = {endpoint: config.endpoints[endpoint].model_dump(mode="json")}


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """The file's table, laid over that of the file it `extends` (tables merge, everything else is replaced)."""
    path = path.resolve()
    if path in seen:
        raise ConfigError(f"{path}: `extends` goes in a circle through {', '.join(p.name for p in seen)}")
    if len(seen) > MOST_EXTENDED:
        raise ConfigError(f"{path}: `extends` goes on through more than {MOST_EXTENDED} files")
    try:
        table = tomllib.loads(read_bounded_text(path))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from None
    if "extends" not in table:
        return table
    parent = table.pop("extends")
    if not isinstance(parent, str):
        raise ConfigError(f"{path}: `extends` must be the name of one file")
    base = path.parent / parent
    return _merge(_read(base if base.is_file() else locate(parent), (*seen, path)), table)


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = _merge(base[key], value) if both else value
    return merged


def _first(error: ValidationError) -> str:
    """The first complaint in one line, with how many more there are."""
    details = error.errors(include_url=False)
    head = details[0]
    where = ".".join(str(part) for part in head["loc"])
    if head["type"] == "extra_forbidden":
        text = f"unknown key `{where}`"
    else:
        reason = head["msg"].removeprefix("Value error, ")
        text = f"`{where}`: {reason}" if where else reason
    return text + (f" (and {len(details) - 1} more)" if len(details) > 1 else "")
