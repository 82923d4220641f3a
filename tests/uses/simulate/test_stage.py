"""The stage: a chunk that is done is never asked again, and a checkpoint's opinions are those of whole prompts."""

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy.special import softmax

from nautile.common.errors import ConfigError
from nautile.data.tokenizer import tokenizer_for
from nautile.uses.simulate.config import SimulateConfig
from nautile.uses.simulate.people import Person
from nautile.uses.simulate.prompts import OpinionScorer, SurveyPrompts
from nautile.uses.simulate.reading import parse_survey
from tests.evals.running.conftest import checkpoint  # noqa: F401 - a fixture
from tests.support.processes.simulating import PEOPLE, SURVEY, simulate

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return simulate(tmp_path_factory.mktemp("undisturbed"))


def test_rows_and_figures_of_personas(undisturbed):
    rows = pq.read_table(undisturbed / "opinions.parquet").to_pylist()
    assert len(rows) == 2 * PEOPLE
    first = rows[0]
    assert (first["persona"], first["question"], first["left_out"]) == ("0", "more", None)
    assert first["by_side"] in ("left", "right")
    assert np.shape(first["by_order"]) == (6, 3)
    assert first["probabilities"] == pytest.approx(np.mean(first["by_order"], axis=0))
    assert [row["left_out"] for row in rows if row["persona"] == "7"] == ["too_long"] * 2
    over = {row["persona"]: row["cut"] for row in rows}
    assert [persona for persona, cut in over.items() if cut] == ["7"]
    summary = json.loads((undisturbed / "summary.json").read_text())
    assert (summary["personas"], summary["left_out"], summary["compared"]) == (PEOPLE, 1, True)
    assert summary["cut_tokens"] == over["7"]
    everybody = summary["questions"][0]["cells"][0]["arms"]
    known = [row["probabilities"] for row in rows if row["question"] == "more" and row["probabilities"]]
    assert everybody["model"]["shares"] == pytest.approx(np.mean(known, axis=0))
    assert set(everybody) == {"model", "uniform"}  # nobody knows what humans answer to this question
    assert "humans" in summary["questions"][1]["cells"][0]["arms"]
    assert summary["position_bias"]["more"]["balanced"]
    facts = json.loads((undisturbed.parents[1] / "facts" / "opinions.json").read_text())
    assert (facts["personas"], facts["left_out"]) == (PEOPLE, 1)


def test_groups_that_cannot_be_made_are_refused_before_anybody_is_asked(tmp_path):
    with pytest.raises(ConfigError, match=r"persona 0 has '(left|right)' in 'side', which is not a number"):
        simulate(tmp_path, bands={"side": [1.0]})
    assert not (tmp_path / "asked.txt").exists()


@pytest.mark.slow
def test_a_killed_job_asks_nobody_twice_and_leaves_the_same_files(tmp_path, undisturbed):
    command = [sys.executable, "-m", "tests.support.processes.simulating", str(tmp_path), "2"]
    killed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    asked = (tmp_path / "asked.txt").read_text().split()
    assert 0 < len(asked) < PEOPLE
    (tmp_path / "chunks.txt").unlink()
    out = simulate(tmp_path)
    assert Counter((tmp_path / "asked.txt").read_text().split()) == Counter(map(str, range(PEOPLE)))
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in undisturbed.iterdir())
    for path in undisturbed.iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.slow
def test_opinions_are_those_of_each_prompt_alone(checkpoint):  # noqa: F811
    from nautile.model.decoding.scoring import continuation_logprobs
    from nautile.model.weights.files import load_weights

    survey = parse_survey({**SURVEY, "questions": SURVEY["questions"][1:]}, "survey")
    config = SimulateConfig(rows_at_once=4, answer="text")
    people = [Person("0", {"side": "left"}), Person("1", {"side": "far " * 60}), Person("2", {"side": "right"})]
    opinions = OpinionScorer(checkpoint, survey, config).opinions(people)
    assert opinions[1][0] is None  # longer than the context
    params, model, tokenizer = load_weights(checkpoint)
    prompts = SurveyPrompts(survey, config, tokenizer_for(tokenizer))
    for person, (opinion,) in zip(people[::2], opinions[::2], strict=True):
        for order, probabilities in enumerate(opinion):
            before = prompts.beginning + prompts.persona(person) + prompts.question(0, order)
            whole = [([*before, *ids], len(before)) for ids in prompts.continuations(0, order)]
            expected = softmax(continuation_logprobs(params, model, whole, 2))
            np.testing.assert_allclose(probabilities, expected, rtol=1e-4)
    with pytest.raises(ConfigError, match="its preface and its longest question have"):
        OpinionScorer(checkpoint, survey.model_copy(update={"preface": "long " * 200}), config)
