"""The small run that a rehearsal derives: valid for every shipped configuration, and the same where it must be."""

import json
from dataclasses import replace

import pytest

from nautile.common.files import write_json
from nautile.configs.load import load, shipped_files
from nautile.configs.schema import RunConfig
from nautile.flows.dag import pipeline_steps
from nautile.flows.readiness import hub_datasets, remote_endpoints
from nautile.flows.rehearsal import digest_of, not_rehearsed, rehearsed, without_paid
from nautile.store.artifacts import Store
from nautile.tasks.ingest import REHEARSED_ROWS
from nautile.tasks.pretrain import pretrain

SHIPPED = [path.stem for path in shipped_files()]
# Whatever is in these parts of a section is what the real run would have.
STAYS = {
    "tokenizer": (),
    "distill": ("teachers", "probe", "neighbours", "max_tokens", "temperature"),
    "pretrain": ("optimizer", "z_loss"),
    "model": ("vocabulary", "pattern", "context", "compute_dtype", "mixing", "remat", "spectral_samples", "decay"),
    "held_out": (),
    "index": ("embedding",),
}


def dump(config):
    return config.model_dump(mode="json")


@pytest.mark.parametrize("name", SHIPPED)
def test_the_small_run_of_every_shipped_configuration_reaches_the_same(name):
    config = load(name)
    small = rehearsed(config)
    before, after = dump(config), dump(small)
    if config.tokenizer.train:  # with fewer merges, for which the first rows are enough
        for dumped in (before, after):
            dumped["tokenizer"] = {"digits": dumped["tokenizer"]["train"]["digits"]}
    for section, fields in STAYS.items():
        if part := before[section]:
            assert {name: after[section][name] for name in fields or part} == {
                name: part[name] for name in fields or part
            }
    steps = pipeline_steps(config), pipeline_steps(small)
    assert [step.label for step in steps[0]] == [step.label for step in steps[1]]
    assert all(step.stage.rehearsal is not None for step in steps[0]), "each shipped stage says how it is made small"
    assert hub_datasets(steps[0]) == hub_datasets(steps[1]), "every source at its commit"
    assert [e.model for e in remote_endpoints(steps[0]).values()] == [
        e.model for e in remote_endpoints(steps[1]).values()
    ]
    for stage in ("align", "reason", "self_distill"):
        if part := before[stage]:
            policies = [(part.get("policy") or part)["optimizer"], part["rollout"]["prompt_length"]]
            assert [
                (after[stage].get("policy") or after[stage])["optimizer"],
                after[stage]["rollout"]["prompt_length"],
            ] == policies
    assert after["ingest"]["row_length"] == before["ingest"]["row_length"]
    assert all(source.records <= REHEARSED_ROWS for source in small.ingest.sources)
    assert sum(phase["tokens"] for phase in after["pretrain"]["phases"]) <= 10_000
    assert small.model.width * small.model.blocks <= 64
    assert not any(operation["approve"] for operation in after["operation"].values() if isinstance(operation, dict))


def test_the_whole_model_is_trained_if_that_is_asked_for():
    config = load("nautile_370m")
    assert rehearsed(config, full_model=True).model == config.model


def test_what_is_free_has_no_teacher_and_no_judge_that_is_paid():
    small = rehearsed(load("nautile_370m"))
    labels = [step.label for step in pipeline_steps(without_paid(small))]
    assert labels == [
        step.label for step in pipeline_steps(small) if step.label not in ("distill", "align", "evaluate:align")
    ]
    local = rehearsed(load("local"))
    assert without_paid(local) == local


def test_a_stage_that_declares_nothing_runs_as_it_is_configured(monkeypatch):
    config = load("local")
    plain = replace(pretrain, rehearsal=None)
    monkeypatch.setattr("nautile.flows.dag.pretrain", plain)
    assert rehearsed(config).pretrain == config.pretrain


def test_few_of_many_sources_give_each_its_share_and_one_row_is_not_made_more():
    config = dump(load("nautile_370m"))
    config["ingest"]["sources"][0]["records"] = 1
    small = rehearsed(RunConfig.model_validate(config))
    assert small.ingest.sources[0].records == 1
    assert small.self_distill.problems.count == len(small.self_distill.problems.sources)
    assert {s.count for s in small.distill.prompt_sets} == {4}


def test_a_run_that_pays_or_takes_days_says_if_it_was_never_rehearsed(tmp_path):
    store, config, local = Store(tmp_path), load("nautile_370m"), load("local")
    steps = pipeline_steps(config)
    pretraining = [step for step in steps if step.label == "pretrain"]
    assert "pays endpoints, and was never rehearsed: `nautile rehearse nautile_370m`" in not_rehearsed(
        store, config, steps, "nautile_370m"
    )
    assert "is planned for" in not_rehearsed(store, config, pretraining, "nautile_370m")
    assert not_rehearsed(store, local, pipeline_steps(local), "local") == ""
    store.rehearsals.mkdir()
    write_json(store.rehearsal(digest_of(config)), {"complete": False})
    assert "did not reach everything" in not_rehearsed(store, config, steps, "nautile_370m")
    write_json(store.rehearsal(digest_of(config)), {"complete": True})
    assert not_rehearsed(store, config.model_copy(update={"seed": 7}), steps, "") == "", "another seed is no other run"
    other = json.loads(config.model_dump_json())
    other["endpoints"]["mistral_small"]["url"] = "http://127.0.0.1:9/v1"
    assert not_rehearsed(store, RunConfig.model_validate(other), steps, ""), "another address is"


def test_nobody_is_paid_without_a_word_from_the_user(command_line):
    code, out, err = command_line("rehearse", "nautile_370m")
    assert (code, out) == (2, "")
    assert "--spend 1.00" in err
