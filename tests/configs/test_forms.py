"""What a form may not set: gates, budgets, what starts processes, who is asked, and which files are read."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from nautile.common.errors import ConfigError
from nautile.configs.base import Section
from nautile.configs.forms import WORKER, ServedConfig, is_workers, refuse_in_form, served_here
from nautile.configs.keys import _section_in
from nautile.configs.load import load, load_form
from nautile.configs.schema import RunConfig
from tests.support.stages.toy_stages import TOY

ELSEWHERE = "http://elsewhere.example/v1"
COMMAND = "sh -c 'id > owned; {member}'"


@pytest.fixture
def serve(monkeypatch):
    """`serve(*changes)`: this process is a worker that serves the toy configuration, by the name `toy`, so changed."""

    def serve(*changes: str) -> None:
        served = load(TOY, changes)
        monkeypatch.setenv(WORKER, ServedConfig.of("toy", served, served).model_dump_json())

    return serve


@pytest.mark.parametrize(
    "override",
    [
        f"launch.command={COMMAND}",
        "launch.coordinator=elsewhere.example:80",
        'launch={ray_address="ray://elsewhere.example:80"}',
        "launch.rm=1",
        "telemetry.otlp=http://elsewhere.example",
    ],
)
def test_what_starts_processes_and_where_metrics_go_is_the_workers(serve, override):
    serve()
    section = override.partition("=")[0].partition(".")[0]
    with pytest.raises(ConfigError, match=f"overrides: {section}: a form may not set it: it comes from the config"):
        load_form("toy", [override])


def test_a_run_of_a_form_has_the_sections_of_its_worker(serve):
    serve("launch.processes=3", f'launch.command="{COMMAND}"', "telemetry.tensorboard=curves")
    config, base = load_form("toy", ["seed=5", "launch.processes=3"])
    assert (config.seed, config.telemetry.tensorboard) == (5, "curves")
    assert (config.launch.command, config.launch.processes) == (COMMAND, 3)
    assert base.seed == load(TOY).seed


ENDPOINT = f'{{kind="openai", model="m", url="{ELSEWHERE}"}}'
SET = '{name="own", source="jsonl", path="/home/*/.ssh/*"}'
REFUSED = {
    "operation.index.approve=false": "operation",
    "operation={}": "operation",
    'operation.index={at_budget="go_on"}': "operation",
    "operation.notify=TOY_KEY": "operation",
    "resources.accelerator=9": "resources",
    "retention.newest=1": "retention",
    "deploy.cpu.pool=elsewhere": "deploy",
    f"endpoints.local.url={ELSEWHERE}": "endpoints",
    "endpoints.local.kind=mistral": "endpoints",
    "endpoints.local.key_variable=AWS_SECRET_ACCESS_KEY": "endpoints",
    "endpoints.local.model=a-dearer-one": "endpoints",
    "endpoints.local.dollars_per_million_in=0.000001": "endpoints",
    "endpoints.local.budget_dollars=0": "endpoints",
    f"endpoints.another={ENDPOINT}": "endpoints",
    f'index.embedding={{kind="openai", model="m", url="{ELSEWHERE}"}}': "index.embedding",
    "distill.budget_dollars=0": "distill.budget_dollars",
    "distill.budget_tokens=0": "distill.budget_tokens",
    "distill.teachers.0.endpoint=other": "distill.teachers.0.endpoint",
    'distill.teachers=[{endpoint="local"}, {endpoint="other"}]': "distill.teachers.1.endpoint",
    'distill.probe={endpoints=["local", "other"]}': "distill.probe.endpoints",
    f"distill.prompt_sets=[{SET}]": "distill.prompt_sets.0.path",
    "distill.prompt_sets.1.path=/etc/passwd": "distill.prompt_sets.1.path",
    "ingest.sources.1.exemplars=9": "ingest.sources.1.exemplars",
    # Another column of the worker's files, which would go to the teachers.
    'distill.prompt_sets.1={name="mine", source="jsonl", path="mine.jsonl", form="columns", columns={query="ssn"}}': (
        "distill.prompt_sets.1.columns"
    ),
    "ingest.sources.0={name='wikipedia', reader='jsonl', form='web', path='/etc/*'}": "ingest.sources.0.path",
    'align.judge={endpoint="other"}': "align.judge.endpoint",
    'align.judge.compare=["local", "other"]': "align.judge.compare",
    'align.problems={source="jsonl", path="own.jsonl"}': "align.problems.path",
    'align.answered={source="jsonl", path="own.jsonl"}': "align.answered.path",
    f'align.problems={{source="prompts", prompt_set={SET}}}': "align.problems.prompt_set.path",
    'reason.problems={sources=[{source="jsonl", path="own.jsonl"}]}': "reason.problems.sources.0.path",
    'self_distill.problems={source="jsonl", path="own.jsonl"}': "self_distill.problems.path",
    'evaluate.held_out={source="jsonl", path="own.jsonl"}': "evaluate.held_out.path",
    'evaluate.benchmarks=[{name="gsm8k", path="own.jsonl"}]': "evaluate.benchmarks.0.path",
    'evaluate.models=[{endpoint="local"}]': "evaluate.models.0.endpoint",
    "evaluate.budget_dollars=0": "evaluate.budget_dollars",
}
GATED = (
    "operation.index.approve=true",
    'operation.distill.at_budget="pause"',
    "endpoints.local.budget_dollars=2.0",
    f"endpoints.other={ENDPOINT}",
    "distill.budget_dollars=5.0",
    "distill.budget_tokens=1000",
    'distill.prompt_sets=[{name="wikipedia", source="wikipedia"}, {name="mine", source="jsonl", path="mine.jsonl"}]',
    "evaluate.budget_dollars=1.0",
)


@pytest.mark.parametrize(("override", "path"), REFUSED.items(), ids=REFUSED.values())
def test_gates_budgets_addresses_and_files_are_the_workers(serve, override, path):
    serve(*GATED)
    with pytest.raises(ConfigError, match=rf"^overrides: {re.escape(path)}: a form may not set it: it comes from"):
        load_form("toy", [override])


@pytest.mark.parametrize(
    "override",
    [
        "distill.budget_dollars=5",  # as it is
        'distill.teachers=[{endpoint="local", up_to=0.5}, {endpoint="local"}]',
        # An entry has moved to another place, and another is left out.
        'distill.prompt_sets=[{name="renamed", source="jsonl", path="mine.jsonl", weight=2.0}]',
        'distill.prompt_sets=[{name="wikipedia", source="wikipedia"}]',
        'reason.problems={source="gsm8k", count=4}',
        'evaluate.benchmarks=[{name="gsm8k", items=4}]',
        "ingest.sources.1.records=9",
        "schedule.margin=0.02",
    ],
)
def test_a_form_may_set_the_rest_and_the_same_values_in_another_order(serve, override):
    serve(*GATED)
    config, _ = load_form("toy", [override])
    assert (config.operation.index.approve, config.distill.budget_dollars) == (True, 5.0)


def test_the_gates_and_budgets_of_the_served_configuration_hold_for_another_that_a_form_names(serve, tmp_path):
    serve(*GATED)
    path = tmp_path / "own.toml"
    own = "[operation.reason]\napprove = true\n[distill]\nbudget_tokens = 10\n[evaluate]\nbudget_dollars = 9.0\n"
    path.write_text(f'extends = "{TOY}"\n{own}', encoding="utf-8")
    config, _ = load_form(str(path), ["seed=3"])
    operation = config.operation
    assert [name for name in ("index", "distill", "reason") if operation.of(name).approve] == ["index", "reason"]
    assert (operation.distill.at_budget, operation.index.at_budget) == ("pause", "go_on")
    assert (config.distill.budget_dollars, config.distill.budget_tokens) == (5.0, 10)
    assert (config.evaluate.budget_dollars, config.seed) == (1.0, 3)


def leaves(model: type[Section], prefix: str = "", workers: bool = False) -> Iterator[tuple[str, Any, bool]]:
    """(dotted path, field, whether it is the worker's) of every field of a section and of its sections."""
    for name, field in model.model_fields.items():
        place, owned = f"{prefix}{name}", workers or is_workers(field)
        if inner := _section_in(field.annotation):
            yield from leaves(inner, f"{place}.", owned)
        else:
            yield place, field, owned


# What the names say, however a section is called.
OWN_NAMES = re.compile(
    r"(^|\.)(\w*(url|path|variable|budget_\w+|endpoints?|dollars\w*|command|approve|at_budget)|notify)$"
)
# Free text that names no place and nobody: names, templates, licences, ids of the store, commits and parts of the Hub.
HARMLESS = re.compile(
    r"^(name|model\.pattern|ingest\.sources\.reader|schedule\.\w+|\w+\.start|reason\.objective|\w+\.reward"
    r"|distill\.teachers\.template|pretrain\.phases\.\w+|\w+\.policy\.train"
    r"|.*\.(name|license|subset|split|revision|frame|columns|languages|parameters|megabytes))$"
)


def test_every_field_of_the_configuration_is_decided():
    """A new field fails this test: if it is a gate, a limit of money, a place, or who is asked, it is a `Worker`."""
    for path, field, workers in leaves(RunConfig):
        if OWN_NAMES.search(path):
            assert workers, f"{path}: must be a `Worker`"
        if re.search(r"\bstr\b|\bAny\b", str(field.annotation)) and not HARMLESS.match(path):
            assert workers, f"{path}: free text is a `Worker`'s, or named as harmless in this test"


def values(table: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in the table that is neither a table nor a list."""
    entries = table.items() if isinstance(table, dict) else enumerate(table) if isinstance(table, tuple) else None
    if entries is None or not table:
        yield path
        return
    for name, value in entries:
        yield from values(value, (*path, name))


def whole() -> RunConfig:
    """A configuration that has every section."""
    sections = (
        'align.answered={tasks=[{name="chain_sum"}]}',
        'align.problems={source="prompts", prompt_set={name="mine", source="jsonl", path="mine.jsonl"}}',
        'reason.problems={sources=[{source="jsonl", path="a.jsonl"}, {tasks=[{name="chain_sum"}]}]}',
        'distill.probe={endpoints=["local", "other"]}',
        'evaluate.benchmarks=[{name="gsm8k", path="b.jsonl"}]',
        'evaluate.models=[{endpoint="local"}]',
        "deploy.cpu={}",
        "telemetry.tensorboard=curves",
        'operation.notify="HOOK"',
        'operation.alerts=[{metric="loss", above=9.0}]',
    )
    return load(TOY, (*GATED, *sections))


WHOLE = whole()
OWNED = {path for path, _, workers in leaves(RunConfig) if workers}


def is_owned(path: tuple[Any, ...]) -> bool:
    """Whether a path of `values` leads to a field of the worker's; what stands inside a field is the field's."""
    names = [str(part) for part in path if not isinstance(part, int)]
    names = [*names[:1], *names[2:]] if names[0] in ("endpoints", "deploy") else names
    return any(".".join(names[:length]) in OWNED for length in range(1, len(names) + 1))


def changed(value: Any, change: tuple[Any, ...]) -> Any:
    """The section or value with another text at the path `change`; nothing is validated."""
    if not change:
        return "another"
    first, rest = change[0], change[1:]
    if isinstance(value, Section):
        return value.model_copy(update={first: changed(getattr(value, first), rest)})
    if isinstance(value, dict):
        return value | {first: changed(value[first], rest)}
    return (*value[:first], changed(value[first], rest), *value[first + 1 :])


def is_refused(change: tuple[Any, ...]) -> bool:
    try:
        refuse_in_form(WHOLE, changed(WHOLE, change))
    except ConfigError as error:
        return "a form may not set it" in str(error)
    return False


def test_a_change_is_refused_if_and_only_if_a_field_of_the_workers_is_in_it():
    changes = [*values(WHOLE.model_dump())]
    assert len(changes) > 300
    assert [change for change in changes if is_refused(change) != is_owned(change)] == []


def test_another_configuration_of_the_worker_keeps_its_own_sections(serve, tmp_path):
    serve()
    path = tmp_path / "own.toml"
    path.write_text(f'extends = "{TOY}"\nseed = 3\n[launch]\nprocesses = 2\ncommand = "ssh host{{host}} {{member}}"\n')
    config, base = load_form(str(path))
    assert (config.launch.processes, config.seed, base.seed) == (2, 3, 0)


@pytest.mark.parametrize(
    ("name", "override", "message"),
    [
        ("nowhere", "seed=1", "config: no configuration 'nowhere'"),
        ("toy", "reason.policy.steps=-5", r"overrides: `reason\.policy\.steps`: Input should be greater"),
        ("toy", "reason.policy.stepz=5", r"overrides: unknown key `reason\.policy\.stepz` \(did you mean 'steps'\?\)"),
        ("toy", "reason.policy.steps", r"overrides: reason\.policy\.steps: write it as FIELD=VALUE"),
        (
            "toy",
            "ingest.sources.9.records=5",
            r"overrides: ingest\.sources\.9\.records=5: '9' is not an index of a list",
        ),
    ],
)
def test_a_refusal_names_the_forms_field_and_that_of_the_configuration(serve, name, override, message):
    serve()
    with pytest.raises(ConfigError, match=message):
        load_form(name, [override])


def test_settings_of_a_worker_that_cannot_be_read_are_refused(monkeypatch):
    monkeypatch.setenv(WORKER, "{")
    with pytest.raises(ConfigError, match="NAUTILE_WORKER is not a value"):
        served_here()
