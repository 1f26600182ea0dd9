// Feedback to a deltawire gateway: Node 18 and later, browsers, no dependencies. feedback.d.mts has
// the types for TypeScript.
//
//   const client = new FeedbackClient("https://gateway.example.com", token);
//   await client.send(receiptOf(answer), "thumbs", "up", { id: "click-17" });
//
// Keep the token on a back end: whoever holds it can report for any user.

const MAX_ANSWER_BYTES = 65_536;
const LONGEST_PAUSE_MS = 10_000;

/** The gateway refuses the report: sending it again changes nothing. */
export class RefusedError extends Error {
  constructor(message, status, code) {
    super(message);
    this.name = "RefusedError";
    this.status = status;
    this.code = code;
  }
}

/** The gateway did not answer, or asks to try again later, in every attempt. */
export class UnreachableError extends Error {
  constructor(message) {
    super(message);
    this.name = "UnreachableError";
  }
}

/** The receipt in a whole answer, in the last chunk of a stream, or in a response; "" if none. */
export function receiptOf(answer) {
  const receipt = answer?.deltawire?.receipt ?? answer?.response?.deltawire?.receipt;
  return typeof receipt === "string" ? receipt : "";
}

export class FeedbackClient {
  #url;
  #headers;
  #attempts;
  #timeoutMs;
  #fetch;

  constructor(url, token, { attempts = 5, timeoutMs = 10_000, fetch = globalThis.fetch } = {}) {
    if (!/^https?:\/\//.test(url)) throw new TypeError("the gateway's URL begins with http:// or https://");
    if (!(attempts >= 1)) throw new TypeError("give at least one attempt");
    this.#url = url.replace(/\/+$/, "");
    this.#headers = { Authorization: `Bearer ${token}`, "Content-Type": "application/json" };
    this.#attempts = attempts;
    this.#timeoutMs = timeoutMs;
    this.#fetch = fetch;
  }

  /** Sends one report and returns its id. A report that got no answer is repeated with the same id. */
  async send(receipt, kind, value = 1, { id, at, text, note, signal } = {}) {
    const body = { receipt, kind, value, id: id ?? `ts-${globalThis.crypto.randomUUID()}` };
    if (at !== undefined) body.at = at;
    if (text !== undefined) body.text = text;
    if (note !== undefined) body.note = note;
    const found = await this.#repeated("/v1/feedback", { method: "POST", body: JSON.stringify(body) }, signal);
    return String(found.id);
  }

  /** Exchanges the id in the header `x-deltawire-answer` for the answer's receipts, once it ended. */
  async receipts(answerId, { signal } = {}) {
    const found = await this.#repeated(`/v1/receipts/${encodeURIComponent(answerId)}`, {}, signal);
    return found.receipts.map(String);
  }

  async #repeated(path, options, signal) {
    for (let attempt = 1; ; attempt += 1) {
      try {
        return await this.#call(path, options, signal);
      } catch (error) {
        if (signal?.aborted || !(error instanceof UnreachableError) || attempt >= this.#attempts) throw error;
      }
      await new Promise((resolve) => setTimeout(resolve, Math.min(200 * 2 ** (attempt - 1), LONGEST_PAUSE_MS)));
    }
  }

  async #call(path, options, signal) {
    const limit = AbortSignal.timeout(this.#timeoutMs);
    const both = signal ? AbortSignal.any([signal, limit]) : limit;
    let status, text;
    try {
      const answer = await this.#fetch(`${this.#url}${path}`, { ...options, headers: this.#headers, redirect: "error", signal: both });
      status = answer.status;
      text = await limited(answer);
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new UnreachableError(`the gateway does not answer: ${error.name}`);
    }
    let found;
    try {
      found = JSON.parse(text);
    } catch {
      found = undefined;
    }
    if (status === 200 && found !== undefined) return found;
    const { message = "no reason given", code = null } = found?.error ?? {};
    const words = `the gateway answers ${status}: ${String(message).slice(0, 300)}`;
    const again = status === 200 || status === 425 || status === 429 || status >= 500;
    const waits = status === 409 && path.startsWith("/v1/receipts/"); // The answer has not ended.
    if (again || waits) throw new UnreachableError(words);
    throw new RefusedError(words, status, code);
  }
}

async function limited(answer) {
  const parts = [];
  let size = 0;
  for await (const part of answer.body ?? []) {
    size += part.byteLength;
    if (size > MAX_ANSWER_BYTES) throw new Error("an answer that is too long");
    parts.push(part);
  }
  return new TextDecoder().decode(await new Blob(parts).arrayBuffer());
}
