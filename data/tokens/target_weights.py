"""The loss weight of each target: the one rule by which pretraining, tuning and self-distillation leave prompts out.

A target is the token after an input token, in the same document. With `train_on = "replies"` those inside the prompt
have weight 0, those of the reply weight 1: its first token, which is predicted from the prompt's last one, and its end
marker are among them. With `train_on = "all"` every target has weight 1. Padding has none, so its weight is 0.
"""

import numpy as np


def target_weights(has_target: np.ndarray, positions: np.ndarray, prompts: np.ndarray | int) -> np.ndarray:
    """The weight of the target of each input token, 1 or 0: float32, in the shape of `has_target`.

    has_target: bool, whether a token of the same document follows. positions: of the input token in its document,
    from 0. prompts: leading tokens of its document that are not trained on, which is the length of its prompt, or 0
    to train on all; it broadcasts to `has_target`.
    """
    return (has_target & (positions + 1 >= prompts)).astype(np.float32)
