"""The extraction page over a store with an extraction in it, whose texts and replies try to be markup."""

import pytest

from nautile.store.artifacts import Store
from nautile.uses.extract.stage import REASONS, REFUSED
from nautile.uses.labelled.texts import write_rows
from tests.support.pages.parts import shown_page, tables

HOSTILE = "<script>alert(1)</script> ![x](http://example.invalid/x.png)"
ROWS = [
    {"number": 2, "reason": "span", "detail": HOSTILE, "text": HOSTILE, "reply": HOSTILE, "tokens": 9},
    {"number": 3, "reason": "no_text", "detail": "", "text": None, "reply": "", "tokens": 0},
]


def publish(store, rows, key):
    folder = store.staging(key)
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / REFUSED, rows)
    facts = {"rows": 4, "extracted": 4 - len(rows), "spans": 2, "refused": {row["reason"]: 1 for row in rows}}
    about = {"stage": "extract", "version": 1, "config": {}, "inputs": {}, "facts": facts}
    store.publish("extracted", key, folder, **about, execution=key[:8])


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """Draw the page over a store with one extraction that refused these rows."""

    def draw(rows):
        store = Store(tmp_path / "store")
        store.prepare()
        publish(store, rows, "a" * 64)
        return shown_page(store, "extraction", monkeypatch, of_a_run=False)

    return draw


def test_refused_rows_are_shown_by_reason_as_cells_and_never_as_markup(shown):
    page = shown(ROWS)
    assert [metric.value for metric in page.metric] == ["4", "2", "2"]
    assert page.selectbox(key="reason").options == [REASONS["no_text"], REASONS["span"]]
    assert [row[0] for row in tables(page)[0][1:]] == ["3"]
    page.selectbox(key="reason").select("span").run()
    [[columns, row]] = tables(page)
    assert columns == ["row", "detail", "text", "reply"]
    assert (row[0], row[-1]) == ("2", HOSTILE)
    assert not any("<script>" in element.value for element in (*page.markdown, *page.caption))


def test_an_extraction_without_refusals_says_so(shown):
    page = shown([])
    assert "Nothing was refused." in [caption.value for caption in page.caption]
    assert not tables(page)
