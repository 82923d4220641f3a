"""`prefect.yaml`: as Prefect reads it, every entry is a flow that takes its parameters, and it is up to date."""

from pathlib import Path

import pytest
from prefect.cli.deploy._config import _load_deploy_configs_and_actions
from prefect.cli.deploy._triggers import _initialize_deployment_triggers
from prefect.client.schemas.schedules import CronSchedule
from prefect.flows import load_flow_from_entrypoint
from rich.console import Console

from common.errors import ConfigError
from configs.load import load
from flows.operate.deployments import deployments
from flows.operate.work_pool import TYPES, render, write
from tests.support.toy_cli import ROOT

FILE = ROOT / "prefect.yaml"


@pytest.fixture(scope="module")
def local():
    return load("local")


@pytest.fixture(scope="module")
def served(local):
    return deployments(local)


def read(path: Path) -> list[dict]:
    with Console(record=True, quiet=True) as console:
        entries, actions = _load_deploy_configs_and_actions(path, console=console)
        assert not console.export_text()
    assert actions["pull"] == []
    return entries


def test_the_file_of_the_repository_is_what_is_written_for_local(served):
    now = render("local", "process", served)
    assert FILE.read_text(encoding="utf-8") == now, "write it anew: nautile deploy local --pool process"


@pytest.mark.parametrize("pool", TYPES)
def test_prefect_reads_it_for_each_kind_of_pool(served, pool, tmp_path):
    path = tmp_path / "prefect.yaml"
    path.write_text(render("local", pool, served), encoding="utf-8")
    entries = read(path)
    assert [entry["entrypoint"] for entry in entries] == [one.entrypoint for one in served]
    assert all(entry["work_pool"]["name"] == "nautile" for entry in entries)
    images = [entry["work_pool"]["job_variables"].get("image") for entry in entries]
    assert all(images) == (pool != "process")


def test_every_entry_is_a_flow_that_takes_its_parameters(local, served):
    for entry, one in zip(read(FILE), served, strict=True):
        flow = load_flow_from_entrypoint(entry["entrypoint"], use_placeholder_flow=False)
        assert flow.name == one.flow_name
        assert entry["parameters"] == one.parameters
        assert set(entry["parameters"]) <= set(flow.parameters.properties)
        if entry["parameters"]:
            assert flow.validate_parameters(entry["parameters"])["config"] == local
        assert entry["tags"] == ["nautile", "local"]
        assert entry["concurrency_limit"] == {"limit": 1, "collision_strategy": "ENQUEUE"}


def test_schedule_and_automation_are_those_that_are_served(local):
    entries = {entry["entrypoint"].rpartition(".")[2]: entry for entry in read(FILE)}
    scheduled = {name: entry["schedules"] for name, entry in entries.items() if entry.get("schedules")}
    assert list(scheduled) == ["evaluation"]
    (schedule,) = scheduled["evaluation"]
    assert CronSchedule(cron=schedule["cron"], timezone=schedule["timezone"]).cron == local.schedule.cron
    (trigger,) = _initialize_deployment_triggers("regression", entries["regression"]["triggers"])
    assert trigger.expect == {"nautile.regression"}
    assert set(trigger.parameters) == {"after", "before"}


def test_an_unknown_pool_is_refused_and_nothing_is_written(local, tmp_path):
    with pytest.raises(ConfigError, match="process, kubernetes, cloud"):
        write(local, "abacus", tmp_path / "prefect.yaml")
    assert not list(tmp_path.iterdir())
