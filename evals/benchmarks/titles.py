"""Names, titles and parts of the benchmarks: of the paper, then the stand-ins; no import of what asks them."""

TITLES = {
    "openbookqa": "OpenBookQA",
    "arc_easy": "ARC Easy",
    "arc_challenge": "ARC Challenge",
    "arc": "ARC",
    "commonsense_qa": "CommonsenseQA",
    "gsm8k": "GSM8K (0-shot)",
    "piqa": "PIQA",
    "ifeval": "IFEval",
    "trivia_qa": "TriviaQA",
    "math_500": "MATH500",
    "mmlu_pro": "MMLU-Pro",
    "mmlu": "MMLU",
    "gpqa_diamond": "GPQA Diamond",
    "held_out": "Held-out problems",
    "gsm_symbolic": "GSM-Symbolic",
    "wiki_choice": "Wikipedia choice",
    "wiki_trivia": "Wikipedia trivia",
    "instructions": "Instructions",
}
"""Name -> title in tables. The entries are in `catalogue` and `stand_ins`."""

PARTS = {"arc": ("arc_easy", "arc_challenge")}
"""Composites: name -> the benchmarks whose mean they score. A plug-in's are in its entries."""

# The table of the stages shows the first of these that any stage was evaluated on; none is a plug-in's.
TABLE_1 = ("gsm8k", "held_out", "gsm_symbolic")
