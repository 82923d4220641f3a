// The chat page: loads the model and answers one question at a time, by greedy decoding, entirely in this browser.
// Model output is inserted as text, never as markup.

import * as ort from "./ort.wasm.min.mjs";
import { Tokenizer } from "./tokenizer.mjs";

const element = (id) => document.getElementById(id);
const MIB = 2 ** 20;
let stopped = false;

async function fetchBytes(name) {
  const response = await fetch(name);
  if (!response.ok) throw new Error(`${name} cannot be read (${response.status}); export the page again`);
  return new Uint8Array(await response.arrayBuffer());
}

// Load the settings, the tokenizer and two onnxruntime sessions, which share one copy of the weights.
async function load() {
  const settings = JSON.parse(new TextDecoder().decode(await fetchBytes("settings.json")));
  // More threads need cross-origin isolation headers, which a plain file server does not send.
  ort.env.wasm.numThreads = 1;
  ort.env.wasm.wasmPaths = new URL("./", import.meta.url).href;
  const weights = await fetchBytes("weights.bin");
  const openSession = async (name) =>
    ort.InferenceSession.create(await fetchBytes(name), {
      executionProviders: ["wasm"],
      externalData: [{ path: "weights.bin", data: weights }],
    });
  const prompt = await openSession("prompt.onnx");
  const step = await openSession("step.onnx");
  return { settings, prompt, step, tokenizer: new Tokenizer(settings.tokens, settings.digits), weights: weights.byteLength };
}

const int64Tensor = (values, shape) => new ort.Tensor("int64", BigInt64Array.from(values, BigInt), shape);

// The id with the largest logit.
function argmax(logits) {
  let best = 0;
  for (let id = 1; id < logits.length; id++) if (logits[id] > logits[best]) best = id;
  return best;
}

// The state among the outputs of a graph, as inputs of the next step, and its size in bytes.
function nextState(outputs) {
  const past = {};
  let size = 0;
  for (const [name, tensor] of Object.entries(outputs)) {
    if (name === "logits") continue;
    past[`past.${name}`] = tensor;
    size += tensor.data.byteLength;
  }
  return { past, size };
}

// Decode the reply to a question and show it as it grows, the reasoning and the answer each in its element.
async function reply(model, question) {
  const { settings, tokenizer } = model;
  const ids = [...settings.before, ...tokenizer.encode(settings.query.replace("{query}", () => question)), ...settings.after];
  if (ids.length >= settings.context) {
    throw new Error(`the question is ${ids.length} tokens long, and the model reads ${settings.context}: shorten it`);
  }
  const maxTokens = Math.min(settings.max_tokens, settings.context - ids.length);
  const texts = { thinking: "", answer: "" };
  let part = "thinking"; // until the think_end token
  let decoder = new TextDecoder(); // holds back incomplete UTF-8 sequences
  let count = 0;
  const started = performance.now();
  let outputs = await model.prompt.run({
    tokens: int64Tensor(ids, [1, ids.length]), lengths: int64Tensor([ids.length], [1]),
    logit_columns: int64Tensor([ids.length - 1], [1, 1]),
  });
  const first = performance.now();
  let ended = false;
  while (count < maxTokens && !ended && !stopped) {
    const id = argmax(outputs.logits.data);
    const { past, size } = nextState(outputs);
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
    if (!ended && count < maxTokens) {
      outputs = await model.step.run({ tokens: int64Tensor([id], [1, 1]), positions: int64Tensor([ids.length + count - 1], [1]), ...past });
      await new Promise((resume) => setTimeout(resume)); // let the browser repaint and handle Stop
    }
  }
  texts[part] += decoder.decode();
  element(part).textContent = texts[part].trim();
  document.body.dataset.finished = ended ? "yes" : "cut";
}

async function main() {
  const model = await load();
  const setBusy = (busy) => {
    for (const id of ["question", "ask"]) element(id).disabled = busy;
    element("stop").disabled = !busy;
  };
  element("stop").addEventListener("click", () => (stopped = true));
  element("form").addEventListener("submit", async (event) => {
    event.preventDefault();
    stopped = false;
    delete document.body.dataset.finished;
    for (const id of ["thinking", "answer"]) element(id).textContent = "";
    setBusy(true);
    try {
      await reply(model, element("question").value.trim());
    } catch (error) {
      element("status").textContent = String(error.message ?? error);
    }
    setBusy(false);
  });
  setBusy(false);
  element("status").textContent = `ready: ${(model.weights / MIB).toFixed(1)} MiB of weights`;
}

main().catch((error) => (element("status").textContent = `cannot start: ${error.message ?? error}`));
