"""The rollout engine: what it refuses before any compilation, and that it compiles each shape once."""

import json
import os

import jax
import pytest
from pydantic import ValidationError

from nautile.common.errors import ConfigError
from nautile.configs.training import RolloutConfig
from nautile.data.sources.reasoning_gym import Problem
from nautile.data.tokenizer import tokenizer_for
from nautile.model.nautile import initialise
from nautile.rl.rollouts import RolloutEngine, append_rows
from tests.rl.conftest import TOKENIZER

ROLLOUT = RolloutConfig(prompts=2, group=2, prompt_length=24, max_tokens=6)


def test_a_prompt_that_is_too_long_is_named(model):
    engine = RolloutEngine(model, tokenizer_for(TOKENIZER), ROLLOUT, 0)
    engine.check([Problem("sums", 0, "1?", "1", "")])
    with pytest.raises(ConfigError, match=r"rollout\.prompt_length is 24, but sums #7 has a prompt of \d+ tokens"):
        engine.check([Problem("sums", 7, "What is one and one? " * 4, "2", "")])


def test_prompt_and_completion_must_fit_the_context(model):
    long = ROLLOUT.model_copy(update={"max_tokens": 120})
    with pytest.raises(ConfigError, match="over the model's context of 128"):
        RolloutEngine(model, tokenizer_for(TOKENIZER), long, 0)


def test_a_group_of_one_compares_nothing():
    with pytest.raises(ValidationError, match="greater than or equal to 2"):
        RolloutConfig(prompts=2, group=1, prompt_length=24, max_tokens=6)


@pytest.mark.slow
def test_each_shape_is_compiled_once_a_run(model, caplog):
    """A program for each length that prompts are padded to; with other parameters and prompts nothing is compiled."""
    engine = RolloutEngine(model, tokenizer_for(TOKENIZER), ROLLOUT, 0)
    questions = ["2?", "3?", "0+2=?", "1+2=?", "4?", "2+2=?"]
    problems = [(n, Problem("sums", n, question, "2", "")) for n, question in enumerate(questions)]
    first, second = initialise(model, 0), initialise(model, 1)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        engine.sample(first, problems[:2], 0)
        engine.sample(first, problems[2:4], 1)
        assert "Finished XLA compilation" in caplog.text
        caplog.clear()
        engine.sample(second, problems[4:], 2)
        engine.sample(second, [problems[0], problems[4]], 3)
        assert "Finished XLA compilation" not in caplog.text


def test_rows_of_a_log_are_on_disk_before_a_checkpoint_counts_on_them(tmp_path, monkeypatch):
    log, sync, synced = tmp_path / "samples.jsonl", os.fsync, []

    def record(descriptor):
        synced.append(os.fstat(descriptor).st_ino)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    append_rows(log, [{"step": 0, "text": "a\u2028b"}])
    append_rows(log, [{"step": 1, "text": "c"}])
    assert [json.loads(line)["step"] for line in log.read_text(encoding="utf-8").split("\n")[:-1]] == [0, 1]
    assert synced.count(log.stat().st_ino) == 2
    assert tmp_path.stat().st_ino in synced
