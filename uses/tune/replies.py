"""Tune on replies: chats, entities as JSON, or the shares of people who chose each option; measure held-out loss.

Here `shots` counts rows, not rows per label. The result is compared with the model before tuning, and for options also
with the uniform distribution and the mean of the training rows that have the same options.
"""

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from nautile.common.errors import ConfigError
from nautile.common.files import read_json, write_json
from nautile.data.chat_template import parse_completion
from nautile.data.label_set import LabelSet, write_label_set
from nautile.data.shuffle import permute
from nautile.data.tokenizer import Tokenizer, tokenizer_for
from nautile.model.decoding.generate import Generator
from nautile.model.decoding.sampling import Sampling
from nautile.model.layers.common import Params
from nautile.model.weights.files import save_weights
from nautile.uses.labelled.prompts import beginning_ids, context_ids, instructions_for, reasoned_ids, reply_ids
from nautile.uses.labelled.rows import LabelledRow
from nautile.uses.tune.fine_tune import TuningRow, TuningSettings, fine_tune, kept_losses, mean_loss, searched_settings
from nautile.uses.tune.tuner import ROWS_AT_ONCE, LabelTuning, asked_rows

MOST_GENERATED = 200  # test rows whose entities are generated


def tune_replies(run: LabelTuning, checkpoint: Path) -> dict[str, Any]:
    """Tune for every number of shots and every seed; write the checkpoint with the lowest validation loss.

    Returns the scores as JSON data: for each number of shots the mean loss over the seeds (nats per token of the
    replies, or mean KL over the questions), for entities also the micro-F1 of the spans that the model writes. Raises
    `ConfigError` for a row longer than the model's context.
    """
    config, tokenizer = run.config, tokenizer_for(run.tokenizer)
    loss: Literal["reply", "options"] = "options" if config.form == "opinions" else "reply"
    # The kinds of entities in the training rows; other forms have none.
    kinds = (
        sorted({entity["label"] for row in run.splits.train for entity in json.loads(row.target)})
        if (config.form == "entities")
        else []
    )
    labels = LabelSet(
        form=config.form, method=config.method, labels=tuple(kinds),
        # A question or a conversation is not truncated, because its end holds what is asked.
        longest=config.longest if config.form == "entities" else run.model.context,
        instructions=instructions_for(config.form, config.instructions, kinds),
    )  # fmt: skip
    parts = {
        "validation": asked_rows(run.splits.validation, config.most_asked),
        "test": asked_rows(run.splits.test, config.most_asked),
    }
    examples = {name: _examples(tokenizer, labels, rows) for name, rows in parts.items()}

    def measure(params: Params) -> dict[str, Any]:
        figures: dict[str, Any] = {
            name: mean_loss(params, run.model, rows, loss, ROWS_AT_ONCE) for name, rows in examples.items()
        }
        if config.form == "entities":
            rows = parts["test"][:MOST_GENERATED]
            figures["spans"] = span_scores(_generate(run, tokenizer, params, examples["test"][: len(rows)]), rows)
        return figures

    def tune(shots: int, seed: int, settings: TuningSettings, states: str) -> tuple[Params, list[float], int]:
        """Returns the parameters, the loss of each epoch, and the number of training rows."""
        order = permute(np.arange(len(ordered)), len(ordered), f"shots/{seed}")
        rows = _examples(tokenizer, labels, [ordered[i] for i in order[: shots or len(ordered)]])
        identity = {**run.identity, "learning_rate": settings.optimizer.learning_rate}
        params, losses = fine_tune(run.params, run.model, rows, settings, seed, run.work / states, identity, run.emit)
        return params, losses, len(rows)

    def loss_at(shots: int, settings: TuningSettings, rate: str) -> float:
        params, _, _ = tune(shots, 0, settings, states := f"states-{shots}-rate-{rate}")
        shutil.rmtree(run.work / states)
        return mean_loss(params, run.model, examples["validation"], loss, ROWS_AT_ONCE)

    # Results so far, by arm; a run that was killed continues with the missing arms.
    arms_path = run.work / "arms.json"
    ordered = asked_rows(run.splits.train, None)
    results: dict[str, Any] = read_json(arms_path) or {}
    if "before" not in results:
        results["before"] = measure(run.params)
        write_json(arms_path, results)
    arms = [(shots, seed) for shots in config.shots for seed in range(config.seeds)]
    for number, (shots, seed) in enumerate(arms, 1):
        name = f"{shots}-{seed}"
        if name not in results:
            settings = searched_settings(config, loss, run.work, shots, partial(loss_at, shots))
            params, losses, count = tune(shots, seed, settings, f"states-{name}")
            figures = {"shots": shots, "seed": seed, "rows": count, "train": losses[-1], **measure(params)}
            earlier = [arm["validation"] for arm in results.values() if "shots" in arm]
            # The weights before the result: killed in between, a resumed run tunes this arm again, with the same
            # weights.
            if figures["validation"] < min(earlier, default=float("inf")):
                save_weights(checkpoint, params, run.model, run.tokenizer)
            results[name] = figures
            write_json(arms_path, results)
            shutil.rmtree(run.work / f"states-{name}")
        run.emit("progress", done=number, total=len(arms), unit="arms")
    # The report: each number of shots over its seeds, the baselines, and the arm that became the checkpoint.
    write_label_set(checkpoint, labels)
    result: dict[str, Any] = {"unit": "nats per question (KL)" if loss == "options" else "nats per token"}
    result["before"] = results.pop("before")
    result["learning_rates"] = kept_losses(config, run.work)
    result["arms"] = [
        {
            "arm": config.method,
            "shots": shots,
            "seeds": config.seeds,
            "loss": float(np.mean(values := [results[f"{shots}-{seed}"]["test"] for seed in range(config.seeds)])),
            "low": min(values),
            "high": max(values),
            "spans": [results[f"{shots}-{seed}"].get("spans") for seed in range(config.seeds)],
        }
        for shots in config.shots
    ]
    if loss == "options":
        result["baselines"] = option_baselines(run.splits.train, parts["test"])
    # Of equal losses the first, as above, so this is the arm whose weights were written.
    result["chosen"] = min(results.values(), key=lambda arm: arm["validation"])
    return result


def option_baselines(train: Sequence[LabelledRow], test: Sequence[LabelledRow]) -> dict[str, Any]:
    """Mean KL of the test rows to the uniform distribution, and to the mean of the training rows with the same options.

    `mean_human` is over the test rows for which such training rows exist, of which there are `covered`; None if none.
    """
    by_options: dict[tuple[str, ...], list[tuple[float, ...]]] = {}
    for row in train:
        by_options.setdefault(row.options, []).append(row.shares)
    uniform = [_divergence(row.shares, np.full(len(row.shares), 1 / len(row.shares))) for row in test]
    covered = [row for row in test if row.options in by_options]
    means = [_divergence(row.shares, np.mean(by_options[row.options], axis=0)) for row in covered]
    return {
        "uniform": float(np.mean(uniform)),
        "mean_human": float(np.mean(means)) if means else None,
        "covered": len(covered),
    }


def span_scores(replies: Sequence[str | None], rows: Sequence[LabelledRow]) -> dict[str, Any]:
    """Micro-F1 of the entities (text and label, as a multiset) in the model's replies.

    A reply that is not a JSON list of {text, label} has no entities and counts as `invalid`.
    """
    matched = predicted_total = expected_total = invalid = 0
    for reply, row in zip(replies, rows, strict=True):
        expected = Counter((entity["text"], entity["label"]) for entity in json.loads(row.target))
        try:
            entities = json.loads(reply or "")
            if not isinstance(entities, list):
                raise TypeError("not a list")
            predicted = Counter((str(entity["text"]), str(entity["label"])) for entity in entities)
        except (ValueError, TypeError, KeyError, RecursionError):
            predicted, invalid = Counter(), invalid + 1
        matched += (expected & predicted).total()
        predicted_total, expected_total = predicted_total + predicted.total(), expected_total + expected.total()
    total = predicted_total + expected_total
    return {"f1": 2 * matched / total if total else None, "invalid": invalid, "rows": len(rows)}


def _examples(tokenizer: Tokenizer, labels: LabelSet, rows: Sequence[LabelledRow]) -> list[TuningRow]:
    beginning = beginning_ids(tokenizer, labels.instructions)
    examples = []
    for row in rows:
        prompt = beginning + context_ids(tokenizer, row.text, labels.longest)
        if row.options:
            examples.append(TuningRow(prompt, [reply_ids(tokenizer, option) for option in row.options], row.shares))
        elif row.reasoning:
            prompt, reply = reasoned_ids(tokenizer, prompt, row.reasoning, row.target)
            examples.append(TuningRow(prompt, [reply]))
        else:
            examples.append(TuningRow(prompt, [reply_ids(tokenizer, row.target)]))
    return examples


def _generate(
    run: LabelTuning, tokenizer: Tokenizer, params: Params, examples: Sequence[TuningRow]
) -> list[str | None]:
    """Generate replies, each up to the length of the longest expected one; None for a reply that does not end."""
    longest = max(len(example.prompt) for example in examples)
    # Eight tokens more than the longest that is expected; the prompts of a batch share one length, that of the longest.
    most = min(max(len(example.continuations[0]) for example in examples) + 8, run.model.context - longest)
    if most < 1:
        raise ConfigError("tune: the prompts leave no room for a reply; lower tune.longest")
    sampling = Sampling(most, temperature=0.0, stop_ids=(tokenizer.im_end, tokenizer.end_of_text))
    generator = Generator(run.model, sampling, min(ROWS_AT_ONCE, len(examples)), longest)
    seeds = [(run.config.seed, number) for number in range(len(examples))]
    completions = generator(params, [list(example.prompt) for example in examples], seeds)
    return [parse_completion(tokenizer, [tokenizer.think_end, *completion.ids]).answer for completion in completions]


def _divergence(shares: Sequence[float], reference: np.ndarray) -> float:
    """KL(shares ‖ reference) in nats."""
    human = np.asarray(shares)
    positive = human > 0
    # An option that nobody chose adds nothing; one that the reference rules out would make the distance infinite.
    return float(np.sum(human[positive] * np.log(human[positive] / np.maximum(reference[positive], 1e-12))))
