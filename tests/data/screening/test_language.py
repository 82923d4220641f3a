"""Language identification: the array form of py3langid's walk gives what py3langid gives."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from py3langid.langid import LanguageIdentifier

from nautile.data.screening.language import LONGEST_FEATURE, _identifier, _tables, detect_language


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("The ship left the harbour in the early morning and nobody knew where it would go.", "en"),
        ("Das Schiff verließ am frühen Morgen den Hafen, und niemand wusste, wohin es fahren würde.", "de"),
        ("Le navire a quitté le port tôt le matin et personne ne savait où il irait.", "fr"),
        ("船は早朝に港を出たが、どこへ行くのか誰も知らなかった。", "ja"),
        ("12 + 30 = 42", None),
        ("", None),
    ],
)
def test_a_language_is_named_where_it_is_certain(text, language):
    assert detect_language(text) == language


@given(st.text(max_size=300) | st.text("the quick brown fox größe été ", max_size=600))
def test_scores_are_those_of_the_library_to_the_bit(text):
    identifier = _identifier()
    data = identifier._encode(text)
    assert np.array_equal(identifier._raw_score(data), LanguageIdentifier._raw_score(identifier, data))


@pytest.mark.slow
def test_no_state_of_the_automaton_depends_on_more_than_its_last_bytes():
    """Every state is within as many steps of the first one as the walk goes back."""
    next_states, rows, _ = _tables()
    reached, frontier = {0}, [0]
    for _ in range(LONGEST_FEATURE):
        frontier = [s for s in np.unique(next_states[rows[frontier][:, None] + np.arange(256)]) if s not in reached]
        reached.update(frontier)
    assert len(reached) == len(rows)
