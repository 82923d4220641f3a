"""Prompts from the vital articles (offline): a question that an article's first sentence answers.

The beginning of the article goes to the teacher as the passage to answer from, for the embedded teacher knows little by
heart. The student gets the question alone.
"""

import re
from collections.abc import Iterator

from data.prompts import Kind, Prompt
from data.wikipedia import Article, articles, web_record

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
