"""Where the prompts of distillation come from: rows of open instruction sets, of JSON lines, or the vital articles.

A set's rows keep their places: `read(set, seed, skip)` gives the same rows from the `skip`-th on every time, as a
`Prompt` or as the reason why a row has none, so that a resume needs only a number.
"""

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from common.errors import ConfigError, Retryable
from configs.distill import PromptSetConfig
from data.records import Rejected
from data.sources.hub import COMMIT
from data.sources.local_files import matching_files, read_json_values
from data.sources.wikipedia import Article, articles, web_record

LONGEST_QUERY = 20_000  # characters; a longer "prompt" is a file that went astray
LOOKED_AT = 1000  # rows: a set whose first ones hold no prompt at all is not what its section says
QUERY_COLUMNS = ("query", "prompt", "instruction", "question", "messages", "conversations", "conversation")
Kind = Literal["definition", "explanation", "fact", "person", "place", "instruction"]
_USERS = ("user", "human", "prompter")


@dataclass(frozen=True)
class Prompt:
    """A question for the teacher. `opening`: how its reasoning begins, which keeps a small teacher to the question;
    `reference`: the known answer, which only probes see; `set`: the prompt set's name."""

    id: str
    query: str
    kind: Kind
    passage: str | None = None
    opening: str | None = None
    url: str | None = None
    license: str | None = None
    reference: str | None = None
    set: str = ""


def read(source: PromptSetConfig, seed: int, skip: int = 0) -> Iterator[Prompt | str]:
    """Rows from the `skip`-th on: a prompt, or why there is none ("no_query", "too_long", "not_json", …).

    Raises `ConfigError` for a set that cannot be read or has none of the columns, `Retryable` if the Hub is silent.
    """
    if source.source == "wikipedia":
        pass

        for prompt in itertools.islice(article_prompts(seed), skip, None):
            yield replace(prompt, set=source.name)
        return
    check(source)
    rows = _files(source) if source.source == "jsonl" else _hub(source)
    fields: set[str] = set()
    found = False
    for number, (place, row) in enumerate(rows):
        if isinstance(row, Mapping):
            fields |= set(map(str, row))
            if number == 0:
                _check_columns(source, row)
        prompt = _prompt(source, row, place)
        found = found or isinstance(prompt, Prompt)
        if not found and number + 1 == LOOKED_AT:
            break
        if number >= skip:
            yield prompt
    if not found:
        raise ConfigError(
            f"prompt set {source.name!r}: no prompt in its rows; form {source.form!r} looks for {_wanted(source)}; "
            f"the rows have {', '.join(sorted(fields)) or 'no columns'}"
        )


def check(source: PromptSetConfig) -> None:
    """See what can be seen of a set without asking for it. Raises `ConfigError`."""
    what = f"prompt set {source.name!r}"
    if source.source == "jsonl":
        if not source.path:
            raise ConfigError(f"{what}: source 'jsonl' needs the `path` of a file, or a glob")
        matching_files(source.path)
    if source.source == "hub":
        if not source.path:
            raise ConfigError(f"{what}: `path` is not set; name the dataset of the Hub to draw from, as owner/name")
        if not COMMIT.fullmatch(source.revision):
            raise ConfigError(f"{what}: `revision` {source.revision!r} is no full commit hash of {source.path}")


def _prompt(source: PromptSetConfig, row: Any, place: str) -> Prompt | str:
    if isinstance(row, Rejected):
        return row.reason
    if not isinstance(row, Mapping):
        return "not_an_object"
    query = _query(source, row)
    if query is None or not query.strip():
        return "no_query"
    query = query.strip()
    if len(query) > LONGEST_QUERY:
        return "too_long"
    if not query.isascii() and any("\ud800" <= c <= "\udfff" for c in query):
        return "invalid_utf8"
    digest = hashlib.sha256(query.encode("utf-8")).hexdigest()[:12]
    return Prompt(
        id=f"{source.name}/{_text(row, source.columns.get('id', 'id')) or place}-{digest}",
        query=query,
        kind="instruction",
        passage=_text(row, source.columns.get("passage", "passage")),
        license=source.license or None,
        reference=_text(row, source.columns["reference"]) if "reference" in source.columns else None,
        set=source.name,
    )


def _query(source: PromptSetConfig, row: Mapping[str, Any]) -> str | None:
    """A row's question: a text, or the first thing a user says in a conversation. None for a row without one."""
    if source.form == "instruction":
        parts = [_text(row, "instruction"), _text(row, "input")]
        return "\n\n".join(part for part in parts if part) if parts[0] else None
    if source.form == "columns":
        names: Iterable[str] = (source.columns["query"],)
    else:
        names = QUERY_COLUMNS[-3:] if source.form == "messages" else QUERY_COLUMNS
    value = next((row[name] for name in names if row.get(name)), None)
    if isinstance(value, list):
        said = [turn for turn in value if isinstance(turn, Mapping) and turn.get("role", turn.get("from")) in _USERS]
        value = said[0].get("content", said[0].get("value")) if said else None
    return value if isinstance(value, str) else None


def _text(row: Mapping[str, Any], name: str) -> str | None:
    value = row.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    return value.strip() or None if isinstance(value, str) else None


def _check_columns(source: PromptSetConfig, row: Mapping[str, Any]) -> None:
    """Refuse a set whose first row lacks a column that its section names."""
    named = {"columns": list(source.columns.values()), "instruction": ["instruction"]}.get(source.form, [])
    if missing := [name for name in named if name not in row]:
        raise ConfigError(
            f"prompt set {source.name!r}: no column {', '.join(missing)} in {source.path}; there are {', '.join(row)}"
        )


def _wanted(source: PromptSetConfig) -> str:
    if source.form == "columns":
        return source.columns["query"]
    return {"instruction": "instruction", "messages": ", ".join(QUERY_COLUMNS[-3:])}.get(
        source.form, ", ".join(QUERY_COLUMNS)
    )


def _files(source: PromptSetConfig) -> Iterator[tuple[str, Any]]:
    for path in matching_files(source.path):
        for number, row in enumerate(read_json_values(path)):
            yield f"{path.name}/{number}", row


def _hub(source: PromptSetConfig) -> Iterator[tuple[str, Any]]:
    import datasets
    import httpx2
    from huggingface_hub import errors

    where = f"prompt set {source.name!r}: {source.path} at {source.revision[:12]}"
    try:
        rows = datasets.load_dataset(
            source.path, name=source.subset or None, split=source.split, revision=source.revision, streaming=True
        )
        for number, row in enumerate(rows):
            yield str(number), row
    except (httpx2.HTTPError, ConnectionError, TimeoutError) as error:
        raise Retryable(f"{where}: the Hub did not answer ({type(error).__name__}: {error})") from None
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", 0)
        kind = Retryable if status == 429 or status >= 500 else ConfigError
        raise kind(f"{where}: not to be had ({str(error).splitlines()[0]})") from None
    except (ValueError, FileNotFoundError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{where}: not to be had ({str(error).splitlines()[0]})") from None


PASSAGE_CHARACTERS = 240
BENCHMARKED = 1000  # the offline benchmarks ask about the first articles: those are turned to last

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_SUBJECT = re.compile(r"^([^,;:]{2,60}?)\s+(is|are|was|were)\s")
_HONOURS = re.compile(r"(?: (?![IVXL]+\b)[A-Za-z]*[A-Z]{3,}\w*)+$")  # 'Friedrich Wöhler FRS HonFRSE'
_NOT_A_SUBJECT = ("In ", "On ", "At ", "For ", "As ", "This ", "There ", "It ")


def question(article: Article, turn: int) -> Prompt | None:
    """The `turn`-th kind of question about an article; None if its first sentence does not say what it is."""
    sentences = _SENTENCE_END.split(" ".join(article.extract.split()))
    found = _SUBJECT.match(re.sub(r"\s*\([^()]*\)", "", sentences[0]))
    if not found or f"{found[1]} ".startswith(_NOT_A_SUBJECT):
        return None
    named = _HONOURS.sub("", found[1].partition(" or ")[0])
    subject, verb = _in_a_sentence(named, article), found[2]
    kinds: dict[Kind, tuple[str, str]] = {
        "definition": (f"What {verb} {subject}?", f"We need to say what {subject} {verb}: "),
        "explanation": (f"Explain {subject} in one sentence.", f"We need to explain {subject}: "),
        "fact": (f"State one fact about {subject}.", f"We need one fact about {subject}: "),
    }
    if article.topic == "People":
        known = "is" if verb in ("is", "was") else "are"
        kinds = {
            "person": (f"Who {verb} {subject}?", f"We need to say who {subject} {verb}: "),
            "fact": (f"What {known} {subject} known for?", f"We need to say what {subject} {known} known for: "),
        }
    elif article.topic == "Geography":
        kinds = {"place": (f"Where {verb} {subject}?", f"We need to say where {subject} {verb}: "), **kinds}
    kind, (query, opening) = list(kinds.items())[turn % len(kinds)]
    record = web_record(article)
    assert record.id is not None
    return Prompt(f"{record.id}#{kind}", query, kind, _passage(sentences), opening, record.url, license="CC BY-SA 4.0")


def article_prompts(seed: int) -> Iterator[Prompt]:
    """One question an article, in the order that `seed` draws; then a second one about each, and a third."""
    drawn = articles(seed)  # the order in which they are ingested, so the student has read what it is asked about
    drawn = drawn[BENCHMARKED:] + drawn[:BENCHMARKED]
    for turn in range(3):
        for number, article in enumerate(drawn):
            if (prompt := question(article, number + turn)) is not None:
                yield prompt


def _passage(sentences: list[str]) -> str:
    """Whole sentences from the beginning, in about 240 characters; at least one."""
    passage = sentences[0]
    for sentence in sentences[1:]:
        if len(passage) + 1 + len(sentence) > PASSAGE_CHARACTERS:
            break
        passage = f"{passage} {sentence}"
    return passage


def _in_a_sentence(subject: str, article: Article) -> str:
    """The subject as it is written amid a sentence: 'the durian', 'salt', but 'Harare'."""
    first, _, rest = subject.partition(" ")
    if first in ("A", "An", "The"):
        return f"{first.lower()} {rest}"
    lowered = subject[0].lower() + subject[1:]
    return lowered if re.search(rf"\b{re.escape(lowered)}\b", article.extract[len(subject) :]) else subject
