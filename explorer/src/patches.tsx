// The photo with its patches: a canvas for the eye, and arrow keys with a live region for everybody.

import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { css, tokenColor, type Rgb } from "./color";
import type { Grid, Reduction } from "./types";

export type View = "groups" | "kept" | "heat" | "photo";

export interface Heat {
  values: Map<number, number>;
  most: number;
  color: Rgb;
}

interface Props {
  source: string;
  grid: Grid;
  ratio: number;
  view: View;
  reduction?: Reduction | null;
  heat?: Heat | null;
  hovered?: number | null;
  selected?: number | null;
  accent?: Set<number> | null;
  label: string;
  describe?: (patch: number) => string;
  onHover?: (patch: number | null) => void;
  onPick?: (patch: number) => void;
  onDrawn?: () => void;
}

export function PatchPicture(props: Props) {
  const { grid, reduction, view, heat, hovered, selected, accent } = props;
  const [rows, columns] = grid;
  const canvas = useRef<HTMLCanvasElement>(null);
  const [width, setWidth] = useState(0);
  const [cursor, setCursor] = useState<number | null>(null);
  const interactive = Boolean(props.onPick);

  useLayoutEffect(() => {
    const element = canvas.current;
    if (!element) return;
    const observer = new ResizeObserver(([entry]) => setWidth(Math.round(entry!.contentRect.width)));
    observer.observe(element);
    return () => observer.disconnect();
  }, []);

  useLayoutEffect(() => {
    if (!canvas.current || !width) return;
    draw(canvas.current, width, width / props.ratio, grid, { view, reduction, heat, hovered, selected, accent });
    props.onDrawn?.();
  }, [width, rows, columns, reduction, view, heat, hovered, selected, accent]);

  useEffect(() => setCursor(null), [props.source]);

  const patchAt = (event: PointerEvent | MouseEvent): number => {
    const box = canvas.current!.getBoundingClientRect();
    const column = Math.min(columns - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * columns)));
    const row = Math.min(rows - 1, Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * rows)));
    return row * columns + column;
  };

  const onKeyDown = (event: KeyboardEvent) => {
    const at = cursor ?? hovered ?? 0;
    const moves: Record<string, number> = {
      ArrowLeft: at % columns ? at - 1 : at,
      ArrowRight: (at + 1) % columns ? at + 1 : at,
      ArrowUp: at >= columns ? at - columns : at,
      ArrowDown: at + columns < rows * columns ? at + columns : at,
      Home: at - (at % columns),
      End: at - (at % columns) + columns - 1,
    };
    if (event.key in moves) {
      event.preventDefault();
      setCursor(moves[event.key]!);
      props.onHover?.(moves[event.key]!);
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      setCursor(at);
      props.onPick?.(at);
    } else if (event.key === "Escape") {
      setCursor(null);
      props.onHover?.(null);
    }
  };

  const focus = interactive
    ? {
        tabIndex: 0,
        role: "application" as const,
        "aria-roledescription": "grid of patches",
        "aria-label": `${props.label} Arrow keys move between ${rows} rows and ${columns} columns of patches, Enter selects.`,
        onKeyDown,
        onFocus: () => {
          if (cursor === null) {
            const start = Math.floor(rows / 2) * columns + Math.floor(columns / 2);
            setCursor(start);
            if (hovered === null || hovered === undefined) props.onHover?.(start);
          }
        },
        onBlur: () => props.onHover?.(null),
      }
    : { role: "img" as const, "aria-label": props.label };

  return (
    <div class="patches">
      <div class={interactive ? "picture interactive" : "picture"} {...focus}>
        <img src={props.source} alt="" draggable={false} style={{ aspectRatio: String(props.ratio) }} />
        <canvas
          ref={canvas}
          aria-hidden="true"
          onPointerMove={props.onHover && ((event) => event.pointerType !== "touch" && props.onHover!(patchAt(event)))}
          onPointerLeave={props.onHover && (() => props.onHover!(null))}
          onClick={props.onPick && ((event) => props.onPick!(patchAt(event)))}
        />
      </div>
      {interactive && (
        <p class="hidden" role="status" aria-live="polite">
          {cursor !== null && props.describe ? props.describe(cursor) : ""}
        </p>
      )}
    </div>
  );
}

interface Drawn {
  view: View;
  reduction?: Reduction | null;
  heat?: Heat | null;
  hovered?: number | null;
  selected?: number | null;
  accent?: Set<number> | null;
}

function draw(canvas: HTMLCanvasElement, width: number, height: number, grid: Grid, drawn: Drawn): void {
  const scale = Math.min(devicePixelRatio || 1, 2);
  const [rows, columns] = grid;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const pen = canvas.getContext("2d")!;
  const x = (column: number) => Math.round((column / columns) * canvas.width);
  const y = (row: number) => Math.round((row / rows) * canvas.height);
  const fill = (patch: number, color: string) => {
    const row = Math.floor(patch / columns);
    const column = patch % columns;
    pen.fillStyle = color;
    pen.fillRect(x(column), y(row), x(column + 1) - x(column), y(row + 1) - y(row));
  };
  const { reduction, heat, view } = drawn;
  const active = !reduction ? -1 : drawn.hovered != null ? reduction.assigned[drawn.hovered]! : (drawn.selected ?? -1);
  if (view === "heat" && heat) {
    for (let patch = 0; patch < rows * columns; patch++) {
      const strength = (heat.values.get(patch) ?? 0) / (heat.most || 1);
      if (strength > 0) fill(patch, css(heat.color, 0.25 + 0.55 * strength));
      else fill(patch, "rgb(12 14 20 / 0.62)");
    }
  } else if (reduction && view === "groups") {
    reduction.assigned.forEach((token, patch) => {
      if (token < 0) fill(patch, "rgb(12 14 20 / 0.72)");
      else {
        const faded = active >= 0 && token !== active;
        if (reduction.size[token]! > 1) fill(patch, css(tokenColor(reduction.concept[token]!, token), faded ? 0.32 : 0.56));
        if (faded) fill(patch, "rgb(12 14 20 / 0.38)");
      }
    });
  } else if (reduction && view === "kept") {
    const kept = new Set(reduction.anchor);
    for (let patch = 0; patch < rows * columns; patch++) {
      if (!kept.has(patch)) fill(patch, "rgb(250 250 252 / 0.8)");
      else if (drawn.accent?.has(patch)) fill(patch, "rgb(255 179 0 / 0.45)");
    }
  }
  if (reduction && view !== "photo" && view !== "heat") {
    const outline = (isEdge: (token: number, other: number) => boolean) => {
      pen.beginPath();
      reduction.assigned.forEach((token, patch) => {
        const row = Math.floor(patch / columns);
        const column = patch % columns;
        if (column + 1 < columns && isEdge(token, reduction.assigned[patch + 1]!)) {
          pen.moveTo(x(column + 1), y(row));
          pen.lineTo(x(column + 1), y(row + 1));
        }
        if (row + 1 < rows && isEdge(token, reduction.assigned[patch + columns]!)) {
          pen.moveTo(x(column), y(row + 1));
          pen.lineTo(x(column + 1), y(row + 1));
        }
      });
      pen.stroke();
    };
    pen.lineWidth = Math.max(1, scale);
    pen.strokeStyle = view === "groups" ? (active >= 0 ? "rgb(255 255 255 / 0.4)" : "rgb(255 255 255 / 0.85)") : "rgb(90 96 110 / 0.35)";
    outline((token, other) => token !== other);
    if (view === "groups" && active >= 0) {
      pen.lineWidth = 3 * scale;
      pen.strokeStyle = "#fff";
      outline((token, other) => token !== other && (token === active || other === active));
    }
  }
  if (drawn.hovered != null) {
    const row = Math.floor(drawn.hovered / columns);
    const column = drawn.hovered % columns;
    pen.lineWidth = 3 * scale;
    pen.strokeStyle = "#111";
    pen.strokeRect(x(column), y(row), x(column + 1) - x(column), y(row + 1) - y(row));
    pen.lineWidth = 1.5 * scale;
    pen.strokeStyle = "#fff";
    pen.strokeRect(x(column), y(row), x(column + 1) - x(column), y(row + 1) - y(row));
  }
}

interface BlockProps {
  source: string;
  grid: Grid;
  anchors: number[];
  colors?: Rgb[];
  label: string;
}

/** Tokens side by side in their order, each drawn as the patch at its position. */
export function TokenBlock({ source, grid, anchors, colors, label }: BlockProps) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const image = useRef<HTMLImageElement | null>(null);
  const [loaded, setLoaded] = useState("");
  useEffect(() => {
    const picture = new Image();
    picture.onload = () => {
      image.current = picture;
      setLoaded(source);
    };
    picture.src = source;
  }, [source]);
  useLayoutEffect(() => {
    const picture = image.current;
    if (!canvas.current || !picture || loaded !== source) return;
    const [rows, columns] = grid;
    const cell = 16;
    const across = Math.min(columns, Math.max(1, Math.ceil(Math.sqrt((anchors.length * columns) / rows))));
    const down = Math.max(1, Math.ceil(anchors.length / across));
    canvas.current.width = across * cell;
    canvas.current.height = down * cell;
    const pen = canvas.current.getContext("2d")!;
    const width = picture.naturalWidth / columns;
    const height = picture.naturalHeight / rows;
    anchors.forEach((anchor, token) => {
      const left = (token % across) * cell;
      const top = Math.floor(token / across) * cell;
      if (anchor < 0) {
        pen.fillStyle = css(colors?.[token] ?? [128, 128, 128]);
        pen.fillRect(left, top, cell - 1, cell - 1);
        return;
      }
      const x = (anchor % columns) * width;
      const y = Math.floor(anchor / columns) * height;
      pen.drawImage(picture, x, y, width, height, left, top, cell - 1, cell - 1);
      if (colors) {
        pen.fillStyle = css(colors[token]!);
        pen.fillRect(left, top + cell - 4, cell - 1, 3);
      }
    });
    canvas.current.style.width = `${(100 * across) / columns}%`;
  }, [loaded, source, anchors, grid]);
  return (
    <div class="block">
      <canvas ref={canvas} role="img" aria-label={label} />
    </div>
  );
}
