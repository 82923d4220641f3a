"""BIO tags of tokens to and from characters; a head for entities that is tuned and then extracts."""

import json

import pytest

from nautile.configs.model import TokenizerConfig
from nautile.data.label_set import read_label_set
from nautile.data.tokenizer import tokenizer_for
from nautile.uses.extract.stage import TagExtractor, extractor_for
from nautile.uses.labelled.config import ExtractConfig, TuneConfig
from nautile.uses.labelled.token_head import TokenTagger, entities_of, tags_of, token_places
from nautile.uses.tune.stage import tune
from tests.support.samples.labelled import write_checkpoint, write_records
from tests.uses.tune.test_stage import job, report_of

TEXT = "  Jo\u00e3o Silva met Ana in S\u00e3o Paulo, S\u00e3o Paulo. \U0001f600 "
TARGET = [("Jo\u00e3o Silva", "name"), ("Ana", "name"), ("S\u00e3o Paulo", "city"), ("S\u00e3o Paulo", "city")]


@pytest.mark.parametrize("ranks", [256, 600, 20_000])
def test_entities_survive_the_way_to_tags_and_back(ranks):
    """Whatever the tokens are: bytes of a character, words with the space before them."""
    _, places = token_places(tokenizer_for(TokenizerConfig(ranks=ranks)), TEXT)
    tags = tags_of(TEXT, json.dumps([{"text": words, "label": label} for words, label in TARGET]), places)
    found = entities_of(tags, places)
    assert [(TEXT[start:end], kind) for start, end, kind in found] == TARGET
    assert found[3][0] > found[2][0]  # equal words are looked for in turn
    assert places[-1] == (TEXT.index("\U0001f600"), TEXT.index("\U0001f600") + 1)


def test_an_entity_begins_where_the_kind_changes():
    places = [(0, 1), (1, 2), (2, 2), (3, 4), (4, 5)]
    assert entities_of(["I-a", "I-b", "B-b", "I-b", "B-b"], places) == [(0, 1, "a"), (1, 4, "b"), (4, 5, "b")]
    assert entities_of(["O", "O", "O", "O", "O"], places) == []


def test_other_forms_take_no_head():
    for form in ("chat", "opinions"):
        with pytest.raises(ValueError, match=f"form '{form}' needs 'full' or 'lora'"):
            TuneConfig(data="rows.jsonl", form=form, method="head")
    with pytest.raises(ValueError, match="form 'entities' needs 'head', 'full' or 'lora'"):
        TuneConfig(data="rows.jsonl", form="entities", method="verbalised")


@pytest.mark.slow
def test_a_head_for_entities_is_tuned_and_extracts(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "start")
    records = [
        {"text": f"{number} {word} ran", "entities": [{"text": word, "label": label}]}
        for number in range(120)
        for word, label in (("cat", "animal"), ("oak", "plant"))
    ]
    table = write_records(tmp_path / "rows.jsonl", records)
    done = job(tmp_path, checkpoint, table, form="entities", method="head", shots=[0], seeds=1, longest=12)
    tune.work(done)
    report = report_of(done)
    assert report["arms"][0]["loss"] < report["baselines"]["shares of the tags"]
    assert report["arms"][0]["spans"][0]["f1"] > 0.1  # a random model of 16 columns tells few words apart
    labels = read_label_set(done.output("checkpoint"))
    assert labels.classes == ("O", "B-animal", "I-animal", "B-plant", "I-plant")
    assert "Span F1" in (done.output("tuning") / "card.md").read_text()
    schema = {"texts": {"reader": "jsonl", "path": "t"}, "json_schema": "{}", "slots": 2}
    extractor = TagExtractor(done.output("checkpoint"), ExtractConfig.model_validate(schema))
    texts = [" 7 cat ran", None, "word " * 40, "8 oak ran"]
    rows = extractor.run(texts, tmp_path / "found.jsonl")
    assert [row["reason"] for row in rows] == [None, "no_text", "too_long", None]
    found = TokenTagger(done.output("checkpoint"), 4).entities([texts[0], texts[3]])
    assert any(found)
    for row, entities in zip((rows[0], rows[3]), found, strict=True):
        text = texts[row["number"] - 1]
        documents = [{"text": text[start:end], "label": kind} for start, end, kind in entities]
        assert json.loads(row["json"]) == documents
        assert [(span["start"], span["end"]) for span in row["spans"]] == [place[:2] for place in entities]
    assert extractor.run(texts, tmp_path / "found.jsonl") == rows  # nothing is computed again


def test_a_schema_of_ones_own_is_not_for_the_head(monkeypatch, tmp_path):
    monkeypatch.setattr("nautile.uses.extract.stage.TagExtractor", lambda *_: "head")
    monkeypatch.setattr("nautile.uses.extract.stage.Extractor", lambda *_: "decoded")
    from nautile.data.json_schema import entity_schema
    from nautile.data.label_set import LabelSet, write_label_set

    write_label_set(tmp_path, LabelSet(form="entities", method="head", labels=("city",)))
    assert extractor_for(tmp_path, None, entity_schema(("city",))) == "head"
    assert extractor_for(tmp_path, None, {"type": "object"}) == "decoded"
