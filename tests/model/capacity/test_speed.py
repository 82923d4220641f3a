"""What follows from compiled blocks: bounds, estimates, kernels by formula, tokens/s. No compiler is needed."""

import pytest

from nautile.common.errors import ConfigError
from nautile.configs.load import load
from nautile.model.capacity import compiled
from nautile.model.capacity.compiled import ProgramCost, Setting
from nautile.model.capacity.flops import training_flops
from nautile.model.capacity.topology import CHIPS, parse_topology

CONFIG = load("nautile_370m")
V4 = CHIPS["v4"]


def programs(monkeypatch, cycles):
    """Compilations that would give these cycles: `cycles(setting)` of a block's backward pass; others take none."""

    def block(model, *_):
        text = f"cycles {cycles(Setting.of(model))}"
        passes = {name: {"text": text if name == "backward" else "cycles 0"} for name in ("forward", "backward")}
        return {name: {**part, "temporaries": 1, "seconds": 1.0, "residual_bytes": 2} for name, part in passes.items()}

    asked = []

    def remembered(model, *others):
        asked.append(Setting.of(model))
        return block(model, *others)

    def cost(text):
        return ProgramCost(0.0, 0.0, float(text.split()[1]), 0.0, 0)

    monkeypatch.setattr(compiled, "compiled_block", remembered)
    monkeypatch.setattr(compiled, "compiled_head", lambda *_: {"text": "cycles 0", "temporaries": 1, "seconds": 1.0})
    monkeypatch.setattr(compiled, "program_cost", cost)
    return asked


def compare(settings=(), topology="v4:2x4x4"):
    return compiled.compare(
        CONFIG.pretrain, CONFIG.model, 1024, parse_topology(topology), settings, folder=None, notify=lambda note: None
    )


def test_tokens_per_second_follow_from_the_cycles_of_a_block(monkeypatch):
    """A tenth of a second for the backward pass of each of 8 blocks, and the bytes of the update."""
    programs(monkeypatch, lambda setting: 0.1 * V4.core.clock)
    [row] = compare([Setting("chunked", 32, "block")])["settings"]
    update = 28 * 371_901_088 / 32 / 1.2e12
    assert row["tokens_per_second_estimate"] == pytest.approx(512 * 1024 / (8 * 0.1 + update))
    assert row["mfu_estimate"] == pytest.approx(
        row["tokens_per_second_estimate"] * training_flops(CONFIG.model, 1024) / (32 * 275e12)
    )
    assert row["kept_by_all_blocks"] == 8 * 2


def test_forms_and_chunks_are_compared_first_then_remat_with_the_best(monkeypatch):
    asked = programs(monkeypatch, lambda setting: 1e6 * setting.chunk * (2 if setting.mixing == "chunked" else 1))
    result = compare()
    assert asked[: len(asked) - 3] == list(
        dict.fromkeys(
            [Setting.of(CONFIG.model)]
            + [Setting(form, chunk, CONFIG.model.remat) for form in ("chunked", "fused") for chunk in compiled.CHUNKS]
        )
    )
    assert {setting[:2] for setting in asked[-3:]} == {("fused", 32)}
    assert {setting.remat for setting in asked[-3:]} == {"none", "block", "layer", "dots"} - {CONFIG.model.remat}
    rates = [row["tokens_per_second_estimate"] for row in result["settings"]]
    assert rates == sorted(rates, reverse=True)


def test_what_does_not_fit_comes_last(monkeypatch):
    programs(monkeypatch, lambda setting: 1e6)
    fitting = compiled.compiled_block

    def block(model, *others):
        parts = fitting(model, *others)
        if model.remat == "none":
            parts["backward"] = {"refused": "RESOURCE_EXHAUSTED", "seconds": 1.0}
        return parts

    monkeypatch.setattr(compiled, "compiled_block", block)
    first, last = compare([Setting("fused", 32, "none"), Setting("fused", 32, "block")])["settings"]
    assert (first["remat"], last["refused"]) == ("block", "backward: RESOURCE_EXHAUSTED")


def test_the_bound_is_the_slower_of_operations_and_bytes():
    cost = ProgramCost(275e12, 2.4e12, None, 0.0, 0)
    _, seconds = compiled.add_kernels(cost, {}, CONFIG.model, 1024, V4)
    assert (seconds.bound, seconds.estimate) == (2.0, None)
    _, seconds = compiled.add_kernels(cost._replace(bytes=1.2e11), {}, CONFIG.model, 1024, V4)
    assert seconds.bound == 1.0


def test_a_kernel_takes_its_least_time_on_a_tpu_and_no_estimate_on_a_gpu():
    """1,024 tokens forward: float32 products as six bfloat16 ones, short sides filled up to 128, at 275 TFLOP/s."""
    cost = ProgramCost(0.0, 0.0, 0.0, 1.0, 0)
    total, seconds = compiled.add_kernels(cost, {"forward": 2}, CONFIG.model, 1024, V4)
    products = 1024 * 16 * 2 * 128 * 128 * (2 + 3)
    assert seconds.kernels == seconds.estimate == pytest.approx(2 * 6 * products / 275e12)
    assert total.flops > 0 < total.bytes
    _, seconds = compiled.add_kernels(cost._replace(cycles=None), {"forward": 2}, CONFIG.model, 1024, CHIPS["h100"])
    assert (seconds.estimate, seconds.kernels) == (None, 0.0)
    assert seconds.bound > 0


@pytest.mark.parametrize("text", ["", "fused", "fused/32", "fast/32/block", "fused/0/block", "fused/32/all", "a/1/b/c"])
def test_a_setting_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match="name mixing, chunk and remat, as fused/32/block"):
        compiled.parse_setting(text)


def test_the_devices_of_this_machine_are_not_compared():
    with pytest.raises(ConfigError, match="for chips by name"):
        compare(topology="local")
