"""The plan: what depends on what, and which keys a change of the configuration moves."""

import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import ConfigError
from configs.load import STAGES
from configs.schema import RunConfig
from flows.dag import Need, plan, stage_named
from tests.support.toy_stages import toy_stage

ROOT = Path(__file__).resolve().parents[2]

LABELS = [
    "held_out",
    "ingest:wikipedia",
    "ingest:synth",
    "index",
    "distill",
    "pretrain",
    "evaluate:pretrain",
    "align",
    "evaluate:align",
    "reason",
    "evaluate:reason",
    "self_distill",
    "evaluate:self_distill",
    "report",
]


def alone(config: RunConfig) -> dict:
    """Each source by itself: none is compared with an earlier one."""
    return {**config.ingest.model_dump(), "deduplicate": {"across": False}}


def keys(config: RunConfig) -> dict[str, str]:
    return {execution.label: execution.key for execution in plan(config, toy_stage)}


def changed(config: RunConfig, **update) -> list[str]:
    """Labels whose keys move when top-level fields of the configuration are replaced."""
    before, after = keys(config), keys(RunConfig.model_validate({**config.model_dump(), **update}))
    return [label for label in before if before[label] != after.get(label)]


def test_the_chain_in_order(toy):
    assert [execution.label for execution in plan(toy, toy_stage)] == LABELS


def test_each_reads_what_is_made_before_it(toy):
    executions = {execution.label: execution for execution in plan(toy, toy_stage)}
    seen: dict[str, tuple[str, ...]] = {}
    for label, execution in executions.items():
        for need in execution.needs.values():
            assert need.kind in seen[need.producer]
        seen[label] = execution.outputs
    assert executions["pretrain"].needs == {
        "wikipedia": Need("ingest:wikipedia", "tokens"),
        "synth": Need("ingest:synth", "tokens"),
        "distilled": Need("distill", "tokens"),
    }
    assert executions["index"].needs == {"exemplars": Need("ingest:synth", "exemplars")}
    assert executions["distill"].needs["retrieval"] == Need("index", "retrieval")
    assert executions["reason"].needs["checkpoint"] == Need("align", "checkpoint")
    assert executions["evaluate:reason"].needs == {"checkpoint": Need("reason", "checkpoint")}


def test_the_report_reads_every_artifact(toy):
    *before, report = plan(toy, toy_stage)
    assert set(report.needs.values()) == {Need(e.label, kind) for e in before for kind in e.outputs}


def test_exemplars_come_only_from_the_source_that_keeps_them(toy):
    outputs = {execution.label: execution.outputs for execution in plan(toy, toy_stage)}
    assert outputs["ingest:wikipedia"] == ("tokens", "signatures")
    assert outputs["ingest:synth"] == ("tokens", "exemplars", "signatures")


def test_whatever_is_trained_on_is_screened_against_the_benchmarks(toy):
    executions = {execution.label: execution for execution in plan(toy, toy_stage)}
    screened = {"ingest:wikipedia", "ingest:synth", "distill", "align", "reason", "self_distill"}
    reading = {label for label, one in executions.items() if Need("held_out", "questions") in one.needs.values()}
    assert reading == screened | {"report"}


def test_a_later_source_reads_the_signatures_of_the_earlier_ones(toy):
    executions = {execution.label: execution for execution in plan(toy, toy_stage)}
    assert executions["ingest:synth"].needs["against.wikipedia"] == Need("ingest:wikipedia", "signatures")
    assert not any(name.startswith("against.") for name in executions["ingest:wikipedia"].needs)
    config = RunConfig.model_validate({**toy.model_dump(), "ingest": alone(toy)})
    apart = {execution.label: execution for execution in plan(config, toy_stage)}
    assert apart["ingest:wikipedia"].outputs == ("tokens",)
    assert set(apart["ingest:synth"].needs) == {"questions"}


def test_how_many_items_are_asked_moves_no_training(toy):
    """All of a benchmark are held out, however few are asked; of one made to the number asked for, those."""
    asked = [{"name": "gsm8k", "items": 10}, {"name": "wiki_trivia", "items": 10}]
    evaluate = toy.evaluate.model_dump()
    base = RunConfig.model_validate({**toy.model_dump(), "evaluate": {**evaluate, "benchmarks": asked}})
    fewer = [{**asked[0], "items": 5}, asked[1]]
    assert changed(base, evaluate={**evaluate, "benchmarks": fewer})[0] == "evaluate:pretrain"
    made = [asked[0], {**asked[1], "items": 5}]
    assert changed(base, evaluate={**evaluate, "benchmarks": made}) == LABELS


def test_a_change_of_reason_moves_reason_and_what_follows(toy):
    update = toy.reason.model_copy(update={"balance": "cap"})
    assert changed(toy, reason=update.model_dump()) == LABELS[LABELS.index("reason") :]


def test_the_index_stands_while_only_the_distillation_changes(toy):
    assert changed(toy, distill=toy.distill.model_dump() | {"prompts": 3})[0] == "distill"
    assert changed(toy, index={"code_bytes": 24})[:2] == ["index", "distill"]


def test_a_change_of_the_report_moves_only_the_report(toy):
    assert changed(toy, report={"title": "Another"}) == ["report"]


def with_models(config: RunConfig, *endpoints: str) -> RunConfig:
    update = {**config.evaluate.model_dump(), "models": [{"endpoint": name} for name in endpoints]}
    local = config.endpoints["local"].model_dump()
    known = {"local": local, **dict.fromkeys(endpoints, local)}
    return RunConfig.model_validate({**config.model_dump(), "endpoints": known, "evaluate": update})


def test_models_behind_endpoints_are_evaluated_each_alone(toy):
    both = with_models(toy, "qwen", "granite")
    executions = {execution.label: execution for execution in plan(both, toy_stage)}
    assert [label for label in executions if label not in LABELS] == ["evaluate:qwen", "evaluate:granite"]
    assert executions["evaluate:qwen"].needs == {}
    assert executions["evaluate:qwen"].section["model_under_test"] == {"endpoint": "qwen", "column": ""}
    assert list(executions["evaluate:qwen"].section["endpoints"]) == ["qwen"]
    assert executions["report"].needs["evaluate:qwen.evaluation"] == Need("evaluate:qwen", "evaluation")
    # Another model changes the report and no other evaluation, of a checkpoint or of a model.
    before, after = keys(with_models(toy, "qwen")), keys(both)
    assert [label for label in before if before[label] != after[label]] == ["report"]


def test_a_model_without_an_endpoint_or_with_the_name_of_a_stage_is_refused(toy):
    update = {**toy.evaluate.model_dump(), "models": [{"endpoint": "nobody"}]}
    with pytest.raises(ValueError, match=r"evaluate\.models\.0\.endpoint: no endpoint 'nobody'"):
        RunConfig.model_validate({**toy.model_dump(), "evaluate": update})
    with pytest.raises(ConfigError, match="'evaluate:align' would be there twice"):
        plan(with_models(toy, "align"), toy_stage)


def test_a_change_of_evaluate_moves_no_checkpoint(toy):
    update = toy.evaluate.model_copy(update={"max_tokens": 7})
    assert changed(toy, evaluate=update.model_dump()) == [x for x in LABELS if x.startswith("evaluate")] + ["report"]


def test_a_change_of_one_source_leaves_the_other(toy):
    first, second = toy.ingest.sources
    ingest = {**alone(toy), "sources": [first.model_copy(update={"records": 5}).model_dump(), second.model_dump()]}
    moved = changed(RunConfig.model_validate({**toy.model_dump(), "ingest": alone(toy)}), ingest=ingest)
    assert moved[0] == "ingest:wikipedia"
    assert not {"ingest:synth", "index", "distill"} & set(moved)
    assert moved[1:] == LABELS[LABELS.index("pretrain") :]


def test_the_name_of_the_run_moves_nothing(toy):
    assert changed(toy, name="another") == []


def test_sources_outside_every_mixture_are_not_read_by_pretraining(toy):
    phases = [{"name": "one", "tokens": 10, "mixture": {"synth": 1.0}}]
    pretrain = toy.pretrain.model_dump() | {"phases": phases}
    config = RunConfig.model_validate({**toy.model_dump(), "pretrain": pretrain})
    needs = next(execution.needs for execution in plan(config, toy_stage) if execution.label == "pretrain")
    assert set(needs) == {"synth"}


@pytest.mark.parametrize(("kept", "said"), [((0, 0), "none does"), ((4, 4), "wikipedia, synth do")])
def test_exactly_one_source_keeps_exemplars(toy, kept, said):
    sources = [
        source.model_copy(update={"exemplars": count}).model_dump()
        for source, count in zip(toy.ingest.sources, kept, strict=True)
    ]
    config = RunConfig.model_validate({**toy.model_dump(), "ingest": {"row_length": 64, "sources": sources}})
    with pytest.raises(ConfigError, match=said):
        plan(config, toy_stage)


def test_every_stage_of_the_project_is_found_under_its_name():
    for name in STAGES:
        found = stage_named(name)
        assert found.name == name
        assert found.work.__module__ == f"tasks.{name}"


def test_an_unknown_stage_is_refused():
    with pytest.raises(ConfigError, match="no stage 'dream'; there are held_out, ingest"):
        stage_named("dream")


def test_planning_loads_nothing_heavy():
    """Every command that reads a configuration makes its plan; none should wait for JAX."""
    program = (
        "import sys; from configs.load import load; from flows.dag import plan; assert plan(load('local'))\n"
        "heavy = {'jax', 'scipy', 'orbax', 'faiss', 'prefect', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
