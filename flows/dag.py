"""What a configuration means as work: every execution of a stage, in order, with the key of what it will write.

Keys follow from the configuration alone (stage, version, section, keys of the inputs), so nothing is run or read to
know them. `nautile run`, `status`, `--from`, `--until` and `--only` all rest on this one list.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

from common.errors import ConfigError
from configs.load import STAGES, stage_section
from configs.schema import RunConfig

EVALUATED = ("pretrain", "align", "reason", "self_distill")  # paper Table 1: one evaluation after each
DISTILLED = "distilled"


class StageLike(Protocol):
    """The part of `tasks.engine.stage.Stage` that planning needs."""

    name: str
    outputs: tuple[str, ...]

    def key(self, section: dict[str, Any], inputs: dict[str, str]) -> str: ...


@dataclass(frozen=True)
class Need:
    """One input: the artifact of `kind` that the execution labelled `producer` writes."""

    producer: str
    kind: str


SCREENED = {"questions": Need("held_out", "questions")}  # what is trained on is screened against the benchmarks
AGAINST = "against."  # and the name of an earlier source: its texts are not kept twice


@dataclass(frozen=True)
class Execution:
    """One use of a stage. `label` is unique in a run: `pretrain`, `ingest:synth`, `evaluate:align`."""

    stage: str
    label: str
    section: dict[str, Any]
    needs: dict[str, Need]
    outputs: tuple[str, ...]
    key: str


@dataclass
class _Node:
    stage: str
    label: str
    source: str | None = None
    needs: dict[str, Need] = field(default_factory=dict)


def stage_named(name: str) -> Any:
    """The `tasks.engine.stage.Stage` of that name, imported only now."""
    if name not in STAGES:
        raise ConfigError(f"no stage {name!r}; there are {', '.join(STAGES)}")
    return getattr(import_module(f"tasks.{name}"), name)


def plan(config: RunConfig, stages: Callable[[str], StageLike] | None = None) -> list[Execution]:
    """Every execution that `config` asks for, producers before consumers, with their keys.

    `stages` finds a stage by name (default: the project's own). Raises `ConfigError` if the parts do not fit together.
    """
    stages = stages or stage_named
    made: dict[str, Execution] = {}
    for node in [*_graph(config), _Node("report", "report")]:
        stage = stages(node.stage)
        if node.stage == "report":
            node.needs = {f"{e.label}.{kind}": Need(e.label, kind) for e in made.values() for kind in e.outputs}
        section = stage_section(config, node.stage, node.source)
        inputs = {name: artifact_name(need.kind, made[need.producer].key) for name, need in node.needs.items()}
        outputs = _outputs(config, node, stage.outputs)
        made[node.label] = Execution(node.stage, node.label, section, node.needs, outputs, stage.key(section, inputs))
    return list(made.values())


def artifact_name(kind: str, key: str) -> str:
    """How an artifact is referred to in full: `checkpoint/<64 hex digits>`."""
    return f"{kind}/{key}"


def _outputs(config: RunConfig, node: _Node, outputs: tuple[str, ...]) -> tuple[str, ...]:
    """An ingest writes exemplars and signatures only where they are asked for; every other stage all its kinds."""
    if node.stage != "ingest":
        return outputs
    source = next(s for s in config.ingest.sources if s.name == node.source)
    unwritten = {"exemplars": not source.exemplars, "signatures": not config.ingest.deduplicate.across}
    return tuple(kind for kind in outputs if not unwritten.get(kind))


def _graph(config: RunConfig) -> list[_Node]:
    nodes = [_Node("held_out", "held_out")]
    for place, source in enumerate(config.ingest.sources):
        node = _Node("ingest", f"ingest:{source.name}", source.name, dict(SCREENED))
        if config.ingest.deduplicate.across:
            earlier = config.ingest.sources[:place]
            node.needs |= {f"{AGAINST}{s.name}": Need(f"ingest:{s.name}", "signatures") for s in earlier}
        nodes.append(node)
    keepers = [s.name for s in config.ingest.sources if s.exemplars]
    if len(keepers) != 1:
        what = f"{', '.join(keepers)} do" if keepers else "none does"
        raise ConfigError(f"ingest.sources: exactly one must keep `exemplars` for the distillation; {what}")
    nodes.append(_Node("index", "index", needs={"exemplars": Need(f"ingest:{keepers[0]}", "exemplars")}))
    nodes.append(_Node("distill", "distill", needs={"retrieval": Need("index", "retrieval"), **SCREENED}))
    used = list(dict.fromkeys(name for phase in config.pretrain.phases for name in phase.mixture))
    tokens = {name: Need("distill" if name == DISTILLED else f"ingest:{name}", "tokens") for name in sorted(used)}
    nodes.append(_Node("pretrain", "pretrain", needs=tokens))
    before = "pretrain"
    for trained in EVALUATED:
        if trained != "pretrain":
            nodes.append(_Node(trained, trained, needs={"checkpoint": Need(before, "checkpoint"), **SCREENED}))
        nodes.append(_Node("evaluate", f"evaluate:{trained}", needs={"checkpoint": Need(trained, "checkpoint")}))
        before = trained
    for model in config.evaluate.models:
        label = f"evaluate:{model.endpoint}"
        if any(node.label == label for node in nodes):
            raise ConfigError(
                f"evaluate.models: {label!r} would be there twice; rename the endpoint {model.endpoint!r}"
            )
        nodes.append(_Node("evaluate", label, source=model.endpoint))
    return nodes
