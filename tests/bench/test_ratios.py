"""The verdicts of the table of ratios: better, worse, the same or open, by five seeds that are paired."""

from bench.studies.ratios import SOLVED, SYNTH, WEB, markdown


def cells(arm, web, synth, solved, phase="arms"):
    return [
        {"phase": phase, "arm": arm, "seed": seed, "parameters": 878_000, "processor_seconds": 100.0,
         WEB: web + 0.05 * seed, SYNTH: synth + 0.0001 * seed, SOLVED: solved + 0.001 * seed + shift}
        for seed, shift in zip(range(1, 6), (0.0, 0.03, -0.02, 0.01, 0.0), strict=True)
    ]  # fmt: skip


def test_an_arm_is_compared_with_the_first_by_seed_and_gets_a_verdict_from_five():
    first, other = cells("SSA", 2.0, 0.10, 0.20), cells("AAA", 2.2, 0.1001, 0.20)
    for number, cell in enumerate(other):
        cell[SOLVED] = 0.2 + 0.03 * (-1) ** number
        cell[WEB] += 0.001 * number
        cell[SYNTH] += 0.0001 * (number % 2)
    text = markdown(first + other)
    assert "| SSA | 878,000 | 5 | 2.1500 ± 0.0791 | 0.1003 ± 0.0002 | 20.7 ± " in text
    row = next(line for line in text.splitlines() if line.startswith("| AAA | +"))
    web, synth, solved = row.strip("| ").split(" | ")[1:]
    assert web.startswith("+9.4 [")
    assert [text.partition("**")[2] for text in (web, synth, solved)] == ["worse**", "the same**", "open**"]
    assert "**" not in markdown(first[:4] + other[:4])  # too few seeds for a verdict


def test_the_rates_are_listed_and_without_cells_it_says_so():
    assert "| SSA 4e-3 | 2.050 | 0.1001 | 20.1 |" in markdown(cells("SSA 4e-3", 2.0, 0.1, 0.2, phase="rates")[:1])
    assert markdown([]) == "no cell has run"
