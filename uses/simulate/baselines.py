"""Baselines without a language model: fitted on the answers of other people, scored on the same held-out people."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.compose import ColumnTransformer
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from nautile.uses.simulate.people import Person, text_of
from nautile.uses.simulate.reading import MISSING

TREES, LEAF = 200, 5


def uniform(options: int) -> np.ndarray:
    """The same share for each option, [options]."""
    return np.full(options, 1 / options)


def majority(shares: np.ndarray) -> np.ndarray:
    """All probability on the most frequent option (of equal ones the first), [options]."""
    return np.eye(len(shares))[int(np.argmax(shares))]


def predictions(
    train: Sequence[Person],
    answers: np.ndarray,
    people: Sequence[Person],
    fields: Sequence[str],
    options: int,
    seed: int,
    weights: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Predict with a logistic regression and a random forest on the fields: name -> probabilities [people, options].

    Numbers are standardised, other values one-hot encoded; values that are not in training are ignored. `answers` are
    those of `train`, and `weights` theirs (None: all alike); MISSING ones and people without weight are left out. An
    option that nobody in training chose has probability 0.
    """
    weights = np.ones(len(train)) if weights is None else weights
    answered = np.flatnonzero((answers != MISSING) & (weights > 0))
    if not len(answered):
        return {}
    table = _table([train[i] for i in answered.tolist()], fields)
    # A column is numeric if it is in all of training; a single "unknown" makes it one of words.
    numbers = [i for i, column in enumerate(zip(*table, strict=True)) if all(map(_is_number, column))]
    words = [i for i in range(len(fields)) if i not in numbers]
    people_table = _table(people, fields)
    results = {}
    for name, classifier in (
        ("regression", LogisticRegression(max_iter=1000)),
        ("forest", RandomForestClassifier(TREES, min_samples_leaf=LEAF, random_state=seed, n_jobs=1)),
    ):
        probabilities = np.zeros((len(people), options))
        classes = np.unique(answers[answered])
        # A regression needs two classes.
        if len(classes) == 1:
            probabilities[:, classes[0]] = 1.0
        else:
            model = _pipeline(numbers, words, classifier).fit(
                _frame(table, numbers),
                answers[answered],
                model__sample_weight=weights[answered] / weights[answered].mean(),
            )
            probabilities[:, model.classes_] = model.predict_proba(_frame(people_table, numbers))
        results[name] = probabilities
    return results


def _pipeline(numbers: Sequence[int], words: Sequence[int], classifier: Any) -> Pipeline:
    columns = [
        ("numbers", StandardScaler(), list(numbers)),
        ("words", OneHotEncoder(handle_unknown="ignore"), list(words)),
    ]
    fields = ColumnTransformer([column for column in columns if column[2]])
    return Pipeline([("fields", fields), ("model", classifier)])


def _table(people: Sequence[Person], fields: Sequence[str]) -> list[list[Any]]:
    """The fields of each person; numeric values as floats, others as text."""
    rows: list[list[Any]] = [[person.fields.get(field) for field in fields] for person in people]
    return [[float(value) if _is_number(value) else text_of(value) for value in row] for row in rows]


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or value is None:
        return False
    try:
        return bool(np.isfinite(float(value)))
    except (TypeError, ValueError):
        return False


def _frame(table: Sequence[Sequence[Any]], numbers: Sequence[int]) -> np.ndarray:
    """An object array; in a column that is numeric in training, other values become 0."""
    frame = np.empty((len(table), len(table[0])), object)
    for i, row in enumerate(table):
        for j, value in enumerate(row):
            frame[i, j] = (value if _is_number(value) else 0.0) if j in numbers else text_of(value)
    return frame
