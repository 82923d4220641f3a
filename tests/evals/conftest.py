"""Replies, records in the Hub's schemas, and models whose skill is known."""

import random

import pytest

from nautile.data.chat_template import ParsedReply
from nautile.evals.running.answerers import Answer
from tests.support.servers.benchmark_hub import PUBLIC, BenchmarkHub


def make_reply(answer: str | None, reasoning: str = "", finished: bool = True) -> ParsedReply:
    """A reply whose thinking ended, unless `answer` is None."""
    return ParsedReply(reasoning, answer, answer is not None, finished and answer is not None)


@pytest.fixture
def reply():
    return make_reply


class Known:
    """A model that answers by a rule over the item: `rule(item)` is the answer's text, None for unfinished thinking."""

    def __init__(self, items, rule, name="known", batch=128):
        self.name, self.batch, self.asked = name, batch, []
        self._items, self._rule = {item.prompt: item for item in items}, rule

    def answer(self, prompts, seeds):
        self.asked += seeds
        replies = [make_reply(self._rule(self._items[prompt])) for prompt in prompts]
        return [Answer(entry, entry.answer or "", False, tokens_in=5, tokens_out=7, latency_s=0.5) for entry in replies]


@pytest.fixture
def model():
    """model(items, rule, name) -> an answerer with that rule."""
    return Known


def right_answer(item) -> str:
    """What an oracle says. For instructions the record's own `category` is unused: see `RIGHT_INSTRUCTIONS`."""
    if item.kind == "instructions":
        return RIGHT_INSTRUCTIONS[item.index % len(RIGHT_INSTRUCTIONS)]
    return {"math": f"\\boxed{{{item.expected}}}"}.get(item.kind, item.expected)


@pytest.fixture
def oracle():
    return right_answer


RIGHT_INSTRUCTIONS = ("all lower case and no comma here.", "Three words only. P.S. I mean it.", '"A quoted reply."')


def records(name: str, count: int) -> list[dict]:
    """`count` hand-made records of a benchmark, in its schema on the Hub (columns that are not read included)."""
    rng = random.Random(name)
    return [_RECORDS[name](n, rng) for n in range(count)]


@pytest.fixture(scope="session")
def hub_records():
    return records


@pytest.fixture(scope="session")
def hub(tmp_path_factory):
    """All the benchmarks' repositories on loopback."""
    with BenchmarkHub(tmp_path_factory.mktemp("hub"), lambda name: records(name, RECORDS[name])) as served:
        yield served


@pytest.fixture(scope="session")
def served_records(hub):
    """benchmark -> its records as the Hub's own client reads them, and why not, for some that do not exist."""
    return hub.read({name: {} for name in PUBLIC} | WRONG_PLACES)


RECORDS = dict.fromkeys(PUBLIC, 300) | {"math_500": 40}  # a comparison by SymPy takes 10 ms
WRONG_PLACES = {
    "no such split": {"benchmark": "gsm8k", "split": "validation"},
    "no such subset": {"benchmark": "gsm8k", "subset": "plain_text"},
    "no such gated part": {"benchmark": "gpqa_diamond", "hub": "Idavidrein/gpqa", "subset": "gpqa_sapphire"},
}


def _labelled(count, labels="ABCDE"):
    def make(n, rng):
        texts = [f"thing {n}.{k}" for k in range(count)]
        return {"text": texts, "label": list(labels[:count])}, labels[rng.randrange(count)]

    return make


def _openbookqa(n, rng):
    choices, key = _labelled(4)(n, rng)
    return {"id": f"7-{n}", "question_stem": f"Fact number {n} is about", "choices": choices, "answerKey": key}


def _arc(n, rng):
    choices, key = _labelled(4, "1234" if n % 5 == 0 else "ABCD")(n, rng)  # the Hub's ARC mixes both ways of labelling
    return {"id": f"Mercury_{n}", "question": f"Which thing is number {n}?", "choices": choices, "answerKey": key}


def _commonsense(n, rng):
    choices, key = _labelled(5)(n, rng)
    question = f"Where would one put thing {n}?"
    return {"id": f"h{n}", "question": question, "question_concept": "thing", "choices": choices, "answerKey": key}


def _gsm8k(n, rng):
    total = rng.choice([n + 3, 1000 * n + 7, -n])
    return {
        "question": f"Ann has {n} shells and finds three. How many?",
        "answer": f"{n} + 3 = <<{n}+3={n + 3}>>{n + 3}\n#### {total:,}",
    }


def _piqa(n, rng):
    return {"goal": f"open shell {n}", "sol1": f"use knife {n}", "sol2": f"use spoon {n}", "label": rng.randrange(2)}


def _ifeval(n, rng):
    everything = dict.fromkeys(["num_words", "relation", "postscript_marker", "keywords"])
    chosen = (
        (["change_case:english_lowercase", "punctuation:no_comma"], [everything, everything]),
        (
            ["length_constraints:number_words", "detectable_content:postscript"],
            [everything | {"num_words": 9, "relation": "less than"}, everything | {"postscript_marker": "P.S."}],
        ),
        (["startend:quotation"], [everything]),
    )[n % 3]
    return {"key": 1000 + n, "prompt": f"Write about {n}.", "instruction_id_list": chosen[0], "kwargs": chosen[1]}


def _trivia(n, rng):
    answer = {
        "aliases": [f"Port {n}", f"The Port of {n}"],
        "normalized_aliases": [f"port {n}", f"port of {n}"],
        "matched_wiki_entity_name": "",
        "normalized_matched_wiki_entity_name": "",
        "normalized_value": f"port {n}",
        "type": "WikipediaEntity",
        "value": f"Port {n}",
    }
    return {
        "question": f"Where does ship {n} lie?",
        "question_id": f"tc_{n}",
        "question_source": "",
        "entity_pages": {"doc_source": ["Wikipedia"], "filename": [f"{n}.txt"], "title": [f"Port {n}"]},
        "search_results": {"description": [], "rank": [], "url": []},
        "answer": answer,
    }


def _math(n, rng):
    answer = [f"\\frac{{{n + 1}}}{{7}}", str(n), "x^2 + 1", "\\text{even}"][n % 4]
    return {
        "problem": f"Find it, {n}.",
        "solution": f"It is $\\boxed{{{answer}}}$.",
        "answer": answer,
        "subject": "Algebra",
        "level": 2,
        "unique_id": f"test/algebra/{n}.json",
    }


def _mmlu(n, rng):
    return {
        "question": f"Law {n}?",
        "subject": "law",
        "choices": [f"thing {n}.{k}" for k in range(4)],
        "answer": rng.randrange(4),
    }


def _mmlu_pro(n, rng):
    correct = rng.randrange(10)
    return {
        "question_id": n,
        "question": f"Law {n}?",
        "options": [f"thing {n}.{k}" for k in range(10)],
        "answer": "ABCDEFGHIJ"[correct],
        "answer_index": correct,
        "cot_content": "",
        "category": "law",
        "src": "ori_mmlu-law",
    }


def _gpqa(n, rng):
    # In a CSV nothing says that they are texts: a column of numbers with zeros in front, words for a missing value.
    texts = (f"wrong {n}\n", f"{n:04d}", ["None", "NA", "null", "nan"][n % 4])
    wrong = {f"Incorrect Answer {k}": text for k, text in enumerate(texts, 1)}
    domain = {"Subdomain": "Physics (general)", "High-level domain": "Physics"}
    return {"Record ID": f"rec{n}", "Question": f"Spin {n}?", "Correct Answer": f"right {n}\n", **wrong, **domain}


_RECORDS = {
    "openbookqa": _openbookqa,
    "arc_easy": _arc,
    "arc_challenge": _arc,
    "commonsense_qa": _commonsense,
    "gsm8k": _gsm8k,
    "piqa": _piqa,
    "ifeval": _ifeval,
    "trivia_qa": _trivia,
    "math_500": _math,
    "mmlu_pro": _mmlu_pro,
    "mmlu": _mmlu,
    "gpqa_diamond": _gpqa,
}
