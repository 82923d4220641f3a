"""The guard's decision: a policy that does not change is not stopped by chance, and one that falls is."""

import json
from dataclasses import asdict

import numpy as np
import pytest

from nautile.common.errors import ConfigError
from nautile.configs.training import ProblemsConfig
from nautile.evals.scoring.intervals import paired
from nautile.rl.problems import load_guard
from nautile.rl.reinforce import GuardReading, best_of, compare_reading, has_fallen
from tests.rl.conftest import policy

PROBLEMS, ACCURACY = 393, 0.3  # of GSM8K's guard split, and of the paper's model
STAYING = (0.0, 0.5, 0.7, 0.8)  # shares of problems whose outcome does not change; this project's measure: 0.77 to 0.83


def readings_of(rng, staying, count, falls_at=None):
    """Readings until the guard stops the run, or `count`. From `falls_at` on the true accuracy is ten points lower."""
    fixed, base = rng.random(PROBLEMS) < staying, rng.random(PROBLEMS) < ACCURACY
    readings = []
    while len(readings) < count and not has_fallen(readings):
        solved = np.where(fixed, base, rng.random(PROBLEMS) < ACCURACY)
        if falls_at is not None and len(readings) >= falls_at:
            solved &= rng.random(PROBLEMS) >= 0.1 / ACCURACY
        readings.append(compare_reading(len(readings), "".join("1" if right else "0" for right in solved), readings))
    return readings


@pytest.mark.slow
@pytest.mark.parametrize("staying", STAYING)
def test_a_policy_that_does_not_change_is_stopped_in_few_runs(staying):
    """With 11 readings as `reason` has, and 13 as `align`: each run of 13 is one of 11 as well."""
    rng = np.random.default_rng(1)
    stops = [len(readings) for _ in range(200) if has_fallen(readings := readings_of(rng, staying, 13))]
    assert sum(stop <= 11 for stop in stops) < 0.03 * 200
    assert len(stops) < 0.03 * 200


@pytest.mark.slow
@pytest.mark.parametrize(("staying", "caught"), list(zip(STAYING, (0.9, 0.97, 0.99, 0.99), strict=True)))
def test_a_fall_of_ten_points_is_caught_at_the_second_reading(staying, caught):
    rng = np.random.default_rng(2)
    runs = [readings for _ in range(300) if len(readings := readings_of(rng, staying, 7, falls_at=5)) > 5]
    assert sum(map(has_fallen, runs)) >= caught * len(runs)


def test_readings_are_compared_with_the_best_on_the_same_problems():
    first = compare_reading(0, "1" * 10, [])
    assert (first.correct, first.accuracy, first.p) == (10, 1.0, None)
    second = compare_reading(1, "0" * 8 + "11", [first])
    assert second.p == paired([1] * 10, [0] * 8 + [1] * 2).p == pytest.approx(2 / 2**8)
    assert compare_reading(2, "1" * 10, [first, second]).p is None, "as good as the best"
    assert best_of([first, second, compare_reading(2, "1" * 10, [first, second])]).step == 2
    assert not has_fallen([first, second]), "once is not enough"
    third = compare_reading(2, "0" * 9 + "1", [first, second])
    assert has_fallen([first, second, third])
    between = compare_reading(2, "0" * 4 + "1" * 6, [first, second])
    assert not has_fallen([first, second, between, compare_reading(3, "0" * 10, [first, second, between])]), (
        "not in a row"
    )


def test_what_could_not_be_graded_counts_neither_way():
    first = compare_reading(0, "1" * 8 + "00", [])
    second = compare_reading(1, "-" * 4 + "1" * 4 + "00", [first])
    assert (second.correct, second.graded, second.accuracy, second.p) == (4, 6, 4 / 6, None), "none is worse"
    assert best_of([first, second]) == first
    third = compare_reading(2, "-" * 9 + "1", [first, second])
    assert (third.accuracy, third.p, best_of([first, third]).step) == (1.0, None, 2)
    unknown = compare_reading(3, "-" * 10, [first])
    assert (unknown.accuracy, unknown.p, best_of([unknown, first])) == (None, None, first)
    assert unknown.row()["n"] == 0
    fallen = compare_reading(4, "--" + "0" * 8, [first])
    assert fallen.p == paired([1] * 6 + [0] * 2, [0] * 8).p


def test_readings_before_a_return_do_not_count_again():
    readings = [
        compare_reading(0, "1" * 10, []),
        GuardReading(1, "0" * 10, 0.002),
        GuardReading(2, "0" * 10, 0.002, True),
    ]
    readings.append(compare_reading(3, "0" * 10, readings))
    assert not has_fallen(readings)
    readings.append(compare_reading(4, "0" * 10, readings))
    assert has_fallen(readings)
    assert [GuardReading(**row) for row in json.loads(json.dumps([asdict(r) for r in readings]))] == readings


@pytest.mark.slow
def test_the_guard_takes_its_whole_split_up_to_a_limit(tmp_path):
    sizes = {}
    for lines in (1_000, 10_000):
        rows = (json.dumps({"question": f"{n} + 1?", "answer": n + 1}) for n in range(lines))
        (tmp_path / "problems.jsonl").write_text("\n".join(rows))
        source = ProblemsConfig(source="jsonl", path=str(tmp_path / "problems.jsonl"))
        sizes[lines] = len(load_guard(source, policy(guard_every=1)))
        assert len(load_guard(source, policy(guard_every=1, guard_problems=20))) == 20
        assert load_guard(source, policy()) == []
    assert 20 < sizes[1_000] < 80, "one problem in twenty"
    assert sizes[10_000] == 400
    with pytest.raises(ConfigError, match="distinct guard problems, not 1000"):
        load_guard(source, policy(guard_every=1, guard_problems=1_000))
