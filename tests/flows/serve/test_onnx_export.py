"""`nautile serve --runtime onnx` as a process, called with the `openai` client."""

import pytest

from nautile.data.chat_template import encode_prompt, parse_completion
from nautile.data.tokenizer import tokenizer_for
from nautile.model.decoding.sampling import Sampling
from nautile.model.runtimes.load import load_runtime
from tests.model.exports.onnx.conftest import TOKENIZER, exports, weights  # noqa: F401 - fixtures
from tests.support.processes.serving import NAME, serving

pytestmark = pytest.mark.slow
TOKENS = 24


@pytest.mark.heavy
def test_an_export_is_served_whole_and_streamed(exports, tmp_path):  # noqa: F811
    tokenizer = tokenizer_for(TOKENIZER)
    prompt = encode_prompt(tokenizer, "2 + 2")
    stops = (tokenizer.im_end, tokenizer.end_of_text)
    sampling = Sampling(TOKENS, temperature=0.8, stop_ids=stops)
    # The first sample has the seed of the first question to `nautile chat`.
    [sample] = load_runtime("onnx", exports[8]).sampler(sampling, 1, len(prompt))([prompt], [(3, 1)])
    expected = parse_completion(tokenizer, sample.ids.tolist())
    body = {"model": NAME, "messages": [{"role": "user", "content": "2 + 2"}], "seed": 3, "max_tokens": TOKENS}
    body["temperature"] = sampling.temperature
    with serving(exports[8], tmp_path / "store", "--runtime", "onnx", slots=2) as server:
        client = server.client()
        reply = client.chat.completions.create(**body)
        [choice] = reply.choices
        assert (choice.message.reasoning_content, choice.message.content) == (expected.reasoning, expected.answer)
        assert choice.finish_reason == ("stop" if expected.finished else "length")
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(prompt), len(sample.ids))
        deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**body, stream=True)]
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == expected.reasoning
        assert "".join(delta.content or "" for delta in deltas) == (expected.answer or "")
        assert len(deltas) > 4
        # Scores of a prompt come from the prompt graph alone.
        scored = client.completions.create(model=NAME, prompt="abc", max_tokens=0, echo=True, logprobs=1).choices[0]
        assert scored.logprobs.token_logprobs[0] is None
        assert all(logprob < 0 for logprob in scored.logprobs.token_logprobs[1:])
    assert "Traceback" not in (tmp_path / "store.log").read_text()
