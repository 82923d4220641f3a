import json

import pytest

from configs.schema import DistillConfig, TeacherConfig
from configs.section import ConfigError, Retryable
from data.prompts import prompts, question
from data.wikipedia import Article, articles


def config(**fields):
    return DistillConfig(**{"prompts": 5, "teachers": (TeacherConfig(endpoint="t"),), **fields})


def article(extract, title="Title", topic="Arts"):
    return Article(title, extract, None, topic)


def test_offline_prompts_are_distinct_and_the_same_each_time():
    found = prompts(config(prompts=300), 4)
    assert found == prompts(config(prompts=300), 4)
    assert found[:50] == prompts(config(prompts=50), 4)
    assert found != prompts(config(prompts=300), 5)
    assert len({prompt.id for prompt in found}) == len({prompt.query for prompt in found}) == 300
    assert {prompt.kind for prompt in found} == {"definition", "explanation", "fact", "person", "place"}
    assert all(prompt.passage and 20 < len(prompt.passage) < 800 and prompt.url for prompt in found)


def test_prompts_are_not_about_the_articles_that_the_benchmarks_ask_about_first():
    first = {f"wikipedia/{one.title}" for one in articles(4)[:500]}
    assert not first & {prompt.id.partition("#")[0] for prompt in prompts(config(prompts=200), 4)}


@pytest.mark.parametrize(
    ("extract", "topic", "turn", "query"),
    [
        ("A hat is a head covering. It is worn.", "Everyday life", 0, "What is a hat?"),
        ("Penguins are a group of birds. Some swim.", "Biology", 0, "What are Penguins?"),
        ("Salt is a mineral. As a crystal, salt is halite.", "Sciences", 1, "Explain salt in one sentence."),
        ("Yerevan is the capital of Armenia. It is old.", "Geography", 0, "Where is Yerevan?"),
        ("Yerevan is the capital of Armenia. It is old.", "Geography", 3, "State one fact about Yerevan."),
        ("Friedrich Wöhler FRS HonFRSE (1800–1882) was a chemist.", "People", 0, "Who was Friedrich Wöhler?"),
        ("Tewodros II was an emperor.", "People", 1, "What is Tewodros II known for?"),
        ("A façade or facade is the front of a building.", "Arts", 0, "What is a façade?"),
    ],
)
def test_a_question_is_made_of_the_first_sentence(extract, topic, turn, query):
    prompt = question(article(extract, topic=topic), turn)
    assert prompt.query == query
    assert prompt.opening.startswith("We need")
    assert prompt.passage.startswith(extract.partition(" ")[0])


@pytest.mark.parametrize(
    "extract",
    ["In astronomy, dark energy is a form of energy.", "Running fast, Bolt is first.", "No verb here", "It is late."],
)
def test_an_article_that_does_not_say_what_it_is_about_is_passed_over(extract):
    assert question(article(extract), 0) is None


def test_json_lines_in_the_usual_columns(tmp_path):
    rows = [
        {"query": "One?", "id": "a"},
        {"prompt": "Two?"},
        {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "Three?"}]},
        {"conversations": [{"from": "human", "value": "Four?"}]},
        {"text": "not a question"},
        {"query": "  "},
        {"query": 7},
        {"query": "one?"},
        {"query": "x" * 30_000},
        {"query": "Five?", "passage": "Some text."},
        [1],
    ]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    found = prompts(config(prompt_source="jsonl", prompt_path=str(path)), 0)
    assert [prompt.query for prompt in found] == ["One?", "Two?", "Three?", "Four?", "Five?"]
    assert found[0].id == "a"
    assert found[4].passage == "Some text."
    assert {prompt.kind for prompt in found} == {"instruction"}
    with pytest.raises(ConfigError, match=r"asks for 6.*5 distinct"):
        prompts(config(prompts=6, prompt_source="jsonl", prompt_path=str(path)), 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b'{"query": "a"}\nnot json', "line 2 is not JSON"), (b"\xff\xfe", "line 1 is not JSON"), (b"", "0 distinct")],
)
def test_a_file_that_is_no_json_lines_is_named(tmp_path, content, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        prompts(config(prompt_source="jsonl", prompt_path=str(path)), 0)


def test_sources_that_are_not_complete():
    with pytest.raises(ConfigError, match="prompt_path"):
        prompts(config(prompt_source="jsonl"), 0)
    with pytest.raises(ConfigError, match="no file matches"):
        prompts(config(prompt_source="jsonl", prompt_path="/no/such/file"), 0)
    with pytest.raises(ConfigError, match="prompt_revision"):
        prompts(config(prompt_source="hub", prompt_path="a/b"), 0)


def test_a_hub_that_does_not_answer_may_answer_later(monkeypatch):
    import datasets

    def refused(*args, **options):
        raise ConnectionError("refused")

    monkeypatch.setattr(datasets, "load_dataset", refused)
    with pytest.raises(Retryable, match="a/b at 0123"):
        prompts(config(prompt_source="hub", prompt_path="a/b", prompt_revision="0123"), 0)
