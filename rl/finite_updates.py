"""Count the updates that `model.training.optimizer.finite_update` skipped; too many in a row end the stage."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from nautile.common.errors import ConfigError
from nautile.model.layers.common import Params

logger = logging.getLogger(__name__)

NAMES_SHOWN = 3  # names of parameters in a message


@dataclass
class SkippedUpdates:
    """Counts the skipped updates: `total`, and the steps of the current run of consecutive ones, `in_row`.

    `limit`: how many may follow each other. `section`: the section of the configuration that messages name.
    """

    limit: int
    section: str
    total: int = 0
    in_row: list[int] = field(default_factory=list)

    def record(self, step: int, measured: Mapping[str, Any], params: Params) -> bool:
        """Record the update of `step` and return whether it was applied.

        `measured`: what `finite_update` returned, in host memory. `params`: the tree of the gradient, for the names of
        its leaves. Raises `ConfigError` if more than `limit` updates in a row were skipped.
        """
        if measured["applied"]:
            self.in_row = []
            return True
        # The parameters and moments are as before. Name what went wrong while the evidence is at hand.
        self.total += 1
        self.in_row.append(step)
        leaves = jax.tree_util.tree_leaves_with_path(params)
        paths = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
        names = [path for path, flag in zip(paths, np.asarray(measured["not_finite"]), strict=True) if flag]
        others = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        evidence = (
            f"the gradients of {', '.join(names[:NAMES_SHOWN])}{others}, of {len(paths)} parameters, are not finite"
            if names
            else f"the norms are {measured['grad_norm']} of the gradient and {measured['update_norm']} of the update"
        )
        logger.warning("step %d: the update is not finite and was not applied: %s", step, evidence)
        if len(self.in_row) > self.limit:
            raise ConfigError(
                f"{self.section}: {len(self.in_row)} updates in a row were not finite (steps {self.in_row[0]} to "
                f"{step}), more than {self.section}.skip_limit {self.limit} allows; none was applied. In the last "
                f"{evidence}. Lower {self.section}.optimizer.learning_rate or .clip, or raise .warmup_steps"
            )
        return False
