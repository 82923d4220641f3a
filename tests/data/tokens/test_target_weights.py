"""Which targets have a weight, against the rule said in the plainest way."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nautile.data.tokens.loader import target_weights


@given(st.data())
def test_the_targets_of_a_document_after_its_prompt_have_weight(data):
    length = data.draw(st.integers(1, 12))
    prompt, width = data.draw(st.integers(0, length)), length + data.draw(st.integers(0, 4))
    weights = target_weights(np.arange(width) < length - 1, np.arange(width), prompt)
    assert weights.dtype == np.float32
    for position in range(width):
        target = position + 1  # the token that is predicted here
        assert weights[position] == (prompt <= target < length)
