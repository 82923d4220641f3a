"""What `torch` and `transformers` make of an export, computed in their own environment (`make torch`).

    python -m tests.support.processes.torch_run FOLDER newest | oldest

FOLDER holds, for each variant, an export in NAME/export and our side's arrays in NAME/reference.npz; and items.jsonl
for lm-eval. Writes newest.json or oldest.json: largest differences, and what each check returned. The oldest version of
`transformers` runs the model alone, without the newest peft and lm-eval. Imports nothing of the project.
"""

import itertools
import json
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TextIteratorStreamer,
    pipeline,
)

from tests.support.processes.harness_run import evaluate

LENGTHS = (1, 2, 3, 31, 32, 33, 100, 511, 1024)
STEPS = 10
NEVER = -1e29


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder / "export", trust_remote_code=True, **options)


def furthest(ours, theirs):
    """The largest difference; logits of what is never predicted, -1e30 and less, count as equal."""
    return float((torch.as_tensor(ours).clamp(min=NEVER) - theirs.clamp(min=NEVER)).abs().max())


@torch.no_grad()
def forward(folder, reference):
    """Logits at each length, of packed and of padded rows, and of a row that is continued from a cache."""
    model = load(folder).eval()
    ids, expected = torch.tensor(reference["long_ids"]) + 1, torch.tensor(reference["long_logits"])
    lengths = {}
    for length in LENGTHS:
        lengths[length] = furthest(expected[:, :length], model(ids[:, :length]).logits[..., 1:])
    rows, segments = torch.tensor(reference["tokens"]) + 1, torch.tensor(reference["segments"])
    mask, positions = segments > 0, torch.tensor(reference["positions"])
    packed = model(rows, attention_mask=mask.long(), position_ids=positions).logits
    expected = torch.tensor(reference["row_logits"])
    results = {"lengths": lengths, "rows": furthest(expected[mask], packed[mask][:, 1:])}
    # From a cache: a prompt, more of the prompt, then single tokens; also where documents and padding mix.
    for name, tokens, options, argument in (
        ("long", ids[:, :96], {}, "past_key_values"),
        ("packed", rows, {"attention_mask": mask.long(), "position_ids": positions}, "cache"),
    ):
        whole, cache, parts = model(tokens, **options).logits, None, []
        edges = [0, 20, 45, *range(46, tokens.shape[1] + 1)]
        for start, end in itertools.pairwise(edges):
            own = {
                key: value[:, :end] if key == "attention_mask" else value[:, start:end]
                for key, value in options.items()
            }
            output = model(tokens[:, start:end], use_cache=True, **{argument: cache}, **own)
            cache = output.past_key_values
            parts.append(output.logits)
        seen = options.get("attention_mask", torch.ones_like(tokens)).bool()
        results[f"cached_{name}"] = furthest(whole[seen], torch.cat(parts, dim=1)[seen])
    results["refused"] = []
    for options, kind in (
        ({"past_key_value": cache}, TypeError),
        ({"cache": cache, "past_key_values": cache}, ValueError),
        ({"cache": transformers.DynamicCache()}, ValueError),
    ):
        try:
            model(ids[:, :3], **options)
        except kind as error:
            results["refused"].append(str(error))
    half = load(folder, dtype=torch.bfloat16).eval()
    results["bfloat16"] = furthest(
        expected[mask], half(rows, attention_mask=mask.long(), position_ids=positions).logits[mask][:, 1:].float()
    )
    results["deviation"] = float(expected[mask][expected[mask] > NEVER].std())
    return results


def gradients(folder, reference):
    """The loss of packed rows and its gradient by every parameter, with and without checkpointing."""
    results = {}
    expected = {name.removeprefix("gradient."): reference[name] for name in reference if name.startswith("gradient.")}
    for name in ("plain", "checkpointed"):
        model = load(folder).train()
        if name == "checkpointed":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        rows, segments = torch.tensor(reference["tokens"]) + 1, torch.tensor(reference["segments"])
        positions = torch.tensor(reference["positions"])
        labels = rows.masked_fill((segments == 0) | (positions == 0), -100)
        output = model(rows, attention_mask=(segments > 0).long(), position_ids=positions, labels=labels)
        output.loss.backward()
        own = {key.removeprefix("model."): value.grad for key, value in model.named_parameters()}
        assert set(own) == set(expected)
        results[name] = {key: furthest(expected[key], value) for key, value in own.items()}
        results[f"loss_{name}"] = abs(float(output.loss) - float(reference["loss"]))
    # Padding among the labels, as where they are a copy of the ids, is no target.
    labels[labels == -100] = model.config.pad_token_id
    padded = model(rows, attention_mask=(segments > 0).long(), position_ids=positions, labels=labels)
    results["loss_padded"] = abs(float(padded.loss) - float(reference["loss"]))
    # A batch of padding alone has no target, whichever way that is said.
    results["losses_without_target"] = []
    for ignored in (model.config.pad_token_id, -100):
        empty = model(rows, attention_mask=(segments > 0).long(), labels=torch.full_like(rows, ignored))
        empty.loss.backward()
        results["losses_without_target"].append(float(empty.loss.detach()))
    return results


def generation(folder, reference):
    """Greedy tokens of a left-padded batch, sampling, streaming, beams and the pipeline."""
    model, tokenizer = load(folder).eval(), AutoTokenizer.from_pretrained(folder / "export", trust_remote_code=True)
    model.generation_config.eos_token_id = None
    prompts = [(reference[f"prompt_{index}"] + 1).tolist() for index in range(2)]
    batch = tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
    width = batch["input_ids"].shape[1]
    greedy = model.generate(**batch, max_new_tokens=64, do_sample=False)[:, width:]
    expected = torch.tensor(reference["greedy"]) + 1
    results = {
        "greedy": int((greedy == expected).sum()),
        "of": expected.numel(),
        "left": bool(batch["attention_mask"][0, 0] == 0),
    }
    plain = model.generate(**batch, max_new_tokens=16, do_sample=False, use_cache=False)[:, width:]
    results["without_cache"] = bool((plain == greedy[:, :16]).all())
    first = model.generate(**batch, max_new_tokens=9, do_sample=False, return_dict_in_generate=True)
    more = {"attention_mask": torch.cat([batch["attention_mask"], torch.ones(2, 9, dtype=torch.long)], dim=1)}
    again = model.generate(
        first.sequences, past_key_values=first.past_key_values, max_new_tokens=20, do_sample=False, **more
    )
    results["continued"] = bool((again[:, width:] == greedy[:, :29]).all())
    samples = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        samples.append(
            model.generate(**batch, max_new_tokens=24, do_sample=True, num_return_sequences=3, top_k=50, top_p=0.95)
        )
    results["sampled"] = [bool((samples[0] == samples[1]).all()), bool((samples[0] == samples[2]).all())]
    results["padding_sampled"] = bool((samples[0][:, width:] == 0).any())
    results["beams"] = list(model.generate(**batch, max_new_tokens=8, num_beams=3, do_sample=False).shape)
    single = {"input_ids": torch.tensor(prompts[:1])}
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    job = threading.Thread(
        target=model.generate, kwargs={**single, "max_new_tokens": 24, "do_sample": False, "streamer": streamer}
    )
    job.start()
    pieces = list(streamer)
    job.join()
    whole = model.generate(**single, max_new_tokens=24, do_sample=False)
    results["streamed"] = [len(pieces), "".join(pieces) == tokenizer.decode(whole[0, len(prompts[0]) :])]
    chat = pipeline("text-generation", model=model, tokenizer=tokenizer)
    question = [{"role": "user", "content": "What is 2 + 2?"}]
    reply = chat(question, max_new_tokens=8, do_sample=False)[0]["generated_text"]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    direct = model.generate(**ids, max_new_tokens=8, do_sample=False)[0, ids["input_ids"].shape[1] :]
    results["pipeline"] = [
        reply[-1]["role"],
        reply[-1]["content"] == tokenizer.decode(direct, skip_special_tokens=True),
    ]
    results["prompt"] = (ids["input_ids"][0] - 1).tolist()
    try:
        model.generate(**single, max_new_tokens=2, cache_implementation="static")
    except ValueError as error:
        results["static"] = str(error)
    return results


def training(folder, out):
    """Ten steps of `Trainer`, of the whole model and of LoRA: the loss of each step. The first model is saved."""
    from peft import LoraConfig, get_peft_model

    class Rows(torch.utils.data.Dataset):
        """The same four rows of a regular sequence again and again."""

        def __len__(self):
            return 4 * STEPS

        def __getitem__(self, index):
            ids = (torch.arange(48) * (index % 4 + 1)) % 90 + 1
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}

    results = {}
    for name in ("whole", "lora"):
        transformers.set_seed(0)
        model = load(folder)
        if name == "lora":
            modules = ["in_proj", "gate_proj", "q_proj", "k_proj", "v_proj", "out_proj", "ff_in", "ff_out"]
            model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=32, target_modules=modules))
        arguments = transformers.TrainingArguments(
            output_dir=str(out / name), max_steps=STEPS, per_device_train_batch_size=4, learning_rate=1e-2,
            logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
            gradient_checkpointing=name == "whole", lr_scheduler_type="constant",
        )  # fmt: skip
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Rows())
        trainer.train()
        results[name] = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        if name == "whole":
            trainer.save_model(str(out / "saved"))
            model.eval()
            with torch.no_grad():
                logits = model(torch.arange(1, 33)[None]).logits[..., 1:]
            np.savez(out / "tuned.npz", logits=logits.numpy())
        else:
            results["trained_share"] = sum(p.numel() for p in model.parameters() if p.requires_grad) / sum(
                p.numel() for p in model.parameters()
            )
    return results


def harness(folder, items):
    """lm-eval's `hf` backend over a task of local items."""
    from lm_eval.models.huggingface import HFLM

    options = {"trust_remote_code": True, "device": "cpu", "dtype": "float32", "batch_size": 8}
    return evaluate(HFLM(pretrained=str(folder / "export"), **options), str(items))


def main() -> None:
    root, version = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    results = {"asked": version, "version": transformers.__version__}
    for folder in sorted(path.parent for path in root.glob("*/reference.npz")):
        with np.load(folder / "reference.npz") as reference:
            reference = {
                key: value.astype(np.int64) if value.dtype.kind == "i" else value for key, value in reference.items()
            }
            results[folder.name] = {"forward": forward(folder, reference), "gradients": gradients(folder, reference)}
            if "greedy" in reference:
                results[folder.name]["generation"] = generation(folder, reference)
    # An export of a model that was not tuned takes a new head.
    fresh = AutoModelForSequenceClassification.from_pretrained(
        root / "relative" / "export", trust_remote_code=True, num_labels=3
    )
    results["fresh"] = list(fresh(torch.arange(1, 9)[None]).logits.shape)
    if version == "newest":
        results["training"] = training(root / "relative", root / "training")
        results["harness"] = harness(root / "relative", root / "items.jsonl")
    (root / f"{version}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
