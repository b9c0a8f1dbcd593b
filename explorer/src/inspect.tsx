// Inspect: the concepts of each patch, its group, and the token that the group becomes.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { address, get } from "./api";
import { conceptColor, tokenColor } from "./color";
import { MethodControls } from "./controls";
import { Bar, ConceptLink, Panel, Problem, ShareButton, Swatch, conceptName, percent } from "./parts";
import { PatchPicture, TokenBlock, type Heat, type View } from "./patches";
import { usePhoto, useReduction } from "./photo";
import { PhotoPicker } from "./picker";
import { link, useQuery } from "./router";
import { parseSpec } from "./spec";
import type { Concept, Info, Photo, Reduction, Token, TopPhoto } from "./types";

const SHOWN = 7;
const VIEWS: [View, string][] = [
  ["groups", "Groups"],
  ["kept", "Kept patches"],
  ["photo", "Photo"],
];

export function Inspect({ info }: { info: Info }) {
  const [query, change] = useQuery();
  const id = query.get("photo") ?? info.photos.photos[0]?.id ?? "";
  const spec = query.get("by") ?? info.default;
  const view = (query.get("view") ?? "groups") as View;
  const shownConcept = query.get("concept") === null ? null : Number(query.get("concept"));
  const picked = query.get("token") === null ? null : Number(query.get("token"));
  const { photo, problem, offer } = usePhoto(id);
  const { reduction, problem: refused, busy } = useReduction(photo && id, spec);
  const [hovered, setHovered] = useState<number | null>(null);
  const moved = useRef<{ spec: string; at: number } | null>(null);
  const choice = useMemo(() => parseSpec(spec), [spec]);
  const fits = reduction && photo && reduction.assigned.length === photo.grid[0] * photo.grid[1] ? reduction : null;
  const token = fits && picked !== null && picked < fits.after ? picked : null;

  const heat = useMemo<Heat | null>(() => (photo && shownConcept !== null ? conceptHeat(photo, shownConcept) : null), [photo, shownConcept]);
  const source = `/api/photos/${encodeURIComponent(id)}/image`;

  const onChange = (by: string, slid: boolean) => {
    if (slid) moved.current = { spec: by, at: performance.now() };
    change({ by, token: null }, slid);
  };
  const onDrawn = () => {
    if (moved.current && fits?.spec === moved.current.spec) {
      performance.measure("slider-to-picture", { start: moved.current.at, end: performance.now() });
      moved.current = null;
    }
  };

  const describe = (patch: number) => (photo ? describePatch(photo, fits, patch) : "");
  return (
    <div class="inspect">
      <h1 class="hidden">Inspect</h1>
      <PhotoPicker
        info={info}
        photo={photo}
        chosen={id}
        onChoose={(next, given) => {
          if (given) offer(given);
          change({ photo: next, token: null, concept: null });
        }}
      />
      <Problem text={problem || refused} />
      <div class="columns">
        <div class="stage">
          {photo ? (
            <>
              <div class="row toolbar">
                <div class="segments" role="group" aria-label="What to draw">
                  {VIEWS.map(([name, label]) => (
                    <button type="button" key={name} aria-pressed={!heat && view === name} onClick={() => change({ view: name === "groups" ? null : name, concept: null })}>
                      {label}
                    </button>
                  ))}
                  {heat && shownConcept !== null && (
                    <button type="button" aria-pressed={true} onClick={() => change({ concept: null })}>
                      <Swatch concept={shownConcept} /> {conceptName(shownConcept, photo.names)} ✕
                    </button>
                  )}
                </div>
                <span class="spacer" />
                <ShareButton />
                <a class="button quiet" download href={address(`/api/photos/${encodeURIComponent(id)}/export.png`, { by: spec })}>
                  PNG
                </a>
                <a class="button quiet" download href={address(`/api/photos/${encodeURIComponent(id)}/export.html`, { by: spec })}>
                  HTML
                </a>
              </div>
              <PatchPicture
                source={source}
                grid={photo.grid}
                ratio={photo.width / photo.height}
                view={heat ? "heat" : view}
                heat={heat}
                reduction={fits}
                hovered={hovered}
                selected={token}
                label={`${photo.name}: ${fits ? `${fits.before} patches, ${fits.after} tokens.` : ""}`}
                describe={describe}
                onHover={setHovered}
                onPick={(patch) => {
                  const chosen = fits?.assigned[patch] ?? -1;
                  change({ token: chosen >= 0 && chosen !== token ? chosen : null });
                }}
                onDrawn={onDrawn}
              />
              {photo.texts.length > 0 && <p class="caption">{photo.texts[0]}</p>}
              {fits && <BeforeAfter source={source} photo={photo} reduction={fits} />}
            </>
          ) : (
            !problem && <p class="loading" role="status">Reading the photo …</p>
          )}
        </div>
        <div class="side">
          {photo && (
            <>
              <Panel title="Reduce">
                <p class="count" aria-live="polite" aria-busy={busy}>
                  {fits ? (
                    <>
                      <b>{fits.before}</b> patches → <b>{fits.after}</b> tokens{" "}
                      <span class="help">
                        {percent(1 - fits.after / fits.before)} fewer, {fits.milliseconds.toFixed(0)} ms
                      </span>
                    </>
                  ) : (
                    "…"
                  )}
                </p>
                <MethodControls methods={info.methods} choice={choice} patches={photo.grid[0] * photo.grid[1]} onChange={onChange} />
                {fits && (
                  <a class="button" href={link("compare", { photo: id, budget: fits.after })}>
                    Ask a question and compare methods
                  </a>
                )}
              </Panel>
              {token !== null && fits && (
                <TokenPanel key={`${id}${spec}${token}`} id={id} spec={spec} token={token} photo={photo} info={info} onHeat={(concept) => change({ concept })} onClose={() => change({ token: null })} />
              )}
              <PatchPanel photo={photo} reduction={fits} patch={hovered} />
              {fits && <SpentPanel reduction={fits} photo={photo} onHeat={(concept) => change({ concept: concept === shownConcept ? null : concept })} shown={shownConcept} />}
            </>
          )}
        </div>
      </div>
    </div>
  );
}

function conceptHeat(photo: Photo, concept: number): Heat {
  const values = new Map<number, number>();
  photo.indices.forEach((index, position) => {
    if (index === concept) values.set(Math.floor(position / photo.k), photo.values[position]!);
  });
  return { values, most: Math.max(0, ...values.values()), color: conceptColor(concept) };
}

function patchConcepts(photo: Photo, patch: number): [concept: number, value: number][] {
  const found: [number, number][] = [];
  for (let slot = patch * photo.k; slot < (patch + 1) * photo.k; slot++) {
    if (photo.indices[slot]! >= 0) found.push([photo.indices[slot]!, photo.values[slot]!]);
  }
  return found;
}

function describePatch(photo: Photo, reduction: Reduction | null, patch: number): string {
  const [, columns] = photo.grid;
  const strongest = patchConcepts(photo, patch).slice(0, 3);
  const concepts = strongest.map(([concept, value]) => `${conceptName(concept, photo.names)} ${value.toFixed(1)}`);
  const token = reduction?.assigned[patch] ?? -1;
  const group = !reduction ? "" : token < 0 ? "Dropped." : `Token ${token} of ${reduction.size[token]} patches.`;
  return `Row ${Math.floor(patch / columns) + 1}, column ${(patch % columns) + 1}: ${concepts.join(", ") || "no concept"}. ${group}`;
}

function PatchPanel({ photo, reduction, patch }: { photo: Photo; reduction: Reduction | null; patch: number | null }) {
  if (patch === null) {
    return (
      <Panel title="Patch">
        <p class="help">Hover over the photo, or focus it and use the arrow keys, to see the concepts of a patch. Click for its token.</p>
      </Panel>
    );
  }
  const concepts = patchConcepts(photo, patch);
  const most = concepts[0]?.[1] ?? 1;
  const token = reduction?.assigned[patch] ?? -1;
  return (
    <Panel title={`Patch, row ${Math.floor(patch / photo.grid[1]) + 1}, column ${(patch % photo.grid[1]) + 1}`}>
      <p class="help">
        {!reduction ? "" : token < 0 ? "Dropped: no token represents it." : `Part of token ${token}, which stands for ${reduction.size[token]} ${reduction.size[token] === 1 ? "patch" : "patches"}.`}
      </p>
      <ul class="strengths">
        {concepts.slice(0, SHOWN).map(([concept, value]) => (
          <li key={concept}>
            <ConceptLink id={concept} name={conceptName(concept, photo.names)} photo={photo.id} />
            <Bar share={value / most} concept={concept} />
            <span class="number">{value.toFixed(1)}</span>
          </li>
        ))}
      </ul>
      {concepts.length > SHOWN && <p class="help">{concepts.length - SHOWN} weaker ones</p>}
      {!concepts.length && <p class="help">No concept fires here.</p>}
    </Panel>
  );
}

interface TokenProps {
  id: string;
  spec: string;
  token: number;
  photo: Photo;
  info: Info;
  onHeat: (concept: number) => void;
  onClose: () => void;
}

function TokenPanel({ id, spec, token, photo, info, onHeat, onClose }: TokenProps) {
  const [found, setFound] = useState<Token | null>(null);
  const [concept, setConcept] = useState<Concept | null>(null);
  const heading = useRef<HTMLDivElement>(null);
  useEffect(() => {
    let current = true;
    void get<Token>(`/api/photos/${encodeURIComponent(id)}/tokens/${token}`, { by: spec }).then((value) => {
      if (!current) return;
      setFound(value);
      if (value.concept !== null && info.sae) {
        void get<Concept>(`/api/concepts/${value.concept}`).then((described) => current && setConcept(described));
      }
    });
    return () => {
      current = false;
    };
  }, []);
  if (!found) return null;
  const fires = found.concept === null ? 0 : photo.indices.filter((index) => index === found.concept).length;
  const weights = found.sources.map((source, entry) => [source, found.weights[entry]!] as const);
  return (
    <div ref={heading}>
      <Panel
        title={`Token ${token}`}
        actions={
          <button type="button" class="quiet" onClick={onClose}>
            Close
          </button>
        }
      >
        <p role="status">{found.explanation}</p>
        {found.concept !== null && (
          <p class="row">
            <ConceptLink id={found.concept} name={found.name ?? ""} photo={id} />
            <span class="spacer" />
            <button type="button" class="quiet" onClick={() => onHeat(found.concept!)}>
              Fires on {fires} {fires === 1 ? "patch" : "patches"} here: show
            </button>
          </p>
        )}
        {concept && concept.photos.length > 0 && (
          <>
            <h3>Where else it fires</h3>
            <div class="tiles small">
              {concept.photos.slice(0, 6).map((top) => (
                <TopPhotoTile key={top.photo} concept={concept.id} most={concept.max ?? 1} top={top} />
              ))}
            </div>
          </>
        )}
        <details>
          <summary>
            {weights.length} {weights.length === 1 ? "source" : "sources"} and weights
          </summary>
          <table>
            <thead>
              <tr>
                <th scope="col" class="number">row</th>
                <th scope="col" class="number">column</th>
                <th scope="col" class="number">weight</th>
              </tr>
            </thead>
            <tbody>
              {weights.map(([source, weight]) => (
                <tr key={source}>
                  {source < photo.grid[0] * photo.grid[1] ? (
                    <>
                      <td class="number">{Math.floor(source / photo.grid[1]) + 1}</td>
                      <td class="number">{(source % photo.grid[1]) + 1}</td>
                    </>
                  ) : (
                    <td colSpan={2}>CLS token</td>
                  )}
                  <td class="number">{weight.toPrecision(3)}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </details>
      </Panel>
    </div>
  );
}

export function TopPhotoTile({ concept, most, top }: { concept: number; most: number; top: TopPhoto }) {
  const heat = useMemo<Heat>(
    () => ({ values: new Map(top.patches.map((patch, entry) => [patch, top.values[entry]!])), most, color: conceptColor(concept) }),
    [concept, top],
  );
  return (
    <figure>
      <PatchPicture
        source={`/api/atlas/photos/${top.photo}/image`}
        grid={top.grid}
        ratio={top.grid[1] / top.grid[0]}
        view="heat"
        heat={heat}
        label={`${top.name}: fires on ${top.patches.length} patches, up to ${top.value.toFixed(1)}`}
      />
      <figcaption>{top.value.toFixed(1)}</figcaption>
    </figure>
  );
}

function BeforeAfter({ source, photo, reduction }: { source: string; photo: Photo; reduction: Reduction }) {
  const every = useMemo(() => Array.from({ length: reduction.before }, (_, patch) => patch), [reduction.before]);
  const colors = useMemo(() => reduction.concept.map((concept, token) => tokenColor(concept, token)), [reduction]);
  return (
    <div class="before">
      <figure>
        <figcaption>
          Before: {reduction.before} tokens
        </figcaption>
        <TokenBlock source={source} grid={photo.grid} anchors={every} label={`All ${reduction.before} patches`} />
      </figure>
      <figure>
        <figcaption>
          After: {reduction.after} tokens
        </figcaption>
        <TokenBlock source={source} grid={photo.grid} anchors={reduction.anchor} colors={colors} label={`${reduction.after} tokens that remain, each drawn as the patch at its position`} />
      </figure>
    </div>
  );
}

interface SpentProps {
  reduction: Reduction;
  photo: Photo;
  shown: number | null;
  onHeat: (concept: number) => void;
}

function SpentPanel({ reduction, photo, shown, onHeat }: SpentProps) {
  const [all, setAll] = useState(false);
  const spent = useMemo(() => {
    const sums = new Map<number, { tokens: number; patches: number }>();
    reduction.concept.forEach((concept, token) => {
      const sum = sums.get(concept) ?? { tokens: 0, patches: 0 };
      sum.tokens += 1;
      sum.patches += reduction.size[token]!;
      sums.set(concept, sum);
    });
    return [...sums].sort(([a, first], [b, second]) => second.tokens - first.tokens || second.patches - first.patches || a - b);
  }, [reduction]);
  if (spent.length === 1 && spent[0]![0] < 0) return null;
  const most = Math.max(...spent.map(([, sum]) => sum.tokens));
  return (
    <Panel title="Tokens spent per concept">
      <table class="spent">
        <thead>
          <tr>
            <th scope="col">concept</th>
            <th scope="col" class="number">tokens</th>
            <th scope="col" class="number">patches</th>
          </tr>
        </thead>
        <tbody>
          {(all ? spent : spent.slice(0, 10)).map(([concept, sum]) => (
            <tr key={concept}>
              <td>
                <button type="button" class="link" aria-pressed={shown === concept} disabled={concept < 0} onClick={() => onHeat(concept)}>
                  <Swatch concept={concept} /> {conceptName(concept, photo.names)}
                </button>
              </td>
              <td class="number">
                <Bar share={sum.tokens / most} concept={concept} /> {sum.tokens}
              </td>
              <td class="number">{sum.patches}</td>
            </tr>
          ))}
        </tbody>
      </table>
      {spent.length > 10 && (
        <button type="button" class="link" onClick={() => setAll(!all)}>
          {all ? "Fewer" : `All ${spent.length}`}
        </button>
      )}
    </Panel>
  );
}
