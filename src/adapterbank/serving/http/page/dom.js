// Creates elements and formats numbers. Values are inserted as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

export const find = (id) => document.getElementById(id);

function build(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export const make = (tag, attributes, ...children) => build(document.createElement(tag), attributes, children);
export const draw = (tag, attributes, ...children) => build(document.createElementNS(SVG, tag), attributes, children);

export function bar(share, label) {
  const width = Math.max(0, Math.min(1, share || 0)) * 100;
  const named = label ? { role: "img", "aria-label": label } : { "aria-hidden": "true" };
  return draw("svg", { class: "bar", viewBox: "0 0 100 10", preserveAspectRatio: "none", ...named },
    draw("rect", { width, height: 10 }));
}

export const empty = (value) => value === null || value === undefined;
export const score = (value) => (typeof value === "number" ? value.toFixed(4) : "–");
export const percent = (share) => `${(share * 100).toFixed(1)}\u00a0%`;
export const counted = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;

function scaled(value, step, units) {
  let k = 0;
  while (value >= step && k < units.length - 1) { value /= step; k += 1; }
  return `${k && value < 100 ? value.toPrecision(3) : Math.round(value)} ${units[k]}`.trim();
}

export const big = (n) => scaled(n, 1000, ["", "thousand", "million", "billion", "trillion"]);
export const size = (bytes) => scaled(bytes, 1000, ["bytes", "kB", "MB", "GB", "TB"]);

export function age(stamp) {
  const seconds = (Date.now() - Date.parse(stamp)) / 1000;
  if (!Number.isFinite(seconds)) return "";
  for (const [length, noun] of [[31557600, "year"], [2629800, "month"], [86400, "day"], [3600, "hour"], [60, "minute"]]) {
    if (seconds >= length) return `${counted(Math.floor(seconds / length), noun)} ago`;
  }
  return "just now";
}

// Shows the first rows of a long list, so that a thousand rows cost nothing until the reader asks for them.
export function fill(list, rows, render, first = 100) {
  const shown = rows.slice(0, first).map(render);
  list.replaceChildren(...shown);
  if (rows.length > first) {
    const more = make("button", { type: "button", class: "second" }, `Show all ${rows.length.toLocaleString("en")}`);
    const place = make("li", {}, more);
    more.addEventListener("click", () => { place.replaceWith(...rows.slice(first).map(render)); list.children[first]?.querySelector("a")?.focus(); });
    list.append(place);
  }
}
