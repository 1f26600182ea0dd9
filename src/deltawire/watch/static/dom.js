// Builds elements. Text enters the page only as text nodes and attribute values, never as markup.

// Controls, and characters that reorder text, would let a name look like another one.
const UNSEEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;

export function clean(text, limit = Infinity) {
  const shown = String(text).replace(UNSEEN, "·");
  return shown.length > limit ? shown.slice(0, limit - 1) + "…" : shown;
}

export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  assign(element, props);
  append(element, children);
  return element;
}

export function svg(tag, props = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  assign(element, props);
  append(element, children);
  return element;
}

function assign(element, props) {
  for (const [name, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name === "value" && "value" in element) element.value = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(clean(child)));
  }
}

export function replace(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

let said;
export function say(text) {
  said = said || document.getElementById("said");
  said.textContent = "";
  setTimeout(() => { said.textContent = clean(text, 300); }, 30);
}

export function download(name, blob) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name.replace(/[^A-Za-z0-9._-]+/g, "-") });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// A text that a spreadsheet would run as a formula gets an apostrophe.
export function csv(rows) {
  const cell = (value) => {
    if (value === null || value === undefined) return "";
    if (typeof value === "number") return String(value);
    const text = /^[=+\-@\t\r]/.test(value) ? "'" + value : String(value);
    return /[",\n\r]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
  };
  return new Blob([rows.map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n"], { type: "text/csv" });
}

export function buttons(...items) {
  return h("div", { class: "tools" }, items.filter(Boolean).map(([label, title, action]) =>
    h("button", { type: "button", class: "small", title, onclick: action }, label)));
}

export function card(title, { caption, tools, id, wide, className } = {}, ...children) {
  const heading = h("h2", { id: id ? `${id}-title` : null }, title);
  return h("section", { class: `card${wide ? " wide" : ""} ${className || ""}`, id, "aria-labelledby": id ? `${id}-title` : null },
    h("div", { class: "card-head" }, h("div", {}, heading, caption ? h("p", {}, caption) : null), tools || null), children);
}

export function empty(text) {
  return h("p", { class: "empty" }, text);
}

export function state(name) {
  return h("span", { class: `state ${name}` }, h("i", { "aria-hidden": "true" }), name);
}
