"""Where the prompts of distillation come from: the vital articles (offline), JSON lines, or a dataset of the Hub.

From an article a question is made that its first sentence answers; the beginning of the article goes to the teacher as
the passage to answer from, for the embedded teacher knows little by heart. The student gets the question alone.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from configs.schema import DistillConfig
from configs.section import ConfigError, Retryable
from data.files import matching
from data.wikipedia import Article, articles, web_record

PASSAGE_CHARACTERS = 240
BENCHMARKED = 1000  # the offline benchmarks ask about the first articles: those are turned to last
LONGEST_QUERY = 20_000  # characters; a longer "prompt" is a file that went astray
QUERY_COLUMNS = ("query", "prompt", "instruction", "question", "messages", "conversations")
Kind = Literal["definition", "explanation", "fact", "person", "place", "instruction"]

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_SUBJECT = re.compile(r"^([^,;:]{2,60}?)\s+(is|are|was|were)\s")
_HONOURS = re.compile(r"(?: (?![IVXL]+\b)[A-Za-z]*[A-Z]{3,}\w*)+$")  # 'Friedrich Wöhler FRS HonFRSE'
_NOT_A_SUBJECT = ("In ", "On ", "At ", "For ", "As ", "This ", "There ", "It ")


@dataclass(frozen=True)
class Prompt:
    """A question for the teacher. `opening`: how its reasoning begins, which keeps a small teacher to the question."""

    id: str
    query: str
    kind: Kind
    passage: str | None = None
    opening: str | None = None
    url: str | None = None
    license: str | None = None


def prompts(config: DistillConfig, seed: int) -> list[Prompt]:
    """The first `config.prompts` distinct prompts of the source; the same ones for the same seed.

    Raises `ConfigError` for a source that cannot be read or holds fewer, `Retryable` if the Hub does not answer.
    """
    if config.prompt_source == "wikipedia":
        source: Iterable[Prompt] = _from_articles(seed)
    elif config.prompt_source == "jsonl":
        source = _from_jsonl(config.prompt_path)
    else:
        source = _from_hub(config)
    seen: set[str] = set()
    fresh = (p for p in source if not (p.query.casefold() in seen or seen.add(p.query.casefold())))
    found = list(itertools.islice(fresh, config.prompts))
    if len(found) < config.prompts:
        where = config.prompt_path or config.prompt_source
        raise ConfigError(f"distill.prompts asks for {config.prompts}, but {where} has {len(found)} distinct prompts")
    return found


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


def _from_articles(seed: int) -> Iterator[Prompt]:
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


def _from_jsonl(pattern: str) -> Iterator[Prompt]:
    if not pattern:
        raise ConfigError("distill.prompt_path: prompt_source 'jsonl' needs the path of a file, or a glob")
    for path in matching(pattern):
        for number, row in enumerate(_rows(path)):
            if (prompt := _from_row(row, f"{path.name}/{number}")) is not None:
                yield prompt


def _rows(path: Path) -> Iterator[Any]:
    number = 0
    try:
        with path.open("rb") as file:
            for line in file:
                number += 1
                if line.strip():
                    yield json.loads(line)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: line {number} is not JSON ({error}); a line is an object with a `query`") from None


def _from_hub(config: DistillConfig) -> Iterator[Prompt]:
    if not (config.prompt_path and config.prompt_revision):
        raise ConfigError(
            "distill: prompt_source 'hub' needs `prompt_path` (a dataset's id) and `prompt_revision` (a commit hash)"
        )
    import datasets
    import httpx2
    from huggingface_hub import errors

    where = f"distill.prompt_path: {config.prompt_path} at {config.prompt_revision[:12]}"
    try:
        rows = datasets.load_dataset(config.prompt_path, split="train", revision=config.prompt_revision, streaming=True)
        for number, row in enumerate(rows):
            if (prompt := _from_row(row, f"{config.prompt_path}/{number}")) is not None:
                yield prompt
    except (httpx2.HTTPError, ConnectionError, TimeoutError) as error:
        raise Retryable(f"{where}: the Hub did not answer ({type(error).__name__}: {error})") from None
    except (errors.HfHubHTTPError, ValueError, FileNotFoundError) as error:
        raise ConfigError(f"{where}: not to be had ({str(error).splitlines()[0]})") from None


def _from_row(row: Any, place: str) -> Prompt | None:
    """A row's question: a text, or the first thing a user says in a conversation. None for a row without one."""
    if not isinstance(row, Mapping):
        return None
    value = next((row[name] for name in QUERY_COLUMNS if row.get(name)), None)
    if isinstance(value, list):
        said = [turn for turn in value if isinstance(turn, Mapping) and turn.get("role", turn.get("from")) in _USERS]
        value = said[0].get("content", said[0].get("value")) if said else None
    if not isinstance(value, str) or not value.strip() or len(value) > LONGEST_QUERY:
        return None
    passage = row.get("passage")
    query = value.strip()
    digest = hashlib.sha256(query.encode("utf-8", "replace")).hexdigest()[:12]
    return Prompt(
        str(row.get("id") or f"{place}-{digest}"), query, "instruction", passage if isinstance(passage, str) else None
    )


_USERS = ("user", "human")
