// Compare: curves of several runs, seeds of one configuration as a band, and settings that differ.

import { get } from "./api.js";
import { curveCard } from "./charts.js";
import { buttons, card, clean, csv, download, empty, h, replace } from "./dom.js";
import { MISSING, number } from "./format.js";

const COLORS = ["accent", "second", "evaluate", "train", "swap", "checkpoint", "publish", "alarm"];
const CURVES = [
  ["reward", "Training reward", "", {}], ["heldout/accuracy", "Held-out accuracy", "share", { share: true }], ["heldout/loss", "Held-out loss", "nats", {}], ["staleness/mean", "Staleness, mean", "versions", { zero: true }], ["bytes/delta", "Bytes a version", "bytes", { log: true }],
  ["parity/k3", "Parity (k3)", "nats", { zero: true }], ["entropy", "Entropy", "nats", {}], ["completion/length", "Tokens of an answer", "", {}], ["step_seconds", "Seconds a step", "", { zero: true }],
];

export function compareView(context) {
  const { runs, signal } = context;
  const grid = h("div", { class: "grid" });
  const differences = h("div", {});
  const families = h("ul", { class: "families" });
  const element = h("div", { class: "view compare" }, h("div", { class: "title" }, h("div", {}, h("p", { class: "eyebrow" }, "Compare"), h("h1", {}, runs.length === 1 ? "1 run" : `${runs.length} runs`),
    h("p", { class: "facts" }, "Runs that differ only by their seed are drawn as one curve: their mean, and a band from the smallest to the largest."))), families, grid, differences);
  let charts = null, known = null;

  const label = (numbers) => {
    const names = [...new Set(numbers.map((number_) => runs[number_].name))];
    const text = clean(names.join(", "), 40);
    return numbers.length > 1 ? `${text} (${numbers.length} seeds)` : `${text}${runs.filter((one) => one.name === runs[numbers[0]].name).length > 1 ? ` · ${clean(runs[numbers[0]].url.split("/").pop(), 30)}` : ""}`;
  };

  async function refresh(first) {
    if (first) {
      known = await get("compare", {}, signal);
      charts = CURVES.map(([key, title, unit, options]) => curveCard({
        id: `compare-${key.replace("/", "-")}`, title, unit, ...options,
        series: known.families.flatMap((numbers, place) => {
          const color = COLORS[place % COLORS.length], band = numbers.length > 1;
          return [...(band ? [{ key: `${place}-high`, low: `${place}-low`, label: `${label(numbers)}, highest`, color, invisible: true, quiet: true }, { key: `${place}-low`, label: `${label(numbers)}, lowest`, color, invisible: true, quiet: true }] : []),
            { key: String(place), label: label(numbers), color, smooth: key === "reward" || key === "parity/k3" || key === "staleness/mean" }];
        }),
      }));
      replace(grid, charts.map((chart) => chart.element));
      replace(families, known.families.map((numbers, place) => h("li", {}, h("i", { style: { "background-color": `var(--${COLORS[place % COLORS.length]})` }, "aria-hidden": "true" }), numbers.map((one, at) => [at ? ", " : "", h("a", { href: `/run/${one}/overview` }, clean(runs[one].name, 40)), h("small", {}, ` ${clean(runs[one].url.split("/").pop(), 40)}`)]))));
      const head = ["Setting", ...runs.map((one) => label([one.number]))];
      replace(differences, card("Configuration", { id: "configuration", wide: true, caption: `${known.differences.length} ${known.differences.length === 1 ? "setting differs" : "settings differ"}, ${known.same} are equal. Credentials are left out.`, tools: buttons(["CSV", "Download the differences", () => download("configuration.csv", csv([head, ...known.differences.map((one) => [one.key, ...one.values])]))]) },
        known.differences.length ? h("div", { class: "scroll" }, h("table", { class: "diff" }, h("thead", {}, h("tr", {}, head.map((name) => h("th", { scope: "col" }, name)))),
          h("tbody", {}, known.differences.map((one) => h("tr", {}, h("th", { scope: "row" }, h("code", {}, clean(one.key, 80))), one.values.map((value) => h("td", { class: value !== one.values[0] ? "changed" : null }, h("code", {}, value === null ? MISSING : clean(value, 200))))))))) : empty(runs.length === 1 ? "Give several RUN_URLs to deltawire watch to compare runs." : "The configurations are equal.")));
    }
    const found = await Promise.all(runs.map((one) => get(`runs/${one.number}/series`, { names: CURVES.map(([key]) => key).join(","), points: 600 }, signal)));
    CURVES.forEach(([key], at) => charts[at].update(joined(known.families, found, key)));
    context.setLive("", "");
  }

  return { element, refresh, live: runs.some((one) => !["finished", "stopped"].includes(one.phase)) };
}

// The curves of all families over the union of their versions. Long runs are drawn at different
// versions, so a run's value between two of them lies on the line between their values.
function joined(families, found, key) {
  const x = [...new Set(found.flatMap((one) => one.versions))].sort((a, b) => a - b);
  const curves = found.map((one) => between(x, one.versions, one.columns[key] || []));
  const columns = {};
  families.forEach((numbers, place) => {
    const rows = x.map((_, at) => numbers.map((one) => curves[one][at]).filter((value) => value !== null));
    columns[String(place)] = rows.map((values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null));
    if (numbers.length > 1) {
      columns[`${place}-high`] = rows.map((values) => (values.length ? Math.max(...values) : null));
      columns[`${place}-low`] = rows.map((values) => (values.length ? Math.min(...values) : null));
    }
  });
  return { x, columns };
}

function between(x, versions, values) {
  const known = versions.map((version, at) => [version, values[at]]).filter(([, value]) => value !== null && value !== undefined);
  let next = 0;
  return x.map((at) => {
    while (next < known.length && known[next][0] < at) next += 1;
    if (next === known.length) return null;
    const [version, value] = known[next];
    if (version === at) return value;
    if (next === 0) return null;
    const [before, old] = known[next - 1];
    return old + (value - old) * (at - before) / (version - before);
  });
}
