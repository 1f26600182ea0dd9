/** Types of feedback.mjs. */

export type Kind =
  | "accept" | "reject" | "thumbs" | "score" | "edit_distance" | "kept_share" | "edit" | `event_${string}`;

export interface ReportOptions {
  /** Makes a retry idempotent: the same content under one id counts once. */
  id?: string;
  /** When it happened, in seconds since 1970. */
  at?: number;
  /** The better answer, of an `edit`. */
  text?: string;
  note?: string;
  signal?: AbortSignal;
}

export interface ClientOptions {
  attempts?: number;
  timeoutMs?: number;
  fetch?: typeof globalThis.fetch;
}

export declare class RefusedError extends Error {
  readonly status: number;
  readonly code: string | null;
}

export declare class UnreachableError extends Error {}

export declare function receiptOf(answer: unknown): string;

export declare class FeedbackClient {
  constructor(url: string, token: string, options?: ClientOptions);
  send(receipt: string, kind: Kind, value?: number | boolean | "up" | "down", options?: ReportOptions): Promise<string>;
  receipts(answerId: string, options?: { signal?: AbortSignal }): Promise<string[]>;
}
