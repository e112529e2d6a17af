// The server: requests, responses and event streams, with a key if the server requires one. Knows nothing of the sections.

import { find } from "./dom.js";

const KEY = "adapterbank-key";
const TRIES = 3;
const NEEDED = "Only people with a key may use this server. Ask the person who runs it for one.";
const WRONG = "This key is not valid here. Check that you copied all of it, or ask for a new one.";
const SIGNED_OUT = "You are not signed in. Reload the page to enter an API key.";
let asking = null; // one dialog for all requests that are refused together

export class Refused extends Error {
  constructor(message, code, status) {
    super(message);
    this.code = code;
    this.status = status;
  }
}

export const hasKey = () => Boolean(sessionStorage.getItem(KEY));

const headers = (more) => {
  const key = sessionStorage.getItem(KEY);
  return key ? { ...more, Authorization: `Bearer ${key}` } : { ...more };
};

const show = () => {
  const known = hasKey();
  find("forget-key").hidden = !known;
  document.querySelectorAll("footer a").forEach((link) => { link.hidden = known; }); // a link cannot send the key
};

export function startKeys() {
  find("forget-key").addEventListener("click", () => { sessionStorage.removeItem(KEY); location.reload(); });
  show();
}

function askForKey(why) {
  asking ||= new Promise((resolve) => {
    const dialog = find("key-dialog"), input = find("key-input");
    const answer = (key) => {
      dialog.close();
      asking = null;
      if (key) sessionStorage.setItem(KEY, key);
      show();
      resolve(Boolean(key));
    };
    find("key-why").textContent = why;
    find("key-why").className = hasKey() ? "note bad" : "quiet";
    input.value = "";
    find("key-form").onsubmit = (event) => { event.preventDefault(); answer(input.value.trim()); };
    find("key-cancel").onclick = () => answer("");
    dialog.oncancel = (event) => { event.preventDefault(); answer(""); };
    dialog.showModal();
    input.focus();
  });
  return asking;
}

async function refusal(response) {
  let error = null;
  try { error = (await response.json()).error; } catch { /* not an error of adapterbank's */ }
  const message = error?.message || `The server responded with ${response.status} ${response.statusText}.`;
  return new Refused(message, error?.code || "", response.status);
}

const sleep = (seconds) => new Promise((resolve) => setTimeout(resolve, seconds * 1000));

async function send(path, options) {
  for (let attempt = 1; ; attempt += 1) {
    const sent = sessionStorage.getItem(KEY);
    let response;
    try {
      response = await fetch(path, { ...options, headers: headers(options.headers) });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Refused("The server does not respond; is adapterbank serve still running?", "unreachable", 0);
    }
    if (response.ok) return response;
    const refused = await refusal(response);
    if (refused.status === 401) {
      if (sent !== sessionStorage.getItem(KEY)) continue; // another request has asked for the key meanwhile
      if (await askForKey(sent ? WRONG : NEEDED)) continue;
      throw new Refused(SIGNED_OUT, refused.code, refused.status);
    }
    const wait = Number(response.headers.get("Retry-After"));
    if (refused.status !== 429 || attempt >= TRIES || wait > 10) throw refused;
    await sleep(wait || attempt / 2);
  }
}

export async function ask(path, { method = "GET", body, file, signal } = {}) {
  const options = { method, signal };
  if (body !== undefined) {
    options.body = JSON.stringify(body);
    options.headers = { "Content-Type": "application/json" };
  } else if (file) {
    options.body = file;
    options.headers = { "Content-Type": "application/octet-stream" };
  }
  const response = await send(path, options);
  const text = await response.text();
  return text ? JSON.parse(text) : null;
}

export const at = (task) => `v1/tasks/${encodeURIComponent(task)}`;

// EventSource cannot send a key, so the stream is parsed here. Returns when the server ends it.
export async function follow(id, onEvent, signal) {
  const response = await send(`v1/runs/${encodeURIComponent(id)}/events`, { method: "GET", signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const lines = block.split("\n");
      const data = lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
      const kind = lines.find((line) => line.startsWith("event:"))?.slice(6).trim();
      if (data) onEvent(kind, JSON.parse(data));
    }
  }
}
