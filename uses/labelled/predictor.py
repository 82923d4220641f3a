"""Predict labels of texts: calibrated probabilities from a linear head on features of the frozen model (logistic
regression by scikit-learn's L-BFGS), or from the likelihoods of the labels."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from nautile.common.errors import ConfigError
from nautile.configs.model import ModelConfig
from nautile.data.label_set import HEAD, LABELS, Head, LabelSet, load_head, read_label_set
from nautile.data.tokenizer import Tokenizer, tokenizer_for
from nautile.model.decoding.scoring import pooled_states
from nautile.model.layers.common import Params
from nautile.model.runtimes.load import Runtime, load_runtime, runtime_of
from nautile.model.weights.files import CONFIG, read_config
from nautile.uses.labelled.prompts import ContinuationScorer, cut, label_logprobs
from nautile.uses.labelled.scores import label_probabilities, probabilities

MAX_ITERATIONS = 1000
INVERSE_PENALTY = 1.0  # C of the logistic regression: larger is a weaker penalty


ClassWeights = Literal["balanced"] | Sequence[float] | None  # how much the rows of each label count; None: alike


def fit_head(features_ND: np.ndarray, targets: np.ndarray, labels: int, weights: ClassWeights = None) -> Head:
    """Fit a head on standardised features, and fold the standardisation into its weights.

    `targets`: indices below `labels`, each of which must occur; or bool [N, labels] for a head whose labels are
    independent (sigmoid). Raises `ValueError` if a label has no row.
    """
    from sklearn.linear_model import LogisticRegression

    # A feature that never varies is divided by the small number, not by zero.
    mean_D, scale_D = features_ND.mean(axis=0), features_ND.std(axis=0) + 1e-6
    standardised_ND = (features_ND - mean_D) / scale_D
    if targets.ndim == 2:
        weight_DC, bias_C = fit_each(standardised_ND, targets, INVERSE_PENALTY, weights)
    else:
        if len(np.unique(targets)) != labels:
            raise ValueError(f"rows of {len(np.unique(targets))} labels, and the head has {labels}")
        regression = LogisticRegression(C=INVERSE_PENALTY, max_iter=MAX_ITERATIONS, class_weight=by_class(weights)).fit(
            standardised_ND, targets
        )
        weight_DC, bias_C = regression.coef_.T, regression.intercept_
        if labels == 2:  # scikit-learn returns only the second label's logit
            weight_DC, bias_C = np.concatenate([np.zeros_like(weight_DC), weight_DC], axis=1), np.append(0.0, bias_C)
    weight_DC = weight_DC / scale_D[:, None]
    return Head(weight_DC.astype(np.float32), (bias_C - mean_D @ weight_DC).astype(np.float32))


def fit_each(
    features_ND: Any, has_NC: np.ndarray, inverse_penalty: float, weights: ClassWeights = None
) -> tuple[np.ndarray, np.ndarray]:
    """A logistic regression for each label against all rows without it: weights [D, C] and biases [C].

    `features_ND`: also a sparse matrix. `weights`: of a label, for the rows that have it; "balanced": as much in all as
    the rows without it. A label that all rows have, or none, has the bias of its smoothed share (Laplace) alone.
    """
    from sklearn.linear_model import LogisticRegression

    rows, labels = has_NC.shape
    weight_DC, bias_C = np.zeros((features_ND.shape[1], labels)), np.zeros(labels)
    for label, has_N in enumerate(has_NC.T):
        if has_N.all() or not has_N.any():
            share = (has_N.sum() + 1) / (rows + 2)
            bias_C[label] = np.log(share / (1 - share))
            continue
        weight = weights if weights is None or weights == "balanced" else {False: 1.0, True: weights[label]}
        regression = LogisticRegression(C=inverse_penalty, max_iter=MAX_ITERATIONS, class_weight=weight)
        regression.fit(features_ND, has_N)
        weight_DC[:, label], bias_C[label] = regression.coef_[0], regression.intercept_[0]
    return weight_DC, bias_C


def by_class(weights: ClassWeights) -> Any:
    """The weights as scikit-learn takes them for classes 0, 1, …"""
    return weights if weights is None or weights == "balanced" else dict(enumerate(weights))


class LabelPredictor:
    """A tuned checkpoint, or its export for onnxruntime, as a classifier of `rows` texts at once.

    `labels`: others than it was tuned for are scored by likelihood. `runtime`: of the folder, if it is loaded already.
    Raises `ConfigError` for a folder that is no such one.
    """

    def __init__(
        self, folder: Path, rows: int, labels: LabelSet | None = None, runtime: "Runtime | None" = None
    ) -> None:
        labels = labels or read_label_set(folder)
        if labels is None or labels.form != "label":
            kind = f"was tuned for {labels.form}" if labels else f"has no {LABELS}"
            raise ConfigError(f"{folder} {kind}, so it cannot classify; `nautile tune` makes a checkpoint that can")
        self.labels = labels
        self._head = (
            load_head(folder / HEAD, read_config(folder / CONFIG)[0].width, len(labels.labels))
            if labels.method == "head"
            else None
        )
        self._runtime, self._rows = runtime or load_runtime(runtime_of(folder), folder), rows
        self._model, self._tokenizer = self._runtime.config, tokenizer_for(self._runtime.tokenizer)
        self._scorer: ContinuationScorer | None = self._runtime.scorer(rows) if self._head is None else None

    def tokens_cut(self, text: str) -> int:
        """The number of tokens at the end of a text that are not read, because it is too long; 0: all are."""
        longest = self.labels.longest if self._head is None else readable(self.labels, self._model)
        return max(0, len(self._tokenizer.encode(text.strip())) - longest)

    def probabilities(self, texts: Sequence[str]) -> np.ndarray:
        """Calibrated probabilities of `labels.labels`, float64 [texts, labels]; if several may hold, of each alone."""
        if self._head is not None:
            ids = feature_ids(self._model, self._tokenizer, self.labels, texts)
            features = self._runtime.pooled_states(ids, self._rows, self.labels.pooling)
            logits = self._head.logits(features)
        else:
            assert self._scorer is not None
            logits = likelihood_logits(self._scorer, self._model, self._tokenizer, self.labels, texts)
        of_logits = label_probabilities if self.labels.multi_label else probabilities
        return of_logits(logits, self.labels.temperature)


def text_features(
    params: Params,
    model: ModelConfig,
    tokenizer: Tokenizer,
    labels: LabelSet,
    texts: Sequence[str],
    rows: int,
    on_progress: Callable[[int], None] = lambda _: None,
) -> np.ndarray:
    """Features of texts for a head, float32 [texts, D]: of the bare text after the end-of-text token."""
    return pooled_states(params, model, feature_ids(model, tokenizer, labels, texts), rows, labels.pooling, on_progress)


def readable(labels: LabelSet, model: ModelConfig) -> int:
    """The tokens of a text that a head reads: one place of the context is for the end-of-text token before it."""
    return min(labels.longest, model.context - 1)


def feature_ids(model: ModelConfig, tokenizer: Tokenizer, labels: LabelSet, texts: Sequence[str]) -> list[list[int]]:
    """The token ids from which the features of texts are computed."""
    longest = readable(labels, model)
    ids = [[tokenizer.end_of_text, *tokenizer.encode(cut(tokenizer, text, longest))] for text in texts]
    return [text[: model.context] for text in ids]  # a truncated text may be tokenised into more tokens than before


def likelihood_logits(
    scorer: ContinuationScorer, model: ModelConfig, tokenizer: Tokenizer, labels: LabelSet, texts: Sequence[str]
) -> np.ndarray:
    """log p(label | text) minus the label's bias, in nats, float64 [texts, labels]."""
    logprobs = label_logprobs(
        scorer, tokenizer, labels.instructions, texts, labels.labels, longest=labels.longest, context=model.context
    )
    return logprobs - np.asarray(labels.bias) if labels.bias is not None else logprobs
