"""Predict labels of texts: calibrated probabilities from a linear head on features of the frozen model (logistic
regression by scikit-learn's L-BFGS), or from the likelihoods of the labels."""

from collections.abc import Callable, Sequence
from pathlib import Path

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
from nautile.uses.labelled.scores import probabilities

MAX_ITERATIONS = 1000
INVERSE_PENALTY = 1.0  # C of the logistic regression: larger is a weaker penalty


def fit_head(features_ND: np.ndarray, targets_N: np.ndarray, labels: int) -> Head:
    """Fit a head on standardised features, and fold the standardisation into its weights.

    `targets_N`: indices below `labels`, each of which must occur. Raises `ValueError` if a label has no row.
    """
    from sklearn.linear_model import LogisticRegression

    if len(np.unique(targets_N)) != labels:
        raise ValueError(f"rows of {len(np.unique(targets_N))} labels, and the head has {labels}")
    # A feature that never varies is divided by the small number, not by zero.
    mean_D, scale_D = features_ND.mean(axis=0), features_ND.std(axis=0) + 1e-6
    regression = LogisticRegression(C=INVERSE_PENALTY, max_iter=MAX_ITERATIONS)
    regression.fit((features_ND - mean_D) / scale_D, targets_N)
    weight_CD, bias_C = regression.coef_, regression.intercept_
    if labels == 2:  # scikit-learn returns only the second label's logit
        weight_CD, bias_C = np.concatenate([np.zeros_like(weight_CD), weight_CD]), np.array([0.0, bias_C[0]])
    weight_DC = weight_CD.T / scale_D[:, None]
    return Head(weight_DC.astype(np.float32), (bias_C - mean_D @ weight_DC).astype(np.float32))


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

    def is_cut(self, text: str) -> bool:
        """Whether a text has more tokens than are read of it."""
        longest = self.labels.longest if self._head is None else readable(self.labels, self._model)
        return len(self._tokenizer.encode(text.strip())) > longest

    def probabilities(self, texts: Sequence[str]) -> np.ndarray:
        """Calibrated probabilities of `labels.labels`, float64 [texts, labels]."""
        if self._head is not None:
            ids = feature_ids(self._model, self._tokenizer, self.labels, texts)
            features = self._runtime.pooled_states(ids, self._rows, self.labels.pooling)
            logits = self._head.logits(features)
        else:
            assert self._scorer is not None
            logits = likelihood_logits(self._scorer, self._model, self._tokenizer, self.labels, texts)
        return probabilities(logits, self.labels.temperature)


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
