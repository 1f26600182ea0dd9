// One group: its answers as conversations, side by side or one by one, and every token's figures.

import { get } from "./api.js";
import { color, mix } from "./charts.js";
import { buttons, card, clean, csv, download, empty, h, replace, say } from "./dom.js";
import { MISSING, number, percent, when } from "./format.js";
import { reward } from "./rollouts.js";

const LONG = 1600;
const SHOWN = 2;
const MODES = [["logprob", "log-probability"], ["trainer", "gap to the trainer"], ["gap", "gap to the reference"], ["flips", "expert choice flips"], ["version", "version"], ["drawn", "drawn or forced"]];
const SCORED = new Set(["trainer", "flips"]); // Modes that the server computes on request.

export function groupView(context) {
  const { base, home, query, setQuery, signal, match } = context;
  const [worker, sequence] = [decodeURIComponent(match[2]), match[3]];
  const path = `${base}/groups/${encodeURIComponent(worker)}/${sequence}`;
  let chosen = query.get("answers") ? query.get("answers").split(",").map(Number) : null;
  let tokens = query.get("tokens") === "1";
  const element = h("div", { class: "view group" });

  function remember() { setQuery({ answers: chosen.join(","), tokens: tokens ? "1" : "" }); }

  async function refresh() {
    const found = await get(path, {}, signal);
    if (!chosen) chosen = found.answers.slice(0, innerWidth < 900 ? 1 : SHOWN).map((one) => one.index);
    const area = h("div", { class: "answers" });
    const picks = h("div", { class: "picks", role: "group", "aria-label": "Answers that are shown" });
    const draw = () => {
      replace(picks, found.answers.map((one) => h("button", {
        type: "button", class: "pick", "aria-pressed": String(chosen.includes(one.index)),
        onclick: () => {
          chosen = chosen.includes(one.index) ? chosen.filter((index) => index !== one.index) : [...chosen, one.index].sort((a, b) => a - b);
          remember();
          draw();
        },
      }, `#${one.index} `, one.cause ? h("span", { class: "bad" }, "failed") : reward(one.reward))));
      const shown = found.answers.filter((one) => chosen.includes(one.index));
      area.style.setProperty("--columns", String(Math.min(4, Math.max(1, shown.length))));
      replace(area, shown.length ? shown.map((one) => answer(one, found)) : empty("Choose an answer above."));
    };
    const row = found.row;
    replace(element, h("div", { class: "title" }, h("div", {},
      h("p", { class: "eyebrow" }, h("a", { href: `${home}/rollouts` }, "Rollouts"), " / ", clean(`${worker}/${sequence}`, 80)), h("h1", {}, clean(row.task, 256)),
      h("p", { class: "facts" }, row.family ? ["family ", h("b", {}, clean(row.family, 64)), " · "] : null, "mean reward ", reward(row.reward), ` · ${number(row.tokens)} tokens · temperature ${number(found.temperature)} · `,
        row.trained === null ? (row.dropped === null ? "not trained on yet" : `dropped at version ${row.dropped}`) : ["trained by version ", h("a", { href: `${home}/weights/${row.trained}` }, number(row.trained))], row.at ? ` · ${when(row.at)}` : "")),
      h("div", { class: "tools" }, h("a", { class: "button small", href: `${home}/task?${new URLSearchParams({ task: row.task })}` }, "This task over versions"),
        h("button", { type: "button", class: "small", "aria-pressed": String(tokens), onclick: (event) => { tokens = !tokens; event.currentTarget.setAttribute("aria-pressed", String(tokens)); remember(); draw(); } }, "Tokens"),
        buttons(["JSON", "Download this group", () => download(`${worker}-${sequence}.json`, new Blob([JSON.stringify(found, null, 2)], { type: "application/json" }))]))),
    found.without_text ? h("p", { class: "notice" }, `Tokens are shown as numbers: ${clean(found.without_text, 200)}`) : null,
    found.parity ? parity(found.parity) : null,
    picks, found.answers_total > found.answers.length ? h("p", { class: "count" }, `The first ${found.answers.length} of ${found.answers_total} answers`) : null, area);
    draw();
  }

  function answer(one, found) {
    const parts = [`${number(one.drawn)} drawn of ${number(one.tokens)} tokens`, one.reused ? `the first ${number(one.reused)} drawn by #${one.reused_from}` : null, one.turns > 1 ? `${one.turns} turns` : null, one.sampled ? `version ${one.sampled[0] === one.sampled[1] ? one.sampled[0] : `${one.sampled[0]} to ${one.sampled[1]}`}` : null, one.logprob === null ? null : `mean log-probability ${one.logprob.toFixed(3)}`, one.finish].filter(Boolean);
    const probes = Object.entries(one.probes);
    const conversation = h("div", { class: "conversation" }, one.messages.map((message, place) => messageBox(message, place < one.messages.length - 1)));
    return h("article", { class: "answer", "aria-label": `Answer ${one.index}` },
      h("header", {}, h("h2", {}, `Answer #${one.index}`), one.cause ? null : reward(one.reward), one.masked ? h("span", { class: "tag bad", title: "The parity gate left it out of the step" }, "masked") : null,
        h("p", {}, parts.join(" · ")), probes.length ? h("p", {}, probes.map(([name, value]) => h("span", { class: "tag" }, `${clean(name, 40)} ${number(value)}`))) : null),
      one.cause ? h("p", { class: "notice bad" }, `Failed through no fault of the model: ${clean(one.cause, 512)}`) : null,
      tokens ? tokenPanel(one, found) : null, conversation,
      one.left_out ? h("p", { class: "count" }, `${number(one.left_out)} further tokens are not shown as text.`) : null);
  }

  // Every token of an answer, in its text's order, colored by one of its figures.
  function tokenPanel(one, found) {
    let data = null, trainer = null, mode = "logprob", current = 0, from = 0;
    const text = h("div", { class: "tokens", role: "listbox", tabindex: 0, "aria-label": `Tokens of answer ${one.index}` });
    const detail = h("dl", { class: "token-detail", "aria-live": "polite" });
    const legend = h("span", { class: "quiet" });
    const modes = h("select", { "aria-label": "Color tokens by", onchange: (event) => { mode = event.target.value; paint(); if (SCORED.has(mode) && !trainer) score(); } }, MODES.filter(([key]) => (key !== "gap" || one.scored) && (key !== "flips" || one.experts) && (!SCORED.has(key) || !one.cause)).map(([key, label]) => h("option", { value: key }, label)));
    const pages = h("div", { class: "tools" });
    const panel = h("section", { class: "token-panel" }, h("div", { class: "tools" }, h("label", {}, "Color by ", modes), legend, pages,
      buttons(["CSV", "Download the tokens", () => data && download(`${worker}-${sequence}-${one.index}-tokens.csv`, csv([["place", "id", "text", "drawn", "forced", "logprob", "trainer", "reference", "version", "flips"], ...data.ids.map((id, at) => [data.first + at, id, data.texts[at], data.drawn[at], data.forced[at], data.logprobs[at], trainer?.logprobs[at] ?? null, data.reference?.[at] ?? null, data.versions[at], trainer?.flips?.[at] ?? null])]))])), text, detail);

    function shade(at) {
      if (mode === "drawn" && data.forced[at]) return mix(color("alarm"), 0.28);
      if (!data.drawn[at]) return null;
      if (mode === "trainer") { const gap = (trainer?.logprobs[at] ?? data.logprobs[at]) - data.logprobs[at]; return mix(color(gap < 0 ? "alarm" : "accent"), Math.min(0.85, 10 * Math.abs(gap))); }
      if (mode === "drawn") return mix(color("accent"), 0.28);
      if (mode === "flips") { const count = trainer?.flips?.[at]; return count ? mix(color("alarm"), Math.min(0.9, 0.25 + 2 * count / trainer.choices)) : null; }
      if (mode === "version") { const low = Math.min(...known), high = Math.max(...known); return mix(color("train"), high > low ? 0.12 + 0.6 * (data.versions[at] - low) / (high - low) : 0.25); }
      if (mode === "gap") { const gap = data.reference[at] - data.logprobs[at]; return mix(color(gap < 0 ? "alarm" : "accent"), Math.min(0.85, 3 * Math.abs(gap))); }
      return mix(color("alarm"), Math.min(0.85, -data.logprobs[at] / 4));
    }
    let known = [];
    function paint() {
      known = data.versions.filter((value) => value !== null);
      [...text.children].forEach((token, at) => token.style.setProperty("background-color", shade(at) || "transparent"));
      legend.textContent = { logprob: "red: unlikely tokens", gap: "blue: the reference finds it more likely; red: less", version: "darker: newer versions", drawn: "blue: drawn by the model; red: forced, to close thinking; the rest is the environment's", trainer: trainerLegend(), flips: flipsLegend() }[mode];
    }
    function trainerLegend() {
      if (!trainer) return "scoring with the weights that drew the tokens…";
      if (trainer.mean_gap === null) return "the weights that drew these tokens were deleted";
      const unread = trainer.unread.length ? `; not scored: version ${trainer.unread.join(", ")}` : "";
      return `blue: the trainer finds it more likely; red: less. Mean gap ${number(trainer.mean_gap)} nats, largest ${number(trainer.largest_gap)}${unread}`;
    }
    function flipsLegend() {
      if (!trainer) return "routing with the weights that drew the tokens…";
      if (!trainer.flips) return trainer.versions.length ? "the run compares no expert choices (parity.routes is off)" : "the weights that drew these tokens were deleted";
      return `red: the trainer's router chose other experts. Flipped ${percent(trainer.flipped_share, 2)} of all choices, ${number(trainer.choices)} a token`;
    }
    async function score() {
      try {
        trainer = await get(`${path}/answers/${one.index}/trainer`, { from }, signal);
        paint();
        pick(current, false);
        say(mode === "flips" ? flipsLegend() : trainerLegend());
      } catch (error) {
        if (error.name !== "AbortError") legend.textContent = clean([error.message, error.hint].filter(Boolean).join("; "), 400);
      }
    }
    function pick(at, focus = true) {
      text.children[current]?.setAttribute("aria-selected", "false");
      current = Math.max(0, Math.min(data.ids.length - 1, at));
      const token = text.children[current];
      token.setAttribute("aria-selected", "true");
      text.setAttribute("aria-activedescendant", token.id);
      if (focus) token.scrollIntoView({ block: "nearest" });
      const [logprob, reference] = [data.logprobs[current], data.reference?.[current]];
      const rows = [["token", `${data.first + current} of ${data.total}`], ["text", JSON.stringify(clean(data.texts[current]))], ["id", String(data.ids[current])], ["origin", data.drawn[current] ? "drawn by the model" : data.forced[current] ? "forced, to close thinking" : "written by the environment"],
        ["log-probability", logprob === null ? MISSING : `${logprob.toFixed(4)} (${percent(Math.exp(logprob), 2)})`], ["version", number(data.versions[current])],
        ["reference", reference === undefined || logprob === null ? MISSING : `${reference.toFixed(4)}, gap ${(reference - logprob).toFixed(4)}`]];
      const own = trainer?.logprobs[current] ?? null;
      if (trainer) rows.push(["trainer", own === null ? MISSING : `${own.toFixed(4)}, gap ${number(own - logprob)}`]);
      const flips = trainer?.flips?.[current] ?? null;
      if (flips !== null) rows.push(["flips", flips ? `${number(flips)} of ${number(trainer.choices)} choices, in expert layer ${trainer.flipped_layers[current].join(", ")}` : `none of ${number(trainer.choices)} choices`]);
      replace(detail, rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))), data.experts ? h("div", {}, h("dt", {}, "experts"), h("dd", {}, h("button", { type: "button", class: "small", onclick: experts }, "Show by layer"))) : null);
    }
    async function experts(event) {
      const place = event.currentTarget.parentElement;
      const chosenExperts = await get(`${path}/answers/${one.index}/experts/${data.first + current}`, {}, signal);
      replace(place, h("span", { class: "experts" }, chosenExperts.layers.map((layer, at) => h("span", { class: trainer?.flipped_layers?.[current]?.includes(at) ? "tag bad" : "tag" }, `${at}: ${layer.map((expert) => (expert < 0 ? MISSING : expert)).join(", ")}`)), h("small", {}, ` of ${chosenExperts.experts}`)));
    }
    async function load() {
      data = await get(`${path}/answers/${one.index}/tokens`, { from }, signal);
      trainer = null;
      if (SCORED.has(mode)) score();
      replace(text, data.texts.map((piece, at) => h("span", { id: `t-${one.index}-${at}`, role: "option", "aria-selected": "false", class: data.drawn[at] ? "token" : "token given" }, piece.replaceAll("\n", "⏎\n") || "·")));
      const next = data.first + data.ids.length;
      replace(pages, data.first ? h("button", { type: "button", class: "small", onclick: () => { from = Math.max(0, data.first - 4000); load(); } }, "Earlier") : null, next < data.total ? h("button", { type: "button", class: "small", onclick: () => { from = next; load(); } }, "Later") : null);
      paint();
      pick(Math.max(0, data.drawn.indexOf(1)), false);
    }
    text.addEventListener("click", (event) => { const token = event.target.closest(".token"); if (token) pick([...text.children].indexOf(token)); });
    text.addEventListener("pointerover", (event) => { const token = event.target.closest(".token"); if (token) pick([...text.children].indexOf(token), false); });
    text.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -1e9, End: 1e9 }[event.key];
      if (!step) return;
      event.preventDefault();
      pick(current + step);
    });
    load().catch((error) => error.name !== "AbortError" && replace(text, clean(error.message)));
    return panel;
  }

  return { element, refresh, live: false };
}

function parity(found) {
  const worst = Math.max(0, ...found.flipped);
  return h("details", { class: "parity-note" }, h("summary", {}, `The step that trained on it: sampler and trainer differed by ${number(found.mean_gap)} nats a token, ${number(found.largest_gap)} at most`),
    h("p", {}, `Over ${number(found.tokens)} tokens${found.same_version ? " that the trained version itself drew" : " of all versions"}; k3 ${found.k3.toExponential(1)}.`,
      found.flipped.length ? ` Expert choices flipped: ${percent(worst)} in the worst of ${found.flipped.length} expert layers (${found.flipped.map((value) => percent(value)).join(", ")}).` : ""),
    found.warnings.length ? h("p", { class: "bad" }, clean(found.warnings.join("; "), 300)) : null);
}

function messageBox(message, mayFold) {
  const role = message.role.split(" ")[0];
  const kind = ["system", "user", "assistant", "tool", "prompt", "environment"].includes(role) ? role : "other";
  const shown = message.blocks.some((block) => block.kind === "answer") && message.blocks.every((block) => block.kind === "answer") ? "tool" : kind;
  const content = message.blocks.map((block) => blockBox(block, mayFold));
  return h("section", { class: `message ${shown}` }, h("header", {}, h("b", {}, clean(message.role || "text", 80)), h("small", {}, message.drew ? `${number(message.drew)} tokens drawn` : "")), content.length ? content : h("p", { class: "quiet" }, "empty"));
}

function blockBox(block, mayFold) {
  const text = h("pre", {}, clean(block.text) + (block.left_out ? `\n… ${block.left_out} more characters` : ""));
  if (block.kind === "thinking") return h("details", { class: "block thinking" }, h("summary", {}, `Thinking · ${number(block.text.length)} characters`), text);
  if (block.kind === "call") return h("details", { class: "block call" }, h("summary", {}, "Tool call ", h("code", {}, clean(block.title, 80))), text);
  if (block.kind === "answer") return h("details", { class: "block tool-answer" }, h("summary", {}, `Tool's answer · ${clean(block.text.trim().split("\n")[0], 60)}`), text);
  if (mayFold && block.text.length > LONG) return h("details", { class: "block long" }, h("summary", {}, `${clean(block.text.slice(0, 160))}…`), text);
  return h("div", { class: "block" }, text);
}
