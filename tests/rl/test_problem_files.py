import json

import pytest

from common.errors import ConfigError
from configs.training import ProblemsConfig
from data.chat_template import ParsedReply
from data.sources.reasoning_gym import problem_split
from rl.problems import from_file, load
from rl.rewards import verifiable


def config(path, **changes):
    return ProblemsConfig(source="jsonl", path=str(path), **changes)


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "problems.jsonl"
    rows = [{"question": f"What is {n} / 4?", "answer": f"{n}/4"} for n in range(60)]
    path.write_text("\n".join(map(json.dumps, [*rows, rows[0]])) + "\n\n", encoding="utf-8")
    return path


def test_every_question_is_in_one_split_once(written):
    splits = {split: list(from_file(config(written), 0, split)) for split in ("train", "guard", "held_out")}
    questions = [p.question for found in splits.values() for p in found]
    assert sorted(questions) == sorted({f"What is {n} / 4?" for n in range(60)})
    assert all(problem_split(p.question) == split for split, found in splits.items() for p in found)


def test_answers_count_by_the_graders_of_the_evaluation(written):
    problem = next(p for p in from_file(config(written), 0, "train") if p.answer == "14/4")
    assert verifiable(problem, ParsedReply("", "14/4", True, True)) == 1.0
    assert verifiable(problem, ParsedReply("", "15/4", True, True)) == 0.0


def test_a_number_may_stand_as_one(tmp_path):
    path = tmp_path / "one.jsonl"
    rows = [{"question": f"{n} + 1?", "answer": n + 1, "task": "sums", "rationale": "so"} for n in range(9)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    problem = load(config(path, count=1), 0)[0]
    assert (problem.task, problem.rationale) == ("sums", "so")
    assert verifiable(problem, ParsedReply("", problem.answer, True, True)) == 1.0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"question": "Q?"}', "no `answer`"),
        ('{"question": "Q?", "answer": " "}', "no `answer`"),
        ('{"answer": "1"}', "no `question`"),
        ('{"question": "Q?", "answer": ["1"]}', r"`answer` is \['1'\]"),
        ('{"question": 7, "answer": "1"}', "`question` is 7"),
        ('["Q?", "1"]', "not an object"),
        ('{"question": "Q?", ', "not a line of JSON"),
    ],
)
def test_a_line_at_fault_is_named(tmp_path, line, said):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"question": "1 + 1?", "answer": "2"}\n' + line, encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"bad\.jsonl:2: .*{said}"):
        list(from_file(config(path), 0, "train"))


def test_a_file_that_is_not_there_or_is_too_small(tmp_path, written):
    with pytest.raises(ConfigError, match=r"problems\.path: .*none\.jsonl cannot be read"):
        load(config(tmp_path / "none.jsonl"), 0)
    with pytest.raises(ConfigError, match=r"problems\.path: source 'jsonl' needs the file"):
        load(ProblemsConfig(source="jsonl"), 0)
    with pytest.raises(ConfigError, match=r"'jsonl' has \d+ distinct train problems, not 1000"):
        load(config(written, count=1000), 0)
