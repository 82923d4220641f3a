"""Prompts from every kind of set, and their collection on disk."""

import json

import pytest

from nautile.common.errors import ConfigError
from nautile.configs.distill import DistillConfig, PromptSetConfig, TeacherConfig
from nautile.data.distill import collect_prompts as collect_module
from nautile.data.distill import prompts
from nautile.data.distill.collect_prompts import collect_prompts, quotas, read_prompts
from nautile.data.distill.prompts import Prompt, article_question, read_prompt_set
from nautile.data.sources.wikipedia import Article, articles


def config(*sets, **fields):
    prompt_sets = (
        tuple(PromptSetConfig(**fields) for fields in sets) or DistillConfig.model_fields["prompt_sets"].default
    )
    return DistillConfig(
        **{"prompts": 5, "teachers": (TeacherConfig(endpoint="t"),), "prompt_sets": prompt_sets, **fields}
    )


def jsonl(path, rows, name="s", **fields):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return {"name": name, "source": "jsonl", "path": str(path), **fields}


def article(extract, title="Title", topic="Arts"):
    return Article(title, extract, None, topic)


def without_total(kind, **fields):
    """All prompts may be collected, and none of them asked yet: no share of the stage is done."""
    assert kind != "progress" or fields["total"] is None


def collect(config, folder, seed=1, screen=None):
    """The prompts in order, and the `CollectedPrompts`."""
    folder.mkdir(exist_ok=True)
    result = collect_prompts(config, seed, folder, screen, without_total)
    return [prompt for path in result.files for prompt in read_prompts(path)], result


@pytest.mark.slow
def test_offline_prompts_are_distinct_and_the_same_each_time(tmp_path):
    many, _ = collect(config(prompts=300), tmp_path / "a", 4)
    assert many == collect(config(prompts=300), tmp_path / "b", 4)[0]
    assert many[:50] == collect(config(prompts=50), tmp_path / "c", 4)[0]
    assert many != collect(config(prompts=300), tmp_path / "d", 5)[0]
    assert len({prompt.id for prompt in many}) == len({prompt.query for prompt in many}) == 300
    assert {prompt.kind for prompt in many} == {"definition", "explanation", "fact", "person", "place"}
    assert all(prompt.passage and 20 < len(prompt.passage) < 800 and prompt.url for prompt in many)
    first = {f"wikipedia/{entry.title}" for entry in articles(4)[:500]}
    assert not first & {prompt.id.partition("#")[0] for prompt in many}, "the benchmarks ask about those"


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
def test_a_question_is_built_from_the_first_sentence(extract, topic, turn, query):
    prompt = article_question(article(extract, topic=topic), turn)
    assert prompt.query == query
    assert prompt.opening.startswith("We need")
    assert prompt.passage.startswith(extract.partition(" ")[0])


@pytest.mark.parametrize(
    "extract",
    ["In astronomy, dark energy is a form of energy.", "Running fast, Bolt is first.", "No verb here", "It is late."],
)
def test_an_article_without_a_definition_is_skipped(extract):
    assert article_question(article(extract), 0) is None


def test_rows_of_the_usual_columns_and_why_the_others_have_no_prompt(tmp_path):
    path = tmp_path / "p.jsonl"
    rows = [
        {"query": "One?", "id": "a"},
        {"prompt": "Two?"},
        {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "Three?"}]},
        {"conversations": [{"from": "human", "value": "Four?"}]},
        {"text": "not a question"},
        {"query": "  "},
        {"query": 7},
        {"query": "x" * 30_000},
        {"query": "Five?", "passage": "Some text.", "id": 12},
        [1],
        {"query": "\ud800"},
        {"query": "Whole?", "passage": "half \ud800"},
        {"query": "Whole?", "id": "\udc00"},
        {"query": "\u200b\ufeff"},
        {"messages": '[{"role": "user"'},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
    ]
    content = "\n".join(json.dumps(row) for row in rows) + '\nnot json\n{"query": "\xff"}\n{"query": "Six?"}'
    path.write_bytes(content.encode("latin-1"))
    source = PromptSetConfig(name="s", source="jsonl", path=str(path), license="MIT")
    result = list(read_prompt_set(source, 0, tmp_path))
    assert [item.query if isinstance(item, Prompt) else item for item in result] == [
        "One?",
        "Two?",
        "Three?",
        "Four?",
        *["no_query"] * 3,
        "too_long",
        "Five?",
        "not_an_object",
        *["invalid_utf8"] * 3,
        *["no_query"] * 3,
        "not_json",
        "invalid_utf8",
        "Six?",
    ]
    assert result[0].id.startswith("s/a-")
    assert result[1].id.startswith("s/p.jsonl/1-")
    assert (result[8].passage, result[8].kind) == ("Some text.", "instruction")
    assert (result[8].license, result[8].set) == ("MIT", "s")
    assert result[8].id.startswith("s/12-")
    for skip in (1, 5, 13):
        assert list(read_prompt_set(source, 0, tmp_path, skip)) == result[skip:], (
            "a number means the same row on every reading"
        )


@pytest.mark.parametrize(
    ("form", "columns", "row", "query"),
    [
        ("instruction", {}, {"instruction": "Add.", "input": "1 and 2", "output": "3"}, "Add.\n\n1 and 2"),
        ("instruction", {}, {"instruction": "Say hi.", "input": ""}, "Say hi."),
        ("messages", {}, {"prompt": "no", "messages": [{"role": "user", "content": "Yes?"}]}, "Yes?"),
        ("messages", {}, {"messages": '[{"role": "user", "content": "Yes?"}]'}, "Yes?"),
        ("any", {}, {"messages": [{"role": "user", "content": [{"type": "text", "text": "Yes?"}]}]}, "Yes?"),
        ("any", {}, {"prompt": "[1, 2] has how many?"}, "[1, 2] has how many?"),
        ("columns", {"query": "q", "reference": "a", "passage": "p"}, {"q": "Why?", "a": 3, "p": "Text."}, "Why?"),
    ],
)
def test_each_form_finds_the_query(tmp_path, form, columns, row, query):
    source = PromptSetConfig(**jsonl(tmp_path / "x.jsonl", [row], form=form, columns=columns))
    (result,) = read_prompt_set(source, 0, tmp_path)
    assert result.query == query
    if columns:
        assert (result.reference, result.passage) == ("3", "Text.")


def test_a_query_is_put_into_its_frame_and_followed_by_its_context(tmp_path):
    row = {"q": " Name {it}. ", "c": "A text."}
    columns = {"query": "q", "context": "c"}
    fields = jsonl(
        tmp_path / "x.jsonl", [row, {"q": " ", "c": "x"}], form="columns", columns=columns, frame="Do: {query}"
    )
    result, empty = read_prompt_set(PromptSetConfig(**fields), 0, tmp_path)
    assert (result.query, result.passage) == ("Do: Name {it}.\n\nA text.", None)
    assert empty == "no_query"


@pytest.mark.parametrize(
    ("tokenised", "text"),
    [
        ("[ WP ] You 're late , and it does n't matter .", "You're late, and it doesn't matter."),
        (
            "[WP] `` Run ! '' he says . <newline> <newline> Nobody does ( yet ) .",
            '"Run!" he says.\n\nNobody does (yet).',
        ),
        ("Nothing to undo: it's fine.", "Nothing to undo: it's fine."),
    ],
)
def test_tokenised_prompts_are_put_together_again(tmp_path, tokenised, text):
    fields = jsonl(tmp_path / "x.jsonl", [{"prompt": tokenised}], detokenise=True)
    assert [prompt.query for prompt in read_prompt_set(PromptSetConfig(**fields), 0, tmp_path)] == [text]


def test_bad_sets_are_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(prompts, "ROWS_WITHOUT_PROMPT", 3)
    empty, binary = tmp_path / "empty.jsonl", tmp_path / "binary.jsonl"
    empty.write_bytes(b"\n \n")
    binary.write_bytes(b"\x00\x01\xff" * 100)
    rows = [{"text": "a"}] * 5 + [{"query": "late"}]
    for fields, message in [
        ({"source": "jsonl"}, "'bad': source 'jsonl' needs the `path`"),
        ({"source": "jsonl", "path": "/no/such/file"}, "no file matches"),
        ({"source": "jsonl", "path": str(empty)}, "is empty"),
        ({"source": "jsonl", "path": str(binary)}, "is binary"),
        (jsonl(tmp_path / "t.jsonl", rows), r"'bad': no prompt in its rows; .*the rows have text"),
        (
            jsonl(tmp_path / "c.jsonl", rows, form="columns", columns={"query": "q"}),
            "no column q in .*; it has text",
        ),
        (jsonl(tmp_path / "i.jsonl", rows, form="instruction"), "no column instruction"),
        ({"source": "hub"}, "'bad': `path` is not set; set it to the Hub dataset"),
        ({"source": "hub", "path": "a/b"}, "`revision` '' is not a full commit hash of a/b"),
        ({"source": "hub", "path": "a/b", "revision": "main"}, "`revision` 'main'"),
    ]:
        with pytest.raises(ConfigError, match=message) as caught:
            list(read_prompt_set(PromptSetConfig(**{**fields, "name": "bad"}), 0, tmp_path))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("sets", "fields", "message"),
    [
        ([{"name": "a", "source": "wikipedia"}] * 2, {}, "with different names"),
        ([{"name": "a", "source": "wikipedia", "count": 4}], {}, "prompts is 5, but its prompt_sets count 4"),
        ([{"name": "a", "source": "wikipedia", "count": 6}], {}, "count 6 in all"),
        ([{"name": "a", "source": "jsonl", "form": "columns"}], {}, "form 'columns' needs"),
        (
            [{"name": "a", "source": "jsonl", "frame": "A story"}],
            {},
            "prompt set 'a': `frame` 'A story' must contain {query}",
        ),
        ([{"name": "a", "source": "jsonl", "frame": "{query}{query}"}], {}, "must contain {query} exactly once"),
        ([], {"probe": {"endpoints": ["x"]}}, "two answers"),
        ([], {"probe": {"endpoints": ["x"], "samples": 2}}, "temperature is 0"),
    ],
)
def test_an_inconsistent_section_is_refused(sets, fields, message):
    with pytest.raises(ValueError, match=message):
        config(*sets, **fields)


def test_shares_follow_counts_and_weights():
    sets = [{"name": n, "source": "wikipedia", **f} for n, f in (("a", {"count": 3}), ("b", {"weight": 2}), ("c", {}))]
    assert quotas(config(*sets, prompts=13)) == {"a": 3, "b": 7, "c": 3}
    assert quotas(config(*sets, prompts=3)) == {"a": 3}


def mixed(tmp_path, chunk=4, **fields):
    some = [{"query": f"Tell me about number {n} of the list, please."} for n in range(30)]
    more = [{"query": f"Write a poem on subject {n * 7} for my friend."} for n in range(40)]
    result = jsonl(tmp_path / "one.jsonl", [*some[:5], some[0], {"no": 1}, *some[5:]], "one")
    two = jsonl(tmp_path / "two.jsonl", [some[3], *more], "two", weight=2.0)
    return config(result, two, prompts=30, chunk=chunk, near_duplicates=False, **fields)


def test_sets_are_mixed_and_duplicates_within_and_across_are_dropped(tmp_path):
    drawn, collected = collect(mixed(tmp_path), tmp_path / "work")
    assert collected.prompt_counts == {"one": 10, "two": 20}
    assert collected.dropped_rows["one"] == {"duplicate": 2, "no_query": 1}, "its own, and one of the other set's"
    assert len({prompt.query.casefold() for prompt in drawn}) == 30
    for start in range(0, 28, 4):
        assert 1 <= sum(prompt.set == "one" for prompt in drawn[start : start + 4]) <= 2, "each file has the mix"
    assert collected.facts()["one"] == {"prompts": 10, "left_out": {"duplicate": 2, "no_query": 1}}


def test_rows_that_cannot_be_read_are_counted_with_their_set_and_path(tmp_path):
    """A byte-order mark costs no prompt, and a file of another kind does not vanish."""
    path = tmp_path / "one.jsonl"
    lines = [json.dumps({"query": f"Tell me about number {n} of the list, please."}).encode() for n in range(12)]
    path.write_bytes(b"\xef\xbb\xbf" + b"\n".join([*lines[:5], b"{torn", b'{"query": "\xff"}', *lines[5:]]))
    fields = {"name": "one", "source": "jsonl", "path": str(path)}
    drawn, collected = collect(config(fields, prompts=12, near_duplicates=False), tmp_path / "work")
    assert sorted(prompt.query for prompt in drawn) == sorted(json.loads(line)["query"] for line in lines)
    assert collected.lost([PromptSetConfig(**fields)]) == (
        f"lost: 2 of 14 rows (1 not_json, 1 invalid_utf8; in prompt set 'one', {path})"
    )
    (tmp_path / "pretty.jsonl").write_text('{\n "query": "Why?"\n}\n')
    source = PromptSetConfig(name="one", source="jsonl", path=f"{tmp_path}/*.jsonl")
    with pytest.raises(ConfigError, match=r"pretty\.jsonl: none of its 3 rows can be read \(3 not_json\)"):
        list(read_prompt_set(source, 0, tmp_path / "work"))


@pytest.mark.parametrize("kept", range(0, 8, 3))
def test_collecting_resumes_where_it_was_cut_off(tmp_path, kept):
    whole, collected = collect(mixed(tmp_path), tmp_path / "whole")
    part = tmp_path / "part"
    collect(mixed(tmp_path), part)
    for path in part.iterdir():
        if int(path.name.split("-")[1][:5]) > kept or path.name == f"prompts-{kept:05d}.json":
            path.unlink()
    again, collected_again = collect(mixed(tmp_path), part)
    assert again == whole
    assert (collected_again.prompt_counts, collected_again.dropped_rows) == (
        collected.prompt_counts,
        collected.dropped_rows,
    )


def test_near_duplicates_benchmark_questions_and_other_languages_are_dropped(tmp_path):
    text = "Describe in detail how the great fire of the old town began, spread from house to house and was put out"
    text = f"{text} by those who lived there, who came from every street with buckets of water and would not give up"
    rows = [
        {"query": f"{text} by the people."},
        {"query": f"{text} by the people!!"},
        {"query": f"{text} by the people. Thanks."},
        {"query": "What is the name of the secret thing that only the benchmark knows?"},
        {"query": "Erkläre mir bitte ausführlich, wie man einen guten Kuchen backt und was man dazu braucht."},
        {"query": "Explain to me how one bakes a good cake and what one needs for it."},
        {"query": "2 + 2 = ?"},
    ]
    settings = config(jsonl(tmp_path / "x.jsonl", rows, languages=("en",)), prompts=3)
    drawn, collected = collect(
        settings, tmp_path / "w", screen=lambda texts: [["hit"] if "secret" in t else [] for t in texts]
    )
    assert [prompt.query for prompt in drawn] == [rows[0]["query"], rows[5]["query"], rows[6]["query"]]
    assert collected.dropped_rows["s"]["in_a_benchmark"] == 1
    assert collected.dropped_rows["s"]["other_language"] == 1
    assert collected.dropped_rows["s"]["duplicate"] + collected.dropped_rows["s"]["near_duplicate"] == 2


def test_a_set_that_runs_out_is_named_with_its_count(tmp_path):
    rows = [{"query": "One?"}, {"query": "one?"}, {"query": "Two?"}, {"query": "two?"}, {"query": "TWO?"}]
    with pytest.raises(
        ConfigError, match=r"needs 5 prompts of prompt set 's', but it has 2 distinct ones \(3 duplicate\)"
    ):
        collect(config(jsonl(tmp_path / "x.jsonl", rows)), tmp_path / "w")


def test_a_share_that_a_set_cannot_give_is_refused_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(collect_module, "read_prompt_set", lambda *arguments: pytest.fail("it was read"))
    rows = [{"query": f"Question {n}?"} for n in range(7)]
    sets = [jsonl(tmp_path / f"{name}.jsonl", rows, name) for name in ("few", "more")]
    sets[1]["weight"] = 3.0
    message = r"distill.prompts 20 cannot be met: prompt set 'more' has 7 rows, 15 asked; lower distill.prompts"
    with pytest.raises(ConfigError, match=message):
        collect(config(*sets, prompts=20), tmp_path / "w")
