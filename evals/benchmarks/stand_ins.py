"""Offline stand-ins for the benchmarks, for a machine without network access.

Each names the benchmark that it replaces; none of their scores is comparable with a figure of the paper. Problems are
held out by a hash of the question, so training never uses one. The Wikipedia questions are held out by the stage
`held_out`: texts that overlap them are removed from training, but other texts may state the same fact.
"""

import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import islice
from types import SimpleNamespace

from nautile.common.errors import ConfigError
from nautile.configs.base import TaskConfig
from nautile.configs.training import ProblemsConfig
from nautile.data.sources.reasoning_gym import Problem, is_correct, problems
from nautile.data.sources.wikipedia import Article, articles
from nautile.evals.benchmarks.catalogue import ALIAS_PROMPT, PAPER, Benchmark
from nautile.evals.benchmarks.items import LETTERS, BenchmarkItem, answer_kind, multiple_choice
from nautile.evals.benchmarks.titles import TITLES
from nautile.evals.graders.instructions import are_compatible, describe

HELD_OUT = "held_out"
DEFAULT_COUNT = 500
_PARENTHESES = re.compile(r"\s*\([^)]*\)")


def held_out(config: ProblemsConfig, seed: int) -> list[BenchmarkItem]:
    """Build items from held-out problems of the kinds that reinforcement trains on.

    Raises `ConfigError` for another source.
    """
    if config.sources or config.source != "reasoning":
        sources = [source.source for source in config.sources or ()] or config.source
        raise ConfigError(
            f"evaluate.held_out.source is {sources!r}; held-out problems come from 'reasoning' "
            f"(GSM8K's test split is the benchmark 'gsm8k')"
        )
    if not config.tasks:
        raise ConfigError("evaluate.held_out.tasks is empty; name at least one kind of problem")
    return _problem_items(HELD_OUT, islice(problems(config.tasks, seed, "held_out"), config.count))


def gsm_symbolic(seed: int, count: int) -> list[BenchmarkItem]:
    """Build items from GSM8K-like word problems of reasoning-gym, from the held-out split."""
    generated = problems([TaskConfig(name="gsm_symbolic")], seed, "held_out")
    return _problem_items("gsm_symbolic", islice(generated, count))


def wiki_choice(seed: int, count: int) -> list[BenchmarkItem]:
    """Build multiple-choice questions: which of four titles of a topic has this description?

    Ambiguous descriptions are left out.
    """
    by_topic = defaultdict(list)
    for article in _described(seed):
        by_topic[article.topic].append(article.title)
    items: list[BenchmarkItem] = []
    for article in _described(seed):
        # Seeded by the article, so that a question is the same however many are built before it.
        rng = random.Random(f"wiki_choice/{seed}/{article.title}")
        distractors = rng.sample([title for title in by_topic[article.topic] if title != article.title], 3)
        options = [article.title, *distractors]
        rng.shuffle(options)
        question = f"Which of these is described as: {article.description}?"
        prompt, expected = multiple_choice(question, tuple(options)), LETTERS[options.index(article.title)]
        item = BenchmarkItem("wiki_choice", len(items), article.title, prompt, "choice", expected, tuple(options))
        items.append(replace(item, category=article.topic, question=question))
        if len(items) == count:
            break
    return items


def wiki_trivia(seed: int, count: int) -> list[BenchmarkItem]:
    """Build cloze questions: an article's first sentence with the title blanked out.

    Both the title and its form without parentheses are accepted. The options, which are only used for likelihoods, are
    the title and three others of its topic.
    """
    items: list[BenchmarkItem] = []
    by_topic: dict[str | None, dict[str, None]] = defaultdict(dict)  # distinct titles, in order
    for article in articles(seed):
        by_topic[article.topic][_PARENTHESES.sub("", article.title).strip()] = None
    for article in articles(seed):
        sentence = article.extract.split(". ")[0].strip().rstrip(".")
        bare = _PARENTHESES.sub("", article.title).strip()
        masked = re.sub(rf"\b{re.escape(bare)}\b", "___", sentence, flags=re.IGNORECASE)
        # The sentence must name the title, and be neither too short to identify it nor too long to read.
        if masked == sentence or not 40 <= len(masked) <= 200:
            continue
        aliases = tuple(dict.fromkeys((article.title, bare)))
        prompt = ALIAS_PROMPT.format(question=f"What is the blank? {masked}.")
        rng = random.Random(f"wiki_trivia/{seed}/{article.title}")
        distractors = [title for title in by_topic[article.topic] if title != bare]
        # In a topic of few articles the question has no options, and is only asked.
        options = [bare, *rng.sample(distractors, 3)] if len(distractors) >= 3 else []
        rng.shuffle(options)
        item = BenchmarkItem("wiki_trivia", len(items), article.title, prompt, "exact", bare, tuple(options), aliases)
        items.append(replace(item, category=article.topic, question=f"{masked}."))
        if len(items) == count:
            break
    return items


def instructions(seed: int, count: int) -> list[BenchmarkItem]:
    """Build prompts with one or two of IFEval's instructions, checked by IFEval's checkers."""
    items: list[BenchmarkItem] = []
    for article in articles(seed)[:count]:
        rng = random.Random(f"instructions/{seed}/{article.title}")
        names = [rng.choice(list(_ARGUMENTS))]
        second = rng.choice(list(_ARGUMENTS))
        # Two in five ask for a second instruction, unless it contradicts the first or is the same.
        if rng.random() < 0.4 and are_compatible(names[0], second):
            names.append(second)
        arguments = tuple(_ARGUMENTS[name](rng) for name in names)
        requirements = " ".join(describe(name, kwargs) for name, kwargs in zip(names, arguments, strict=True))
        prompt = f"Write two or three sentences about {article.title}. {requirements}"
        item = BenchmarkItem("instructions", len(items), article.title, prompt, "instructions", "", question=prompt)
        category = names[0].partition(":")[0]
        items.append(replace(item, instructions=tuple(names), arguments=arguments, category=category))
    return items


def problem_item(benchmark: str, index: int, problem: Problem) -> BenchmarkItem:
    """Convert a problem to an item of the problem's kind, by default of the kind of its answer (`answer_kind`).

    Raises `ValueError` for a problem without an answer key, because a missing score is not a wrong answer.
    """
    if not problem.answer:
        raise ValueError(f"{problem.task} #{problem.index} has no answer to grade against")
    kind = problem.kind or answer_kind(problem.answer)
    identity, text = f"{problem.task}/{problem.index}", problem.question
    item = BenchmarkItem(benchmark, index, identity, text, kind, problem.answer, problem.options)
    return replace(item, category=problem.task, question=text)


def _problem_items(benchmark: str, generated: Iterable[Problem]) -> list[BenchmarkItem]:
    """Convert reasoning-gym problems to items that also record the verdict of the generator's own scorer."""
    return [
        replace(problem_item(benchmark, index, problem), own_check=partial(is_correct, problem))
        for index, problem in enumerate(generated)
    ]


def _described(seed: int) -> list[Article]:
    """Articles with a topic and a unique description that does not reveal the title."""
    candidates = articles(seed)
    uses = Counter(article.description for article in candidates)
    return [
        article
        for article in candidates
        if article.description
        and uses[article.description] == 1
        and article.topic not in (None, "Uncategorized")
        and not {w for w in _words(article.title) if len(w) > 3} & _words(article.description)
    ]


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.casefold()))


# Instructions that a short text can follow -> how to draw their arguments.
_ARGUMENTS: dict[str, Callable[[random.Random], dict[str, object]]] = {
    "change_case:english_capital": lambda rng: {},
    "change_case:english_lowercase": lambda rng: {},
    "detectable_content:number_placeholders": lambda rng: {"num_placeholders": rng.randint(1, 3)},
    "detectable_content:postscript": lambda rng: {"postscript_marker": rng.choice(["P.S.", "P.P.S"])},
    "detectable_format:number_bullet_lists": lambda rng: {"num_bullets": rng.randint(2, 4)},
    "detectable_format:number_highlighted_sections": lambda rng: {"num_highlights": rng.randint(1, 3)},
    "detectable_format:title": lambda rng: {},
    "keywords:existence": lambda rng: {"keywords": rng.sample(["history", "people", "known", "world", "part"], 2)},
    "keywords:forbidden_words": lambda rng: {"forbidden_words": rng.sample(["is", "was", "the", "one", "many"], 1)},
    "keywords:letter_frequency": lambda rng: {
        "letter": rng.choice("qzxjk"), "let_frequency": rng.randint(2, 3), "let_relation": "less than",
    },
    "length_constraints:number_sentences": lambda rng: {"num_sentences": rng.randint(2, 4), "relation": "less than"},
    "length_constraints:number_words": lambda rng: {"num_words": rng.choice([15, 20, 25]), "relation": "at least"},
    "punctuation:no_comma": lambda rng: {},
    "startend:end_checker": lambda rng: {"end_phrase": "That is all."},
    "startend:quotation": lambda rng: {},
}  # fmt: skip

_PROBLEMS = "reasoning-gym word problems, held out by a hash of the question"
_WIKIPEDIA = "from Wikipedia summaries (CC BY-SA 4.0), which are in the offline pretraining text"
# `held_out` is asked by `[evaluate] held_out`, which says of which kinds its problems are.
STAND_INS: tuple[Benchmark, ...] = (
    Benchmark(
        HELD_OUT,
        TITLES[HELD_OUT],
        listed=False,
        stand_in="reasoning-gym problems of the reinforcement stages' own kinds, held out by a hash of the question",
    ),
    Benchmark(
        "gsm_symbolic",
        TITLES["gsm_symbolic"],
        size=DEFAULT_COUNT,
        build=gsm_symbolic,
        similar=True,
        stand_in=_PROBLEMS,
        like="gsm8k",
    ),
    Benchmark(
        "wiki_choice",
        TITLES["wiki_choice"],
        size=DEFAULT_COUNT,
        kind="choice",
        build=wiki_choice,
        stand_in=f"four titles for a description, {_WIKIPEDIA}",
        like="mmlu",
    ),
    Benchmark(
        "wiki_trivia",
        TITLES["wiki_trivia"],
        size=DEFAULT_COUNT,
        kind="exact",
        build=wiki_trivia,
        stand_in=f"the title blanked out of a sentence, {_WIKIPEDIA}",
        like="trivia_qa",
    ),
    Benchmark(
        "instructions",
        TITLES["instructions"],
        size=DEFAULT_COUNT,
        kind="instructions",
        build=instructions,
        similar=True,
        stand_in="IFEval's checkers over prompts of our own",
        like="ifeval",
    ),
)
# What the registry refers to: an entry by its name.
SHIPPED = SimpleNamespace(**{entry.name: entry for entry in (*PAPER, *STAND_INS)})
