// Compare: one question, several methods, streamed answers side by side.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { ask, isAbort, message } from "./api";
import { Problem, Panel, ShareButton, milliseconds, percent } from "./parts";
import { PatchPicture } from "./patches";
import { usePhoto } from "./photo";
import { PhotoPicker } from "./picker";
import { link, useQuery } from "./router";
import { ALL_TOKENS, parseSpec, specLabel, writeSpec } from "./spec";
import type { AnswerEvent, Info, Photo, Reduction } from "./types";

export interface Column {
  spec: string;
  reduction: Reduction | null;
  text: string;
  done: Extract<AnswerEvent, { event: "done" }> | null;
  problem: string;
}

const DEFAULTS = ["torino-m", "torino-p", "visionzip", "random"];
const MOST = 8;

export function emptyColumns(specs: string[]): Column[] {
  return specs.map((spec) => ({ spec, reduction: null, text: "", done: null, problem: "" }));
}

export function withEvent(columns: Column[], event: AnswerEvent): Column[] {
  return columns.map((column, number) => {
    if (number !== event.method) return column;
    switch (event.event) {
      case "plan":
        return { ...column, reduction: event.reduction };
      case "text":
        return { ...column, text: column.text + event.text };
      case "error":
        return { ...column, problem: event.message };
      case "done":
        return { ...column, text: event.answer, done: event };
    }
  });
}

export function Compare({ info }: { info: Info }) {
  const [query, change] = useQuery();
  const id = query.get("photo") ?? info.photos.photos[0]?.id ?? "";
  const { photo, problem, offer } = usePhoto(id);
  const patches = photo ? photo.grid[0] * photo.grid[1] : 0;
  const budget = Number(query.get("budget")) || Math.max(1, Math.round((patches || 256) / 4));
  const names = query.get("methods")?.split(",") ?? DEFAULTS.filter((name) => info.methods.some((item) => item.name === name));
  const [question, setQuestion] = useState(query.get("question") ?? "What is in the photo?");
  const [columns, setColumns] = useState<Column[]>([]);
  const [running, setRunning] = useState(false);
  const [refused, setRefused] = useState("");
  const abort = useRef<AbortController | null>(null);

  const specs = [
    ALL_TOKENS,
    ...names.map((name) => {
      const method = info.methods.find((item) => item.name === name);
      return method ? writeSpec({ ...parseSpec(name), budget }, method, patches || budget) : name;
    }),
  ];

  useEffect(() => () => abort.current?.abort(), []);
  useEffect(() => {
    abort.current?.abort();
    setColumns([]);
  }, [id]);

  const run = async () => {
    abort.current?.abort();
    const mine = new AbortController();
    abort.current = mine;
    setColumns(emptyColumns(specs));
    setRunning(true);
    setRefused("");
    change({ photo: id, question, budget, methods: names.join(",") }, true);
    try {
      await ask(id, { question, methods: specs }, (event) => setColumns((now) => withEvent(now, event)), mine.signal);
    } catch (error) {
      if (!isAbort(error)) setRefused(message(error));
    } finally {
      if (abort.current === mine) setRunning(false);
    }
  };

  // a shared link asks its question again
  const asked = useRef(false);
  useEffect(() => {
    if (photo && !asked.current && query.get("question")) {
      asked.current = true;
      void run();
    }
  }, [photo]);

  const left = info.methods.filter((item) => !names.includes(item.name));
  const full = columns[0];
  const common = useMemo(() => commonPatches(columns), [columns]);
  return (
    <div class="compare">
      <h1>Compare methods on one question</h1>
      <PhotoPicker
        info={info}
        photo={photo}
        chosen={id}
        onChoose={(next, given) => {
          if (given) offer(given);
          change({ photo: next });
        }}
      />
      <Problem text={problem || refused} />
      <form
        class="panel ask"
        onSubmit={(event) => {
          event.preventDefault();
          void run();
        }}
      >
        <label class="field grow">
          <span>Question</span>
          <input type="text" required maxLength={2000} value={question} onInput={(event) => setQuestion(event.currentTarget.value)} />
        </label>
        <label class="field">
          <span>Tokens for each method</span>
          <input
            type="number"
            min={1}
            max={patches || undefined}
            value={budget}
            onChange={(event) => change({ budget: Math.max(1, Math.min(patches || 10_000, Number(event.currentTarget.value) || 1)) }, true)}
          />
        </label>
        <div class="row chips" role="group" aria-label="Methods">
          {names.map((name) => (
            <span class="chip" key={name}>
              {specLabel(name, info.methods)}
              <button type="button" aria-label={`Remove ${specLabel(name, info.methods)}`} onClick={() => change({ methods: names.filter((other) => other !== name).join(",") || "none-left" }, true)}>
                ✕
              </button>
            </span>
          ))}
          {names.length < MOST && (
            <select
              aria-label="Add a method"
              value=""
              onChange={(event) => {
                if (event.currentTarget.value) change({ methods: [...names.filter((name) => name !== "none-left"), event.currentTarget.value].join(",") }, true);
                event.currentTarget.value = "";
              }}
            >
              <option value="">Add a method …</option>
              {left.map((item) => (
                <option key={item.name} value={item.name}>
                  {item.label}
                </option>
              ))}
            </select>
          )}
        </div>
        <div class="row">
          <button type="submit" class="primary" disabled={!photo || !question.trim()}>
            {running ? "Ask again" : "Ask"}
          </button>
          {running && (
            <button
              type="button"
              class="quiet"
              onClick={() => {
                abort.current?.abort();
                setRunning(false);
              }}
            >
              Stop
            </button>
          )}
          <ShareButton />
        </div>
      </form>
      {columns.length > 0 && photo && (
        <>
          <p class="help">
            Kept patches are shown, the others faded. <mark class="patch">Yellow</mark> patches are kept by this method only. In answers, <mark>marked</mark> words differ from the answer with all tokens.
          </p>
          <div class="cards" aria-live="polite" aria-busy={running}>
            {columns.map((column, number) => (
              <Card key={column.spec} info={info} photo={photo} column={column} full={number ? full : undefined} common={common} waiting={running} />
            ))}
          </div>
        </>
      )}
    </div>
  );
}

interface CardProps {
  info: Info;
  photo: Photo;
  column: Column;
  full: Column | undefined;
  common: Map<number, number>;
  waiting: boolean;
}

function Card({ info, photo, column, full, common, waiting }: CardProps) {
  const { reduction, done } = column;
  const accent = useMemo(
    () => (full && reduction ? new Set(reduction.anchor.filter((patch) => common.get(patch) === 1)) : null),
    [reduction, common, full],
  );
  const same = done && full?.done ? normalize(done.answer) === normalize(full.done.answer) : null;
  return (
    <Panel title={specLabel(column.spec, info.methods)} actions={same === null ? undefined : <span class={same ? "badge good" : "badge bad"}>{same ? "same answer" : "other answer"}</span>}>
      <PatchPicture
        source={`/api/photos/${encodeURIComponent(photo.id)}/image`}
        grid={photo.grid}
        ratio={photo.width / photo.height}
        view={reduction && full ? "kept" : "photo"}
        reduction={reduction}
        accent={accent}
        label={reduction ? `${column.spec}: ${reduction.after} of ${reduction.before} tokens` : column.spec}
      />
      <p class="answer">
        {column.text ? <Answer text={column.text} full={done && full?.done ? full.done.answer : null} /> : column.problem ? null : <span class="help">{waiting ? "waiting …" : "not answered"}</span>}
      </p>
      <Problem text={column.problem} />
      <dl class="facts">
        <div>
          <dt>Tokens</dt>
          <dd>{done ? `${done.tokens} of ${done.before}` : reduction ? `${reduction.after} of ${reduction.before}` : "–"}</dd>
        </div>
        <div>
          <dt>Plan</dt>
          <dd>{reduction && full ? `${reduction.milliseconds.toFixed(1)} ms` : "–"}</dd>
        </div>
        <div>
          <dt>Prefill</dt>
          <dd>{milliseconds(done?.seconds.prefill)}</dd>
        </div>
        <div>
          <dt>Decode</dt>
          <dd>{milliseconds(done?.seconds.decode)}</dd>
        </div>
      </dl>
      {full && done && full.done && done.seconds.prefill !== undefined && full.done.seconds.prefill !== undefined && (
        <p class="help">Prefill took {percent(done.seconds.prefill / full.done.seconds.prefill)} of the time with all tokens.</p>
      )}
      {full && (
        <a href={link("inspect", { photo: photo.id, by: column.spec })} class="help">
          Inspect these tokens
        </a>
      )}
    </Panel>
  );
}

/** Mark the words that the answer with all tokens does not have. */
export function Answer({ text, full }: { text: string; full: string | null }) {
  if (full === null) return <>{text}</>;
  const known = new Set(words(full));
  return (
    <>
      {text.split(/(\s+)/).map((word, number) => (word.trim() && words(word).some((part) => !known.has(part)) ? <mark key={number}>{word}</mark> : word))}
    </>
  );
}

function words(text: string): string[] {
  return text.toLowerCase().match(/[\p{L}\p{N}]+/gu) ?? [];
}

export function normalize(text: string): string {
  return words(text).join(" ");
}

/** In how many of the methods each patch is kept. */
function commonPatches(columns: Column[]): Map<number, number> {
  const counts = new Map<number, number>();
  for (const column of columns.slice(1)) {
    for (const patch of new Set(column.reduction?.anchor ?? [])) counts.set(patch, (counts.get(patch) ?? 0) + 1);
  }
  return counts;
}
