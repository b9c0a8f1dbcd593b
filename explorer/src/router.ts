// Every state is an address: the page is the path, and everything else is in the query.

import { useCallback, useEffect, useState } from "preact/hooks";

export interface Place {
  page: string;
  query: URLSearchParams;
}

export type Changes = Record<string, string | number | null | undefined>;

const MOVED = "torino:moved";

function here(): Place {
  return { page: location.pathname.replace(/^\/+|\/+$/g, "") || "inspect", query: new URLSearchParams(location.search) };
}

export function link(page: string, changes: Changes = {}): string {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(changes)) {
    if (value !== null && value !== undefined && value !== "") query.set(name, String(value));
  }
  const text = query.toString();
  return `/${page}${text ? `?${text}` : ""}`;
}

export function go(target: string, replace = false): void {
  if (target !== location.pathname + location.search) {
    if (replace) history.replaceState(null, "", target);
    else history.pushState(null, "", target);
  }
  dispatchEvent(new Event(MOVED));
}

export function usePlace(): Place {
  const [place, setPlace] = useState(here);
  useEffect(() => {
    const update = () => setPlace(here());
    addEventListener("popstate", update);
    addEventListener(MOVED, update);
    return () => {
      removeEventListener("popstate", update);
      removeEventListener(MOVED, update);
    };
  }, []);
  return place;
}

/** Change some values of the query; moves of a slider replace the address, choices add one to the history. */
export function useQuery(): [URLSearchParams, (changes: Changes, replace?: boolean) => void] {
  const { query } = usePlace();
  const change = useCallback((changes: Changes, replace = false) => {
    const next = new URLSearchParams(location.search);
    for (const [name, value] of Object.entries(changes)) {
      if (value === null || value === undefined || value === "") next.delete(name);
      else next.set(name, String(value));
    }
    const text = next.toString();
    go(location.pathname + (text ? `?${text}` : ""), replace);
  }, []);
  return [query, change];
}

/** Follow links inside the page without loading it again. */
export function followLinks(event: MouseEvent): void {
  const anchor = (event.target as Element | null)?.closest?.("a");
  if (!anchor || event.defaultPrevented || event.button !== 0) return;
  if (event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
  if (anchor.origin !== location.origin || anchor.hasAttribute("download") || anchor.target) return;
  if (anchor.pathname.startsWith("/api/") || (anchor.hash && anchor.pathname === location.pathname)) return;
  event.preventDefault();
  go(anchor.pathname + anchor.search);
  scrollTo({ top: 0 });
}
