"""What a form may not set: what starts processes, and which environment variables are read for whom."""

import pytest

from common.errors import ConfigError
from configs.forms import WORKER, ServedConfig, served_here
from configs.load import load, load_form
from tests.support.stages.toy_stages import TOY

ELSEWHERE = "http://elsewhere.example/v1"
COMMAND = "sh -c 'id > owned; {member}'"


@pytest.fixture
def serve(monkeypatch):
    """`serve(*changes)`: this process is a worker that serves the toy configuration, by the name `toy`, so changed."""

    def serve(*changes: str) -> None:
        table = load(TOY, changes).model_dump(mode="json", exclude_defaults=True)
        monkeypatch.setenv(WORKER, ServedConfig(name="toy", table=table, base=table).model_dump_json())

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


def test_a_form_names_no_environment_variable_but_the_workers_with_its_address(serve):
    serve()
    assert load_form("toy")[0].endpoints["local"].key_variable == "TOY_KEY"
    url = load(TOY).endpoints["local"].url
    assert load_form("toy", [f"endpoints.local.url={url}/other", "endpoints.local.dollars_per_million_in=9.0"])
    for override in (
        f"endpoints.local.url={ELSEWHERE}",
        "endpoints.local.kind=mistral",
        "endpoints.local.key_variable=AWS_SECRET_ACCESS_KEY",
    ):
        with pytest.raises(ConfigError, match=r"overrides: endpoints\.local\.key_variable: a form may not name"):
            load_form("toy", [override])
    embedding = f'index.embedding={{kind="openai", model="m", url="{ELSEWHERE}", key_variable="TOY_KEY"}}'
    with pytest.raises(ConfigError, match=r"overrides: index\.embedding\.key_variable: .*elsewhere\.example"):
        load_form("toy", [embedding])
    with pytest.raises(ConfigError, match=r"overrides: operation\.notify: .* 'TOY_KEY': it comes from"):
        load_form("toy", ["operation.notify=TOY_KEY"])
    no_key = f'endpoints.local={{kind="openai", model="m", url="{ELSEWHERE}"}}'
    assert load_form("toy", [no_key])[0].endpoints["local"].url == ELSEWHERE  # no key is sent there


def test_a_form_may_name_the_variables_of_shipped_configurations(serve):
    serve()
    vendor = 'endpoints.vendor={kind="mistral", model="m", key_variable="MISTRAL_API_KEY"}'
    assert load_form("toy", [vendor])[0].endpoints["vendor"].key_variable == "MISTRAL_API_KEY"
    with pytest.raises(ConfigError, match="elsewhere"):
        load_form("toy", [vendor, f"endpoints.vendor.url={ELSEWHERE}"])


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
