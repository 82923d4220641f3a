"""The questions artifact: written, read back, refused by line where it is damaged."""

import pytest

from common.errors import ConfigError
from data.screening.contamination import HeldOutQuestion, load_contamination_index, read_questions, write_questions


def test_questions_come_back_as_they_were_and_are_searched_for(tmp_path):
    odd = "Wie heißt der Fluß in Köln, an dem der Dom steht?\u2028 Und\nwarum\u0085?"
    asked = [
        HeldOutQuestion("arc", "7", odd),
        HeldOutQuestion("generated", "0", "a b c d e f", whole=True),
        HeldOutQuestion("b", "", ""),
    ]
    write_questions(tmp_path, asked)
    assert read_questions(tmp_path) == asked
    assert [hit.example for hit in load_contamination_index(tmp_path).hits(f"Quiz: {odd.upper()}")] == ["7"]
    assert load_contamination_index(None) is None


def test_damage_is_refused_by_line_with_the_way_out(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read.*--only held_out"):
        read_questions(tmp_path)
    for line in ("{", '{"benchmark": "arc"}', "[]", "7"):
        (tmp_path / "questions.jsonl").write_text(f'{{"benchmark": "a", "example": "1", "text": "t"}}\n{line}\n')
        with pytest.raises(ConfigError, match=r"line 2 is no question.*--only held_out"):
            read_questions(tmp_path)
