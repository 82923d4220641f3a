// The chat page: loads the model and answers one question at a time, by greedy decoding, entirely in this browser.
// Model output is inserted as text, never as markup.

import { MIB, element, failed, int64Tensor, load, serve } from "./model.mjs";

let stopped = false;

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

element("stop").addEventListener("click", () => (stopped = true));
load("prompt", "step")
  .then((model) =>
    serve(model, async (model, text) => {
      stopped = false;
      for (const id of ["thinking", "answer"]) element(id).textContent = "";
      await reply(model, text.trim());
    }),
  )
  .catch(failed);
