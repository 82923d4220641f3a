"""Validation loss and bits per byte of each source, over the first rows of its validation split."""

import math
from collections.abc import Iterator

import jax
import numpy as np

from data.loader import Batch, Loader
from model.layers import Params
from model.sharding import put_rows
from model.step import BATCH, Program


def validate(program: Program, params: Params, loader: Loader, rows: int) -> dict[str, dict[str, float]]:
    """Mean loss in nats per target, and bits per byte, by source. A source without validation rows is left out."""
    found: dict[str, dict[str, float]] = {}
    for source in loader.names:
        whole = loader.validation(source, rows)
        sums = [program.evaluate(params, put_rows(part, program.mesh)) for part in _parts(whole, program.micro_rows)]
        nats, targets = (sum(float(pair[i]) for pair in sums) for i in range(2))
        size = int(whole["bytes"].sum())
        if targets and size:
            found[source] = {"loss": nats / targets, "bits_per_byte": nats / math.log(2) / size}
    return found


def _parts(whole: Batch, rows: int) -> Iterator[Batch]:
    """This process's share of batches of `rows` rows; the last is filled up with rows that weigh nothing."""
    share = rows // jax.process_count()
    first = share * jax.process_index()
    for start in range(0, len(whole["source"]), rows):
        part = {name: whole[name][start : start + rows] for name in BATCH}
        missing = rows - len(part["source"])
        filled = {name: np.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1)) for name, array in part.items()}
        yield {name: array[first : first + share] for name, array in filled.items()}
