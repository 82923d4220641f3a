"""The seeds of a recipe that the catalog knows: which runs count, and once each."""

import pytest

from nautile.store.catalog import Catalog
from nautile.tasks.reporting.other_seeds import accuracies_by_seed, recipe_seeds, spread, spread_in_words
from tests.support.samples.recorded_runs import recorded_run

LABEL = "evaluate:reason"


@pytest.fixture
def by_seed_of(store):
    def call(run, *how):
        catalog = Catalog(store)
        catalog.ingest()
        with catalog.reading() as read:
            return accuracies_by_seed(read, run, *how)

    return call


def settings(seed, **more):
    return {"name": f"run {seed}", "seed": seed, "reason": {"policy": {"steps": 3}}, **more}


def test_a_recipe_is_the_configuration_without_seeds_names_and_what_no_key_contains(store, by_seed_of):
    recorded_run(store, "first", settings(1), LABEL, 0.5)
    recorded_run(store, "second", settings(2, launch={"processes": 2}), LABEL, 0.6)
    recorded_run(store, "other", settings(3, reason={"policy": {"steps": 4}}), LABEL, 0.9)
    recorded_run(store, "elsewhere", settings(4), "evaluate:align", 0.9)
    accuracies = by_seed_of("first")
    assert accuracies[LABEL] == {"held_out": {"1": 0.5, "2": 0.6}}
    over_seeds = spread(accuracies, LABEL, "held_out")
    assert over_seeds["mean"] == pytest.approx(0.55)
    assert (over_seeds["low"], over_seeds["high"]) == (0.0, 1.0)  # those of Student's t are -0.09 and 1.19
    assert spread_in_words("A", over_seeds) == (
        "A: 2 seeds of this recipe in the store, mean 55.0 % [0.0, 100.0] over seeds, standard deviation 7.1 points"
    )
    assert spread(accuracies, "evaluate:align", "held_out") is None  # one seed has no spread
    assert recipe_seeds({"a": accuracies, "b": {}}, LABEL, "held_out")["b"] is None


def test_seeds_of_parts_are_seeds_of_the_recipe(store, by_seed_of):
    """But for that of the evaluation, with which other problems are asked."""
    none = {"data": None, "weights": None, "sampling": None, "evaluation": 0}
    recorded_run(store, "plain", settings(1, seeds=none), LABEL, 0.5)
    recorded_run(store, "again", settings(1, seeds=none), LABEL, 0.52)
    recorded_run(store, "weights", settings(1, seeds={**none, "weights": 5}), LABEL, 0.6)
    recorded_run(store, "other problems", settings(2, seeds={**none, "evaluation": 3}), LABEL, 0.9)
    assert by_seed_of("plain")[LABEL]["held_out"] == {"1": 0.52, "1, weights 5": 0.6}


def test_a_seed_counts_once_and_so_does_an_evaluation_that_two_seeds_share(store, by_seed_of):
    recorded_run(store, "old", settings(1), LABEL, 0.4)
    recorded_run(store, "new", settings(1), LABEL, 0.5)
    recorded_run(store, "reusing", settings(2), LABEL, 0.5, execution="execution-new")
    recorded_run(store, "own", settings(3), LABEL, 0.7)
    assert by_seed_of("old")[LABEL]["held_out"] == {"1": 0.5, "3": 0.7}


def test_a_run_without_a_plan_and_another_verdict_have_no_seeds(store, by_seed_of):
    recorded_run(store, "first", settings(1), LABEL, 0.5)
    assert by_seed_of("unknown") == {}
    assert by_seed_of(None) == {}
    assert by_seed_of("first", "lenient") == {}
    assert by_seed_of("first", "strict", "likelihood") == {}
