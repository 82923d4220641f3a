"""A linear classification head on features of the frozen model: logistic regression by scikit-learn's L-BFGS."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from nautile.common.errors import ConfigError
from nautile.common.files import atomic_path
from nautile.common.text import first_line

MAX_ITERATIONS = 1000
INVERSE_PENALTY = 1.0  # C of the logistic regression: larger is a weaker penalty


class Head(NamedTuple):
    """Weights of the head: logits = features · weight + bias; float32 [D, C] and [C]."""

    weight_DC: np.ndarray
    bias_C: np.ndarray

    def logits(self, features_ND: np.ndarray) -> np.ndarray:
        """Logits float32 [N, C] of features [N, D]."""
        return features_ND @ self.weight_DC + self.bias_C


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
    # Logits of (x - mean) / scale as logits of x.
    weight_DC = weight_CD.T / scale_D[:, None]
    return Head(weight_DC.astype(np.float32), (bias_C - mean_D @ weight_DC).astype(np.float32))


def save_head(path: Path, head: Head) -> None:
    """Write the head as safetensors, atomically."""
    with atomic_path(path) as temporary:
        save_file({"weight": np.ascontiguousarray(head.weight_DC), "bias": head.bias_C}, temporary)


def load_head(path: Path, width: int, labels: int) -> Head:
    """Read a head. Raises `ConfigError` if the file is missing or broken, or if its shape is another."""
    try:
        tensors = load_file(path)
        head = Head(tensors["weight"], tensors["bias"])
    except (OSError, SafetensorError, KeyError) as error:
        raise ConfigError(f"{path}: cannot be read as the head of a classifier ({first_line(error)})") from None
    if head.weight_DC.shape != (width, labels) or head.bias_C.shape != (labels,):
        raise ConfigError(
            f"{path}: has the shape {head.weight_DC.shape}, and model and labels need ({width}, {labels})"
        )
    return head
