"""Sampling distributed over processes: each decodes its share of the prompts on its own devices.

Processes wait for each other only at the end, not between tokens. A sample depends only on its prompt, its seed and the
parameters, so it does not matter which process draws it.
"""

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from nautile.model.decoding.generate import Completion, Generator
from nautile.model.layers.common import Params
from nautile.model.processes import rows_of_each, share_of
from nautile.model.sharding import own_mesh, parameter_shardings, whole_on_hosts

MakeGenerator = Callable[[int, Mesh | None], Generator]


class SharedGenerator:
    """A `Generator` that all processes call together with the same prompts; each gets all completions.

    `make(rows, mesh)` creates the generator of one process, for its share of the `rows` completions at a time. Each
    process copies the parameters, which are sharded on `mesh`, to its own devices.
    """

    def __init__(self, make: MakeGenerator, rows: int, mesh: Mesh | None) -> None:
        self._mesh, self._local_mesh = mesh, mesh
        if mesh is not None and jax.process_count() > 1:
            self._local_mesh = own_mesh(mesh, jax.process_index())
        self._generate = make(rows // jax.process_count(), self._local_mesh)

    def __call__(
        self, params: Params, prompts: Sequence[Sequence[int]], seeds: Sequence[tuple[int, ...]]
    ) -> list[Completion]:
        """One completion per prompt, in order."""
        if self._mesh is None or self._local_mesh is None or jax.process_count() == 1:
            return self._generate(params, prompts, seeds)
        # Each process decodes its slice of the prompts with its own copy of the parameters.
        gathered_params = whole_on_hosts(params, self._mesh)
        local_params = jax.device_put(gathered_params, parameter_shardings(gathered_params, self._local_mesh))
        part = share_of(len(prompts))
        completions = self._generate(local_params, prompts[part], seeds[part])
        # All processes exchange arrays of equal shape: the largest slice, padded.
        most = -(-len(prompts) // jax.process_count())
        gathered = rows_of_each(_to_arrays(completions, most, self._generate.sampling.max_tokens))
        return _from_arrays(gathered, len(prompts))


def _to_arrays(completions: Sequence[Completion], rows: int, width: int) -> dict[str, np.ndarray]:
    """Completions as arrays of `rows` rows, where `used` is 0 for padding rows."""
    arrays: dict[str, np.ndarray] = {
        name: np.zeros((rows, width), kind) for name, kind in (("ids", np.int32), ("logprobs", np.float32))
    }
    arrays |= {name: np.zeros(rows, np.int32) for name in ("used", "length", "truncated", "forced")}
    for row, completion in enumerate(completions):
        length = len(completion.ids)
        arrays["ids"][row, :length], arrays["logprobs"][row, :length] = completion.ids, completion.logprobs
        arrays["used"][row], arrays["length"][row], arrays["truncated"][row] = 1, length, completion.truncated
        arrays["forced"][row] = -1 if completion.forced is None else completion.forced
    return arrays


def _from_arrays(arrays: dict[str, np.ndarray], count: int) -> list[Completion]:
    """The inverse of `_to_arrays`, for the concatenated rows of all processes."""
    # Processes are in order and each has its slice in order: without the padding the rows are those of the prompts.
    rows = np.flatnonzero(arrays["used"])
    assert len(rows) == count
    return [
        Completion(
            ids=arrays["ids"][row, : arrays["length"][row]],
            logprobs=arrays["logprobs"][row, : arrays["length"][row]],
            truncated=bool(arrays["truncated"][row]),
            forced=None if arrays["forced"][row] < 0 else int(arrays["forced"][row]),
        )
        for row in rows
    ]
