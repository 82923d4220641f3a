"""A key that was written into a configuration is refused, and repeated in no message."""

import json

import pytest
from pydantic import ValidationError

from nautile.common.errors import ConfigError
from nautile.configs.base import Section
from nautile.configs.distill import EmbeddingConfig
from nautile.configs.endpoint import EndpointConfig, is_like_key, is_variable_name
from nautile.configs.load import load, load_form
from nautile.configs.operation import OperationConfig

FIELDS = {"kind": "openai", "model": "m", "url": "https://api.example.com/v1"}
KEYS = [
    "aB3dE5gH7jK9mN1pQ3sT5vW7yZ9bC1dF",  # 32 letters and digits, as Mistral's
    "d41d8cd98f00b204e9800998ecf8427e",
    "Z41D8CD98F00B204E9800998ECF8427E",
    "sk-proj-314159-abc",
    "gsk_abcdefghijklm",
    "hf_AbCdEfGhIjKl",
    "AKIAIOSFODNN7EXAMPLE",
    "hunter2",
    "QWERTYUIOPASDFGHJKLZXCVBNMQWERTY",
]


@pytest.mark.parametrize("key", KEYS)
def test_a_key_in_the_place_of_its_variables_name_is_refused_and_not_repeated(tmp_path, key):
    for section, fields in (
        (EndpointConfig, {**FIELDS, "key_variable": key}),
        (EmbeddingConfig, {"kind": "openai", "key_variable": key, "url": FIELDS["url"]}),
        (OperationConfig, {"notify": key}),
    ):
        with pytest.raises(ValidationError) as refused:
            section.model_validate(fields)
        assert key not in str(refused.value)
    path = tmp_path / "run.toml"
    lines = [f"{name} = {json.dumps(value)}" for name, value in {**FIELDS, "key_variable": key}.items()]
    path.write_text("\n".join(["extends = 'local'", "[endpoints.paid]", *lines]))
    with pytest.raises(ConfigError, match="NAME of an environment variable") as error:
        load(path)
    assert key not in str(error.value)


@pytest.mark.parametrize("key", KEYS[::4])
def test_a_form_does_not_repeat_a_key_either(key):
    with pytest.raises(ConfigError) as refused:
        load_form("local", [f"endpoints.smollm2.key_variable={json.dumps(key)}"])
    assert key not in str(refused.value)


@pytest.mark.parametrize("name", ["OPENAI_API_KEY", "GPT_OSS_120B_KEY", "_K", "LLAMA_3_3_70B_INSTRUCT_TOKEN", "HOOK"])
def test_a_name_of_a_variable_is_accepted(name):
    assert is_variable_name(name)
    assert EndpointConfig(**FIELDS, key_variable=name).key_variable == name


@pytest.mark.parametrize(
    ("extra", "place"),
    [
        ({"api_key": "abc"}, "extra.api_key"),
        ({"api-key": "abc"}, "extra.api-key"),
        ({"headers": {"Authorization": "abc"}}, "extra.headers.Authorization"),
        ({"provider": {"options": [{"auth": {"token": "abc"}}]}}, "extra.provider.options.auth.token"),
        ({"provider": {"anything": "Bearer abc"}}, "extra.provider.anything"),
        ({"anything": "aB3dE5gH7jK9mN1pQ3sT5vW7yZ9bC1dF"}, "extra.anything"),
        ({"list": ["fine", "sk-ant-314159"]}, "extra.list"),
        ({"list": ["github_pat_314159"]}, "extra.list"),
        ({"other": "r8_314159"}, "extra.other"),
        ({"aB3dE5gH7jK9mN1pQ3sT5vW7yZ9bC1dF": True}, "extra"),
    ],
)
def test_a_key_in_extra_is_refused_by_its_place_alone(extra, place):
    with pytest.raises(ValidationError, match=rf"`{place}` holds a secret") as refused:
        EndpointConfig(**FIELDS, extra=extra)
    assert not any(secret in str(refused.value) for secret in ("abc", "aB3dE5", "314159"))


@pytest.mark.parametrize(
    "extra",
    [
        {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
        {"stop_token_ids": [1, 2], "min_tokens": 3, "logit_bias": {"50256": -100}, "top_k": 20},
        {"provider": {"order": ["DeepInfra", "Together"], "quantizations": ["fp8"]}},
        {"tools": [{"function": {"name": "f", "parameters": {"properties": {"password": {"type": "string"}}}}}]},
        {"prompt_cache_key": "3f2b8c1e5d7a9b0c4e6f", "user": "d41d8cd98f00b204e9800998ecf8427e"},
        {"stop": ["\n\nHuman:"], "models": ["meta-llama/Llama-3.3-70B-Instruct", "openai/gpt-oss-120b"]},
    ],
)
def test_fields_that_vendors_know_are_accepted(extra):
    assert EndpointConfig(**FIELDS, extra=extra).extra == extra


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "sk-314159abc"},
        {"url": "https://api.example.com/sk-314159abc/v1"},
        {"url": "user:314159@api.example.com/v1"},
        {"url": "https:\\\\user:314159@api.example.com/v1"},
        {"api_key": "314159"},
    ],
)
def test_a_key_in_any_other_field_is_not_repeated(fields):
    with pytest.raises(ValidationError) as refused:
        EndpointConfig(**(FIELDS | fields))
    assert "314159" not in str(refused.value)


def test_no_section_repeats_what_it_refuses():
    class Part(Section):
        number: int = 0

    with pytest.raises(ValidationError) as refused:
        Part.model_validate({"number": "sk-314159"})
    assert "314159" not in str(refused.value)


def test_models_and_digests_are_no_keys():
    assert not is_like_key("openai/gpt-oss-120b")
    assert not is_like_key("123e4567-e89b-12d3-a456-426614174000")
