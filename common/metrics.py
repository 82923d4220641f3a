"""The glossary of metrics: title, unit, description, and what a good value looks like.

All charts, tables and documents take the texts of metrics from here; docs/metrics.md is generated from it.
"""

import re
from dataclasses import dataclass, replace
from functools import cache


@dataclass(frozen=True)
class Metric:
    """title: what people read in place of the name; unit: empty where the value is a bare number.

    good: what to expect of a healthy run, and what a bad value means. smooth: whether a moving average may be drawn
    of it; never for a schedule, a count, or what is measured a few times only.
    """

    title: str
    unit: str
    what: str
    good: str
    smooth: bool = True

    @property
    def help(self) -> str:
        """The tooltip: what it is, its unit, and what good looks like."""
        return " ".join(part for part in (self.what, f"Unit: {self.unit}." if self.unit else "", self.good) if part)


NATS, SHARE, SPEED = "nats per token", "share", "tokens/s"
# Section -> name -> metric. A name in angle brackets stands for any word: `rejected_<reason>`.
GLOSSARY: dict[str, dict[str, Metric]] = {
    "Training": {
        "loss": Metric(
            "Loss",
            NATS,
            "Mean cross-entropy since the last point, of the tokens that are trained on: with train_on = replies, "
            "those of the replies.",
            "Falls fast at first, then ever more slowly; a lasting rise means a learning rate that is too high.",
        ),
        "bits_per_byte": Metric(
            "Bits per byte",
            "bits per byte",
            "The loss for each byte of the text that is trained on. Comparable between tokenizers, not between "
            "settings of train_on.",
            "Lower is better; about 1 is a good small model on web text.",
        ),
        "learning_rate": Metric(
            "Learning rate",
            "",
            "The step size that the schedule gives.",
            "Rises in the warm-up, then holds or decays as configured.",
            smooth=False,
        ),
        "gradient_norm": Metric(
            "Gradient norm",
            "",
            "Norm of the gradient before clipping.",
            "Steady or slowly falling; spikes announce a loss that diverges.",
        ),
        "grad_norm": Metric(
            "Gradient norm",
            "",
            "Norm of the gradient before clipping.",
            "Steady; spikes mean that a few rollouts dominate the update.",
        ),
        "update_norm": Metric(
            "Update norm",
            "",
            "Norm of the change to the parameters, learning rate included.",
            "Follows the learning rate; a jump at a constant rate is a warning.",
        ),
        "skipped_updates": Metric(
            "Skipped updates",
            "updates",
            "Updates left out because they were not finite, since the start.",
            "0. A few do no harm; a growing count means that training is unstable.",
            smooth=False,
        ),
        "tokens_per_second": Metric(
            "Speed",
            SPEED,
            "Positions trained on (with padding and prompts) or tokens written in a second, pauses left out.",
            "Flat; a dip is a busy machine.",
        ),
        "step_seconds": Metric("Step time", "s", "Median time of a step.", "Flat."),
        "step_seconds_p95": Metric(
            "Step time, 95th percentile",
            "s",
            "One step in twenty takes longer.",
            "Near the median; far above it, something else uses the machine.",
        ),
        "mfu": Metric(
            "Use of the accelerator",
            SHARE,
            "Share of the device's peak operations that the model's own use.",
            "0.3 to 0.5 on a large device; far lower on a small model.",
        ),
        "share_in_steps": Metric(
            "Time in steps",
            SHARE,
            "Share of the time that was spent in training steps.",
            "Near 1; the rest is compilation, validation, saving and sampling.",
        ),
        "memory_bytes": Metric(
            "Memory in use",
            "bytes",
            "Memory in use on the first device, or of the process where the device does not say.",
            "Flat after the first steps; a steady rise is a leak.",
        ),
        "validation_loss": Metric(
            "Validation loss",
            NATS,
            "Loss on texts that are held out, over tokens of the same kind: with train_on = replies, those of the "
            "replies.",
            "Falls with the loss; a rise while the loss falls is overfitting.",
            smooth=False,
        ),
        "validation_bits_per_byte": Metric(
            "Validation bits per byte",
            "bits per byte",
            "The validation loss for each byte of its text.",
            "Falls with the training curve.",
            smooth=False,
        ),
    },
    "Reinforcement": {
        "reward": Metric(
            "Reward",
            "of 1",
            "Mean reward of the rollouts: the judge's marks scaled to 1, or the share that is right.",
            "Rises slowly and noisily.",
        ),
        "reward_deviation": Metric(
            "Spread of rewards",
            "of 1",
            "Standard deviation of the rewards of a step.",
            "Above 0: where all rewards are equal there is nothing to learn.",
        ),
        "solve_rate": Metric(
            "Solve rate",
            SHARE,
            "Share of the rollouts whose answer is right.",
            "Rises; learning is fastest between 0.2 and 0.8.",
        ),
        "reward_reason": Metric(
            "Mark for the reasoning", "of 5", "The judge's mean mark, 1 to 5, for the reasoning.", "Rises."
        ),
        "reward_answer": Metric(
            "Mark for the answer", "of 5", "The judge's mean mark, 1 to 5, for the answer.", "Rises."
        ),
        "reward_follow": Metric(
            "Mark for following the task",
            "of 5",
            "The judge's mean mark, 1 to 5, for doing what was asked.",
            "Near 5 once the format is learnt.",
        ),
        "reward_overall": Metric(
            "Overall mark", "of 100", "The judge's mean mark, 0 to 100, for the whole reply.", "Rises."
        ),
        "kl": Metric(
            "KL divergence",
            NATS,
            "How far the policy is from the one that the stage began with.",
            "Grows slowly from 0; a jump means that the policy leaves what it knew.",
        ),
        "entropy": Metric(
            "Entropy",
            NATS,
            "How undecided the policy is about the next token.",
            "Falls slowly; near 0 all rollouts of a group are alike and learning ends.",
        ),
        "sampler_gap": Metric(
            "Gap between sampler and learner",
            NATS,
            "Mean difference of the log-probabilities that sampling and learning give the same tokens.",
            "Below 0.001 in float32, 0.01 to 0.05 in bfloat16; more means that the two programs disagree.",
        ),
        "importance_weight": Metric(
            "Importance weight",
            "",
            "Mean ratio of the learner's probability of a token to the sampler's, before any cap.",
            "1 within a hundredth while on-policy; else the tokens come from another distribution than the learner's.",
        ),
        "importance_above_cap": Metric(
            "Importance weights above the cap",
            SHARE,
            "Share of the tokens whose ratio is above policy.importance_cap, or above 2 without one.",
            "Near 0 while on-policy.",
        ),
        "clip_share": Metric(
            "Clipped tokens", SHARE, "Share of the tokens whose ratio was clipped.", "Below 0.2; 0 with one update."
        ),
        "length": Metric(
            "Length",
            "tokens",
            "Mean length of the rollouts.",
            "Steady or rising; a collapse or a run to the limit is a reward that is gamed.",
        ),
        "truncated_share": Metric(
            "Cut off at the limit",
            SHARE,
            "Share of the rollouts that were cut off at the longest length.",
            "Near 0; else raise rollout.max_tokens.",
        ),
        "finished_thinking_share": Metric(
            "Finished thinking", SHARE, "Share of the rollouts whose reasoning ends.", "Near 1."
        ),
        "zero_signal_share": Metric(
            "Groups without a signal",
            SHARE,
            "Share of the groups whose rewards are all equal: nothing is learnt from them.",
            "Below 0.5; more means problems that are too hard or too easy.",
        ),
        "mastered_share": Metric(
            "Mastered groups",
            SHARE,
            "Share of the groups that are solved so well that they are skipped.",
            "Rises late; near 1 the stage has nothing left to teach.",
        ),
        "dropped_share": Metric(
            "Dropped groups", SHARE, "Share of the groups of which fewer than two rollouts have a score.", "0."
        ),
        "unscored": Metric(
            "Without a score",
            "rollouts",
            "Rollouts of the step without a mark of the judge, or a verdict of the grader.",
            "0.",
        ),
        "norm_positive": Metric(
            "Norm of g+",
            "",
            "Norm of the gradient of the rollouts above their group's mean.",
            "Of the size of the norm of g-.",
        ),
        "norm_negative": Metric(
            "Norm of g-",
            "",
            "Norm of the gradient of the rollouts below their group's mean.",
            "Of the size of the norm of g+; if far larger, the policy unlearns.",
        ),
        "balance_factor": Metric(
            "Balance factor",
            "",
            "What the objective multiplies g- by.",
            "As its objective says; above 1 the negative part is amplified.",
        ),
        "gradient_cosine": Metric(
            "Cosine of g+ and g-",
            "",
            "Whether the two gradients point the same way (1) or against each other (-1).",
            "Around 0; near -1 they cancel.",
        ),
        "logprob_positive": Metric(
            "Log-probability above the mean",
            NATS,
            "Mean log-probability of the tokens of rollouts above their group's mean.",
            "Rises towards 0.",
        ),
        "logprob_negative": Metric(
            "Log-probability below the mean",
            NATS,
            "Mean log-probability of the tokens of rollouts below their group's mean.",
            "Falls, or rises more slowly than that above the mean.",
        ),
        "guard_accuracy": Metric(
            "Accuracy on the guard problems",
            SHARE,
            "Share right of held-out problems that the policy is asked during the stage.",
            "Rises; the best policy is kept, and a lasting fall ends the stage.",
            smooth=False,
        ),
        "guard_p": Metric(
            "Chance of the guard's change",
            "p-value",
            "How likely a change this large is by chance (paired test against the best reading).",
            "Two readings in a row below 0.01 are taken for a real fall.",
            smooth=False,
        ),
        "rollout_tokens_per_second": Metric("Speed of rollouts", SPEED, "Tokens sampled in a second.", "Flat."),
        "update_tokens_per_second": Metric("Speed of updates", SPEED, "Tokens learnt from in a second.", "Flat."),
    },
    "System": {
        "system/memory_bytes": Metric(
            "Memory of the processes",
            "bytes",
            "Resident memory of the stage's process and its children.",
            "Flat after the start, below the machine's memory.",
            smooth=False,
        ),
        "system/cpu_cores": Metric(
            "Cores in use",
            "cores",
            "Processor time of the stage's processes in each second.",
            "Near the number of cores while it computes; low while it waits for a network or a device.",
            smooth=False,
        ),
        "system/device_bytes": Metric(
            "Memory of the device",
            "bytes",
            "Memory in use on the first device, where it reports that.",
            "Flat, with room to the device's limit.",
            smooth=False,
        ),
        "system/store_free_bytes": Metric(
            "Free disk under the store",
            "bytes",
            "Free space of the file system that has the store.",
            "Far above what the run still writes; `nautile store gc` makes room.",
            smooth=False,
        ),
        "telemetry_undelivered": Metric(
            "Not delivered",
            "measurements",
            "Measurements that no telemetry sink took; the store has them.",
            "0.",
            smooth=False,
        ),
        "budget_spent_share": Metric(
            "Budget spent", SHARE, "Share of the budget of calls that is spent.", "Below 1.", smooth=False
        ),
    },
    "Data": {
        "records": Metric("Records", "records", "Records read from the source.", "As many as the source has."),
        "documents": Metric("Documents", "documents", "Documents kept.", "Most of the records."),
        "prompts": Metric("Prompts", "prompts", "Prompts sent to the teacher.", "As configured."),
        "accepted_share": Metric("Accepted", SHARE, "Share of the teacher's replies that were kept.", "Above 0.7."),
        "mean_difficulty": Metric(
            "Mean difficulty", "0 to 1", "Mean difficulty of the kept documents.", "Spread over the scale."
        ),
        "tokens": Metric("Tokens", "tokens", "Tokens written.", "As many as the pretraining needs."),
        "cropped": Metric(
            "Cropped", "tokens", "Tokens of documents beyond the length of a row, which are left out.", "Few."
        ),
        "padded": Metric(
            "Padding", "tokens", "Positions of the rows that hold no text.", "A small share of the tokens."
        ),
        "bytes_per_token": Metric(
            "Bytes per token",
            "bytes",
            "Bytes of text for each token.",
            "3 to 5 on English text with a full vocabulary; lower with a small one.",
        ),
        "disk_bytes_per_token": Metric("Disk per token", "bytes", "Bytes on disk for each token.", "About 2."),
        "files_skipped": Metric("Files skipped", "files", "Input files that could not be read.", "0."),
        "rejected_<reason>": Metric(
            "Rejected: <reason>", "records", "What was left out for this reason.", "Few; many point to the source."
        ),
        "<work>_items": Metric("Work items: <work>", "items", "Work items of this part of the stage.", ""),
        "<work>_skipped": Metric("Skipped: <work>", "items", "Work items given up after their attempts.", "0."),
        "questions": Metric(
            "Held-out questions", "questions", "Questions that training texts are checked against.", ""
        ),
        "too_short": Metric(
            "Too short", "questions", "Questions of under five words, which are not searched for.", "Few."
        ),
        "count": Metric("Indexed", "exemplars", "Exemplars in the index.", "As many as were read."),
        "index_bytes": Metric("Size of the index", "bytes", "Bytes of the index on disk.", ""),
        "recall": Metric(
            "Recall", SHARE, "Share of the true nearest neighbours that the index returns.", "Above 0.95; 1 if exact."
        ),
        "dollars": Metric("Cost", "$", "What the replies cost for certain.", "Below the budget."),
        "dollars_unknown": Metric(
            "Cost, not certain", "$", "The most that cut, late or unreadable replies may have cost.", "0."
        ),
        "labelled": Metric("Labelled", "texts", "Texts that the teacher gave a label.", "Nearly all."),
        "gold_accuracy": Metric(
            "Teacher's accuracy", SHARE, "Share of the people's labels that the teacher gives too.", "Above 0.8."
        ),
        "gold_kappa": Metric(
            "Teacher's kappa", "", "Agreement with people beyond chance (Cohen).", "Above 0.6 is substantial."
        ),
    },
    "Evaluation": {
        "evaluate/<benchmark>/accuracy": Metric(
            "Accuracy on <benchmark>", SHARE, "Share right: one clear answer, reasoning finished.", "Above chance."
        ),
        "evaluate/<benchmark>/accuracy_lenient": Metric(
            "Lenient accuracy on <benchmark>",
            SHARE,
            "Share right where the last candidate answer counts.",
            "Not far above the strict one; a gap is a matter of form.",
        ),
        "evaluate/<benchmark>/likelihood": Metric(
            "Accuracy by likelihood on <benchmark>",
            SHARE,
            "Share of the questions whose right choice has the highest likelihood.",
            "Above chance.",
        ),
        "evaluate/tokens_per_second": Metric("Speed", SPEED, "Tokens written in a second.", "Flat."),
        "classify/rows": Metric("Rows", "rows", "Rows classified.", ""),
        "classify/abstained": Metric("Abstained", "rows", "Rows below the threshold, without a label.", "Few."),
        "classify/no_text": Metric("Without text", "rows", "Rows with no text to read.", "0."),
        "classify/rows_per_second": Metric("Speed", "rows/s", "Rows classified in a second.", ""),
        "extract/rows": Metric("Rows", "rows", "Rows read.", ""),
        "extract/extracted": Metric("Extracted", "rows", "Rows with a value that fits the schema.", "Nearly all."),
        "extract/spans": Metric("Spans", "spans", "Values that were located in their text.", ""),
        "extract/tokens": Metric("Tokens", "tokens", "Tokens written.", ""),
        "extract/rows_per_second": Metric("Speed", "rows/s", "Rows extracted in a second.", ""),
        "simulate/<arm>/<figure>": Metric(
            "<figure> of <arm>", "", "How close simulated answers are to people's.", "Better than the baselines."
        ),
    },
}
_KNOWN = {name: metric for section in GLOSSARY.values() for name, metric in section.items()}


@cache
def metric(name: str) -> Metric:
    """The glossary's entry of a metric; of an unknown one, its name in words and nothing else."""
    if name in _KNOWN:
        return _KNOWN[name]
    for pattern, entry in _KNOWN.items():
        # `<benchmark>` becomes a named group; a name in brackets stands for one part between slashes.
        if "<" in pattern and (match := re.fullmatch(re.sub(r"<(\w+)>", r"(?P<\1>[^/]+)", pattern), name)):
            title = entry.title
            for word, value in match.groupdict().items():
                title = title.replace(f"<{word}>", value.replace("_", " "))
            return replace(entry, title=title)
    return Metric(name.replace("_", " "), "", "", "")


def document() -> str:
    """docs/metrics.md: a table for each section."""
    lines = ["# Metrics", "", "What each metric is, as the dashboard's tooltips say it. Made from `common/metrics.py`."]
    for section, entries in GLOSSARY.items():
        lines += ["", f"## {section}", "", "| name | shown as | unit | what it is | what good looks like |"]
        lines.append("| --- | --- | --- | --- | --- |")
        for name, entry in entries.items():
            lines.append(f"| `{name}` | {entry.title} | {entry.unit} | {entry.what} | {entry.good} |")
    return "\n".join(lines) + "\n"
