"""Read the prompt sets of distillation: Hub datasets, JSON lines, or questions about Wikipedia's vital articles.

The files of a Hub dataset are listed once, with their digests and row counts, and the list is saved. Each file is
downloaded and checked when it is needed, and removed after reading; a resume downloads only the file it continues in.
Rows have fixed numbers: `read_prompt_set` always yields the same rows from number `skip` on, so a resume needs only
that number.
"""

import hashlib
import itertools
import re
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from nautile.common.errors import ConfigError
from nautile.common.files import parse_json
from nautile.common.text import has_half_pair
from nautile.configs.distill import PromptSetConfig
from nautile.data.records import Rejected
from nautile.data.screening.words import fold
from nautile.data.sources.hub import (
    COMMIT,
    SourceFile,
    count_hub_rows,
    describe,
    fetch_hub_file,
    list_hub_files,
    named_in_errors,
    read_file_list,
    write_file_list,
)
from nautile.data.sources.local_files import (
    LINES,
    count_jsonl_rows,
    is_parquet,
    matching_files,
    parquet_columns,
    read_json_values,
    read_parquet_values,
    refuse_other_kind,
)
from nautile.data.sources.wikipedia import Article, articles, web_record

READABLE = (".parquet", *LINES)
FOOTERS_AT_ONCE = 8  # small requests
QUESTIONS_PER_ARTICLE = 3

PromptRow = tuple[str, Any, Collection[str]]  # name of the row in the set, its parsed value, the columns of its file


def check_prompt_set(source: PromptSetConfig) -> None:
    """Validate a set's configuration without sending a request. Raises `ConfigError`."""
    if source.source == "jsonl":
        if not source.path:
            raise ConfigError(f"{source.label}: source 'jsonl' needs the `path` of a file, or a glob")
        matching_files(source.path)
    if source.source == "hub":
        if not source.path:
            raise ConfigError(f"{source.label}: `path` is not set; set it to the Hub dataset to read, as owner/name")
        if not COMMIT.fullmatch(source.revision):
            raise ConfigError(
                f"{source.label}: `revision` {source.revision!r} is not a full commit hash of {source.path}"
            )


def count_prompt_rows(source: PromptSetConfig, work: Path) -> int:
    """Count the rows of a set, an upper bound on its prompts; for the Hub from the files' footers.

    Raises `ConfigError` for a set that cannot be read, `Retryable` if the Hub does not answer.
    """
    check_prompt_set(source)
    if source.source == "wikipedia":
        return QUESTIONS_PER_ARTICLE * len(articles(0))
    if source.source == "jsonl":
        return sum(count_jsonl_rows(path) for path in matching_files(source.path))
    return sum(file.rows or 0 for file in _hub_files(source, work))


def read_prompt_rows(source: PromptSetConfig, columns: Collection[str], work: Path, skip: int) -> Iterator[PromptRow]:
    """Read rows of a set of files from row `skip` on; of Parquet only `columns`. Raises as `count_prompt_rows`."""
    if source.source == "jsonl":
        for path in matching_files(source.path):
            # A file that lies before `skip` as a whole is counted without being parsed.
            if skip and (rows := count_jsonl_rows(path)) <= skip:
                skip -= rows
                continue
            for number, row in enumerate(_readable(path, read_json_values(path, skip), skip), skip):
                yield f"{path.name}/{number}", row, _columns_of(row)
            skip = 0
        return
    for file in _hub_files(source, work):
        assert file.rows is not None, "the list was written with the rows of each file"
        if skip >= file.first + file.rows:
            continue
        folder, begin = work / source.name, max(0, skip - file.first)
        path = fetch_hub_file(source, file, folder)
        with named_in_errors(path, describe(source, file.path)):
            names = parquet_columns(path) if is_parquet(file.path) else None
            hub_rows = read_json_values(path, begin) if names is None else read_parquet_values(path, columns, begin)
            for number, row in enumerate(_readable(path, hub_rows, begin), file.first + begin):
                yield str(number), row, _columns_of(row) if names is None else names
        shutil.rmtree(folder)


def _readable(path: Path, rows: Iterator[Any], skip: int) -> Iterator[Any]:
    """The rows of a file from row `skip` on. Raises `ConfigError` at its end if none of all its rows can be read."""
    rejected, some_usable = Counter[str](), skip > 0
    for row in rows:
        if isinstance(row, Rejected):
            rejected[row.reason] += 1
        else:
            some_usable = True
        yield row
    if not some_usable:
        refuse_other_kind(path, rejected)


def _columns_of(row: Any) -> Collection[str]:
    return [str(name) for name in row] if isinstance(row, Mapping) else ()


def _hub_files(source: PromptSetConfig, work: Path) -> list[SourceFile]:
    """The files of a Hub set with `first` and `rows` of each; the list is made once and saved."""
    path = work / f"{source.name}.files.jsonl"
    if not path.is_file():
        files = list_hub_files(source)
        if unreadable := [file.path for file in files if not file.path.endswith(READABLE)]:
            raise ConfigError(
                f"{source.label}: reads Parquet and JSON lines, and {unreadable[0]} of {source.path} is neither"
            )
        with ThreadPoolExecutor(FOOTERS_AT_ONCE) as threads:
            counts = list(threads.map(lambda file: count_hub_rows(source, file, work / f"counting-{file.item}"), files))
        first, counted_files = 0, []
        for file, rows in zip(files, counts, strict=True):
            counted_files.append(replace(file, first=first, rows=rows))
            first += rows
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file_list(path, counted_files)
    return read_file_list(path)


MAX_QUERY = 20_000  # characters; longer "prompts" are misplaced documents
ROWS_WITHOUT_PROMPT = 1000  # a set without a prompt in its first rows is configured wrongly
QUERY_COLUMNS = ("query", "prompt", "instruction", "question", "messages", "conversations", "conversation")
USER_ROLES = ("user", "human", "prompter")

PASSAGE_CHARACTERS = 240
BENCHMARKED = 1000  # the offline benchmarks ask about the first articles, so these come last here
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_SUBJECT = re.compile(r"^([^,;:]{2,60}?)\s+(is|are|was|were)\s")  # 'The durian is …'
_HONOURS = re.compile(r"(?: (?![IVXL]+\b)[A-Za-z]*[A-Z]{3,}\w*)+$")  # 'Friedrich Wöhler FRS HonFRSE'
_NOT_A_SUBJECT = ("In ", "On ", "At ", "For ", "As ", "This ", "There ", "It ")  # 'In 1905 there was …'

Kind = Literal["definition", "explanation", "fact", "person", "place", "instruction"]


@dataclass(frozen=True)
class Prompt:
    """A question for the teacher.

    `opening`: first words of the reasoning, which keep a small teacher on topic; `reference`: the known answer, used
    only to check probes; `set`: the prompt set's name.
    """

    id: str
    query: str
    kind: Kind
    passage: str | None = None
    opening: str | None = None
    url: str | None = None
    license: str | None = None
    reference: str | None = None
    set: str = ""


def read_prompt_set(source: PromptSetConfig, seed: int, work: Path, skip: int = 0) -> Iterator[Prompt | str]:
    """Read a set from row `skip` on: for each row a prompt, or why there is none ("no_query", "too_long", …).

    `work`: a folder for the list of a Hub set's files, and for the file that is being read.

    Raises `ConfigError` for a set that cannot be read or lacks the columns, `Retryable` if the Hub does not answer.
    """
    if source.source == "wikipedia":
        for article_prompt in itertools.islice(article_prompts(seed), skip, None):
            yield replace(article_prompt, set=source.name)
        return
    check_prompt_set(source)
    columns: set[str] = set()
    has_prompt = skip > 0  # a resume: the first rows were checked when they were read
    read_columns = {*QUERY_COLUMNS, "instruction", "input", "id", "passage", *source.columns.values()}
    for number, (row_name, row, names) in enumerate(read_prompt_rows(source, read_columns, work, skip)):
        columns.update(names)
        if number == 0 and names:
            _check_columns(source, names)
        prompt = _prompt(source, row, row_name)
        has_prompt = has_prompt or isinstance(prompt, Prompt)
        if not has_prompt and number + 1 == ROWS_WITHOUT_PROMPT:
            break
        yield prompt
    if not has_prompt:
        expected = {
            "columns": source.columns.get("query", ""),
            "instruction": "instruction",
            "messages": ", ".join(QUERY_COLUMNS[-3:]),
        }.get(source.form, ", ".join(QUERY_COLUMNS))
        raise ConfigError(
            f"{source.label}: no prompt in its rows; form {source.form!r} looks for {expected}; "
            f"the rows have {', '.join(sorted(columns)) or 'no columns'}"
        )


def _prompt(source: PromptSetConfig, row: Any, row_name: str) -> Prompt | str:
    """The prompt in a row, or the reason why there is none."""
    if isinstance(row, Rejected):
        return row.reason
    if not isinstance(row, Mapping):
        return "not_an_object"
    query = _query(source, row)
    if query is None or not fold(query).strip():  # of invisible characters alone, too
        return "no_query"
    query = (detokenise(query) if source.detokenise else query).strip()
    if source.frame is not None:
        query = source.frame.replace("{query}", query)
    if context := _text(row, source.columns.get("context", "")):
        query = f"{query}\n\n{context}"
    if len(query) > MAX_QUERY:
        return "too_long"
    identity = _text(row, source.columns.get("id", "id")) or row_name
    passage = _text(row, source.columns.get("passage", "passage"))
    if any(map(has_half_pair, (query, identity, passage or ""))):  # documents have the passage and the id too
        return "invalid_utf8"
    digest = hashlib.sha256(query.encode("utf-8")).hexdigest()[:12]
    return Prompt(
        id=f"{source.name}/{identity}-{digest}",
        query=query,
        kind="instruction",
        passage=passage,
        license=source.license or None,
        reference=_text(row, source.columns["reference"]) if "reference" in source.columns else None,
        set=source.name,
    )


def _query(source: PromptSetConfig, row: Mapping[str, Any]) -> str | None:
    """The question in a row: a text, or the first user message of a conversation. None if there is neither."""
    if source.form == "instruction":
        parts = [_text(row, "instruction"), _text(row, "input")]
        return "\n\n".join(part for part in parts if part) if parts[0] else None
    if source.form == "columns":
        names: Iterable[str] = (source.columns["query"],)
    else:
        names = QUERY_COLUMNS[-3:] if source.form == "messages" else QUERY_COLUMNS
    name, value = next(((name, row[name]) for name in names if row.get(name)), ("", None))
    if name in QUERY_COLUMNS[-3:] and isinstance(value, str) and value.lstrip().startswith("["):
        value = parse_json(value.encode("utf-8", "replace"))  # a conversation in a column of texts
    if isinstance(value, list):
        # OpenAI's messages have `role` and `content`, ShareGPT's conversations `from` and `value`.
        messages = [m for m in value if isinstance(m, Mapping) and m.get("role", m.get("from")) in USER_ROLES]
        value = messages[0].get("content", messages[0].get("value")) if messages else None
        if isinstance(value, list):  # parts, of which none may be an image
            texts = [part["text"] for part in value if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
            value = "\n".join(texts) if len(texts) == len(value) else None
    return value if isinstance(value, str) else None


def _text(row: Mapping[str, Any], name: str) -> str | None:
    """A field as stripped text, numbers included; None if it is missing, empty or of another type."""
    value = row.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    return value.strip() or None if isinstance(value, str) else None


def detokenise(text: str) -> str:
    """Undo WritingPrompts' tokenisation: spaces at punctuation and in contractions, tags, quotes and breaks."""
    text = re.sub(r"^\s*\[\s*[A-Za-z]{2,3}\s*\]", "", text)  # '[ WP ] You wake …'
    text = re.sub(r"\s*<newline>\s*", "\n", text)
    text = re.sub(r"``\s*|\s*''", '"', text)  # `` So it ends ''
    text = re.sub(r"[ \t]+(?=[.,!?;:%)\]}]|n['’]t\b|['’](?:s|m|re|ve|ll|d)\b)", "", text)
    text = re.sub(r"(?<=[(\[{$])[ \t]+", "", text)  # '( see below'
    return re.sub(r"[ \t]{2,}", " ", text).strip()


def _check_columns(source: PromptSetConfig, columns: Collection[str]) -> None:
    """Raise `ConfigError` for a set whose first file lacks a column that its configuration names."""
    required = {"columns": list(source.columns.values()), "instruction": ["instruction"]}.get(source.form, [])
    if missing_names := [name for name in required if name not in columns]:
        raise ConfigError(
            f"{source.label}: no column {', '.join(missing_names)} in {source.path}; it has {', '.join(columns)}"
        )


def article_prompts(seed: int) -> Iterator[Prompt]:
    """One question about each article, shuffled by `seed`; then a second and a third one about each."""
    # With seed 0 the order of ingest, so that the student has read the articles that it is asked about.
    ordered = articles(seed)
    ordered = ordered[BENCHMARKED:] + ordered[:BENCHMARKED]
    for repeat in range(QUESTIONS_PER_ARTICLE):
        for index, article in enumerate(ordered):
            if (prompt := article_question(article, index + repeat)) is not None:
                yield prompt


def article_question(article: Article, number: int) -> Prompt | None:
    """A question about an article, its kind chosen by `number` in turn; None if the first sentence is no definition."""
    sentences = _SENTENCE_END.split(" ".join(article.extract.split()))
    # Without what stands in parentheses: 'Ada Lovelace (1815–1852) was a mathematician'.
    match = _SUBJECT.match(re.sub(r"\s*\([^()]*\)", "", sentences[0]))
    if not match or f"{match[1]} ".startswith(_NOT_A_SUBJECT):
        return None
    # Of two names the first: 'Salt or table salt is a mineral'.
    name = _HONOURS.sub("", match[1].partition(" or ")[0])
    subject, verb = _inside_sentence(name, article), match[2]
    kinds: dict[Kind, tuple[str, str]] = {
        "definition": (f"What {verb} {subject}?", f"We need to say what {subject} {verb}: "),
        "explanation": (f"Explain {subject} in one sentence.", f"We need to explain {subject}: "),
        "fact": (f"State one fact about {subject}.", f"We need one fact about {subject}: "),
    }
    if article.topic == "People":
        present_verb = "is" if verb in ("is", "was") else "are"  # also for people who have died
        kinds = {
            "person": (f"Who {verb} {subject}?", f"We need to say who {subject} {verb}: "),
            "fact": (
                f"What {present_verb} {subject} known for?",
                f"We need to say what {subject} {present_verb} known for: ",
            ),
        }
    elif article.topic == "Geography":
        kinds = {"place": (f"Where {verb} {subject}?", f"We need to say where {subject} {verb}: "), **kinds}
    kind, (query, opening) = list(kinds.items())[number % len(kinds)]
    record = web_record(article)
    assert record.id is not None
    return Prompt(f"{record.id}#{kind}", query, kind, _passage(sentences), opening, record.url, license="CC BY-SA 4.0")


def _passage(sentences: list[str]) -> str:
    """The first sentences, in at most `PASSAGE_CHARACTERS` characters; at least one."""
    passage = sentences[0]
    for sentence in sentences[1:]:
        if len(passage) + 1 + len(sentence) > PASSAGE_CHARACTERS:
            break
        passage = f"{passage} {sentence}"
    return passage


def _inside_sentence(subject: str, article: Article) -> str:
    """The subject as it is written inside a sentence: 'the durian', 'salt', but 'Harare'."""
    first_word, _, remainder = subject.partition(" ")
    if first_word in ("A", "An", "The"):
        return f"{first_word.lower()} {remainder}"
    # Lower case if the article itself writes it so further on.
    lowered = subject[0].lower() + subject[1:]
    return lowered if re.search(rf"\b{re.escape(lowered)}\b", article.extract[len(subject) :]) else subject
