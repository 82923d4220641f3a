"""The record of a run: its steps and settings as it starts, and how it ended."""

import json
import signal
import uuid
from asyncio import CancelledError
from contextlib import nullcontext
from types import SimpleNamespace

import httpx
import pytest
from prefect.exceptions import Pause, TerminationSignal
from prefect.states import Cancelled, Cancelling, Crashed, Running

from nautile.common.errors import ConfigError
from nautile.flows import plans
from nautile.flows.plans import recorded, refused
from nautile.flows.selection import Selection, prepare_run
from nautile.store.artifacts import Store
from nautile.store.catalog import Catalog

pytestmark = pytest.mark.usefixtures("toy_stages")


@pytest.mark.parametrize(
    ("end", "state", "error"),
    [
        (None, "done", None),
        (RuntimeError("align: no *reply*"), "failed", "align: no *reply*"),
        (KeyboardInterrupt(), "cancelled", None),
        (Pause(), "suspended", None),
    ],
    ids=["done", "failed", "cancelled", "suspended"],
)
def test_a_run_is_recorded_as_it_starts_and_as_it_ends(tmp_path, toy, end, state, error):
    store = Store(tmp_path / "store")
    run = prepare_run(toy, Selection(last="evaluate:align"), store)
    catalog = Catalog(store)
    with (
        pytest.raises(type(end)) if end else nullcontext(),
        recorded(store, toy, run, "r1", "a name", "nautile run toy"),
    ):
        catalog.ingest()
        assert [row["state"] for row in catalog.query("SELECT state FROM plans")] == ["running"]
        if end:
            raise end
    (row,) = catalog.query("SELECT * FROM plans")
    assert (row["run"], row["name"], row["state"], row["error"]) == ("r1", "a name", state, error)
    assert row["ended"] >= row["started"]
    steps = {step["label"]: step for step in json.loads(row["steps"])}
    assert list(steps) == [step.label for step in run.steps]
    assert steps["evaluate:align"]["after"] == ["align"]
    assert steps["evaluate:align"]["inputs"] == sorted(run.steps[-1].inputs.values())
    assert json.loads(row["settings"])["seed"] == toy.seed
    with recorded(store, toy, run, "r1", "a name", "nautile run toy"):  # a retry is another start of the same run
        pass
    assert len(catalog.query("SELECT * FROM plans WHERE run = 'r1'")) == 2


@pytest.mark.parametrize("end", [TerminationSignal(signal.SIGTERM), CancelledError()], ids=["signal", "Prefect"])
@pytest.mark.parametrize(
    ("answer", "cancelled"),
    [
        (Cancelling(), True),
        (Cancelled(), True),
        (Running(), False),
        (Crashed(), False),
        (httpx.ReadError("away"), False),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_run_whose_process_is_ended_counts_as_cancelled_only_if_the_server_says_so(
    monkeypatch, answer, cancelled, end
):
    def read_flow_run(_):
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(state=answer)

    client = SimpleNamespace(read_flow_run=read_flow_run)
    monkeypatch.setattr(plans, "get_client", lambda **_: nullcontext(client))
    assert plans._was_cancelled(str(uuid.uuid4()), end) == cancelled


def test_a_run_whose_form_is_refused_is_listed_with_its_reason_and_no_command_to_retry(
    tmp_path, toy, monkeypatch, command_line
):
    store = Store(tmp_path / "store")
    monkeypatch.setenv("NAUTILE_STORE", str(store.root))
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", "r1")
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__NAME", "a name")
    error = ConfigError("overrides: `seed`: is no number")
    assert refused("/etc/toy.toml", error).message == f"The form cannot be followed: {error}"
    (row,) = json.loads(command_line("runs", "--json")[1])
    assert (row["id"], row["name"], row["config"], row["state"]) == ("r1", "a name", "toy", "failed")
    assert (row["error"], row["resume"], row["steps"]) == (str(error), None, 0)
    lines = command_line("status", "r1")[1].splitlines()
    assert lines[0] == "run r1 (a name): failed"
    assert str(error) in lines
    assert not any("Continue with" in line or "kept" in line for line in lines)
    # Refused when it is retried, it keeps the steps that it had.
    run = prepare_run(toy, Selection(last="evaluate:align"), store)
    with pytest.raises(RuntimeError), recorded(store, toy, run, "r1", "a name", "nautile retry r1"):
        raise RuntimeError("align: no reply")
    refused("toy", error)
    (row,) = json.loads(command_line("runs", "--json")[1])
    assert (row["error"], row["steps"]) == (str(error), len(run.steps))
