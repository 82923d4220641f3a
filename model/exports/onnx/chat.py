"""Ask the model in this folder a question: python chat.py "What is 2 + 2?" (needs onnxruntime, numpy, tokenizers)."""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

FOLDER = Path(__file__).resolve().parent
config = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
context, chat = config["model"]["context"], config["chat"]
tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
prompt, step = (onnxruntime.InferenceSession(FOLDER / f"{name}.onnx") for name in ("prompt", "step"))
names = [output.name for output in prompt.get_outputs()]  # logits and state: both graphs have the same outputs

# The prompt, in the template the model was trained on. A special token spelled in the question is broken up into text.
question = " ".join(sys.argv[1:]) or "What is 2 + 2?"
head, tail = chat["prompt"].split("{query}")
ids = tokenizer.encode(head + question.replace("<|", "< |") + tail).ids

lengths = np.array([len(ids)])  # `logit_columns` below: the columns whose logits to compute, only the last one
outputs = prompt.run(names, {"tokens": np.array([ids]), "lengths": lengths, "logit_columns": lengths[:, None] - 1})
state = dict(zip(names, outputs, strict=True))
for name in names:
    if name.startswith(("keys", "values")):  # pad to the whole context: the step graph then writes in place
        room = max(0, context - state[name].shape[2])
        state[name] = np.pad(state[name], ((0, 0), (0, 0), (0, room), (0, 0)))

for position in range(len(ids), context):  # greedy decoding, up to the end of the context
    token = int(state.pop("logits")[0, -1].argmax())
    sys.stdout.write(tokenizer.decode([token], skip_special_tokens=False))
    sys.stdout.flush()
    if token in chat["stop_ids"]:
        break
    inputs = {"tokens": np.array([[token]]), "positions": np.array([position])}
    inputs |= {f"past.{name}": value for name, value in state.items()}
    state = dict(zip(names, step.run(names, inputs), strict=True))
sys.stdout.write("\n")
