"""Labels of texts by a tuned checkpoint: calibrated probabilities from its head, or from its labels' likelihoods."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from common.errors import ConfigError
from configs.model import ModelConfig
from data.labelled.label_set import HEAD, LABELS, LabelSet, read_label_set
from data.labelled.prompts import cut
from data.tokenizer import Tokenizer, tokenizer_for
from evals.labelling.calibration import probabilities
from evals.labelling.verbalised import label_logprobs
from model.decoding.shared_prefix import SharedPrefixScorer
from model.layers.common import Params
from model.tuning.features import pooled_states
from model.tuning.head import load_head
from model.weights.files import load_weights


class LabelPredictor:
    """A tuned checkpoint's folder as a classifier, `rows` texts at once.

    `labels`: what it was tuned for; given, what it is asked instead, by likelihood. Raises `ConfigError` for a folder
    that is no checkpoint, or not tuned for labels.
    """

    def __init__(self, folder: Path, rows: int, labels: LabelSet | None = None) -> None:
        labels = labels or read_label_set(folder)
        if labels is None or labels.form != "label":
            kind = f"was tuned for {labels.form}" if labels else f"has no {LABELS}"
            raise ConfigError(f"{folder}: {kind}, so it gives no labels; `nautile tune` makes a checkpoint that does")
        self.labels = labels
        self._params, self._model, tokenizer = load_weights(folder)
        self._tokenizer, self._rows = tokenizer_for(tokenizer), rows
        self._head = self._scorer = None
        if labels.method == "head":
            self._head = load_head(folder / HEAD, self._model.width, len(labels.labels))
        else:
            self._scorer = SharedPrefixScorer(self._params, self._model, rows)

    def probabilities(self, texts: Sequence[str]) -> np.ndarray:
        """Calibrated probabilities of `labels.labels`, float64 [texts, labels]."""
        if self._head is not None:
            features = text_features(self._params, self._model, self._tokenizer, self.labels, texts, self._rows)
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
    done: Callable[[int], None] = lambda _: None,
) -> np.ndarray:
    """Features of texts for a head, float32 [texts, D]: of the text alone, with the end-of-text marker before it."""
    longest = min(labels.longest, model.context - 1)
    ids = [[tokenizer.end_of_text, *tokenizer.encode(cut(tokenizer, text, longest))] for text in texts]
    ids = [text[: model.context] for text in ids]  # a text that was cut may have other tokens than it had
    return pooled_states(params, model, ids, rows, labels.pooling, done)


def likelihood_logits(
    scorer: SharedPrefixScorer, model: ModelConfig, tokenizer: Tokenizer, labels: LabelSet, texts: Sequence[str]
) -> np.ndarray:
    """log p(label | text) less the label's bias, in nats, float64 [texts, labels]."""
    logprobs = label_logprobs(
        scorer, tokenizer, labels.instructions, texts, labels.labels, longest=labels.longest, context=model.context
    )
    return logprobs - np.asarray(labels.bias) if labels.bias is not None else logprobs
