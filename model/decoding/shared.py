"""Sampling by all processes of a computation: each decodes its share of the prompts on its own devices.

The processes do not wait for each other between tokens, and one that is done early only waits at the end. A sample
depends on its prompt, its seed and the parameters alone, so it does not matter which process draws it.
"""

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from model.decoding.generate import Completion, Generator
from model.layers.common import Params
from model.processes import rows_of_each, share_of
from model.sharding import own_mesh, parameter_shardings, whole_on_hosts

MakeGenerator = Callable[[int, Mesh | None], Generator]


class SharedGenerator:
    """As `Generator`, for all processes to call together with the same prompts; each gets every completion.

    `make(rows, mesh)` makes the generator of one process, for its part of the `rows` completions at a time. The
    parameters are those on `mesh`, of which each process gathers a copy for its own devices.
    """

    def __init__(self, make: MakeGenerator, rows: int, mesh: Mesh | None) -> None:
        self._mesh, self._own = mesh, mesh
        if mesh is not None and jax.process_count() > 1:
            self._own = own_mesh(mesh, jax.process_index())
        self._generate = make(rows // jax.process_count(), self._own)

    def __call__(
        self, params: Params, prompts: Sequence[Sequence[int]], seeds: Sequence[tuple[int, ...]]
    ) -> list[Completion]:
        """One completion per prompt, in order."""
        if self._mesh is None or self._own is None or jax.process_count() == 1:
            return self._generate(params, prompts, seeds)
        whole = whole_on_hosts(params, self._mesh)
        own = jax.device_put(whole, parameter_shardings(whole, self._own))
        part = share_of(len(prompts))
        completions = self._generate(own, prompts[part], seeds[part])
        most = -(-len(prompts) // jax.process_count())
        gathered = rows_of_each(_packed(completions, most, self._generate.sampling.max_tokens))
        return _unpacked(gathered, len(prompts))


def _packed(completions: Sequence[Completion], rows: int, width: int) -> dict[str, np.ndarray]:
    """Completions as arrays of `rows` rows, those after the last empty (`used` 0)."""
    arrays = {name: np.zeros((rows, width), kind) for name, kind in (("ids", np.int32), ("logprobs", np.float32))}
    arrays |= {name: np.zeros(rows, np.int32) for name in ("used", "length", "truncated", "forced")}
    for row, completion in enumerate(completions):
        length = len(completion.ids)
        arrays["ids"][row, :length], arrays["logprobs"][row, :length] = completion.ids, completion.logprobs
        arrays["used"][row], arrays["length"][row], arrays["truncated"][row] = 1, length, completion.truncated
        arrays["forced"][row] = -1 if completion.forced is None else completion.forced
    return arrays


def _unpacked(arrays: dict[str, np.ndarray], count: int) -> list[Completion]:
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
