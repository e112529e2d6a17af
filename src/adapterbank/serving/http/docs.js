// The page /docs: sends what a reader enters to this server, and shows the answer as text. Loads nothing else.
"use strict";

const KEY = "adapterbank-key"; // for this tab only, as on the page of tasks
const MOST = 100000; // characters of an answer that are shown

function headers(more) {
  const key = sessionStorage.getItem(KEY);
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

async function readPart(response, show) {
  const reader = response.body.getReader(), decoder = new TextDecoder();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return text;
    text += decoder.decode(value, { stream: true });
    if (text.length > MOST) {
      reader.cancel();
      return `${text.slice(0, MOST)}\n…`;
    }
    show(text);
  }
}

function pretty(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}

async function tryCall(form) {
  const { method, path } = form.dataset, output = form.querySelector("output"), fields = form.elements;
  if (method === "DELETE" && !confirm("Send this? It removes or cancels something.")) return;
  let address = path.slice(1);
  for (const input of form.querySelectorAll("[data-part]")) {
    address = address.replace(`{${input.name}}`, encodeURIComponent(input.value));
  }
  const query = fields.query ? fields.query.value.trim().replace(/^\?/, "") : "";
  const file = fields.file ? fields.file.files[0] : undefined;
  const body = fields.body ? fields.body.value : file;
  const type = fields.body ? "application/json" : file ? file.type || "text/csv" : "";
  output.textContent = "…";
  try {
    const asked = { method, body, headers: headers(type ? { "Content-Type": type } : {}) };
    const response = await fetch(query ? `${address}?${query}` : address, asked);
    const head = `${response.status} ${response.statusText}\n`;
    const text = await readPart(response, (part) => { output.textContent = head + part; });
    output.textContent = head + pretty(text);
  } catch (error) {
    output.textContent = `No answer: ${error.message}`;
  }
}

async function openWithKey(form) {
  sessionStorage.setItem(KEY, form.elements.key.value.trim());
  const output = form.querySelector("output");
  if (!form.dataset.closed) {
    output.textContent = "The key is sent with each call from this tab.";
    return;
  }
  const response = await fetch("docs", { headers: headers({ Accept: "text/html" }) });
  if (response.ok) {
    document.body.replaceWith(new DOMParser().parseFromString(await response.text(), "text/html").body);
  } else {
    sessionStorage.removeItem(KEY);
    output.textContent = response.status === 401 ? "This server does not know the key." : `The server responded with ${response.status}.`;
  }
}

document.addEventListener("submit", (event) => {
  event.preventDefault();
  const form = event.target;
  if (form.dataset.path) tryCall(form);
  else openWithKey(form).catch((error) => { form.querySelector("output").textContent = `No answer: ${error.message}`; });
});
