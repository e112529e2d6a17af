// The tasks: the list with its filter, and the details of one task.

import { age, bar, big, counted, empty, fill, find, make, score, size } from "./dom.js";
import { heatmap, totals } from "./pictures.js";
import { ask, at, hasKey } from "./server.js";

const FEW = 8;
const LABELS = 6;
let listing = { backbone: {}, tasks: [], problems: [] };
let drawn = "";

export const tasks = () => listing.tasks;
export const readsPair = (task) => (task.text || []).length === 2;
export const method = (task) => [task.method, task.size].filter((part) => !empty(part)).join(" ");

const SORTS = {
  name: (a, b) => a.name.localeCompare(b.name, "en", { numeric: true }),
  score: (a, b) => (b.score ?? -Infinity) - (a.score ?? -Infinity),
  created: (a, b) => String(b.created).localeCompare(String(a.created)),
  trained: (a, b) => (b.params?.trained || 0) - (a.params?.trained || 0),
};

function chips(labels) {
  if (!labels?.length) return null;
  const left = labels.length - LABELS;
  const shown = left > 1 ? labels.slice(0, LABELS) : labels;
  return make("span", { class: "chips" }, shown.map((label) => make("span", { class: "chip" }, label)),
    left > 1 ? make("span", { class: "chip" }, `+ ${left}`) : null);
}

function row(task) {
  const share = task.score > 1 ? task.score / 100 : task.score;
  return make("li", { class: "task" },
    make("div", {}, make("a", { class: "name", href: `#task/${encodeURIComponent(task.name)}` }, task.name),
      " ", make("span", { class: "quiet" }, `v${task.version} · ${task.kind}${readsPair(task) ? " · two texts" : ""}`), chips(task.labels)),
    make("div", { class: "score" }, make("b", {}, score(task.score)), " ", make("span", { class: "quiet" }, task.metric), empty(task.score) ? null : bar(share),
      task.rows?.dev ? make("span", { class: "quiet" }, `on ${counted(task.rows.dev, "row")}`) : null),
    make("div", { class: "facts quiet" }, [method(task), `${(task.params?.percent ?? 0).toFixed(2)} %`, size(task.bytes || 0), age(task.created)].filter(Boolean).join(" · ")));
}

function show() {
  const wanted = find("tasks-filter").value.trim().toLowerCase().split(/\s+/);
  const matching = listing.tasks.filter((task) => {
    const words = [task.name, task.kind, task.metric, task.method, ...(task.labels || [])].join("\n").toLowerCase();
    return wanted.every((word) => words.includes(word));
  }).sort(SORTS[find("tasks-sort").value]);
  const all = listing.tasks.length;
  find("tasks-count").textContent = matching.length === all ? "" : matching.length ? `${matching.length} of ${counted(all, "task")}` : "No task matches the filter.";
  fill(find("tasks-list"), matching, row);
}

function problems() {
  const found = listing.problems || [];
  find("problems").replaceChildren(...(found.length ? [make("div", { class: "note bad", role: "status" },
    make("b", {}, `${counted(found.length, "task")} of the bank cannot be served`),
    make("ul", {}, found.map((one) => make("li", {}, make("b", {}, one.task), `: ${one.message}`))))] : []));
}

export async function refresh() {
  const found = await ask("v1/tasks");
  const text = JSON.stringify(found);
  if (text === drawn) return false;
  drawn = text;
  listing = found;
  const { name, parameters } = listing.backbone || {};
  const n = listing.tasks.length;
  const encoder = parameters || listing.tasks[0]?.params?.encoder || 0;
  find("tasks-about").textContent = name ? `One frozen encoder, ${name}${encoder ? ` (${big(encoder)} parameters)` : ""}, serves ${counted(n, "task")}.` : "";
  find("tasks-empty").hidden = n > 0;
  find("tasks-tools").hidden = n <= FEW;
  find("totals").hidden = n === 0 || !encoder;
  find("totals").replaceChildren(...(n && encoder ? totals(listing.tasks, encoder) : []));
  problems();
  show();
  return true;
}

const fact = (name, value) => (empty(value) || value === "" ? [] : [make("dt", {}, name), make("dd", {}, value)]);

function scores(metrics, own) {
  const rows = Object.entries(metrics || {}).flatMap(([split, found]) => Object.entries(found || {})
    .filter(([metric, value]) => typeof value === "number" && metric !== "rows")
    .map(([metric, value]) => make("tr", {}, make("td", {}, found.rows ? `${split}, ${counted(found.rows, "row")}` : split), make("td", {}, metric === own ? make("b", {}, metric) : metric), make("td", { class: "number" }, score(value)))));
  if (!rows.length) return null;
  return make("div", { class: "card" }, make("h2", {}, "Scores"), make("table", { class: "plainly" },
    make("thead", {}, make("tr", {}, ["split", "metric", "score"].map((name) => make("th", { scope: "col" }, name)))), make("tbody", {}, rows)));
}

export async function showTask(name) {
  find("task-title").textContent = name;
  find("task-body").replaceChildren();
  const found = await ask(at(name));
  if (find("task-title").textContent !== name) return; // another one is shown by now
  const spec = found.task || {}, how = found.method || {};
  const additions = Object.entries(how).filter(([key, value]) => key !== "head" && value?.layers);
  const added = additions.map(([, value]) => value.size ?? value.rank).find((size) => size !== undefined);
  const address = new URL(`${at(name)}/predict`, document.baseURI);
  const sample = JSON.stringify(spec.text?.length === 2 ? { text: "…", pair: "…" } : { text: "…" });
  find("task-body").replaceChildren(...[
    make("p", {}, make("a", { href: `#try/${encodeURIComponent(name)}` }, "Try a text")),
    make("div", { class: "card" }, make("dl", { class: "facts" },
      fact("kind", spec.kind), fact("reads", (spec.text || []).join(" and ")), fact("labels", spec.labels?.length ? make("span", { class: "chips" }, spec.labels.map((label) => make("span", { class: "chip" }, label))) : null),
      fact("metric", spec.metric), fact("method", [how.name, added].filter((part) => !empty(part)).join(" ")),
      fact("parameters", found.params ? `${big(found.params.trained)} trained, ${(found.params.percent ?? 0).toFixed(2)} % of the encoder` : ""),
      fact("size", found.bytes ? size(found.bytes) : ""), fact("created", found.created ? `${age(found.created)}, ${found.created.slice(0, 16).replace("T", " ")} UTC` : ""),
      fact("version", `${found.version}${(found.versions || []).length > 1 ? ` of ${found.versions.join(", ")}` : ""}`))),
    ...(found.notes || []).map((note) => make("p", { class: "note" }, note)),
    scores(found.metrics, spec.metric),
    found.ablation ? heatmap(found.ablation) : null,
    make("div", { class: "card" }, make("h2", {}, "From the shell"),
      make("pre", { tabindex: "0" }, make("code", {}, `curl ${address} \\\n${hasKey() ? "  -H 'Authorization: Bearer KEY' \\\n" : ""}  -H 'Content-Type: application/json' \\\n  -d '${sample}'`))),
  ].filter(Boolean));
}

export function start() {
  find("tasks-filter").addEventListener("input", show);
  find("tasks-sort").addEventListener("change", show);
  find("tasks-tools").addEventListener("submit", (event) => event.preventDefault());
}
