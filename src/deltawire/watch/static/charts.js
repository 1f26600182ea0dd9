// Charts: curves by uPlot, and a timeline and heat maps on canvases of the same look.

import uPlot from "./uplot/uPlot.esm.js";
import { buttons, card, clean, csv, download, h, replace, say } from "./dom.js";
import { MISSING, clock, duration, number, withUnit } from "./format.js";

const drawn = new Set();

export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim() || "#888";
}

export function redrawAll() {
  for (const one of drawn) {
    if (one.element.isConnected) one.redraw();
    else drawn.delete(one);
  }
}

// Matches what style.css sets for text of a chart.
const FONT = '12px "Inter", -apple-system, "Segoe UI", "Liberation Sans", Arial, sans-serif';

function smooth(values) {
  const reach = Math.max(1, Math.floor(values.length / 40));
  return values.map((value, at) => {
    if (value === null || value === undefined) return null;
    let sum = 0, count = 0;
    for (let near = Math.max(0, at - reach); near <= Math.min(values.length - 1, at + reach); near += 1) {
      if (values[near] !== null && values[near] !== undefined) { sum += values[near]; count += 1; }
    }
    return sum / count;
  });
}

// A card with curves over versions, or over time: `update` takes marks {x, label, bad}, drawn as lines.
// Each series: {key, label, color, smooth, points, low, dash, bound}.
export function curveCard({ id, title, caption, unit = "", series, log = false, zero = false, share = false, height = 220, onRange, onShow, xLabel = "version", xFormat = number }) {
  const format = withUnit(unit);
  const lines = [];
  for (const one of series) {
    if (one.smooth) lines.push({ ...one, smooth: false, faint: true, hidden: true }, { ...one, smoothed: true });
    else lines.push(one);
  }
  let data = { x: [], columns: {} };
  let plot = null;
  const place = h("div", { class: "plot", tabindex: 0, role: "img" });
  const values = new Map();
  const legend = h("ul", { class: "legend" }, series.filter((one) => !one.quiet).map((one) => {
    const value = h("b", {});
    values.set(one.key, value);
    return h("li", {}, h("i", { class: one.points ? "dot" : "stroke", style: { "background-color": `var(--${one.color})` }, "aria-hidden": "true" }), one.label, " ", value);
  }));
  const at = h("span", { class: "at" });
  const table = h("div", { class: "data-table", hidden: true });
  const rows = () => [[xLabel, ...series.map((one) => one.label)], ...data.x.map((x, index) => [x, ...series.map((one) => (one.constant !== undefined ? one.constant : data.columns[one.key]?.[index] ?? null))])];
  const tools = buttons(
    ["Table", "Show the figures as a table", (event) => {
      table.hidden = !table.hidden;
      event.currentTarget.setAttribute("aria-expanded", String(!table.hidden));
      fillTable();
    }],
    ["CSV", "Download the figures", () => download(`${id}.csv`, csv(rows()))],
    ["PNG", "Download the picture", () => savePlot()],
  );
  const element = card(title, { caption, tools, id, className: "chart-card" }, h("div", { class: "legend-row" }, legend, at), place, table);

  function fillTable() {
    if (table.hidden) return;
    const [head, ...body] = rows();
    replace(table, h("table", {}, h("thead", {}, h("tr", {}, head.map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, body.slice(-200).reverse().map((row) => h("tr", {}, row.map((cell, column) => h("td", {}, column ? format(cell) : xFormat(cell))))))));
  }

  function valueAt(key, index) {
    const line = series.find((one) => one.key === key);
    return line.constant !== undefined ? line.constant : data.columns[key]?.[index] ?? null;
  }

  function show(index) {
    const last = index === null || index === undefined;
    for (const [key, value] of values) {
      let found = null;
      if (!last) found = valueAt(key, index);
      else for (let back = data.x.length - 1; back >= 0 && found === null; back -= 1) found = valueAt(key, back);
      value.textContent = format(found);
    }
    at.textContent = last || !data.x.length ? "" : `${xLabel} ${xFormat(data.x[index])}`;
  }

  function describe() {
    const parts = series.filter((one) => !one.quiet && one.constant === undefined).map((one) => {
      const known = (data.columns[one.key] || []).filter((value) => value !== null);
      return known.length ? `${one.label}: first ${format(known[0])}, last ${format(known.at(-1))}, lowest ${format(Math.min(...known))}, highest ${format(Math.max(...known))}` : `${one.label}: not measured`;
    });
    place.setAttribute("aria-label", clean(`${title}. ${parts.join(". ")}. Arrow keys read single values.`));
  }

  function columns() {
    return [data.x, ...lines.map((one) => {
      if (one.constant !== undefined) return data.x.map(() => one.constant);
      const found = data.columns[one.key] || data.x.map(() => null);
      return one.smoothed ? smooth(found) : found;
    })];
  }

  function options(width) {
    const index = (key) => 1 + lines.findIndex((one) => one.key === key);
    const bands = lines.filter((one) => one.low).map((one) => ({ series: [index(one.key), index(one.low)], fill: () => mix(color(one.color), 0.16) }));
    return {
      width, height, padding: [10, 30, 0, 0], pxAlign: false, legend: { show: false }, bands,
      scales: {
        x: { time: false, range: (self, low, high) => (low === high || low === null ? [Math.max(0, (low ?? 0) - 1), (high ?? 0) + 1] : [low, high]) },
        y: { distr: log ? 3 : 1, range: (self, low, high) => range(low, high, { log, zero, share }) },
      },
      axes: [
        { stroke: () => color("muted"), font: FONT, grid: { show: false }, ticks: { show: false }, size: 26, gap: 6, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 1e7], values: (self, splits) => splits.map((one) => (Number.isInteger(one) && one >= 0 ? xFormat(one) : "")) },
        { stroke: () => color("muted"), font: FONT, grid: { stroke: () => color("grid"), width: 1 }, ticks: { show: false }, ...(log ? { splits: logSplits, filter: (self, splits) => splits } : {}), size: (self, found) => 14 + 7 * Math.max(3, ...(found || []).map((one) => String(one ?? "").length)), gap: 6,
          values: (self, splits) => splits.map((one) => (one === null || (share && (one < -1e-9 || one > 1 + 1e-9)) ? "" : share ? `${Math.round(1000 * one) / 10} %` : axisText(one, unit))) },
      ],
      cursor: { y: false, drag: { x: Boolean(onRange), y: false, setScale: false }, points: { size: 7, fill: (self, at) => lines[at - 1]?.hidden ? "transparent" : color(lines[at - 1].color), stroke: () => color("card"), width: 1.5 }, bind: { dblclick: () => () => { if (onRange) onRange(null); } } },
      hooks: {
        setCursor: [(self) => show(self.cursor.idx)],
        draw: [(self) => drawMarks(self)],
        setSelect: [(self) => {
          if (!onRange || self.select.width < 6) return;
          const low = Math.round(self.posToVal(self.select.left, "x")), high = Math.round(self.posToVal(self.select.left + self.select.width, "x"));
          self.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          if (high > low) onRange([Math.max(0, low), high]);
        }],
      },
      series: [{}, ...lines.map((one) => ({
        label: one.label,
        stroke: () => (one.points || one.invisible ? "transparent" : one.faint ? mix(color(one.color), 0.3) : color(one.color)),
        width: one.faint ? 1 : one.invisible ? 0 : one.constant !== undefined ? 1.25 : 2,
        dash: one.dash ? [5, 4] : undefined,
        spanGaps: true,
        points: one.points || (one.sparse && (data.columns[one.key] || []).filter((value) => value !== null).length < 60)
          ? { show: true, size: 6, fill: () => color(one.color), stroke: () => color(one.color) } : { show: false },
      }))],
    };
  }

  function drawMarks(self) {
    const { ctx, bbox } = self;
    const ratio = devicePixelRatio || 1, ends = [-1e9, -1e9];
    ctx.save();
    ctx.textAlign = "left";
    ctx.textBaseline = "alphabetic";
    ctx.font = FONT.replace("12px", `${11 * ratio}px`);
    for (const mark of data.marks || []) {
      const left = Math.round(self.valToPos(mark.x, "x", true));
      if (left < bbox.left || left > bbox.left + bbox.width) continue;
      ctx.strokeStyle = ctx.fillStyle = color(mark.bad ? "alarm" : "muted");
      ctx.setLineDash([3, 4]);
      ctx.beginPath();
      ctx.moveTo(left, bbox.top);
      ctx.lineTo(left, bbox.top + bbox.height);
      ctx.stroke();
      const row = ends.findIndex((end) => left > end);  // Two rows of labels, or none if both are taken.
      if (row < 0) continue;
      const label = clean(mark.label, 24);
      ends[row] = left + 4 + ctx.measureText(label).width;
      ctx.fillText(label, left + 4, bbox.top + (12 + 13 * row) * ratio);
    }
    ctx.restore();
  }

  function build() {
    const width = Math.floor(place.clientWidth);
    if (width < 40) return;
    if (plot) plot.destroy();
    plot = new uPlot(options(width), columns(), place);
  }

  function savePlot() {
    if (!plot) return;
    const ratio = devicePixelRatio || 1, head = 62 * ratio, source = plot.ctx.canvas;
    const canvas = h("canvas", {});
    canvas.width = source.width + 32 * ratio;
    canvas.height = source.height + head + 16 * ratio;
    const context = canvas.getContext("2d");
    context.fillStyle = color("card");
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.scale(ratio, ratio);
    context.fillStyle = color("ink");
    context.font = FONT.replace("12px", "600 15px");
    context.fillText(clean(title), 16, 26);
    context.font = FONT;
    let x = 16;
    for (const one of series.filter((each) => !each.quiet)) {
      context.fillStyle = color(one.color);
      context.fillRect(x, 43, 12, 3);
      context.fillStyle = color("muted");
      context.fillText(clean(one.label, 40), x + 18, 49);
      x += 36 + context.measureText(clean(one.label, 40)).width;
    }
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.drawImage(source, 16 * ratio, head);
    canvas.toBlob((blob) => download(`${id}.png`, blob));
  }

  place.addEventListener("keydown", (event) => {
    if (!plot || !data.x.length) return;
    const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -1e9, End: 1e9 };
    if (event.key === "Escape" && onRange) return onRange(null);
    if (!(event.key in steps)) return;
    event.preventDefault();
    const from = plot.cursor.idx ?? data.x.length - 1;
    const index = Math.min(data.x.length - 1, Math.max(0, from + steps[event.key]));
    plot.setCursor({ left: plot.valToPos(data.x[index], "x"), top: 10 });
    say(`${xLabel} ${xFormat(data.x[index])}: ${series.filter((one) => !one.quiet).map((one) => `${one.label} ${format(valueAt(one.key, index))}`).join(", ")}`);
  });

  let width = 0;
  const watcher = new ResizeObserver(() => {
    const now = Math.floor(place.clientWidth);
    if (now === width || now < 40) return;
    width = now;
    if (plot) plot.setSize({ width: now, height });
    else build();
  });
  watcher.observe(place);
  const chart = {
    element,
    redraw: () => plot && plot.redraw(false, true),
    update(found) {
      data = found;
      const measured = series.some((one) => one.constant === undefined && (data.columns[one.key] || []).some((value) => value !== null));
      element.hidden = !measured;
      if (!measured) return;
      if (plot) plot.setData(columns());
      else build();
      describe();
      show(null);
      fillTable();
      if (onShow) onShow(found);
    },
  };
  drawn.add(chart);
  return chart;
}

function range(low, high, { log, zero, share }) {
  if (low === null || high === null || (log && low <= 0)) return log ? [1, 10] : [0, 1];
  if (log) return [low / 1.6, high * 1.6];
  if (zero) low = Math.min(0, low);
  const room = 0.08 * (high - low || Math.abs(high) || 1);
  const found = [zero && low === 0 ? 0 : low - room, high + room];
  return share ? [Math.max(-0.03, found[0]), Math.min(1.04, found[1])] : found;
}

// 1, 3, 10, 30 … within the scale; only powers of ten where there are many.
function logSplits(self, axis, low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const lead of high / low > 3000 ? [1] : high / low > 20 ? [1, 3] : [1, 2, 3, 5, 7]) {
      const value = lead * 10 ** power;
      if (value >= low && value <= high) found.push(value);
    }
  }
  return found;
}

function axisText(value, unit) {
  if (unit === "bytes") { const [count, name] = withUnit("bytes")(value).split(" "); return `${Number(count)} ${name}`; }
  if (value !== 0 && Math.abs(value) < 1e-3) return value.toExponential(0);
  return unit === "nats" || !unit || unit === "versions" ? String(Number(value.toPrecision(4))) : withUnit(unit)(value);
}

export function mix(found, alpha) {
  const hex = /^#([0-9a-f]{6})$/i.exec(found);
  if (!hex) return found;
  const value = parseInt(hex[1], 16);
  return `rgba(${value >> 16}, ${(value >> 8) & 255}, ${value & 255}, ${alpha})`;
}

// Who did what when. Rows are processes; bars are parts of the time.
export function timelineCard({ id, title, caption, load }) {
  const canvas = h("canvas", { role: "img", tabindex: 0 });
  const place = h("div", { class: "timeline" }, canvas);
  const legend = h("ul", { class: "legend" });
  const at = h("span", { class: "at" });
  let data = null;
  let selected = null;
  let columns = 900;
  const reset = h("button", { type: "button", class: "small", hidden: true, onclick: () => zoom(null) }, "Whole run");
  const tools = h("div", { class: "tools" }, reset, buttons(
    ["Newest", "Show the last 10 minutes", () => data && zoom([data.end - 600, data.end])],
    ["CSV", "Download seconds by process and activity", () => data && download(`${id}.csv`, csv(seconds()))],
    ["PNG", "Download the picture", () => canvas.toBlob((blob) => download(`${id}.png`, blob))],
  ));
  const element = card(title, { caption, tools, id, wide: true }, h("div", { class: "legend-row" }, legend, at), place);
  const ROW = 24, TOP = 20, BOTTOM = 20;
  const left = () => (place.clientWidth < 520 ? 84 : 132);

  function seconds() {
    const width = (data.closes - data.opens) / data.columns;
    const rows = [["process", ...data.activities]];
    for (const row of data.rows) {
      const spent = data.activities.map(() => 0);
      for (const [activity, begin, end, low, high] of row.bars) spent[activity] += width * (end - begin) * (high - low) / 8;
      rows.push([row.name, ...spent.map((value) => Math.round(10 * value) / 10)]);
    }
    return rows;
  }

  function zoom(range) {
    selected = range;
    reset.hidden = !range;
    refresh();
  }

  async function refresh() {
    columns = Math.max(100, Math.min(1600, Math.floor(place.clientWidth - left())));
    const found = await load({ from: selected?.[0], to: selected?.[1], columns });
    element.hidden = !found || !found.rows.length;
    if (element.hidden) return;
    data = { ...found, end: selected ? data?.end ?? found.closes : found.closes };
    const used = new Set(data.rows.flatMap((row) => row.bars.map((bar) => bar[0])));
    replace(legend, data.activities.map((name, number) => used.has(number) && h("li", {}, h("i", { style: { "background-color": `var(--${name})` }, "aria-hidden": "true" }), name)));
    if (data.left_out) legend.append(h("li", { class: "quiet" }, `and ${number(data.left_out)} more processes`));
    const spoken = seconds().slice(1).map((row) => `${row[0]}: ${data.activities.map((name, place) => row[place + 1] >= 0.1 && `${name} ${duration(row[place + 1])}`).filter(Boolean).join(", ")}`);
    canvas.setAttribute("aria-label", clean(`${title}. ${spoken.join(". ")}`, 4000));
    draw();
  }

  function draw() {
    if (!data) return;
    const ratio = devicePixelRatio || 1, width = place.clientWidth, height = TOP + ROW * data.rows.length + BOTTOM;
    if (width < 40) return;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.style.setProperty("height", `${height}px`);
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.fillStyle = color("card");
    context.fillRect(0, 0, width, height);
    const start = left(), span = width - start - 6, column = span / data.columns;
    const x = (time) => start + ((time - data.opens) / (data.closes - data.opens)) * span;
    context.font = FONT;
    context.textBaseline = "middle";
    data.rows.forEach((row, index) => {
      const top = TOP + ROW * index + 4, tall = ROW - 8;
      context.fillStyle = mix(color("ink"), 0.04);
      context.fillRect(start, top, span, tall);
      for (const [activity, begin, end, low, high] of row.bars) {
        context.fillStyle = color(data.activities[activity]);
        context.fillRect(start + begin * column, top + tall * (1 - high / 8), Math.max(0.6, (end - begin) * column), tall * (high - low) / 8);
      }
      context.fillStyle = color("ink");
      let name = clean(row.name, 40);
      while (name.length > 3 && context.measureText(name).width > start - 12) name = `${name.slice(0, -2)}…`;
      context.fillText(name, 0, top + tall / 2);
    });
    context.fillStyle = color("muted");
    context.textAlign = "center";
    const every = Math.max(1, Math.ceil(data.marks.length / Math.max(2, span / 46)));
    data.marks.forEach(([version, time], index) => {
      if (index % every) return;
      context.fillRect(x(time), TOP - 3, 1, 5);
      const half = context.measureText(String(version)).width / 2;
      context.fillText(String(version), Math.min(x(time), width - half), 7);
    });
    const total = data.closes - data.opens, ticks = Math.max(2, Math.floor(span / 130));
    for (let tick = 0; tick <= ticks; tick += 1) {
      context.textAlign = tick === 0 ? "left" : tick === ticks ? "right" : "center";
      context.fillText(total > 86_400 ? duration(total * tick / ticks) : clock(data.opens + total * tick / ticks), start + span * tick / ticks, height - 8);
    }
    context.textAlign = "left";
    context.fillText("version", 0, 7);
  }

  let pressed = null;
  const timeAt = (event) => data.opens + (data.closes - data.opens) * Math.min(1, Math.max(0, (event.clientX - canvas.getBoundingClientRect().left - left()) / (place.clientWidth - left() - 6)));
  canvas.addEventListener("pointerdown", (event) => { if (data) pressed = timeAt(event); });
  addEventListener("pointerup", (event) => {
    if (pressed === null || !data) return;
    const ends = [pressed, timeAt(event)].sort((a, b) => a - b);
    pressed = null;
    if (ends[1] - ends[0] > (data.closes - data.opens) / 60) zoom(ends);
  });
  canvas.addEventListener("dblclick", () => zoom(null));
  canvas.addEventListener("pointermove", (event) => {
    if (!data) return;
    const box = canvas.getBoundingClientRect(), index = Math.floor((event.clientY - box.top - TOP) / ROW);
    const row = data.rows[index], time = timeAt(event);
    const column = Math.floor((time - data.opens) / (data.closes - data.opens) * data.columns);
    const doing = row ? row.bars.filter((bar) => bar[1] <= column && column < bar[2]).map((bar) => data.activities[bar[0]]) : [];
    at.textContent = row ? `${clean(row.name)} at ${clock(time)}: ${doing.join(" + ") || "nothing recorded"}` : "";
  });
  canvas.addEventListener("pointerleave", () => { at.textContent = ""; });
  canvas.addEventListener("keydown", (event) => {
    if (!data) return;
    const [low, high] = selected || [data.opens, data.closes], length = high - low;
    if (event.key === "Escape" || event.key === "0") zoom(null);
    else if (event.key === "+") zoom([low + length / 4, high - length / 4]);
    else if (event.key === "-") zoom([low - length / 2, high + length / 2]);
    else if (event.key === "ArrowLeft") zoom([low - length / 4, high - length / 4]);
    else if (event.key === "ArrowRight") zoom([low + length / 4, high + length / 4]);
    else return;
    event.preventDefault();
  });
  new ResizeObserver(() => draw()).observe(place);
  const chart = { element, redraw: draw, refresh };
  drawn.add(chart);
  return chart;
}

// A heat map: `values[row][column]`, null for nothing. Colors go from the card's to the accent.
export function heatCard({ id, title, caption, tools, format = number, onPick, columnLabel = "version", rowHeight = 20 }) {
  const canvas = h("canvas", { role: "img", tabindex: 0 });
  const place = h("div", { class: "heat" }, canvas);
  const at = h("span", { class: "at" });
  const scale = h("div", { class: "scale" });
  const table = h("div", { class: "data-table", hidden: true });
  let data = null, cursor = null;
  const rows = () => [["", ...data.columns], ...data.rows.map((name, index) => [name, ...data.values[index]])];
  const all = h("div", { class: "tools" }, tools || null, buttons(
    ["Table", "Show the figures as a table", (event) => { table.hidden = !table.hidden; event.currentTarget.setAttribute("aria-expanded", String(!table.hidden)); fill(); }],
    ["CSV", "Download the figures", () => data && download(`${id}.csv`, csv(rows()))],
    ["PNG", "Download the picture", () => canvas.toBlob((blob) => download(`${id}.png`, blob))],
  ));
  const element = card(title, { caption, tools: all, id, wide: true }, h("div", { class: "legend-row" }, scale, at), place, table);
  const TOP = 4, BOTTOM = 22;
  const left = () => (place.clientWidth < 520 ? 86 : 130);

  function fill() {
    if (table.hidden || !data) return;
    const [head, ...body] = rows();
    replace(table, h("table", {}, h("thead", {}, h("tr", {}, head.map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, body.map((row) => h("tr", {}, row.map((cell, column) => h(column ? "td" : "th", column ? {} : { scope: "row" }, column ? format(cell) : cell)))))));
  }

  function draw() {
    if (!data) return;
    const width = place.clientWidth, tall = Math.max(rowHeight, 12), height = TOP + tall * data.rows.length + BOTTOM, ratio = devicePixelRatio || 1;
    if (width < 40) return;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.style.setProperty("height", `${height}px`);
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.fillStyle = color("card");
    context.fillRect(0, 0, width, height);
    context.font = FONT;
    context.textBaseline = "middle";
    const start = left(), cell = (width - start) / data.columns.length, gap = cell > 6 ? 1 : 0;
    data.rows.forEach((name, row) => {
      context.fillStyle = color("ink");
      let shown = clean(name, 40);
      while (shown.length > 3 && context.measureText(shown).width > start - 10) shown = `${shown.slice(0, -2)}…`;
      context.fillText(shown, 0, TOP + tall * (row + 0.5));
      data.values[row].forEach((value, column) => {
        context.fillStyle = value === null ? mix(color("ink"), 0.03) : mix(color("accent"), 0.08 + 0.92 * share(value));
        context.fillRect(start + column * cell, TOP + tall * row, Math.max(1, cell - gap), tall - 1);
      });
    });
    context.fillStyle = color("muted");
    context.textAlign = "center";
    const widest = Math.max(...data.columns.map((one) => context.measureText(String(one)).width)) + 14;
    const every = Math.max(1, Math.ceil(widest / cell));
    data.columns.forEach((name, column) => {
      if ((data.columns.length - 1 - column) % every === 0) context.fillText(clean(name, 24), Math.min(start + (column + 0.5) * cell, width - widest / 2 + 6), height - 9);
    });
    if (cursor) {
      context.strokeStyle = color("ink");
      context.lineWidth = 2;
      context.strokeRect(start + cursor[1] * cell, TOP + tall * cursor[0], Math.max(2, cell - gap), tall - 1);
    }
  }

  // Colors follow the rank of a value: one large value must not make all others look alike.
  const share = (value) => (data.ranks.size > 1 ? data.ranks.get(value) / (data.ranks.size - 1) : 0.5);
  function point(row, column) {
    cursor = data && data.rows[row] !== undefined && data.columns[column] !== undefined ? [row, column] : null;
    at.textContent = cursor ? `${clean(data.rows[row])}, ${columnLabel} ${clean(data.columns[column])}: ${data.values[row][column] === null ? MISSING : format(data.values[row][column])}` : "";
    draw();
  }
  const placeOf = (event) => {
    const box = canvas.getBoundingClientRect();
    return [Math.floor((event.clientY - box.top - TOP) / Math.max(rowHeight, 12)), Math.floor((event.clientX - box.left - left()) / ((place.clientWidth - left()) / data.columns.length))];
  };
  canvas.addEventListener("pointermove", (event) => data && point(...placeOf(event)));
  canvas.addEventListener("pointerleave", () => point(-1, -1));
  canvas.addEventListener("click", (event) => { if (data && onPick) { const [row, column] = placeOf(event); if (data.columns[column] !== undefined && data.rows[row] !== undefined) onPick(row, column); } });
  canvas.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (!data) return;
    if (event.key === "Enter" && cursor && onPick) return onPick(...cursor);
    if (!(event.key in steps)) return;
    event.preventDefault();
    const [row, column] = cursor || [0, data.columns.length - 1];
    point(Math.max(0, Math.min(data.rows.length - 1, row + steps[event.key][0])), Math.max(0, Math.min(data.columns.length - 1, column + steps[event.key][1])));
    say(at.textContent);
  });
  new ResizeObserver(() => draw()).observe(place);
  const chart = {
    element,
    redraw: draw,
    update(found) {
      const known = found.values.flat().filter((value) => value !== null);
      data = { ...found, low: known.length ? Math.min(...known) : 0, high: known.length ? Math.max(...known) : 1, ranks: new Map([...new Set(known)].sort((a, b) => a - b).map((value, at) => [value, at])) };
      cursor = null;
      element.hidden = !known.length;
      replace(scale, h("span", {}, format(data.low)), h("i", { "aria-hidden": "true" }), h("span", {}, format(data.high)));
      canvas.setAttribute("aria-label", clean(`${title}: ${data.rows.length} rows, ${data.columns.length} columns, from ${format(data.low)} to ${format(data.high)}. Arrow keys read single values.`));
      draw();
      fill();
    },
  };
  drawn.add(chart);
  return chart;
}
