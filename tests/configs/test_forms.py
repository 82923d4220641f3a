"""What a form may not set: what starts processes, and which environment variables are read for whom."""

import pytest
from pydantic import TypeAdapter, ValidationError

from common.errors import ConfigError
from configs.forms import WORKER, this_worker, worker_settings
from configs.load import NamedConfig, load
from tests.support.toy_stages import TOY

FORM = TypeAdapter(NamedConfig)
ELSEWHERE = {"kind": "openai", "model": "m", "url": "http://elsewhere.example/v1"}
COMMAND = "sh -c 'id > owned; {member}'"


@pytest.fixture
def form():
    """The values of a form of the toy configuration, as JSON has them."""
    return load(TOY).model_dump(mode="json", exclude_defaults=True)


@pytest.fixture
def serve(monkeypatch):
    """`serve(table)`: this process is a worker that serves the configuration."""

    def serve(table):
        monkeypatch.setenv(WORKER, worker_settings(table).model_dump_json(exclude_defaults=True))

    return serve


@pytest.mark.parametrize(
    ("field", "section"),
    [
        ("launch.command", {"command": COMMAND, "processes": 2}),
        ("launch.coordinator", {"coordinator": "elsewhere.example:80"}),
        ("launch.ray_address", {"engine": "processes", "ray_address": "ray://elsewhere.example:80"}),
        ("launch.rm", {"rm": 1}),
        ("telemetry.otlp", {"otlp": "http://elsewhere.example"}),
    ],
)
def test_what_starts_processes_and_where_metrics_go_is_the_workers(form, serve, field, section):
    serve(form)
    with pytest.raises(ValidationError, match=f"config.{field}: a form may not set it: it comes from the config"):
        FORM.validate_python({**form, field.partition(".")[0]: section})


def test_a_run_of_a_form_has_the_sections_of_its_worker(form, serve):
    serve(form)
    assert FORM.validate_python(form) == load(TOY)
    serve({**form, "launch": {"command": COMMAND, "processes": 3}, "telemetry": {"tensorboard": "curves"}})
    for launch in ({}, {"processes": 3}, {"processes": 1, "engine": "processes", "command": COMMAND}):
        config = FORM.validate_python({**form, "seed": 5, "launch": launch})
        assert (config.seed, config.telemetry.tensorboard) == (5, "curves")
        assert (config.launch.command, config.launch.processes) == (COMMAND, 3)


def test_a_form_names_no_environment_variable_but_the_workers_with_its_address(form, serve):
    own = form["endpoints"]["local"]
    with pytest.raises(ValidationError, match=r"config\.endpoints\.local\.key_variable: .* 'TOY_KEY' with the address"):
        FORM.validate_python(form)  # this worker serves nothing
    serve(form)
    assert FORM.validate_python(form).endpoints["local"].key_variable == "TOY_KEY"
    dearer = {**own, "url": f"{own['url']}/other", "dollars_per_million_in": 9.0}
    assert FORM.validate_python({**form, "endpoints": {"local": dearer}})
    for endpoint in (
        {**own, "url": ELSEWHERE["url"]},
        {**own, "kind": "mistral"},
        {**own, "key_variable": "AWS_SECRET_ACCESS_KEY"},
    ):
        with pytest.raises(ValidationError, match=r"config\.endpoints\.local\.key_variable: a form may not name"):
            FORM.validate_python({**form, "endpoints": {"local": endpoint}})
    embedding = {"index": {"embedding": {**ELSEWHERE, "key_variable": "TOY_KEY"}}}
    with pytest.raises(ValidationError, match=r"config\.index\.embedding\.key_variable: .*elsewhere\.example"):
        FORM.validate_python({**form, **embedding})
    with pytest.raises(ValidationError, match=r"config\.operation\.notify: .* 'TOY_KEY': it comes from"):
        FORM.validate_python({**form, "operation": {"notify": "TOY_KEY"}})
    assert FORM.validate_python({**form, "endpoints": {"local": {**ELSEWHERE}}})  # no key is sent there


def test_a_form_may_name_the_variables_of_shipped_configurations(form, serve):
    serve(form)
    vendor = {"kind": "mistral", "model": "m", "key_variable": "MISTRAL_API_KEY"}
    both = {**form["endpoints"], "vendor": vendor}
    assert FORM.validate_python({**form, "endpoints": both}).endpoints["vendor"].key_variable == "MISTRAL_API_KEY"
    both["vendor"] = {**vendor, "url": ELSEWHERE["url"]}
    with pytest.raises(ValidationError, match="elsewhere"):
        FORM.validate_python({**form, "endpoints": both})


def test_a_configuration_given_by_its_name_is_not_restricted(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(f'extends = "{TOY}"\n[launch]\nprocesses = 2\ncommand = "ssh host{{host}} {{member}}"\n')
    assert FORM.validate_python(str(path)).launch.processes == 2


def test_the_form_itself_has_no_such_sections():
    schema = FORM.json_schema()
    assert not {"launch", "telemetry"} & schema["properties"].keys()
    assert "reason" in schema["properties"]


def test_settings_of_a_worker_that_cannot_be_read_are_refused(monkeypatch):
    monkeypatch.setenv(WORKER, "{")
    with pytest.raises(ConfigError, match="NAUTILE_WORKER is not what"):
        this_worker()
