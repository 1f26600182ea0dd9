// Users: satisfaction, feedback, errors, latency and length by arm and version over time.

import { curveCard } from "./charts.js";
import { card, clean, h, replace } from "./dom.js";
import { MISSING, moment, number, percent } from "./format.js";

const COLORS = ["accent", "second", "evaluate", "train", "swap", "checkpoint", "publish"];
const ARMS = { serving: "serving", candidate: "candidate", hold_back: "hold-back" };
const MOST_LINES = 7;
const FIGURES = [
  ["satisfaction", "Satisfaction", "One value for each user who reported in a window: the mean of its reports, from 0, the worst, to 1, the best. Windows of a quarter of an hour at one gateway have a band, the 95 % interval over users; longer ones have none, since users come back. Dashed lines are decisions.", "share", true],
  ["errors", "Errors", "Share of answers that no server gave. Bands are 95 % intervals over answers, as if each were of another user.", "share", true],
  ["first_s", "Time to the first token", "Mean over answers that came to their end, in seconds. Bands are as for errors.", "", false],
  ["tokens", "Length", "Mean tokens of an answer. Bands are as for errors.", "", false],
];

function nameOf(point) {
  const arm = ARMS[point.arm] || clean(point.arm, 20);
  if (point.upstream) return `${arm}: upstream ${clean(point.upstream, 32)}`;
  return point.version === null ? `${arm}: other versions` : `${arm}: version ${number(point.version)}`;
}

function linesOf(points) {
  const counts = new Map();
  for (const one of points) counts.set(nameOf(one), (counts.get(nameOf(one)) || 0) + one.answers + one.satisfaction.count);
  return [...counts].sort((a, b) => b[1] - a[1]).slice(0, MOST_LINES).map(([name]) => name).sort();
}

function chartOf([key, title, caption, unit, share], lines) {
  const series = lines.flatMap((name, place) => {
    const color = COLORS[place % COLORS.length];
    return [
      { key: `${name}/high`, label: `${name}, highest`, color, low: `${name}/low`, invisible: true, quiet: true },
      { key: `${name}/low`, label: `${name}, lowest`, color, invisible: true, quiet: true },
      { key: name, label: name, color, sparse: true },
    ];
  });
  return curveCard({ id: `users-${key}`, title, caption, unit, series, share, zero: !share, xLabel: "at", xFormat: moment });
}

function columnsOf(points, lines, figure) {
  const times = [...new Set(points.map((one) => one.since + one.seconds / 2))].sort((a, b) => a - b);
  const at = new Map(times.map((time, place) => [time, place]));
  const columns = {};
  for (const name of lines) for (const part of ["", "/low", "/high"]) columns[`${name}${part}`] = times.map(() => null);
  for (const one of points) {
    const name = nameOf(one), measured = figure(one);
    if (!columns[name] || !measured || measured.mean === null) continue;
    const place = at.get(one.since + one.seconds / 2);
    columns[name][place] = measured.mean;
    columns[`${name}/low`][place] = measured.low;
    columns[`${name}/high`][place] = measured.high;
  }
  return { x: times, columns };
}

function interval(measured, format) {
  if (!measured || measured.mean === null) return MISSING;
  if (measured.low === null) return format(measured.mean);
  return `${format(measured.mean)} (${format(measured.low)} to ${format(measured.high)})`;
}

const signed = (value) => `${value > 0 ? "+" : ""}${number(value)}`;

function summary(users) {
  const kinds = [...new Set(users.total.flatMap((one) => Object.keys(one.kinds)))].sort().slice(0, 16);
  const head = ["Arm", "Answers", "Satisfaction", "Users by window", "Errors", "First token, s", "Tokens", ...kinds];
  const rows = users.total.map((one) => h("tr", {}, h("th", { scope: "row" }, ARMS[one.arm] || clean(one.arm, 20)),
    [number(one.answers), interval(one.satisfaction, percent), number(one.satisfaction.count), interval(one.errors, percent), interval(one.first_s, number), interval(one.tokens, number),
      ...kinds.map((kind) => interval(one.kinds[kind], number))].map((text) => h("td", { class: "number" }, text))));
  const effects = users.marks.filter((one) => one.effect && one.effect.mean !== null);
  const tested = effects.at(-1);
  return [
    h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, head.map((name, place) => h("th", { scope: "col", class: place ? "number" : null }, clean(name, 40))))), h("tbody", {}, rows))),
    h("p", {}, users.effect ? `Satisfaction with the serving version less that with the hold-back version, within windows in which users of both reported: ${signed(users.effect.mean)} (${number(users.effect.count)} users by window of the hold-back version).` : "There is no hold-back version to compare with, or no window in which users of both reported.",
      tested ? ` By the tests, each user once, as of decision ${number(tested.number)}: ${signed(tested.effect.mean)} (${signed(tested.effect.low)} to ${signed(tested.effect.high)}).` : ""),
  ];
}

function labelTable(labels) {
  const rows = labels.map((one) => h("tr", {}, h("th", { scope: "row" }, `${one.by === "task" ? "Task" : "Client"} ${one.name ? clean(one.name, 64) : "(others)"}`),
    h("td", {}, ARMS[one.figures.arm] || clean(one.figures.arm, 20)),
    [number(one.figures.answers), interval(one.figures.satisfaction, percent), number(one.figures.satisfaction.count), interval(one.figures.errors, percent), interval(one.figures.first_s, number), interval(one.figures.tokens, number)]
      .map((text) => h("td", { class: "number" }, text))));
  const head = ["Task or client", "Arm", "Answers", "Satisfaction", "Users by window", "Errors", "First token, s", "Tokens"];
  return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, head.map((name, place) => h("th", { scope: "col", class: place > 1 ? "number" : null }, name)))), h("tbody", {}, rows)));
}

export function usersCards() {
  const element = h("div", { class: "users" });
  let charts = [], shown = "";

  return {
    element,
    update(users) {
      element.hidden = !users;
      if (!users) return;
      const lines = linesOf(users.points), key = JSON.stringify(lines);
      const kinds = [...new Set(users.points.flatMap((one) => Object.keys(one.kinds)))].sort().slice(0, 4);
      if (key + kinds !== shown) {
        shown = key + kinds;
        charts = [
          ...FIGURES.map((one) => [chartOf(one, lines), (point) => point[one[0]]]),
          ...kinds.map((kind) => [chartOf([`kind-${kind}`, `Feedback: ${clean(kind, 40)}`, "Mean over users who sent this kind in a window, as they sent it. Bands are as for satisfaction.", "", false], lines), (point) => point.kinds[kind]]),
        ];
      }
      const table = card("Users", { id: "users", wide: true, caption: "How users fared by arm, over the time that gateways remember. A user counts once in each window, so figures of users have no interval here; those of answers have one of 95 %, as if each were of another user. Decisions rest on the tests of deltawire live status, not on these figures." }, summary(users));
      const grid = h("div", { class: "grid" }, charts.map(([chart]) => chart.element));
      const labels = users.labels && users.labels.length ? [card("Tasks and clients", { id: "users-labels", wide: true, caption: "The same by task label and by API key, where requests have one. Tasks of fewer than five users in a quarter of an hour count among the others, and users who refused capture have no task here." }, [labelTable(users.labels)])] : [];
      replace(element, table, ...labels, grid);
      const marks = users.marks.filter((one) => one.verdict !== "gate").map((one) => ({ x: one.at, label: one.words, bad: one.verdict === "rollback" }));
      for (const [chart, figure] of charts) chart.update({ ...columnsOf(users.points, lines, figure), marks });
    },
  };
}
