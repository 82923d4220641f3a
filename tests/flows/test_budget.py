"""A distillation whose money runs out, with the shipped settings of nautile_370m: it pauses with what there is.

That it goes on with less where it is told to: tests/flows/operate/test_approval.py, tests/tasks/test_distill.py.
"""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from nautile.common.errors import ConfigError
from nautile.configs.load import load
from nautile.flows import pipeline
from nautile.flows.dag import dag_in
from nautile.flows.operate import approval
from nautile.flows.pipeline import StageFailed, _StepRunner
from nautile.flows.selection import Selection, prepare_run
from nautile.tasks.engine.attempt import run_stage
from tests.support.samples.exemplar_index import index_exemplars
from tests.support.servers.fake_openai import FakeOpenAI

pytestmark = pytest.mark.heavy
SHIPPED = load("nautile_370m")
ENDPOINTS = {name: endpoint for name, endpoint in SHIPPED.endpoints.items() if name in SHIPPED.distill.endpoints}
PROMPTS = 60
LITTLE = 0.001  # dollars, for about half of the prompts


@pytest.fixture
def server():
    with FakeOpenAI(models=[endpoint.model for endpoint in ENDPOINTS.values()]) as server:
        yield server


@pytest.fixture
def config_of(server, tmp_path, monkeypatch):
    """nautile_370m but for addresses, prompts, how many there are, and the money."""
    for endpoint in ENDPOINTS.values():
        if endpoint.key_variable:
            monkeypatch.setenv(endpoint.key_variable, "sk-test")

    def write(budget):
        path = tmp_path / "mine.toml"
        addresses = "".join(f'[endpoints.{name}]\nurl = "{server.url}"\n' for name in ENDPOINTS)
        prompts = 'prompt_sets = [{ name = "articles", source = "wikipedia" }]'
        distill = f"[distill]\nprompts = {PROMPTS}\nchunk = 10\nbudget_dollars = {budget}\n{prompts}\n"
        path.write_text(f'extends = "nautile_370m"\n{addresses}{distill}', encoding="utf-8")
        return load(path)

    return write


@pytest.fixture
def store(store, config_of, tmp_path):
    """With what the distillation reads: the index of eight exemplars, and no questions."""
    (tmp_path / "questions").mkdir()
    (tmp_path / "questions" / "questions.jsonl").touch()
    keys = {step.label: step.key for step in dag_in(store, config_of(1.0))}
    for stage, kind, folder in (
        ("index", "retrieval", index_exemplars(tmp_path, SHIPPED.index)),
        ("held_out", "questions", tmp_path / "questions"),
    ):
        store.publish(kind, keys[stage], folder, stage=stage, version=1, config={}, inputs={}, facts={})
    return store


@pytest.fixture
def questions(monkeypatch):
    """What the runs asked; the approval to begin is given, one to continue with less is not."""
    asked = []

    def ask(store, run, key, label, question, patience, force):
        asked.append(question)
        if key.startswith("budget:"):
            raise ConfigError("the run was cancelled")

    monkeypatch.setattr(approval, "ask", ask)
    return asked


@pytest.fixture
def run(store, monkeypatch):
    """Run the distillation as the pipeline does, on a thread in place of a task run."""
    with ThreadPoolExecutor(1) as pool:

        def as_task(stage):
            return SimpleNamespace(submit=lambda *arguments: pool.submit(run_stage, stage, *arguments))

        monkeypatch.setattr(pipeline, "as_prefect_task", as_task)

        def call(config, run_id, **selection):
            prepared = prepare_run(config, Selection(only="distill", **selection), store, "mine.toml")
            return _StepRunner(store, config, prepared, run_id, str, {}).run()["distill"]

        yield call


def facts(store):
    return store.list("documents")[-1].manifest["facts"]


def test_at_its_budget_the_shipped_distillation_pauses_and_goes_on_when_it_is_raised(
    run, config_of, store, server, questions
):
    with pytest.raises(StageFailed, match="the run was cancelled"):
        run(config_of(LITTLE), "first")
    begins, stops = questions
    assert "asks for approval before it begins" in begins
    unasked = facts(store)["unasked"]
    assert f"stopped at its budget: ${facts(store)['dollars']:.4f} spent, {unasked} of {PROMPTS} prompts" in stops
    assert "run `nautile run mine.toml --from distill --force`" in stops
    assert server.answered == PROMPTS - unasked

    run(config_of(1.0), "second", force=True)
    assert facts(store)["unasked"] == 0
    assert server.answered == PROMPTS, "no reply is paid for twice"
    assert len(questions) == 3, "only whether to begin"
