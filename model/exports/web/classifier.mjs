// The page of a classifier: the probability of each label for a text, as `nautile classify` computes it.

import { element, failed, int64Tensor, load, serve } from "./model.mjs";

// White space at the ends, as Python's str.strip removes it; JavaScript's trim has another set.
const SPACE = String.raw`[\t-\r\x1c-\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+`;
const ENDS = new RegExp(`^${SPACE}|${SPACE}$`, "gu");

// The token ids that are read of a text, and whether the text was cut.
function read({ settings, tokenizer }, text) {
  const { before, suffix, after, longest, most } = settings.classifier;
  let kept = text.replace(ENDS, "");
  const ids = tokenizer.encode(kept);
  if (ids.length > longest) {
    // A character of which only some bytes remain is removed.
    const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    kept = ids.slice(0, longest).map((id) => tokenizer.decode(id, decoder)).join("") + decoder.decode();
    kept = kept.replace(/\ufffd+$/u, "");
  }
  const all = [...before, ...tokenizer.encode(kept + suffix), ...after];
  if (all.length > most && after.length) {
    throw new Error(`the text and its prompt have ${all.length} tokens, and the model reads ${most}: shorten it`);
  }
  return { ids: all.slice(0, most), cut: ids.length > longest };
}

const run = (model, ids, columns, names) =>
  model.prompt.run(
    { tokens: int64Tensor(ids, [1, ids.length]), lengths: int64Tensor([ids.length], [1]), logit_columns: int64Tensor(columns, [1, columns.length]) },
    names,
  );

// Logits of a linear head on the hidden states, whose mean or last is the feature.
async function headLogits(model, ids) {
  const { pooling, head, labels } = model.settings.classifier;
  const { hidden } = await run(model, ids, [ids.length - 1], ["hidden"]);
  const width = hidden.dims[2];
  const weight = new Float32Array(Uint8Array.from(atob(head.weight), (unit) => unit.charCodeAt(0)).buffer); // [width, labels]
  const first = pooling === "mean" ? 0 : ids.length - 1;
  const logits = Float64Array.from(head.bias);
  for (let column = 0; column < width; column++) {
    let feature = 0;
    for (let place = first; place < ids.length; place++) feature += hidden.data[place * width + column];
    feature /= ids.length - first;
    for (let label = 0; label < labels.length; label++) logits[label] += feature * weight[column * labels.length + label];
  }
  return logits;
}

// log p of the text of each label after the prompt, less its bias.
async function likelihoods(model, ids) {
  const { replies, bias } = model.settings.classifier;
  const sums = [];
  for (const [label, reply] of replies.entries()) {
    const columns = reply.map((_, place) => ids.length - 1 + place);
    const { logits } = await run(model, [...ids, ...reply.slice(0, -1)], columns, ["logits"]);
    const size = logits.dims[2];
    let sum = -(bias?.[label] ?? 0);
    reply.forEach((id, place) => {
      const row = logits.data.subarray(place * size, (place + 1) * size);
      sum += row[id] - logSumExp(row);
    });
    sums.push(sum);
  }
  return sums;
}

function logSumExp(values) {
  let most = -Infinity;
  for (const value of values) most = Math.max(most, value);
  let sum = 0;
  for (const value of values) sum += Math.exp(value - most);
  return most + Math.log(sum);
}

async function classify(model, text) {
  // `thresholds`: a text may have several labels, each with a probability and a threshold of its own.
  const { labels, temperature, threshold, thresholds, replies, calibrated } = model.settings.classifier;
  element("labels").replaceChildren();
  element("answer").textContent = element("note").textContent = "";
  const started = performance.now();
  const { ids, cut } = read(model, text);
  const raw = replies ? await likelihoods(model, ids) : await headLogits(model, ids);
  const logits = Array.from(raw, (logit) => logit / (temperature ?? 1));
  const total = logSumExp(logits);
  const shares = logits.map((logit, label) => ({
    label: labels[label],
    share: thresholds ? 1 / (1 + Math.exp(-logit)) : Math.exp(logit - total),
    least: thresholds ? thresholds[label] : (threshold ?? 0),
  }));
  shares.sort((one, other) => other.share - one.share);
  for (const { label, share } of shares) {
    const row = element("labels").insertRow();
    row.insertCell().textContent = label;
    row.insertCell().textContent = `${(100 * share).toFixed(1)} %`;
    row.dataset.probability = share;
  }
  const given = (thresholds ? shares : shares.slice(0, 1)).filter(({ share, least }) => share >= least);
  const abstains = given.length === 0;
  element("answer").textContent = abstains ? "no label" : given.map(({ label }) => label).join(", ");
  element("note").textContent = [
    abstains && thresholds ? "No label reaches its threshold." : "",
    abstains && !thresholds ? `The model abstains: the likeliest label has less than its threshold of ${(100 * threshold).toFixed(1)} %.` : "",
    cut ? "Only the beginning of the text was read: it is too long." : "",
    calibrated ? "" : "It is not shown that these probabilities are calibrated.",
  ].filter(Boolean).join(" ");
  element("status").textContent = `${ids.length} tokens in ${((performance.now() - started) / 1000).toFixed(2)} s`;
  document.body.dataset.finished = abstains ? "abstained" : "yes";
}

load("prompt").then((model) => serve(model, classify)).catch(failed);
