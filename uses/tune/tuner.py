"""Tune for labels: for each number of shots and seed, the chosen method and the baselines, on the same rows.

A finished arm is stored in the work folder, so a resumed run computes none twice.
"""

import hashlib
import shutil
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy.special import log_softmax

from nautile.common.events import Emit, silent
from nautile.common.files import atomic_path, read_json, write_json
from nautile.configs.model import ModelConfig, TokenizerConfig
from nautile.data.label_set import HEAD, LabelSet, write_label_set
from nautile.data.screening.duplicates import text_hash
from nautile.data.shuffle import permute
from nautile.data.tokenizer import tokenizer_for
from nautile.model.decoding.shared_prefix import SharedPrefixScorer
from nautile.model.layers.common import Params
from nautile.model.weights.files import save_weights
from nautile.uses.labelled.abstention import threshold_for_accuracy, threshold_for_coverage
from nautile.uses.labelled.calibration import (
    calibration_evidence,
    expected_calibration_error,
    fit_temperature,
    probabilities,
)
from nautile.uses.labelled.predictor import likelihood_logits, text_features
from nautile.uses.labelled.prompts import cut, instructions_for, prompt_ids, reply_ids, with_examples
from nautile.uses.labelled.rows import LabelledRow
from nautile.uses.labelled.scores import score_seeds
from nautile.uses.labelled.verbalised import label_bias
from nautile.uses.tune.baselines import BASELINES, baseline
from nautile.uses.tune.config import TuneConfig
from nautile.uses.tune.fine_tune import TuningRow, TuningSettings, fine_tune
from nautile.uses.tune.head import fit_head, save_head
from nautile.uses.tune.settings import searched_settings
from nautile.uses.tune.splits import Splits

POOLING: Literal["mean"] = "mean"  # of a text's hidden states, for the head: measured to be better than the last one
ROWS_AT_ONCE = 16  # in a forward pass that computes features or likelihoods
ABSTAINS = 1.0  # the threshold if no lower one reaches the required accuracy


@dataclass(frozen=True)
class LabelTuning:
    """Inputs of a tuning. `identity`: training states of another identity are not resumed."""

    params: Params
    model: ModelConfig
    tokenizer: TokenizerConfig
    config: TuneConfig
    splits: Splits
    work: Path
    identity: dict[str, Any]
    emit: Emit = silent


class ArmRun(NamedTuple):
    """The predictions of a method or baseline, fitted with some shots and seed, on validation and test rows."""

    arm: str
    shots: int
    seed: int
    validation_VC: np.ndarray  # logits
    test_TC: np.ndarray
    temperature: float
    threshold: float
    validation_loss: float  # calibrated, in nats


def draw_shots(rows: Sequence[LabelledRow], shots: int, seed: int) -> list[LabelledRow]:
    """Draw `shots` rows of each label (all if it has fewer; 0: all rows), in an order that depends on the seed."""
    by_label: dict[str, list[LabelledRow]] = defaultdict(list)
    # In an order of their own, so that the draw does not depend on the order of the file.
    for row in sorted(rows, key=lambda row: text_hash(row.text)):
        by_label[row.target].append(row)
    chosen = []
    for label, members in sorted(by_label.items()):
        order = permute(np.arange(len(members)), len(members), f"shots/{seed}/{label}")
        chosen += [members[i] for i in order[: shots or len(members)]]
    return [chosen[i] for i in permute(np.arange(len(chosen)), len(chosen), f"order/{seed}")]


def asked_rows(rows: Sequence[LabelledRow], most: int | None) -> list[LabelledRow]:
    """The rows of a split that are evaluated: at most `most`, chosen by a hash of the text."""
    return sorted(rows, key=lambda row: text_hash(row.text))[:most]


class LabelTuner:
    """Fits all arms, and writes the checkpoint of the best seed with the most shots."""

    def __init__(self, run: LabelTuning, checkpoint: Path) -> None:
        self.run, self._checkpoint = run, checkpoint
        config = run.config
        self.labels = run.splits.labels
        self.validation = asked_rows(run.splits.validation, config.most_asked)
        self.test = asked_rows(run.splits.test, config.most_asked)
        self.targets_V, self.targets_T = self.targets(self.validation), self.targets(self.test)
        self._tokenizer = tokenizer_for(run.tokenizer)
        instructions = "" if config.method == "head" else instructions_for("label", config.instructions, self.labels)
        self.label_set = LabelSet(
            form="label", method=config.method, labels=self.labels, instructions=instructions,
            longest=config.longest, pooling=POOLING, coverage=None if config.accuracy else config.coverage,
        )  # fmt: skip
        self._features: dict[str, np.ndarray] = {}
        # 0 shots stands for all rows, the most there are; but for likelihoods it means no examples, the fewest.
        self._most_shots = max(config.shots, key=lambda shots: shots or float("inf"))
        if config.method == "verbalised":
            self._most_shots = max(config.shots)

    def arms(self) -> list[ArmRun]:
        """Fit every arm for every number of shots and seed; those of an earlier attempt are loaded."""
        config = self.run.config
        names = [config.method, *config.baselines]
        keys = [(name, shots, seed) for name in names for shots in config.shots for seed in range(config.seeds)]
        runs = []
        for number, (name, shots, seed) in enumerate(keys, 1):
            # With all rows only their order depends on the seed, which matters only to methods trained in steps.
            draw = seed if shots or name in ("full", "lora") else 0
            path = self.run.work / f"{name}-{shots}-{draw}.npz"
            if not path.is_file():
                validation_VC, test_TC = self._fit(name, shots, draw)
                with atomic_path(path) as temporary, temporary.open("wb") as file:
                    np.savez(file, validation=validation_VC, test=test_TC)
                # The training states take three times the size of the model and are not needed any more.
                shutil.rmtree(self.run.work / f"states-{shots}-{seed}", ignore_errors=True)
            with np.load(path) as saved:
                runs.append(self._calibrated(name, shots, seed, saved["validation"], saved["test"]))
            self.run.emit("progress", done=number, total=len(keys), unit="arms", note=f"{name}, {shots or 'all'} shots")
        return runs

    def finish(self, runs: Sequence[ArmRun]) -> tuple[LabelSet, ArmRun]:
        """Write the checkpoint of the seed with the lowest validation loss; returns its label set and its run."""
        candidates = [run for run in runs if run.arm == self.run.config.method and run.shots == self._most_shots]
        best = min(candidates, key=lambda run: (run.validation_loss, run.seed))
        rows = draw_shots(self.run.splits.train, best.shots, best.seed)
        labels = self.label_set
        if labels.method in ("head", "verbalised"):
            save_weights(self._checkpoint, self.run.params, self.run.model, self.run.tokenizer)
        if labels.method == "head":
            save_head(self._checkpoint / HEAD, self._head(rows))
        if labels.method == "verbalised":
            bias_C = np.load(self.run.work / f"bias-{best.shots}-{best.seed}.npy")
            with_shots = self._with_examples(rows if best.shots else [])
            labels = with_shots.model_copy(update={"bias": tuple(map(float, bias_C))})
        evidence = calibration_evidence(best.validation_VC, self.targets_V, best.temperature)
        labels = labels.model_copy(
            update={
                "temperature": best.temperature,
                "threshold": best.threshold,
                "validation_rows": evidence.rows,
                "validation_errors": evidence.errors,
                "calibrated": evidence.calibrated,
            }
        )
        write_label_set(self._checkpoint, labels)
        return labels, best

    def scores(self, runs: Sequence[ArmRun]) -> list[dict[str, Any]]:
        """Scores on the test rows for each arm and number of shots, over the seeds."""
        groups: dict[tuple[str, int], list[ArmRun]] = defaultdict(list)  # the seeds of an arm
        for run in runs:
            groups[run.arm, run.shots].append(run)
        result = []
        for (arm, shots), members in groups.items():
            probabilities_STC = [probabilities(run.test_TC, run.temperature) for run in members]
            thresholds = [run.threshold for run in members]
            figures = score_seeds(probabilities_STC, self.targets_T, thresholds, self.run.config.seed)
            raw = [expected_calibration_error(probabilities(run.test_TC, None), self.targets_T) for run in members]
            result.append({"arm": arm, "shots": shots, **figures, "ece_uncalibrated": float(np.mean(raw))})
        return result

    def targets(self, rows: Sequence[LabelledRow]) -> np.ndarray:
        index = {label: number for number, label in enumerate(self.labels)}
        return np.array([index[row.target] for row in rows], np.int64)

    def _fit(self, name: str, shots: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Fit one arm; returns the logits of the validation and of the test rows."""
        # Shots have equally many rows of each label, so the most frequent label is only known from all rows.
        rows = draw_shots(self.run.splits.train, 0 if name == "majority" else shots, seed)
        if name in BASELINES:
            other = baseline(name, self.run.work / "vectors")
            other.fit([row.text for row in rows], self.targets(rows), len(self.labels))
            validation_VC, test_TC = (other.logits([row.text for row in part]) for part in (self.validation, self.test))
            return validation_VC, test_TC
        if name == "head":
            head = self._head(rows)
            validation_VC, test_TC = (head.logits(self._states(part)) for part in (self.validation, self.test))
            return validation_VC, test_TC
        if name == "verbalised":
            with_shots = self._with_examples(rows if shots else [])
            validation_VC, test_TC = (
                self._likelihoods(self.run.params, with_shots, part) for part in (self.validation, self.test)
            )
            # Over the validation rows, whose labels it does not use; the test rows are not looked at.
            bias_C = label_bias(validation_VC)
            # Durable before the arm's own file, by which a resumed run knows that it need not be fitted again.
            with atomic_path(self.run.work / f"bias-{shots}-{seed}.npy") as temporary, temporary.open("wb") as file:
                np.save(file, bias_C)
            return validation_VC - bias_C, test_TC - bias_C
        # Full fine-tuning or LoRA. The weights of the best seed with the most shots become the checkpoint.
        search = partial(self._loss_at, shots)
        settings = searched_settings(self.run.config, "reply", self.run.work, shots, search)
        params = self._fine_tune(rows, shots, seed, settings, f"states-{shots}-{seed}")
        validation_VC, test_TC = (
            self._likelihoods(params, self.label_set, part) for part in (self.validation, self.test)
        )
        if shots == self._most_shots:
            loss = self._calibrated(name, shots, seed, validation_VC, test_TC).validation_loss
            earlier = read_json(self.run.work / "best.json")
            if earlier is None or loss < earlier["loss"]:
                save_weights(self._checkpoint, params, self.run.model, self.run.tokenizer)
                # After the weights: a process that dies between the two fits this arm again, with the same weights.
                write_json(self.run.work / "best.json", {"loss": loss, "seed": seed})
        return validation_VC, test_TC

    def _calibrated(self, arm: str, shots: int, seed: int, validation_VC: np.ndarray, test_TC: np.ndarray) -> ArmRun:
        """Fit temperature and threshold on the validation rows."""
        temperature = fit_temperature(validation_VC, self.targets_V)
        calibrated_VC = probabilities(validation_VC, temperature)
        threshold: float | None = None
        if self.run.config.accuracy is not None:
            threshold = threshold_for_accuracy(calibrated_VC, self.targets_V, self.run.config.accuracy)
            threshold = ABSTAINS if threshold is None else threshold
        else:
            threshold = threshold_for_coverage(calibrated_VC, self.run.config.coverage)
        rows = np.arange(len(self.targets_V))
        loss = float(-log_softmax(validation_VC / temperature, axis=1)[rows, self.targets_V].mean())
        return ArmRun(arm, shots, seed, validation_VC, test_TC, temperature, threshold, loss)

    def _head(self, rows: Sequence[LabelledRow]) -> Any:
        return fit_head(self._states(rows), self.targets(rows), len(self.labels))

    def _states(self, rows: Sequence[LabelledRow]) -> np.ndarray:
        """Features of the rows, cached in the work folder."""
        # Keyed by a digest of the text, because the same rows appear in many draws of shots.
        digests = [hashlib.sha256(row.text.encode()).hexdigest() for row in rows]
        path = self.run.work / "features.npz"
        if not self._features and path.is_file():
            with np.load(path) as saved:  # from an earlier attempt
                self._features = dict(zip(saved["digests"].tolist(), saved["features"], strict=True))
        pairs = zip(digests, rows, strict=True)
        missing = {digest: row.text for digest, row in pairs if digest not in self._features}
        if missing:
            run = self.run
            features = text_features(
                run.params, run.model, self._tokenizer, self.label_set, list(missing.values()), ROWS_AT_ONCE,
                lambda count: run.emit("progress", done=count, total=len(missing), unit="texts"),
            )  # fmt: skip
            self._features |= dict(zip(missing, features, strict=True))
            with atomic_path(path) as temporary, temporary.open("wb") as file:
                np.savez(file, digests=np.array(list(self._features)), features=np.stack(list(self._features.values())))
        return np.stack([self._features[digest] for digest in digests])

    def _with_examples(self, rows: Sequence[LabelledRow]) -> LabelSet:
        """The label set with few-shot examples in its instructions; texts are truncated to a quarter of `longest`."""
        longest = max(1, self.run.config.longest // 4)
        examples = [(cut(self._tokenizer, row.text, longest), row.target) for row in rows]
        instructions = with_examples(self.label_set.instructions, examples)
        return self.label_set.model_copy(update={"instructions": instructions})

    def _likelihoods(self, params: Params, labels: LabelSet, rows: Sequence[LabelledRow]) -> np.ndarray:
        scorer = SharedPrefixScorer(params, self.run.model, ROWS_AT_ONCE)
        return likelihood_logits(scorer, self.run.model, self._tokenizer, labels, [row.text for row in rows])

    def _loss_at(self, shots: int, settings: TuningSettings, rate: str) -> float:
        """The calibrated validation loss with a learning rate, in nats. No test row is used."""
        states = f"states-{shots}-rate-{rate}"
        params = self._fine_tune(draw_shots(self.run.splits.train, shots, 0), shots, 0, settings, states)
        logits_VC = self._likelihoods(params, self.label_set, self.validation)
        shutil.rmtree(self.run.work / states)
        return self._calibrated(self.run.config.method, shots, 0, logits_VC, logits_VC).validation_loss

    def _fine_tune(
        self, rows: Sequence[LabelledRow], shots: int, seed: int, settings: TuningSettings, states: str
    ) -> Params:
        run = self.run
        examples = [
            TuningRow(prompt_ids(self._tokenizer, self.label_set, row.text), [reply_ids(self._tokenizer, row.target)])
            for row in rows
        ]

        def emit(kind: str, **fields: Any) -> None:
            if kind == "metric":
                fields["name"] = f"loss, {shots or 'all'} shots, seed {seed}"
            run.emit(kind, **fields)

        params, _ = fine_tune(
            run.params, run.model, examples, settings, seed, run.work / states,
            {**run.identity, "learning_rate": settings.optimizer.learning_rate}, emit,
        )  # fmt: skip
        return params
