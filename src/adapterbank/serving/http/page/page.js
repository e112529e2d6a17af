// The page: shows the section that the address after the # names. Each section has a file of its own.

import { find } from "./dom.js";
import { dark } from "./pictures.js";
import { Refused, startKeys } from "./server.js";
import * as tasks from "./tasks.js";
import * as train from "./train.js";
import * as trying from "./try.js";

const EVERY = 10000;
const VIEWS = ["tasks", "task", "try", "train", "run"];
const PART = { task: "tasks", run: "train" };

let temporary = false; // whether the error that is shown disappears with the next successful refresh

function report(error, passes = false) {
  if (error.name === "AbortError") return;
  temporary = passes;
  const box = find("trouble");
  box.textContent = error instanceof Refused ? error.message : `Error on this page: ${error.message}`;
  box.hidden = false;
}

function address() {
  const [view, ...rest] = location.hash.slice(1).split("/");
  let name = rest.join("/");
  try { name = decodeURIComponent(name); } catch { /* a single per cent sign in the address */ }
  return VIEWS.includes(view) ? [view, name] : ["tasks", ""];
}

async function showTry(name) {
  trying.wait();
  try {
    await tasks.refresh();
    for (let k = 0; name && k < 6 && !tasks.tasks().some((task) => task.name === name); k += 1) {
      await new Promise((resolve) => setTimeout(resolve, 300)); // a task that was just trained is served a moment later
      await tasks.refresh();
    }
  } finally {
    if (address().join("/") === `try/${name}`) trying.choose(name || undefined); // unless the reader has moved on
  }
}

async function show() {
  const [view, name] = address(), here = location.hash;
  train.stop();
  find("trouble").hidden = true;
  for (const one of VIEWS) find(`view-${one}`).hidden = one !== view;
  document.querySelectorAll("nav a").forEach((link) => {
    if (link.hash === `#${PART[view] || view}`) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  });
  document.title = `${name || { tasks: "Tasks", try: "Try", train: "Train" }[view] || view} · adapterbank`;
  try {
    if (view === "task") await tasks.showTask(name);
    else if (view === "run") await train.showRun(name, tasks.refresh);
    else if (view === "try") await showTry(name);
    else {
      await tasks.refresh();
      if (view === "train") await train.showRuns();
    }
  } catch (error) {
    if (here === location.hash) report(error, true); // unless the reader has moved on
  }
}

async function look() {
  const [view] = address(), here = location.hash;
  if (document.hidden || !["tasks", "try", "train"].includes(view)) return;
  try {
    if (view === "train") await train.listRuns();
    else if (await tasks.refresh() && view === "try") trying.renew();
    if (here === location.hash && temporary) find("trouble").hidden = true;
  } catch (error) {
    if (here === location.hash) report(error, true);
  }
}

startKeys();
tasks.start();
trying.start();
train.start(report);
addEventListener("hashchange", () => { show(); scrollTo(0, 0); find("main").focus({ preventScroll: true }); });
document.addEventListener("visibilitychange", look);
dark.addEventListener("change", () => { if (address()[0] === "task") show(); }); // its colours do not come from the style sheet
setInterval(look, EVERY);
show();
