"""Checks before a run of what the operator must provide: API keys, servers, files, accepted Hub terms, enough rows.

Also configured prices that differ from the vendor's, because budgets are computed from them. `nautile plan --online`
asks, without paying for anything, the Hub for the list of each dataset's pinned files and the head of the first, and
each endpoint for the list of its models.
"""

import asyncio
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from nautile.common.errors import ConfigError, Retryable
from nautile.common.input_files import matching_paths
from nautile.common.processes import run_async
from nautile.configs.distill import DistillConfig, EmbeddingConfig, PromptSetConfig
from nautile.configs.endpoint import EndpointConfig
from nautile.configs.evaluation import EvaluateConfig, HeldOutConfig
from nautile.configs.ingest import IngestPart
from nautile.configs.keys import local_files
from nautile.configs.operation import OperationConfig
from nautile.configs.readers import is_on_hub
from nautile.configs.training import ProblemsConfig, ProblemSource
from nautile.data.distill.collect_prompts import check_set_sizes
from nautile.data.distill.prompts import check_prompt_set, count_prompt_rows
from nautile.data.endpoints.chat_types import CallError
from nautile.data.endpoints.endpoint import client_for, lists_model
from nautile.data.endpoints.keys import check_key
from nautile.data.endpoints.own_server import ServerCommand
from nautile.data.endpoints.rate_limit import RateLimiter
from nautile.data.records import REQUIRED_COLUMNS
from nautile.data.sources.hub import COMMIT, check_hub_split
from nautile.evals.benchmarks.registry import BENCHMARKS, parts_of
from nautile.flows.dag import Step
from nautile.rl.problems import TRAINING_SETS

ANSWER_S = 2.0  # time limit for a server to accept a connection
SAME_PRICE = 0.01  # relative difference below which prices count as equal

_Address = tuple[str, str, str]  # configuration field, URL, the model to serve there


def missing_settings(steps: Sequence[Step]) -> list[str]:
    """A line for each key, server, local file or setting that the steps need and that is missing.

    Opens connections to configured servers but sends no request, and does not access the Hub: `ask_online` does.
    """
    lines: list[str] = []
    addresses: list[_Address] = []
    # One line per variable: several endpoints of a vendor share a key. And one per path, which several stages read.
    keys: dict[str, list[str]] = {}
    files: dict[str, list[str]] = {}
    for name, endpoint in endpoints_of(steps).items():
        if endpoint.key_variable:
            keys.setdefault(endpoint.key_variable, []).append(f"endpoints.{name}")
        if endpoint.command:
            lines += [f"endpoints.{name}: {fault}" for fault in ServerCommand.of(endpoint).faults()]
        elif endpoint.vendor.needs_url:
            addresses.append((f"endpoints.{name}.url", endpoint.url, endpoint.model))
    for step in steps:
        section = step.section
        for path in sorted(local_files(section)):
            files.setdefault(path, []).append(step.stage.name)
        if step.stage.name in ("index", "distill") and "index" in section:
            embedding = EmbeddingConfig.model_validate(section["index"].get("embedding", {}))
            if embedding.key_variable:
                keys.setdefault(embedding.key_variable, []).append("index.embedding")
            if embedding.endpoint is not None and embedding.endpoint.vendor.needs_url:
                addresses.append(("index.embedding.url", embedding.url, embedding.model))
        if step.stage.name == "ingest":
            source = IngestPart.model_validate(section["ingest"]).source
            # A branch moves. The key would stay the same while the text changes.
            if is_on_hub(source.reader) and not COMMIT.fullmatch(source.revision):
                lines.append(f"{source.label}: set `revision` to a commit of {source.path}")
        if step.stage.name == "distill":
            for prompt_set in DistillConfig.model_validate(section["distill"]).prompt_sets:
                try:
                    check_prompt_set(prompt_set)
                except ConfigError as error:
                    lines.append(str(error))
        if step.stage.name in ("held_out", "evaluate"):
            names = [part for row in section[step.stage.name]["benchmarks"] for part in parts_of(row["name"])]
            gated = [name for name in names if (entry := BENCHMARKS.get(name)) and entry.gated]
            if gated:
                from huggingface_hub import get_token  # takes 0.5 s to import

                if not get_token():
                    lines += [
                        f"HF_TOKEN is not set: {name} is gated, accept its terms on the Hub first" for name in gated
                    ]
    for path, readers in files.items():
        try:
            if not matching_paths(path):
                lines.append(f"no file matches {path!r} here, a path of {', '.join(dict.fromkeys(readers))}")
        except ConfigError as error:
            lines.append(str(error))
    lines += [
        f"{variable} is not set in the environment: the key of {', '.join(dict.fromkeys(users))}"
        for variable, users in keys.items()
        if not os.environ.get(variable)
    ]
    return list(dict.fromkeys([*lines, *_silent_addresses(dict.fromkeys(addresses))]))


def missing_webhook(operation: OperationConfig) -> list[str]:
    """A line if `operation.notify` names an environment variable that is not set."""
    variable = operation.notify
    if not variable or os.environ.get(variable):
        return []
    return [f"{variable} is not set in the environment: operation.notify has nowhere to send messages"]


def has_prompt_files(step: Step) -> bool:
    """Whether the step reads prompt sets from files, whose rows can be counted before the run starts."""
    sets = (step.section.get("distill") or {}).get("prompt_sets", ())
    return any(prompt_set["source"] != "wikipedia" for prompt_set in sets)


def refuse_missing_rows(steps: Iterable[Step]) -> list[str]:
    """Raise `ConfigError` if a distillation needs more prompts of a set than it has rows (for the Hub: by its counts).

    Returns a line for each set whose rows cannot be counted now.
    """
    lines: list[str] = []
    for step in steps:
        if step.stage.name != "distill":
            continue
        config = DistillConfig.model_validate(step.section["distill"])
        rows: dict[str, int] = {}
        fault = hub_fault() if any(prompt_set.source == "hub" for prompt_set in config.prompt_sets) else None
        lines += [f"rows of the prompt sets not counted: {fault}"] if fault else []
        with tempfile.TemporaryDirectory() as folder:
            for prompt_set in config.prompt_sets:
                if fault is None or prompt_set.source != "hub":
                    try:
                        rows[prompt_set.name] = count_prompt_rows(prompt_set, Path(folder))
                    except (ConfigError, Retryable) as error:
                        lines.append(f"rows not counted: {error}")
        check_set_sizes(config, rows)
    return lines


def price_differences(steps: Sequence[Step]) -> list[str]:
    """A line for each endpoint whose configured prices differ from the vendor's list (package genai-prices)."""
    from genai_prices import Usage, __version__, calc_price  # takes 0.3 s to import

    lines = []
    million = Usage(input_tokens=1_000_000, output_tokens=1_000_000)
    for name, endpoint in endpoints_of(steps).items():
        vendor = endpoint.vendor
        if endpoint.is_own:
            continue
        try:
            if vendor.price_list:
                list_price = calc_price(million, endpoint.model, provider_id=vendor.price_list)
            else:
                list_price = calc_price(million, endpoint.model, provider_api_url=endpoint.address)
        except LookupError:  # a private server, or a model that is not listed
            continue
        configured = (endpoint.dollars_per_million_in, endpoint.dollars_per_million_out)
        prices = (float(list_price.input_price), float(list_price.output_price))
        if any(abs(own - other) > SAME_PRICE * other for own, other in zip(configured, prices, strict=True)):
            lines.append(
                f"endpoints.{name}: ${configured[0]:g} and ${configured[1]:g} a million tokens in and out are "
                f"configured for {endpoint.model}, {list_price.provider.name} lists ${prices[0]:g} and ${prices[1]:g} "
                f"(genai-prices {__version__})"
            )
    return lines


def endpoints_of(steps: Iterable[Step]) -> dict[str, EndpointConfig]:
    """The endpoints that the steps may call, fallbacks included."""
    sections = [step.section.get("endpoints", {}) for step in steps]
    return {name: EndpointConfig.model_validate(e) for endpoints in sections for name, e in endpoints.items()}


def _silent_addresses(addresses: Iterable[_Address]) -> list[str]:
    """A line for each address where no server accepts a connection."""
    addresses = list(addresses)
    # All at once: ten servers that do not answer take `ANSWER_S` and not ten times that.
    with ThreadPoolExecutor(8) as threads:
        errors = threads.map(lambda address: connection_error(address[1]), addresses)
    return [
        f"nothing answers at {url} ({error}): serve {model} there, or set {field}"
        for (field, url, model), error in zip(addresses, errors, strict=True)
        if error is not None
    ]


def hub_fault() -> str | None:
    """That the Hub does not answer, and why; None if it does. To be asked first: its client retries for two minutes."""
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    error = connection_error(hub)
    return f"{hub} does not answer ({error})" if error else None


def connection_error(url: str) -> str | None:
    """The error of opening a connection to the server; None if it succeeds, or if a proxy would open it."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    # Behind a proxy a direct connection fails although requests would succeed.
    if parts.scheme in getproxies() and not proxy_bypass(host):
        return None
    try:
        socket.create_connection((host, parts.port or (443 if parts.scheme == "https" else 80)), ANSWER_S).close()
    except (OSError, ValueError) as error:
        return str(error)
    return None


@dataclass
class HubDataset:
    """A split of a dataset at a commit, and the configuration's field that names it.

    `columns`: those that the field needs, as far as it names them; of a benchmark only its parser knows.
    """

    label: str
    path: str
    subset: str
    split: str
    revision: str
    columns: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What is read, and at which commit."""
        return f"{' '.join(filter(None, (self.path, self.subset)))} at {self.revision[:12]}"


@dataclass
class Reached:
    """A dataset, source or endpoint, and what is known of it; None: not known. `fault`: why it cannot be used."""

    label: str
    what: str  # the dataset at its commit, or the model at its address
    fault: str | None = None
    gated: bool | None = None
    files: int | None = None
    rows: int | None = None  # estimated, if there are several files
    columns: tuple[str, ...] | None = None
    languages: dict[str, float] | None = None  # share of the rows that were read
    serves: str | None = None  # the model that its reply names
    requests_per_minute: float | None = None  # by its headers
    batch: bool | None = None  # whether its batch interface answers, if it is used
    dollars_per_million: tuple[float, float] | None = None  # in and out


@dataclass
class Answers:
    """What was asked for and answered with yes or no; `silent`: who did not answer; `unclear`: what stays unchecked."""

    confirmed: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    unclear: list[str] = field(default_factory=list)
    reached: list[Reached] = field(default_factory=list, compare=False)  # everything that was asked for

    def refuse(self, reached: Reached, error: ConfigError | Retryable) -> None:
        """Record that something cannot be used, or did not answer."""
        reached.fault = f"{reached.label}: {str(error).removeprefix(f'{reached.label}: ')}"
        (self.silent if isinstance(error, Retryable) else self.refused).append(reached.fault)


def hub_datasets(steps: Iterable[Step]) -> list[HubDataset]:
    """The datasets of the Hub that the steps read, each split once."""
    datasets: dict[tuple[str, str, str, str], HubDataset] = {}
    # What is asked and held out has the label of what is asked.
    for step in sorted(steps, key=lambda step: step.stage.name == "held_out"):
        for dataset in _datasets_of(step):
            known = datasets.setdefault((dataset.path, dataset.subset, dataset.split, dataset.revision), dataset)
            known.columns = tuple(dict.fromkeys([*known.columns, *dataset.columns]))
    return list(datasets.values())


def remote_endpoints(steps: Sequence[Step]) -> dict[str, EndpointConfig]:
    """The servers that the steps send requests to, by the configuration's section, without this project's own ones."""
    endpoints = {f"endpoints.{name}": e for name, e in endpoints_of(steps).items() if not e.is_own}
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
    run_async(ask_endpoints(endpoints, answers))
    return answers


def _ask_hub(datasets: Sequence[HubDataset], answers: Answers, show: Callable[[str], object]) -> None:
    if datasets and (fault := hub_fault()):
        for dataset in datasets:
            reached = Reached(dataset.label, dataset.name)
            answers.reached.append(reached)
            answers.refuse(reached, Retryable(f"{fault}, for {dataset.path}"))
        return
    gated = {entry.hub for entry in BENCHMARKS.values() if entry.gated}
    for dataset in datasets:
        show(f"asking the Hub for {dataset.path}")
        reached = Reached(dataset.label, dataset.name, gated=dataset.path in gated)
        answers.reached.append(reached)
        try:
            facts = check_hub_split(dataset)
            reached.files, reached.rows, reached.columns = facts.files, facts.rows, facts.columns
            columns = dataset.columns if facts.columns is None else facts.columns
            if missing := [name for name in dataset.columns if name not in columns]:
                raise ConfigError(f"{dataset.path} has no column {', '.join(missing)}, but {', '.join(columns)}")
        except ConfigError as error:
            # Whose terms were not accepted is told so in many ways.
            terms = "; it is gated: accept its terms on the Hub and set HF_TOKEN"
            more = terms if reached.gated and "gated" not in str(error) else ""
            answers.refuse(reached, ConfigError(f"{error}{more}"))
        except Retryable as error:
            answers.refuse(reached, error)
        else:
            rows = "" if facts.rows is None else f", {'about ' if facts.files > 1 else ''}{facts.rows:,} rows"
            answers.confirmed.append(f"{dataset.label}: {dataset.path} at {dataset.revision[:12]}{rows}")


async def ask_endpoints(endpoints: dict[str, EndpointConfig], answers: Answers) -> None:
    """Ask all endpoints at once for the list of their models."""
    await asyncio.gather(*(_ask_endpoint(label, config, answers) for label, config in endpoints.items()))


async def _ask_endpoint(label: str, config: EndpointConfig, answers: Answers) -> None:
    reached = Reached(label, f"{config.model} at {config.address}")
    reached.dollars_per_million = (config.dollars_per_million_in, config.dollars_per_million_out)
    answers.reached.append(reached)
    try:
        check_key(label.removeprefix("endpoints."), config)
        listed = await _lists_model(label, config, reached)
        # Some servers list their models to anybody: then the answer says nothing of the key.
        public = listed and not config.vendor.needs_key and config.key_variable and await _is_public(label, config)
    except ConfigError as error:
        key = f" (the key of {config.key_variable})" if config.key_variable and "Error code: 40" in str(error) else ""
        answers.refuse(reached, ConfigError(f"{error}{key}"))
    except Retryable as error:
        answers.refuse(reached, error)
    else:
        if not listed:
            answers.unclear.append(f"{label}: {config.address} answers, but does not list its models")
        elif public:
            answers.unclear.append(
                f"{label}: {config.address} has {config.model}, but lists it without {config.key_variable}"
            )
        else:
            limit = reached.requests_per_minute
            quota = "" if limit is None else f", {limit:,.0f} requests a minute"
            answers.confirmed.append(f"{label}: {config.model}{quota}")


async def _lists_model(label: str, config: EndpointConfig, reached: Reached | None = None) -> bool:
    limiter = RateLimiter()
    client = client_for(config, limiter.on_headers)
    try:
        listed = await lists_model(label.removeprefix("endpoints."), config, client)
        if reached is not None and config.mode == "batch":
            await client.find("none has this label", time.time())  # lists its jobs
            reached.batch = True
    except CallError as error:
        kind = Retryable if error.retryable else ConfigError
        raise kind(f"its batch interface does not answer: {error.message}") from None
    finally:
        await client.close()
    if reached is not None:
        reached.requests_per_minute = limiter.stated_per_minute
    return listed


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
        if is_on_hub(source.reader):
            label = f"ingest.sources {source.name!r}"
            columns = [*REQUIRED_COLUMNS[source.form], *(["language"] if source.languages else [])]
            columns += ["score"] if source.minimum_score is not None else []
            needed = tuple((source.columns or {}).get(name, name) for name in columns)
            yield HubDataset(label, source.path, source.subset, source.split, source.revision, needed)
    if stage == "distill":
        for prompts in DistillConfig.model_validate(section["distill"]).prompt_sets:
            if prompts.source == "hub":
                yield _prompts_of(f"distill.prompt_sets {prompts.name!r}", prompts)
    if stage in ("held_out", "evaluate"):
        model = HeldOutConfig if stage == "held_out" else EvaluateConfig
        for choice in model.model_validate(section[stage]).benchmarks:
            for name in () if choice.path else parts_of(choice.name):
                if (benchmark := BENCHMARKS.get(name)) and benchmark.hub:
                    revision = choice.revision or benchmark.commit
                    label = f"{stage}.benchmarks {name!r}"
                    yield HubDataset(label, benchmark.hub, benchmark.subset, benchmark.split, revision)
    for name in ("problems", "answered", "held_out"):
        if fields := (section.get(stage) or {}).get(name):
            problems = ProblemsConfig.model_validate(fields)
            for entry in problems.sources or (problems,):
                yield from _problem_sets(f"{stage}.{name}", entry)


def _prompts_of(label: str, prompts: PromptSetConfig) -> HubDataset:
    needed = tuple(prompts.columns.values()) if prompts.form == "columns" else ()
    needed = ("instruction",) if prompts.form == "instruction" else needed
    return HubDataset(label, prompts.path, prompts.subset, prompts.split, prompts.revision, needed)


def _problem_sets(label: str, source: ProblemSource) -> Iterator[HubDataset]:
    if source.prompt_set is not None and source.prompt_set.source == "hub":
        yield _prompts_of(f"{label}.prompt_set", source.prompt_set)
    if training_set := TRAINING_SETS.get(source.source):
        for part in training_set.parts:
            revision = source.revision or training_set.pinned
            yield HubDataset(f"{label} {source.source!r}", part.hub, part.subset, part.split, revision)
