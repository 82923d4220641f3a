"""The DAG of the pipeline: every step of a run, its inputs, and the part of the configuration it depends on.

A step's key is a hash of its stage, the semantic fields of its section, the local files that these name, and the keys
of its inputs. So all keys are known before anything runs. `nautile run`, `status`, `--from`, `--until` and `--only`
use this one list of steps.
"""

import json
import os
import pkgutil
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from nautile.common.errors import ConfigError
from nautile.common.text import first_line
from nautile.configs.base import SeedName
from nautile.configs.endpoint import with_fallbacks
from nautile.configs.ingest import SourceConfig
from nautile.configs.keys import with_local_files
from nautile.configs.model import refuse_other_shape
from nautile.configs.plugins import PLUGINS
from nautile.configs.readers import READERS, reader_versions
from nautile.configs.rewards import DEFAULT_REWARD, REWARDS
from nautile.configs.schema import DISTILLED, RunConfig
from nautile.configs.stages import STAGES, TRAINED
from nautile.evals.benchmarks.loading import with_own_files
from nautile.evals.benchmarks.registry import is_generated
from nautile.evals.benchmarks.stand_ins import HELD_OUT
from nautile.evals.benchmarks.versions import versions
from nautile.store.artifacts import Artifact, Store
from nautile.tasks.distill import distill, index
from nautile.tasks.engine.stage import Stage
from nautile.tasks.evaluate import evaluate, held_out
from nautile.tasks.ingest import AGAINST, ingest
from nautile.tasks.pretrain import START, pretrain
from nautile.tasks.reinforce import align, reason, self_distill
from nautile.tasks.report import report
from nautile.tasks.supervise import supervise
from nautile.tasks.tokenizer import tokenizer

DAG_VARIABLE = "NAUTILE_DAG"
# The stages that continue a checkpoint.
_CONTINUING = {"supervise": supervise, "align": align, "reason": reason, "self_distill": self_distill}


@dataclass(frozen=True)
class Need:
    """One input: the artifact of `kind` that the step labelled `producer` writes."""

    producer: str
    kind: str


@dataclass(frozen=True)
class Step:
    """One use of a stage. `label` is unique in a run: `pretrain`, `ingest:synth`, `evaluate:align`.

    `section` is the part of the configuration that the stage reads, as plain JSON data. Its semantic fields are hashed
    into the key, so it must hold nothing that the stage does not read: a change in `reason` keeps the key of
    `pretrain`.
    """

    label: str
    stage: Stage
    section: dict[str, Any]
    needs: dict[str, Need]
    resource: str = "cpu"  # accelerator, cpu or network; `[resources]` limits how many steps use it at once
    unwritten: tuple[str, ...] = ()  # optional outputs of the stage that this step does not write
    stored_inputs: dict[str, str] = field(default_factory=dict)  # inputs no step makes: name -> `kind/<full key>`
    inputs: dict[str, str] = field(default_factory=dict)  # all inputs: name -> `kind/<full key>`
    key: str = ""  # filled in by `build_dag`, as are `inputs`

    @property
    def outputs(self) -> tuple[str, ...]:
        """The artifact kinds that the step writes."""
        return tuple(kind for kind in self.stage.outputs if kind not in self.unwritten)


def pipeline_steps(config: RunConfig) -> list[Step]:
    """List every step of `config`, producers before consumers, without keys."""
    settings = config.model_dump(mode="json")
    # A `start` is an input of the step (`_from_starts`), so it is not part of the section.
    starts = {name: start for name in config.trained if (start := settings[name].pop("start", None))}
    if config.distill is not None:
        # Read by pretraining alone. The default is left out of the key, as an unset field is.
        settings["distill"].pop("train_on")

    # Only what the stage reads, seeds included, because each field is in its key.
    def section(*names: str, **more: Any) -> dict[str, Any]:
        return {**{name: settings[name] for name in names}, **more}

    def seeds(*names: SeedName) -> dict[str, int]:
        return {name: config.effective_seeds[name] for name in names}

    def endpoints(names: Iterable[str]) -> dict[str, Any]:
        return {name: settings["endpoints"][name] for name in with_fallbacks(list(names), config.endpoints)}

    def checkpoint(producer: str) -> dict[str, Need]:
        return {"checkpoint": Need(producer, "checkpoint")}

    def resource_of(names: Iterable[str]) -> str:
        """The resource of a step that sends requests to these endpoints."""
        used = [config.endpoints[name] for name in with_fallbacks(list(names), config.endpoints)]
        if any(endpoint.command for endpoint in used):
            return "accelerator"  # a model that the step serves by itself, beside no other work on it
        return "cpu" if all(endpoint.is_own for endpoint in used) else "network"

    # Training text is screened for the benchmarks' questions (decontamination).
    questions = {"questions": Need("held_out", "questions")}
    # Whatever tokenises text reads the tokenizer that the run trains, else its section; all later steps have it from
    # the tokens and the checkpoint.
    own = [_tokenizer_step(config)] if config.tokenizer.train else []
    vocabulary = {} if own else section("tokenizer")
    ids = {"tokenizer": Need("tokenizer", "tokenizer")} if own else {}
    # All sources of all phases are inputs, whichever phase reads them first: pretraining is one step.
    names = sorted({name for phase in config.pretrain.phases for name in phase.mixture})
    mixture = {name: Need("distill" if name == DISTILLED else f"ingest:{name}", "tokens") for name in names}
    replies = {name: value for name in names if (value := config.train_on[name]) != "all"}
    targets = {"train_on": replies} if replies else {}
    evaluation = evaluate_section(config)
    drawn = seeds("data", "sampling")  # of the stages that draw problems and sample completions
    steps = [
        Step("held_out", held_out, _held_out_section(config), {}, "cpu"),
        *own,
        *_ingest_steps(config, vocabulary, questions | ids),
    ]
    if config.index is not None:
        exemplars = {"exemplars": Need(f"ingest:{_exemplar_source(config)}", "exemplars")}
        steps.append(Step("index", index, section("index"), exemplars, "cpu"))
    if config.distill is not None:
        teachers = endpoints(config.distill.endpoints)
        steps.append(
            Step(
                "distill",
                distill,
                section("distill", "index", row_length=config.ingest.row_length, endpoints=teachers, **vocabulary),
                {"retrieval": Need("index", "retrieval")} | questions | ids,
                resource_of(config.distill.endpoints),
            )
        )
    pretraining = section("pretrain", "model", seeds=seeds("data", "weights"), **targets)
    steps += [
        Step("pretrain", pretrain, pretraining, mixture, "accelerator"),
        Step("evaluate:pretrain", evaluate, evaluation, checkpoint("pretrain"), "accelerator"),
    ]
    # Each stage continues the one before it that the configuration has.
    for before, name in pairwise(config.trained):
        more: dict[str, Any] = {}
        # The default reward is left out of the key, as an unset field is; another is there with its version.
        if settings[name].get("reward") == DEFAULT_REWARD:
            del settings[name]["reward"]
        elif reward := settings[name].get("reward"):
            more = {"versions": {reward: REWARDS.version(reward)}}
        if name == "align" and config.align is not None:
            more = {"endpoints": endpoints(config.align.judge.endpoints)}
        needs = checkpoint(before) | questions
        steps += [
            Step(name, _CONTINUING[name], section(name, seeds=drawn, **more), needs, "accelerator"),
            Step(f"evaluate:{name}", evaluate, evaluation, checkpoint(name), "accelerator"),
        ]
    steps += [
        Step(f"evaluate:{name}", evaluate, evaluate_section(config, name), {}, resource_of([name]))
        for name in (model.endpoint for model in config.evaluate.models)
    ]
    if starts:
        steps = _from_starts(steps, starts)
    # The report reads the artifacts of all steps, so it is built from the final list.
    return [*steps, Step("report", report, section("report"), all_outputs(steps), "cpu")]


def build_dag(
    config: RunConfig, named: Callable[[RunConfig], list[Step]] | None = None, *, memory: Path | None = None
) -> list[Step]:
    """Build the steps of `config` with their keys, producers before consumers.

    `named` replaces `pipeline_steps`, as NAUTILE_DAG does (`steps_of`). `memory`: see `with_local_files`.

    Every `start` of `config` must be a full id (`resolve_starts`). Raises `ConfigError` if sections of
    the configuration contradict each other or name a local file that does not exist.
    """
    dag: dict[str, Step] = {}
    for step in (named or steps_of)(config):
        if step.label in dag:
            name = step.label.partition(":")[2]
            raise ConfigError(f"evaluate.models: {step.label!r} exists already; rename the endpoint {name!r}")
        if (name := step.stage.name) not in STAGES:
            raise ConfigError(
                f"{step.label}: no stage {name!r} is known here: install its package, or name it in {PLUGINS} as "
                f"stages={step.stage.work.__module__}:{step.stage.work.__name__}"
            )
        inputs = {name: f"{need.kind}/{dag[need.producer].key}" for name, need in step.needs.items()}
        inputs |= step.stored_inputs
        section = with_local_files(step.section, memory)
        resource = config.deployment(step.stage.name).resource or step.resource
        key = step.stage.key(section, inputs)
        dag[step.label] = replace(step, section=section, resource=resource, inputs=inputs, key=key)
    return list(dag.values())


def steps_of(config: RunConfig) -> list[Step]:
    """The steps by the function that NAUTILE_DAG names as `module:function`, else `pipeline_steps`; without keys.

    The variable also holds for the processes that Prefect starts, which take no arguments.
    """
    if not (name := os.environ.get(DAG_VARIABLE)):
        return pipeline_steps(config)
    function = _named_function(name)
    try:
        return function(config)
    except ConfigError:
        raise
    except Exception as error:  # such as for the section of a stage that is not installed here
        what = f"{type(error).__name__}: {first_line(error)}"
        raise ConfigError(
            f"{DAG_VARIABLE}: {name!r} has failed ({what}); `nautile plugins` lists its stages"
        ) from error


def _named_function(name: str) -> Callable[[RunConfig], list[Step]]:
    """The function that NAUTILE_DAG names. Raises `ConfigError` if it is not installed here."""
    try:
        function: Callable[[RunConfig], list[Step]] = pkgutil.resolve_name(name)
        return function
    except (ImportError, AttributeError, ValueError) as error:
        host = socket.gethostname()
        raise ConfigError(f"{DAG_VARIABLE}: {name!r} cannot be imported on host {host} ({error})") from error


def all_outputs(steps: Iterable[Step]) -> dict[str, Need]:
    """Every artifact that `steps` write, as inputs of a step that reads them all."""
    return {f"{step.label}.{kind}": Need(step.label, kind) for step in steps for kind in step.outputs}


def evaluate_section(config: RunConfig, endpoint: str | None = None) -> dict[str, Any]:
    """The section of an evaluation: of a checkpoint, or of the model behind `endpoint` (one of `evaluate.models`)."""
    settings = config.evaluate.model_dump(mode="json")
    models = {model["endpoint"]: model for model in settings.pop("models")}
    settings["benchmarks"] = with_own_files(settings["benchmarks"])
    # Another parser or grader gives other scores: of the benchmarks that are asked, and of no others.
    asked = [*(choice.name for choice in config.evaluate.benchmarks), *([HELD_OUT] if config.evaluate.held_out else [])]
    section = {
        "seeds": {"evaluation": config.effective_seeds["evaluation"]},
        "evaluate": settings,
        "versions": versions(asked),
    }
    if endpoint is not None:
        section["model_under_test"] = models[endpoint]
        section["endpoints"] = {endpoint: config.endpoints[endpoint].model_dump(mode="json")}
    return section


def _from_starts(steps: Sequence[Step], starts: dict[str, str]) -> list[Step]:
    """Give each step in `starts` the checkpoint that it names, and drop the steps whose outputs nothing reads any more.

    A start is the id of a stored checkpoint, or the name of an earlier stage of the run.
    """
    # A start at `reason` makes `pretrain` and `align` superfluous: every trained stage before the last start.
    replaced = TRAINED[: max(TRAINED.index(name) for name in starts)]
    kept_steps: list[Step] = []
    producers: set[str] = set()  # labels that the kept steps read
    # Consumers first, so that a step knows whether anything that is kept reads it.
    for step in reversed(steps):
        trained = step.label.removeprefix("evaluate:")
        # Dropped unless something reads it: what a start replaces, its evaluations, and what only these needed.
        if trained not in producers and (trained in replaced or step.stage.name not in (*TRAINED, "evaluate")):
            continue
        if step.label in starts:
            needs = {name: need for name, need in step.needs.items() if name != "checkpoint"}
            if (start := starts[step.label]) in TRAINED:
                step = replace(step, needs=needs | {"checkpoint": Need(start, "checkpoint")})
            else:
                # Pretraining continues from a checkpoint under another input name, because it may also begin without.
                stored = {START if step.label == "pretrain" else "checkpoint": start}
                section = step.section
                if step.label == "pretrain":  # no parameter is drawn
                    section = section | {"seeds": {"data": section["seeds"]["data"]}}
                step = replace(step, section=section, needs=needs, stored_inputs=stored)
        producers |= {need.producer for need in step.needs.values()}
        kept_steps.insert(0, step)
    return kept_steps


def _ingest_steps(config: RunConfig, shared: dict[str, Any], questions: dict[str, Need]) -> list[Step]:
    """One step per source. With `deduplicate.across`, each reads the MinHash signatures of the sources before it."""
    settings, across = config.ingest.model_dump(mode="json"), config.ingest.deduplicate.across
    steps = []
    for number, source in enumerate(config.ingest.sources):
        section = {name: settings[name] for name in ("row_length", "deduplicate")}
        section["source"] = _source_section(config, number)
        needs, unwritten = dict(questions), []
        if across:
            earlier = config.ingest.sources[:number]
            needs |= {f"{AGAINST}{other.name}": Need(f"ingest:{other.name}", "signatures") for other in earlier}
        else:
            unwritten.append("signatures")
        if not source.exemplars:
            unwritten.append("exemplars")
        versions = _source_versions(source)
        section = shared | {"ingest": section} | ({"versions": versions} if versions else {})
        steps.append(Step(f"ingest:{source.name}", ingest, section, needs, "cpu", tuple(unwritten)))
    return steps


def _source_section(config: RunConfig, number: int) -> dict[str, Any]:
    """A source as a step reads it; its texts are the same whatever is trained on."""
    source = config.ingest.sources[number]
    section = source.model_dump(mode="json", exclude={"train_on"})
    if READERS[source.reader].generates and source.seed is None:
        section |= {"seed": config.effective_seeds["data"]}
    return section


def _source_versions(source: SourceConfig) -> dict[str, int | str]:
    """What the key of a step holds of how a source is read and filtered: nothing of the first versions."""
    return reader_versions(source.reader) | ({"languages": 2} if source.languages else {})


def _tokenizer_step(config: RunConfig) -> Step:
    """The training of a tokenizer, which reads the sources that it names."""
    assert config.tokenizer.train is not None
    names, sources = config.tokenizer.train.megabytes, config.ingest.sources
    # How rows become shards, validation and exemplars does not matter to it.
    unread = ("validation_share", "exemplars", "rows_per_shard")
    read = {
        source.name: {name: value for name, value in _source_section(config, number).items() if name not in unread}
        for number, source in enumerate(sources)
        if source.name in names
    }
    versions: dict[str, int | str] = {}
    for source in sources:
        versions |= _source_versions(source) if source.name in names else {}
    section = {"tokenizer": config.tokenizer.model_dump(mode="json"), "sources": read}
    return Step("tokenizer", tokenizer, section | ({"versions": versions} if versions else {}), {}, "cpu")


def _exemplar_source(config: RunConfig) -> str:
    """The only source with `exemplars`. Raises `ConfigError` if none or several have it."""
    names = [source.name for source in config.ingest.sources if source.exemplars]
    if len(names) != 1:
        actual = f"{', '.join(names)} do" if names else "none does"
        raise ConfigError(f"ingest.sources: exactly one must keep `exemplars` for the distillation; {actual}")
    return names[0]


def _held_out_section(config: RunConfig) -> dict[str, Any]:
    """The benchmarks of `[held_out]`, else those that are asked, by name and without their `items` limits.

    All items are held out, also those that the evaluation skips. Generated benchmarks keep `items`, because it is the
    number of items that are generated. Only their questions depend on a seed.
    """
    rows = with_own_files((config.held_out or config.evaluate).model_dump(mode="json")["benchmarks"])
    generated = {row["name"] for row in rows if is_generated(row["name"])}
    listed = [row if row["name"] in generated else row | {"items": None} for row in rows]
    section: dict[str, Any] = {"held_out": {"benchmarks": sorted(listed, key=lambda row: json.dumps(row))}}
    return section | ({"seeds": {"evaluation": config.effective_seeds["evaluation"]}} if generated else {})


def dag_in(store: Store, config: RunConfig) -> list[Step]:
    """The steps of `config` with their keys in `store`. Raises like `resolve_starts` and `build_dag`."""
    return build_dag(resolve_starts(config, store), memory=store.digest_memory)


def resolve_starts(config: RunConfig, store: Store) -> RunConfig:
    """`config` with every `start` replaced by the full id of the checkpoint that it refers to in `store`.

    Raises `ConfigError` for an unknown or ambiguous id, an artifact that is not a checkpoint, and a pretraining that
    would start from a model of another shape or tokenizer.
    """
    sections = {}
    for name in config.trained:
        section = getattr(config, name)
        if section.start is None or section.start in TRAINED:  # a stage of this run: an input like any other
            continue
        try:
            # Checkpoints of this run are excluded: they would change the key of the step when the run is resumed.
            artifact = checkpoint_named(store, section.start, own_labels=TRAINED[TRAINED.index(name) :])
        except ConfigError as error:
            raise ConfigError(f"{name}.start: {error}") from None
        if name == "pretrain" and store.has_files(artifact):  # else the stage checks it after fetching the files
            refuse_other_shape(artifact.folder, artifact.id, config.model, config.tokenizer)
        sections[name] = section.model_copy(update={"start": artifact.full_id})
    return config.model_copy(update=sections) if sections else config


def checkpoint_named(store: Store, start: str, own_labels: Sequence[str]) -> Artifact:
    """The checkpoint that a `start` refers to: an id, `newest` or `newest:LABEL`.

    `newest` skips checkpoints of `own_labels`, the labels that the run itself writes. Raises `ConfigError` for an
    unknown or ambiguous id, and if there is no such checkpoint.
    """
    newest, _, label = start.partition(":")
    if newest != "newest":
        return store.get(start)
    if label in own_labels:
        raise ConfigError(f"this run makes a checkpoint of {label} itself, so the newest changes: give an id")

    def matches(manifest: Mapping[str, Any]) -> bool:
        return label in (manifest["label"], manifest["stage"]) if label else manifest["label"] not in own_labels

    checkpoints = [artifact for artifact in store.list("checkpoint") if matches(artifact.manifest)]
    if not checkpoints:
        others = f" of {label}" if label else f", other than of {', '.join(own_labels)}"
        raise ConfigError(f"no checkpoint{others} in {store.location}: `nautile artifacts checkpoint` lists them")
    return checkpoints[-1]
