"""A flow for each stage, as a deployment serves it."""

import json
import subprocess
import sys

import pytest

from common.errors import ConfigError
from configs.load import STAGES
from flows.stages import all_flows, flow_of
from store.artifacts import Store
from tests.support.toy_cli import ROOT, environment
from tests.support.toy_stages import TOY

PROGRAM = """
import json, sys
from configs.load import load
from flows import dag
from tests.support.toy_stages import toy_stage
plan.stage_named = toy_stage
from flows.stages import flow_of
print(json.dumps(flow_of("evaluate")(load(sys.argv[1]), store_root=sys.argv[2])))
"""


def test_there_is_one_for_every_stage_with_a_typed_form():
    assert [flow.name for flow in all_flows()] == list(STAGES)
    schema = flow_of("reason").parameters
    assert set(schema.properties) == {"config", "force", "store_root"}
    assert schema.required == ["config"]
    assert "RunConfig" in json.dumps(schema.properties["config"])


def test_an_unknown_stage_is_refused():
    with pytest.raises(ConfigError, match="no stage 'dream'"):
        flow_of("dream")


@pytest.mark.slow
def test_it_reuses_what_the_chain_has_made_and_runs_nothing_else(made, prefect_url):
    store, outputs = made
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(TOY), str(store.root)],
        env=environment(store.root, PREFECT_API_URL=prefect_url, PREFECT_HOME=str(store.root / "prefect")),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told == {label: kinds for label, kinds in outputs.items() if label.startswith("evaluate")}
    assert not Store(store.root).list("report")[1:]
