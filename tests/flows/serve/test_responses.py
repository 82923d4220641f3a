"""What the samples of a completion request are drawn by."""

import pytest

from nautile.data.tokenizer import tokenizer_for
from nautile.flows.serve.protocol import CompletionRequest
from nautile.flows.serve.responses import CompletionResponse
from tests.support.processes.serving import CONTEXT, TOKENIZER


@pytest.mark.parametrize("seed", [None, 7])
def test_a_prompt_that_is_given_again_gets_further_samples(seed):
    """A client that wants several samples may repeat the prompt in place of `n`: equal seeds would give one of them."""
    request = CompletionRequest(prompt=["a", "b", "a"], n=2, seed=seed)
    choices = CompletionResponse(request, tokenizer_for(TOKENIZER), CONTEXT, "m").choices
    seeds = [choice.request.seed for choice in choices]
    assert [number for _, number in seeds] == [1, 2, 1, 2, 3, 4]
    firsts = [first for first, _ in seeds[::2]]
    if seed is None:  # two prompts with one seed draw by the same random numbers: their samples are alike
        assert len(set(firsts)) == 3
    else:
        assert firsts == [seed] * 3
