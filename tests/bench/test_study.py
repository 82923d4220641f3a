"""The study of plain and balanced GRPO: its plan, what it changes in the sampler and the advantages, and its rule."""

from collections import Counter

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from bench.rl.study import CACHED, Study, packed, pushed, run, with_cached
from bench.rl.study_cells import SEEDS, Cell, later, repeated, screen
from bench.rl.study_results import RESULTS, interval, published, settings, unpacked
from common.files import read_json
from data.sources.reasoning_gym import Problem
from data.tokenizer import tokenizer_for
from model.nautile import initialise, shapes
from tests.rl.conftest import TOKENIZER, group, tiny_model

START = np.zeros(400)


def test_every_cell_of_the_plan_has_a_name_of_its_own_and_valid_settings():
    cells = [*screen(), *later()]
    assert not [name for name, times in Counter(cell.name for cell in cells).items() if times > 1]
    assert {cell.experiment for cell in cells} == {"E1", "E2", "E3", "E4", "E5", "E6", "E7"}
    assert all(cell.policy.inner_epochs == cell.passes and cell.rollout.group == cell.group for cell in cells)
    assert {cell.seed for cell in repeated(cells[:1])} == set(SEEDS[1:])


def test_every_setting_of_the_plan_has_plain_grpo_to_compare_with():
    arms: dict[tuple[str, str], set[str]] = {}
    for cell in [*screen(), *later()]:
        arms.setdefault((cell.experiment, cell.setting), set()).add(cell.arm)
    assert all("plain" in names for names in arms.values())


def test_the_stale_sampler_keeps_what_the_authors_decoding_cached():
    start, now = (jax.tree.map(lambda leaf: np.zeros(leaf.shape), shapes(tiny_model())) for _ in range(2))
    mixed, before = flatten_dict(with_cached(now, start)), flatten_dict(start)
    kept = {path for path, leaf in mixed.items() if leaf is before[path]}
    assert {path[-1] for path in kept} == CACHED
    assert all(path[-2].startswith("sca_") for path in kept)


def test_the_push_lowers_every_advantage_and_gives_mastered_groups_a_signal():
    groups = pushed([group([1.0, 0.0, 0.0, 1.0]), group([1.0, 1.0, None])], 0.1)
    assert [[rollout.advantage for rollout in made.rollouts] for made in groups] == [
        pytest.approx([0.4, -0.6, -0.6, 0.4]),
        [pytest.approx(-0.1), pytest.approx(-0.1), None],
    ]


def rows(solved: dict[str, float], seeds=SEEDS):
    """A row for each arm and seed, in which the first of 400 problems are solved."""
    modes = {"plain": ("plain", "step"), "balanced-step": ("balanced", "step"), "balanced-group": ("balanced", "group")}
    made = []
    for arm, share in solved.items():
        for seed in seeds:
            cell = Cell("E2", *modes[arm], seed=seed)
            outcomes = packed(np.arange(400) < 400 * share + seed)
            made.append({"name": cell.name, "cell": vars(cell), "greedy": outcomes, "sampled": outcomes})
    return made


@pytest.mark.parametrize(
    ("plain", "balanced", "meets"),
    [(0.2, 0.3, ["balanced-step"]), (0.3, 0.4, []), (0.2, 0.22, []), (0.2, 0.2, [])],
    ids=["as in the paper", "plain does not fall", "both fall", "no lead"],
)
def test_the_decision_rule(plain, balanced, meets):
    start = {"greedy": (np.arange(400) < 120).astype(float)}
    (setting,) = settings(rows({"plain": plain, "balanced-step": balanced}))
    assert list(setting.verdict(start, "greedy")) == meets


def test_an_interval_covers_the_spread_of_seeds_as_well_as_of_problems():
    rng = np.random.default_rng(1)
    before, after = rng.integers(0, 2, (2, 1, 400)).astype(float)
    alike = interval(np.repeat(before, 5, axis=0), np.repeat(after, 5, axis=0))
    differences = (after - before)[0]
    assert alike.mean == pytest.approx(100 * differences.mean())
    assert alike.high - alike.low == pytest.approx(2 * 278 * differences.std() / 20, rel=0.1)  # t of five seeds: 2.78
    others = (rng.random((5, 400)) < np.linspace(0.1, 0.9, 5)[:, None]).astype(float)
    spread = interval(np.repeat(before, 5, axis=0), others)
    assert spread.high - spread.low > 3 * (alike.high - alike.low)
    single = interval(before, after)
    assert single.seeds == 1
    assert single.high - single.low == pytest.approx(2 * 196 * differences.std() / 20, rel=0.1)  # over problems alone


def test_outcomes_survive_packing():
    solved = [bool(value) for value in np.random.default_rng(0).integers(0, 2, 1000)]
    assert unpacked(packed(solved)).tolist() == solved


@pytest.mark.slow
def test_a_tiny_cell_trains_and_is_not_trained_again(tmp_path):
    tasks = [Problem("chain_sum", i, f"{i} + 1?", str(i + 1), "") for i in range(4)]
    model = tiny_model()
    study = Study(initialise(model, 0), model, tokenizer_for(TOKENIZER), tasks, tasks)
    cell = Cell("E7", "balanced", steps=1, prompts=2, group=2, push=0.1, stale_spectra=True)
    run(study, [cell], tmp_path)
    (file,) = tmp_path.glob("E7*.json")
    row = read_json(file)
    assert len(row["curves"]["norm_negative"]) == 1
    assert row["curves"]["norm_negative"][0] > 0
    assert unpacked(row["greedy"])[:4].tolist() == unpacked(read_json(tmp_path / "start.json")["greedy"])[:4].tolist()
    written = file.stat().st_mtime_ns
    run(study, [cell], tmp_path)
    assert file.stat().st_mtime_ns == written


def test_published_cells_are_those_of_the_same_start():
    data = read_json(RESULTS / "rl-study.json")
    rows = published(data["start"])
    assert len(rows) == len(data["cells"]) > 40
    assert {row["name"] for row in settings_rows(rows)} == {row["name"] for row in data["cells"]}
    assert published(data["start"] | {"greedy": packed(unpacked(data["start"]["greedy"]) == 0)}) == []


def settings_rows(rows):
    """The rows that `settings` keeps."""
    return [row for setting in settings(rows) for arm in setting.arms.values() for row in arm.runs.values()]
