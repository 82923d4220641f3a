"""`nautile plan`: a small model's training step compiled for absent TPUs, and the plan as an artifact."""

import json
import math
import re
import sys

import pytest

from nautile.configs.load import load
from nautile.flows import planning
from nautile.flows.cli import main as cli
from nautile.model.capacity import topology
from nautile.model.capacity.compiled import CompiledStep, _largest
from nautile.store.artifacts import Store

SMALL = """
extends = "local"
name = "small"
[model]
pattern = "SA"
[pretrain]
batch_rows = 16
micro_rows = 16
fsdp = 4
# Rollouts of one size, whose programs are then compiled once for three stages.
[align.rollout]
prompts = 4
group = 4
[reason.rollout]
prompts = 4
group = 4
[self_distill.rollout]
prompts = 4
group = 4
"""
PAID_TEACHER = """
[distill]
teachers = [{ endpoint = "paid" }]
[endpoints.paid]
kind = "mistral"
model = "mistral-large-2512"
key_variable = "PAID_KEY"
dollars_per_million_in = 0.5
dollars_per_million_out = 1.5
"""


@pytest.fixture
def nautile(tmp_path, monkeypatch, capfd):
    def call(*arguments, more=""):
        monkeypatch.setenv("NAUTILE_STORE", str(tmp_path / "store"))
        (tmp_path / "small.toml").write_text(SMALL + more, encoding="utf-8")
        monkeypatch.setattr(sys, "argv", ["nautile", "plan", str(tmp_path / "small.toml"), *arguments])
        with pytest.raises(SystemExit) as ending:
            cli.main()
        out, err = capfd.readouterr()
        return ending.value.code or 0, out, err

    return call


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.timeout(900)  # seven compilations for the largest batch: 155 s of processor time
def test_a_step_is_compiled_for_absent_chips(nautile, tmp_path):
    code, out, err = nautile("--topology", "v4:2x2x1", "--json")
    assert code == 0, err
    plan = json.loads(out)
    assert (plan["chips"], plan["hosts"], plan["mesh"]) == (4, 1, {"data": 1, "fsdp": 4})
    asked, largest = plan["asked"], plan["largest"]
    assert (asked["micro_rows"], asked["rows_per_chip"], asked["fits"]) == (16, 4, True)
    assert 0 < asked["arguments"] < asked["peak"] < 2**30
    assert largest["micro_rows"] == 16 << 6  # so small a model: the most that is looked for
    assert asked["peak"] < largest["peak"] < plan["memory_limit"]
    assert plan["days"] == pytest.approx(plan["tokens"] / plan["tokens_per_second"] / 86_400)
    local = load("local")
    positions = local.pretrain.batch_rows * local.ingest.row_length
    assert plan["steps"] == sum(math.ceil(phase.tokens / positions) for phase in local.pretrain.phases)
    [artifact] = Store(tmp_path / "store").list("plan")
    assert artifact.manifest["facts"]["advice"] == "it fits"
    code, out, _ = nautile("--topology", "v4:2x2x1")  # the same request: the artifact is reused
    assert code == 0
    assert "It fits" in out
    assert "Estimated, not measured: at a utilisation of 11%" in out
    assert "Cost of the chips: $" in out
    assert "by arithmetic" not in out, "the compiler's figures replace the estimate"
    assert len(Store(tmp_path / "store").list("plan")) == 1


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.timeout(600)  # three small programs, compiled for a TPU
def test_a_block_is_compiled_alone_in_a_setting(nautile):
    """Both passes and the head for a TPU, whose compiler estimates cycles; the second time nothing is compiled."""
    arguments = ("--compare", "--topology", "v4:2x2x1", "--setting", "fused/16/block")
    code, out, err = nautile(*arguments, "--json")
    assert code == 0, err
    [comparison] = json.loads(out)
    [row] = comparison["settings"]
    passes = row["programs"]
    assert comparison["rows_per_chip"] == 4
    assert [passes[name]["kernels_counted"] for name in ("forward", "backward", "head")] == [1, 2, 0]  # one recomputed
    assert all(passes[name]["bound"] > 0 for name in passes)
    assert 0 < passes["forward"]["kernels"] < passes["forward"]["estimate"] < passes["backward"]["estimate"]
    assert 0 < row["tokens_per_second_estimate"] < row["tokens_per_second_bound"]
    code, again, _ = nautile(*arguments, "--json")
    assert (code, json.loads(again)) == (0, [comparison])
    code, out, _ = nautile(*arguments)
    assert "| fused/16/block |" in out
    assert "nothing is measured" in out


def test_what_needs_no_compiler_is_shown_where_a_compiler_is_missing(nautile, tmp_path, monkeypatch):
    message = "v4:2x4x4: its compiler (libtpu) is not installed: run `make ahead`"
    monkeypatch.setattr(topology, "compiler_installed", lambda package: False)
    monkeypatch.setattr(planning, "run_stage", lambda *arguments: pytest.fail("a process was started to find that out"))
    monkeypatch.delenv("PAID_KEY", raising=False)
    wide = ("--set", "pretrain.batch_rows=32", "--set", "pretrain.micro_rows=32")
    code, out, err = nautile("--topology", "v4:2x4x4", *wide, more=PAID_TEACHER)
    assert code == 2
    assert err.strip() == message
    assert "estimated by arithmetic" in out
    assert re.search(
        r"Time: 0\.0 days at an assumed utilisation of 11%; 1\.60 M tokens of .+FLOP each on 32 chips", out
    )
    assert re.search(r"Cost of the chips: \$0\.\d+ for 0 chip-hours at \$3\.22 each, estimated", out)
    assert re.search(r"not asked: endpoints about their keys and models \(1\); `nautile plan .*--online` asks", out)
    assert "distill, paid (teacher): 32 requests" in out
    assert "Targets trained on" in out
    assert "still to be set:\n  PAID_KEY is not set in the environment: the key of endpoints.paid" in out
    code, out, _ = nautile("--json", "--fsdp", "1", more=PAID_TEACHER + '[launch]\ntopology = "spark:1"\n')
    plan = json.loads(out)
    assert (code, plan["calls"][0]["endpoint"]) == (0, "paid")
    assert plan["refused"].startswith("spark:1: its compiler")  # without the option, the configuration's: no error
    assert (plan["estimate"]["fits"], plan["estimate"]["days"], plan["online"]) == (True, None, None)
    assert plan["sources"]["distilled"]["train_on"] == "replies"
    assert plan["sources"]["distilled"]["epochs"] is None
    assert [line.partition(" ")[0] for line in plan["missing"]] == ["PAID_KEY"]


def test_a_device_is_planned_stage_by_stage_without_a_compiler(nautile, monkeypatch):
    monkeypatch.setattr(planning, "run_stage", lambda *arguments: pytest.fail("something was compiled"))
    monkeypatch.setenv("PAID_KEY", "")
    code, out, err = nautile("--device", "v5e-8", "--price", "3", "--json", more=PAID_TEACHER)
    assert code == 0, err
    plan = json.loads(out)
    stages = {row["stage"]: row for row in plan["stages"]}
    assert (plan["chips"], plan["pretraining"]["chips"], plan["utilisation"]["measured"]) == (8, 8, False)
    # What no formula is for has no hours; the others cost as many hours as there are chips.
    assert [name for name, row in stages.items() if row["hours"] is None] == [
        "held_out", "ingest", "index", "distill", "report",
    ]  # fmt: skip
    assert stages["reason"]["chip_dollars"] == pytest.approx(stages["reason"]["hours"] * 8 * 3)
    assert stages["distill"]["calls_dollars"] > 0
    assert stages["align"]["calls_dollars"] is None, "a program of this machine is not paid"
    assert plan["hours"] == pytest.approx(sum(row["hours"] or 0 for row in stages.values()))
    code, out, _ = nautile("--device", "h200")
    assert code == 0
    assert "$3.59 a chip and hour (RunPod's list, 2026-03)" in out
    assert "| distill | 32 prompts; 32 calls, " in out
    assert "never run on this chip" not in out, "measured on this one"


def test_a_batch_that_does_not_fit_the_device_is_divided(nautile):
    rows = ("--set", "pretrain.batch_rows=4096", "--set", "pretrain.micro_rows=4096", "--set", "model.width=1024")
    code, out, _ = nautile("--device", "rtx4090", "--json", *rows)
    estimate = json.loads(out)["pretraining"]
    assert (code, estimate["fits"]) == (0, True)
    assert 0.3 < estimate["memory"] / estimate["memory_limit"] < 0.8
    assert 4096 % estimate["rows_per_chip"] == 0
    code, out, _ = nautile("--device", "rtx4090", *rows, "--set", "model.blocks=1000")
    assert code == 2
    assert "does not fit" in out


def test_a_run_that_is_not_possible_on_the_chips_is_said_beside_the_tables(nautile):
    for options in (["--topology", "v4:2x4x4"], ["--set", "launch.topology=v4:2x4x4"]):
        code, out, err = nautile(*options, "--row-length", "128")
        assert code == 2
        assert "pretrain.micro_rows 16 does not divide among 32 devices: make it a multiple of 32" in err
        assert "still to be set: nothing" in out


@pytest.mark.parametrize("name", ["local", "smollm2", "spark", "nautile_100m", "nautile_370m"])
def test_a_shipped_configuration_names_chips_on_which_it_can_run(name):
    config = load(name)
    chips = config.launch.topology
    assert (chips == "local") == (planning.estimate_pretraining(config, chips, 0.4, None) is None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--topology", "v9:2x2"], "topology 'v9:2x2': name a chip and a shape"),
        (["--topology", "local"], "pretrain.fsdp 4 does not divide the 1 devices"),
        (["--topology", "v4:2x2x2", "--fsdp", "3"], "pretrain.fsdp 3 does not divide the 8 devices of v4:2x2x2"),
        (["--topology", "local", "--fsdp", "1", "--mfu", "1.5"], "--mfu 1.5 must be above 0"),
        (["--setting", "fused/32/block"], "--setting needs --compare"),
        (["--device", "a40"], "--device 'a40': give one of v4, v5e, v5p, v6e, a100, h100, h200, rtx4090, spark, or"),
        (["--device", "v4-63"], "--device 'v4-63': give one of"),
        (["--device", "v5e-8", "--topology", "local"], "--device estimates by formula alone"),
        (["--device", "v5e-24"], "does not divide among 24 devices"),
        (["--compare", "--topology", "v4:2x2x1,v9:2x2"], "topology 'v9:2x2': name a chip and a shape"),
        (["--compare", "--topology", "local", "--fsdp", "1"], "settings are compared for chips by name"),
        (["--compare", "--setting", "fused/32/all"], "setting 'fused/32/all': name mixing, chunk and remat"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(nautile, options, message):
    code, out, err = nautile(*options)
    assert code == 2
    assert message in err
    assert "Traceback" not in out + err


@pytest.mark.heavy
def test_on_this_machine_only_memory_is_estimated(nautile):
    code, out, err = nautile("--topology", "local", "--fsdp", "1", "--json")
    assert code == 0, err
    plan = json.loads(out)
    assert plan["tokens_per_second"] is None
    assert plan["memory_limit"] is None
    assert plan["asked"]["temporaries"] > 0


@pytest.mark.parametrize(
    ("requested", "memory", "expected", "programs"),
    [
        (64, 164, 64, 2),  # twice as many do not fit
        (64, 240, 128, 2),
        (64, 700, 512, 3),
        (64, 10**6, 4096, 3),
        (64, 120, 16, 3),
        (64, 105, None, 4),
        (8, 104, None, 1),
    ],
)
def test_the_largest_is_found_with_few_programs(requested, memory, expected, programs):
    """On 8 chips, with 100 bytes and one for each row."""
    tried = []

    def attempt(rows):
        tried.append(rows)
        return CompiledStep(rows, 100 + rows)

    most = _largest(8, attempt(requested), attempt, memory)
    assert (most and most.micro_rows) == expected
    assert len(tried) == len(set(tried)) == programs
