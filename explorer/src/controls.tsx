// Choose a method and its settings.

import { Slider } from "./parts";
import { writeSpec, type Choice } from "./spec";
import type { Method } from "./types";

const MAX_K = 8;

interface Props {
  methods: Method[];
  choice: Choice;
  patches: number;
  onChange: (spec: string, moved: boolean) => void;
}

export function MethodControls({ methods, choice, patches, onChange }: Props) {
  const method = methods.find((item) => item.name === choice.method);
  const set = (changes: Partial<Choice>, moved = true) => {
    const next = { ...choice, ...changes };
    onChange(writeSpec(next, methods.find((item) => item.name === next.method), patches), moved);
  };
  const fixed = choice.budget !== null || (method !== undefined && !method.adaptive);
  const budget = choice.budget ?? Math.max(1, Math.round(patches / 4));
  const own = methods.filter((item) => item.concepts);
  const others = methods.filter((item) => !item.concepts);
  return (
    <div class="controls">
      <label class="field">
        <span>Method</span>
        <select value={choice.method} onChange={(event) => set({ method: event.currentTarget.value }, false)}>
          <optgroup label="By concepts">
            {own.map((item) => (
              <option key={item.name} value={item.name}>
                {item.label}
              </option>
            ))}
          </optgroup>
          <optgroup label="Others">
            {others.map((item) => (
              <option key={item.name} value={item.name}>
                {item.label}
              </option>
            ))}
          </optgroup>
        </select>
      </label>
      {method && <p class="help">{method.summary}</p>}
      {method?.kd && (
        <>
          <Slider label="k" value={choice.k} min={1} max={MAX_K} help="concepts of a patch that count" onInput={(k) => set({ k, delta: Math.min(choice.delta, k) })} />
          <Slider label="δ" value={choice.delta} min={1} max={choice.k} disabled={choice.k === 1} help="concepts that linked patches share" onInput={(delta) => set({ delta })} />
        </>
      )}
      {method?.budget && (
        <>
          {method.adaptive && (
            <label class="check">
              <input type="checkbox" checked={fixed} onChange={(event) => set({ budget: event.currentTarget.checked ? budget : null }, false)} />
              Fixed budget
            </label>
          )}
          {fixed && <Slider label="Budget" value={Math.min(budget, patches)} min={1} max={patches} help="tokens that remain" onInput={(value) => set({ budget: value })} />}
        </>
      )}
    </div>
  );
}
