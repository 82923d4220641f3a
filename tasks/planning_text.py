"""A plan as markdown: one table of memory, one of time."""

from typing import Any

from tasks.wording import amount

GIB = 2**30


_HEAD = ["| reinforcement | completions at once | stays | rollout | update | fits |", "|---|---|---|---|---|---|"]


def markdown(plan: dict[str, Any]) -> str:
    """What `model.planning.plan` found, for people."""
    mesh = " x ".join(f"{name} {size}" for name, size in plan["mesh"].items())
    limit = plan["memory_limit"]
    has = f" {limit / GIB:.2f} GiB each" if limit else ""
    lines = [
        f"# {amount(plan['parameters'])} parameters on {plan['topology']}",
        "",
        f"Chips: {plan['chips']}{has}; hosts: {plan['hosts']}; mesh: {mesh}. A batch is {plan['batch_rows']} rows of "
        f"{plan['row_length']} tokens; {plan['steps']:,} steps make {amount(plan['tokens'])} tokens.",
        "",
        f"**{plan['advice'][0].upper()}{plan['advice'][1:]}.**",
        "",
        "| a chip holds | rows at once | state and batch | temporaries | program | peak | fits | compiled in |",
        "|---|---|---|---|---|---|---|---|",
        _memory("as configured", plan["asked"]),
    ]
    if plan["largest"]:
        lines.append(_memory("the most that fit", plan["largest"]))
    lines += ["", f"Operations by formula: {amount(plan['flops_per_token'])}FLOP a token, forward and backward."]
    if plan["tokens_per_second"]:
        lines.append(
            f"Reckoned, not measured: at a utilisation of {plan['mfu_assumed']:.0%}, "
            f"{amount(plan['tokens_per_second'])} tokens/s, {plan['days']:.1f} days."
        )
    if plan["reinforcement"]:
        lines += ["", *_HEAD]
        lines += [_stage(name, found, limit) for name, found in plan["reinforcement"].items()]
    return "\n".join(lines) + "\n"


def _stage(name: str, found: dict[str, Any], limit: int | None) -> str:
    """One reinforcement stage: what stays in memory of a chip, and the peaks of its two halves; or why it cannot be."""
    if "refused" in found:
        return f"| {name} | {found['refused']} | | | | no |"
    peaks = [found["rollout"], *([found["update"]] if "update" in found else [])]
    update = "as pretraining"
    if "update" in found:
        update = f"{found['update'] / GIB:.2f} GiB, {found['micro_rows']} rows at once"
    sizes = f"{found['resident'] / GIB:.2f} GiB | {found['rollout'] / GIB:.2f} GiB | {update}"
    fits = "not known" if limit is None else "yes" if max(peaks) <= limit else "no"
    return f"| {name} | {found['rows']} | {sizes} | {fits} |"


def _memory(label: str, found: dict[str, Any]) -> str:
    kinds = (found["arguments"], found["temporaries"], found["code"], found["peak"])
    cells = ["not told" if one is None else f"{one / GIB:.2f} GiB" for one in kinds]
    rows = f"{found['micro_rows']} ({found['rows_per_chip']} a chip)"
    row = [label, rows, *cells, "yes" if found["fits"] else "no", f"{found['compile_seconds']:.0f} s"]
    return f"| {' | '.join(row)} |"
