// Requests to the server of this page, with the token that the link brought.

const KEY = "deltawire-watch-token";
let memory = null;

export function takeToken() {
  const found = new URLSearchParams(location.hash.slice(1)).get("token");
  if (found) {
    memory = found;
    try { localStorage.setItem(KEY, found); } catch { /* Storage is switched off: this tab only. */ }
    history.replaceState(null, "", location.pathname + location.search);
  }
}

function token() {
  try { return memory || localStorage.getItem(KEY) || ""; } catch { return memory || ""; }
}

export class Failed extends Error {
  constructor(message, hint, code) { super(message); this.hint = hint; this.code = code; }
}

export async function request(path, params = {}, signal = undefined) {
  const query = new URLSearchParams(Object.entries(params).filter(([, value]) => value !== null && value !== undefined && value !== ""));
  let answer;
  try {
    answer = await fetch(`/api/${path}${query.size ? `?${query}` : ""}`, { headers: { Authorization: `Bearer ${token()}` }, signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failed("The server of this page does not answer.", "Start deltawire watch again, and open the link that it prints.", 0);
  }
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => ({}));
  const { message = `The server answered ${answer.status}.`, hint = "" } = body.error || {};
  throw new Failed(message, hint, answer.status);
}

export async function get(path, params, signal) {
  return (await request(path, params, signal)).json();
}
