// The concept atlas: find a concept, see what it fires on, rename it, and ask again without it.

import { useEffect, useRef, useState } from "preact/hooks";
import { ask, get, isAbort, message, rename } from "./api";
import { Answer, emptyColumns, normalize, withEvent, type Column } from "./compare";
import { conceptColor, css } from "./color";
import { TopPhotoTile } from "./inspect";
import { ConceptLink, Pages, Panel, Problem, ShareButton, Swatch, percent } from "./parts";
import { go, link, useQuery } from "./router";
import type { AtlasStatus, Branch, Concept, ConceptSummary, Info } from "./types";

const SORTS: [string, string][] = [
  ["specificity", "most specific"],
  ["usage", "most frequent"],
  ["monosemanticity", "most monosemantic"],
  ["strength", "strongest"],
  ["name", "name"],
  ["number", "number"],
];
const PAGE = 60;

export function Atlas({ info }: { info: Info }) {
  const [query, change] = useQuery();
  const [status, setStatus] = useState<AtlasStatus | null>(null);
  const [problem, setProblem] = useState("");
  const chosen = query.get("concept") === null ? null : Number(query.get("concept"));
  const tree = query.get("list") === "tree";
  useEffect(() => {
    if (!info.sae) return;
    let timer = 0;
    const look = async () => {
      try {
        const now = await get<AtlasStatus>("/api/atlas");
        setStatus(now);
        if (!now.ready && !now.error) timer = window.setTimeout(() => void look(), 1000);
      } catch (error) {
        setProblem(message(error));
      }
    };
    void look();
    return () => clearTimeout(timer);
  }, []);
  if (!info.sae) return <Problem text="There is no SAE, so there are no concepts. Start with torino explore --sae FOLDER." />;
  return (
    <div class="atlas">
      <h1>Concept atlas</h1>
      <p class="help" role="status">
        {info.sae.latents.toLocaleString("en")} concepts of {info.sae.name}, {info.sae.names.toLocaleString("en")} with a name.{" "}
        {status && (status.ready ? `Seen on ${status.photos}${status.limited ? ` (the first ${status.total})` : ""}; ${status.dead?.toLocaleString("en")} never fire there.` : status.error ? "" : `Reading photo ${status.done} of ${status.total} …`)}
      </p>
      {status && !status.ready && !status.error && <progress value={status.done} max={status.total} aria-label="Photos read for the atlas" />}
      <Problem text={problem || status?.error || ""} />
      <div class="columns wide-right">
        <div class={chosen === null ? "side list" : "side list narrow-hidden"}>
          <div class="row">
            <div class="segments" role="group" aria-label="How to list concepts">
              <button type="button" aria-pressed={!tree} onClick={() => change({ list: null })}>
                List
              </button>
              <button type="button" aria-pressed={tree} disabled={info.sae.levels.length < 2} onClick={() => change({ list: "tree" })}>
                Tree of {info.sae.levels.length} levels
              </button>
            </div>
          </div>
          {tree ? <ConceptTree ready={status?.ready ?? false} /> : <ConceptList info={info} ready={status?.ready ?? false} chosen={chosen} />}
        </div>
        <div class="stage">
          {chosen === null ? <p class="help">Choose a concept to see what it fires on.</p> : <ConceptDetail key={chosen} id={chosen} info={info} ready={status?.ready ?? false} />}
        </div>
      </div>
    </div>
  );
}

function ConceptList({ info, ready, chosen }: { info: Info; ready: boolean; chosen: number | null }) {
  const [query, change] = useQuery();
  const [found, setFound] = useState<{ total: number; concepts: ConceptSummary[] } | null>(null);
  const [problem, setProblem] = useState("");
  const search = query.get("search") ?? "";
  const sort = query.get("sort") ?? "specificity";
  const level = query.get("level");
  const offset = Number(query.get("offset")) || 0;
  useEffect(() => {
    const abort = new AbortController();
    const timer = setTimeout(() => {
      get<{ total: number; concepts: ConceptSummary[] }>("/api/concepts", { search, sort, level, offset, limit: PAGE }, abort.signal)
        .then((value) => {
          setFound(value);
          setProblem("");
        })
        .catch((error: unknown) => {
          if (!isAbort(error)) setProblem(message(error));
        });
    }, 120);
    return () => {
      clearTimeout(timer);
      abort.abort();
    };
  }, [search, sort, level, offset, ready]);
  return (
    <>
      <input type="search" placeholder="Search by name or number" aria-label="Search concepts by name or number" value={search} onInput={(event) => change({ search: event.currentTarget.value, offset: null }, true)} />
      <div class="row">
        <label class="field inline">
          <span>Sort by</span>
          <select value={sort} onChange={(event) => change({ sort: event.currentTarget.value, offset: null })}>
            {SORTS.map(([name, label]) => (
              <option key={name} value={name}>
                {label}
              </option>
            ))}
          </select>
        </label>
        {info.sae!.levels.length > 1 && (
          <label class="field inline">
            <span>Level</span>
            <select value={level ?? ""} onChange={(event) => change({ level: event.currentTarget.value, offset: null })}>
              <option value="">all</option>
              {info.sae!.levels.map((size, number) => (
                <option key={number} value={String(number)}>
                  {number + 1} ({size})
                </option>
              ))}
            </select>
          </label>
        )}
      </div>
      <Problem text={problem} />
      <ul class="concepts">
        {found?.concepts.map((concept) => (
          <li key={concept.id}>
            <button type="button" aria-current={concept.id === chosen ? "true" : undefined} onClick={() => change({ concept: concept.id })}>
              <Swatch concept={concept.id} />
              <span class="grow">{concept.name || <i>concept {concept.id}</i>}</span>
              <span class="help">{concept.photo_share === undefined ? "" : `${percent(concept.photo_share)} of photos`}</span>
            </button>
          </li>
        ))}
      </ul>
      {found && !found.total && <p class="help">No concept has this name.</p>}
      {found && <Pages offset={offset} size={PAGE} total={found.total} onTurn={(start) => change({ offset: start })} />}
    </>
  );
}

function ConceptTree({ ready }: { ready: boolean }) {
  const [roots, setRoots] = useState<Branch[]>([]);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    get<{ concepts: Branch[] }>("/api/concepts/tree")
      .then((value) => setRoots(value.concepts))
      .catch((error: unknown) => setProblem(message(error)));
  }, [ready]);
  return (
    <>
      <p class="help">Each concept is below the most similar one of the level before.</p>
      <Problem text={problem} />
      <ul class="tree">
        {roots.map((branch) => (
          <TreeNode key={branch.id} branch={branch} />
        ))}
      </ul>
    </>
  );
}

function TreeNode({ branch }: { branch: Branch }) {
  const [open, setOpen] = useState(false);
  const [children, setChildren] = useState<Branch[] | null>(null);
  const [query] = useQuery();
  const toggle = async () => {
    setOpen(!open);
    if (!children) setChildren((await get<{ concepts: Branch[] }>(`/api/concepts/${branch.id}/tree`)).concepts);
  };
  const name = branch.name || `concept ${branch.id}`;
  return (
    <li>
      <div class="row">
        {branch.children > 0 ? (
          <button type="button" class="toggle" aria-expanded={open} aria-label={`${branch.children} concepts below ${name}`} onClick={() => void toggle()}>
            {open ? "▾" : "▸"}
          </button>
        ) : (
          <span class="toggle" aria-hidden="true" />
        )}
        <a class="concept" href={link("atlas", { list: "tree", concept: branch.id })} aria-current={query.get("concept") === String(branch.id) ? "true" : undefined}>
          <Swatch concept={branch.id} />
          <span>{name}</span>
        </a>
        {branch.children > 0 && <span class="help">{branch.children}</span>}
      </div>
      {open && children && (
        <ul>
          {children.map((child) => (
            <TreeNode key={child.id} branch={child} />
          ))}
        </ul>
      )}
    </li>
  );
}

function ConceptDetail({ id, info, ready }: { id: number; info: Info; ready: boolean }) {
  const [query, change] = useQuery();
  const [concept, setConcept] = useState<Concept | null>(null);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    get<Concept>(`/api/concepts/${id}`)
      .then(setConcept)
      .catch((error: unknown) => setProblem(message(error)));
  }, [id, ready]);
  if (!concept) return <Problem text={problem} />;
  const stats: [string, string][] = [];
  if (concept.photo_share !== undefined) {
    stats.push(["Fires on photos", percent(concept.photo_share, 1)], ["on patches", percent(concept.patch_share ?? 0, 2)]);
    stats.push(["Specificity", (concept.specificity ?? 0).toFixed(3)]);
    stats.push(["Monosemanticity", concept.monosemanticity === null || concept.monosemanticity === undefined ? "–" : concept.monosemanticity.toFixed(3)]);
    stats.push(["Mean activation", (concept.mean ?? 0).toFixed(2)], ["Largest", (concept.max ?? 0).toFixed(2)]);
  }
  return (
    <>
      <div class="row narrow-only">
        <button type="button" class="quiet" onClick={() => change({ concept: null })}>
          ← All concepts
        </button>
      </div>
      <Panel title={concept.name || `concept ${id}`} actions={<ShareButton />}>
        <p class="row">
          <Swatch concept={id} />
          <span class="help">
            concept {id}, level {concept.level + 1}
          </span>
          {concept.parent && (
            <span>
              below <ConceptLink id={concept.parent.id} name={concept.parent.name} />
            </span>
          )}
        </p>
        <RenameForm concept={concept} reason={info.sae!.read_only} onRenamed={(name) => setConcept({ ...concept, name })} />
        {stats.length > 0 && (
          <dl class="facts">
            {stats.map(([term, value]) => (
              <div key={term}>
                <dt>{term}</dt>
                <dd>{value}</dd>
              </div>
            ))}
          </dl>
        )}
      </Panel>
      {concept.photos.length > 0 && (
        <Panel title="Top photos">
          <div class="tiles">
            {concept.photos.map((top) => (
              <TopPhotoTile key={top.photo} concept={id} most={concept.max ?? 1} top={top} />
            ))}
          </div>
          <h3>Top patches</h3>
          <div class="crops">
            {concept.patches.map((entry) => (
              <PatchCrop key={`${entry.photo} ${entry.patch}`} {...entry} />
            ))}
          </div>
        </Panel>
      )}
      {ready && !concept.photos.length && <p class="note">This concept does not fire on the photos of the atlas.</p>}
      {concept.histogram && concept.photos.length > 0 && (
        <Panel title="Activations">
          <Histogram concept={id} histogram={concept.histogram} />
        </Panel>
      )}
      <div class="pair">
        <Panel title="Nearest concepts">
          <ul class="strengths">
            {concept.nearest.map((other) => (
              <li key={other.id}>
                <ConceptLink id={other.id} name={other.name} />
                <span class="number">{other.cosine.toFixed(2)}</span>
              </li>
            ))}
          </ul>
          <p class="help">Cosine of decoder rows.</p>
        </Panel>
        <Panel title="Fires together with">
          <ul class="strengths">
            {concept.cofiring.map((other) => (
              <li key={other.id}>
                <ConceptLink id={other.id} name={other.name} />
                <span class="number">{percent(other.jaccard)}</span>
              </li>
            ))}
          </ul>
          <p class="help">Share of the patches of either on which both fire.</p>
        </Panel>
      </div>
      {concept.children.length > 0 && (
        <Panel title="Concepts below it">
          <p class="cloud">
            {concept.children.map((child) => (
              <ConceptLink key={child.id} id={child.id} name={child.name} />
            ))}
          </p>
        </Panel>
      )}
      <Ablation concept={concept} info={info} photo={query.get("photo") ?? info.photos.photos[0]?.id ?? ""} onPhoto={(photo) => change({ photo }, true)} />
    </>
  );
}

function RenameForm({ concept, reason, onRenamed }: { concept: Concept; reason: string; onRenamed: (name: string) => void }) {
  const [name, setName] = useState(concept.name);
  const [told, setTold] = useState("");
  const [problem, setProblem] = useState("");
  if (reason) return <p class="help">{reason}</p>;
  const save = async (text: string) => {
    setProblem("");
    try {
      const shown = await rename(concept.id, text);
      setName(shown);
      onRenamed(shown);
      setTold(text ? "Saved beside the SAE." : "The automatic name is back.");
    } catch (error) {
      setProblem(message(error));
    }
  };
  return (
    <form
      class="row"
      onSubmit={(event) => {
        event.preventDefault();
        void save(name);
      }}
    >
      <label class="field inline grow">
        <span>Name</span>
        <input type="text" maxLength={80} value={name} onInput={(event) => setName(event.currentTarget.value)} />
      </label>
      <button type="submit" disabled={!name.trim() || name === concept.name}>
        Rename
      </button>
      <button type="button" class="quiet" onClick={() => void save("")}>
        Automatic name
      </button>
      <span class="help" role="status">
        {told}
      </span>
      <Problem text={problem} />
    </form>
  );
}

function PatchCrop({ photo, patch, value, grid }: { photo: number; patch: number; value: number; grid: [number, number] }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  useEffect(() => {
    const image = new Image();
    image.onload = () => {
      const pen = canvas.current?.getContext("2d");
      if (!pen) return;
      const [rows, columns] = grid;
      const width = image.naturalWidth / columns;
      const height = image.naturalHeight / rows;
      // the patch in the middle, with a neighbor on each side for context
      pen.fillRect(0, 0, 96, 96);
      pen.drawImage(image, ((patch % columns) - 1) * width, (Math.floor(patch / columns) - 1) * height, 3 * width, 3 * height, 0, 0, 96, 96);
      pen.strokeStyle = "#fff";
      pen.lineWidth = 2;
      pen.strokeRect(32, 32, 32, 32);
    };
    image.src = `/api/atlas/photos/${photo}/image`;
  }, []);
  return <canvas ref={canvas} width={96} height={96} role="img" aria-label={`Patch ${patch} of photo ${photo}, activation ${value.toFixed(1)}`} />;
}

function Histogram({ concept, histogram }: { concept: number; histogram: { edges: number[]; counts: number[] } }) {
  const most = Math.max(1, ...histogram.counts);
  const total = histogram.counts.reduce((sum, count) => sum + count, 0);
  const last = histogram.edges[histogram.edges.length - 1] ?? 0;
  const label = `Histogram of ${total} nonzero activations from 0 to ${last.toFixed(1)}; the fullest bin has ${most}.`;
  return (
    <figure>
      <svg class="histogram" viewBox={`0 0 ${histogram.counts.length} 10`} preserveAspectRatio="none" role="img" aria-label={label}>
        {histogram.counts.map((count, bin) => {
          const height = count ? Math.max(0.15, 10 * Math.sqrt(count / most)) : 0;
          return <rect key={bin} x={bin + 0.06} y={10 - height} width={0.88} height={height} fill={css(conceptColor(concept))} />;
        })}
      </svg>
      <figcaption class="row help">
        <span>0</span>
        <span class="spacer" />
        <span>{total.toLocaleString("en")} patches; heights are square roots of counts</span>
        <span class="spacer" />
        <span>{last.toFixed(1)}</span>
      </figcaption>
    </figure>
  );
}

interface AblationProps {
  concept: Concept;
  info: Info;
  photo: string;
  onPhoto: (photo: string) => void;
}

/** Ask a question twice, with the concept and without what it adds to the tokens. */
function Ablation({ concept, info, photo, onPhoto }: AblationProps) {
  const [question, setQuestion] = useState("What is in the photo?");
  const [columns, setColumns] = useState<Column[]>([]);
  const [running, setRunning] = useState(false);
  const [problem, setProblem] = useState("");
  const abort = useRef<AbortController | null>(null);
  useEffect(() => () => abort.current?.abort(), []);
  const run = async () => {
    abort.current?.abort();
    const mine = new AbortController();
    abort.current = mine;
    setRunning(true);
    setProblem("");
    setColumns(emptyColumns(["none", "none"]));
    try {
      for (const number of [0, 1]) {
        const ablate = number ? [concept.id] : [];
        await ask(photo, { question, methods: ["none"], ablate }, (event) => setColumns((now) => withEvent(now, { ...event, method: number })), mine.signal);
      }
    } catch (error) {
      if (!isAbort(error)) setProblem(message(error));
    } finally {
      setRunning(false);
    }
  };
  const [before, after] = columns;
  const known = info.photos.photos.some((entry) => entry.id === photo);
  return (
    <Panel title="Ask again without this concept">
      <p class="help">Removes what the concept adds to each patch before the language model reads it.</p>
      <form
        class="row"
        onSubmit={(event) => {
          event.preventDefault();
          void run();
        }}
      >
        <label class="field">
          <span>Photo</span>
          <select value={photo} onChange={(event) => onPhoto(event.currentTarget.value)}>
            {!known && <option value={photo}>the photo you came from</option>}
            {info.photos.photos.map((entry) => (
              <option key={entry.id} value={entry.id}>
                {entry.name}
              </option>
            ))}
          </select>
        </label>
        <label class="field grow">
          <span>Question</span>
          <input type="text" required maxLength={2000} value={question} onInput={(event) => setQuestion(event.currentTarget.value)} />
        </label>
        <button type="submit" class="primary" disabled={running || !photo}>
          {running ? "Asking …" : "Ask twice"}
        </button>
      </form>
      <Problem text={problem} />
      {before && after && (
        <dl class="pair answers" aria-live="polite">
          <div>
            <dt>With it</dt>
            <dd>{before.text || before.problem || "…"}</dd>
          </div>
          <div>
            <dt>Without it</dt>
            <dd>
              {after.text ? <Answer text={after.text} full={after.done && before.done ? before.done.answer : null} /> : after.problem || "…"}{" "}
              {after.done && before.done && <span class={normalize(after.text) === normalize(before.text) ? "badge good" : "badge bad"}>{normalize(after.text) === normalize(before.text) ? "same answer" : "other answer"}</span>}
            </dd>
          </div>
        </dl>
      )}
      <p>
        <button type="button" class="link" onClick={() => go(link("inspect", { photo, concept: concept.id }))}>
          Show where it fires in this photo
        </button>
      </p>
    </Panel>
  );
}
