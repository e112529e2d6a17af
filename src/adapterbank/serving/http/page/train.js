// Training: a file's columns, the upload, the list of runs, and one run in progress.

import { age, bar, counted, empty, find, make, score, size } from "./dom.js";
import { chart } from "./charts.js";
import { Refused, ask, at, follow } from "./server.js";
import { tasks } from "./tasks.js";
import { columnsOf, formatOf, guess } from "./columns.js";
import { unpacked } from "./decoding.js";

let leave = null; // stops following the run that is shown
let read = 0;
let report = null; // shows an error
let charts = {}; // of the run that is shown
let defaults = null; // the options that the server states, by name
const FIELDS = { size: "train-size", epochs: "train-epochs", max_length: "train-length", lr: "train-lr", batch: "train-batch", class_weights: "train-weights", long: "train-long", seed: "train-seed",
  text: "train-texts", label: "train-labels", label_separator: "train-label-separator", separator: "train-separator", header: "train-header", drop_unlabelled: "train-drop" };

const OVER = ["done", "failed", "cancelled"];
const option = (value, text = value) => make("option", { value }, text);

// The defaults and limits of each field are those of the server's own document, which are the shell's.
async function offerDefaults() {
  if (defaults) return;
  const found = await ask("openapi.json"), route = found.paths["/v1/tasks/{task}/train"]?.post;
  defaults = Object.fromEntries((route?.parameters || []).map((one) => [one.name, one]));
  for (const [name, id] of Object.entries(FIELDS)) {
    const field = find(id), { schema = {}, description = "" } = defaults[name] || {};
    field.title = description;
    if (schema.enum && !field.options?.length) field.replaceChildren(...schema.enum.map((choice) => option(choice === schema.default ? "" : choice, choice)));
    else {
      if (field.type === "number") field.placeholder = empty(schema.default) ? "" : `${schema.default} (default)`;
      if (!empty(schema.minimum)) field.min = schema.minimum;
      if (!empty(schema.maximum)) field.max = schema.maximum;
    }
  }
}

async function chooseFile() {
  const packed = find("train-file").files[0], mine = (read += 1);
  find("train-columns").hidden = true;
  hint();
  if (!packed) return;
  const file = await unpacked(packed), stated = find("train-separator").value;
  const { columns, rows } = await columnsOf(file, { separator: stated === "tab" ? "\t" : stated, header: find("train-header").value !== "false" });
  if (mine !== read || !columns.length) return;
  const { text, pair, label } = guess(columns);
  find("train-text").replaceChildren(...columns.map((name) => option(name)));
  find("train-pair").replaceChildren(option("", "none"), ...columns.map((name) => option(name)));
  find("train-label").replaceChildren(...columns.map((name) => option(name)));
  find("train-text").value = text;
  find("train-pair").value = pair;
  find("train-label").value = label;
  find("train-preview").replaceChildren(make("table", { class: "plainly" },
    make("thead", {}, make("tr", {}, columns.map((name) => make("th", { scope: "col" }, name)))),
    make("tbody", {}, rows.map((row) => make("tr", {}, columns.map((_, k) => make("td", {}, (row[k] ?? "").slice(0, 120))))))));
  find("train-columns").hidden = false;
  if (!find("train-name").value) find("train-name").value = file.name.replace(/\.(csv|tsv|jsonl|parquet|conllu?|iob|bio|txt)$/i, "").replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^[^A-Za-z0-9]+/, "");
  hint();
}

function hint() {
  const name = find("train-name").value, known = tasks().find((task) => task.name === name);
  const files = ["train-file", "train-dev", "train-test"].map((id) => find(id).files[0]).filter(Boolean);
  find("train-hint").textContent = [
    files.length ? `${files.map((file) => `${file.name}, ${size(file.size)}`).join("; ")}.` : "",
    known ? `${name} is in the bank; this run adds a new version.` : "",
  ].filter(Boolean).join(" ");
}

async function upload(event) {
  event.preventDefault();
  const name = find("train-name").value, button = find("train-go");
  const [file, dev, test] = await Promise.all(["train-file", "train-dev", "train-test"].map((id) => unpacked(find(id).files[0])));
  const others = [["dev", dev], ["test", test]].filter(([, one]) => one);
  const query = new URLSearchParams({ format: formatOf(file.name) });
  for (const [split, other] of others) {
    if (formatOf(other.name) !== formatOf(file.name)) throw new Refused(`The ${split} file is ${formatOf(other.name)}, but the training file is ${formatOf(file.name)}; choose files of one format.`, "", 0);
    if (!other.size) throw new Refused(`The ${split} file ${other.name} is empty; choose another one, or none.`, "", 0);
    query.set(`${split}_bytes`, other.size);
  }
  if (!find("train-columns").hidden) {
    query.set("text", find("train-text").value);
    query.set("label", find("train-label").value);
    if (find("train-pair").value && !find("train-texts").value) query.set("text_pair", find("train-pair").value);
  }
  for (const [name, field] of Object.entries(FIELDS)) {
    if (find(field).value) query.set(name, find(field).value);
  }
  button.disabled = true;
  button.textContent = "Sending…";
  try {
    const run = await ask(`${at(name)}/train?${query}`, { method: "POST", file: others.length ? new Blob([file, ...others.map(([, other]) => other)]) : file });
    location.hash = `#run/${encodeURIComponent(run.id)}`;
  } finally {
    button.disabled = false;
    button.textContent = "Train";
  }
}

const badge = (state) => make("span", { class: `badge ${state}` }, state);

export async function showRuns() {
  find("train-names").replaceChildren(...tasks().map((task) => option(task.name)));
  hint();
  await listRuns();
  if (!find("train-form").hidden) await offerDefaults();
}

export async function listRuns() {
  let found;
  try {
    found = (await ask("v1/runs")).runs;
  } catch (error) {
    if (error.code !== "not_found") throw error;
    find("train-form").hidden = true;
    find("runs").replaceChildren(make("p", { class: "note" }, "This server does not train: training is turned off, or the bank is read-only."));
    return;
  }
  const focused = find("runs").contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  find("runs").replaceChildren(found.length ? make("ul", { class: "rows" }, found.slice(0, 50).map((run) => make("li", {},
    make("a", { href: `#run/${encodeURIComponent(run.id)}` }, run.task), " ", badge(run.state), " ",
    make("span", { class: "quiet" }, [age(run.created), best(run)].filter(Boolean).join(" · ")))))
    : make("p", { class: "quiet" }, "No runs yet."));
  if (focused) [...find("runs").querySelectorAll("a")].find((link) => link.getAttribute("href") === focused)?.focus();
}

const scored = (run) => (run.history || []).filter((one) => !empty(one.score));
const best = (run) => (scored(run).length ? `best on dev ${score(Math.max(...scored(run).map((one) => one.score)))}` : "");

function progressOf(run) {
  const { epoch = 0, epochs = 0, step = 0, steps = 0, rows_per_second: speed } = run.progress || {};
  if (!steps) return make("p", { class: "quiet" }, run.state === "queued" ? "Waiting in the queue." : "Preparing the data.");
  const words = [`epoch ${epoch} of ${epochs}`, `step ${step} of ${steps}`, speed ? `${Math.round(speed)} rows per second` : ""];
  return make("div", {}, bar(step / steps, `${Math.round((step / steps) * 100)} % done`), make("p", { class: "quiet" }, words.filter(Boolean).join(" · ")));
}

// The first metric of each split, which is the task's own, with the rows behind it.
function scores(metrics) {
  const found = Object.entries(metrics || {}).map(([split, { rows, ...rest }]) => {
    const [metric, value] = Object.entries(rest).find(([, one]) => typeof one === "number") || [];
    return metric ? `${metric} ${score(value)} on ${rows ? counted(rows, `${split} row`) : split}` : "";
  }).filter(Boolean);
  return found.length ? `${found.join(", ")}. ` : "";
}

function ending(run) {
  if (run.state === "failed") return make("p", { class: "note bad", role: "alert" }, run.failure || "The run failed.");
  if (run.state === "cancelled") return make("p", { class: "note" }, "The run was cancelled; the bank has not changed.");
  if (run.state !== "done") return null;
  const name = encodeURIComponent(run.task);
  return make("p", { class: "note", role: "status" }, `Version ${run.version ?? ""} of ${run.task} is ${run.options?.default === "better" ? "in the bank" : "served"}. `, scores(run.metrics),
    make("a", { href: `#try/${name}` }, "Try it"), " · ", make("a", { href: `#task/${name}` }, "Details"));
}

function render(run, steps) {
  const history = run.history || [], epochs = run.progress?.epochs || Number(run.options?.epochs) || history.length || 1;
  const points = (key) => history.filter((one) => !empty(one[key])).map((one) => [one.epoch, one[key]]);
  find("run-title").replaceChildren(run.task, " ", badge(run.state));
  const cancel = make("button", { type: "button", class: "second", onclick: () => { cancel.disabled = true; ask(`v1/runs/${encodeURIComponent(run.id)}`, { method: "DELETE" }).catch(report); } }, "Cancel the run");
  const options = Object.entries(run.options || {}).map(([name, value]) => `${name}=${value}`).join(" ");
  find("run-body").replaceChildren(...[
    make("p", { class: "quiet" }, [`run ${run.id}`, options].filter(Boolean).join(" · ")),
    ending(run),
    ...(run.notes || []).map((note) => make("p", { class: "quiet" }, note)),
    OVER.includes(run.state) ? null : make("div", { class: "card" }, progressOf(run), make("div", { class: "actions" }, cancel)),
    charts.card,
    history.length ? make("details", { class: "card" }, make("summary", {}, counted(history.length, "epoch")), table(history)) : null,
  ].filter(Boolean));
  charts.loss.update(points("loss"), epochs, steps);
  charts.score.update(points("score"), epochs);
}

const table = (history) => make("table", { class: "plainly" },
  make("thead", {}, make("tr", {}, ["epoch", "loss", "dev score", "seconds"].map((name) => make("th", { scope: "col" }, name)))),
  make("tbody", {}, history.map((one) => make("tr", {}, [String(one.epoch), score(one.loss), score(one.score), empty(one.seconds) ? "" : one.seconds.toFixed(1)].map((cell) => make("td", { class: "number" }, cell))))));

export async function showRun(id, finished) {
  stop();
  const mine = (leave = new AbortController()), path = `v1/runs/${encodeURIComponent(id)}`;
  charts = { loss: chart("loss", "Loss on the training data", "loss", "After the first steps."), score: chart("score", "Score on dev", "score", "After the first epoch.") };
  charts.card = make("div", { class: "card curves" }, charts.loss.figure, charts.score.figure);
  find("run-title").textContent = "Run";
  find("run-body").replaceChildren();
  let run = await ask(path), steps = [], waiting = false, requested = 0, received = 0;
  const paint = () => {
    if (waiting || mine.signal.aborted) return;
    waiting = true; // draw at most once per frame
    requestAnimationFrame(() => { waiting = false; if (!mine.signal.aborted) render(run, steps); });
  };
  const reload = async () => {
    const turn = (requested += 1), found = await ask(path, { signal: mine.signal });
    if (turn < received) return; // a later request has been answered: this state is older
    received = turn;
    run = found;
    paint();
  };
  const onEvent = (kind, data) => {
    if (kind === "state") { reload().catch(() => {}); return; }
    run = { ...run, state: "running", progress: { ...run.progress, ...data } };
    if (data.steps && !empty(data.loss) && empty(data.score)) steps.push([(data.step / data.steps) * data.epochs, data.loss]);
    if (steps.length > 1500) steps = steps.filter((_, k) => k % 2 === 0);
    if (empty(data.score)) paint(); else reload().catch(() => {});
  };
  paint();
  while (!OVER.includes(run.state) && !mine.signal.aborted) {
    try {
      await follow(id, onEvent, mine.signal);
    } catch (error) {
      if (mine.signal.aborted) return;
    }
    if (mine.signal.aborted) return;
    await reload(); // the stream has ended: the run is over, or the connection was lost
    if (!OVER.includes(run.state)) await new Promise((resolve) => setTimeout(resolve, 1000));
  }
  if (run.state === "done" && !mine.signal.aborted) await finished();
}

export function stop() {
  leave?.abort();
  leave = null;
}

export function start(show) {
  report = show;
  for (const id of ["train-file", "train-separator", "train-header"]) find(id).addEventListener("change", () => chooseFile().catch(report));
  for (const id of ["train-name", "train-dev", "train-test"]) find(id).addEventListener("input", hint);
  find("train-form").addEventListener("submit", (event) => upload(event).catch(report));
}
