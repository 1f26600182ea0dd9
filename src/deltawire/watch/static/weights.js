// Weights: versions, what each changed, and the route that a reader would take.

import { get } from "./api.js";
import { heatCard } from "./charts.js";
import { buttons, card, clean, csv, download, empty, h, replace } from "./dom.js";
import { MISSING, age, bytes, ms, number, percent } from "./format.js";

const MEASURES = [["bits", "bits an element"], ["share", "share changed"], ["norm", "update norm, relative"]];
const FORMATS = { bits: (value) => (value === null ? MISSING : `${value.toFixed(2)} bits`), share: (value) => percent(value, 2), norm: (value) => (value === null ? MISSING : value.toExponential(1)) };
const PAGE = 50;

export function weightsView(context) {
  const { base, home, go, query, setQuery, signal, runs, run } = context;
  let measure = MEASURES.some(([key]) => key === query.get("measure")) ? query.get("measure") : "bits";
  let newest = null, below = null;
  const rows = h("tbody", {}), more = h("button", { type: "button", class: "more", onclick: () => loadVersions(false) }, "Show older versions");
  const note = h("p", { class: "count", role: "status" });
  const choice = h("select", { "aria-label": "Measure", onchange: (event) => { measure = event.target.value; setQuery({ measure: measure === "bits" ? "" : measure }); loadMap().catch(() => {}); } }, MEASURES.map(([key, label]) => h("option", { value: key, selected: key === measure }, label)));
  const map = heatCard({ id: "layers", title: "Changes by layer and version", caption: "What deltas carry for each layer: bits are read from their tables; the share that changed and the norm are measured by decoding the newest deltas.", tools: choice, format: (value) => FORMATS[measure](value), onPick: (row, column) => go(`${home}/weights/${map.versions[column]}`) });
  const mapNote = h("p", { class: "count" });
  const versions = card("Versions", { id: "versions", wide: true, tools: buttons(["CSV", "Download the loaded versions", () => download("versions.csv", csv([["version", "kind", "delta", "anchor", "changed_share", "age_s"], ...listed.map((one) => [one.version, one.kind, one.delta, one.anchor, one.changed_share, one.age_s])]))]) }, note,
    h("div", { class: "scroll" }, h("table", { class: "versions" }, h("thead", {}, h("tr", {}, [["Version", ""], ["Kind", ""], ["Delta", "number"], ["Anchor", "number"], ["Changed", "number"], ["Trainer paused", "number"], ["Compacted from", ""], ["Age", "number"]].map(([name, kind]) => h("th", { scope: "col", class: kind || null }, name)))), rows)), more);
  const route = routeCard();
  const element = h("div", { class: "view weights" }, h("h1", { class: "sr" }, "Weights"), map.element, mapNote, h("div", { class: "grid" }, route.element, relays()), versions);
  const listed = [];

  function relays() {
    const id = runs[run].id;
    const copies = runs.filter((one) => one.id === id);
    const lead = Math.max(...copies.map((one) => one.version ?? -1));
    return card("Relays", { id: "relays", caption: "Buckets on this page that hold the same run." }, copies.length < 2 ? empty("None on this page. Give the URL of a relay's bucket to deltawire watch as well to see how far it lags.") :
      h("table", {}, h("thead", {}, h("tr", {}, ["Bucket", "Newest version", "Lag"].map((name, at) => h("th", { scope: "col", class: at ? "number" : null }, name)))),
        h("tbody", {}, copies.map((one) => h("tr", {}, h("th", { scope: "row" }, clean(one.url, 90)), h("td", { class: "number" }, number(one.version)), h("td", { class: "number" }, one.version === null ? MISSING : number(lead - one.version)))))));
  }

  function routeCard() {
    const held = h("input", { inputmode: "numeric", size: 8, placeholder: "nothing", "aria-label": "Version that the reader holds" });
    const goal = h("input", { inputmode: "numeric", size: 8, "aria-label": "Version that it wants" });
    const place = h("div", { "aria-live": "polite" });
    async function load(event) {
      event?.preventDefault();
      try {
        const found = await get(`${base}/route`, { held: held.value, goal: goal.value }, signal);
        const widest = Math.max(1, ...found.steps.map((step) => step.bytes));
        replace(place, found.error ? h("p", { class: "bad" }, clean(found.error, 300)) : [h("p", {}, h("b", {}, bytes(found.bytes)), ` in ${number(found.steps.length)} ${found.steps.length === 1 ? "object" : "objects"}`),
          h("ol", { class: "route" }, found.steps.slice(0, 60).map((step) => h("li", {}, h("span", { class: `tag ${step.kind}` }, step.kind), h("span", {}, step.base === null ? `→ ${step.target}` : `${step.base} → ${step.target}`), h("i", { style: { width: `${Math.max(1, 100 * step.bytes / widest)}%` }, "aria-hidden": "true" }), h("span", { class: "number" }, bytes(step.bytes))))),
          found.steps.length > 60 ? h("p", { class: "quiet" }, `and ${found.steps.length - 60} more`) : null]);
      } catch (error) {
        if (error.name !== "AbortError") replace(place, h("p", { class: "bad" }, clean(error.message, 300)));
      }
    }
    const form = h("form", { class: "inline", onsubmit: load }, h("label", {}, "Reader at ", held), h("label", {}, " wants ", goal), h("button", { type: "submit", class: "small" }, "Find route"));
    return { element: card("Route of a reader", { id: "route", caption: "The cheapest objects that lead from the version held to the version wanted." }, form, place), start(version) { if (!goal.value && version !== null) { goal.value = String(version); held.value = version > 12 ? String(version - 12) : ""; load(); } } };
  }

  async function loadMap() {
    mapNote.textContent = measure === "bits" ? "" : "Measuring…";
    try {
      const found = await get(`${base}/layers`, { measure, count: measure === "bits" ? 72 : 24 }, signal);
      map.versions = found.versions;
      map.update({ rows: found.rows, columns: found.versions, values: found.values });
      mapNote.textContent = "";
    } catch (error) {
      if (error.name !== "AbortError") mapNote.textContent = clean(`${error.message} ${error.hint || ""}`, 300);
    }
  }

  async function loadVersions(anew) {
    const found = await get(`${base}/versions`, { below: anew ? null : below, limit: PAGE }, signal);
    if (anew) { replace(rows); listed.length = 0; }
    listed.push(...found);
    rows.append(...found.map((one) => h("tr", {}, h("th", { scope: "row" }, h("a", { href: `${home}/weights/${one.version}` }, number(one.version))), h("td", {}, h("span", { class: one.kind === "damaged" || one.kind === "missing" ? "bad" : null }, one.kind)),
      h("td", { class: "number" }, one.delta ? bytes(one.delta) : MISSING), h("td", { class: "number" }, one.anchor ? bytes(one.anchor) : MISSING), h("td", { class: "number" }, percent(one.changed_share, 2)), h("td", { class: "number" }, ms(one.blocked_ms)), h("td", {}, one.compacted_from.join(", ")), h("td", { class: "number" }, age(one.age_s)))));
    below = found.length ? found.at(-1).version : 0;
    more.hidden = found.length < PAGE || !below;
    note.textContent = listed.length ? "" : "No version yet.";
    if (anew && found.length) { newest = found[0].version; route.start(newest); }
  }

  return {
    element,
    live: true,
    async refresh(first) {
      if (first) await Promise.all([loadVersions(true), loadMap()]);
      else if (listed.length <= PAGE && scrollY < 100) {
        const [top] = await get(`${base}/versions`, { limit: 1 }, signal);
        if (top && top.version !== newest) await Promise.all([loadVersions(true), measure === "bits" ? loadMap() : null]);
      }
      context.setLive("on", newest === null ? "" : `version ${number(newest)}`);
    },
  };
}

export function versionView(context) {
  const { base, home, signal, match } = context;
  const version = Number(match[2]);
  let measured = false;
  const element = h("div", { class: "view version" });

  async function refresh() {
    let found;
    try {
      found = await get(`${base}/versions/${version}`, { measure: measured ? 1 : "" }, signal);
    } catch (error) {
      if (error.code !== 400) throw error;
      replace(element, head(), h("p", { class: "notice" }, clean(`${error.message} ${error.hint || ""}`, 300)));
      return;
    }
    measured = found.measured;
    const layers = [...new Set(found.tensors.map((one) => one.layer))].filter((one) => one !== null).sort((a, b) => a - b);
    const parts = [...new Set(found.tensors.filter((one) => one.layer !== null).map((one) => one.part))];
    const grids = (measured ? MEASURES : MEASURES.slice(0, 1)).map(([key, label]) => {
      const value = (one) => (!one ? null : key === "bits" ? one.bits : key === "share" ? one.changed / Math.max(1, one.count) : one.relative);
      const by = new Map(found.tensors.map((one) => [`${one.layer} ${one.part}`, one]));
      const heat = heatCard({ id: `tensors-${key}`, title: label[0].toUpperCase() + label.slice(1), caption: "Rows are parts of a layer, columns are layers.", columnLabel: "layer", format: FORMATS[key] });
      heat.update({ rows: parts.map((part) => part.replace(/\.weight$/, "")), columns: layers, values: parts.map((part) => layers.map((layer) => value(by.get(`${layer} ${part}`)))) });
      return heat.element;
    });
    const button = h("button", { type: "button", class: "small", disabled: measured || !found.measurable, title: found.measurable ? "Decode this delta" : "The model is too large to be decoded here", onclick: async (event) => { event.currentTarget.textContent = "Measuring…"; event.currentTarget.disabled = true; measured = true; await refresh(); } }, measured ? "Measured" : "Measure changes");
    const columns = [["Tensor", ""], ["Shape", ""], ["Type", ""], ["Delta", "number"], ["Bits an element", "number"], ["Changed", "number"], ["Update norm", "number"], ["Relative", "number"]];
    replace(element, head(found, button), grids.length && layers.length ? h("div", { class: "stack" }, grids) : null,
      card("Tensors", { id: "tensors", wide: true, tools: buttons(["CSV", "Download the table", () => download(`version-${version}.csv`, csv([["name", "dtype", "count", "bytes", "bits", "changed", "norm", "relative"], ...found.tensors.map((one) => [one.name, one.dtype, one.count, one.bytes, one.bits, one.changed, one.norm, one.relative])]))]) },
        h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, columns.map(([name, kind]) => h("th", { scope: "col", class: kind || null }, name)))),
          h("tbody", {}, found.tensors.slice(0, 1000).map((one) => h("tr", {}, h("th", { scope: "row" }, h("code", {}, clean(one.name, 120))), h("td", {}, one.shape.join(" × ") || "scalar"), h("td", {}, one.dtype), h("td", { class: "number" }, bytes(one.bytes)), h("td", { class: "number" }, one.bits.toFixed(2)),
            h("td", { class: "number" }, one.changed === null ? MISSING : percent(one.changed / Math.max(1, one.count), 2)), h("td", { class: "number" }, one.norm === null ? MISSING : one.norm.toExponential(2)), h("td", { class: "number" }, one.relative === null ? MISSING : one.relative.toExponential(2))))))),
        found.tensors.length > 1000 ? h("p", { class: "count" }, `1,000 of ${number(found.tensors.length + found.left_out)} tensors; the CSV has ${number(found.tensors.length)}`) : null));
    context.setLive("", "");
  }

  function head(found, button) {
    return h("div", { class: "title" }, h("div", {}, h("p", { class: "eyebrow" }, h("a", { href: `${home}/weights` }, "Weights"), " / version"), h("h1", {}, `Version ${number(version)}`),
      h("p", { class: "facts" }, found ? `${bytes(found.bytes)} of changes to version ${number(found.base)}` : "", " · ", h("a", { href: `${home}/rollouts?version_min=${version}&version_max=${version}` }, "groups it was trained on"))),
    h("div", { class: "tools" }, version > 0 ? h("a", { class: "button small", href: `${home}/weights/${version - 1}` }, "← Earlier") : null, h("a", { class: "button small", href: `${home}/weights/${version + 1}` }, "Later →"), button));
  }

  return { element, refresh, live: false };
}
