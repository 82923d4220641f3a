"""Labelled rows of each form, and what is refused with the row's number."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from nautile.common.errors import ConfigError
from nautile.uses.labelled.config import LabelledDataConfig, TuneConfig
from nautile.uses.labelled.rows import check_known, read_rows
from tests.support.samples.labelled import write_records


def rows_of(folder, records, form="label", **fields):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return read_rows(LabelledDataConfig.model_validate({"path": str(path), **fields}), form, folder)


def test_labels_by_name_by_number_and_by_cuts(tmp_path):
    records = [{"text": "a", "label": 1, "by": "x"}, {"text": "b", "label": "no", "by": "y"}]
    rows = rows_of(tmp_path, records, label_names=["no", "yes"], source_column="by")
    assert [(row.text, row.target, row.source, row.number) for row in rows] == [
        ("a", "yes", "x", 1),
        ("b", "no", "y", 2),
    ]
    assert [row.target for row in rows_of(tmp_path, records)] == ["1", "no"]
    # As tweets_GroundTruth.txt of vaderSentiment's source archive: no names, a tab, quotation marks that are text.
    (tmp_path / "tweets.txt").write_text('1\t2.9\t"great" day\n2\t-0.2\t"the table\n3\t-1.5\tawful\n')
    config = LabelledDataConfig.model_validate({"preset": "vader", "path": str(tmp_path / "tweets.txt")})
    assert [row.target for row in read_rows(config, "label", tmp_path)] == ["positive", "neutral", "negative"]


@pytest.mark.parametrize(
    ("record", "fields", "message"),
    [
        ({"text": " ", "label": "x"}, {}, "row 2: the text in column 'text' is empty"),
        ({"text": 3, "label": "x"}, {}, "row 2: has a int, not a text, in column 'text'"),
        ({"text": "b"}, {}, "row 2, column 'label': has no label"),
        ({"text": "b", "label": " "}, {}, "row 2, column 'label': has no label"),
        ({"text": "b", "label": "X"}, {}, r"'x' \(row 1\) and 'X' \(row 2\) differ only in case, space or form"),
        ({"text": "b", "label": "x\u200b"}, {}, "differ only in case, space or form"),
        ({"text": "b", "label": -1}, {"label_names": ["x"]}, "-1 is none of the 1 classes"),
        ({"text": "b", "label": "much"}, {"cuts": [0.0], "label_names": ["x", "y"]}, "'x' is not a number"),
        ({"text": "b", "label": "x"}, {"label_column": "intent"}, "no column 'intent'; there are text, label"),
    ],
)
def test_rows_that_cannot_be_used(tmp_path, record, fields, message):
    with pytest.raises(ConfigError, match=message):
        rows_of(tmp_path, [{"text": "a", "label": "x"}, record], **fields)


def test_numbers_that_no_float_holds_are_refused(tmp_path):
    huge = 10**400
    with pytest.raises(ConfigError, match=r"row 1, column 'label': '1000.* is not a number"):
        rows_of(tmp_path, [{"text": "a", "label": huge}], cuts=[0.5], label_names=["low", "high"])
    for shares in ([huge, 1], [1e308, 1e308]):
        with pytest.raises(ConfigError, match="row 1: `shares` must be 2 numbers"):
            rows_of(tmp_path, [{"prompt": "a", "options": ["x", "y"], "shares": shares}], "opinions")


def test_a_number_that_is_none_is_in_no_class(tmp_path):
    """Pandas writes a missing number as `nan`, which no cut is above."""
    path = tmp_path / "rows.csv"
    path.write_text("text,score\na,0.2\nb,nan\n", encoding="utf-8")
    fields = {"path": str(path), "label_column": "score", "cuts": [0.5], "label_names": ["low", "high"]}
    with pytest.raises(ConfigError, match="row 2, column 'score': has no label"):
        read_rows(LabelledDataConfig.model_validate(fields), "label", tmp_path)


def test_a_missing_number_in_a_column_of_numbers_is_no_label(tmp_path):
    """As pandas writes a column of which some values are missing."""
    table = pa.table({"text": ["a", "b", "c"], "label": [1.0, None, 2.0]})
    for labels in (table["label"], pa.array([1.0, float("nan"), 2.0])):
        pq.write_table(table.set_column(1, "label", labels), tmp_path / "rows.parquet")
        config = LabelledDataConfig.model_validate({"path": str(tmp_path / "rows.parquet")})
        with pytest.raises(ConfigError, match="row 2, column 'label': has no label"):
            read_rows(config, "label", tmp_path)


def test_nan_among_numbers_is_no_label_and_among_words_a_word(tmp_path):
    path = tmp_path / "rows.csv"
    for labels, message in ((("1.0", "nan", "2.0"), "row 2: has no label"), (("naan", "nan", "naan"), "")):
        path.write_text("text,label\n" + "".join(f"text {label},{label}\n" for label in labels), encoding="utf-8")
        config = LabelledDataConfig.model_validate({"path": str(path)})
        if message:
            with pytest.raises(ConfigError, match=message):
                read_rows(config, "label", tmp_path)
        else:
            assert [row.target for row in read_rows(config, "label", tmp_path)] == list(labels)


def test_labels_with_other_spaces_inside_are_one_too_many(tmp_path):
    for labels in (("very good", "Very  good"), ("caf\u00e9", "cafe\u0301"), (1, 1.0), ("2", "2.0")):
        records = [{"text": f"text {label!r}", "label": label} for label in labels]
        with pytest.raises(ConfigError, match="differ only in case, space or form, and would be two classes"):
            rows_of(tmp_path, records)
    records = [{"text": label, "label": label} for label in ("1.1", "1.10", "10")]
    assert [row.target for row in rows_of(tmp_path, records)] == ["1.1", "1.10", "10"]


ASKED = {"role": "user", "content": "How much is 2 + 3?"}


@pytest.mark.parametrize(
    ("reply", "parts"),
    [
        ({"content": "5"}, ("", "5")),
        ({"content": "<think>2 + 3 = 5.</think>5"}, ("2 + 3 = 5.", "5")),
        ({"content": "2 + 3 = 5.</think>\n\n5"}, ("2 + 3 = 5.", "5")),
        ({"content": "<think></think>5"}, ("", "5")),
        ({"content": "5", "reasoning_content": "2 + 3 = 5."}, ("2 + 3 = 5.", "5")),
        ({"content": "5", "reasoning_content": None}, ("", "5")),
        ({"content": "5", "reasoning": " so "}, ("so", "5")),
        ({"content": "<think>so</think>5", "reasoning_content": "so"}, ("so", "5")),
        ({"content": "<think>so</think>5", "reasoning_content": "else"}, "two reasonings"),
        ({"content": "<think>2 + 3 = 5."}, "all reasoning, without an answer"),
        ({"content": "<think>so</think> "}, "all reasoning, without an answer"),
        ({"content": "5", "reasoning_content": ["so"]}, "must be a text"),
    ],
)
def test_the_reasoning_of_a_reply_is_not_its_answer(tmp_path, reply, parts):
    records = [{"messages": [ASKED, {"role": "assistant", **reply}]}]
    if isinstance(parts, str):
        with pytest.raises(ConfigError, match=f"row 1: .*{parts}"):
            rows_of(tmp_path, records, "chat")
        return
    [row] = rows_of(tmp_path, records, "chat")
    assert (row.reasoning, row.target) == parts


def test_the_reasoning_of_an_earlier_turn_is_left_out(tmp_path):
    earlier = {"role": "assistant", "content": "<think>so</think>5"}
    messages = [
        ASKED,
        earlier,
        {"role": "user", "content": "<think> is a tag"},
        {"role": "assistant", "content": "Yes"},
    ]
    [row] = rows_of(tmp_path, [{"messages": messages}], "chat")
    assert row.text == "How much is 2 + 3?\n\n5\n\n<think> is a tag"


def test_entities_of_spans_and_of_tags(tmp_path):
    spans = [
        {"text": "Ada met Bo", "entities": [{"text": "Ada", "label": "PER"}, {"start": 8, "end": 10, "label": "PER"}]}
    ]
    expected = [{"text": "Ada", "label": "PER"}, {"text": "Bo", "label": "PER"}]
    assert json.loads(rows_of(tmp_path, spans, "entities")[0].target) == expected
    names = ["O", "B-PER", "I-PER", "B-LOC"]
    tags = [{"tokens": ["Ada", "Lovelace", "of", "London"], "ner_tags": [1, 2, 0, 3]}]
    row = rows_of(tmp_path, tags, "entities", text_column="tokens", label_column="ner_tags", label_names=names)[0]
    assert row.text == "Ada Lovelace of London"
    assert json.loads(row.target) == [{"text": "Ada Lovelace", "label": "PER"}, {"text": "London", "label": "LOC"}]
    with pytest.raises(ConfigError, match="row 1: the entities are not JSON"):
        rows_of(tmp_path, [{"text": "Ada", "entities": "[" * 100_000}], "entities")
    with pytest.raises(ConfigError, match="row 1, entity 1: its text 'Eve' does not occur"):
        rows_of(tmp_path, [{"text": "Ada", "entities": [{"text": "Eve", "label": "PER"}]}], "entities")
    with pytest.raises(ConfigError, match="characters 0 to 9"):
        rows_of(tmp_path, [{"text": "Ada", "entities": [{"start": 0, "end": 9, "label": "PER"}]}], "entities")


def test_chats_and_opinions(tmp_path):
    turns = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    row = rows_of(tmp_path, [{"messages": [*turns, {"role": "assistant", "content": "Hello"}]}], "chat")[0]
    assert (row.text, row.target) == ("Be kind.\n\nHi", "Hello")
    with pytest.raises(ConfigError, match="row 1: `messages` must be"):
        rows_of(tmp_path, [{"messages": turns}], "chat")
    row = rows_of(tmp_path, [{"prompt": "Q", "options": ["yes", "no"], "shares": [3, 1]}], "opinions")[0]
    assert (row.options, row.shares) == (("yes", "no"), (0.75, 0.25))
    for wrong in (
        {"options": [], "shares": []},
        {"options": ["a", "b"], "shares": [0, 0]},
        {"options": "yes or no", "shares": [1, 1]},
        {"options": ["a", "b"], "shares": "[1, Infinity]"},
    ):
        with pytest.raises(ConfigError, match=r"row 1: `(options|shares)` must be"):
            rows_of(tmp_path, [{"prompt": "Q", **wrong}], "opinions")


def test_the_articles_have_eleven_topics_and_are_held_out_by_title(tmp_path):
    rows = read_rows(LabelledDataConfig.model_validate("wikipedia_topics"), "label", tmp_path)
    assert len({row.target for row in rows}) == 11
    assert len({row.source for row in rows}) == len(rows) > 8_000


def test_a_label_that_was_not_learnt(tmp_path):
    rows = rows_of(tmp_path, [{"text": "a", "label": "x"}, {"text": "b", "label": "z"}])
    check_known(rows[:1], ["x", "y"], "file")
    with pytest.raises(ConfigError, match=r"row 2 has the label 'z', which was not learnt \(1 of 2 rows"):
        check_known(rows, ["x", "y"], "file")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("rows.txt", "is neither a file"),
        ({"preset": "mnist"}, "no preset 'mnist'; there are ag_news"),
        ({"preset": "sst2"}, "needs as `revision` a full commit hash"),
        ({"path": "owner/name", "revision": "main"}, "full commit hash"),
        ({"path": "a.csv", "revision": "0" * 40}, "is only for datasets of the Hub"),
        ({"path": "a.csv", "cuts": [1.0, 0.0], "label_names": ["a", "b", "c"]}, "must be increasing"),
        ({"path": "a.csv", "unknown": 1}, "Extra inputs"),
    ],
)
def test_data_that_is_not_described_well(data, message):
    with pytest.raises(ValidationError, match=message):
        LabelledDataConfig.model_validate(data)


def test_labels_of_a_teacher_are_learnt_from_and_not_tested_on():
    assert TuneConfig.model_validate({"data": "labels/0123456789ab"}).data.reader == "labels"
    with pytest.raises(ValidationError, match="must be labelled by people"):
        TuneConfig.model_validate({"data": "rows.csv", "test": "labels/0123456789ab"})
    with pytest.raises(ValidationError, match="needs as `path` an id"):
        TuneConfig.model_validate({"data": {"reader": "labels", "path": "mine"}})


def test_several_labels_of_a_text_are_a_list_its_json_or_a_text_with_separators(tmp_path):
    records = [{"text": "a", "labels": ["y", "x", "y"]}, {"text": "b", "labels": []}, {"text": "c", "labels": "x; y"}]
    path = write_records(tmp_path / "rows.jsonl", records)

    def labels(path, **fields):
        rows = read_rows(LabelledDataConfig.model_validate({"path": str(path), **fields}), "labels", tmp_path)
        return [row.labels for row in rows]

    assert labels(path) == [("x", "y"), (), ("x", "y")]
    table = tmp_path / "rows.csv"
    table.write_text('text,label\na,y|x\nb,\nc,"[""x"", ""y""]"\n')
    assert labels(table, label_separator="|") == [("x", "y"), (), ("x", "y")]
    with pytest.raises(ConfigError, match="row 2, column 'labels': has no list of labels"):
        labels(write_records(path, [records[0], {"text": "b"}]))
    with pytest.raises(ConfigError, match="row 1, column 'labels': has no label"):
        labels(write_records(path, [{"text": "b", "labels": "x;;y"}]))
    with pytest.raises(ConfigError, match="differ only in case"):
        labels(write_records(path, [{"text": "b", "labels": ["x", "X"]}]))
