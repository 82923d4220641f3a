"""The estimate by arithmetic, against the model's own shapes and the compilers' figures in docs/tpu.md."""

import pytest

from nautile.common.errors import ConfigError
from nautile.configs.load import load
from nautile.model.capacity.flops import estimate_training, parameter_counts, parameters_by_formula
from nautile.model.capacity.topology import GIB, parse_topology

PUBLISHED = load("nautile_370m")


def published(name: str, rows: int, fsdp: int, price: float | None = None, **model):
    config = PUBLISHED.pretrain.model_copy(update={"batch_rows": rows, "micro_rows": rows, "fsdp": fsdp})
    return estimate_training(config, PUBLISHED.model.model_copy(update=model), 1024, parse_topology(name), 0.4, price)


@pytest.mark.parametrize(
    "changes",
    [
        {"pattern": "SA"},
        {"pattern": "AAS", "grid": "free", "integration": "free", "query_heads": 2, "spectral_samples": 4},
        {"pattern": "S", "convolution": 2, "readout_expand": 1, "expand": 4},
    ],
)
def test_the_formula_has_every_parameter(changes):
    model = load("local").model.model_copy(update=changes)
    assert sum(parameters_by_formula(model).values()) == sum(parameter_counts(model).values())


@pytest.mark.parametrize(
    ("name", "rows", "fsdp", "compiled"),
    [
        ("v4:2x4x4", 512, 32, 5.2),
        ("v4:2x4x4", 2048, 32, 19.1),
        ("v4:2x4x4", 4096, 32, 36.0),
        ("v4:4x4x4", 512, 32, 2.6),
        ("spark:1", 128, 1, 29.5),
        ("spark:1", 256, 1, 53.0),
    ],
)
def test_the_memory_is_near_the_compilers(name, rows, fsdp, compiled):
    estimate = published(name, rows, fsdp)
    assert estimate.parameters == 371_901_088
    assert estimate.memory / GIB == pytest.approx(compiled, rel=0.2)
    assert estimate.fits == (compiled * GIB <= estimate.memory_limit)


def test_what_is_kept_grows_with_what_is_not_recomputed():
    kept = [published("h200:8", 64, 8, remat=remat).activations for remat in ("block", "layer", "dots", "none")]
    assert kept == sorted(set(kept))


def test_time_and_cost_follow_from_the_formula():
    estimate = published("v4:2x4x4", 512, 32)
    assert estimate.days == pytest.approx(4.5, abs=0.05)  # docs/tpu.md
    assert estimate.dollars == pytest.approx(estimate.days * 24 * 32 * 3.22)
    assert published("v4:2x4x4", 512, 32, price=0.0).dollars == 0.0
    unknown = published("spark:1", 128, 1)
    assert (unknown.days, unknown.dollars) == (None, None)
    assert published("rtx4090:1", 8, 1).days > 100


def test_what_does_not_divide_is_refused():
    with pytest.raises(ConfigError, match=r"pretrain\.fsdp 32 does not divide the 8 devices of h100:8"):
        published("h100:8", 512, 32)
    with pytest.raises(ConfigError, match="does not divide among 8 devices"):
        published("h100:8", 100, 8)
