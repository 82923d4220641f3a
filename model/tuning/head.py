"""A linear head on features of the frozen model: a logistic regression, fitted by L-BFGS (scikit-learn)."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from common.errors import ConfigError
from common.files import atomic_path
from common.text import first_line

MOST_STEPS = 1000


class Head(NamedTuple):
    """Logits of labels are features · weight + bias. float32 [D, C] and [C]."""

    weight_DC: np.ndarray
    bias_C: np.ndarray

    def logits(self, features_ND: np.ndarray) -> np.ndarray:
        """float32 [N, C]"""
        return features_ND @ self.weight_DC + self.bias_C


def fit_head(features_ND: np.ndarray, targets_N: np.ndarray, labels: int, inverse_penalty: float) -> Head:
    """Fit the head on standardised features; the standardisation is then part of its weights.

    `targets_N`: indices below `labels`, each of which must occur. `inverse_penalty`: scikit-learn's C. Raises
    `ValueError` where a label has no row.
    """
    from sklearn.linear_model import LogisticRegression

    if len(np.unique(targets_N)) != labels:
        raise ValueError(f"rows of {len(np.unique(targets_N))} labels, and the head has {labels}")
    mean_D, scale_D = features_ND.mean(axis=0), features_ND.std(axis=0) + 1e-6
    regression = LogisticRegression(C=inverse_penalty, max_iter=MOST_STEPS)
    regression.fit((features_ND - mean_D) / scale_D, targets_N)
    weight_CD, bias_C = regression.coef_, regression.intercept_
    if labels == 2:  # scikit-learn keeps the second label's logit alone
        weight_CD, bias_C = np.concatenate([np.zeros_like(weight_CD), weight_CD]), np.array([0.0, bias_C[0]])
    weight_DC = weight_CD.T / scale_D[:, None]
    return Head(weight_DC.astype(np.float32), (bias_C - mean_D @ weight_DC).astype(np.float32))


def save_head(path: Path, head: Head) -> None:
    """Write the head as safetensors, atomically."""
    with atomic_path(path) as temporary:
        save_file({"weight": np.ascontiguousarray(head.weight_DC), "bias": head.bias_C}, temporary)


def load_head(path: Path, width: int, labels: int) -> Head:
    """Read a head. Raises `ConfigError` for a file that is missing, broken, or of another model or other labels."""
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
