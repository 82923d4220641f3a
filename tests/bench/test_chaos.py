"""The schedule of the chaos run over the default configuration."""

from collections import Counter

from bench.chaos.local_faults import INJECTORS, PLAN, draw_schedule
from bench.chaos.local_run import LABELS
from configs.load import load
from flows.dag import pipeline_steps


def test_a_seed_draws_thirty_known_faults_for_steps_of_the_default_run_in_their_order():
    assert list(LABELS) == [step.label for step in pipeline_steps(load("local"))]
    schedules = [draw_schedule(seed) for seed in (1, 1, 2)]
    assert schedules[0] == schedules[1] != schedules[2]
    for schedule in schedules:
        assert [planned.number for planned in schedule] == list(range(1, 31))
        assert Counter(planned.fault for planned in schedule) == Counter(fault for fault, *_ in PLAN)
        assert {planned.fault for planned in schedule} <= INJECTORS.keys()
        places = [(LABELS.index(planned.label), planned.share) for planned in schedule]
        assert places == sorted(places)
