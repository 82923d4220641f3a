import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nautile.data.distill.parse_reply import ParsedDocument, parse_reply, read_reply

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
        GOOD.replace(" ", "\r\n"),
        "## Reasoning\r\nr\r\n\r\n## Final answer\r\na\r\n",
        f"Braces {{1, 2}}, \\frac{{1}}{{2}} and f'{{x}}' stand before it. {GOOD}",
        "<think>" + "\\frac{1}{2} {" * 200 + f"</think>{GOOD}",
        f'<think>A draft: {{"reasoning": "x", "answer": "y"}}</think>{GOOD}',
        "<think>r</think><answer>a</answer>",
        "<seed:think>r</seed:think>a",
        "<reasoning>\nr\n</reasoning>\n<answer>a</answer>",
        '{"response": {"reasoning": "r", "answer": "a"}}',
        "reasoning: r\nanswer: a",
        "◁think▷r◁/think▷a",
        "<|START_THINKING|>r<|END_THINKING|><|START_RESPONSE|>a<|END_RESPONSE|>",
        "<|channel>thought\nr<channel|>a",
        f"<|channel|>analysis<|message|>x<|end|><|start|>assistant<|channel|>final <|constrain|>json<|message|>{GOOD}",
        f"analysisWe think.assistantfinal{GOOD}",
        f'{{"reasoning": "x", "answer": "y"}} No, I was wrong: {GOOD}',
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
        ('{"reasoning": "it\\\'s so", "answer": "a"}', ParsedDocument("it's so", "a")),
        ('{"reasoning": "a tuple (1, ] and {2, }", "answer": "a",}', ParsedDocument("a tuple (1, ] and {2, }", "a")),
        ('{"reasoning": "r", "answer": 1.50}', ParsedDocument("r", "1.50")),
        ('{"reasoning": "r", "answer": 0.1234567890123456789}', ParsedDocument("r", "0.1234567890123456789")),
        ('Here: {"reasoning": "</think> closes", "answer": "a"}', ParsedDocument("</think> closes", "a")),
        ("<think>The set {1, 2}.</think>Two {members}.", ParsedDocument("The set {1, 2}.", "Two {members}.")),
        (
            '{"reasoning": "In C:\\\\new\\\\table:\\nso \\\\alpha\\nis", "answer": "a"}',
            ParsedDocument("In C:\\new\\table:\nso \\alpha\nis", "a"),
        ),
        ("Reasoning: the set {1}\nAnswer: \\frac{1}{2}", ParsedDocument("the set {1}", "\\frac{1}{2}")),
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
        f"<think>never ends {GOOD}",
        f"<|channel|>analysis<|message|>{GOOD}",
        '<think>r</think>{"result": "4"}',
        '<think>r</think>{"reasoning": "r", "answer": "it bre',
        '{"reasoning": "r", "answer": NaN}',
        "{'reasoning': 'r', 'answer': 3.10}",
        "{'reasoning': r'\\frac', 'answer': 'a'}",
        "reasoning: |\n  r\nanswer: |\n  a",
        "Answer: a\nReasoning: r",
        "Answer: a\nReasoning: r\nAnswer: b",
        "{'answer': __import__('os')}",
        "{" * 5000,
        "{'a':" * 3000,
        '{"answer":' * 3000,
        '{"answer":' * 3000 + "1" + "}" * 3000,
        '{"a":' * 900 + "1" + "}" * 900,
        '{"a":' * 20_000 + "1" + "}" * 20_000,
    ],
)
def test_what_is_no_reply_is_none(text):
    assert parse_reply(text) is None


@given(st.text(st.sampled_from("{}[]\"'`<|>:,\\ abreasoningw\n")))
def test_no_text_breaks_the_parser(text):
    assert parse_reply(text) is None or isinstance(parse_reply(text), ParsedDocument)


def test_a_number_python_refuses_to_write_in_decimal_is_no_answer():
    assert parse_reply("{'reasoning': 'r', 'answer': 0x" + "f" * 5000 + "}") is None


# Control characters are left out: nobody means one, and `\\f` in JSON is the beginning of `\\frac`.
WRITTEN = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\ufffd", include_characters="\n"))


@given(WRITTEN, WRITTEN)
def test_what_was_written_is_read(reasoning, answer):
    text = json.dumps({"reasoning": reasoning, "answer": answer})
    for entry in (text, f"Here:\n```json\n{text}\n```"):
        assert parse_reply(entry) == ParsedDocument(reasoning.strip(), answer.strip())


COMMANDS = (
    *(r"\frac{1}{2}", r"\sqrt{2}", r"\times", r"\theta", r"\beta", r"\rho", r"\nabla", r"\text{ if }", r"\neq"),
    *(r"\right)", r"\boxed{5}", r"\bar x", r"\forall", r"\tau", r"\triangle", r"\not=", r"\rangle", r"\binom{n}{2}"),
    *(r"\underline{x}", r"\(x\)", r"\[y\]", r"\{1, 2\}", r"50\%", r"\$5", r"\tilde{x}", r"\textbf{b}"),
    *(r"\begin{cases}", r"\int_0^1", r"\alpha"),
)
SHORT = (r"\to", r"\ne", r"\ni", r"\nu", r"\neg", r"\tan", r"\top", r"\nexists", r"\nmid", r"\tr")
WORDS = ("So we add.", "Then", "e poi", "u es", "x", "2", "-", "“q”", "\n", "\n\n", "$", "&", "=", "(")


def _raw(text):
    """`text` in a JSON string as a model writes it that does not double the backslashes of LaTeX."""
    return '{"reasoning": "' + text.replace("\n", "\\n") + '", "answer": "a"}'


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("text", ["{}", "Half is {}.", "One.\nTwo {}\n\nThree ${}$", "{}\\sqrt{{3}}{}"])
def test_latex_is_read_as_it_was_meant_with_and_without_doubled_backslashes(command, text):
    written = text.replace("{}", command).replace("{{", "{").replace("}}", "}")
    for reply in (_raw(written), json.dumps({"reasoning": written, "answer": "a"})):
        assert parse_reply(reply) == ParsedDocument(written, "a"), reply
    python = _raw(written).replace('"', "'")
    assert parse_reply(python) == ParsedDocument(written, "a"), python


@given(st.lists(st.tuples(st.sampled_from([*COMMANDS, *SHORT, *WORDS]), st.booleans(), st.sampled_from(["", " "]))))
def test_no_mixture_of_latex_and_text_is_read_as_anything_else(pieces):
    """A property over commands, words and line breaks, each command with or without doubled backslashes."""
    # A command and the letters behind it would be another command. The first one shows that not all are doubled.
    pieces = [(r"\sqrt{3}", False, " "), *((p, d, " " if p.startswith("\\") else gap) for p, d, gap in pieces)]
    meant = "".join(piece + gap for piece, _, gap in pieces)
    sent = "".join((piece.replace("\\", "\\\\") if doubled else piece) + gap for piece, doubled, gap in pieces)
    document = parse_reply(_raw(sent))
    assert document is None or document == ParsedDocument(meant.strip(), "a")


ROWS = "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\\\\\hline 5 \\end{pmatrix}"


@pytest.mark.parametrize("reply", [_raw(ROWS), json.dumps({"reasoning": ROWS, "answer": "a"})])
def test_the_rows_of_a_matrix_keep_their_ends(reply):
    assert parse_reply(reply) == ParsedDocument(ROWS, "a")


@pytest.mark.parametrize(
    "reasoning",
    [
        r"\\begin{pmatrix} 1 \\ 2 \\end{pmatrix}",  # the commands are doubled, the row's end is not
        r"\begin{pmatrix}a\\b\end{pmatrix}",  # a row and b, or \b
        r"\\( x \\) \begin{cases} 1 \\ 2 \end{cases}",
        r"\\\\frac{1}{2}",
        r"One.\\n\\nTwo.",
        r"\sqrt{2}.\ne poi",
        r"a \to b",
        r"\ud83d is half a character",
        r"a bell \u0007",
        r"caf\\u00e9",
        r"in C:\Users\name",
        r"in C:\new\table",
        "lost: \ufffd",
    ],
)
def test_what_can_be_read_in_two_ways_is_no_document_and_says_so(reasoning):
    reply = f'{{"reasoning": "{reasoning}", "answer": "a"}}'
    assert parse_reply(reply) is None
    assert read_reply(reply) == "ambiguous"


@pytest.mark.parametrize(
    "reply",
    [
        '{"reasoning": "As it is.", "answer": "A", "answer": "B"}',
        '{"document": {"reasoning": "As it is.", "answer": "A", "answer": "B"}}',
        '{"reasoning": "It\'s one.", "reasoning": "It\'s two.", "answer": "B",}',
        "{'reasoning': 'As it is.', 'answer': 'A', 'answer': 'B'}",
        '{"reasoning": "As it is.", "Answer": "A", "answer": "B"}',
    ],
)
def test_two_members_of_one_name_are_no_document(reply):
    assert read_reply(reply) in ("ambiguous", "unparsable")


def test_a_list_of_documents_is_no_reply_to_one_query():
    other = GOOD.replace('"a"', '"b"')
    for text in (f"{GOOD}\n{other}", f"[{GOOD}, {other}]", f"```json\n{GOOD}\n```\n```json\n{other}\n```"):
        assert parse_reply(text) is None
        assert read_reply(text) == "ambiguous"
    assert parse_reply(f"{GOOD}\n{GOOD}") == ParsedDocument("r", "a")


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
        ("<think>never ends {1, 2}", "truncated"),
        ("Reasoning: the set {1, 2}", "unparsable"),
    ],
)
def test_a_reply_without_a_document_says_why(text, reason):
    assert parse_reply(text) is None
    assert read_reply(text) == reason
