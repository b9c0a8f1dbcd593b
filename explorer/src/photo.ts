// Load a photo and its reductions; the newest request wins.

import { useEffect, useRef, useState } from "preact/hooks";
import { get, isAbort, message } from "./api";
import type { Photo, Reduction } from "./types";

export function usePhoto(id: string): { photo: Photo | null; problem: string; offer: (photo: Photo) => void } {
  const [photo, setPhoto] = useState<Photo | null>(null);
  const [problem, setProblem] = useState("");
  const offered = useRef<Photo | null>(null);
  useEffect(() => {
    if (!id) return;
    const abort = new AbortController();
    setProblem("");
    if (offered.current?.id === id) {
      setPhoto(offered.current);
      return;
    }
    get<Photo>(`/api/photos/${encodeURIComponent(id)}`, {}, abort.signal)
      .then(setPhoto)
      .catch((error: unknown) => {
        if (!isAbort(error)) setProblem(message(error));
      });
    return () => abort.abort();
  }, [id]);
  const offer = (given: Photo) => {
    offered.current = given;
    if (given.id === id) setPhoto(given);
  };
  return { photo: photo?.id === id ? photo : null, problem, offer };
}

/** One request at a time: while one runs, only the newest setting waits, so that a slider never builds a queue. */
export function useReduction(photo: string | null, spec: string): { reduction: Reduction | null; problem: string; busy: boolean } {
  const [reduction, setReduction] = useState<Reduction | null>(null);
  const [problem, setProblem] = useState("");
  const [busy, setBusy] = useState(false);
  const state = useRef({ running: false, wanted: "", shown: "" });
  useEffect(() => {
    if (!photo) {
      setReduction(null);
      return;
    }
    const current = state.current;
    const wanted = `${photo}\n${spec}`;
    current.wanted = wanted;
    const run = async () => {
      current.running = true;
      setBusy(true);
      while (current.shown !== current.wanted) {
        const next = current.wanted;
        const [id, by] = next.split("\n") as [string, string];
        try {
          const found = await get<Reduction>(`/api/photos/${encodeURIComponent(id)}/reduction`, { by });
          setReduction(found);
          setProblem("");
        } catch (error) {
          setProblem(message(error));
        }
        current.shown = next;
      }
      current.running = false;
      setBusy(false);
    };
    if (!current.running && current.shown !== wanted) void run();
  }, [photo, spec]);
  return { reduction, problem, busy };
}
