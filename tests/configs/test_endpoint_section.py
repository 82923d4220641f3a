"""`[endpoints]`: fallbacks must exist, and the embedded model has no batch interface."""

import pytest
from pydantic import ValidationError

from nautile.configs.endpoint import EndpointConfig, check_fallbacks, with_fallbacks
from nautile.configs.load import load
from nautile.configs.schema import RunConfig


def endpoint(**fields):
    return EndpointConfig(kind="openai", model="m", url="http://127.0.0.1/v1", **fields)


def test_with_fallbacks_adds_the_fallbacks_of_the_named_endpoints():
    endpoints = {"a": endpoint(fallback=("c",)), "b": endpoint(), "c": endpoint()}
    assert with_fallbacks(["a"], endpoints) == ["a", "c"]
    assert with_fallbacks(["b"], endpoints) == ["b"]


@pytest.mark.parametrize("name", ["itself", "unknown"])
def test_a_fallback_must_be_another_endpoint(name):
    with pytest.raises(ValueError, match=rf"endpoints\.itself\.fallback: no other endpoint '{name}'"):
        check_fallbacks({"itself": endpoint(fallback=(name,)), "other": endpoint()})


def test_the_embedded_model_has_no_batch_interface():
    with pytest.raises(ValidationError, match="no batch interface"):
        EndpointConfig(kind="embedded", model="m", mode="batch")


def test_a_checker_is_always_a_stand_in_and_has_no_batch_interface():
    assert EndpointConfig(kind="checker", model="m").stand_in
    with pytest.raises(ValidationError, match="always a stand-in"):
        EndpointConfig(kind="checker", model="m", stand_in=False)
    with pytest.raises(ValidationError, match="no batch interface"):
        EndpointConfig(kind="checker", model="m", mode="batch")


def test_a_checker_is_asked_for_marks_alone():
    local = load("local").model_dump()
    local["distill"]["teachers"] = [{"endpoint": "checker"}]
    with pytest.raises(ValidationError, match="'checker' is of kind 'checker', which marks answers"):
        RunConfig.model_validate(local)
