// A run's curves over its epochs, drawn by uPlot (uplot.js): ticks, a label for every line, values under the pointer. Knows no server.

import { make } from "./dom.js";
import { dark } from "./pictures.js";

const HEIGHT = 210;
const colour = (name) => () => getComputedStyle(document.body).getPropertyValue(`--${name}`).trim();
const WHOLE = [1, 2, 5].flatMap((k) => [1, 10, 100, 1000, 10000].map((power) => k * power)).sort((a, b) => a - b);
const shown = (_, value) => (value === null || value === undefined ? "–" : value.toFixed(4));
const axis = (label, more) => ({ label, stroke: colour("quiet"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line"), width: 1 }, font: "12px system-ui", labelFont: "12px system-ui", labelSize: 18, ...more });

const padded = (low, high) => { const room = (high - low || Math.abs(high) || 1) * 0.12; return [low - room, high + room]; }; // no point on the edge

// The points of both lines by their place; a place that a line does not have is null.
function columns(points, steps) {
  const places = [...new Set([...steps, ...points].map(([x]) => x))].sort((a, b) => a - b);
  const by = (list) => { const found = new Map(list); return places.map((x) => found.get(x) ?? null); };
  return [places, by(steps), by(points)];
}

function options(unit, ink, epochs, width) {
  const line = (label, more) => ({ label, stroke: colour(ink), spanGaps: true, value: shown, ...more });
  return {
    width,
    height: HEIGHT,
    scales: { x: { time: false, range: () => [0, epochs()] }, y: { range: (_, low, high) => padded(low ?? 0, high ?? 1) } },
    axes: [axis("epoch", { incrs: WHOLE, size: 34 }), axis(unit, { size: 58 })],
    series: [{ label: "epoch", value: (_, value) => (value === null || value === undefined ? "–" : Number(value.toFixed(2)).toString()) },
      line("each step", { width: 1, alpha: 0.5, points: { show: false } }),
      line("each epoch", { width: 2.2, points: { show: true, size: 7, fill: colour("card"), stroke: colour(ink) } })],
    cursor: { drag: { x: false, y: false } },
    legend: { live: true },
  };
}

// `update` takes points [epoch, value], the number of epochs, and the steps in between.
export function chart(kind, title, unit, waiting) {
  const plot = make("div", { class: "plot", role: "img" }), hint = make("p", { class: "quiet" }, waiting);
  const figure = make("figure", { class: `curve ${kind}` }, make("figcaption", {}, title), hint, plot);
  let drawn = null, last = 1;
  const width = () => Math.max(240, plot.clientWidth || 420);
  new ResizeObserver(() => { if (drawn && drawn.width !== width()) drawn.setSize({ width: width(), height: HEIGHT }); }).observe(plot);
  dark.addEventListener("change", () => drawn?.redraw(false, true));
  const update = (points, epochs, steps = []) => {
    last = Math.max(1, epochs);
    hint.hidden = points.length + steps.length > 0;
    plot.hidden = !hint.hidden;
    plot.setAttribute("aria-label", points.length ? `${title} by epoch: ${points.map(([, y]) => y.toFixed(4)).join(", ")}` : `${title}: none yet`);
    if (plot.hidden) return;
    const data = columns(points, steps);
    if (drawn) drawn.setData(data);
    else drawn = new uPlot(options(unit, kind === "loss" ? "accent" : "second", () => last, width()), data, plot);
    drawn.setLegend({ idx: data[0].length - 1 }); // the last values, until the pointer is at others
    drawn.root.querySelectorAll(".u-series")[1].hidden = !steps.length; // no label for a line that is not there
  };
  return { figure, update };
}
