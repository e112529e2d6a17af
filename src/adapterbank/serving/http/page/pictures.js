// Figures as SVG, as a table or as coloured words: the parameters of all tasks, an ablation, probabilities, shares, entities. Knows no server.

import { bar, big, counted, draw, empty, make, percent } from "./dom.js";

// One encoder with all tasks, compared with one model per task; both bars have the same scale.
export function totals(tasks, encoder) {
  const n = tasks.length;
  const trained = tasks.reduce((sum, task) => sum + (task.params?.trained || 0), 0);
  const apart = n * encoder, whole = Math.max(apart, encoder + trained) || 1;
  const together = draw("svg", shape(`${big(encoder + trained)} parameters`),
    draw("rect", { class: "encoder", width: (encoder / whole) * 1000, height: 10 }),
    draw("rect", { class: "trained", x: (encoder / whole) * 1000, width: Math.max((trained / whole) * 1000, trained ? 2 : 0), height: 10 }));
  const copies = n <= 100 ? n : 1, width = (apart / whole) * 1000 / copies;
  const each = draw("svg", shape(`${big(apart)} parameters`),
    Array.from({ length: copies }, (_, k) =>
      draw("rect", { class: "encoder", x: k * width, width: Math.max(width - (copies > 1 ? Math.min(2, width / 4) : 0), 0.5), height: 10 })));
  const times = apart / (encoder + trained);
  return [
    make("figcaption", {}, times > 1.05 ? `${counted(n, "task")} in ${times.toFixed(1)}× fewer parameters` : `${counted(n, "task")} on one encoder`),
    make("div", { class: "totals-row" }, make("span", {}, "This bank: one encoder and all tasks"), make("b", {}, big(encoder + trained)), together),
    make("div", { class: "totals-row" }, make("span", {}, "One model per task"), make("b", {}, big(apart)), each),
    make("p", { class: "quiet legend" }, make("span", {}, make("span", { class: "key encoder" }), `encoder, ${big(encoder)}`),
      make("span", {}, make("span", { class: "key trained" }), `added by the tasks, ${big(trained)}`)),
  ];
}

const shape = (label) => ({ class: "bar thick", viewBox: "0 0 1000 10", preserveAspectRatio: "none", role: "img", "aria-label": label });

// Blue for a loss, orange for a gain: distinguishable with colour blindness, and by lightness. Small changes look like the background.
const SCALES = {
  light: { cold: [[247, 247, 247], [209, 229, 240], [146, 197, 222], [67, 147, 195], [33, 102, 172], [5, 48, 97]], warm: [[247, 247, 247], [254, 224, 182], [253, 184, 99], [224, 130, 20]] },
  dark: { cold: [[44, 49, 53], [29, 66, 104], [33, 102, 172], [67, 147, 195], [146, 197, 222], [224, 238, 246]], warm: [[44, 49, 53], [120, 70, 20], [200, 120, 40], [253, 184, 99]] },
};
export const dark = matchMedia("(prefers-color-scheme: dark)");

function colour(share, scale) {
  const place = Math.min(1, Math.abs(share)) * (scale.length - 1), k = Math.min(Math.floor(place), scale.length - 2);
  return scale[k].map((from, i) => Math.round(from + (scale[k + 1][i] - from) * (place - k)));
}

function paint(element, share) {
  const scale = SCALES[dark.matches ? "dark" : "light"];
  const [r, g, b] = colour(share, share < 0 ? scale.cold : scale.warm);
  const linear = [r, g, b].map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  const light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  element.style.backgroundColor = `rgb(${r} ${g} ${b})`;
  element.style.color = light > 0.179 ? "#000" : "#fff";
  return element;
}

// Rows: the first layer without adapters; columns: the last. A cell: the score's change in per cent.
export function heatmap(found) {
  const layers = found.layers || [], metric = found.metric;
  const cells = new Map((found.spans || []).map((span) => [`${span.first}-${span.last}`, span.change?.[metric]]));
  const known = [...cells.values()].filter((value) => !empty(value));
  const most = Math.max(1, ...known.map(Math.abs));
  const row = (first) => make("tr", {}, make("th", { scope: "row" }, String(first)), layers.map((last) => {
    if (last < first) return make("td", { "aria-hidden": "true" });
    const change = cells.get(`${first}-${last}`);
    const cell = make("td", { title: `layers ${first} to ${last}` }, empty(change) ? "–" : change.toFixed(1));
    return empty(change) ? cell : paint(cell, change / most);
  }));
  const table = make("table", { class: "heat" },
    make("thead", {}, make("tr", {}, make("td", {}), layers.map((last) => make("th", { scope: "col" }, String(last))))),
    make("tbody", {}, layers.map(row)));
  const steps = [-1, -0.6, -0.3, 0].map((share) => paint(make("span", {}), share));
  return make("section", { class: "card", "aria-label": "Ablation" },
    make("h2", {}, "Score without the adapters of a range of layers"),
    make("p", { class: "quiet" }, `Change of ${metric} in per cent, relative to ${(found.whole?.[metric] ?? 0).toFixed(4)} with all adapters, on ${counted(found.data?.rows || 0, "row")}. Rows: the first layer without adapters; columns: the last one.`),
    make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of the ablation" }, table),
    make("p", { class: "scale" }, `−${most.toFixed(1)} %`, steps, "0", paint(make("span", {}), 0.6), "better"));
}

// The probabilities of a prediction, highest first.
export function odds(probabilities) {
  const sorted = Object.entries(probabilities).sort((a, b) => b[1] - a[1]);
  const shown = sorted.slice(0, 30).flatMap(([label, share]) => [
    make("span", {}, label), bar(share), make("span", { class: "number" }, percent(share))]);
  const left = sorted.length - 30;
  return [make("div", { class: "odds" }, shown), left > 0 ? make("p", { class: "quiet" }, `and ${counted(left, "less likely label")}`) : null];
}

const signed = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(Math.abs(value) < 0.01 ? 4 : 2)}`;

// A text with its words coloured by their share: orange for the answer, blue against it.
function coloured(text, words, most) {
  const letters = Array.from(text), parts = []; // the server counts characters; a JavaScript string counts UTF-16 units
  let at = 0;
  for (const { start, end, share } of words) {
    const word = letters.slice(start, end).join("");
    parts.push(letters.slice(at, start).join(""), share ? paint(make("span", { class: "share", title: `${word} ${signed(share)}` }, word), share / most) : word);
    at = end;
  }
  return make("p", { class: "explained" }, parts, letters.slice(at).join(""));
}

// Each word's share in an answer, in its text and as a table; `texts` are what was sent, by the name of the field.
export function shares({ of, words, left_out: left }, texts) {
  const most = Math.max(...words.map(({ share }) => Math.abs(share)), 1e-9);
  const sorted = [...words].sort((a, b) => Math.abs(b.share) - Math.abs(a.share)), [first] = sorted;
  const what = of === "value" ? "the value" : `the probability of ${of}`;
  const shown = words.some((word) => word.in) ? ["text", "pair"] : ["text"];
  return make("section", { class: "shares", "aria-label": "Each word's share" },
    make("h2", {}, "Each word's share"),
    first?.share ? make("p", { class: "quiet" }, `Without “${first.word}”, ${what} would be ${Math.abs(first.share).toFixed(4)} ${first.share > 0 ? "lower" : "higher"}.`)
      : make("p", { class: "quiet" }, "No word alone changes the answer."),
    shown.map((name) => coloured(texts[name], words.filter((word) => (word.in || "text") === name), most)),
    make("p", { class: "scale" }, paint(make("span", {}), -1), "against", paint(make("span", {}), 0), paint(make("span", {}), 1), `for ${of === "value" ? "a higher value" : of}`),
    left ? make("p", { class: "quiet" }, `The first ${counted(words.length, "word")} are explained; ${counted(left, "more word")} ${left === 1 ? "is" : "are"} not.`) : null,
    words.length ? make("details", {}, make("summary", {}, "As a table"), make("table", { class: "plainly" },
      make("thead", {}, make("tr", {}, ["word", "share"].map((name) => make("th", { scope: "col" }, name)))),
      make("tbody", {}, sorted.map(({ word, share }) => make("tr", {}, make("td", {}, word), make("td", { class: "number" }, signed(share))))))) : null);
}

const HUES = 8;

// A text with its entities, or with the tag of each word: each type has a colour, the same in every text of the task.
export function tagged({ entities, words }, text, labels) {
  const parts = entities || words;
  if (!parts?.length) return null;
  const types = [...new Set((labels || []).map((label) => (entities ? label.replace(/^[BIESLU]-/, "") : label)))].filter((type) => type !== "O");
  const letters = Array.from(text), marked = []; // characters, as in `coloured`
  let at = 0;
  for (const { label, start, end, probability } of parts) {
    const place = types.indexOf(label), hue = place < 0 ? "" : ` hue-${place % HUES}`;
    marked.push(letters.slice(at, start).join(""), make("mark", { class: `${entities ? "entity" : "word"}${hue}`, title: `${label} ${percent(probability)}` },
      make("span", {}, letters.slice(start, end).join("")), make("small", {}, label, entities ? make("span", { class: "sure" }, percent(probability)) : null)));
    at = end;
  }
  const rows = parts.map((one) => make("tr", {}, make("td", {}, one.text), make("td", {}, one.label), make("td", { class: "number" }, percent(one.probability)), make("td", { class: "number" }, `${one.start}–${one.end}`)));
  return make("div", {}, make("p", { class: "tagged" }, marked, letters.slice(at).join("")),
    make("details", {}, make("summary", {}, "As a table"), make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Answers as a table" }, make("table", { class: "plainly" },
      make("thead", {}, make("tr", {}, [entities ? "entity" : "word", "label", "confidence", "characters"].map((name) => make("th", { scope: "col" }, name)))), make("tbody", {}, rows)))));
}
