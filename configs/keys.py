"""Which fields of the configuration are hashed into a step's key, and the digests of the local files that it names.

A field is semantic (in the key) unless its type is `Operational`: such a field changes how a stage works, how fast or
at what price, but not what it writes, so existing artifacts are reused or resumed with another value. A semantic field
that is None is left out, so a new optional field changes no existing key. Local files are in a key by content, not by
path.

`python -m nautile.configs.keys` prints the table of fields in docs/store.md.
"""

import pkgutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from nautile.common.files import content_digests
from nautile.configs.base import TRAINING_SEEDS, NotInKey, Section, fingerprint
from nautile.configs.changes import Change, differences
from nautile.configs.endpoint import EndpointConfig
from nautile.configs.evaluation import ModelUnderTest
from nautile.configs.ingest import IngestPart, SourceConfig
from nautile.configs.model import ModelConfig, TokenizerConfig
from nautile.configs.operation import PlanConfig
from nautile.configs.readers import READERS
from nautile.configs.schema import RunConfig
from nautile.configs.stages import STAGES, plugin_section

FILES = "local_files"  # the entry of a step's section with the digests: path as configured -> file -> sha256

LOCAL_READERS = ("csv", "margins", "labelled_sentences")  # readers of local files besides those of `READERS`

# Types of the parts of a step's section, by name. A part that is not listed (a seed, a length) is semantic as a whole.
PARTS: dict[str, Any] = {
    **{name: RunConfig.model_fields[name].annotation for name in STAGES.shipped if name in RunConfig.model_fields},
    "endpoints": dict[str, EndpointConfig],
    "ingest": IngestPart,
    "model": ModelConfig,
    "model_under_test": ModelUnderTest,
    "plan": PlanConfig,
    "sources": dict[str, SourceConfig],
    "tokenizer": TokenizerConfig,
}
PARTS_OF_USES = {  # by reference, imported when a section has such a part
    "classify": "nautile.uses.labelled.config:ClassifyConfig",
    "extract": "nautile.uses.labelled.config:ExtractConfig",
    "label": "nautile.uses.labelled.config:LabelConfig",
    "rescore": "nautile.uses.rescore.config:RescoreConfig",
    "simulate": "nautile.uses.simulate.config:SimulateConfig",
    "survey": "nautile.uses.simulate.config:SurveyConfig",
    "tune": "nautile.uses.labelled.config:TuneConfig",
}


def key_fields(section: dict[str, Any]) -> dict[str, Any]:
    """The semantic fields of a step's section (JSON data), which are hashed into its key.

    Fields that the configuration no longer has are left out: the section may come from an older version's manifest.
    """
    files = section.get(FILES, {})
    return {name: _semantic(value, _part(name), files) for name, value in section.items() if name != FILES}


def key_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The semantic fields of a whole configuration (JSON data), which some step's key has."""
    fields: dict[str, Any] = _semantic(settings, RunConfig, {})
    return fields


def recipe(settings: dict[str, Any]) -> str:
    """The digest of a whole configuration (JSON data) without the seeds of training: equal for the seeds of a recipe.

    The seed of the evaluation counts: with another one, other problems are asked.
    """
    fields = key_settings(settings) | {"seed": None}
    if isinstance(seeds := fields.get("seeds", {}), dict):
        fields["seeds"] = {name: seed for name, seed in seeds.items() if name not in TRAINING_SEEDS}
    return fingerprint(fields)


def changed_settings(base: RunConfig, config: RunConfig) -> list[Change]:
    """All fields in which `config` differs from `base`; `name` is not compared.

    Fields that are in a key come first, because a short description shows only the first changes, and these change what
    is made; then the order of the sections. Lists of equal length are compared entry by entry, other lists as a whole.
    """
    before, after = (settings.model_dump(mode="json", exclude={"name"}) for settings in (base, config))
    in_key = {change.field for change in differences(key_settings(before), key_settings(after))}
    return sorted(differences(before, after), key=lambda change: change.field not in in_key)


def with_local_files(section: dict[str, Any], memory: Path | None = None) -> dict[str, Any]:
    """Add the digests of all local files that a section names, as `FILES`; unchanged if it names none.

    `memory`: a cache file of digests by size and time. Raises `ConfigError` for a path that matches no file.
    """
    patterns = local_files(section)
    if not patterns:
        return section
    return {
        **section,
        FILES: {p: {file.name: file.sha256 for file in content_digests([p], memory)} for p in sorted(patterns)},
    }


def local_files(section: dict[str, Any]) -> set[str]:
    """The paths and globs of local files that a step's section names."""
    return {path for name, part in section.items() for path in _local_paths(part, _part(name))}


def classified_fields() -> tuple[list[str], list[str]]:
    """The dotted names of all semantic and all operational fields of `RunConfig`.

    A section that is operational as a whole is listed by its own name; `*` stands for any name or index.
    """
    names: tuple[list[str], list[str]] = ([], [])
    _classify(RunConfig, "", *names)
    return names


def table() -> str:
    """The Markdown table of all fields by section, as docs/store.md shows it."""
    semantic, operational = classified_fields()
    rows: dict[str, tuple[list[str], list[str]]] = {}
    for column, names in enumerate((semantic, operational)):
        for name in names:
            section, _, field = name.partition(".")
            rows.setdefault(section, ([], []))[column].append(f"`{field}`" if field else "all of it")
    lines = ["| section | in the key | not in the key |", "| --- | --- | --- |"]
    lines += [
        f"| `{name}` | {', '.join(in_key)} | {', '.join(not_in_key)} |" for name, (in_key, not_in_key) in rows.items()
    ]
    return "\n".join(lines)


def _part(name: str) -> Any:
    """The type of a part of a step's section; None if it is semantic as a whole."""
    return (
        pkgutil.resolve_name(PARTS_OF_USES[name]) if name in PARTS_OF_USES else PARTS.get(name) or plugin_section(name)
    )


def _semantic(value: Any, annotation: Any, files: dict[str, Any]) -> Any:
    """`value`, JSON data of type `annotation`, without operational and unset fields; local paths become digests."""
    if (model := _section_in(annotation)) is None or not isinstance(value, dict | list):
        return value
    if isinstance(value, list):
        return [_semantic(item, model, files) for item in value]
    if get_origin(annotation) is dict:
        return {name: _semantic(item, model, files) for name, item in value.items()}
    fields = {
        name: _semantic(value[name], field.annotation, files)
        for name, field in model.model_fields.items()
        if value.get(name) is not None and not _is_operational(field)
    }
    if files and value.get("path") in files:
        fields["path"] = files[value["path"]]
    return fields


def _local_paths(value: Any, annotation: Any) -> Iterator[str]:
    """All values of `path` in `value` that are local files."""
    if (model := _section_in(annotation)) is None or value is None:
        return
    if isinstance(value, list) or get_origin(annotation) is dict:
        for item in value if isinstance(value, list) else value.values():
            yield from _local_paths(item, model)
        return
    # The reader or source says whether a path is local or on the Hub; a benchmark has neither, and its path is local.
    reader = value.get("reader", value.get("source", "jsonl"))
    if value.get("path") and (reader in LOCAL_READERS or (reader in READERS and READERS[reader].is_local)):
        yield value["path"]
    for name, field in model.model_fields.items():
        yield from _local_paths(value.get(name), field.annotation)


def _section_in(annotation: Any) -> type[Section] | None:
    """The `Section` class in a field's type: the type itself, or inside an optional, a tuple or a dict."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType, tuple, dict):
        return next((model for part in get_args(annotation) if (model := _section_in(part))), None)
    return None


def _is_operational(field: FieldInfo) -> bool:
    return any(isinstance(marker, NotInKey) for marker in field.metadata)


def _classify(model: type[Section], prefix: str, semantic: list[str], operational: list[str]) -> None:
    """Append the dotted names of a section's fields, and of its subsections', to the two lists."""
    for name, field in model.model_fields.items():
        if _is_operational(field):
            operational.append(prefix + name)
        elif (inner := _section_in(field.annotation)) is not None:
            parts = (field.annotation, *get_args(field.annotation))  # with the tuple inside an optional tuple
            is_collection = any(get_origin(part) in (tuple, dict) for part in parts)
            _classify(inner, f"{prefix}{name}.{'*.' if is_collection else ''}", semantic, operational)
        else:
            semantic.append(prefix + name)


if __name__ == "__main__":
    sys.stdout.write(f"{table()}\n")
