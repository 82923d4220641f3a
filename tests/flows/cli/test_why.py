"""`nautile status --why`: which value, file, input or stage version made a key another."""

from dataclasses import replace

import pytest

from nautile.common.errors import ConfigError
from nautile.configs.schema import RunConfig
from nautile.flows.cli import inspect
from nautile.flows.dag import build_dag
from tests.support.stages.toy_dag import toy_dag

pytestmark = pytest.mark.usefixtures("toy_stages")


def rows_of(store, toy, **update) -> dict:
    config = RunConfig.model_validate({**toy.model_dump(), **update})
    return {row["label"]: row for row in inspect.explain(store, config)}


def test_nothing_is_different_in_a_complete_chain(made, toy):
    assert {row["state"] for row in rows_of(made[0], toy).values()} == {"made"}


def test_a_changed_value_is_named_where_it_stands_and_as_an_input_after_that(made, toy):
    store, outputs = made
    reason = toy.reason.model_dump() | {"objective": "capped"}
    rows = rows_of(store, toy, reason=reason)
    assert rows["align"]["state"] == "made"
    assert rows["reason"]["differences"] == ["reason.objective: 'balanced' -> 'capped'"]
    assert rows["reason"]["nearest"] in outputs["reason"].values()
    assert rows["reason"]["inputs"] == []
    (line,) = rows["self_distill"]["inputs"]
    assert line.startswith(f"checkpoint: {outputs['reason']['checkpoint']} -> checkpoint/")
    assert rows["self_distill"]["differences"] == []


def test_what_was_not_set_before(made, toy):
    rollout = toy.reason.rollout.model_dump() | {"thinking_budget": 5}
    rows = rows_of(made[0], toy, reason=toy.reason.model_dump() | {"rollout": rollout})
    assert rows["reason"]["differences"] == ["reason.rollout.thinking_budget: not set -> 5"]


def test_another_stage_version(made, toy):
    store, outputs = made
    step = next(step for step in build_dag(toy, toy_dag) if step.label == "index")
    newer = replace(step, stage=replace(step.stage, version=7))
    artifact = store.get(outputs["index"]["retrieval"])
    assert inspect.section_differences(newer, artifact) == [f"stage index: version {step.stage.version} -> 7"]


def test_a_local_file(made, toy):
    store, outputs = made
    step = next(step for step in build_dag(toy, toy_dag) if step.label == "ingest:wikipedia")
    artifact = store.get(outputs["ingest:wikipedia"]["tokens"])
    source = artifact.manifest["config"]["ingest"]["source"] | {"reader": "jsonl", "path": "/data/*.jsonl"}
    section = {**step.section, "ingest": {**step.section["ingest"], "source": source}}
    before = {**section, "local_files": {"/data/*.jsonl": {"a.jsonl": "0" * 64}}}
    after = {**section, "local_files": {"/data/*.jsonl": {"a.jsonl": "1" * 64}}}
    earlier = replace(artifact, manifest={**artifact.manifest, "config": before})
    lines = inspect.section_differences(replace(step, section=after), earlier)
    assert lines == ["ingest.source.path.a.jsonl: the file's content changed"]


def test_one_step_is_chosen_by_its_label(made, toy):
    (row,) = inspect.explain(made[0], toy, "evaluate:align")
    assert row["label"] == "evaluate:align"
    with pytest.raises(ConfigError, match=r"no step 'alignment' \(did you mean 'align'\?\); there are held_out, "):
        inspect.explain(made[0], toy, "alignment")


def test_an_empty_store_has_nothing_to_compare_with(tmp_path, toy):
    from nautile.store.artifacts import Store

    rows = inspect.explain(Store(tmp_path / "none"), toy)
    assert {(row["state"], row["nearest"]) for row in rows} == {("not made", None)}
