"""Completions that several processes draw come together in the order of the prompts, whatever their shares."""

import jax
import numpy as np
import pytest

from nautile.model.decoding import generate
from nautile.model.decoding.generate import Completion
from nautile.model.processes import share_of

COMPLETIONS = [
    Completion(np.array([5, 6, 1]), np.array([-0.1, -0.2, -0.3], np.float32), False),
    Completion(np.array([7]), np.array([-0.5], np.float32), False, forced=0),
    Completion(np.array([8, 9, 8, 9]), np.full(4, -1.0, np.float32), True, forced=2),
]


@pytest.mark.parametrize("processes", [2, 4])
def test_uneven_and_empty_shares_come_together_in_order(processes, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    packed = []
    for index in range(processes):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        packed.append(generate._to_arrays(COMPLETIONS[share_of(3)], -(-3 // processes), 4))
    gathered = {name: np.concatenate([part[name] for part in packed]) for name in packed[0]}
    for completion, expected in zip(generate._from_arrays(gathered, 3), COMPLETIONS, strict=True):
        np.testing.assert_array_equal(completion.ids, expected.ids)
        np.testing.assert_array_equal(completion.logprobs, expected.logprobs)
        assert (completion.truncated, completion.forced) == (expected.truncated, expected.forced)
