import pytest
from pydantic import ValidationError

from configs.endpoint import EndpointConfig, known_fallbacks, with_fallbacks
from configs.load import load, stage_section


def endpoint(**fields):
    return EndpointConfig(kind="openai", model="m", url="http://127.0.0.1/v1", **fields)


def test_what_may_answer_in_anothers_place_belongs_to_the_stages_section():
    endpoints = {"a": endpoint(fallback=("c",)), "b": endpoint(), "c": endpoint()}
    assert with_fallbacks(["a"], endpoints) == ["a", "c"]
    assert with_fallbacks(["b"], endpoints) == ["b"]
    config = load("nautile_370m")
    first = {
        **config.endpoints,
        "gpt_oss_20b": config.endpoints["gpt_oss_20b"].model_copy(update={"fallback": ("spare",)}),
    }
    changed = config.model_copy(update={"endpoints": {**first, "spare": endpoint()}})
    assert "spare" in stage_section(changed, "distill")["endpoints"]
    assert "spare" not in stage_section(changed, "align")["endpoints"]


@pytest.mark.parametrize("name", ["itself", "nobody"])
def test_a_fallback_must_be_another_endpoint(name):
    with pytest.raises(ValueError, match=rf"endpoints\.itself\.fallback: no other endpoint '{name}'"):
        known_fallbacks({"itself": endpoint(fallback=(name,)), "other": endpoint()})


def test_the_embedded_model_has_no_batch_interface():
    with pytest.raises(ValidationError, match="no batch interface"):
        EndpointConfig(kind="embedded", model="m", mode="batch")
