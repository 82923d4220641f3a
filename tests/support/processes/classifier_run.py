"""What `transformers` makes of exports of tuned checkpoints, in the environment of `make torch`.

    python -m tests.support.processes.classifier_run FOLDER newest | oldest

FOLDER holds classifiers/NAME/export, tagger/export and texts.json. Writes newest.json or oldest.json. Imports nothing
of the project.
"""

import json
import sys
import warnings
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, pipeline


def classifiers(folder, texts):
    """Probabilities of each tuned checkpoint under `folder`: by the pipeline, in padded batches, after saving it."""
    results = {}
    for path in sorted(path.parent for path in folder.glob("*/export")):
        classify = pipeline("text-classification", str(path / "export"), trust_remote_code=True, device="cpu")
        model, tokenizer = classify.model.eval(), classify.tokenizer
        labels = list(model.config.id2label.values())
        several = model.config.problem_type == "multi_label_classification"

        def shares(answers, labels=labels):
            return [
                [{part["label"]: part["score"] for part in answer}[label] for label in labels] for answer in answers
            ]

        rows = {"pipeline": shares(classify(texts, top_k=None))}
        for side in ("left", "right"):
            batch = tokenizer(texts, padding=True, padding_side=side, return_tensors="pt")
            with torch.no_grad():
                logits = model(**batch).logits
                rows[side] = (logits.sigmoid() if several else logits.softmax(-1)).tolist()
        results[path.name] = {"shares": rows, "labels": labels}
        model.train()
        shape = [len(texts), len(labels)] if several else [len(texts)]
        losses = [model(**batch, labels=torch.full(shape, label)).loss for label in (0, -100)]
        sum(losses).backward()
        gradients = [value.grad for value in model.parameters() if value.grad is not None]
        results[path.name]["losses"] = [float(loss.detach()) for loss in losses]
        results[path.name]["finite"] = bool(gradients) and all(bool(part.isfinite().all()) for part in gradients)
        for part in (model.eval(), tokenizer):
            part.save_pretrained(path / "saved")
        again = pipeline("text-classification", str(path / "saved"), trust_remote_code=True, device="cpu")
        rows["saved"] = shares(again(texts, top_k=None))
        chat = AutoModelForCausalLM.from_pretrained(path / "export", trust_remote_code=True)
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": "2 + 2"}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        results[path.name]["asked"] = (asked["input_ids"][0] - 1).tolist()
        results[path.name]["replied"] = chat.generate(**asked, max_new_tokens=2, do_sample=False).shape[1]
        results[path.name]["refused"] = []
        for options in ({"text": "a", "text_pair": "b"}, {"text": texts, "truncation": True, "max_length": 3}):
            try:
                tokenizer(**options)
            except ValueError as error:
                results[path.name]["refused"].append(str(error))
    return results


def entities(folder, texts):
    """The entities (start, end, kind) of each text."""
    tagger = pipeline("token-classification", str(folder), trust_remote_code=True, aggregation_strategy="simple")
    return [[(part["start"], part["end"], part["entity_group"]) for part in tagger(text)] for text in texts]


def main() -> None:
    root, version = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    texts = json.loads((root / "texts.json").read_text())
    results = {
        "classifiers": classifiers(root / "classifiers", texts),
        "entities": entities(root / "tagger" / "export", texts),
    }
    (root / f"{version}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
