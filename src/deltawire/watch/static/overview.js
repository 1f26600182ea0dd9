// Overview: problems first, then figures, curves, who did what when, and the fleet.

import { get } from "./api.js";
import { curveCard, timelineCard } from "./charts.js";
import { buttons, card, clean, csv, download, empty, h, replace, say, state } from "./dom.js";
import { usersCards } from "./users.js";
import { MISSING, age, bytes, clock, duration, ms, number, percent, when, withUnit } from "./format.js";

const SERIES = ["reward", "heldout/accuracy", "heldout/loss", "staleness/mean", "staleness/max", "staleness/min", "bytes/delta", "bytes/anchor", "parity/k3", "parity/ratio_max", "entropy", "completion/length", "loss", "grad_norm", "bytes/changed", "step_seconds", "served_share", "pairs"];
const SET_COLORS = ["second", "evaluate", "train", "swap", "checkpoint", "publish"];
const OVER = new Set(["finished", "stopped"]);

export function overviewView(context) {
  const { base, query, setQuery, signal } = context;
  let range = query.get("from") && query.get("to") ? [Number(query.get("from")), Number(query.get("to"))] : null;
  let charts = null, sets = "", sources = "", shown = null, bound = null;
  const problems = h("div", { class: "problems" });
  const heads = h("dl", { class: "heads" });
  const rangeBar = h("div", { class: "range", hidden: true });
  const curves = h("div", { class: "grid" });
  const fleet = fleetCard();
  const users = usersCards();
  const figures = h("div", { class: "grid" });
  const title = h("div", { class: "title" });
  const timeline = timelineCard({
    id: "timeline", title: "Timeline",
    caption: "Each row is a process. Where a row is split in height, several activities shared that moment. Drag to look closer, double-click for the whole run.",
    load: (params) => get(`${base}/timeline`, params, signal),
  });
  const element = h("div", { class: "view overview" }, title, problems, heads, rangeBar, users.element, curves, timeline.element, fleet.element, figures);

  function onRange(found) {
    range = found;
    setQuery({ from: range?.[0], to: range?.[1] });
    refreshCurves().catch(() => {});
  }

  function build(names, parts, limit) {
    const common = { onRange };
    const colored = (name, place, prefix) => ({ key: `${prefix}${name}`, label: clean(name, 30), color: SET_COLORS[place % SET_COLORS.length], sparse: true });
    const losses = [{ key: "heldout/loss", label: "all", color: "accent", sparse: true }, ...(parts.length > 1 ? parts.map((name, place) => colored(name, place, "heldout/source/")) : [])];
    const heldout = [{ key: "heldout/accuracy", label: "all", color: "accent", sparse: true }, ...names.map((name, place) => colored(name, place, "heldout/set/"))];
    charts = [
      curveCard({ id: "reward", title: "Training reward", caption: "Mean reward of the groups that each version was trained on, and its running mean.", series: [{ key: "reward", label: "reward", color: "second", smooth: true }], ...common }),
      curveCard({ id: "heldout", title: "Held-out accuracy", caption: "On problems that training never sees, answers drawn as in training (pass@1).", unit: "share", share: true, series: heldout, ...common }),
      curveCard({ id: "heldout-loss", title: "Held-out loss", caption: "Mean cross-entropy on documents that training never sees.", unit: "nats", series: losses, ...common }),
      curveCard({ id: "staleness", title: "Staleness", caption: "How many versions older than the trainer the groups of a step were: smallest to largest, and the mean.", unit: "versions", zero: true, series: [
        { key: "staleness/max", label: "largest", color: "accent", low: "staleness/min", invisible: true, quiet: true }, { key: "staleness/min", label: "smallest", color: "accent", invisible: true, quiet: true },
        { key: "staleness/mean", label: "mean", color: "accent", smooth: true },
        ...(limit === null ? [] : [{ key: "bound", label: "bound", color: "alarm", constant: limit, dash: true }])], ...common }),
      curveCard({ id: "bytes", title: "Bytes a version", caption: "What a reader that follows fetches for each version; whole anchors as dots. Log scale.", unit: "bytes", log: true, series: [{ key: "bytes/delta", label: "delta", color: "accent" }, { key: "bytes/anchor", label: "anchor", color: "second", points: true }], ...common }),
      curveCard({ id: "parity", title: "Parity", caption: "Divergence between sampler and trainer a token (k3), before each step.", unit: "nats", zero: true, series: [{ key: "parity/k3", label: "k3", color: "train", smooth: true }], ...common }),
      curveCard({ id: "length", title: "Answers", caption: "Mean number of tokens of an episode that the model drew.", series: [{ key: "completion/length", label: "tokens", color: "evaluate", smooth: true }], ...common }),
      curveCard({ id: "entropy", title: "Entropy", caption: "Mean entropy of the policy a token.", unit: "nats", series: [{ key: "entropy", label: "entropy", color: "checkpoint", smooth: true }], ...common }),
      curveCard({ id: "grad", title: "Gradient norm", caption: "Before clipping.", zero: true, series: [{ key: "grad_norm", label: "norm", color: "publish", smooth: true }], ...common }),
      curveCard({ id: "served", title: "Training served", caption: "Part of the masters' change since version 0 that published weights contain. Near 1, the fleet gets all of the training.", unit: "share", share: true, series: [{ key: "served_share", label: "share", color: "publish" }], ...common }),
      curveCard({ id: "pairs", title: "Pairs", caption: "Served answers with a better one, such as a user's edit, that each version was trained on.", zero: true, series: [{ key: "pairs", label: "pairs", color: "evaluate", smooth: true }], ...common }),
    ];
    replace(curves, charts.map((chart) => chart.element));
  }

  async function refreshCurves() {
    const names = [...SERIES, ...(sets ? sets.split("\n").map((name) => `heldout/set/${name}`) : []), ...(sources ? sources.split("\n").map((name) => `heldout/source/${name}`) : [])];
    const found = await get(`${base}/series`, { names: names.join(","), from: range?.[0], to: range?.[1], points: 900 }, signal);
    const columns = { ...found.columns, "bytes/anchor": (found.columns["bytes/anchor"] || []).map((value) => value || null), "heldout/accuracy": found.columns["heldout/accuracy"] };
    for (const chart of charts) chart.update({ x: found.versions, columns });
    rangeBar.hidden = !range && found.stride === 1;
    replace(rangeBar, range ? [`Versions ${number(range[0])} to ${number(range[1])} `, h("button", { type: "button", class: "small", onclick: () => onRange(null) }, "Show all")] : `Every ${found.stride}th of ${number(found.total)} versions is drawn; drag over a chart to see all of a range.`);
  }

  async function refresh(first) {
    const found = await get(`${base}/overview`, {}, signal);
    const key = found.heldout_sets.filter((name) => !name.includes(",")).join("\n");
    const measured = found.heldout_sources.join("\n");
    const rebuilt = !charts || key !== sets || measured !== sources || found.bound !== bound;
    if (rebuilt) {
      sets = key;
      sources = measured;
      bound = found.bound;
      build(key ? key.split("\n") : [], measured ? found.heldout_sources : [], found.bound);
    }
    const over = found.status && OVER.has(found.status.phase);
    context.setLive(!found.complete ? "busy" : over ? "over" : found.error ? "bad" : "on", !found.complete ? "reading…" : over ? found.status.phase : found.error ? "store does not answer" : "live");
    showTitle(title, found);
    showProblems(problems, found);
    showHeads(heads, found);
    fleet.update(found);
    users.update(found.status?.users);
    showFigures(figures, found, context);
    const stamp = `${found.revision} ${found.complete}`;
    if (first || rebuilt || stamp !== shown) {
      shown = stamp;
      await Promise.all([refreshCurves(), timeline.refresh()]);
    }
  }

  return { element, refresh, live: true };
}

function showTitle(place, found) {
  const status = found.status;
  replace(place, h("div", {}, h("p", { class: "eyebrow" }, clean(found.url, 120)), h("h1", {}, clean(found.name, 80))),
    h("p", { class: "facts" }, status ? h("span", { class: `phase ${status.phase.startsWith("trainer ") ? "bad" : ""}` }, status.phase) : null, ` started ${when(found.created_at)}`, found.complete ? "" : " · reading its history…"));
}

function showProblems(place, found) {
  const list = [...found.problems];
  if (found.error) list.unshift({ severity: "alarm", text: found.error, process: "" });
  if (!list.length) {
    if (found.complete && found.status) replace(place, h("p", { class: "fine" }, h("span", { "aria-hidden": "true" }, "✓ "), "No problems"));
    return;
  }
  const key = JSON.stringify(list);
  if (place.dataset.key === key) return;
  place.dataset.key = key;
  replace(place, h("h2", { class: "sr" }, `${list.length} problems`), h("ul", {}, list.map((one) =>
    h("li", { class: one.severity }, h("b", {}, one.severity === "alarm" ? "Alarm" : "Warning"), h("span", {}, clean(one.text, 400))))));
}

function showHeads(place, found) {
  const by = Object.fromEntries(found.figures.map((one) => [one.name, one]));
  const text = (name) => by[name]?.text ?? MISSING;
  const value = (name) => by[name]?.value ?? null;
  const status = found.status;
  const target = status?.target;
  const version = status?.version;
  const arrow = (first, last) => [first, h("span", { class: "arrow" }, " → "), last];
  const full = value("bytes_full"), delta = value("bytes_per_version");
  const most = value("staleness.total.max");
  const within = most === null || found.bound === null ? null : most <= found.bound;
  const left = target && version !== null && status.steps_per_minute ? 60 * (target - version) / status.steps_per_minute : null;
  const cells = [
    ["Version", [number(version), target ? h("span", { class: "of" }, ` of ${number(target)}`) : null], status?.steps_per_minute ? `${number(status.steps_per_minute)} a minute${left > 0 ? `, ${duration(left)} left` : ""}` : "no recent step", target && version !== null ? version / target : null],
    value("heldout_loss") !== null ? ["Held-out loss", value("heldout_loss_version") === 0 ? text("heldout_loss") : arrow(text("heldout_loss_first"), text("heldout_loss")), `nats a token, at version ${number(value("heldout_loss_version"))}; perplexity ${text("heldout_perplexity")}`]
      : ["Held-out accuracy", value("heldout") === null ? MISSING : value("heldout_first") === value("heldout") ? text("heldout") : arrow(text("heldout_first"), text("heldout")), value("heldout_version") === null ? "not evaluated" : `first to newest, at version ${number(value("heldout_version"))}`],
    ["Reward", value("reward_last") === null ? MISSING : arrow(text("reward_first"), text("reward_last")), "means of the first and the last tenth"],
    ["Staleness, at most", [number(most), within === null ? null : h("span", { class: within ? "good" : "bad" }, within ? " ✓" : " ✗")], found.bound === null ? "versions" : `bound ${found.bound}, mean ${text("staleness.total.mean")}`],
    ["Bytes a version", text("bytes_per_version"), full && delta ? `${number(full / delta)}× smaller than ${bytes(full)}` : "no version yet"],
    ["Idle", [h("span", {}, text("trainer_idle")), h("span", { class: "arrow" }, " / "), h("span", {}, text("workers_idle"))], "trainer / workers, between first and last step"],
    ["Update latency", text("update_latency_ms"), `from a step to a worker; 95 % within ${text("update_latency_p95_ms")}; ${text("groups_per_s")} tasks a second`],
    ["Parity (k3)", value("k3_same_version") === null ? withUnit("nats")(value("k3")) : withUnit("nats")(value("k3_same_version")), `largest gap ${text("largest_gap")} nats; ${number(value("parity_warnings") || 0)} warnings`],
    ["Groups", number(value("groups_total")), `trained on; ${number(value("groups_dropped_total") || 0)} dropped, ${number(status?.groups_in_flight)} in flight`],
  ];
  replace(place, cells.map(([label, shown, note, share]) => h("div", { class: "head" }, h("dt", {}, label), h("dd", {}, h("span", { class: "value" }, shown), h("span", { class: "note" }, note),
    share !== null && share !== undefined ? h("progress", { max: 1, value: Math.min(1, share), "aria-label": "versions done" }) : null))));
}

const COLUMNS = [
  ["name", "Process"], ["role", "Role"], ["state", "State"], ["doing", "Doing"], ["version", "Version"], ["lag", "Lag"], ["idle", "Idle"], ["groups", "Groups"], ["restarts", "Restarts"], ["age_s", "Last sign"], ["host", "Host"], ["build", "Build"],
];
const NUMERIC = new Set(["version", "lag", "idle", "groups", "restarts", "age_s"]);
const RANK = { stalled: 0, silent: 0, alive: 1, unknown: 2, ended: 3 };

function fleetCard() {
  let lines = [], total = 0, sorted = "state", down = false;
  const filter = h("input", { type: "search", placeholder: "Filter processes", "aria-label": "Filter processes", oninput: () => draw() });
  const body = h("tbody", {}), head = h("tr", {});
  const count = h("span", { class: "quiet" });
  const tools = h("div", { class: "tools" }, filter, buttons(["CSV", "Download the table", () => download("fleet.csv", csv([COLUMNS.map(([key]) => key), ...lines.map((line) => COLUMNS.map(([key]) => line[key]))]))]));
  const element = card("Fleet", { id: "fleet", tools, wide: true, caption: "Lag: the newest version minus the one that a process holds." }, h("div", { class: "scroll" }, h("table", { class: "fleet" }, h("thead", {}, head), body)), count);

  function draw() {
    const text = filter.value.toLowerCase();
    const found = lines.filter((line) => !text || `${line.name} ${line.role} ${line.state} ${line.doing} ${line.host} ${line.build}`.toLowerCase().includes(text));
    const key = (line) => (sorted === "state" ? [RANK[line.state] ?? 2, line.role || "", line.name] : [line[sorted] ?? (NUMERIC.has(sorted) ? -1 : ""), line.name]);
    found.sort((a, b) => {
      const [left, right] = [key(a), key(b)];
      for (let place = 0; place < left.length; place += 1) {
        if (left[place] < right[place]) return down && place === 0 ? 1 : -1;
        if (left[place] > right[place]) return down && place === 0 ? -1 : 1;
      }
      return 0;
    });
    replace(head, COLUMNS.map(([name, label]) => h("th", { scope: "col", class: NUMERIC.has(name) ? "number" : null, "aria-sort": sorted === name ? (down ? "descending" : "ascending") : null },
      h("button", { type: "button", onclick: () => { down = sorted === name ? !down : NUMERIC.has(name); sorted = name; draw(); say(`sorted by ${label}`); } }, label, sorted === name ? h("span", { "aria-hidden": "true" }, down ? " ↓" : " ↑") : null))));
    const most = Math.max(1, ...lines.map((line) => line.lag || 0));
    replace(body, found.slice(0, 300).map((line) => h("tr", { class: line.state === "ended" ? "faint" : null },
      h("th", { scope: "row" }, clean(line.name, 64)), h("td", {}, line.role || MISSING, line.supervised ? null : h("span", { class: "quiet" }, ", by hand")), h("td", {}, state(line.state)),
      h("td", {}, line.doing ? h("span", { class: "doing" }, h("i", { style: { "background-color": `var(--${/^[a-z]+$/.test(line.doing) ? line.doing : "muted"})` }, "aria-hidden": "true" }), clean(line.doing, 30)) : MISSING),
      h("td", { class: "number" }, number(line.version)),
      h("td", { class: "number" }, line.lag === null ? MISSING : h("span", { class: "lag" }, h("i", { style: { width: `${Math.round(36 * line.lag / most)}px` }, "aria-hidden": "true" }), number(line.lag))),
      h("td", { class: "number" }, percent(line.idle, 0)), h("td", { class: "number" }, number(line.groups)), h("td", { class: "number" }, line.restarts ? number(line.restarts) : MISSING),
      h("td", { class: "number" }, line.age_s === null ? MISSING : `${age(line.age_s)} ago`), h("td", {}, clean(line.host, 40)), h("td", {}, clean(line.build, 64)))));
    replace(count, total > lines.length ? `${number(lines.length)} of ${number(total)} processes; those with problems first` : found.length > 300 ? `300 of ${number(found.length)} are shown` : "");
  }

  return {
    element,
    update(found) {
      const live = (found.status?.live_processes || []).map((line) => ({ lag: null, idle: null, groups: null, restarts: 0, supervised: true, build: "", ...line }));
      lines = [...(found.status?.processes || []), ...live].map((line) => ({ ...line, name: clean(line.name, 64), host: clean(line.host, 64), build: clean(line.build, 64) }));
      total = found.processes + live.length;
      element.hidden = !lines.length;
      draw();
    },
  };
}

function pairs(rows) {
  return h("table", { class: "pairs" }, h("tbody", {}, rows.map(([label, shown]) => h("tr", {}, h("th", { scope: "row" }, label), h("td", {}, shown)))));
}

function showFigures(place, found, { home }) {
  const status = found.status;
  const failures = Object.entries(status?.failures || {});
  const sets = Object.entries(status?.heldout_sets || {});
  const sources = Object.entries(status?.heldout_sources || {});
  const further = Object.entries(status?.lines || {});
  const readers = status?.readers || [];
  const measured = found.figures.filter((one) => one.value !== null);
  const key = JSON.stringify([failures, sets, sources, further, readers, measured.map((one) => one.text), found.notes.length, found.notes[0], status?.probes, status?.settings]);
  if (place.dataset.key === key) return;
  place.dataset.key = key;
  const open = new Set([...place.querySelectorAll("details[open]")].map((one) => one.id));
  const details = (id, label, content) => h("details", { id, open: open.has(id) }, h("summary", {}, label), content);
  replace(place,
    sets.length ? card("Held-out sets", { id: "sets", caption: "The newest evaluation of each named set." }, h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["Set", "Solved", "Greedy", "Reward", "Problems"].map((name, at) => h("th", { scope: "col", class: at ? "number" : null }, name)))),
      h("tbody", {}, sets.map(([name, one]) => h("tr", {}, h("th", { scope: "row" }, clean(name, 60)), h("td", { class: "number" }, percent(one.accuracy)), h("td", { class: "number" }, percent(one.greedy)), h("td", { class: "number" }, number(one.reward)), h("td", { class: "number" }, number(one.problems)))))))) : null,
    sources.length ? card("Held-out documents", { id: "sources", caption: "The newest loss on each source, in nats a token." }, h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["Source", "Loss", "Perplexity", "Tokens", "Documents"].map((name, at) => h("th", { scope: "col", class: at ? "number" : null }, name)))),
      h("tbody", {}, sources.map(([name, one]) => h("tr", {}, h("th", { scope: "row" }, clean(name, 60)), ["loss", "perplexity", "tokens", "documents"].map((part) => h("td", { class: "number" }, number(one[part]))))))))) : null,
    status?.release ? releaseCard(status.release, home) : null,
    further.length ? card("Further precisions", { id: "lines", caption: "The newest version in each precision that the run publishes next to its own." }, pairs(further.map(([name, held]) => [clean(name, 64), number(held)]))) : null,
    readers.length ? card("Readers", { id: "readers", wide: true, caption: "Pulls, relays and ranks of vLLM that follow the run, and looks at engines, as they reported within the last day. These reports are not signed." }, h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["Reader", "State", "Version", "Lag", "Read", "Requests", "Repeated", "Refused", "Last report"].map((name, at) => h("th", { scope: "col", class: at > 1 ? "number" : null }, name)))),
      h("tbody", {}, readers.slice(0, 100).map((one) => h("tr", { class: one.state === "ended" ? "faint" : null }, h("th", { scope: "row" }, clean(`${one.host} ${one.process}`, 80)), h("td", {}, clean(one.alarm && one.state !== "ended" ? one.alarm : one.state === "late" ? `late by ${age(one.late_s)}${one.reason ? `: ${one.reason}` : ""}` : one.state, 200)),
        [number(one.version), number(one.lag), bytes(one.traffic.read_bytes), number(one.traffic.requests), number(one.traffic.retries), number(one.traffic.refused), `${age(one.age_s)} ago`].map((text) => h("td", { class: "number" }, text)))))))) : null,
    failures.length ? card("Failures", { id: "failures", caption: "By cause, over the last minutes." }, pairs(failures.slice(0, 40).map(([cause, count]) => [cause.startsWith("episode: ") ? h("a", { href: `${home}/rollouts?${new URLSearchParams({ cause: cause.slice(9) })}` }, clean(cause, 120)) : clean(cause, 120), number(count)]))) : null,
    card("Journal", { id: "journal", caption: "Starts, ends, restarts, alarms and changed settings, the newest first.", tools: buttons(["CSV", "Download the journal", () => download("journal.csv", csv([["time", "process", "event"], ...found.notes.map((one) => [when(one.at), one.process, one.text])]))]) },
      found.notes.length ? h("ol", { class: "journal", tabindex: 0, "aria-label": "Journal" }, found.notes.map((one) => h("li", { class: one.bad ? "bad" : null }, h("time", {}, clock(one.at)), h("b", {}, clean(one.process, 40)), h("span", {}, clean(one.text, 300))))) : empty("Nothing yet.")),
    card("All figures", { id: "figures", caption: "Over the whole run, as in deltawire report.", tools: buttons(["CSV", "Download the figures", () => download("figures.csv", csv([["name", "unit", "value", "help"], ...measured.map((one) => [one.name, one.unit, one.value, one.help])]))]) },
      details("figures-more", `${measured.length} figures`, pairs(measured.map((one) => [one.help, one.text]))),
      Object.keys(status?.settings || {}).length ? details("settings-more", "Changed settings", pairs(Object.entries(status.settings).map(([name, value]) => [clean(name, 80), clean(JSON.stringify(value), 80)]))) : null),
  );
}

function signed(value) {
  return value > 0 ? `+${number(value)}` : number(value);
}

// Which version serves live users, the canary if there is one, and who decided it why.
function releaseCard(release, home) {
  const version = (number_, upstream) => upstream ? `upstream ${clean(upstream, 32)} (not attested)` : h("a", { href: `${home}/weights/${number_}` }, number(number_));
  const canary = release.candidate !== null && release.verdict !== "rollback";
  const seen = release.figures;
  const counts = Object.entries(release.decisions).map(([verdict, count]) => `${verdict} ${number(count)}`).join(", ");
  return card("Release", { id: "release", caption: "Which version serves live users, by the newest decision in the bucket." }, pairs([
    ["serving", release.restores === null ? version(release.serving, release.upstream) : [version(release.serving), " with the weights of version ", version(release.restores)]],
    canary && release.copies ? ["candidate", [version(release.candidate, release.candidate_upstream), ` on copies of ${percent(release.copies, 0)} of requests, unseen by users`]] : null,
    canary && !release.copies ? ["candidate", [version(release.candidate, release.candidate_upstream), ` at ${percent(release.share, 0)} of users `, h("progress", { max: 1, value: release.share, "aria-label": "share of users on the candidate" })]] : null,
    ["decision", [h("b", { class: release.verdict === "rollback" ? "bad" : null }, clean(release.verdict, 20)), release.waits_for ? `, waits for ${release.waits_for === "person" ? "a person" : clean(release.waits_for, 20)}` : "", ` · ${when(release.at)} by ${clean(release.by, 64)}`]],
    ["reason", clean(release.reason, 400) || MISSING],
    seen && seen.snips !== null ? [`version ${number(seen.version)}, estimated before users saw it`, `${number(seen.snips)} ± ${number(seen.snips_error)} (SNIPS), ${number(seen.doubly_robust)} ± ${number(seen.doubly_robust_error)} (doubly robust)`] : null,
    seen && seen.live_candidate !== null ? [`version ${number(seen.version)}, as users showed it`, `${number(seen.live_candidate)}; serving version ${number(seen.live_serving)}`] : null,
    release.hold_back === null || release.hold_back === undefined ? null : ["hold-back", [version(release.hold_back, release.hold_back_upstream), ` keeps ${percent(release.hold_back_share, 0)} of users`, release.hold_back_difference === null ? "" : `; the serving version is ${signed(release.hold_back_difference)} against it (${signed(release.hold_back_low)} to ${signed(release.hold_back_high)}, 95 %), at the newest decision`]],
    ["decisions", counts + (release.void ? `; ${number(release.void)} void` : "")],
  ].filter(Boolean)));
}
