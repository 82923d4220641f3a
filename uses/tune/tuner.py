"""Run a tuning of any form; write its report (`tuning.json`), for labels also `rows.parquet`, and its card.

For labels: for each number of shots and seed, the chosen method and the baselines, on the same rows. For chats,
entities as JSON, or the shares of people who chose each option: the held-out loss beside that before tuning; `shots`
counts rows, not rows per label. A finished arm is stored in the work folder, so a resumed run computes none twice.
"""

import hashlib
import json
import shutil
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet
from scipy.special import log_softmax
from sklearn.dummy import DummyClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

from nautile.common.errors import ConfigError
from nautile.common.events import Emit, silent
from nautile.common.files import atomic_path, read_json, write_json
from nautile.configs.model import ModelConfig, TokenizerConfig
from nautile.data.chat_template import parse_completion
from nautile.data.label_set import HEAD, Head, LabelSet, save_head, write_label_set
from nautile.data.retrieval.embedders import Encoder, MiniLM
from nautile.data.screening.duplicates import text_hash
from nautile.data.shuffle import permute
from nautile.data.tokenizer import Tokenizer, tokenizer_for
from nautile.model.decoding.generate import Generator
from nautile.model.decoding.sampling import Sampling
from nautile.model.decoding.scoring import SharedPrefixScorer, token_states
from nautile.model.layers.common import Params
from nautile.model.weights.files import save_weights
from nautile.tasks.reporting.cards import card
from nautile.uses.labelled.config import TuneConfig
from nautile.uses.labelled.predictor import (
    ClassWeights,
    by_class,
    fit_each,
    fit_head,
    likelihood_logits,
    readable,
    text_features,
)
from nautile.uses.labelled.prompts import (
    beginning_ids,
    context_ids,
    cut,
    instructions_for,
    label_bias,
    prompt_ids,
    reasoned_ids,
    reply_ids,
    with_examples,
)
from nautile.uses.labelled.rows import LabelledRow, entity_json, labels_of
from nautile.uses.labelled.scores import (
    RECALL,
    arm_rows,
    best_thresholds,
    calibration_evidence,
    calibration_note,
    confusion,
    expected_calibration_error,
    fit_temperature,
    label_probabilities,
    lead,
    points,
    probabilities,
    rarest,
    recall_rows,
    recalls,
    reliability,
    score_label_sets,
    score_seeds,
    sigmoid_pairs,
    threshold_for_accuracy,
    threshold_for_coverage,
)
from nautile.uses.labelled.token_head import tagged, tags_of, token_places
from nautile.uses.tune.fine_tune import TuningRow, fine_tune, kept_losses, mean_loss, searched_config
from nautile.uses.tune.splits import Splits

MOST_STEPS = 1000
BASELINE_PENALTY = 10.0  # C of the baselines' regressions: larger is a weaker penalty
BASELINES = ("majority", "tfidf", "minilm")
POOLING: Literal["mean"] = "mean"  # of a text's hidden states, for the head: measured to be better than the last one
ROWS_AT_ONCE = 16  # in a forward pass that computes features or likelihoods
ABSTAINS = 1.0  # the threshold if no lower one reaches the required accuracy
MOST_GENERATED = 200  # test rows whose entities are generated
TUNING, ROWS = "tuning.json", "rows.parquet"
PRETRAINED_ON = "The run's own pretraining has read these articles: a figure here says nothing about unseen text."
MOST_CONFUSED = 10
NEVER = -1e4  # the logit of a tag that no training row has


def baseline_features(name: str, cache: Path) -> Any:
    """The features of texts of a baseline: a transformer of scikit-learn, to be fitted on texts."""
    if name == "tfidf":
        return TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2))
    return FunctionTransformer(Encoder(MiniLM(), cache).encode)  # sentence vectors, which are kept in `cache`


def baseline(name: str, cache: Path, weights: ClassWeights = None) -> Any:
    """The baseline called `name`, one of `BASELINES`: an estimator of scikit-learn, to be fitted on texts."""
    if name == "majority":  # the shares of the labels in the training rows, whatever the text
        return DummyClassifier(strategy="prior")
    regression = LogisticRegression(C=BASELINE_PENALTY, max_iter=MOST_STEPS, class_weight=by_class(weights))
    return make_pipeline(baseline_features(name, cache), regression)


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
    thresholds: tuple[float, ...]  # one for the likeliest label; if several may hold, one for each label
    validation_loss: float  # calibrated, in nats


def draw_shots(rows: Sequence[LabelledRow], shots: int, seed: int) -> list[LabelledRow]:
    """Draw `shots` rows of each label (all if it has fewer; 0: all rows), in an order that depends on the seed."""
    by_label: dict[str, list[LabelledRow]] = defaultdict(list)
    # In an order of their own, so that the draw does not depend on the order of the file.
    for row in sorted(rows, key=lambda row: text_hash(row.text)):
        for label in labels_of(row) or ("",):  # rows without any label are drawn as if that were one
            by_label[label].append(row)
    drawn: dict[str, LabelledRow] = {}  # by text, since a row may be drawn for several of its labels
    for label, members in sorted(by_label.items()):
        order = permute(np.arange(len(members)), len(members), f"shots/{seed}/{label}")
        drawn |= {members[i].text: members[i] for i in order[: shots or len(members)]}
    chosen = list(drawn.values())
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
        self.class_weights = class_weights(config, self.labels)
        self.rarest = None if config.multi_label else rarest(run.splits.report.balance["train"])
        self._tokenizer = tokenizer_for(run.tokenizer)
        instructions = "" if config.method == "head" else instructions_for("label", config.instructions, self.labels)
        self.label_set = LabelSet(
            form="label", method=config.method, labels=self.labels, instructions=instructions,
            longest=config.longest, pooling=POOLING, multi_label=config.multi_label,
            thresholds=(0.5,) * len(self.labels) if config.multi_label else None,  # until they are fitted
            coverage=None if config.accuracy or config.multi_label else config.coverage,
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
        evidence = calibration_evidence(*decisions(best.validation_VC, self.targets_V), best.temperature)
        update: dict[str, Any] = {"temperature": best.temperature, **evidence}
        update |= {"thresholds": best.thresholds} if labels.multi_label else {"threshold": best.thresholds[0]}
        labels = labels.model_copy(update=update)
        write_label_set(self._checkpoint, labels)
        return labels, best

    def scores(self, runs: Sequence[ArmRun]) -> list[dict[str, Any]]:
        """Scores on the test rows for each arm and number of shots, over the seeds."""
        groups: dict[tuple[str, int], list[ArmRun]] = defaultdict(list)  # the seeds of an arm
        for run in runs:
            groups[run.arm, run.shots].append(run)
        result = []
        seed = self.run.config.seed
        rare = None if self.rarest is None else self.labels.index(self.rarest)
        for (arm, shots), members in groups.items():
            shares_STC = [self.shares(run.test_TC, run.temperature) for run in members]
            if self.label_set.multi_label:
                figures = score_label_sets(shares_STC, self.targets_T, [run.thresholds for run in members], seed)
            else:
                thresholds = [run.thresholds[0] for run in members]
                figures = score_seeds(shares_STC, self.targets_T, thresholds, seed, rare)
            raw = []
            for run in members:
                logits, targets = decisions(run.test_TC, self.targets_T)
                raw.append(expected_calibration_error(probabilities(logits, None), targets))
            result.append({"arm": arm, "shots": shots, **figures, "ece_uncalibrated": float(np.mean(raw))})
        return result

    def shares(self, logits_NC: np.ndarray, temperature: float) -> np.ndarray:
        """Probabilities of the labels, [N, C]: they sum to 1, or if several may hold each is by itself."""
        return (label_probabilities if self.label_set.multi_label else probabilities)(logits_NC, temperature)

    def given(self, run: ArmRun) -> np.ndarray:
        """What a run predicts for the test rows: indices [T], or if several labels may hold bool [T, C]."""
        if self.label_set.multi_label:
            return self.shares(run.test_TC, run.temperature) >= np.array(run.thresholds)
        return run.test_TC.argmax(axis=1)

    def targets(self, rows: Sequence[LabelledRow]) -> np.ndarray:
        """Indices of the rows' labels, int [N]; or whether a row has each, bool [N, C], if several may hold."""
        if self.run.config.multi_label:
            return np.array([[label in labels_of(row) for label in self.labels] for row in rows], bool)
        index = {label: number for number, label in enumerate(self.labels)}
        return np.array([index[row.target] for row in rows], np.int64)

    def _fit(self, name: str, shots: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Fit one arm; returns the logits of the validation and of the test rows."""
        # Shots have equally many rows of each label, so the most frequent label is only known from all rows.
        rows = draw_shots(self.run.splits.train, 0 if name == "majority" else shots, seed)
        if name in BASELINES and self.label_set.multi_label:
            has_NC = self.targets(rows)
            if name == "majority":
                share_C = (has_NC.sum(axis=0) + 1) / (len(rows) + 2)
                logits_C = np.log(share_C / (1 - share_C))
                return np.tile(logits_C, (len(self.validation), 1)), np.tile(logits_C, (len(self.test), 1))
            features = baseline_features(name, self.run.work / "vectors")
            train_ND = features.fit_transform([row.text for row in rows])
            weight_DC, bias_C = fit_each(train_ND, has_NC, BASELINE_PENALTY, self.class_weights)
            validation_VC, test_TC = (
                features.transform([row.text for row in part]) @ weight_DC + bias_C
                for part in (self.validation, self.test)
            )
            return validation_VC, test_TC
        if name in BASELINES:
            other = baseline(name, self.run.work / "vectors", self.class_weights)
            other.fit([row.text for row in rows], self.targets(rows))
            validation_VC, test_TC = (
                other.predict_log_proba([row.text for row in part]) for part in (self.validation, self.test)
            )
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
        search = partial(self._loss_at, shots)
        settings = searched_config(self.run.config, self.run.work, shots, search)
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
        # On the validation rows as they are: class weights are for what is learnt, and change no row's count here.
        logits, targets = decisions(validation_VC, self.targets_V)
        temperature = fit_temperature(logits, targets)
        loss = float(-log_softmax(logits / temperature, axis=1)[np.arange(len(targets)), targets].mean())
        calibrated_VC = self.shares(validation_VC, temperature)
        if self.label_set.multi_label:
            fixed = self.run.config.label_threshold
            thresholds = best_thresholds(calibrated_VC, self.targets_V) if fixed is None else [fixed] * len(self.labels)
            return ArmRun(arm, shots, seed, validation_VC, test_TC, temperature, tuple(thresholds), loss)
        threshold: float | None = None
        if self.run.config.accuracy is not None:
            threshold = threshold_for_accuracy(calibrated_VC, self.targets_V, self.run.config.accuracy)
            threshold = ABSTAINS if threshold is None else threshold
        else:
            threshold = threshold_for_coverage(calibrated_VC, self.run.config.coverage)
        return ArmRun(arm, shots, seed, validation_VC, test_TC, temperature, (threshold,), loss)

    def _head(self, rows: Sequence[LabelledRow]) -> Any:
        return fit_head(self._states(rows), self.targets(rows), len(self.labels), self.class_weights)

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

    def _loss_at(self, shots: int, settings: TuneConfig, rate: str) -> float:
        """The calibrated validation loss with a learning rate, in nats. No test row is used."""
        states = f"states-{shots}-rate-{rate}"
        params = self._fine_tune(draw_shots(self.run.splits.train, shots, 0), shots, 0, settings, states)
        logits_VC = self._likelihoods(params, self.label_set, self.validation)
        shutil.rmtree(self.run.work / states)
        return self._calibrated(self.run.config.method, shots, 0, logits_VC, logits_VC).validation_loss

    def _fine_tune(
        self, rows: Sequence[LabelledRow], shots: int, seed: int, settings: TuneConfig, states: str
    ) -> Params:
        run = self.run
        weights = row_weights(self.targets(rows), self.class_weights)
        examples = [
            TuningRow(
                prompt_ids(self._tokenizer, self.label_set, row.text), [reply_ids(self._tokenizer, row.target)],
                weight=weight,
            )
            for row, weight in zip(rows, weights, strict=True)
        ]  # fmt: skip

        def emit(kind: str, **fields: Any) -> None:
            if kind == "metric":
                fields["name"] = f"loss, {shots or 'all'} shots, seed {seed}"
            run.emit(kind, **fields)

        params, _ = fine_tune(
            run.params, run.model, examples, settings, seed, run.work / states,
            {**run.identity, "learning_rate": settings.optimizer.learning_rate}, emit,
        )  # fmt: skip
        return params


def decisions(logits_NC: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(logits, targets) of the decisions of rows: one a row, or yes or no for each label if several may hold."""
    return (sigmoid_pairs(logits_NC), targets.ravel().astype(int)) if targets.ndim == 2 else (logits_NC, targets)


def class_weights(config: TuneConfig, labels: Sequence[str]) -> ClassWeights:
    """The configured weights in the order of `labels`. Raises `ConfigError` for a label that does not exist."""
    if not isinstance(config.class_weights, dict):
        return config.class_weights
    if unknown := [label for label in config.class_weights if label not in labels]:
        raise ConfigError(
            f"tune.class_weights: no training row has the label {unknown[0]!r}; there are {', '.join(labels)}"
        )
    return [config.class_weights.get(label, 1.0) for label in labels]


def row_weights(targets_N: np.ndarray, weights: ClassWeights) -> list[float]:
    """The weight of each row by its label; "balanced" as in scikit-learn: rows / (labels · rows of the label)."""
    if weights is None:
        return [1.0] * len(targets_N)
    if weights == "balanced":
        counts = np.bincount(targets_N)
        weights = (len(targets_N) / (np.count_nonzero(counts) * np.maximum(counts, 1))).tolist()
    return [float(weights[target]) for target in targets_N]


def tune_replies(run: LabelTuning, checkpoint: Path) -> dict[str, Any]:
    """Tune for every number of shots and every seed; write the checkpoint with the lowest validation loss.

    Returns for each number of shots the mean loss over the seeds (nats per token of the replies, or mean KL over the
    questions), for entities also the micro-F1 of the spans that the model writes. Raises `ConfigError` for a too long
    row.
    """
    config, tokenizer = run.config, tokenizer_for(run.tokenizer)
    loss = config.loss
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

    def tune(shots: int, seed: int, settings: TuneConfig, states: str) -> tuple[Params, list[float], int]:
        """Returns the parameters, the loss of each epoch, and the number of training rows."""
        order = permute(np.arange(len(ordered)), len(ordered), f"shots/{seed}")
        rows = _examples(tokenizer, labels, [ordered[i] for i in order[: shots or len(ordered)]])
        identity = {**run.identity, "learning_rate": settings.optimizer.learning_rate}
        params, losses = fine_tune(run.params, run.model, rows, settings, seed, run.work / states, identity, run.emit)
        return params, losses, len(rows)

    def loss_at(shots: int, settings: TuneConfig, rate: str) -> float:
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
            settings = searched_config(config, run.work, shots, partial(loss_at, shots))
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


def tune_token_head(run: LabelTuning, checkpoint: Path) -> dict[str, Any]:
    """Fit a head for the BIO tags of tokens on the frozen model, for every number of shots and every seed.

    Writes the checkpoint of the head with the lowest validation loss, and returns the report as `tune_replies` does;
    its baseline is the loss of the tags' shares. Between arms nothing is stored, because the states of all tokens,
    which take the longest, are in memory: a killed run begins again. Raises `ConfigError` where no training row has an
    entity.
    """
    config, tokenizer = run.config, tokenizer_for(run.tokenizer)
    kinds = sorted({entity["label"] for row in run.splits.train for entity in json.loads(row.target)})
    if not kinds:
        raise ConfigError("tune: no training row has an entity, so there is nothing to learn")
    labels = LabelSet(form="entities", method="head", labels=tuple(kinds), longest=config.longest)
    classes, longest = labels.classes, readable(labels, run.model)
    index = {tag: number for number, tag in enumerate(classes)}

    def read(rows: Sequence[LabelledRow]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Hidden states [tokens, D] and tags [tokens] of the first `longest` tokens of each row."""
        places = [token_places(tokenizer, row.text) for row in rows]
        ids = [[tokenizer.end_of_text, *tokens[:longest]] for tokens, _ in places]
        tags = [tags_of(row.text, row.target, where)[:longest] for row, (_, where) in zip(rows, places, strict=True)]
        states = token_states(run.params, run.model, ids, ROWS_AT_ONCE)
        # A kind that no training row has is no class: its tokens are taken for being outside, which counts as wrong.
        return [
            (state_SD[1:], np.array([index.get(tag, 0) for tag in row_tags], np.int64))
            for state_SD, row_tags in zip(states, tags, strict=True)
        ]

    ordered = asked_rows(run.splits.train, None)
    tests = asked_rows(run.splits.test, config.most_asked)
    train = read(ordered)
    validation, test = (
        tuple(map(np.concatenate, zip(*read(rows), strict=True)))
        for rows in (asked_rows(run.splits.validation, config.most_asked), tests)
    )
    # Of a text that cannot be read whole no entity is found, as in `extract`; its entities count as missed.
    whole = [number for number, row in enumerate(tests) if len(tokenizer.encode(row.text.strip())) <= longest]
    states = partial(token_states, run.params, run.model, rows=ROWS_AT_ONCE)
    arms: list[dict[str, Any]] = []
    best: tuple[float, Head, float] | None = None
    for number, (shots, seed) in enumerate(
        [(shots, seed) for shots in config.shots for seed in range(config.seeds)], 1
    ):
        order = permute(np.arange(len(ordered)), len(ordered), f"shots/{seed}")[: shots or len(ordered)]
        features_ND, targets_N = (np.concatenate([train[i][part] for i in order]) for part in (0, 1))
        head = fit_token_head(features_ND, targets_N, len(classes))
        logits_VC, logits_TC = (head.logits(part[0]) for part in (validation, test))
        temperature = fit_temperature(logits_VC, validation[1])
        found = tagged(head, classes, tokenizer, [tests[i].text for i in whole], states)
        replies: list[str | None] = [None] * len(tests)
        for i, entities in zip(whole, found, strict=True):
            replies[i] = entity_json([(tests[i].text[start:end], kind) for start, end, kind in entities])
        figures = {
            name: float(-log_softmax(logits / temperature, axis=1)[np.arange(len(targets)), targets].mean())
            for name, logits, targets in (("validation", logits_VC, validation[1]), ("test", logits_TC, test[1]))
        }
        arms.append({"shots": shots, "seed": seed, "rows": len(order), **figures, "spans": span_scores(replies, tests)})
        if best is None or figures["validation"] < best[0]:
            best = (figures["validation"], head, temperature)
        run.emit("progress", done=number, total=len(config.shots) * config.seeds, unit="arms")
    assert best is not None
    save_weights(checkpoint, run.params, run.model, run.tokenizer)
    save_head(checkpoint / HEAD, best[1])
    write_label_set(checkpoint, labels.model_copy(update={"temperature": best[2]}))
    every = np.concatenate([tags for _, tags in train])
    share_C = (np.bincount(every, minlength=len(classes)) + 1) / (len(every) + len(classes))
    return {
        "unit": "nats per token",
        "baselines": {"shares of the tags": float(-np.log(share_C[test[1]]).mean())},
        "learning_rates": {},
        "arms": [
            {
                "arm": "head",
                "shots": shots,
                "seeds": config.seeds,
                "loss": float(np.mean(losses := [arm["test"] for arm in arms if arm["shots"] == shots])),
                "low": min(losses),
                "high": max(losses),
                "spans": [arm["spans"] for arm in arms if arm["shots"] == shots],
            }
            for shots in config.shots
        ],
        "chosen": min(arms, key=lambda arm: arm["validation"]),
    }


def fit_token_head(features_ND: np.ndarray, targets_N: np.ndarray, classes: int) -> Head:
    """`fit_head` for classes of which some have no row here: these are never chosen."""
    present = np.unique(targets_N)
    if len(present) < 2:
        raise ConfigError("tune: the training rows of an arm have no entity; give more shots")
    fitted = fit_head(features_ND, np.searchsorted(present, targets_N), len(present))
    head = Head(np.zeros((features_ND.shape[1], classes), np.float32), np.full(classes, NEVER, np.float32))
    head.weight_DC[:, present], head.bias_C[present] = fitted.weight_DC, fitted.bias_C
    return head


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


def run_tuning(run: LabelTuning, checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Tune, write the checkpoint into `checkpoint` and the report into `folder`; returns the report, JSON data.

    `arms`: the scores of each method or baseline and number of shots. `chosen`: the run that became the checkpoint.
    For labels also `confusion` (right x predicted; not of several labels), `recall` by label, `reliability` and `leads`
    (over each baseline at the same shots, by a paired bootstrap over seeds and rows), all on the test rows.
    """
    config, splits = run.config, run.splits
    report: dict[str, Any] = {
        "form": config.form,
        "method": config.method,
        "labels": list(splits.labels),
        "rows": {name: len(getattr(splits, name)) for name in ("train", "validation", "test")},
        "data": asdict(splits.report),
        "notes": [PRETRAINED_ON] if config.data.reader == "wikipedia_topics" else [],
    }
    if config.form == "label":
        tuner = LabelTuner(run, checkpoint)
        runs = tuner.arms()
        labels, chosen = tuner.finish(runs)
        report |= {
            "arms": tuner.scores(runs),
            "learning_rates": kept_losses(config, run.work),
            "leads": _leads(tuner, runs, chosen),
            "chosen": {
                "shots": chosen.shots,
                "seed": chosen.seed,
                "temperature": labels.temperature,
                "threshold": labels.threshold,
                "thresholds": labels.thresholds,
                "validation_loss": chosen.validation_loss,
                "calibrated": labels.calibrated,
            },
        }
        report |= {"class_weights": config.class_weights}
        report |= {"multi_label": config.multi_label, "rarest": tuner.rarest}
        note = calibration_note(labels)
        report["notes"].append(f"{note[0].upper()}{note[1:]}.")
        if config.accuracy is not None and chosen.thresholds[0] == ABSTAINS:
            cause = f"No threshold reaches the accuracy {config.accuracy} on the validation rows"
            report["notes"].append(f"{cause}: the model always abstains.")
        predicted = tuner.given(chosen)
        report["recall"] = recalls(predicted, tuner.targets_T, splits.labels)
        logits, targets = decisions(chosen.test_TC, tuner.targets_T)
        report["reliability"] = reliability(probabilities(logits, chosen.temperature), targets)
        rows: dict[str, Any] = {"text": [row.text for row in tuner.test]}
        shares_TC = tuner.shares(chosen.test_TC, chosen.temperature)
        if config.multi_label:
            rows |= {
                "label": [", ".join(labels_of(row)) for row in tuner.test],
                "given": [", ".join(np.array(splits.labels)[given_C]) for given_C in predicted],
                # Of the whole set, as labels are independent.
                "probability": np.where(predicted, shares_TC, 1 - shares_TC).prod(axis=1),
            }
        else:
            report["confusion"] = confusion(predicted, tuner.targets_T, len(splits.labels)).tolist()
            rows |= {
                "label": [row.target for row in tuner.test],
                "given": [splits.labels[i] for i in predicted],
                "probability": shares_TC.max(axis=1),
                "abstained": shares_TC.max(axis=1) < chosen.thresholds[0],
            }
        with atomic_path(folder / ROWS) as temporary:
            pyarrow.parquet.write_table(pyarrow.table(rows), temporary)
    else:
        report |= (tune_token_head if config.method == "head" else tune_replies)(run, checkpoint)
    for shots, losses in report["learning_rates"].items():
        by_rate = ", ".join(f"{rate}: {loss:.3f}" for rate, loss in losses.items())
        best = min(losses, key=losses.__getitem__)
        heading = f"Learning rate at {shots if shots != '0' else 'all'} shots"
        report["notes"].append(f"{heading}: {best}, by the loss on the validation rows ({by_rate} nats).")
    write_json(folder / TUNING, report)
    return report


def _leads(tuner: LabelTuner, runs: list[ArmRun], chosen: ArmRun) -> list[dict[str, Any]]:
    """The tuned model's lead over each baseline with the same shots, on the same rows."""

    def is_right(arm: str) -> np.ndarray:
        """Which rows each seed of an arm has right, bool [seeds, rows]."""
        arm_runs = [run for run in runs if (run.arm, run.shots) == (arm, chosen.shots)]
        right = np.stack([tuner.given(run) == tuner.targets_T for run in arm_runs])
        return np.asarray(right.all(axis=2) if right.ndim == 3 else right)

    # All seeds of the chosen method, not only the chosen one, which was chosen for its result.
    model_right = is_right(chosen.arm)
    return [{"over": name, **lead(model_right, is_right(name))} for name in tuner.run.config.baselines]


def tuning_card(report: Mapping[str, Any], config: TuneConfig) -> str:
    """The text of card.md for a report of `run_tuning`."""
    columns, rows = arm_rows(report)
    balance = report["data"]["balance"]
    facts: dict[str, Any] = {
        "multi_label": False,
        **report,
        "title": {"label": f"{len(report['labels'])} labels", "opinions": "shares of options"}.get(
            report["form"], report["form"]
        ),
        "start": config.start or "a checkpoint",
        "unit": config.data.source_column or ("article" if config.data.reader == "wikipedia_topics" else "text"),
        "columns": columns,
        "arms": rows,
        "leaked": ", ".join(f"{count:,} ({name})" for name, count in report["data"]["leaked"].items()),
        "balance": [
            # Forms without labels have a single row, under the empty name.
            (label or "all rows", *(balance[split].get(label, 0) for split in ("train", "validation", "test")))
            for label in sorted(set().union(*balance.values()))
        ],
        "noise": [(text, ", ".join(targets)) for text, targets in report["data"]["examples"]],
        "leads": [
            (arm["over"], points(arm["lead"]), f"{points(arm['low'])} to {points(arm['high'])}", f"{arm['p']:.2g}")
            for arm in report.get("leads", [])
        ],
    }
    if report["form"] == "label":
        names, counts = report["labels"], report.get("confusion", ())  # several labels of a text have none
        pairs = [
            (names[target], names[prediction], count)
            for target, row in enumerate(counts)
            for prediction, count in enumerate(row)
            if count and target != prediction
        ]
        chosen = report["chosen"]
        facts |= {
            "recall": recall_rows(report),
            "recall_columns": RECALL,
            "confused": sorted(pairs, key=lambda pair: (-pair[2], pair[:2]))[:MOST_CONFUSED],
            "shots": chosen["shots"] or "all",
            "temperature": f"{chosen['temperature']:.3g}",
            "threshold": None if chosen["threshold"] is None else f"{chosen['threshold']:.3g}",
            "thresholds": [
                (name, f"{share:.3g}") for name, share in zip(names, chosen["thresholds"] or (), strict=False)
            ],
            "weights": config.class_weights,
            "weights_shown": json.dumps(config.class_weights, ensure_ascii=False),
            "label_threshold": config.label_threshold,
        }
    return card(
        "tuning_card.md.j2", {"tags": ["nautile", report["form"], report["method"]]}, facts, Path(__file__).parent
    )
