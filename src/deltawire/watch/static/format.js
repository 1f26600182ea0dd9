// Numbers as people read them, the same way as in the terminal.

export const MISSING = "—";

export function bytes(count) {
  if (count === null || count === undefined) return MISSING;
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  while (count >= 999.5 && unit < units.length - 1) { count /= 1000; unit += 1; }
  return `${count.toFixed(unit === 0 || count >= 99.95 ? 0 : count >= 9.995 ? 1 : 2)} ${units[unit]}`;
}

export function percent(share, digits = 1) {
  return share === null || share === undefined ? MISSING : `${(100 * share).toFixed(digits)} %`;
}

export function number(value) {
  if (value === null || value === undefined) return MISSING;
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  return size >= 1000 && size < 1e7 ? value.toFixed(0) : String(Number(value.toPrecision(3)));
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return MISSING;
  const whole = Math.max(0, Math.round(seconds));
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (part) => String(part).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

export function age(seconds) {
  if (seconds === null || seconds === undefined) return MISSING;
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (seconds >= length) return `${(seconds / length).toFixed(1)} ${unit}`;
  }
  return `${Math.max(0, seconds).toFixed(0)} s`;
}

export function when(at) {
  if (!at) return MISSING;
  const date = new Date(1000 * at);
  const two = (part) => String(part).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

export function moment(at) {
  return at ? when(at).slice(5, 16) : MISSING;
}

export function clock(at) {
  return at ? when(at).slice(11) : MISSING;
}

export function ms(value) {
  if (value === null || value === undefined) return MISSING;
  return value >= 1000 ? `${(value / 1000).toFixed(2)} s` : `${value.toFixed(value >= 9.95 ? 0 : 1)} ms`;
}

export const UNITS = {
  share: (value) => percent(value),
  bytes,
  ms,
  s: duration,
  nats: (value) => (value === null || value === undefined ? MISSING : value === 0 || Math.abs(value) >= 1e-3 ? number(value) : value.toExponential(1)),
};

export function withUnit(unit) {
  return UNITS[unit] || number;
}
