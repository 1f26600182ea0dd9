// Rollouts: search the index of groups, and see one task over versions.

import { get, request } from "./api.js";
import { curveCard } from "./charts.js";
import { buttons, card, clean, download, empty, h, replace, say } from "./dom.js";
import { MISSING, number, when } from "./format.js";

const FIELDS = ["text", "family", "cause", "worker", "task", "version_min", "version_max", "reward_min", "reward_max", "failed", "dropped", "order"];
const PAGE = 50;

export function groupLink(home, row) {
  return `${home}/group/${encodeURIComponent(row.worker)}/${row.sequence}`;
}

export function reward(value, low = null, high = null) {
  if (value === null || value === undefined) return h("span", { class: "reward none" }, MISSING);
  const shade = value > 0.66 ? "high" : value > 0.33 ? "middle" : "low";
  const spread = low !== null && high !== null && low !== high ? h("small", {}, ` ${number(low)} to ${number(high)}`) : null;
  return h("span", { class: `reward ${shade}` }, h("b", {}, number(value)), spread);
}

function versions(row) {
  if (row.low === null) return MISSING;
  return row.low === row.high ? number(row.low) : `${number(row.low)} to ${number(row.high)}`;
}

export function groupRows(home, rows) {
  return rows.map((row) => h("tr", {},
    h("th", { scope: "row" }, h("a", { href: groupLink(home, row) }, row.task ? clean(row.task, 90) : `${row.worker}/${row.sequence}`), row.family ? h("small", {}, clean(row.family, 40)) : null),
    h("td", { class: "number" }, reward(row.status === "gone" || row.status === "damaged" ? null : row.reward, row.reward_min, row.reward_max)),
    h("td", { class: "number", "data-label": "trained by" }, row.trained === null ? (row.dropped === null ? h("span", { class: "quiet" }, "not used") : h("span", { class: "bad" }, `dropped at ${number(row.dropped)}`)) : number(row.trained)),
    h("td", { class: "number", "data-label": "drawn by" }, versions(row)),
    h("td", { class: "number", "data-label": "tokens" }, number(row.tokens)),
    h("td", { class: "number", "data-label": "answers" }, number(row.answers)),
    h("td", { "data-label": "" }, row.status === "gone" ? h("span", { class: "quiet" }, "deleted by retention") : row.status === "damaged" ? h("span", { class: "bad" }, "damaged") : row.failed ? h("span", { class: "bad" }, `${row.failed} failed: ${clean(row.cause, 60)}`) : row.overlong ? h("span", { class: "quiet" }, `${row.overlong} cut off`) : ""),
    h("td", { "data-label": "worker" }, `${row.worker}/${row.sequence}`)));
}

const HEAD = () => h("thead", {}, h("tr", {}, [["Task", ""], ["Reward", "number"], ["Trained by", "number"], ["Drawn by", "number"], ["Tokens", "number"], ["Answers", "number"], ["Notes", ""], ["Group", ""]].map(([name, kind]) => h("th", { scope: "col", class: kind || null }, name))));

export function rolloutsView(context) {
  const { base, home, query, setQuery, signal } = context;
  const values = Object.fromEntries(FIELDS.map((name) => [name, query.get(name) || ""]));
  let after = "", loaded = 0, asked = 0;
  const body = h("tbody", {}), more = h("button", { type: "button", class: "more", onclick: () => load(false) }, "Show more");
  const count = h("p", { class: "count", role: "status" });
  const selects = {};

  const input = (name, label, props = {}) => h("label", { class: props.class || "" }, h("span", {}, label),
    h("input", { name, value: values[name], ...props, class: null, oninput: (event) => { values[name] = event.target.value.trim(); later(); } }));
  const select = (name, label, options) => {
    selects[name] = h("select", { name, onchange: (event) => { values[name] = event.target.value; load(true); } }, options.map(([value, text]) => h("option", { value, selected: value === values[name] }, text)));
    return h("label", {}, h("span", {}, label), selects[name]);
  };
  const check = (name, label) => h("label", { class: "check" }, h("input", { type: "checkbox", name, checked: values[name] === "true", onchange: (event) => { values[name] = event.target.checked ? "true" : ""; load(true); } }), h("span", {}, label));
  const form = h("form", { class: "filters", role: "search", "aria-label": "Filter groups", onsubmit: (event) => { event.preventDefault(); load(true); } },
    input("text", "Search", { type: "search", placeholder: "part of a task or a cause", class: "wide" }),
    select("family", "Family", [["", "all"]]),
    select("cause", "Failure", [["", "any"]]),
    select("worker", "Worker", [["", "all"]]),
    h("fieldset", {}, h("legend", {}, "Trained by version"), input("version_min", "from", { "aria-label": "Oldest version", inputmode: "numeric", size: 6 }), input("version_max", "to", { "aria-label": "Newest version", inputmode: "numeric", size: 6 })),
    h("fieldset", {}, h("legend", {}, "Reward"), input("reward_min", "from", { "aria-label": "Lowest reward", inputmode: "decimal", size: 5 }), input("reward_max", "to", { "aria-label": "Highest reward", inputmode: "decimal", size: 5 })),
    select("order", "Order", [["", "newest first"], ["oldest", "oldest first"], ["best", "highest reward"], ["worst", "lowest reward"], ["longest", "most tokens"]]),
    check("failed", "with failures"), check("dropped", "dropped"),
    h("button", { type: "button", class: "small", onclick: () => { setQuery({}); context.go(`${home}/rollouts`); } }, "Clear"));
  const tools = buttons(["CSV", "Download all groups of this list", async () => { say("preparing the file"); download("groups.csv", await (await request(`${base}/groups.csv`, filters())).blob()); }]);
  const table = card("Groups", { id: "groups", tools, wide: true, caption: "A group is the answers to one prompt. Open one to read it." }, count, h("div", { class: "scroll" }, h("table", { class: "groups" }, HEAD(), body)), more);
  const element = h("div", { class: "view rollouts" }, h("h1", { class: "sr" }, "Rollouts"), form, table);

  let waiting = null;
  function later() { clearTimeout(waiting); waiting = setTimeout(() => load(true), 250); }
  const filters = () => Object.fromEntries(Object.entries(values).filter(([, value]) => value));

  async function load(anew) {
    const turn = ++asked;
    if (anew) { after = ""; setQuery(filters()); }
    try {
      const found = await get(`${base}/groups`, { ...filters(), after, limit: PAGE }, signal);
      if (turn !== asked) return;
      if (anew) { replace(body); loaded = 0; }
      body.append(...groupRows(home, found.rows));
      loaded += found.rows.length;
      after = found.next;
      more.hidden = !after;
      const total = found.count > 10_000 ? "more than 10,000" : number(found.count);
      count.textContent = found.count ? `${number(loaded)} of ${total} groups` : "No group matches.";
      count.classList.remove("bad");
    } catch (error) {
      if (error.name === "AbortError") return;
      replace(body);
      count.textContent = clean(`${error.message} ${error.hint || ""}`, 300);
      count.classList.add("bad");
    }
  }

  async function facets() {
    const found = await get(`${base}/facets`, {}, signal);
    for (const [name, all, list] of [["family", "all", found.families], ["cause", "any", found.causes], ["worker", "all", found.workers]]) {
      const known = list.some(([value]) => value === values[name]);
      const options = [["", all], ...(values[name] && !known ? [[values[name], values[name]]] : []), ...list.map(([value, groups]) => [value, `${clean(value, 50)} (${number(groups)})`])];
      if (selects[name].dataset.key === JSON.stringify(options)) continue;
      selects[name].dataset.key = JSON.stringify(options);
      replace(selects[name], options.map(([value, text]) => h("option", { value, selected: value === values[name] }, text)));
      selects[name].closest("label").hidden = options.length < 2;
    }
    const behind = found.groups - found.read;
    context.setLive(behind > 0 ? "busy" : "on", behind > 0 ? `${number(found.read)} of ${number(found.groups)} groups read` : `${number(found.groups)} groups`);
  }

  return {
    element,
    live: true,
    async refresh(first) {
      await facets();
      // A list that somebody reads must not move: only its first page follows the run.
      if (first || (loaded <= PAGE && scrollY < 100 && !element.contains(document.activeElement))) await load(true);
    },
  };
}

export function taskView(context) {
  const { base, home, query, signal } = context;
  const task = query.get("task") || "";
  const body = h("tbody", {});
  const chart = curveCard({ id: "task-reward", title: "Reward by version", caption: "Mean reward of each group of this task, at the version that was trained on it.", series: [{ key: "reward", label: "mean", color: "second", sparse: true }, { key: "high", label: "highest", color: "good", points: true }, { key: "low", label: "lowest", color: "alarm", points: true }] });
  const note = h("p", { class: "count" });
  const element = h("div", { class: "view" }, h("div", { class: "title" }, h("div", {}, h("p", { class: "eyebrow" }, h("a", { href: `${home}/rollouts` }, "Rollouts"), " / task"), h("h1", {}, clean(task, 200)))), chart.element,
    card("Groups of this task", { id: "groups", wide: true }, note, h("div", { class: "scroll" }, h("table", { class: "groups" }, HEAD(), body))));
  return {
    element,
    live: false,
    async refresh() {
      const found = await get(`${base}/groups`, { task, limit: 500 }, signal);
      const rows = found.rows.filter((row) => row.trained !== null && row.reward_min !== null).sort((a, b) => a.trained - b.trained);
      const by = new Map();
      for (const row of rows) by.set(row.trained, row);
      const x = [...by.keys()];
      chart.update({ x, columns: { reward: x.map((at) => by.get(at).reward), high: x.map((at) => by.get(at).reward_max), low: x.map((at) => by.get(at).reward_min) } });
      replace(body, groupRows(home, found.rows));
      note.textContent = found.next ? `The newest ${found.rows.length} groups` : `${found.rows.length} groups`;
      if (!found.rows.length) note.append(" of this task are in the index yet.");
    },
  };
}
