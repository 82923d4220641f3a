"""What a run changed against its base configuration."""

import pytest

from nautile.configs.changes import Change, describe_changes, short_names
from nautile.configs.keys import changed_settings
from nautile.configs.load import load, load_base
from tests.support.stages.toy_stages import TOY


@pytest.fixture(scope="module")
def local():
    return load("local")


def test_each_field_that_differs_is_named_with_both_values(local):
    other = load("local", ["reason.policy.steps=3", "name=trial", "ingest.sources.0.records=9"])
    changes = changed_settings(local, other)
    assert [change.field for change in changes] == ["ingest.sources.0.records", "reason.policy.steps"]
    assert changes[1] == Change("reason.policy.steps", local.reason.policy.steps, 3)
    assert changed_settings(other, other) == []


def test_what_changes_the_result_comes_before_what_only_runs_it(local):
    other = load("local", ["operation.pretrain.niceness=3", "pretrain.save_every=7", "reason.policy.steps=3"])
    assert next(iter(changed_settings(local, other))).field == "reason.policy.steps"


def test_a_list_of_another_length_is_one_change(local):
    sources = local.ingest.model_copy(update={"sources": local.ingest.sources[:1]})
    [change] = changed_settings(local, local.model_copy(update={"ingest": sources}))
    assert change.field == "ingest.sources"
    assert describe_changes([change]) == f"sources {len(local.ingest.sources)} entries -> 1 entry"


def test_a_line_names_a_field_by_as_little_as_tells_it_apart():
    changes = [Change("reason.policy.steps", 30, 3), Change("seed", 0, 5)]
    assert describe_changes(changes) == "steps 30 -> 3, seed 0 -> 5"
    more = [*changes, Change("align.policy.steps", 3, 1), Change("pretrain.optimizer.learning_rate", 4e-3, 1e-3)]
    assert describe_changes(more) == "reason.policy.steps 30 -> 3, seed 0 -> 5, align.policy.steps 3 -> 1, and 1 more"
    assert describe_changes(more, None).endswith("learning_rate 0.004 -> 0.001")
    assert describe_changes([]) == ""
    assert short_names(["ingest.sources.0"]) == {"ingest.sources.0": "sources.0"}


def test_values_are_short_and_hold_no_control_characters():
    changes = [Change("a.url", None, "\x1b[31m" + 50 * "x"), Change("a.flag", False, True), Change("a.n", 10**9, 5)]
    text = describe_changes(changes)
    assert [part in text for part in ("\x1b", "flag off -> on", "n 1.00 G -> 5")] == [False, True, True]
    assert len(text) < 80


def test_the_base_is_the_farthest_file_that_is_whole(tmp_path, local):
    (tmp_path / "mine.toml").write_text('extends = "local"\nseed = 3\n')
    (tmp_path / "trial.toml").write_text('extends = "mine.toml"\nseed = 4\n')
    assert load_base(tmp_path / "trial.toml") == load_base("local") == local
    (tmp_path / "part.toml").write_text("seed = 7\n")
    whole = tmp_path / "whole.toml"
    whole.write_text(TOY.read_text(encoding="utf-8").replace("\n", '\nextends = "part.toml"\n', 1))
    assert load_base(whole) == load(whole)
