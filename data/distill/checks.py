"""Check a teacher's document; the first check that fails gives the reason for its rejection.

The checks are cheap and prefer to reject: prompts are plenty, and a small student learns a mistake as readily as a
fact. If the teacher was given a passage, a groundedness check finds invented names and numbers, but no other invention.
Of 64 replies of the embedded teacher about one in seven is rejected, and about four in five of the others are right.
"""

import multiprocessing
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from nautile.common.patterns import FilteredPattern, ignoring_case
from nautile.common.processes import die_with_parent
from nautile.configs.distill import DistillConfig
from nautile.data.chat_template import parse_text
from nautile.data.distill.parse_reply import ParsedDocument, read_reply
from nautile.data.distill.prompts import Prompt
from nautile.data.distill.teacher_prompt import LONGEST_UNROLLED, Template
from nautile.data.endpoints.outgoing import hostile_signs
from nautile.data.retrieval.exemplar_index import Neighbour
from nautile.data.screening.language import detect_language
from nautile.data.screening.words import lower_words

WORTH_PROCESSES = 4096  # prompts; two processes take 2 s of a core to start
MOST_PROCESSES = 4


@dataclass(frozen=True)
class ReplyVerdict:
    """A reply's document, why it is rejected (None: accepted), and signs of prompt injection (`injection_signs`)."""

    document: ParsedDocument | None
    reason: str | None
    signs: list[str]


def judge_reply(
    text: str, finish: str, prompt: Prompt, neighbours: Sequence[Neighbour], template: Template, config: DistillConfig
) -> ReplyVerdict:
    """Parse and check a reply. `finish`: why the endpoint ended it, see `ChatReply`."""
    result = read_reply(text)
    document = result if isinstance(result, ParsedDocument) else None
    reason: str | None
    if finish in ("refusal", "content_filter"):
        reason = finish
    elif finish == "length" and not (parse_text(text).answer or "").strip():
        reason = "cut_while_thinking"  # thoughts count in the token limit, and have left nothing of it
    elif isinstance(result, str) and finish != "length":
        reason = result
    else:
        reason = reject_reason(document, finish, prompt, neighbours, template, config)
    return ReplyVerdict(document, reason, injection_signs(prompt, neighbours, text))


def injection_signs(prompt: Prompt, neighbours: Sequence[Neighbour], reply: str) -> list[str]:
    """Signs of prompt injection in the request or the reply, each as "sign/where"."""
    records = [neighbour.record for neighbour in neighbours]
    texts = {
        "query": prompt.query,
        "passage": prompt.passage or "",
        "exemplars": "\n".join(f"{r.query}\n{r.synthetic_reasoning}\n{r.synthetic_answer}" for r in records),
        "reply": reply,
    }
    return [f"{sign}/{where}" for where, text in texts.items() for sign in hostile_signs(text)]


def verdict_processes() -> ProcessPoolExecutor:
    """Processes for `judge_reply`, which end with this one.

    A check takes 1 to 2 ms of a core, half of it language identification, and a request another 1.5 to 2 ms, so one
    process that did both would handle only some 300 replies a second.
    """
    return ProcessPoolExecutor(
        min(MOST_PROCESSES, os.cpu_count() or 1),
        # Not "fork", which would copy the locks of the pool's event loop, a thread of this process, as they are.
        mp_context=multiprocessing.get_context("spawn"),
        initializer=die_with_parent,
        initargs=(os.getpid(),),
    )


RejectReason = Literal[
    "unparsable",
    "ambiguous",
    "cut_in_reply",  # by the token limit
    "truncated",  # by its own end: inside its object, its thoughts or a sentence
    "empty",
    "too_short",
    "too_long",
    "refusal",
    "leaked_template",
    "repeated",
    "ungrounded",
    "wrong_language",
    "copied_exemplar",
    "contaminated",
    "duplicate",
    "near_duplicate",
]
MIN_REASONING_WORDS = 2
COPY_NGRAM = 8  # words
OVERLAP_LIMIT = 0.5  # share of a document's n-grams that may also be in its exemplars; more counts as copying
LOOP_NGRAM = 4  # words
# Refusals are searched for at the beginning of a reply. Later, the same words are part of a text: a letter, a story, an
# error message.
REFUSAL_HEAD = 160  # characters
SHORT_REFUSAL = 300  # characters; a longer answer that begins with "I cannot provide …", without apology, is none
# "I can't …", "I'm unable to …", "I must decline to …", followed by what is refused.
_UNABLE = r"\bi(?: can(?:no|['’])t|(?: am|['’]m) (?:unable|not able) to| won['’]t| will not| must decline to) "
_REFUSED = r"(?:help|assist|answer|provide|fulfill?|comply|complete|create|generate|write|share|discuss|continue)\b"
# Refuses the request as such, whatever it was: "I cannot help you with that request.", "I won't write this." But "I
# can't help it." is ordinary English, hence the look-behind.
_REFUSES_THIS = re.compile(
    rf"{_UNABLE}(?:(?:help|assist|comply)(?: you)? with|{_REFUSED}(?<!help)) (?:that|this|it|your|the)"
    r"(?: request| question| task)?[.,;]"
    rf"|\bi (?:do not|don['’]t) have enough information to (?:answer|help|say)\b",
    re.IGNORECASE,
)
# "Sorry, but I can't provide …", "As an AI language model, I don't have …"
_APOLOGISES = re.compile(
    rf"\b(?:sorry,?(?: but)?|apologi[sz]e,?(?: but)?|unfortunately,?|as an ai\b[^.,]{{0,40}},) {_UNABLE}{_REFUSED}"
    r"|\bas an ai\b[^.,]{0,40}, i (?:do not|don['’]t) have\b",
    re.IGNORECASE,
)
# Counts only at the very beginning, and not in "I cannot help but admire …" or "I can't help laughing".
_IS_UNABLE = re.compile(rf"\A\W*{_UNABLE}{_REFUSED}(?! (?:but|\w+ing)\b)", re.IGNORECASE)
# A query for a text of some form, such as "Write a letter that declines an invitation": its answer may well begin with
# a refusal.
_ASKS_FOR_A_VOICE = re.compile(
    r"\b(?:apolog|sorry|declin|refus|reject|turn(?:ing)? down|say(?:ing)? no|letter|e-?mail|messages?\b|text\b|note\b"
    r"|reply|respon[ds]|dialog|conversation|chat|story|scene|script|speech|poem|lyrics|role)",
    re.IGNORECASE,
)
# Text of the teacher's prompt that must not occur in a document: chat markers, whole lines of the prompt, JSON keys of
# the reply.
_LEAKED_MARKER = FilteredPattern(
    re.compile(
        r"<\|[a-z_]+\|?>|<[a-z_]+\|>|</?(?:seed:)?think>|</?document \d+>"
        r"|=== [a-z2-7]{8} (?:document|passage|query|end)",
        re.IGNORECASE,
    ),
    (b"<|", b"|>", b"think>", b"<document ", b"</document ", b"=== "),
)
_LEAKED_PROMPT = FilteredPattern(
    re.compile(
        r"^\W*(?:documents of the collection(?:, and a query\b| ?:)|exercises of the same kind ?:)"
        r"|\bwrite the document for this query\b|\bwhich the reader will not see\b|\bbase it on this passage\b"
        r"|\bthe collection that yours will join\b|\bkeep to their form, tone and length\b"
        r"|\btake nothing of their content\b|\blet the answer stand by itself\b|\banswer from the passage, as json\b",
        re.IGNORECASE | re.MULTILINE,
    ),
    (
        *(b"of the collection", b"the same kind", b"document for this query", b"the reader will not"),
        *(b"on this passage", b"yours will join", b"keep to their form", b"of their content", b"stand by itself"),
        b"from the passage",
    ),
)
_LEAKED_REPLY = FilteredPattern(
    re.compile(
        r"\"reasoning\"\s*:|\bjson object with the strings\b|\bjson\b[^.\n]{0,30}\breasoning\b[^.\n]{0,20}\banswer\b"
        r"|\b(?:i|we)(?: must| should| need to| have to| will|['’]ll) (?:now )?"
        r"(?:reply|respond|answer|output|return|produce)\b[^.\n]{0,40}\bjson\b",
        re.IGNORECASE,
    ),
    (b"json", b'"reasoning"'),
)
_LEAKED_PASSAGE = FilteredPattern(
    re.compile(
        r"\b(?:the|this|that|your|(?:the )?(?:given|provided|above)) passage\b"
        r"(?! (?:of|from|through|between|to|into)\b)|^\W*passage ?:|\bthe (?:given|provided) (?:text|context)\b",
        re.IGNORECASE | re.MULTILINE,
    ),
    (b"passage", b"given text", b"given context", b"provided text", b"provided context"),
)
# A full stop that the grammar forced. Applied to the last four characters, which may include a line break.
_CUT_SHORT = re.compile(r"(?:[\s,;:(/\-–]|\.\.)\.$|…$")
_ASKS_FOR_LANGUAGE = re.compile(
    r"\b(?:transl|tradu|übersetz|languages?\b|in (?:arabic|chinese|dutch|english|french|german|greek|hindi|italian"
    r"|japanese|korean|latin|polish|portuguese|russian|spanish|swedish|turkish)\b)",
    re.IGNORECASE,
)
_WORD = re.compile(r"\w+")
# Words that may begin a sentence without occurring in the passage; any other capitalised word counts as a name.
_STARTERS = frozenset(
    _WORD.findall(
        "a an and as at both by each for from he her his however if in it its many most of on one she since so some "
        "such that the their there these they this those to we when where which while with"
    )
)
_NAME_OR_NUMBER = re.compile(r"\b[A-Z][\w'’-]*|\d[\d.,]*")


def reject_reason(
    document: ParsedDocument | None,
    finish: str,
    prompt: Prompt,
    neighbours: Sequence[Neighbour],
    template: Template,
    config: DistillConfig,
) -> RejectReason | None:
    """The reason to reject a document, None if it passes. `finish`: "length" if the reply reached its token limit."""
    # The order matters for statistics: a document is counted under the first reason, and cheap checks come first.
    if finish == "length":
        return "cut_in_reply"
    if document is None:
        return "unparsable"
    reasoning, answer = document.reasoning, document.answer
    if not answer or not reasoning:
        return "empty"
    text = f"{reasoning}\n{answer}"
    # Only with a passage: then something is known that the question does not say. Without one, an answer in the
    # question's own words may be right ("Is salt or sugar sweet?").
    repeats_question = prompt.passage is not None and has_nothing_new(answer, prompt.query)
    if sum(1 for _ in islice(_WORD.finditer(reasoning), MIN_REASONING_WORDS)) < MIN_REASONING_WORDS or repeats_question:
        return "too_short"
    if len(reasoning) > 2 * template.reasoning or len(answer) > 2 * template.answer:
        return "too_long"
    if is_cut_short(reasoning, template.reasoning) or is_cut_short(answer, template.answer):
        return "truncated"
    if is_refusal(document, prompt):
        return "refusal"
    if leaks_template(text, prompt):
        return "leaked_template"
    if is_repetitive(reasoning) or is_repetitive(answer):
        return "repeated"
    if prompt.passage is not None and not is_grounded(document, prompt):
        return "ungrounded"
    if config.same_language and is_in_another_language(document, prompt):
        return "wrong_language"
    if copied_share(text, neighbours) > OVERLAP_LIMIT:
        return "copied_exemplar"
    return None


def is_in_another_language(document: ParsedDocument, prompt: Prompt) -> bool:
    """Whether the reasoning or the answer is reliably detected as another language than the query's.

    The answer is not checked if the query mentions a language or a translation.
    """
    expected = detect_language(prompt.query) or detect_language(prompt.passage or "")
    if expected is None:
        return False
    parts = [document.reasoning]
    if not _ASKS_FOR_LANGUAGE.search(prompt.query):
        parts.append(document.answer)
    return any((detect_language(part) or expected) != expected for part in parts)


def is_cut_short(text: str, limit: int) -> bool:
    """Whether the text was ended by the limit on its length, not by the teacher."""
    # A bounded repetition of the grammar ends a string at its limit, wherever the sentence is.
    return bool(_CUT_SHORT.search(text[-4:])) or (limit <= LONGEST_UNROLLED and len(text) >= limit - 1)


def has_nothing_new(answer: str, query: str) -> bool:
    """Whether the answer only repeats the question: it has no new number, and no new word of four letters or more."""
    query_words = {word.lower() for word in _WORD.findall(query)}
    answer_words = (word for word in _WORD.findall(answer) if len(word) > 3 or word.isdigit())
    return not any(word.lower() not in query_words for word in answer_words)


def is_refusal(document: ParsedDocument, prompt: Prompt) -> bool:
    """Whether the reasoning or the answer begins with a refusal that is not part of a requested text."""
    heads = [document.reasoning[:REFUSAL_HEAD], document.answer[:REFUSAL_HEAD]]
    if any(_REFUSES_THIS.search(head) for head in heads):
        return True
    if _ASKS_FOR_A_VOICE.search(prompt.query):
        return False
    is_short = len(document.answer) < SHORT_REFUSAL and ", but " not in document.answer
    return any(_APOLOGISES.search(head) or (is_short and _IS_UNABLE.search(head)) for head in heads)


def leaks_template(text: str, prompt: Prompt) -> bool:
    """Whether the document contains text of the teacher's prompt that does not come from the query or the passage."""
    query, passage = prompt.query.lower(), (prompt.passage or "").lower()
    lowered = ignoring_case(text)
    if any(leak.group().lower() not in query for leak in _LEAKED_MARKER.finditer(text, lowered)):
        return True
    if _LEAKED_PROMPT.search(text, lowered):
        return True
    if "json" not in query and _LEAKED_REPLY.search(text, lowered):
        return True
    return (
        bool(passage)
        and "passage" not in query
        and any(leak.group().lower() not in passage for leak in _LEAKED_PASSAGE.finditer(text, lowered))
    )


def is_repetitive(text: str) -> bool:
    """Whether a 4-gram of words occurs three times (more in long texts), or few of the words are distinct."""
    words = lower_words(text)
    counts, limit = Counter(words), max(3, len(words) // 100)
    # Short texts have few words anyway, and in long ones the share of distinct words falls by itself.
    if 24 <= len(words) <= 400 and len(counts) / len(words) < 0.2:
        return True
    # A frequent n-gram consists of frequent words, so only those are looked at.
    frequent_words = {word for word, count in counts.items() if count >= limit}
    return max(Counter(_grams_of(words, frequent_words, LOOP_NGRAM)).values(), default=0) >= limit


def is_grounded(document: ParsedDocument, prompt: Prompt) -> bool:
    """Whether every name and number in the document occurs in the passage or the question."""
    source_words = set(_WORD.findall(f"{prompt.passage} {prompt.query}".lower()))
    text = f"{document.reasoning} {document.answer}"
    starters = set()
    for name in set(_NAME_OR_NUMBER.findall(text)):
        words = set(_WORD.findall(name.lower()))
        if not words <= source_words:
            if not words <= source_words | _STARTERS:
                return False
            starters.add(name)
    # A capitalised word of `_STARTERS` is a name unless it begins its sentence, so it must do so everywhere.
    return not starters or all(
        match.start() == 0 or match.group() not in starters
        for sentence in re.split(r"(?<=[.:!?])\s+", text)
        for match in _NAME_OR_NUMBER.finditer(sentence)
    )


def copied_share(text: str, neighbours: Sequence[Neighbour]) -> float:
    """Share of the text's 8-grams of words that also occur in an exemplar; 0 for a text of fewer words."""
    words = lower_words(text)
    vocabulary = set(words)
    exemplar_grams = {
        gram
        for neighbour in neighbours
        for part in (neighbour.record.query, neighbour.record.synthetic_reasoning, neighbour.record.synthetic_answer)
        for gram in _grams_of(lower_words(part), vocabulary, COPY_NGRAM)
    }
    if not exemplar_grams:
        return 0.0
    grams = set(_grams_of(words, vocabulary, COPY_NGRAM))
    return len(grams & exemplar_grams) / len(grams) if grams else 0.0


def _grams_of(words: Sequence[bytes], vocabulary: Set[bytes], length: int) -> Iterator[tuple[bytes, ...]]:
    """The n-grams, in order, whose words are all in `vocabulary`."""
    # One byte per word, 1 if it is in the vocabulary: a regular expression finds the runs of at least `length`.
    is_in_vocabulary = bytes(map(vocabulary.__contains__, words))
    for run in re.finditer(rb"\x01{%d,}" % length, is_in_vocabulary):
        part = words[run.start() : run.end()]
        yield from zip(*(part[i:] for i in range(length)), strict=False)
