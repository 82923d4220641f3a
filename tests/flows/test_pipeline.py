"""The pipeline's flows: one for each stage, as a deployment serves it."""

import json
import shutil
import subprocess
import sys

import pytest

from configs.operation import OperationConfig
from flows import pipeline
from store.artifacts import Store
from tests.support.toy_cli import ROOT, environment
from tests.support.toy_dag import TOY_DAG
from tests.support.toy_stages import TOY

PROGRAM = """
import json, sys
from configs.load import load
from flows.pipeline import evaluate
print(json.dumps(evaluate(load(sys.argv[1]), store_root=sys.argv[2])))
"""


def test_there_is_one_for_every_stage_with_a_typed_form():
    assert [flow.name for flow in pipeline.STAGE_FLOWS] == list(OperationConfig.model_fields)
    assert all(getattr(pipeline, flow.name) is flow for flow in pipeline.STAGE_FLOWS)
    schema = pipeline.reason.parameters
    assert set(schema.properties) == {"config", "force", "store_root"}
    assert schema.required == ["config"]
    assert "RunConfig" in json.dumps(schema.properties["config"])


@pytest.mark.slow
def test_it_reuses_what_the_chain_has_made_and_runs_nothing_else(made, prefect_url, tmp_path):
    store, outputs = Store(shutil.copytree(made[0].root, tmp_path / "store")), made[1]  # others read the newest run
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(TOY), str(store.root)],
        env=environment(store.root, PREFECT_API_URL=prefect_url, PREFECT_HOME=str(store.root / "prefect"), **TOY_DAG),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "nanobind" not in done.stderr
    outputs_here = json.loads(done.stdout.splitlines()[-1])
    assert outputs_here == {label: kinds for label, kinds in outputs.items() if label.startswith("evaluate")}
    assert not Store(store.root).list("report")[1:]
