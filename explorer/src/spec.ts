// Specs of methods, such as torino-m(k=2, delta=2, budget=64).

import type { Method } from "./types";

export interface Choice {
  method: string;
  k: number;
  delta: number;
  budget: number | null;
}

export const ALL_TOKENS = "none";

export function parseSpec(text: string): Choice {
  const match = /^\s*([\w.-]+)\s*(?:\((.*)\))?\s*$/.exec(text);
  const values = new Map<string, number>();
  for (const part of (match?.[2] ?? "").split(",")) {
    const pair = /^\s*(\w+)\s*=\s*(\d+)\s*$/.exec(part);
    if (pair) values.set(pair[1]!, Number(pair[2]));
  }
  const k = values.get("k") ?? 2;
  return {
    method: match?.[1] ?? "torino-m",
    k,
    delta: Math.min(values.get("delta") ?? 2, k),
    budget: values.get("budget") ?? null,
  };
}

export function writeSpec(choice: Choice, method: Method | undefined, patches: number): string {
  if (choice.method === ALL_TOKENS || !method) return choice.method;
  const parts: string[] = [];
  if (method.kd) parts.push(`k=${choice.k}`, `delta=${Math.min(choice.delta, choice.k)}`);
  if (method.budget) {
    const budget = choice.budget ?? (method.adaptive ? null : Math.max(1, Math.round(patches / 4)));
    if (budget !== null) parts.push(`budget=${Math.min(budget, patches)}`);
  }
  return parts.length ? `${choice.method}(${parts.join(", ")})` : choice.method;
}

export function specLabel(spec: string, methods: Method[]): string {
  if (spec === ALL_TOKENS) return "All tokens";
  const choice = parseSpec(spec);
  return methods.find((method) => method.name === choice.method)?.label ?? choice.method;
}
