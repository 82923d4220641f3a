// The page: loads the model, and answers one question at a time, greedily, on this machine alone.
// What the model writes goes into the page as text, never as markup.

import * as ort from "./ort.wasm.min.mjs";
import { Tokenizer } from "./tokenizer.mjs";

const element = (id) => document.getElementById(id);
const MIB = 2 ** 20;
let stopped = false;

async function bytesOf(name) {
  const reply = await fetch(name);
  if (!reply.ok) throw new Error(`${name} cannot be read (${reply.status}); export the page again`);
  return new Uint8Array(await reply.arrayBuffer());
}

async function load() {
  const settings = JSON.parse(new TextDecoder().decode(await bytesOf("settings.json")));
  // Several threads need headers that a plain file server does not send.
  ort.env.wasm.numThreads = 1;
  ort.env.wasm.wasmPaths = new URL("./", import.meta.url).href;
  const weights = await bytesOf("weights.bin");
  const open = async (name) =>
    ort.InferenceSession.create(await bytesOf(name), {
      executionProviders: ["wasm"],
      externalData: [{ path: "weights.bin", data: weights }],
    });
  const prompt = await open("prompt.onnx");
  const step = await open("step.onnx");
  return { settings, prompt, step, tokenizer: new Tokenizer(settings.tokens), weights: weights.byteLength };
}

const whole = (values, shape) => new ort.Tensor("int64", BigInt64Array.from(values, BigInt), shape);

function likeliest(logits) {
  let best = 0;
  for (let id = 1; id < logits.length; id++) if (logits[id] > logits[best]) best = id;
  return best;
}

// The outputs of a graph as the next inputs, and the bytes that they take.
function stateOf(outputs) {
  const past = {};
  let size = 0;
  for (const [name, tensor] of Object.entries(outputs)) {
    if (name === "logits") continue;
    past[`past.${name}`] = tensor;
    size += tensor.data.byteLength;
  }
  return { past, size };
}

async function reply(model, question) {
  const { settings, tokenizer } = model;
  const ids = [...settings.before, ...tokenizer.encode(settings.query.replace("{query}", () => question)), ...settings.after];
  if (ids.length >= settings.context) {
    throw new Error(`the question is ${ids.length} tokens long, and the model reads ${settings.context}: shorten it`);
  }
  const limit = Math.min(settings.max_tokens, settings.context - ids.length);
  const texts = { thinking: "", answer: "" };
  let part = "thinking";
  let decoder = new TextDecoder();
  let count = 0;
  const started = performance.now();
  let outputs = await model.prompt.run({
    tokens: whole(ids, [1, ids.length]), lengths: whole([ids.length], [1]), wanted: whole([ids.length - 1], [1, 1]),
  });
  const first = performance.now();
  let ended = false;
  while (count < limit && !ended && !stopped) {
    const id = likeliest(outputs.logits.data);
    const { past, size } = stateOf(outputs);
    count += 1;
    ended = settings.stop_ids.includes(id);
    if (id === settings.think_end && part === "thinking") {
      texts[part] += decoder.decode();
      [part, decoder] = ["answer", new TextDecoder()];
    } else if (!ended) {
      texts[part] += tokenizer.decode(id, decoder);
    }
    element(part).textContent = texts[part].trim();
    const seconds = (performance.now() - first) / 1000;
    element("status").textContent =
      `${count} tokens, ${(count / seconds).toFixed(1)} tokens/s, prompt read in ${((first - started) / 1000).toFixed(2)} s; ` +
      `memory: weights ${(model.weights / MIB).toFixed(1)} MiB, state ${(size / MIB).toFixed(2)} MiB`;
    if (!ended && count < limit) {
      outputs = await model.step.run({ tokens: whole([id], [1, 1]), positions: whole([ids.length + count - 1], [1]), ...past });
      await new Promise((resume) => setTimeout(resume)); // lets the page draw
    }
  }
  texts[part] += decoder.decode();
  element(part).textContent = texts[part].trim();
  document.body.dataset.finished = ended ? "yes" : "cut";
}

async function main() {
  const model = await load();
  const controls = (busy) => {
    for (const id of ["question", "ask"]) element(id).disabled = busy;
    element("stop").disabled = !busy;
  };
  element("stop").addEventListener("click", () => (stopped = true));
  element("form").addEventListener("submit", async (event) => {
    event.preventDefault();
    stopped = false;
    delete document.body.dataset.finished;
    for (const id of ["thinking", "answer"]) element(id).textContent = "";
    controls(true);
    try {
      await reply(model, element("question").value.trim());
    } catch (error) {
      element("status").textContent = String(error.message ?? error);
    }
    controls(false);
  });
  controls(false);
  element("status").textContent = `ready: ${(model.weights / MIB).toFixed(1)} MiB of weights`;
}

main().catch((error) => (element("status").textContent = `cannot start: ${error.message ?? error}`));
