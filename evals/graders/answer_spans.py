"""Find the spans that state an answer: `\\boxed{…}`, `#### …`, `the answer is …`. All answer parsers prefer them.

A span ends with its sentence, or before a reason or a rejected alternative (`because`, `not`, `rather than`), so that
"the answer is 12, not 13" states only 12, while "the answer is 12 or 13" has two candidates.
"""

import re

# "The answer to the question is: 12", "Answer: 12", "the correct option would be B"; not "the answer is not 12".
_ANSWER_IS = re.compile(
    r"\b(?:answer|correct\s+(?:option|choice|letter))\b"
    r"(?:[^\S\n]+(?:to|for)\b[^.\n:=]{0,80}?)?"  # "the answer to the question is"
    r"\s*(?:\b(?:is|was|would\s+be|must\s+be|should\s+be|will\s+be|equals"
    r"|(?:could|may|might)(?:\s+also)?\s+be)\b(?![^\S\n]*not\b)[^\S\n]*:?|[=:：])"
    r"[\s:]*",
    re.IGNORECASE,
)
# GSM8K's mark. A heading of the same level ("#### Step 1") is none: see `_is_heading`.
_HASHES = re.compile(r"(?<!#)####(?!#)[^\S\n]*")
_HEADING = re.compile(
    r"\W*(?:(?:step|part|case|section|problem|question|example|exercise|method|approach|phase|stage|task|lemma|claim"
    r"|note|figure|table|chapter|round|attempt|solution|verification|check)\b"
    r"|[0-9]{1,2}[.)]\s+[^\W\d_]|(?:II|III|IV|VI{0,3}|IX)[.)]\s)",
    re.IGNORECASE,
)
# What the mark may stand before when more text follows: a number, a formula, an equation, or a word alone.
_SHORT = re.compile(r"\W*(?:[0-9]|\\|[^\W\d_]+\W*$)|[^=]*=|.*\\boxed")
_ANYTHING = re.compile(r"\S")
# A heading on a line of its own that announces the answer: "**Final Answer**", "### Answer:".
_TITLE = re.compile(r"(?:^|\n)(?:[#*]|[^\S\n])*+(?:the\s)?(?:final\s)?answer(?:[*:：]|[^\S\n])*+\n\s*+", re.IGNORECASE)
# `<answer>` tags, and "the answer is" in Chinese, Japanese and Korean.
_TAG = re.compile(r"<answer>\s*", re.IGNORECASE)
_TAG_END = re.compile(r"</?answer>|$", re.IGNORECASE)
_ANSWER_IS_CJK = re.compile(r"(?:答案|正解|答え|정답)\s*(?:应该|應該)?(?:是|为|為|は|은|는|:|：)+\s*[:：]?\s*")
# Markdown's bold, which stands anywhere: "The **answer** is **12**"; but 2**3 is a power.
_BOLD = re.compile(r"(?<![A-Za-z0-9)\]}])\*\*|\*\*(?![A-Za-z0-9(\\-])")
# A full stop inside "3.5" ends nothing.
# What a denial takes back is removed with it, and nothing else: the number, letter, word, formula or box behind it.
_BOX = r"\\(?:boxed|fbox)\s*\{(?:[^{}]|\{(?:[^{}]|\{[^{}]{0,50}\}){0,50}\}){0,200}\}"
_OBJECT = (
    rf"[*_\"'“(`\s]*(?:{_BOX}|\$[^$\n]{{1,200}}\$|\\\([^\n]{{1,200}}?\\\)"
    r"|(?:option\s|choice\s)?[^\s,;$\\]{1,80})"
)
_OBJECTS = rf":?{_OBJECT}(?:\s+(?:or|nor){_OBJECT}){{0,3}}"
_SUBJECT = r"(?:the\s+)?(?:(?:correct|right|final)\s+)?(?:answer|option|choice|result)"
_BE = r"(?:is|was|would\s+be|should\s+be|could\s+be)"
# What is struck out; and the mark of a word that denies: "The answer is *not* 5".
_STRUCK = re.compile(
    r"~~[^~\n]{1,200}~~|<(s|del|strike)>[^<\n]{0,200}</\1>|\\(?:[bx]?cancel|sout)\s*\{[^{}]{0,200}\}", re.IGNORECASE
)
_STRESSED = re.compile(r"(?<!\w)[*_]{1,2}(not|never|no|n['’]t)[*_]{1,2}(?!\w)", re.IGNORECASE)
_DENIALS = (
    # "I don't think the answer is C", "It is not true that the answer is 5"
    re.compile(
        r"(?:n['’]t|\bnot|\bnever)\s+(?:think|believe|agree|true|certain|say)\s+(?:that\s+)?"
        rf"(?:{_SUBJECT}|it)(?:\s+{_BE}\b|['’]s\b){_OBJECTS}",
        re.IGNORECASE,
    ),
    # "The wrong answer is C", "A common incorrect answer would be 5"
    re.compile(
        r"\b(?:wrong|incorrect|false|least\s+likely|worst)\s+(?:answer|option|choice|result)s?\s+"
        rf"(?:is|was|are|were|would\s+be)\b{_OBJECTS}",
        re.IGNORECASE,
    ),
    # "The answer is not 5", "The answer cannot be 5", "It is not \\boxed{5}"
    re.compile(
        rf"\b(?:answer|option|choice|result)\s+(?:{_BE}\s+(?:not(?:\s+equal\s+to)?|never|no\s+longer|unlikely\s+to\s+be"
        r"|anything\s+(?:but|other\s+than|except)|far\s+from|different\s+from)|(?:is|was)n['’]t"
        rf"|(?:can(?:not|\s+not|['’]t)|couldn['’]t)\s+be)\b{_OBJECTS}"
        r"|\bit\s+(?:is\s+not|isn['’]t)(?=[*_\"'“(`\s]*(?:\\(?:boxed|fbox|\()|\$))" + _OBJECTS,
        re.IGNORECASE,
    ),
    # "\\boxed{5} is wrong", "5 is not the answer"
    re.compile(
        rf"(?:{_BOX}|\$[^$\n]{{1,200}}\$|(?<![\w.,])-?[0-9]{{1,15}}(?:[.,/][0-9]{{1,15}})?%?)\$?"
        r"\s+(?:is|was)(?:\s+(?:clearly\s+)?(?:wrong|incorrect|not\s+(?:the\s+)?(?:right|correct|(?:final\s+)?answer))"
        r"|n['’]t\s+(?:the\s+)?(?:right|correct|(?:final\s+)?answer))\b",
        re.IGNORECASE,
    ),
    # a question with a colon: "Is the answer: 5?"
    re.compile(
        r"\b(?:is|was)\s+(?:the|this|that|your|my)\s+(?:(?:correct|right|final)\s+)?answer\s*[:=][^.!?\n;]{0,80}\?",
        re.IGNORECASE,
    ),
    # "I doubt that the answer is 5"
    re.compile(rf"\bdoubt\s+(?:that\s+)?(?:{_SUBJECT}|it)(?:\s+{_BE}\b|['’]s\b){_OBJECTS}", re.IGNORECASE),
)
_SENTENCE_START = re.compile(r"(?:^|(?<=[!?\n;])|(?<=\.)(?![0-9]))\s*+")
_QUESTION = re.compile(r"[^\s.!?\n;]+\s(?:[^.!?\n;]|\.(?=[0-9]))*\?")  # of several words: "C?" is an answer
# A question for an amount, or an order to compute one, to its end. Of limited length, or many that never end would take
# a time that grows with the square of theirs.
_IN_SENTENCE = r"(?:[^.!?\n;]|\.(?=[^\s.])|(?:(?<=\b[MDS][rst])|(?<=\bMrs))\.){0,400}+"
_ASKED = re.compile(
    r"\b(?:how\s+(?:many|much|far|long|old|tall|fast|often|big|large|high|heavy|wide|deep|few)"
    r"|what(?:['’]s|\s+(?:is|are|was|were|will|would|percent|percentage|fraction|number|amount)))\b"
    rf"(?!\s+(?:your?|next|else|wrong)\b){_IN_SENTENCE}\?"
    r"|\bhow\s+(?:many|much)\b[^.!?\n;:=≈0-9]{0,400}+(?:\.(?=\s)|(?=\n)|\.?\s*\Z)"
    r"|(?:^|(?<=[.!?,]\s)|(?<=\bthen\s)|(?<=\bso\s))(?:calculate|compute|evaluate|simplify|determine|find)\b"
    rf"(?P<order>{_IN_SENTENCE})(?:\.(?=\s|$)|$)",
    re.IGNORECASE | re.MULTILINE,
)
# In an order: a result behind it, "Find the total: 18", "Simplify to 18".
_STATES = re.compile(r"[:=≈]|\b(?:to|is|are|get|gives?|yields?|obtain|that)\b", re.IGNORECASE)
_WORKED_OUT = re.compile(r"[0-9)}%]\s{0,9}[=≈]")
_SENTENCE_END = re.compile(r"[.!?。！？](?=\s|$)|\n|;")
_REASON = re.compile(r"\b(?:because|since|rather\s+than|instead\s+of|not)\b", re.IGNORECASE)
_LINE_END = re.compile(r"\n")
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"[{}]")
_RUN = re.compile(r"\s{8,}")
MOST_SPANS = 32  # that end together: a sentence with more marks repeats itself


def short_runs(text: str) -> str:
    """`text` with each long run of white space as one space or line break; patterns would try it at every length."""
    return _RUN.sub(lambda match: "\n" if "\n" in match.group() else " ", text)


def without_denials(text: str) -> str:
    """`text` without the answers that it denies or strikes out: "the answer is not 5", "~~5~~"."""
    text = _STRESSED.sub(r"\1", _STRUCK.sub(" ", text))
    for pattern in _DENIALS:
        text = pattern.sub(" … ", text)
    return text


def without_questions(text: str) -> str:
    """`text` without its questions of several words: "Is it 5?" states nothing."""
    parts, end = [], 0
    for sentence in _SENTENCE_START.finditer(text):
        if sentence.start() >= end and (question := _QUESTION.match(text, sentence.end())):
            parts += [text[end : sentence.start()], " … "]
            end = question.end()
    return "".join([*parts, text[end:]])


def behind_questions(text: str) -> str:
    """What an unmarked `text` may state as its answer: what follows its last question for an amount, or order to
    compute one, since what stands before it are the facts of a problem; other questions are left out.

    If nothing follows, a text that has worked something out ("3 + 4 = 7") may state it before.
    """
    asked = [m.end() for m in _ASKED.finditer(text) if m["order"] is None or not _STATES.search(m["order"])]
    start = asked[-1] if asked else 0
    worked_out = not text[start:].strip() and _WORKED_OUT.search(text, 0, start)
    return without_questions(text if worked_out else text[start:])


def answer_spans(text: str) -> list[str]:
    """Return the spans of `text` that state an answer, in order; empty if none does.

    Of more than `MOST_SPANS` spans that end together only the first and the last are returned.
    """
    text = without_denials(without_bold(text))
    spans = [(start, end) for start, end in (*boxes_at(text), *sentences_at(text)) if text[start:end].strip()]
    return [text[start:end].strip() for start, end in sorted(spans)]


def without_bold(text: str) -> str:
    """`text` without the marks of bold type."""
    return _BOLD.sub("", text) if "**" in text else text


def sentences_at(text: str) -> list[tuple[int, int]]:
    """(start, end) of what follows the marks "the answer is", "####", "<answer>" and the like, in order."""
    spans = []
    for mark, ends in (
        (_ANSWER_IS, _SENTENCE_END), (_ANSWER_IS_CJK, _SENTENCE_END), (_HASHES, _LINE_END), (_TAG, _TAG_END),
        (_TITLE, _LINE_END),
    ):  # fmt: skip
        for starts, end in _marked_sentences(text, mark, ends):
            if mark is _HASHES and _is_heading(text, starts[-1], end):
                continue
            for start in starts:
                reason = _REASON.search(text, start, end)
                spans.append((start, reason.start() if reason else end))
    return sorted(spans)


def boxed(text: str) -> list[str]:
    r"""The contents of each `\boxed{…}` with balanced braces, in order. A box that is never closed is ignored."""
    return [text[start:end].strip() for start, end in boxes_at(text)]


def _is_heading(text: str, start: int, end: int) -> bool:
    """Whether a line after `####` is a heading: it names a step, or more than a word of it stands above other text."""
    line = text[start:end].strip()
    if _HEADING.match(line):
        return True
    return _ANYTHING.search(text, end) is not None and not _SHORT.match(line)


def _marked_sentences(text: str, mark: re.Pattern[str], ends: re.Pattern[str]) -> list[tuple[list[int], int]]:
    """(starts, end) of the spans of each sentence with a mark; a start is the end of a mark.

    A small model may repeat the mark to the end of its reply. Each span would contain all that follow it, and reading
    them would take a time that grows with the square of the length.
    """
    sentences: list[tuple[list[int], int]] = []
    for match in mark.finditer(text):
        if not sentences or match.end() > sentences[-1][1]:
            end = ends.search(text, match.end())
            sentences.append(([], end.start() if end else len(text)))
        sentences[-1][0].append(match.end())
    half = MOST_SPANS // 2
    return [
        (starts if len(starts) <= MOST_SPANS else [*starts[:half], *starts[-half:]], end) for starts, end in sentences
    ]


def boxes_at(text: str) -> list[tuple[int, int]]:
    """(start, end) of the content of each closed box, in order; of boxes in a box the innermost."""
    starts = {match.end() for match in _BOXED.finditer(text)}
    boxes, open_braces = list[tuple[int, int]](), list[int]()  # where the content of each open brace starts
    for match in _BRACE.finditer(text) if starts else ():
        if match.group() == "{":
            open_braces.append(match.end())
        elif open_braces and (start := open_braces.pop()) in starts and not (boxes and boxes[-1][0] > start):
            boxes.append((start, match.start()))
    return boxes
