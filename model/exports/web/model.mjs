// What the pages have in common: loading settings, tokenizer and onnxruntime sessions, and tensors of token ids.

import * as ort from "./ort.wasm.min.mjs";
import { Tokenizer } from "./tokenizer.mjs";

export const MIB = 2 ** 20;
export const element = (id) => document.getElementById(id);
export const int64Tensor = (values, shape) => new ort.Tensor("int64", BigInt64Array.from(values, BigInt), shape);

async function fetchBytes(name) {
  const response = await fetch(name);
  if (!response.ok) throw new Error(`${name} cannot be read (${response.status}); export the page again`);
  return new Uint8Array(await response.arrayBuffer());
}

// Load the settings, the tokenizer and the sessions of the named graphs, which share one copy of the weights.
export async function load(...graphs) {
  const settings = JSON.parse(new TextDecoder().decode(await fetchBytes("settings.json")));
  // More threads need cross-origin isolation headers, which a plain file server does not send.
  ort.env.wasm.numThreads = 1;
  ort.env.wasm.wasmPaths = new URL("./", import.meta.url).href;
  const weights = await fetchBytes("weights.bin");
  const model = { settings, tokenizer: new Tokenizer(settings.tokens, settings.digits), weights: weights.byteLength };
  for (const name of graphs) {
    model[name] = await ort.InferenceSession.create(await fetchBytes(`${name}.onnx`), {
      executionProviders: ["wasm"],
      externalData: [{ path: "weights.bin", data: weights }],
    });
  }
  return model;
}

// Call `act` with the model and the text in #question at each submission of the form; errors are shown as the status.
export function serve(model, act) {
  const setBusy = (busy) => {
    for (const id of ["question", "ask"]) element(id).disabled = busy;
    if (element("stop")) element("stop").disabled = !busy;
  };
  element("form").addEventListener("submit", async (event) => {
    event.preventDefault();
    delete document.body.dataset.finished;
    setBusy(true);
    try {
      await act(model, element("question").value);
    } catch (error) {
      element("status").textContent = String(error.message ?? error);
    }
    setBusy(false);
  });
  setBusy(false);
  element("status").textContent = `ready: ${(model.weights / MIB).toFixed(1)} MiB of weights`;
}

export const failed = (error) => (element("status").textContent = `cannot start: ${error.message ?? error}`);
