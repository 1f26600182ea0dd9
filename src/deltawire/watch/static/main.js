// The page's frame: routes, navigation, theme, and the refresh of a run that goes on.

import { get, takeToken } from "./api.js";
import { redrawAll } from "./charts.js";
import { clean, h, replace } from "./dom.js";
import { compareView } from "./compare.js";
import { groupView } from "./group.js";
import { overviewView } from "./overview.js";
import { rolloutsView, taskView } from "./rollouts.js";
import { versionView, weightsView } from "./weights.js";

const REFRESH_MS = 3000;
const VIEWS = [["overview", "Overview"], ["rollouts", "Rollouts"], ["weights", "Weights"]];
const ROUTES = [
  [/^\/run\/(\d+)\/overview$/, "overview", overviewView],
  [/^\/run\/(\d+)\/rollouts$/, "rollouts", rolloutsView],
  [/^\/run\/(\d+)\/group\/([^/]+)\/(\d+)$/, "rollouts", groupView],
  [/^\/run\/(\d+)\/task$/, "rollouts", taskView],
  [/^\/run\/(\d+)\/weights$/, "weights", weightsView],
  [/^\/run\/(\d+)\/weights\/(\d+)$/, "weights", versionView],
  [/^\/compare$/, "compare", compareView],
];

const main = document.getElementById("main");
const nav = document.getElementById("nav");
const live = document.getElementById("live");
let runs = [];
let view = null;
let stopped = new AbortController();

// Opens a page of this site without loading it anew. Views get it, so that they can link.
function go(path, { push = true } = {}) {
  if (push) history.pushState(null, "", path);
  show();
}

function setQuery(params) {
  const query = new URLSearchParams(Object.entries(params).filter(([, value]) => value !== "" && value !== null && value !== undefined && value !== false));
  history.replaceState(null, "", location.pathname + (query.size ? `?${query}` : ""));
}

function parts() {
  if (location.pathname === "/") return [runs.length ? `/run/0/overview` : "/compare", true];
  return [location.pathname, false];
}

async function show() {
  stopped.abort();
  stopped = new AbortController();
  const signal = stopped.signal;
  const [path, moved] = parts();
  if (moved) history.replaceState(null, "", path + location.search);
  const found = ROUTES.map(([pattern, name, build]) => [pattern.exec(path), name, build]).find(([match]) => match);
  const run = found && found[0][1] !== undefined ? Number(found[0][1]) : null;
  navigate(found ? found[1] : "", run);
  if (!found || (run !== null && !runs[run])) {
    replace(main, h("div", { class: "notice" }, h("h1", {}, "There is no such page"), h("p", {}, h("a", { href: "/" }, "To the overview"))));
    return;
  }
  document.title = clean(`${run === null ? "compare" : runs[run].name} · ${found[1]} · deltawire`, 100);
  const context = { run, base: run === null ? "" : `runs/${run}`, home: run === null ? "" : `/run/${run}`, runs, go, setQuery, signal, query: new URLSearchParams(location.search), match: found[0], setLive };
  try {
    view = found[2](context);
    replace(main, view.element);
    await view.refresh(true);
    main.dataset.ready = "1";
  } catch (error) {
    fail(error);
  }
}

function fail(error) {
  if (error.name === "AbortError") return;
  if (!error.hint && error.code === undefined) console.error(error);
  const box = h("div", { class: "notice bad", role: "alert" }, h("h1", {}, clean(error.message, 500)), error.hint ? h("p", {}, clean(error.hint, 500)) : null,
    h("button", { type: "button", onclick: () => location.reload() }, "Try again"));
  const known = main.querySelector(".notice.bad");
  if (known) known.replaceWith(box);
  else if (main.querySelector(".card")) main.prepend(box);
  else replace(main, box);
  setLive("bad", "not connected");
}

function setLive(kind, text) {
  live.className = `live ${kind}`;
  live.textContent = text;
}

function navigate(name, run) {
  delete main.dataset.ready;
  const shown = run === null ? Number(sessionStorage.getItem("run") || 0) : run;
  if (run !== null) sessionStorage.setItem("run", String(run));
  const items = runs[shown] ? VIEWS.map(([key, label]) => [key, label, `/run/${shown}/${key}`]) : [];
  items.push(["compare", "Compare", "/compare"]);
  replace(nav, items.map(([key, label, href]) => h("a", { href, "aria-current": key === name ? "page" : null }, label)));
  const place = document.getElementById("run");
  if (runs.length > 1) {
    const chosen = h("select", { "aria-label": "Run", onchange: (event) => go(location.pathname.startsWith("/run/") ? `/run/${event.target.value}/${["overview", "rollouts", "weights"].includes(name) ? name : "overview"}` : `/run/${event.target.value}/overview`) },
      runs.map((one) => h("option", { value: one.number, selected: one.number === shown }, `${clean(one.name, 40)}${runs.filter((other) => other.name === one.name).length > 1 ? ` · ${clean(one.url.split("/").pop(), 30)}` : ""}`)));
    replace(place, chosen);
  } else replace(place, runs[0] ? h("span", { class: "run-name", title: clean(runs[0].url) }, clean(runs[0].name, 60)) : "");
  setLive("", "");
}

function theme(next) {
  const root = document.documentElement;
  const order = ["auto", "light", "dark"];
  let chosen = localStorage.getItem("deltawire-theme") || "auto";
  if (next) chosen = order[(order.indexOf(chosen) + 1) % order.length];
  localStorage.setItem("deltawire-theme", chosen);
  if (chosen === "auto") delete root.dataset.theme;
  else root.dataset.theme = chosen;
  const button = document.getElementById("theme");
  button.textContent = { auto: "◐", light: "☀", dark: "☾" }[chosen];
  button.setAttribute("aria-label", `Color theme: ${chosen}`);
  button.title = `Color theme: ${chosen}`;
  redrawAll();
}

async function tick() {
  if (!document.hidden && view && view.live) {
    try {
      await view.refresh(false);
      main.querySelector(".notice.bad")?.remove();
    } catch (error) {
      fail(error);
    }
  }
  setTimeout(tick, REFRESH_MS);
}

document.addEventListener("click", (event) => {
  const link = event.target.closest("a[href]");
  if (!link || event.defaultPrevented || event.button || event.ctrlKey || event.metaKey || event.shiftKey || link.hasAttribute("download") || link.target) return;
  const href = link.getAttribute("href");
  if (!href.startsWith("/") || href.startsWith("/static/")) return;
  event.preventDefault();
  go(href);
  scrollTo(0, 0);
  main.focus({ preventScroll: true });
});
addEventListener("popstate", () => show());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
document.getElementById("theme").addEventListener("click", () => theme(true));

takeToken();
addEventListener("hashchange", () => { takeToken(); start(); });
theme(false);

async function start() {
  try {
    runs = await get("runs");
    await show();
  } catch (error) {
    fail(error);
  }
}

await start();
setTimeout(tick, REFRESH_MS);
