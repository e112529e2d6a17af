// Figures as SVG or as a table: the parameters of all tasks, a run's curves, an ablation. Knows no server.

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

function ticks(low, high) {
  const raw = (high - low) / 3, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((k) => k * power).find((k) => k >= raw);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9; k += 1) found.push(k * step);
  return { found, digits: Math.max(0, Math.min(6, -Math.floor(Math.log10(step) + 1e-9) + (String(step / power).includes(".") ? 1 : 0))) };
}

// A curve over epochs: points [x, y]; `faint` holds the steps in between.
export function curve(kind, title, points, { epochs, faint = [], width = 420 }) {
  const all = [...points, ...faint];
  const label = points.length ? `${title} by epoch: ${points.map(([, y]) => y.toFixed(4)).join(", ")}` : `${title}: none yet`;
  const figure = make("figure", { class: `curve ${kind}` }, make("figcaption", {}, title));
  if (!all.length) {
    figure.append(make("p", { class: "quiet" }, kind === "score" ? "After the first epoch." : "After the first steps."));
    return figure;
  }
  const height = 190, left = 44, right = 14, top = 14, foot = 26;
  const ys = all.map(([, y]) => y);
  let low = Math.min(...ys), high = Math.max(...ys);
  const room = (high - low) * 0.12 || Math.abs(high) * 0.1 || 0.1;
  low = kind === "loss" ? Math.max(0, low - 2 * room) : low - room; // the last value stands below a falling curve
  high += kind === "loss" ? room : 2 * room;
  if (kind === "score" && Math.max(...ys) <= 1) high = Math.min(high, 1 + (1 - low) * 0.3); // leaves space for the label, not for higher scores
  const x = (value) => left + (value / Math.max(1, epochs)) * (width - left - right);
  const y = (value) => top + ((high - value) / (high - low)) * (height - top - foot);
  const path = (list) => list.map(([a, b], k) => `${k ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  const marks = ticks(low, high), most = Math.max(...ys) <= 1 && kind === "score" ? 1 : Infinity; // no tick above 1 if no score is above 1
  for (const value of marks.found.filter((one) => one <= most + 1e-9)) {
    svg.append(draw("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }),
      draw("text", { x: left - 7, y: y(value) + 4, "text-anchor": "end" }, value.toFixed(marks.digits)));
  }
  const stride = Math.ceil(epochs / 8);
  for (let epoch = 0; epoch <= epochs; epoch += stride) {
    svg.append(draw("text", { x: x(epoch), y: height - 6, "text-anchor": "middle" }, String(epoch)));
  }
  if (faint.length > 1) svg.append(draw("path", { class: "faint", d: path(faint) }));
  if (points.length) {
    svg.append(draw("path", { class: "line", d: path(points) }), ...points.map(([a, b]) => draw("circle", { class: "dot", cx: x(a), cy: y(b), r: points.length > 40 ? 1.5 : 3.5 })));
    const [a, b] = points.at(-1);
    svg.append(draw("text", { class: "last", x: Math.min(x(a), width - right - 4), y: kind === "loss" && y(b) + 24 < height - foot ? y(b) + 19 : y(b) - 10, "text-anchor": "end" }, b.toFixed(4)));
  }
  figure.append(svg, make("p", { class: "quiet" }, "epoch"));
  return figure;
}

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
