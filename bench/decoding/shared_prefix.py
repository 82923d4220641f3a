"""Likelihoods after a shared prefix: its state copied to each row, compared with whole prompts.

    python bench/decoding/shared_prefix.py [--rows 32] [--contexts 128] [--personas 32] [--repeats 3] [--write FILE]

The model of configs/local.toml with random weights: neither time nor memory depends on the weights' values.

- A prefix of 2, 4 and 8 times the rest, and contexts with nothing else in common, with one continuation of three tokens
  each. A prompt is some 225 tokens in all cases, so that whole rows are padded to the context of 256. The ratio is of
  processor seconds, interleaved, so that other programs disturb both alike.
- A survey of 10,000 personas and 20 questions with five options: both forms measure a part, which is extrapolated.

Programs are compiled before timing. Writes the tables of docs/results/uses-prefix.md.
"""

import os
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.measure import argument_parser, time_interleaved
from configs.load import load
from model.capacity.decoding_state import state_bytes
from model.decoding.scoring import continuation_logprobs
from model.decoding.shared_prefix import SharedPrefixScorer
from model.nautile import initialise

TOTAL, CONTINUATION = 225, 3  # tokens of a prompt, on average; and of what is scored
PERSONAS, QUESTIONS, OPTIONS = 10_000, 20, 5
INSTRUCTIONS, PERSONA, QUESTION = 96, 60, 30  # tokens
CHECKED_PERSONAS = 2  # as whole prompts, 100 sequences each


def main():
    arguments = argument_parser(__doc__, rows=32, contexts=128, personas=32, repeats=3, write=None).parse_args()
    config = load("local").model
    params = jax.jit(initialise, static_argnums=0)(config, 0)
    draw = np.random.default_rng(0)

    def tokens(count):
        return draw.integers(0, config.vocabulary, count).tolist()

    def seconds(beginning, groups, checked_groups):
        """[wall, processor] seconds of each repeat: `groups` by a shared prefix, `checked_groups` as whole prompts."""
        scorer = SharedPrefixScorer(params, config, arguments.rows)
        sequences = [
            ([*beginning, *context, *ids], len(beginning) + len(context))
            for context, continuations in checked_groups
            for ids in continuations
        ]
        whole_prompts = partial(continuation_logprobs, params, config, sequences, arguments.rows)
        # Both forms must give the same numbers, or their times are no comparison. This call also compiles both.
        difference = np.abs(np.concatenate(scorer.logprobs(beginning, checked_groups)) - whole_prompts()).max()
        timings = time_interleaved(
            {"shared": partial(scorer.logprobs, beginning, groups), "whole": whole_prompts}, arguments.repeats
        )
        return {name: np.array(times).T for name, times in timings.items()}, difference

    lines = [
        "Measured by `python bench/decoding/shared_prefix.py`: the model of configs/local.toml (random weights, "
        f"float32), {arguments.rows} rows at a time, {os.cpu_count()} CPU cores shared with other programs, medians "
        f"of {arguments.repeats} in turns [least, most].",
        "",
        f"A continuation of {CONTINUATION} tokens for each of {arguments.contexts} contexts, prompts of about {TOTAL}:",
        "",
        "| prefix over the rest | whole prompts, CPU s | shared, CPU s | ratio | wall time | largest difference |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    # Part 1: contexts with nothing but the prefix in common.
    for times in (2, 4, 8):
        rest_length = TOTAL // (times + 1)
        # The rests differ in length by a quarter, as texts do: padding is part of the cost.
        lengths = draw.integers(rest_length * 3 // 4, rest_length * 5 // 4, arguments.contexts) - CONTINUATION
        groups = [(tokens(length), [tokens(CONTINUATION)]) for length in lengths.tolist()]
        timings, difference = seconds(tokens(times * rest_length), groups, groups)
        by_clock, ratios = timings["whole"] / timings["shared"]
        whole, shared = (np.median(timings[name][1]) for name in ("whole", "shared"))
        ratio = f"{np.median(ratios):.1f} [{min(ratios):.1f}, {max(ratios):.1f}]"
        lines.append(
            f"| {times} | {whole:.2f} | {shared:.2f} | {ratio} | {np.median(by_clock):.1f} | {difference:.0e} |"
        )
        print(lines[-1], flush=True)
    # Part 2: a survey, a tree of instructions, personas and questions.
    questions = [tokens(QUESTION) for _ in range(QUESTIONS)]
    letters = [[token] for token in range(OPTIONS)]
    survey = [
        (persona + question, letters)
        for persona in map(tokens, [PERSONA] * arguments.personas)
        for question in questions
    ]
    # Whole prompts for all personas would take hours; two of them are enough for the ratio.
    checked = survey[: CHECKED_PERSONAS * QUESTIONS]
    timings, difference = seconds(tokens(INSTRUCTIONS), survey, checked)
    lines += [
        "",
        f"A survey: {INSTRUCTIONS} tokens of instructions, personas of {PERSONA}, {QUESTIONS} questions of {QUESTION}, "
        f"{OPTIONS} options of a token each (largest difference {difference:.0e} nats):",
        "",
        f"| | measured personas | CPU s | a persona, CPU ms | **extrapolated** to {PERSONAS:,} personas, CPU h |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    # Extrapolate from the measured personas to all of them.
    persona_seconds = {}
    for name, personas in (("whole", CHECKED_PERSONAS), ("shared", arguments.personas)):
        median_seconds = np.median(timings[name][1])
        persona_seconds[name] = median_seconds / personas
        hours = persona_seconds[name] * PERSONAS / 3600
        lines.append(
            f"| {name} | {personas} | {median_seconds:.2f} | {persona_seconds[name] * 1e3:.0f} | {hours:.2f} |"
        )
    ratio = persona_seconds["whole"] / persona_seconds["shared"]
    lines += [
        "",
        f"The survey takes {ratio:.0f} times as long with whole prompts for every option: a persona is "
        f"then {QUESTIONS * OPTIONS} prompts of {INSTRUCTIONS + PERSONA + QUESTION + 1} tokens, and shared "
        f"{PERSONA + QUESTIONS * QUESTION} tokens in all.",
        "",
        "State of a prefix; each depth of the tree has at most as many prefixes as there are rows:",
        "",
        "| model | SCA layers, at any length | attention, a token |",
        "| --- | ---: | ---: |",
    ]
    for name in ("local", "nautile_370m"):
        size = state_bytes(load(name).model)
        fixed = size["sca_sums"] + size["convolution_history"]
        lines.append(f"| {name} | {fixed:,} bytes | {size['kv_per_token']:,} bytes |")
    print("\n".join(lines))
    if arguments.write:
        arguments.write.write_text(
            "# Likelihoods after a shared prefix\n\n" + "\n".join(lines) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
