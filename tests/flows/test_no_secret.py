"""A planted key, in the environment of a run whose endpoint names it, is in nothing that the run leaves or shows."""

import json

import pytest

from configs.load import load
from flows.operate.deployments import deployments
from tests.support.prefect_calls import request
from tests.support.toy_stages import TOY

KEY = "sk-planted-2718281828459045"
NAMED = 'kind = "openai"\nurl = "http://127.0.0.1:9/v1"\nkey_variable = "PLANTED_KEY"\nmodel = "toy"'


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("keyed") / "keyed.toml"
    toy = TOY.read_text(encoding="utf-8")
    changed = toy.replace('kind = "embedded"\nmodel = "SmolLM2-135M-Instruct"', NAMED)
    assert changed != toy
    path.write_text(changed.replace('name = "toy"', 'name = "keyed"', 1), encoding="utf-8")
    return path


@pytest.mark.slow
def test_a_planted_key_is_in_no_file_no_parameter_and_no_line(bench, config, tmp_path):
    keyed = {"PLANTED_KEY": KEY, "PREFECT_LOGGING_LEVEL": "DEBUG"}
    ran = bench.run("run", str(config), "--until", "distill", store=tmp_path / "store", **keyed)
    assert ran.returncode == 0, ran.stderr
    failed = bench.run(
        "run", str(config), "--only", "distill", "--force", store=tmp_path / "store", NAUTILE_TOY_FAULT="distill:crash",
        **keyed,
    )  # fmt: skip
    assert failed.returncode == 1
    assert KEY not in ran.stdout + ran.stderr + failed.stdout + failed.stderr
    written = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    written |= {path: path.read_bytes() for path in (bench.store / "prefect").rglob("*") if path.is_file()}
    assert any(b"PLANTED_KEY" in content for path, content in written.items() if path.name == "manifest.json")
    assert not [path for path, content in written.items() if KEY.encode() in content]
    for what in ("flow_runs", "task_runs", "artifacts", "logs"):
        shown = request(f"{bench.url}/{what}/filter", {}).content
        assert shown
        assert KEY.encode() not in shown


def test_the_forms_of_deployments_hold_names_only(config, monkeypatch):
    monkeypatch.setenv("PLANTED_KEY", KEY)
    forms = json.dumps(
        [deployment.model_dump(mode="json", exclude={"schedules"}) for deployment in deployments(load(config))]
    )
    assert "PLANTED_KEY" in forms
    assert KEY not in forms
