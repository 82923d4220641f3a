"""`nautile evaluate`: ask a checkpoint or an export the held-out problems, alone or paired with another.

The problems are those of a configuration's `evaluate.held_out`, asked as the stage `evaluate` asks them; nothing is
written to the store. Compared with `--against`, the result is added to the card of an ONNX export.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from common.errors import ConfigError
from configs.schema import RunConfig
from evals.benchmarks.items import BenchmarkItem
from evals.benchmarks.stand_ins import HELD_OUT, held_out
from evals.running.answerers import CheckpointAnswerer
from evals.running.rows import SampleRow
from evals.running.runner import evaluate
from evals.scoring.comparison import compare, comparison_table
from evals.scoring.intervals import wilson
from flows.cli.tables import query_table
from model.exports.onnx.folder import add_measurement


def evaluate_folder(
    folder: Path, runtime: str, against: Path | None, config: RunConfig, problems: int | None
) -> dict[str, Any]:
    """The accuracy of what is in `folder`; `against` a checkpoint: the same problems asked of that, and the comparison.

    problems: only so many of them. Raises ConfigError where the configuration has none, or a folder cannot be read.
    """
    if config.evaluate.held_out is None:
        raise ConfigError(f"configuration {config.name!r} has no `evaluate.held_out`: there are no problems to ask")
    items = held_out(config.evaluate.held_out, config.seed)[:problems]
    name, rows = _ask(folder, runtime, config, items)
    asked = [row for row in rows if row["left_out"] is None]
    if not asked:
        raise ConfigError(f"{folder}: all {len(rows)} problems are longer than evaluate.prompt_length")
    correct = sum(bool(row["strict"]) for row in asked)
    low, high = wilson(correct, len(asked))
    result: dict[str, Any] = {
        "model": name, "problems": len(asked), "left_out": len(rows) - len(asked), "correct": correct,
        "accuracy": correct / len(asked), "low": low, "high": high, "comparison": None,
    }  # fmt: skip
    if against is not None:
        other, other_rows = _ask(against, "jax", config, items)
        result |= {"against": other, "comparison": compare(other_rows, rows, seed=config.seed)}
        if runtime == "onnx":
            add_measurement(folder, _sentence(result, config.name))
    return result


def evaluation_view(result: dict[str, Any]) -> RenderableType:
    """The accuracy with its interval, and the comparison if there is one."""
    share = f"{100 * result['accuracy']:.1f} % [{100 * result['low']:.1f}, {100 * result['high']:.1f}]"
    left_out = f", {result['left_out']} too long" if result["left_out"] else ""
    parts: list[RenderableType] = [
        Text(f"{result['model']}: {share} of {result['problems']:,} held-out problems, strict{left_out}")
    ]
    if result["comparison"]:
        table = comparison_table(result["comparison"], "A", "B")
        parts.append(Text(f"A: {result['against']}\nB: {result['model']}"))
        parts += [query_table(list(table.columns), list(table.rows)), *(Text(note, "dim") for note in table.notes)]
    return Group(*parts)


def _ask(folder: Path, runtime: str, config: RunConfig, items: Sequence[BenchmarkItem]) -> tuple[str, list[SampleRow]]:
    """The model's name, and a row for each problem."""
    answerer = CheckpointAnswerer(folder, config.evaluate, config.tokenizer, runtime)
    with tempfile.TemporaryDirectory() as scratch:
        return answerer.name, evaluate(answerer, items, Path(scratch) / "rows.jsonl", config.seed)


def _sentence(result: dict[str, Any], config_name: str) -> str:
    """What the card of an export says of the comparison."""
    test = result["comparison"]["benchmarks"][HELD_OUT]
    return (
        f"{test['n']:,} held-out problems of `{config_name}`, greedy, strict: {100 * test['b']:.1f} % right, and "
        f"{100 * test['a']:.1f} % by {result['against']} in float32 with JAX; a change of {100 * test['lead']:+.1f} "
        f"points [{100 * test['low']:.1f}, {100 * test['high']:.1f}] (only this one right: {test['only_b']}, only the "
        f"checkpoint: {test['only_a']}; McNemar's exact test, p = {test['p']:.2g})."
    )
