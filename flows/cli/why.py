"""Why a step has to run: how its key differs from that of the most similar artifact in the store (`status --why`)."""

from typing import Any

from nautile.common.errors import ConfigError
from nautile.common.text import did_you_mean
from nautile.configs.keys import key_fields
from nautile.configs.schema import RunConfig
from nautile.flows.dag import Step
from nautile.flows.starts import dag_in
from nautile.store.artifacts import Artifact, Store, short_id
from nautile.store.catalog import CatalogRow
from nautile.store.manifest import KEY


def explain(store: Store, config: RunConfig, only: str | None = None) -> list[CatalogRow]:
    """Explain each step, or only the step labelled `only`: one row per step.

    `nearest` is the id of the artifact that the step is compared with; None if the step is in the store, or if the
    store has no artifact of its stage. `differences` has a line for each value, file or stage version that changes the
    key, `inputs` a line for each input that does. Raises `ConfigError` for an unknown step.
    """
    store.refresh()
    dag = dag_in(store, config)
    if only is not None and only not in (labels := [step.label for step in dag]):
        raise ConfigError(f"no step {only!r}{did_you_mean(only, labels)}; there are {', '.join(labels)}")
    artifacts = store.list()
    rows = []
    for step in dag:
        if only not in (None, step.label):
            continue
        row: CatalogRow = {"label": step.label, "state": "not made", "nearest": None, "differences": [], "inputs": []}
        rows.append(row)
        if all(store.find(kind, step.key) for kind in step.outputs):
            row["state"] = "made"
            continue
        earlier = [a for a in artifacts if a.manifest["stage"] == step.stage.name and a.key != step.key]
        # Reversed, because `min` takes the first of equals: the newest.
        compared = [(section_differences(step, a), input_differences(step, a), a) for a in reversed(earlier)]
        if compared:  # the artifact with the fewest differences; ties: first the same step, then the newest
            row["differences"], row["inputs"], nearest = min(
                compared, key=lambda c: (len(c[0]), len(c[1]), c[2].manifest["label"] != step.label)
            )
            row["nearest"] = nearest.id
    return rows


def section_differences(step: Step, artifact: Artifact) -> list[str]:
    """Differences in stage version and semantic fields between `artifact` and `step`, a line each."""
    manifest = artifact.manifest
    lines = []
    if manifest["version"] != step.stage.version:
        lines.append(f"stage {step.stage.name}: version {manifest['version']} -> {step.stage.version}")
    # Only the fields that are in keys. An operational change is no reason to run again, so it is no answer here.
    before, after = _flat(key_fields(manifest["config"])), _flat(key_fields(step.section))
    for name in sorted(before.keys() | after.keys()):
        values = before.get(name), after.get(name)
        if values[0] == values[1]:
            continue
        # Digests of local files stand in the section; the digits themselves tell nobody anything.
        if all(KEY.fullmatch(str(value)) for value in values):
            lines.append(f"{name}: the file's content changed")
        else:
            lines.append(f"{name}: {' -> '.join('not set' if value is None else repr(value) for value in values)}")
    return lines


def input_differences(step: Step, artifact: Artifact) -> list[str]:
    """Differences in inputs between `artifact` and `step`, a line each."""
    lines = []
    for name in sorted(artifact.manifest["inputs"].keys() | step.inputs.keys()):
        before, after = artifact.manifest["inputs"].get(name), step.inputs.get(name)
        if before != after:
            ids = (short_id(*full_id.split("/")) if full_id else "none" for full_id in (before, after))
            lines.append(f"{name}: {' -> '.join(ids)}")
    return lines


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested JSON data: dotted name -> value."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {name: leaf for key, part in items for name, leaf in _flat(part, f"{prefix}.{key}").items()}
    return {prefix.removeprefix("."): value}
