"""`nautile serve` as a process, called with the `openai` client: responses, streams, overload, disconnects."""

import json
import re
import select
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from nautile.data.chat_template import encode_prompt, parse_completion
from nautile.data.tokenizer import tokenizer_for
from nautile.model.decoding.generate import Generator
from nautile.model.decoding.sampling import Sampling
from nautile.model.weights.files import load_weights
from tests.support.processes.serving import CONTEXT, NAME, QUEUE, SLOTS, TOKENIZER
from tests.support.servers.listening import listening

pytestmark = pytest.mark.slow
QUESTION = [{"role": "user", "content": "2 + 2"}]
LONG = {"model": NAME, "prompt": "xy", "max_tokens": 100, "temperature": 0}  # it meets no stop id: see the first test


@pytest.fixture(scope="module")
def client(server):
    return server.client()


@pytest.fixture(scope="module")
def generated(checkpoint):
    """A function of (prompt ids, temperature, seed): the ids that `model.decoding.generate` generates."""
    params, model, _ = load_weights(checkpoint)
    tokenizer = tokenizer_for(TOKENIZER)
    stops = (tokenizer.im_end, tokenizer.end_of_text)

    def generate(prompt, temperature, seed):
        generator = Generator(model, Sampling(40, temperature, stop_ids=stops), 1, 40)
        return generator(params, [prompt], [seed])[0].ids.tolist()

    return generate


def test_the_long_request_uses_all_its_tokens(client):
    """The tests of overload and of disconnects rely on it."""
    assert client.completions.create(**LONG).usage.completion_tokens == 100


def test_it_listens_on_loopback_only(server):
    assert listening(server.process.pid) == {"127.0.0.1"}


def test_it_answers_to_names_of_this_machine_only(server):
    """A page whose name suddenly resolves to 127.0.0.1 is the same origin to a browser (DNS rebinding)."""
    for path in ("/metrics", "/v1/models"):
        assert httpx.get(f"{server.root}{path}", headers={"Host": "evil.example"}).status_code == 403
        assert httpx.get(f"{server.root}{path}", headers={"Host": f"localhost:{server.port}"}).status_code == 200


@pytest.mark.parametrize(("temperature", "seed"), [(0, 0), (0.7, 11)])
def test_a_chat_reply_equals_the_generators(client, generated, temperature, seed):
    """The first sample has the seed of the first question to `nautile chat`."""
    tokenizer = tokenizer_for(TOKENIZER)
    prompt = encode_prompt(tokenizer, "2 + 2")
    ids = generated(prompt, temperature, (seed, 1))
    expected = parse_completion(tokenizer, ids)
    reply = client.chat.completions.create(
        model=NAME, messages=QUESTION, temperature=temperature, seed=seed, max_tokens=40
    )
    [choice] = reply.choices
    assert (choice.message.reasoning_content, choice.message.content) == (expected.reasoning, expected.answer)
    assert choice.finish_reason == ("stop" if expected.finished else "length")
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(prompt), len(ids))


def test_a_thinking_budget_brings_an_answer(client):
    body = {"model": NAME, "messages": QUESTION, "seed": 1, "max_tokens": 30}
    cut = client.chat.completions.create(**body, extra_body={"thinking_budget": 4}, logprobs=True, top_logprobs=2)
    [choice] = cut.choices
    assert choice.message.content is not None
    reasoning = choice.logprobs.reasoning_content
    assert len(reasoning) <= 4
    assert cut.usage.completion_tokens_details.reasoning_tokens == len(reasoning)
    assert len(choice.logprobs.content) > 5
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 2
        assert token.logprob <= token.top_logprobs[0].logprob <= 0


@pytest.mark.parametrize("options", [{}, {"stop": ["\n", "e"]}, {"thinking_budget": 6}, {"n": 3}])
def test_a_stream_adds_up_to_the_whole_response(client, options):
    body = {"model": NAME, "messages": QUESTION, "seed": 5, "max_tokens": 60, "extra_body": options}
    whole = client.chat.completions.create(**body)
    *chunks, last = list(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert last.usage == whole.usage
    assert not last.choices
    for expected in whole.choices:
        own = [choice for chunk in chunks for choice in chunk.choices if choice.index == expected.index]
        thinking = "".join(getattr(choice.delta, "reasoning_content", None) or "" for choice in own)
        assert thinking == expected.message.reasoning_content
        assert "".join(choice.delta.content or "" for choice in own) == (expected.message.content or "")
        assert [choice.finish_reason for choice in own if choice.finish_reason] == [expected.finish_reason]
    assert len(chunks) > 4


def test_a_completion_streams_with_its_prompt_and_its_logprobs(client):
    body = {"model": NAME, "prompt": "abc", "seed": 5, "max_tokens": 20, "echo": True, "logprobs": 3}
    [whole] = client.completions.create(**body).choices
    chunks = [chunk.choices[0] for chunk in client.completions.create(**body, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert whole.text.startswith("abc")
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = [value for chunk in chunks if chunk.logprobs for value in getattr(chunk.logprobs, name)]
        assert streamed == getattr(whole.logprobs, name)
    assert whole.logprobs.token_logprobs[0] is None
    for token, logprob, best in list(
        zip(whole.logprobs.tokens, whole.logprobs.token_logprobs, whole.logprobs.top_logprobs, strict=True)
    )[1:]:
        assert best[token] == logprob <= max(best.values())


def test_prompts_may_be_texts_or_ids_and_only_be_scored(client):
    tokenizer = tokenizer_for(TOKENIZER)
    texts = ["abc", "a longer text, with punctuation"]
    body = {"model": NAME, "max_tokens": 0, "echo": True, "logprobs": 1}
    by_text = client.completions.create(prompt=texts, **body)
    by_ids = client.completions.create(prompt=[tokenizer.encode(text) for text in texts], **body)
    assert by_text.choices == by_ids.choices
    assert [choice.text for choice in by_text.choices] == texts
    assert [choice.finish_reason for choice in by_text.choices] == ["length", "length"]
    assert by_text.usage.completion_tokens == 0


def test_every_token_has_a_row_whatever_ended_it(client):
    """lm-eval takes the last row for the one generated token, which may be a stop id."""
    tokenizer = tokenizer_for(TOKENIZER)
    prompt = encode_prompt(tokenizer, "2 + 2")
    body = {"model": NAME, "prompt": prompt, "echo": True, "logprobs": 1, "seed": 1, "max_tokens": 90, "n": 20}
    ended = [choice for choice in client.completions.create(**body).choices if choice.finish_reason == "stop"]
    assert ended
    for choice in ended:
        tokens = choice.logprobs.tokens
        assert tokens[: len(prompt)].count("<|im_end|>") == 1
        assert tokens[-1] in ("<|im_end|>", "<|endoftext|>")
        assert choice.text.startswith(tokenizer.decode(prompt))
        assert len(choice.text) - choice.logprobs.text_offset[-1] in (0, 1)  # 1: half a character came before it


def test_a_stop_string_ends_a_completion(client):
    [whole] = client.completions.create(**LONG).choices
    stop = re.search(r"[!-~]{2}", whole.text[10:])[0]
    [cut] = client.completions.create(**LONG, stop=[stop]).choices
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"


def test_concurrent_clients_get_the_same_as_alone(client):
    """Twelve at once over four slots: temperatures, limits and kinds mixed."""

    def ask(index):
        if index % 3 == 0:
            body = {"model": NAME, "messages": QUESTION, "seed": index, "max_tokens": 20 + index}
            return client.chat.completions.create(**body).choices[0].message.reasoning_content
        body = {"model": NAME, "prompt": "x" * (index + 1), "max_tokens": 30, "seed": index}
        return client.completions.create(**body, temperature=index % 2, top_p=0.9).choices[0].text

    alone = [ask(index) for index in range(12)]
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, range(12))) == alone


def test_a_full_queue_refuses_requests_until_there_is_room(server, client):
    """With all slots and half of the queue taken; running requests are not affected."""
    stream = client.completions.create(**LONG, n=QUEUE, stream=True)
    chunks = [next(stream)]
    with pytest.raises(openai.RateLimitError) as refused:
        client.completions.create(**LONG, n=QUEUE)
    assert refused.value.body["code"] == "queue_full"
    assert 1 <= int(refused.value.response.headers["Retry-After"]) <= 60
    chunks += stream
    assert sum(chunk.choices[0].finish_reason == "length" for chunk in chunks) == QUEUE
    assert client.completions.create(**LONG, n=SLOTS).usage.completion_tokens == SLOTS * 100


def test_a_client_that_closes_its_stream_frees_its_slots(server, client):
    before = server.health()["tokens"]
    stream = client.completions.create(**LONG, n=QUEUE, stream=True)
    next(stream)
    stream.close()
    assert server.wait_idle()["tokens"] - before < QUEUE * 100


def test_a_client_that_disconnects_before_the_response_frees_its_slots(server):
    """No chunk was written yet, so only a watch on the connection can notice."""
    before = server.health()["tokens"]
    body = json.dumps({**LONG, "n": QUEUE}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        while not server.health()["busy"]:
            answered, _, _ = select.select([connection], [], [], 0)
            assert not answered, connection.recv(4096)
    assert server.wait_idle()["tokens"] - before < QUEUE * 100


@pytest.mark.parametrize(
    ("path", "changes", "status", "message"),
    [
        ("completions", {"model": "another"}, 404, "'another' is not served here, only 'tiny'"),
        (
            "completions",
            {"prompt": "x" * (CONTEXT + 1)},
            400,
            f"{CONTEXT + 1} tokens do not fit into the model's context of",
        ),
        ("completions", {"max_tokens": CONTEXT}, 400, f"set it to at most {CONTEXT - 2}"),
        ("completions", {"prompt": [5, 999]}, 400, "no token of the vocabulary of 261 has the id 999"),
        ("completions", {"n": 65}, 400, "65 samples exceed the queue of 64"),
        ("completions", {"temperature": -1}, 400, "temperature"),
        ("chat/completions", {"prompt": None}, 400, "messages"),
        ("embeddings", {}, 404, "no POST /v1/embeddings here"),
    ],
)
def test_errors_have_openais_form(server, path, changes, status, message):
    response = httpx.post(f"{server.root}/v1/{path}", json={**LONG, **changes})
    assert response.status_code == status
    error = response.json()["error"]
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"


def test_only_json_up_to_the_size_limit_is_read(server):
    """A web page can post text to a loopback server, but not JSON."""
    url = f"{server.root}/v1/completions"
    body = json.dumps(LONG)
    assert httpx.post(url, content=body, headers={"Content-Type": "text/plain"}).status_code == 415
    assert httpx.post(url, content=body, headers={"Content-Type": "application/json; charset=utf-8"}).status_code == 200
    large = json.dumps({**LONG, "prompt": "x" * 2**22})
    response = httpx.post(url, content=large, headers={"Content-Type": "application/json"})
    assert response.status_code == 413
    assert "larger than 4194304 bytes" in response.json()["error"]["message"]


def test_models_tokenizer_and_state(server, client):
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).max_model_len == CONTEXT
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")
    tokens = httpx.post(f"{server.root}/tokenize", json={"prompt": "naïve <|im_end|>"}).json()
    assert tokens["count"] == len(tokens["tokens"]) == len("naïve <|im_end|>".encode())
    assert httpx.post(f"{server.root}/detokenize", json={"tokens": tokens["tokens"]}).json() == {
        "prompt": "naïve <|im_end|>"
    }
    assert httpx.post(f"{server.root}/tokenize", json={"prompt": "<|im_end|>"}).json()["count"] == 1
    state = server.wait_idle()
    assert (state["status"], state["slots"], state["busy"], state["waiting"]) == ("ok", SLOTS, 0, 0)
    assert httpx.get(f"{server.root}/ready").status_code == 200
