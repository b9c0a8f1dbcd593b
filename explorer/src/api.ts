// Requests to the server. Every failure becomes one sentence.

import type { AnswerEvent } from "./types";

export class ApiError extends Error {}

async function sentence(response: Response): Promise<string> {
  try {
    const body = (await response.json()) as { error?: { message?: string } };
    return body.error?.message ?? `The server answered ${response.status}.`;
  } catch {
    return `The server answered ${response.status}.`;
  }
}

async function send(path: string, init: RequestInit = {}): Promise<Response> {
  let response: Response;
  try {
    response = await fetch(path, init);
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new ApiError("The explorer cannot be reached. Is torino explore still running?");
  }
  if (!response.ok) throw new ApiError(await sentence(response));
  return response;
}

export function address(path: string, query: Record<string, string | number | boolean | null | undefined> = {}): string {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value !== undefined && value !== null && value !== "") parameters.set(name, String(value));
  }
  const text = parameters.toString();
  return text ? `${path}?${text}` : path;
}

export async function get<T>(
  path: string,
  query: Record<string, string | number | boolean | null | undefined> = {},
  signal?: AbortSignal,
): Promise<T> {
  const response = await send(address(path, query), signal ? { signal } : {});
  return (await response.json()) as T;
}

export async function upload<T>(file: Blob, store: boolean): Promise<T> {
  const headers = { "Content-Type": "application/octet-stream", "X-Torino-Store": store ? "yes" : "no" };
  const response = await send("/api/photos", { method: "POST", body: file, headers });
  return (await response.json()) as T;
}

export async function forget(photo: string): Promise<void> {
  await send(`/api/photos/${encodeURIComponent(photo)}`, { method: "DELETE" });
}

export async function rename(concept: number, name: string): Promise<string> {
  const response = await send(`/api/concepts/${concept}`, {
    method: "PATCH",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ name }),
  });
  return ((await response.json()) as { name: string }).name;
}

export interface Question {
  question: string;
  methods: string[];
  ablate?: number[];
}

/** Ask a question and pass on the events as they arrive, one JSON object per line. */
export async function ask(
  photo: string,
  wanted: Question,
  onEvent: (event: AnswerEvent) => void,
  signal: AbortSignal,
): Promise<void> {
  const response = await send(`/api/photos/${encodeURIComponent(photo)}/answers`, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(wanted),
    signal,
  });
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop() ?? "";
    for (const line of lines) if (line) onEvent(JSON.parse(line) as AnswerEvent);
  }
}

export function isAbort(error: unknown): boolean {
  return error instanceof DOMException && error.name === "AbortError";
}

export function message(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
