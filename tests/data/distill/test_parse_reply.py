import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.distill.parse_reply import ParsedDocument, parse_reply, reason_without_document

GOOD = '{"reasoning": "r", "answer": "a"}'


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        ' {"answer":"a","reasoning":"r","more":1}\n',
        f"Here it is:\n```json\n{GOOD}\n```\nGood luck!",
        f"Sure. {GOOD} Anything else?",
        "<think>r</think>\na",
        "<|think_start|>r<|think_end|>\na",
        "[THINK]r[/THINK]a",
        f"The form is {{reasoning}} and {{answer}}, so: {GOOD}",
        f'{{"reasoning": "…", "answer": "…"}} is the form. Now filled in: {GOOD}',
        f"<think>I could write {{x}} or {{}}.</think>{GOOD}",
        f"<|channel|>analysis<|message|>{{}} first<|end|><|start|>assistant<|channel|>final<|message|>{GOOD}<|return|>",
        '{"reasoning": "r", "answer": "a",}',
        '```\n{"reasoning": "r",\n "answer": "a",\n}\n```',
        "{“reasoning”: “r”, “answer”: “a”}",
        "{'reasoning': 'r', 'answer': 'a'}",
        '{"Reasoning": " r ", "Final Answer": "a "}',
        '{"synthetic_reasoning": "r", "synthetic_answer": "a"}',
        '{"document": {"reasoning": "r", "answer": "a"}}',
        '{"reasoning": ["r"], "answer": "a"}',
        json.dumps(GOOD),
        "Reasoning: r\nAnswer: a",
        "**Reasoning:** r\n\n**Answer:** a",
        "## Reasoning\nr\n\n## Final answer\na\n",
        "\ufeff" + GOOD,
    ],
)
def test_a_reply_is_read_in_each_of_its_forms(text):
    assert parse_reply(text) == ParsedDocument("r", "a")


@pytest.mark.parametrize(
    ("text", "draft"),
    [
        ('{"reasoning": "one\ntwo", "answer": 12}', ParsedDocument("one\ntwo", "12")),
        ('{"answer": "a"}', ParsedDocument("", "a")),
        ('{"reasoning": ["one", "two"], "answer": 4.5}', ParsedDocument("one\ntwo", "4.5")),
        (
            '{"reasoning": "a set {1, 2} and \\"x\\"", "answer": "[1, ]"}',
            ParsedDocument('a set {1, 2} and "x"', "[1, ]"),
        ),
        ('{"reasoning": "r", "answer": "use {\\"answer\\": 1}"}', ParsedDocument("r", 'use {"answer": 1}')),
        ("{'reasoning': 'it\\'s so', 'answer': 'a'}", ParsedDocument("it's so", "a")),
    ],
)
def test_what_stands_inside_a_reply_stays(text, draft):
    assert parse_reply(text) == draft


@pytest.mark.parametrize(
    "text",
    [
        "",
        "just text",
        "{}",
        '{"reasoning": "r"}',
        '{"reasoning": "r", "answer": ["a"]}',
        '{"reasoning": "r", "answer": null}',
        '{"reasoning": {"a": 1}, "answer": "a"}',
        '{"answer": true, "reasoning": "r"}',
        "[1, 2]",
        '{"reasoning": "r", "answer": "it breaks o',
        '{"reasoning": "r"',
        '<think>never ends {"answer": ',
        "<think>never ends",
        "Answer: a\nReasoning: r",
        "Answer: a\nReasoning: r\nAnswer: b",
        "{'answer': __import__('os')}",
        "{" * 5000,
        "{'a':" * 3000,
        '{"answer":' * 3000,
    ],
)
def test_what_is_no_reply_is_none(text):
    assert parse_reply(text) is None


@given(st.text(st.sampled_from("{}[]\"'`<|>:,\\ abreasoningw\n")))
def test_no_text_breaks_the_parser(text):
    assert parse_reply(text) is None or isinstance(parse_reply(text), ParsedDocument)


def test_a_number_python_refuses_to_write_in_decimal_is_no_answer():
    assert parse_reply("{'reasoning': 'r', 'answer': 0x" + "f" * 5000 + "}") is None


@given(st.text(st.characters(exclude_categories=["Cs"])), st.text(st.characters(exclude_categories=["Cs"])))
def test_what_was_written_is_read(reasoning, answer):
    text = json.dumps({"reasoning": reasoning, "answer": answer})
    for entry in (text, f"Here:\n```json\n{text}\n```"):
        assert parse_reply(entry) == ParsedDocument(reasoning.strip(), answer.strip())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        (" \n", "empty"),
        ('{"reasoning": "We add', "truncated"),
        ('{"reasoning": "We add {", "answer": ["1", ', "truncated"),
        ('Here it is: {"reasoning": "a \\" quote {", "answer"', "truncated"),
        ('{"reasoning": "no answer {"}', "unparsable"),
        ('{"other": 1} and "more', "unparsable"),
        ("just words", "unparsable"),
    ],
)
def test_a_reply_without_a_document_says_why(text, reason):
    assert parse_reply(text) is None
    assert reason_without_document(text) == reason
