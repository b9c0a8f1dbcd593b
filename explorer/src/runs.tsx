// Runs: browse the answers of an evaluation, also while it is written.

import { useEffect, useState } from "preact/hooks";
import { get, isAbort, message } from "./api";
import { Pages, Panel, Problem, ShareButton, percent } from "./parts";
import { link, useQuery } from "./router";
import type { Info, Run, Sample, SampleRow } from "./types";

const PAGE = 40;
const EVERY = 3000;

export function Runs({ info }: { info: Info }) {
  const [query, change] = useQuery();
  const [runs, setRuns] = useState<Run[]>([]);
  const [problem, setProblem] = useState("");
  const number = Number(query.get("run")) || 0;
  useEffect(() => {
    let timer = 0;
    const look = async () => {
      try {
        const found = (await get<{ runs: Run[] }>("/api/runs")).runs;
        setRuns(found);
        setProblem("");
        if (found.some((run) => !run.finished)) timer = window.setTimeout(() => void look(), EVERY);
      } catch (error) {
        setProblem(message(error));
        timer = window.setTimeout(() => void look(), EVERY);
      }
    };
    if (info.runs) void look();
    return () => clearTimeout(timer);
  }, []);
  if (!info.runs) {
    return (
      <div>
        <h1>Runs</h1>
        <p>
          No evaluation run is open. Start the explorer with one: <code>torino explore --run FOLDER</code>. A run that <code>torino eval</code> is still writing can be opened too.
        </p>
      </div>
    );
  }
  const run = runs[number];
  return (
    <div class="runs">
      <h1>Runs</h1>
      <Problem text={problem} />
      {runs.length > 1 && (
        <label class="field inline">
          <span>Run</span>
          <select value={String(number)} onChange={(event) => change({ run: event.currentTarget.value, task: null, sample: null, lost: null, kept: null, offset: null })}>
            {runs.map((item) => (
              <option key={item.number} value={String(item.number)}>
                {item.name}
              </option>
            ))}
          </select>
        </label>
      )}
      {run && <RunView run={run} />}
    </div>
  );
}

function RunView({ run }: { run: Run }) {
  const [query, change] = useQuery();
  const sample = query.get("sample");
  return (
    <>
      <p class="help" role="status">
        {run.name}: {run.model}, {run.answers.toLocaleString("en")} of {run.planned.toLocaleString("en")} answers
        {run.finished ? "." : ". The run is still being written; this page follows it."}
      </p>
      {!run.finished && <progress value={run.answers} max={run.planned} aria-label="Answers so far" />}
      {run.notes.map((text) => (
        <p class="note" key={text}>
          {text}
        </p>
      ))}
      {sample !== null && <SampleView run={run} task={query.get("in") ?? ""} index={sample} onClose={() => change({ sample: null, in: null })} />}
      <Filters run={run} />
      <Samples run={run} />
      <Panel title="Settings">
        <div class="scroll">
          <table>
            <thead>
              <tr>
                <th scope="col">setting</th>
                <th scope="col" class="number">budget</th>
                <th scope="col" class="number">answers</th>
                <th scope="col" class="number">correct</th>
              </tr>
            </thead>
            <tbody>
              {run.settings.map((setting) => (
                <tr key={setting.id}>
                  <td>
                    {setting.label} <span class="help">{setting.spec}</span>
                  </td>
                  <td class="number">{setting.budget}</td>
                  <td class="number">{setting.answered}</td>
                  <td class="number">{setting.accuracy === null ? "–" : percent(setting.accuracy, 1)}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      </Panel>
    </>
  );
}

function Filters({ run }: { run: Run }) {
  const [query, change] = useQuery();
  const set = (name: string, value: string) => change({ [name]: value, offset: null });
  const methods = [...new Map(run.settings.map((setting) => [setting.method, setting.label])).entries()];
  const choose = (name: string, label: string, options: [string, string][]) => (
    <label class="field" key={name}>
      <span>{label}</span>
      <select value={query.get(name) ?? ""} onChange={(event) => set(name, event.currentTarget.value)}>
        <option value="">any</option>
        {options.map(([value, text]) => (
          <option key={value} value={value}>
            {text}
          </option>
        ))}
      </select>
    </label>
  );
  const settings = run.settings.map((setting) => [setting.id, setting.id === "full" ? setting.label : `${setting.label}, ${setting.budget}`] as [string, string]);
  return (
    <form class="panel filters" onSubmit={(event) => event.preventDefault()}>
      {choose("task", "Task", run.tasks.map((task) => [task.task, task.task]))}
      {choose("method", "Method", methods)}
      {choose("budget", "Budget", run.budgets.map((budget) => [budget, budget]))}
      {choose("correct", "Answers", [["true", "some correct"], ["false", "some wrong"]])}
      {choose("lost", "Lost by", settings)}
      {choose("kept", "but kept by", settings)}
      <label class="field grow">
        <span>Search</span>
        <input type="search" value={query.get("search") ?? ""} onInput={(event) => change({ search: event.currentTarget.value, offset: null }, true)} />
      </label>
    </form>
  );
}

function Samples({ run }: { run: Run }) {
  const [query, change] = useQuery();
  const [found, setFound] = useState<{ total: number; samples: SampleRow[] } | null>(null);
  const [problem, setProblem] = useState("");
  const filters = Object.fromEntries(["task", "method", "budget", "correct", "lost", "kept", "search"].map((name) => [name, query.get(name)]));
  const offset = Number(query.get("offset")) || 0;
  const key = JSON.stringify([run.number, filters, offset, run.answers]);
  useEffect(() => {
    const abort = new AbortController();
    const timer = setTimeout(() => {
      get<{ total: number; samples: SampleRow[] }>(`/api/runs/${run.number}/samples`, { ...filters, offset, limit: PAGE }, abort.signal)
        .then((value) => {
          setFound(value);
          setProblem("");
        })
        .catch((error: unknown) => {
          if (!isAbort(error)) setProblem(message(error));
        });
    }, 100);
    return () => {
      clearTimeout(timer);
      abort.abort();
    };
  }, [key]);
  return (
    <Panel title={found ? `${found.total.toLocaleString("en")} ${found.total === 1 ? "sample" : "samples"}` : "Samples"} actions={<ShareButton />}>
      <Problem text={problem} />
      <ul class="samples">
        {found?.samples.map((row) => (
          <li key={`${row.task} ${row.index}`}>
            <button
              type="button"
              aria-current={query.get("sample") === row.index && query.get("in") === row.task ? "true" : undefined}
              onClick={() => {
                change({ sample: row.index, in: row.task });
                scrollTo({ top: 0 });
              }}
            >
              <span class="help">
                {row.task} {row.index}
              </span>
              <span class="grow">{row.question}</span>
              <span class="marks">
                <span class="good">✓ {row.correct}</span> <span class="bad">✗ {row.wrong}</span>
              </span>
            </button>
          </li>
        ))}
      </ul>
      {found && <Pages offset={offset} size={PAGE} total={found.total} onTurn={(start) => change({ offset: start })} />}
    </Panel>
  );
}

function SampleView({ run, task, index, onClose }: { run: Run; task: string; index: string; onClose: () => void }) {
  const [sample, setSample] = useState<Sample | null>(null);
  const [problem, setProblem] = useState("");
  const [missing, setMissing] = useState(false);
  useEffect(() => {
    setProblem("");
    setMissing(false);
    get<Sample>(`/api/runs/${run.number}/sample`, { task, index })
      .then(setSample)
      .catch((error: unknown) => setProblem(message(error)));
  }, [run.number, run.answers, task, index]);
  if (!sample) return <Problem text={problem} />;
  return (
    <Panel
      title={`${task} ${index}`}
      actions={
        <span class="row">
          <ShareButton />
          <button type="button" class="quiet" onClick={onClose}>
            Close
          </button>
        </span>
      }
    >
      <Problem text={problem} />
      <div class="sample">
        {missing ? (
          <p class="help">The photo is not available.</p>
        ) : (
          <img src={`/api/photos/${sample.photo}/thumbnail`} alt={`Photo of ${task} ${index}`} onError={() => setMissing(true)} />
        )}
        <div class="grow">
          <p class="question">{sample.question || "The question is not available."}</p>
          {sample.truth.length > 0 && (
            <p>
              Right answer: <b>{[...new Set(sample.truth)].join(" or ")}</b>
            </p>
          )}
          {!missing && (
            <p class="row">
              <a class="button" href={link("inspect", { photo: sample.photo })}>
                Inspect the photo
              </a>
              <a class="button quiet" href={link("compare", { photo: sample.photo, question: sample.prompt })}>
                Ask again
              </a>
            </p>
          )}
        </div>
      </div>
      <div class="scroll">
        <table>
          <thead>
            <tr>
              <th scope="col">setting</th>
              <th scope="col" class="number">tokens</th>
              <th scope="col">answer</th>
              <th scope="col">
                <span class="hidden">correct</span>
              </th>
            </tr>
          </thead>
          <tbody>
            {sample.answers.map((answer) => (
              <tr key={answer.setting} class={answer.correct === false ? "wrong" : ""}>
                <td>
                  {answer.label} <span class="help">{answer.budget}</span>
                </td>
                <td class="number">{answer.tokens ?? "–"}</td>
                <td>{answer.error ? <span class="bad">{answer.error}</span> : answer.answer}</td>
                <td>{answer.correct === null ? "" : answer.correct ? <span class="good">✓ right</span> : <span class="bad">✗ wrong</span>}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Panel>
  );
}
