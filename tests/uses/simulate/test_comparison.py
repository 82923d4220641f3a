"""Every arm is judged on the same humans; nothing of a model is printed without baselines."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.spatial.distance import jensenshannon

from nautile.common.errors import ConfigError
from nautile.evals.scoring.intervals import wilson
from nautile.uses.simulate import comparison
from nautile.uses.simulate.comparison import Distribution, compare
from nautile.uses.simulate.config import SimulateConfig
from nautile.uses.simulate.people import Person
from nautile.uses.simulate.reading import MISSING, Respondents, parse_survey, personas_config
from nautile.uses.simulate.tables import NOT_FOR, NOTHING_TO_COMPARE, card, question_tables, report, scores_table

QUESTIONS = [
    {"name": "more", "text": "More parks?", "options": ["no", "maybe", "yes"], "ordered": True},
    {"name": "pay", "text": "Who pays?", "options": ["town", "state"], "weight": 3.0},
    {"name": "when", "text": "When?", "options": ["now", "later"]},
]
CONFIG = SimulateConfig(by=("side",), draws=200)


def survey(**changes):
    table = {"name": "parks", "title": "Parks", "persona": "I am on the {side}.", "questions": QUESTIONS}
    return parse_survey(table | changes, "t")


def people(count):
    return [Person(str(i), {"side": ("left", "right")[i % 2]}) for i in range(count)]


@pytest.fixture(scope="module", autouse=True)
def few_trees():
    """A forest of ten trees is fitted as fast as anything here needs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "TREES", 10)
        yield


@pytest.fixture(scope="module")
def respondents():
    """400 people of whom those on the right like parks more; the first half is judged."""
    draw = np.random.default_rng(0)
    chances = {0: ([0.6, 0.3, 0.1], [0.8, 0.2], [0.5, 0.5]), 1: ([0.1, 0.2, 0.7], [0.3, 0.7], [0.5, 0.5])}
    answers = np.array([[draw.choice(len(p), p=p) for p in chances[i % 2]] for i in range(400)])
    answers[0, 0] = MISSING
    return Respondents(people(400), answers, np.arange(200, 400), np.arange(200))


def test_an_option_that_nobody_has_chosen_is_not_certain_to_have_no_share():
    draws = np.random.default_rng(0).multinomial(40, [0.5, 0.5, 0.0], size=500) / 40
    some = Distribution(np.array([0.5, 0.5, 0.0]), draws, 40).fields(0.95)
    assert (some["low"][2], some["high"][2]) == pytest.approx(wilson(0, 40), abs=1e-4)
    assert some["low"][0] < 0.5 < some["high"][0]
    certain = np.array([1.0, 0.0])
    all_alike = Distribution(certain, np.tile(certain, (500, 1)), 8).fields(0.95)
    assert all_alike["low"] == pytest.approx([wilson(8, 8)[0], 0.0], abs=1e-4)
    assert all_alike["high"] == pytest.approx([1.0, wilson(0, 8)[1]], abs=1e-4)
    fewer = Distribution(certain, np.tile(certain, (500, 1)), 8, 3.0).fields(0.95)
    assert fewer["low"] == pytest.approx([wilson(3, 3)[0], 0.0], abs=1e-4), "as wide as that of so many who weigh alike"
    assert "low" not in Distribution(certain, np.tile(certain, (500, 1)), None).fields(0.95), "of how many is not known"
    published = np.array([0.3, 0.7])
    assert "low" not in Distribution(published, np.tile(published, (500, 1)), 8).fields(0.95), "no sample"


def filled(summary):
    return summary | {
        "title": "Parks", "model": "a model", "personas": 200, "personas_source": "a file", "left_out": 0,
        "answer": "letter", "position_bias": {},
    }  # fmt: skip


def answers_of(respondents, asked):
    """A model that gives each person's own answer with certainty, and does not know the one that is missing."""
    one_hot = [np.eye(len(q["options"]))[respondents.answers_NQ[asked, i]] for i, q in enumerate(QUESTIONS)]
    one_hot[0][0] = [0.2, 0.2, 0.6]
    return one_hot


@pytest.fixture(scope="module")
def perfect(respondents):
    """The comparison of that model."""
    asked = respondents.held_out
    judged = [respondents.people[i] for i in asked]
    return compare(survey(), CONFIG, judged, answers_of(respondents, asked), respondents, asked)


def test_a_model_that_answers_as_the_people_do_is_perfect(perfect):
    summary = perfect
    model = summary["scores"]["model"]
    for figure, value in {
        "similarity": 1,
        "wasserstein": 0,
        "group_similarity": 1,
        "slope": 1,
        "cosine": 1,
        "rank": 1,
    }.items():
        assert model[figure]["value"] == pytest.approx(value), figure
    # Person and answer are resampled together, so that nothing is uncertain here.
    assert (model["similarity"]["low"], model["similarity"]["high"]) == (pytest.approx(1), pytest.approx(1))
    first = summary["questions"][0]["cells"][0]["arms"]
    assert first["model"]["people"] == first["humans"]["people"] == first["forest"]["people"] == 199
    assert set(summary["scores"]) == {"model", "uniform", "majority", "overall", "regression", "forest", "humans"}
    assert summary["humans"]["missing"] == {"more": 1, "pay": 0, "when": 0}


def test_weights_count_as_so_many_people_who_are_alike(respondents):
    """Of respondents and of personas: shares of the model, the humans and the constants, and the fitted baselines."""
    weights = np.array([1 + i % 3 for i in range(400)], float)
    weights[7] = 0.0
    weighted = replace(
        respondents,
        people=[replace(person, weight=weight) for person, weight in zip(respondents.people, weights, strict=True)],
    )
    copies = np.repeat(np.arange(400), weights.astype(int))
    repeated = Respondents(
        [respondents.people[i] for i in copies],
        respondents.answers_NQ[copies],
        np.flatnonzero(copies >= 200),
        np.flatnonzero(copies < 200),
    )
    summaries = []
    for some in (weighted, repeated):
        judged = [some.people[i] for i in some.held_out]
        model = [
            np.eye(len(q["options"]))[some.answers_NQ[some.held_out, (n + 1) % 3] % 2] for n, q in enumerate(QUESTIONS)
        ]
        summaries.append(compare(survey(), CONFIG, judged, model, some, some.held_out))
    for ours, theirs in zip(*(summary["questions"] for summary in summaries), strict=True):
        for first, second in zip(ours["cells"], theirs["cells"], strict=True):
            for arm in ("model", "humans", "overall", "majority"):
                assert first["arms"][arm]["shares"] == pytest.approx(second["arms"][arm]["shares"]), arm
            assert first["arms"]["regression"]["shares"] == pytest.approx(
                second["arms"]["regression"]["shares"], abs=0.01
            )
    assert [summary["humans"]["weighted"] for summary in summaries] == [True, False]
    assert summaries[0]["questions"][1]["cells"][0]["arms"]["humans"]["people"] == 199  # without the one of no weight
    text = card(filled(summaries[0]))
    assert "The respondents count by their survey weights" in text
    own = weights[respondents.held_out]
    effective = own.sum() ** 2 / (own**2).sum()
    assert summaries[0]["humans"]["effective"] == pytest.approx(effective)
    assert summaries[0]["questions"][1]["cells"][0]["arms"]["humans"]["effective"] == pytest.approx(effective)
    assert "effective" not in summaries[1]["questions"][1]["cells"][0]["arms"]["humans"]
    assert f"effective sample size is {effective:,.0f} (Kish)" in text
    assert "without an answer, who are left out of that question: more " in text
    assert f"199 humans, weighted as {effective:,.0f} alike" in question_tables(summaries[0])
    assert "survey weights" not in card(filled(summaries[1]))


def test_scores_are_those_computed_by_hand(perfect, respondents):
    summary = perfect
    held, train = respondents.answers_NQ[respondents.held_out], respondents.answers_NQ[respondents.train]

    def shares(answers, options):
        return np.bincount(answers[answers >= 0], minlength=options) / (answers >= 0).sum()

    def close(p, q):
        return 1 - jensenshannon(p, q, base=2) ** 2

    everybody = [close(shares(held[:, i], n), np.full(n, 1 / n)) for i, n in enumerate((3, 2, 2))]
    assert summary["scores"]["uniform"]["similarity"]["value"] == pytest.approx(
        np.average(everybody, weights=[1, 3, 1])
    )
    by_side = [
        np.average([close(shares(held[side::2, i], n), shares(train[:, i], n)) for i, n in enumerate((3, 2, 2))],
                   weights=[1, 3, 1])
        for side in (0, 1)
    ]  # fmt: skip
    overall = summary["scores"]["overall"]
    assert overall["group_similarity"]["value"] == pytest.approx(np.mean(by_side))
    assert overall["gap"]["value"] == pytest.approx(abs(by_side[0] - by_side[1]))
    assert overall["slope"]["value"] == 0
    assert overall["cosine"] is None
    # The side tells nearly all, so that the regression moves with it and comes closer than any constant.
    regression = summary["scores"]["regression"]
    assert regression["slope"]["value"] > 0.7
    assert regression["group_similarity"]["value"] > overall["group_similarity"]["high"]
    bound = summary["scores"]["humans"]["group_similarity"]
    assert overall["group_similarity"]["value"] < bound["low"] < bound["value"] < 1


def test_intervals_cover_what_the_people_were_drawn_from(perfect):
    left = next(cell for cell in perfect["questions"][1]["cells"] if cell["group"] == "left")["arms"]["humans"]
    # 100 people at 0.8: the textbook interval has the half width 0.078.
    assert left["high"][0] - left["low"][0] == pytest.approx(2 * 1.96 * np.sqrt(0.8 * 0.2 / 100), rel=0.3)
    assert left["low"][0] < 0.8 < left["high"][0]


def test_personas_who_are_not_the_respondents_are_compared_by_group(respondents):
    personas = people(30)
    uniform = [np.full((30, len(q["options"])), 1 / len(q["options"])) for q in QUESTIONS]
    uniform[0][3] = np.nan  # left out
    summary = compare(survey(), CONFIG, personas, uniform, respondents)
    assert summary["humans"]["kind"] == "held-out respondents"
    for figure, uniform_score in summary["scores"]["uniform"].items():
        score = summary["scores"]["model"][figure]
        assert score == (None if uniform_score is None else pytest.approx(uniform_score)), figure
    assert summary["questions"][0]["cells"][0]["arms"]["model"]["people"] == 29
    lonely = [Person(str(i), {"side": "left", "town": "X"}) for i in range(5)]
    with pytest.raises(ConfigError, match="--by town: the respondents of survey parks have no such field"):
        compare(survey(), CONFIG.model_copy(update={"by": ("town",)}), lonely, [p[:5] for p in uniform], respondents)


def test_published_shares_are_compared_without_single_people():
    questions = [{**QUESTIONS[0], "humans": [0.5, 0.3, 0.2], "respondents": 100,
                  "groups": {"side": {"left": [0.6, 0.3, 0.1], "right": [0.4, 0.3, 0.3]}}}]  # fmt: skip
    probabilities = [np.tile([0.2, 0.3, 0.5], (20, 1))]
    summary = compare(survey(questions=questions), CONFIG, people(20), probabilities, None)
    assert summary["humans"]["kind"] == "published shares"
    assert "forest" not in summary["scores"]
    assert summary["scores"]["overall"]["similarity"] is None  # the same figures
    left, right = [0.6, 0.3, 0.1], [0.4, 0.3, 0.3]
    expected = np.mean([1 - jensenshannon([0.5, 0.3, 0.2], group, base=2) ** 2 for group in (left, right)])
    assert summary["scores"]["overall"]["group_similarity"]["value"] == pytest.approx(expected)
    human = summary["questions"][0]["cells"][0]["arms"]["humans"]
    assert human["low"][0] < 0.5 < human["high"][0]
    assert "low" not in summary["questions"][0]["cells"][1]["arms"]["humans"]
    assert "no regression or forest" in report(filled(summary))


def test_groups_as_personas_are_no_sample_and_all_are_scored():
    questions = [{**QUESTIONS[0], "groups": {"side": {"left": [0.6, 0.3, 0.1], "right": [0.4, 0.3, 0.3]}}}]
    groups = [Person("left", {"side": "left"}), Person("right", {"side": "right"})]
    same = np.array([[0.6, 0.3, 0.1], [0.4, 0.3, 0.3]])
    scores = compare(survey(questions=questions), CONFIG, groups, [same], None)["scores"]
    assert scores["model"]["group_similarity"] == {name: pytest.approx(1) for name in ("value", "low", "high")}
    assert scores["model"]["gap"]["value"] == pytest.approx(0)
    # Measured from the mean of the groups, for everybody's shares are not published; nor is how many answered.
    assert scores["model"]["slope"]["value"] == pytest.approx(1)
    assert scores["overall"]["slope"]["value"] == pytest.approx(0)
    assert "humans" not in scores


def test_a_field_without_groups_is_as_if_nothing_were_published():
    personas = [Person("0", {"side": "left"}), Person("1", {"side": "right"})]
    asked = CONFIG.model_copy(update={"personas": personas_config("people.csv")})
    questions = [{**QUESTIONS[0], "groups": {"side": {}}}]
    summary = compare(survey(questions=questions), asked, personas, [np.tile([0.5, 0.3, 0.2], (2, 1))], None)
    assert not summary["compared"]
    assert summary["questions"][0]["cells"][0]["arms"].keys() == {"model", "uniform"}


def test_a_draw_without_anybody_of_a_small_group_has_the_mean_of_the_others():
    questions = [{**QUESTIONS[0], "humans": [0.5, 0.3, 0.2], "groups": {
        "side": {"left": [0.6, 0.3, 0.1], "right": [0.4, 0.3, 0.3], "far": [0.2, 0.3, 0.5]}}}]  # fmt: skip
    personas = [Person(str(i), {"side": "right" if i == 0 else "left"}) for i in range(20)]
    asked = CONFIG.model_copy(update={"personas": personas_config("people.csv")})
    summary = compare(survey(questions=questions), asked, personas, [np.tile([0.5, 0.3, 0.2], (20, 1))], None)
    for figure in ("group_similarity", "gap", "slope"):
        score = summary["scores"]["model"][figure]
        assert score["low"] <= score["value"] <= score["high"], figure
    assert summary["humans"]["unmatched_groups"] == ["side: far"]
    assert "No persona is in these published groups, which are not compared: side: far." in report(filled(summary))


def test_without_humans_there_is_nothing_to_compare_with():
    summary = compare(
        survey(), CONFIG, people(20), [np.tile([0.2, 0.3, 0.5], (20, 1)), *[np.full((20, 2), 0.5)] * 2], None
    )
    assert not summary["compared"]
    assert summary["scores"] == {}
    arms = summary["questions"][0]["cells"][0]["arms"]
    assert set(arms) == {"model", "uniform"}
    for text in (report(filled(summary)), card(filled(summary))):
        assert NOTHING_TO_COMPARE in text
    assert scores_table(summary) == ""
    assert "nothing to compare with" in report(filled(summary))


@pytest.mark.slow
def test_a_small_group_is_shown_and_not_scored(respondents):
    few = Respondents(
        [Person(p.id, {"side": "middle"} if i < 4 else p.fields) for i, p in enumerate(respondents.people)],
        respondents.answers_NQ,
        respondents.train,
        respondents.held_out,
    )
    asked = few.held_out
    summary = compare(survey(), CONFIG, [few.people[i] for i in asked], answers_of(few, asked), few, asked)
    groups = [cell["group"] for cell in summary["questions"][1]["cells"]]
    assert groups == ["all", "left", "middle", "right"]
    whole = compare(
        survey(), CONFIG, [respondents.people[i] for i in asked], answers_of(few, asked), respondents, asked
    )
    # Four people who all differ from everybody would widen the gap.
    assert summary["scores"]["uniform"]["gap"]["value"] == pytest.approx(
        whole["scores"]["uniform"]["gap"]["value"], abs=0.02
    )


def test_the_card_says_what_the_figures_are_not_for(respondents):
    asked = respondents.held_out
    judged = [respondents.people[i] for i in asked]
    uniform = [np.full((200, len(q["options"])), 1 / len(q["options"])) for q in QUESTIONS]
    text = card(filled(compare(survey(), CONFIG, judged, uniform, respondents, asked)))
    for line in NOT_FOR:
        assert line in text
    assert "at least as close to humans as the model: uniform; " in text
