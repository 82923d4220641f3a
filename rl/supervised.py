"""Supervised training on worked solutions, with the program and the rows of self-distillation.

A row is a whole turn of the chat template, as the reinforcement stages sample it: the problem's prompt, its rationale
as the reasoning, its answer in the form that the graders read, and the end marker. Only replies are trained on; all of
their tokens have the same weight.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from nautile.common.errors import ConfigError, Retryable
from nautile.common.events import Emit, flush, silent
from nautile.configs.training import SuperviseConfig
from nautile.data.chat_template import encode_turns
from nautile.data.sources.reasoning_gym import Problem
from nautile.data.tokenizer import Tokenizer, tokenizer_for
from nautile.evals.benchmarks.items import answer_kind
from nautile.model.layers.common import Params
from nautile.model.nautile import shapes
from nautile.model.processes import joint_termination
from nautile.model.sharding import make_mesh, on_mesh, parameter_shardings, whole_on_hosts
from nautile.model.training.checkpoint import open_checkpoints
from nautile.rl.rollouts import StageInputs, on_device
from nautile.rl.self_distillation import RowsDone, RowTraining, programs, train_rows
from nautile.rl.training_rows import TrainingRow

CALCULATOR = re.compile(r"<<[^<>]*>>")  # GSM8K's marks for a calculator, which the model does not have
SAMPLES = 16  # rows that the dashboard shows


@dataclass(frozen=True)
class Supervision:
    """Inputs of one supervised training; the fields are those of `SelfDistillation`."""

    inputs: StageInputs
    config: SuperviseConfig
    identity: dict[str, Any]
    work: Path
    sampling_seed: int  # of the order of the rows
    emit: Emit = silent
    shared_disk: bool = True


def solution_rows(
    problems: Sequence[Problem], tokenizer: Tokenizer, length: int
) -> tuple[list[TrainingRow], Counter[str]]:
    """The rows of the problems, in order, and how many problems have none, by reason."""
    solved = [problem for problem in problems if problem.rationale]
    turns = [(p.question, CALCULATOR.sub("", p.rationale), _final_answer(p)) for p in solved]
    pieces, lengths, prompts = encode_turns(tokenizer, turns)
    ids = np.concatenate([np.zeros(0, np.uint32), *pieces])
    rows = [
        TrainingRow(turn[:prompt].tolist(), turn[prompt:].astype(np.int32), np.zeros(len(turn) - prompt), 1.0, 1.0)
        for turn, prompt in zip(np.split(ids, np.cumsum(lengths))[:-1], prompts, strict=True)
    ]
    short = [row for row in rows if len(row) <= length]
    return short, Counter(
        {"have no rationale": len(problems) - len(rows), f"are longer than {length} tokens": len(rows) - len(short)}
    )


def _final_answer(problem: Problem) -> str:
    """The answer as a reply states it: an expression in the box that its prompt asks for."""
    is_expression = (problem.kind or answer_kind(problem.answer)) == "math"
    return f"\\boxed{{{problem.answer}}}" if is_expression else problem.answer


def supervise(run: Supervision, params: Params) -> tuple[Params, dict[str, Any]]:
    """Train for `config.epochs` passes over the solutions; returns the new parameters and facts.

    A rerun resumes after the last checkpoint, with the same rows in the same order. All processes of a pod
    (`jax.distributed`) call this with the same arguments; the first one reports. On SIGTERM they save one step together
    and raise `Retryable`; a single process ends.
    """
    config, model, is_first = run.config, run.inputs.model, jax.process_index() == 0
    run = run if is_first else replace(run, emit=silent)
    mesh = make_mesh(config.fsdp, part="supervise")
    if config.batch_rows % mesh.size:
        raise ConfigError(f"supervise.batch_rows {config.batch_rows} does not divide among the {mesh.size} devices")
    tokenizer, length = tokenizer_for(run.inputs.tokenizer), min(config.row_length or model.context, model.context)
    rows, left_out = solution_rows(run.inputs.problems, tokenizer, length)
    if not rows:
        reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items() if count)
        raise ConfigError(f"supervise.problems: none of its {len(run.inputs.problems)} problems is a row: {reasons}")
    for index, row in enumerate(rows[:SAMPLES]):
        prompt, reply = tokenizer.decode(row.prompt_ids), tokenizer.decode(row.ids.tolist())
        run.emit("sample", set="solutions", index=index, step=0, prompt=prompt, text=reply)
    params = on_mesh(on_device(params), parameter_shardings(shapes(model), mesh))
    state = programs(model, config.optimizer, mesh, "batch_tokens")[0](params)
    checkpoints = open_checkpoints(run.work / "checkpoints", 2, run.identity, mesh, shared_disk=run.shared_disk)
    done = RowsDone()
    if (latest := checkpoints.latest()) is not None:
        (params, state), extra = checkpoints.restore(latest, (params, state))
        done = RowsDone(**extra)
    updates = -(-len(rows) // config.batch_rows) * config.epochs
    with joint_termination() as stop_requested:

        def after_step(params: Params, state: Any, done: RowsDone) -> None:
            # Asked in every step by every process, because the answer is agreed on by all.
            stopping = stop_requested(done.steps) and done.steps < updates
            if stopping or done.steps % config.save_every == 0 or done.steps == updates:
                flush(run.emit)
                checkpoints.save(done.steps, (params, state), asdict(done))
            if stopping:
                checkpoints.wait()
                raise Retryable(
                    f"supervised training was asked to stop; it is saved at step {done.steps} of {updates}, and a "
                    "rerun resumes there"
                )

        training = RowTraining(
            config, "supervise", "batch_tokens", model, mesh, f"{run.sampling_seed}:solutions", length, run.emit
        )
        params, _, done = train_rows(training, params, rows, state=state, done=done, after_step=after_step)
    checkpoints.close()
    facts: dict[str, Any] = {
        "rows": len(rows),
        "rows_left_out": {reason: count for reason, count in left_out.items() if count},
        "tokens_trained_on": sum(len(row.ids) for row in rows),
        "updates": len(done.losses),
        "skipped_updates": done.skipped,
    }
    # A collective operation: every process takes part, although one writes.
    whole = whole_on_hosts(params, mesh)
    if done.losses:
        return whole, facts | {"first_loss": done.losses[0], "last_loss": done.losses[-1]}
    return whole, facts | {"no_update": "no update was finite"}
