// Predictions for a text: one task in full, or all tasks as a sorted list.

import { bar, counted, empty, fill, find, make, percent } from "./dom.js";
import { odds, shares, tagged } from "./pictures.js";
import { Refused, ask, at } from "./server.js";
import { readsPair, tasks } from "./tasks.js";

const AT_ONCE = 64;
const LISTED = 6; // entities or words in one line
const PER_TOKEN = ["span", "tagging"]; // kinds whose answers have no shares of words
let turn = 0;
let late = ""; // the task of the address, if it is not served yet

const chosen = () => tasks().find((task) => task.name === find("try-task").value);

// Nothing can be sent until the tasks are known, or the prediction would be another task's.
export function wait() {
  turn += 1;
  late = "";
  find("try-go").disabled = true;
}

export function choose(name) {
  const before = find("try-task").value;
  offer(name ?? before);
  late = name && find("try-task").value !== name ? name : "";
  find("try-go").disabled = false;
  if (find("try-task").value !== before) find("try-result").replaceChildren();
}

export function renew() {
  if (late && tasks().some((task) => task.name === late)) choose(late); else offer(find("try-task").value);
}

function offer(name) {
  const select = find("try-task"), n = tasks().length;
  select.replaceChildren(make("option", { value: "" }, n === 1 ? "All tasks" : `All ${counted(n, "task")}`),
    ...tasks().map((task) => make("option", { value: task.name }, task.name)));
  select.value = tasks().some((task) => task.name === name) ? name : "";
  adapt();
}

function adapt() {
  const task = chosen(), some = tasks().filter(readsPair).length;
  const [first, second] = task?.text?.length === 2 ? task.text : ["Text", "Second text"];
  find("try-explain-row").hidden = !task || PER_TOKEN.includes(task.kind);
  find("try-pair-row").hidden = task ? !readsPair(task) : some === 0;
  find("try-pair").required = Boolean(task && readsPair(task));
  find("try-text-name").textContent = task && readsPair(task) ? first : "Text";
  find("try-pair-name").textContent = task ? second : "Second text (optional)";
  find("try-pair-hint").textContent = task ? "" : `${counted(some, "task")} ${some === 1 ? "reads" : "read"} two texts and ${some === 1 ? "is" : "are"} skipped without a second one.`;
}

function listed(parts) {
  const left = parts.length - LISTED;
  return parts.slice(0, LISTED).map(({ text, label }) => `${text} (${label})`).join(", ") + (left > 0 ? ` and ${left} more` : "");
}

const shown = (found) => {
  if (!empty(found.label)) return found.label;
  if (found.labels) return found.labels.length ? found.labels.join(", ") : "no label";
  if (!empty(found.value)) return String(Number(found.value.toFixed(4)));
  if (!empty(found.answer)) return found.answer || "no answer";
  const parts = found.entities || found.words;
  if (parts) return parts.length ? listed(parts) : found.words ? "no word" : "no entity";
  const rest = Object.entries(found).filter(([name]) => !["task", "version", "probabilities", "explanation", "windows", "truncated"].includes(name));
  return rest.length ? rest.map(([name, value]) => `${name}: ${JSON.stringify(value)}`).join(", ") : "–";
};

// How much of a long text was read.
const reading = ({ windows, truncated }) => (windows ? `, read in ${windows} windows` : "") + (truncated ? ", a part of the text was not read" : "");

function confidence(found) {
  const p = found.probabilities;
  if (!p) return null;
  if (!empty(found.label)) return p[found.label] ?? null;
  return Object.values(p).length ? Math.max(...Object.values(p)) : null;
}

function inContext(found, context) {
  if (empty(found.start) || empty(found.end) || found.end <= found.start) return null;
  // The server counts characters; a JavaScript string counts UTF-16 units.
  const letters = Array.from(context);
  return make("p", {}, letters.slice(0, found.start).join(""), make("mark", {}, letters.slice(found.start, found.end).join("")), letters.slice(found.end).join(""));
}

async function askOne(task, text, pair) {
  const body = { text, ...(readsPair(task) ? { pair } : {}), ...(find("try-explain").checked && !find("try-explain-row").hidden ? { explain: true } : {}) };
  const found = await ask(`${at(task.name)}/predict`, { method: "POST", body });
  const one = found.predictions[0];
  return make("div", { class: "card" }, make("p", { class: "prediction" }, shown(one)),
    make("p", { class: "quiet" }, `${found.task}, version ${found.version}${reading(one)}`), inContext(one, pair), tagged(one, text, task.labels), one.probabilities ? odds(one.probabilities) : null,
    one.explanation ? shares(one.explanation, { text, pair }) : null);
}

// One refused row fails its whole request: split the request in halves until that row is alone, so that the others are answered.
async function askRows(rows) {
  try {
    return (await ask("v1/predict", { method: "POST", body: { rows } })).predictions;
  } catch (error) {
    if (!(error instanceof Refused) || [0, 401, 403, 429].includes(error.status)) throw error;
    if (rows.length === 1) return [{ task: rows[0].task, refused: error.message }];
    const half = rows.length >> 1;
    return [...await askRows(rows.slice(0, half)), ...await askRows(rows.slice(half))];
  }
}

function answer(found) {
  const share = confidence(found);
  return make("li", { class: "answer" },
    make("a", { class: "source", href: `#try/${encodeURIComponent(found.task)}` }, found.task),
    make("span", { class: "what" }, found.refused ? found.refused : make("b", {}, shown(found))),
    ...(share === null ? [make("span", {}), make("span", {})] : [bar(share), make("span", { class: "number" }, percent(share))]));
}

async function askAll(text, pair, mine, tell) {
  if (!tasks().length) return make("div", {}, make("h2", {}, "The bank has no tasks yet"), make("p", {}, make("a", { href: "#train" }, "Train one"), ", then try it here."));
  const asked = tasks().filter((task) => pair || !readsPair(task));
  const rows = asked.map((task) => (readsPair(task) ? { task: task.name, text, pair } : { task: task.name, text }));
  const found = [];
  for (let k = 0; k < rows.length; k += AT_ONCE) {
    found.push(...await askRows(rows.slice(k, k + AT_ONCE)));
    if (mine !== turn) return null;
    tell(`${found.length} of ${counted(rows.length, "task")}…`);
  }
  found.sort((a, b) => Boolean(a.refused) - Boolean(b.refused) || (confidence(b) ?? -1) - (confidence(a) ?? -1) || a.task.localeCompare(b.task));
  const list = make("ul", { class: "rows" }), left = tasks().length - asked.length;
  fill(list, found, answer);
  return make("div", {}, make("h2", {}, `${counted(found.length, "task")}, most confident first`),
    left ? make("p", { class: "quiet" }, `${counted(left, "task")} skipped, because there is no second text.`) : null, list);
}

async function go(event) {
  event.preventDefault();
  if (find("try-go").disabled) return; // the keyboard submits even a disabled form
  const result = find("try-result"), button = find("try-go"), mine = (turn += 1);
  late = "";
  const text = find("try-text").value, pair = find("try-pair-row").hidden ? "" : find("try-pair").value;
  const tell = (words) => result.replaceChildren(make("p", { class: "quiet" }, words));
  button.disabled = true;
  tell("Predicting…");
  try {
    const task = chosen();
    const found = task ? await askOne(task, text, pair) : await askAll(text, pair, mine, tell);
    if (mine === turn && found) {
      result.replaceChildren(found);
      find("try-status").textContent = found.querySelector(".prediction, h2").textContent;
    }
  } catch (error) {
    if (mine === turn) result.replaceChildren(make("p", { class: "note bad", role: "alert" }, error.message));
  } finally {
    if (mine === turn) button.disabled = false;
  }
}

// The answer to a text that is gone is gone too, also one that is still on its way.
function clear() {
  const pair = find("try-pair");
  if (find("try-text").value.trim() && !(pair.required && !pair.value.trim())) return;
  turn += 1;
  find("try-result").replaceChildren();
  find("try-status").textContent = "";
  find("try-go").disabled = false;
}

export function start() {
  for (const id of ["try-text", "try-pair"]) find(id).addEventListener("input", clear);
  find("try-form").addEventListener("submit", go);
  find("try-task").addEventListener("change", () => { wait(); choose(); find("try-result").replaceChildren(); });
  find("try-form").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) find("try-form").requestSubmit();
  });
}
