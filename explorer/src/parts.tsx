// Small parts that several pages share.

import type { ComponentChildren } from "preact";
import { useEffect, useId, useState } from "preact/hooks";
import { conceptColor, css } from "./color";
import { link } from "./router";

export function Problem({ text }: { text: string }) {
  return text ? (
    <p class="problem" role="alert">
      {text}
    </p>
  ) : null;
}

export function Swatch({ concept }: { concept: number }) {
  return <span class="swatch" aria-hidden="true" style={{ background: concept < 0 ? "transparent" : css(conceptColor(concept)) }} />;
}

export function conceptName(concept: number, names: Record<string, string>): string {
  return concept < 0 ? "no concept" : (names[String(concept)] ?? `concept ${concept}`);
}

export function ConceptLink({ id, name, photo }: { id: number; name: string; photo?: string | null }) {
  return (
    <a class="concept" href={link("atlas", { concept: id, photo })}>
      <Swatch concept={id} />
      <span>{name || `concept ${id}`}</span>
    </a>
  );
}

/** A bar of a list, which a screen reader reads as text. */
export function Bar({ share, concept }: { share: number; concept: number }) {
  return (
    <span class="bar" aria-hidden="true">
      <span style={{ width: `${Math.max(1, 100 * Math.min(1, share))}%`, background: concept < 0 ? "var(--muted)" : css(conceptColor(concept)) }} />
    </span>
  );
}

interface SliderProps {
  label: string;
  value: number;
  min: number;
  max: number;
  help?: string;
  disabled?: boolean;
  onInput: (value: number) => void;
}

export function Slider({ label, value, min, max, help, disabled, onInput }: SliderProps) {
  const id = useId();
  return (
    <div class="slider">
      <label for={id}>{label}</label>
      <input
        id={id}
        type="range"
        min={min}
        max={max}
        step={1}
        value={value}
        disabled={disabled}
        aria-describedby={help ? `${id}-help` : undefined}
        onInput={(event) => onInput(Number(event.currentTarget.value))}
      />
      <output for={id}>{value}</output>
      {help && (
        <small id={`${id}-help`} class="help">
          {help}
        </small>
      )}
    </div>
  );
}

export function Panel({ title, children, actions }: { title: string; children: ComponentChildren; actions?: ComponentChildren }) {
  return (
    <section class="panel">
      <header>
        <h2>{title}</h2>
        {actions}
      </header>
      {children}
    </section>
  );
}

/** Copy the address of the current state. */
export function ShareButton() {
  const [copied, setCopied] = useState(false);
  useEffect(() => {
    if (!copied) return;
    const timer = setTimeout(() => setCopied(false), 2000);
    return () => clearTimeout(timer);
  }, [copied]);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(location.href);
      setCopied(true);
    } catch {
      prompt("Copy this address:", location.href);
    }
  };
  return (
    <button type="button" class="quiet" onClick={copy}>
      {copied ? "Copied" : "Copy link"}
    </button>
  );
}

export function percent(share: number, digits = 0): string {
  return `${(100 * share).toFixed(digits)}%`;
}

export function milliseconds(seconds: number | undefined): string {
  if (seconds === undefined) return "–";
  return seconds < 1 ? `${Math.round(1000 * seconds)} ms` : `${seconds.toFixed(1)} s`;
}

interface PagesProps {
  offset: number;
  size: number;
  total: number;
  onTurn: (offset: number | null) => void;
}

/** Buttons to turn the pages of a long list. */
export function Pages({ offset, size, total, onTurn }: PagesProps) {
  if (total <= size) return null;
  return (
    <div class="row">
      <button type="button" class="quiet" disabled={!offset} onClick={() => onTurn(Math.max(0, offset - size) || null)}>
        Previous
      </button>
      <span class="help">
        {offset + 1} to {Math.min(offset + size, total)} of {total.toLocaleString("en")}
      </span>
      <button type="button" class="quiet" disabled={offset + size >= total} onClick={() => onTurn(offset + size)}>
        Next
      </button>
    </div>
  );
}
