"""What is compiled ahead is what the stages then ask for, and a run starts the process only where it can help."""

import json
import logging
import os
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from unittest.mock import MagicMock

import jax
import pytest

from nautile.configs.base import OptimizerConfig
from nautile.configs.load import load
from nautile.configs.training import ProblemsConfig, ReasonConfig, RolloutConfig, SelfDistillConfig
from nautile.data.tokenizer import tokenizer_for
from nautile.flows.chat import Chat, ChatAnswer, ChatSettings, chat_engine
from nautile.flows.dag import build_dag
from nautile.flows.pipeline import compiling_ahead, request_of
from nautile.flows.serve import QUEUE, SLOTS
from nautile.flows.serve.ahead import compile_first_replies
from nautile.model.decoding.slots import DecodeRequest
from nautile.model.nautile import initialise
from nautile.model.runtimes.load import load_runtime
from nautile.model.weights.files import save_weights
from nautile.tasks import compile_ahead
from nautile.tasks.compile_ahead import compile_stage
from nautile.tasks.engine.job import Job
from nautile.tasks.reinforce import reason, self_distill
from tests.rl.conftest import SUMS, TOKENIZER, policy, tiny_model

# The programs that take long to compile; what is traced for a shape only, or compiled in no time, is not counted.
PROGRAMS = (
    *("completion_gradients", "_encode_prompts", "_backward_through_prompts"),
    *("_update", "update", "advance", "moved", "prefill_prompts"),
)
ROLLOUT = RolloutConfig(prompts=4, group=4, prompt_length=60, max_tokens=6)
PROBLEMS = ProblemsConfig(tasks=SUMS, count=8)
SECTIONS = {
    "reason": ReasonConfig(rollout=ROLLOUT, problems=PROBLEMS, policy=policy(steps=2, micro_rows=8, refill=0)),
    # Two rounds, which have different numbers of updates.
    "self_distill": SelfDistillConfig(
        rollout=ROLLOUT, problems=PROBLEMS, rounds=2, batch_rows=8, optimizer=OptimizerConfig(learning_rate=1e-3)
    ),
}
STAGES = {"reason": reason, "self_distill": self_distill}


@pytest.fixture
def compiled(caplog):
    """The programs compiled since it was last called, each with the shapes of its arguments."""
    level = jax.config.jax_log_compiles
    jax.config.update("jax_log_compiles", True)

    def since() -> set[str]:
        messages = {record.getMessage() for record in caplog.records}
        caplog.clear()
        return {text for text in messages if text.startswith(tuple(f"Compiling jit({name})" for name in PROGRAMS))}

    with caplog.at_level(logging.WARNING, logger="jax"):
        yield since
    jax.config.update("jax_log_compiles", level)


@pytest.mark.heavy
@pytest.mark.parametrize("stage", SECTIONS)
def test_a_stage_compiles_nothing_that_was_not_compiled_ahead(stage, compiled, tmp_path, monkeypatch):
    right = lambda problem, reply: float(len(reply.reasoning or "") % 2)  # noqa: E731  a random policy solves nothing
    monkeypatch.setattr("nautile.tasks.reinforce.verifiable", right)
    monkeypatch.setattr("nautile.rl.rollouts.verifiable", right)
    model = tiny_model()
    section = {stage: SECTIONS[stage].model_dump(mode="json")}
    compile_stage(stage, section, model, TOKENIZER)
    ahead = compiled()
    assert {"reason": "completion_gradients", "self_distill": "update"}[stage] in str(ahead)
    save_weights(tmp_path / "checkpoint", initialise(model, 0), model, TOKENIZER)
    job = Job(stage, "0" * 64, "e", section, {"checkpoint": tmp_path / "checkpoint"}, tmp_path, lambda *_, **__: None)
    STAGES[stage].work(job)
    assert compiled() <= ahead
    assert (tmp_path / "output" / "checkpoint" / "weights.safetensors").exists()


@pytest.mark.heavy
def test_a_chat_and_a_server_compile_nothing_that_was_not_compiled_ahead(compiled, tmp_path):
    model = tiny_model()
    compile_first_replies(model, TOKENIZER)
    ahead = compiled()
    assert "advance" in str(ahead)
    save_weights(tmp_path, initialise(model, 1), model, TOKENIZER)
    loaded, tokenizer = load_runtime("jax", tmp_path), tokenizer_for(TOKENIZER)
    for _ in Chat(loaded, ChatSettings()).ask(ChatAnswer("What is 5 + 6?")):
        pass
    engine, events = chat_engine(loaded, SLOTS, QUEUE), SimpleQueue()
    engine.start(lambda batch: [events.put(event) for _, event in batch])
    engine.submit([DecodeRequest(tuple(tokenizer.encode("Hello")), 2, (0,))])
    assert len(events.get(timeout=300).ids) in (1, 2)
    engine.close()
    assert compiled() <= ahead


def test_only_a_run_that_still_pretrains_compiles_ahead(store):
    config = load("local")
    steps = build_dag(config)
    request = request_of(store, config, steps, False)
    assert [stage for stage, *_ in request.steps] == ["align", "reason", "self_distill"]
    later = [step for step in steps if step.label != "pretrain"]
    assert request_of(store, config, later, False) is None, "nothing computes meanwhile"
    until = [step for step in steps if step.label == "pretrain"]
    assert request_of(store, config, until, False) is None, "nothing comes after it"
    pod = config.model_copy(
        update={"launch": config.launch.model_copy(update={"processes": 2, "stages": ("align", "reason")})}
    )
    assert [stage for stage, *_ in request_of(store, pod, steps, False).steps] == ["self_distill"]


def test_the_process_leaves_out_a_step_that_has_begun(store, tmp_path, monkeypatch):
    config = load("local")
    request = request_of(store, config, build_dag(config), False)
    store.staging(next(step.key for step in build_dag(config) if step.label == "reason"))
    (tmp_path / "request.json").write_text(json.dumps(asdict(request)), encoding="utf-8")
    compiled, parents = [], []
    monkeypatch.setattr(compile_ahead, "compile_stage", lambda stage, section, *_: compiled.append((stage, *section)))
    monkeypatch.setattr("nautile.flows.serve.ahead.compile_first_replies", lambda *_: compiled.append(("replies",)))
    monkeypatch.setattr(compile_ahead, "begin", parents.append)
    # It would be this process's, and that of every test after this.
    for name in ("only_idle_time", "signal", "keep_compiled"):
        monkeypatch.setattr(compile_ahead, name, MagicMock())
    compile_ahead.main(tmp_path / "request.json")
    assert [stage for stage, *_ in compiled] == ["align", "self_distill", "replies"]
    assert parents == [os.getpid()]


def test_the_process_ends_with_the_run(store, monkeypatch):
    calls = []

    def endless(module, request, *, tick, **_):
        calls.append((module, json.loads(Path(request).read_text(encoding="utf-8"))["store"]))
        while True:
            tick()

    monkeypatch.setattr("nautile.flows.pipeline.run_child", endless)
    config = load("local")
    with compiling_ahead(store, config, build_dag(config), False):
        pass
    assert calls == [("nautile.tasks.compile_ahead", str(store.root))]
    quiet = config.model_copy(update={"launch": config.launch.model_copy(update={"compile_ahead": False})})
    with compiling_ahead(store, quiet, build_dag(config), False):
        pass
    assert len(calls) == 1


def test_a_step_that_has_been_made_is_not_compiled_again(store, monkeypatch):
    config = load("local")
    steps = build_dag(config)
    made = {step.key for step in steps if step.label in ("pretrain", "align")}
    monkeypatch.setattr(type(store), "find", lambda self, kind, key, **_: "an artifact" if key in made else None)
    assert request_of(store, config, steps, False) is None
    assert len(request_of(store, config, steps, True).steps) == 3, "with --force all are made again"
    made.remove(steps[[step.label for step in steps].index("pretrain")].key)
    assert [stage for stage, *_ in request_of(store, config, steps, False).steps] == ["reason", "self_distill"]
