"""Ask the Hub and the endpoints, without paying for anything, for what a run's steps name (`nautile plan --online`).

Of each dataset the list of its pinned files and the head of the first; of each endpoint the list of its models.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from nautile.common.errors import ConfigError, Retryable
from nautile.configs.distill import DistillConfig, EmbeddingConfig
from nautile.configs.endpoint import EndpointConfig
from nautile.configs.evaluation import EvaluateConfig, HeldOutConfig
from nautile.configs.ingest import IngestPart
from nautile.configs.training import ProblemsConfig, ProblemSource
from nautile.data.endpoints.endpoint import client_for, lists_model
from nautile.data.endpoints.keys import check_key
from nautile.data.sources.hub import check_hub_split
from nautile.evals.benchmarks.catalogue import BENCHMARKS, COMPOSITES
from nautile.flows.dag import Step
from nautile.flows.readiness import endpoints_of, hub_fault
from nautile.rl.problems import TRAINING_SETS


@dataclass
class HubDataset:
    """A split of a dataset at a commit, and the configuration's field that names it."""

    label: str
    path: str
    subset: str
    split: str
    revision: str


@dataclass
class Answers:
    """What was asked for and answered with yes or no; `silent`: who did not answer; `unclear`: what stays unchecked."""

    confirmed: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    unclear: list[str] = field(default_factory=list)


def hub_datasets(steps: Iterable[Step]) -> list[HubDataset]:
    """The datasets of the Hub that the steps read, each split once."""
    datasets: dict[tuple[str, str, str, str], HubDataset] = {}
    # What is asked and held out has the label of what is asked.
    for step in sorted(steps, key=lambda step: step.stage.name == "held_out"):
        for dataset in _datasets_of(step):
            datasets.setdefault((dataset.path, dataset.subset, dataset.split, dataset.revision), dataset)
    return list(datasets.values())


def remote_endpoints(steps: Sequence[Step]) -> dict[str, EndpointConfig]:
    """The servers that the steps send requests to, by the configuration's section, without this project's own ones."""
    endpoints = {f"endpoints.{name}": e for name, e in endpoints_of(steps).items() if not e.vendor.program}
    for step in steps:
        embedding = EmbeddingConfig.model_validate((step.section.get("index") or {}).get("embedding", {}))
        if step.stage.name in ("index", "distill") and (endpoint := embedding.endpoint) is not None:
            endpoints["index.embedding"] = endpoint
    return endpoints


def ask_online(steps: Sequence[Step], show: Callable[[str], object]) -> Answers:
    """Ask for every dataset and endpoint of the steps; `show`: called with a line before each is asked."""
    answers = Answers()
    _ask_hub(hub_datasets(steps), answers, show)
    endpoints = remote_endpoints(steps)
    show(f"asking {len(endpoints)} endpoints")
    asyncio.run(ask_endpoints(endpoints, answers))
    return answers


def _ask_hub(datasets: Sequence[HubDataset], answers: Answers, show: Callable[[str], object]) -> None:
    if datasets and (fault := hub_fault()):
        answers.silent += [f"{d.label}: {fault}, for {d.path}" for d in datasets]
        return
    for dataset in datasets:
        show(f"asking the Hub for {dataset.path}")
        try:
            check_hub_split(dataset)
        except ConfigError as error:
            answers.refused.append(str(error))
        except Retryable as error:
            answers.silent.append(str(error))
        else:
            answers.confirmed.append(f"{dataset.label}: {dataset.path} at {dataset.revision[:12]}")


async def ask_endpoints(endpoints: dict[str, EndpointConfig], answers: Answers) -> None:
    """Ask all endpoints at once for the list of their models."""
    await asyncio.gather(*(_ask_endpoint(label, config, answers) for label, config in endpoints.items()))


async def _ask_endpoint(label: str, config: EndpointConfig, answers: Answers) -> None:
    try:
        check_key(label.removeprefix("endpoints."), config)
        listed = await _lists_model(label, config)
        # Some servers list their models to anybody: then the answer says nothing of the key.
        public = listed and not config.vendor.needs_key and config.key_variable and await _is_public(label, config)
    except ConfigError as error:
        answers.refused.append(f"{label}: {error}")
    except Retryable as error:
        answers.silent.append(f"{label}: {error}")
    else:
        if not listed:
            answers.unclear.append(f"{label}: {config.address} answers, but does not list its models")
        elif public:
            answers.unclear.append(
                f"{label}: {config.address} has {config.model}, but lists it without {config.key_variable}"
            )
        else:
            answers.confirmed.append(f"{label}: {config.model}")


async def _lists_model(label: str, config: EndpointConfig) -> bool:
    client = client_for(config, lambda headers: None)
    try:
        return await lists_model(label.removeprefix("endpoints."), config, client)
    finally:
        await client.close()


async def _is_public(label: str, config: EndpointConfig) -> bool:
    """Whether the list of models can be read without a key. No answer is no proof that the key was looked at."""
    try:
        await _lists_model(label, config.model_copy(update={"key_variable": ""}))
    except ConfigError:
        return False
    except Retryable:
        return True
    return True


def _datasets_of(step: Step) -> Iterator[HubDataset]:
    section, stage = step.section, step.stage.name
    if stage == "ingest":
        source = IngestPart.model_validate(section["ingest"]).source
        if source.reader == "hub":
            label = f"ingest.sources {source.name!r}"
            yield HubDataset(label, source.path, source.subset, source.split, source.revision)
    if stage == "distill":
        for prompts in DistillConfig.model_validate(section["distill"]).prompt_sets:
            if prompts.source == "hub":
                label = f"distill.prompt_sets {prompts.name!r}"
                yield HubDataset(label, prompts.path, prompts.subset, prompts.split, prompts.revision)
    if stage in ("held_out", "evaluate"):
        model = HeldOutConfig if stage == "held_out" else EvaluateConfig
        for choice in model.model_validate(section[stage]).benchmarks:
            for name in () if choice.path else COMPOSITES.get(choice.name, (choice.name,)):
                if benchmark := BENCHMARKS.get(name):  # a stand-in has no dataset
                    revision = choice.revision or benchmark.pinned
                    label = f"{stage}.benchmarks {name!r}"
                    yield HubDataset(label, benchmark.hub, benchmark.subset, benchmark.split, revision)
    for name in ("problems", "answered", "held_out"):
        if fields := (section.get(stage) or {}).get(name):
            problems = ProblemsConfig.model_validate(fields)
            for entry in problems.sources or (problems,):
                yield from _problem_sets(f"{stage}.{name}", entry)


def _problem_sets(label: str, source: ProblemSource) -> Iterator[HubDataset]:
    if source.prompt_set is not None and source.prompt_set.source == "hub":
        prompts = source.prompt_set
        yield HubDataset(f"{label}.prompt_set", prompts.path, prompts.subset, prompts.split, prompts.revision)
    if training_set := TRAINING_SETS.get(source.source):
        for part in training_set.parts:
            revision = source.revision or training_set.pinned
            yield HubDataset(f"{label} {source.source!r}", part.hub, part.subset, part.split, revision)
