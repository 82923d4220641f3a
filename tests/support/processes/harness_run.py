"""Run EleutherAI's lm-eval, from its own folder on the path, over a file of items against a server.

    python -m tests.support.processes.harness_run URL MODEL CONTEXT ITEMS    rows of JSON {question, options, gold}

Prints JSON: `acc` and `acc_bytes` over all, and per item the log-probability of each option and both verdicts.
"""

import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

TASK = """
task: nautile_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {items}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: options
doc_to_target: gold
metric_list:
  - metric: acc
  - metric: acc_bytes
"""


def main() -> None:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    url, model, context, items = sys.argv[1:]
    logging.disable(logging.WARNING)
    # lm-eval finds the server's /tokenize itself, so it needs no tokenizer of its own.
    api = LocalCompletionsAPI(model=model, base_url=f"{url}/v1/completions", max_length=int(context), batch_size=16)
    assert api.tokenizer_backend == "remote"
    json.dump(evaluate(api, items), sys.stdout)


def evaluate(model: Any, items: str) -> dict[str, Any]:
    """What `main` prints, of one of lm-eval's models over the file of items."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "task.yaml").write_text(TASK.format(items=json.dumps(items)), encoding="utf-8")
        tasks = TaskManager(include_path=folder, include_defaults=False)
        results = lm_eval.simple_evaluate(
            model=model, tasks=["nautile_choice"], task_manager=tasks, log_samples=True, bootstrap_iters=0
        )
    scores = results["results"]["nautile_choice"]
    rows = sorted(results["samples"]["nautile_choice"], key=lambda row: row["doc_id"])
    verdicts = [
        {
            "logprobs": [logprob for logprob, _ in row["filtered_resps"]],
            "greedy": [is_greedy for _, is_greedy in row["filtered_resps"]],
            "acc": row["acc"],
            "acc_bytes": row["acc_bytes"],
        }
        for row in rows
    ]
    return {"acc": scores["acc,none"], "acc_bytes": scores["acc_bytes,none"], "rows": verdicts}


if __name__ == "__main__":
    main()
