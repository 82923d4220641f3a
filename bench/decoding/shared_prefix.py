"""Likelihoods after a shared prefix: its state copied to each row, against every prompt run whole.

    python bench/decoding/shared_prefix.py [--rows 32] [--contexts 128] [--personas 32] [--repeats 3] [--write FILE]

The model of configs/local.toml with random weights: neither its time nor its memory depends on what it has learnt.

- A beginning of 2, 4 and 8 times the rest, and contexts that have nothing else in common, with one continuation of
  three tokens each. A prompt is some 225 tokens in all cases, so that each row is padded to the context of 256 when it
  is run whole. The ratio is of processor seconds, in turns, so that other programs disturb both alike.
- A survey of 10,000 personas and 20 questions with five options: a part of it is measured by both, and extrapolated.

Programs are compiled before the clock starts. Writes the tables of docs/results/uses-prefix.md.
"""

import os
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.measure import in_turns, options
from configs.load import load
from model.capacity.decoding_state import state_bytes
from model.decoding.scoring import continuation_logprobs
from model.decoding.shared_prefix import SharedPrefixScorer
from model.nautile import initialise

TOTAL, CONTINUATION = 225, 3  # tokens of a prompt, on average; and of what is scored
PERSONAS, QUESTIONS, OPTIONS = 10_000, 20, 5
INSTRUCTIONS, PERSONA, QUESTION = 96, 60, 30  # tokens
CHECKED_PERSONAS = 2  # run whole: each is 100 sequences


def main():
    asked = options(__doc__, rows=32, contexts=128, personas=32, repeats=3, write=None).parse_args()
    config = load("local").model
    params = jax.jit(initialise, static_argnums=0)(config, 0)
    draw = np.random.default_rng(0)

    def tokens(count):
        return draw.integers(0, config.vocabulary, count).tolist()

    def seconds(beginning, shared, checked):
        """[clock, processor] seconds of each repeat, of all groups shared and of `checked` groups run whole."""
        scorer = SharedPrefixScorer(params, config, asked.rows)
        sequences = [
            ([*beginning, *context, *ids], len(beginning) + len(context))
            for context, continuations in checked
            for ids in continuations
        ]
        whole = partial(continuation_logprobs, params, config, sequences, asked.rows)
        difference = np.abs(np.concatenate(scorer.logprobs(beginning, checked)) - whole()).max()
        taken = in_turns({"shared": partial(scorer.logprobs, beginning, shared), "whole": whole}, asked.repeats)
        return {name: np.array(times).T for name, times in taken.items()}, difference

    lines = [
        "Measured by `python bench/decoding/shared_prefix.py`: the model of configs/local.toml (random weights, "
        f"float32), {asked.rows} rows at a time, {os.cpu_count()} CPU cores with other programs beside it, medians of "
        f"{asked.repeats} in turns [least, most].",
        "",
        f"A continuation of {CONTINUATION} tokens for each of {asked.contexts} contexts, prompts of about {TOTAL}:",
        "",
        "| beginning over the rest | whole, CPU s | shared, CPU s | ratio | by the clock | largest difference, nats |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for times in (2, 4, 8):
        rest = TOTAL // (times + 1)
        lengths = draw.integers(rest * 3 // 4, rest * 5 // 4, asked.contexts) - CONTINUATION
        groups = [(tokens(length), [tokens(CONTINUATION)]) for length in lengths.tolist()]
        taken, difference = seconds(tokens(times * rest), groups, groups)
        by_clock, ratios = taken["whole"] / taken["shared"]
        whole, shared = (np.median(taken[name][1]) for name in ("whole", "shared"))
        ratio = f"{np.median(ratios):.1f} [{min(ratios):.1f}, {max(ratios):.1f}]"
        lines.append(
            f"| {times} | {whole:.2f} | {shared:.2f} | {ratio} | {np.median(by_clock):.1f} | {difference:.0e} |"
        )
        print(lines[-1], flush=True)
    questions = [tokens(QUESTION) for _ in range(QUESTIONS)]
    letters = [[token] for token in range(OPTIONS)]
    survey = [
        (persona + question, letters) for persona in map(tokens, [PERSONA] * asked.personas) for question in questions
    ]
    checked = survey[: CHECKED_PERSONAS * QUESTIONS]
    taken, difference = seconds(tokens(INSTRUCTIONS), survey, checked)
    lines += [
        "",
        f"A survey: {INSTRUCTIONS} tokens of instructions, personas of {PERSONA}, {QUESTIONS} questions of {QUESTION}, "
        f"{OPTIONS} options of a token each (largest difference {difference:.0e} nats):",
        "",
        f"| | measured personas | CPU s | a persona, CPU ms | **extrapolated** to {PERSONAS:,} personas, CPU h |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    each = {}
    for name, part in (("whole", CHECKED_PERSONAS), ("shared", asked.personas)):
        middle = np.median(taken[name][1])
        each[name] = middle / part
        hours = each[name] * PERSONAS / 3600
        lines.append(f"| {name} | {part} | {middle:.2f} | {each[name] * 1e3:.0f} | {hours:.2f} |")
    ratio = each["whole"] / each["shared"]
    lines += [
        "",
        f"The survey takes {ratio:.0f} times as long where every prompt with every option is run whole: a persona is "
        f"then {QUESTIONS * OPTIONS} prompts of {INSTRUCTIONS + PERSONA + QUESTION + 1} tokens, and shared "
        f"{PERSONA + QUESTIONS * QUESTION} tokens in all.",
        "",
        "What is held for a prefix, of which there are at most as many as rows at each depth of the tree:",
        "",
        "| model | SCA layers, at any length | attention, a token |",
        "| --- | ---: | ---: |",
    ]
    for name in ("local", "nautile_370m"):
        size = state_bytes(load(name).model)
        fixed = size["sca_sums"] + size["convolution_history"]
        lines.append(f"| {name} | {fixed:,} bytes | {size['kv_per_token']:,} bytes |")
    print("\n".join(lines))
    if asked.write:
        asked.write.write_text("# Likelihoods after a shared prefix\n\n" + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
