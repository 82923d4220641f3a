"""Which makings stay when old ones are retired: what a rule keeps, what unfinished work reads, and all behind those."""

import time
from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime

from configs.retention import RetentionConfig
from store.artifacts import Artifact, Store
from store.durable import read_json
from store.mirror import moment

Making = tuple[str, str, str]  # kind, key, execution


def making(artifact: Artifact) -> Making:
    return artifact.kind, artifact.key, artifact.execution


def roots(store: Store, artifacts: list[Artifact], rules: RetentionConfig) -> set[Making]:
    """The makings that stay for their own sake. Raises `ConfigError` for a pin that names no artifact, or several."""
    pinned = {making(store.get(name)) for name in rules.pins}
    live = [artifact for artifact in artifacts if not artifact.superseded]
    if not rules.retires:
        return {making(artifact) for artifact in live} | pinned
    read = _being_read(store)
    oldest = None if rules.days is None else time.time() - 86400 * rules.days
    latest = _latest(live, rules.newest or 0)
    kept = {
        (artifact.key, artifact.execution)
        for artifact in live
        if artifact.kind in rules.kinds
        or (artifact.key, artifact.execution) in latest
        or (oldest is not None and _made(artifact) >= oldest)
        or making(artifact) in pinned
        or store.lock(artifact.key).held_elsewhere()
    }
    whole = {making(artifact) for artifact in live if (artifact.key, artifact.execution) in kept}
    return whole | pinned | {making(artifact) for artifact in artifacts if artifact.manifest["digest"] in read}


def closure(artifacts: Iterable[Artifact], kept: set[Making]) -> set[Making]:
    """`kept` and all that those were made from."""
    by_making = {making(artifact): artifact for artifact in artifacts}
    siblings = defaultdict(list)
    for one in by_making:
        siblings[one[1:]].append(one)
    open_ends = list(kept)
    needed: set[Making] = set()
    while open_ends:
        one = open_ends.pop()
        if one in needed:
            continue
        needed.add(one)
        # What one execution published is reused as a whole or not at all.
        open_ends += siblings[one[1:]]
        if one in by_making:
            manifest = by_making[one].manifest
            for name, full_id in manifest["inputs"].items():
                kind, _, key = full_id.partition("/")
                open_ends.append((kind, key, manifest["input_executions"][name]))
    return needed


def age(artifact: Artifact) -> str:
    return f"{(time.time() - _made(artifact)) / 86400:.0f} days old"


def _latest(live: list[Artifact], count: int) -> set[tuple[str, str]]:
    """(key, execution) of the `count` latest executions of each label."""
    by_label: dict[str, dict[tuple[str, str], tuple[datetime, str]]] = defaultdict(dict)
    for artifact in live:
        by_label[artifact.manifest["label"]][artifact.key, artifact.execution] = moment(artifact.manifest)
    ordered = [sorted(found, key=lambda one: found[one], reverse=True) for found in by_label.values()]
    return {one for found in ordered for one in found[:count]}


def _being_read(store: Store) -> set[str]:
    """Digests of the inputs of all unfinished work."""
    records = [read_json(path) for path in (store.root / "staging").glob("*/execution.json")]
    inputs = [record["inputs"] for record in records if isinstance(record, dict) and isinstance(record["inputs"], dict)]
    return {digest for given in inputs for digest in given.values()}


def _made(artifact: Artifact) -> float:
    return moment(artifact.manifest)[0].timestamp()
