"""`nautile evaluate`: evaluate a checkpoint or an export on held-out problems, alone or paired with a checkpoint.

The problems are those of a configuration's `evaluate.held_out`, with the prompts of the stage `evaluate`; nothing is
written to the store. With `--against`, the comparison is added to the card of an ONNX export.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from nautile.common.errors import ConfigError
from nautile.common.files import read_json
from nautile.configs.schema import RunConfig
from nautile.evals.benchmarks.items import BenchmarkItem
from nautile.evals.benchmarks.stand_ins import HELD_OUT, held_out
from nautile.evals.running.answerers import CheckpointAnswerer
from nautile.evals.running.rows import SampleRow
from nautile.evals.running.runner import evaluate
from nautile.evals.scoring.comparison import compare, comparison_table
from nautile.evals.scoring.intervals import wilson
from nautile.flows.render import query_table
from nautile.model.exports.onnx.folder import add_measurement


def evaluate_folder(
    folder: Path, runtime: str, against: Path | None, config: RunConfig, problems: int | None
) -> dict[str, Any]:
    """Evaluate the model in `folder`, and with `against` compare it with that checkpoint on the same problems.

    `problems`: only the first so many. Raises `ConfigError` if the configuration has no held-out problems, or if a
    folder is not readable.
    """
    if config.evaluate.held_out is None:
        raise ConfigError(f"configuration {config.name!r} has no `evaluate.held_out`: there are no problems to ask")
    # The seed of the stage `evaluate`, so these are the same problems.
    items = held_out(config.evaluate.held_out, config.seeds.evaluation)[:problems]
    name, rows = _answer(folder, runtime, config, items)
    # A problem whose prompt does not fit, or whose reply could not be graded, has no verdict. It is left out of the
    # share and counted beside it, because it is not a wrong answer.
    answered = [row for row in rows if row["left_out"] is None]
    if not answered:
        reasons = " or ".join(sorted({str(row["left_out"]).replace("_", " ") for row in rows}))
        raise ConfigError(f"{folder}: all {len(rows)} problems were left out: {reasons} (see evaluate.prompt_length)")
    correct = sum(bool(row["strict"]) for row in answered)
    low, high = wilson(correct, len(answered))
    result: dict[str, Any] = {
        "model": name, "problems": len(answered), "left_out": len(rows) - len(answered), "correct": correct,
        "accuracy": correct / len(answered), "low": low, "high": high, "comparison": None,
    }  # fmt: skip
    if against is not None:
        # The reference always runs in JAX with the checkpoint's own precision: what is measured is the change that the
        # export makes.
        other, other_rows = _answer(against, "jax", config, items)
        result |= {"against": other, "comparison": compare(other_rows, rows, seed=config.seeds.evaluation)}
        if runtime == "onnx":
            model = (read_json(against / "config.json") or {}).get("model") or {}
            add_measurement(folder, _sentence(result, config.name, model.get("compute_dtype", "its own precision")))
    return result


def evaluation_view(result: dict[str, Any]) -> RenderableType:
    """The accuracy with its confidence interval, and the comparison if there is one."""
    share = f"{100 * result['accuracy']:.1f} % [{100 * result['low']:.1f}, {100 * result['high']:.1f}]"
    left_out = f", {result['left_out']} left out (too long or not graded)" if result["left_out"] else ""
    parts: list[RenderableType] = [
        Text(
            f"{result['model']}: {share} of {result['problems']:,} held-out problems, strict{left_out}; "
            "95 % interval over problems"
        )
    ]
    if result["comparison"]:
        table = comparison_table(result["comparison"], "A", "B")
        parts.append(Text(f"A: {result['against']}\nB: {result['model']}"))
        parts += [query_table(list(table.columns), list(table.rows)), *(Text(note, "dim") for note in table.notes)]
    return Group(*parts)


def _answer(
    folder: Path, runtime: str, config: RunConfig, items: Sequence[BenchmarkItem]
) -> tuple[str, list[SampleRow]]:
    """Answer all problems with the model in `folder`: the model's name, and a row for each problem."""
    answerer = CheckpointAnswerer(folder, config.evaluate, config.tokenizer, runtime)
    # `evaluate` appends each row to a file, from which a stage would resume. Here nobody resumes: the file is thrown
    # away.
    with tempfile.TemporaryDirectory() as scratch:
        return answerer.name, evaluate(answerer, items, Path(scratch) / "rows.jsonl", config.seeds.evaluation)


def _sentence(result: dict[str, Any], config_name: str, precision: str) -> str:
    """The sentence about the comparison in the card of an export. `precision`: in which the checkpoint computes."""
    test = result["comparison"]["benchmarks"][HELD_OUT]
    return (
        f"{test['n']:,} held-out problems of `{config_name}`, greedy, strict: {100 * test['b']:.1f} % right, and "
        f"{100 * test['a']:.1f} % by {result['against']} in {precision} with JAX; a change of "
        f"{100 * test['lead']:+.1f} points [{100 * test['low']:.1f}, {100 * test['high']:.1f}] (only this one right: "
        f"{test['only_b']}, only the checkpoint: {test['only_a']}; McNemar's exact test, p = {test['p']:.2g})."
    )
