"""Formats of values, and that untrusted text cannot reach the controls of a terminal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from nautile.common.text import (
    amount,
    as_file_name,
    chips_text,
    counted,
    dollars,
    duration,
    first_line,
    markdown_table,
    markdown_text,
    size,
    visible,
)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (125, "2 min 5 s"),
        (3599.6, "1 h 0 min"),
        (7860, "2 h 11 min"),
    ],
)
def test_durations(seconds, shown):
    assert duration(seconds) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (7, "7"),
        (0.125, "0.12"),
        (3.14, "3.1"),
        (950.4, "950"),
        (12400, "12,400"),
        (3100000.0, "3.10 M"),
        (600000000000.0, "600.00 G"),
        (float("nan"), "nan"),
    ],
)
def test_amounts(value, shown):
    assert amount(value) == shown


@pytest.mark.parametrize(("count", "shown"), [(0, "0 B"), (999, "999 B"), (4_100_000, "4.1 MB"), (2e9, "2.0 GB")])
def test_sizes(count, shown):
    assert size(count) == shown


@given(st.text())
def test_no_control_character_survives_but_newline_and_tab(text):
    kept = {c for c in visible(text) if ord(c) < 32 or 127 <= ord(c) < 160}
    assert kept <= {"\n", "\t"}


def test_terminal_escapes_direction_overrides_and_half_pairs_are_marked():
    assert visible("a\x1b[31mb\u202ec\ud800") == "a\ufffd[31mb\ufffdc\ufffd"


def test_long_text_is_cut_with_a_mark():
    assert visible("x" * 10, most=4) == "xxxx […]"


@pytest.mark.parametrize(("value", "text"), [(0, "$0.00"), (0.0123, "$0.0123"), (1234.5, "$1,234.50")])
def test_dollars(value, text):
    assert dollars(value) == text


@pytest.mark.parametrize(
    ("hours", "cost", "text"),
    [(None, None, ""), (0.25, 0.5, "15 chip-minutes, $0.5000"), (64.0, None, "64.0 chip-hours, price not known")],
)
def test_what_accelerators_cost(hours, cost, text):
    assert chips_text(hours, cost) == text


def test_no_cell_of_a_markdown_table_can_end_its_cell_or_its_line():
    table = markdown_table(("a", "b"), [(1, "x | y\nz")])
    assert table == "| a | b |\n| --- | --- |\n| 1 | x \\| y z |"


@pytest.mark.parametrize(("error", "line"), [(ValueError("\na\nb"), "a"), (KeyError(), "KeyError")])
def test_the_first_line_of_an_error_is_never_empty(error, line):
    assert first_line(error) == line


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>", "<!-- hidden", "[x](http://evil.example)", "![x](http://evil.example)",
        "*a* __b__",
        "`code`", "# head", "> quote", "- item", "+ item", "1. item", "2) item", "---", "===", "line\n# head\n- item",
        "&lt;b&gt;", "\\<b>", "a\\", "[a]: http://evil.example", "~~gone~~",
    ],
)  # fmt: skip
def test_text_from_outside_is_one_line_of_markdown_that_shows_it_letter_by_letter(text):
    written = markdown_text(text)
    tokens = MarkdownIt("commonmark", {"html": True}).enable("strikethrough").parse(written)
    assert [token.type for token in tokens] == ["paragraph_open", "inline", "paragraph_close"]
    assert {child.type for child in tokens[1].children} <= {"text", "text_special"}
    assert "".join(child.content for child in tokens[1].children) == " ".join(text.split())


def test_addresses_and_mentions_in_text_from_outside_do_not_become_links():
    assert markdown_text("http://evil.example www.evil.example @me $x$") == (
        "http\\://evil.example www\\.evil.example \\@me \\$x\\$"
    )
    assert markdown_text("+5.3 [1, 2] of 1.5") == "+5.3 [1, 2] of 1.5"
    assert markdown_text("\x1b[31m") == "\N{REPLACEMENT CHARACTER}[31m"


def test_names_of_files_are_as_different_as_their_texts():
    assert as_file_name("Qwen/Qwen3-8B") == "Qwen~2FQwen3-8B"
    assert as_file_name(".hidden") == "~2Ehidden"
    assert len({as_file_name(text) for text in ("a/b", "a~2Fb", "a%2Fb")}) == 3


def test_a_count_has_its_noun_in_the_right_number():
    assert [counted(count, "step") for count in (0, 1, 1200)] == ["0 steps", "1 step", "1,200 steps"]
