// The explorer: five pages around one address bar.

import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { get, message } from "./api";
import { ApiDoc } from "./apidoc";
import { Atlas } from "./atlas";
import { Compare } from "./compare";
import { Inspect } from "./inspect";
import { Problem } from "./parts";
import { followLinks, usePlace } from "./router";
import { Runs } from "./runs";
import "./style.css";
import type { Info } from "./types";

const PAGES: [string, string][] = [
  ["inspect", "Inspect"],
  ["compare", "Compare"],
  ["atlas", "Concepts"],
  ["runs", "Runs"],
  ["api", "API"],
];
const THEMES = ["auto", "light", "dark"] as const;
type Theme = (typeof THEMES)[number];

function App() {
  const { page } = usePlace();
  const [info, setInfo] = useState<Info | null>(null);
  const [problem, setProblem] = useState("");
  const [theme, setTheme] = useState<Theme>(() => {
    const saved = localStorage.getItem("torino-theme") as Theme | null;
    return saved && THEMES.includes(saved) ? saved : "auto";
  });
  useEffect(() => {
    get<Info>("/api/info")
      .then(setInfo)
      .catch((error: unknown) => setProblem(message(error)));
    document.addEventListener("click", followLinks);
    return () => document.removeEventListener("click", followLinks);
  }, []);
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
    localStorage.setItem("torino-theme", theme);
  }, [theme]);
  const title = PAGES.find(([name]) => name === page)?.[1] ?? "Inspect";
  useEffect(() => {
    document.title = `${title} · torino explorer`;
  }, [title]);
  return (
    <>
      <a class="skip" href="#content">
        Skip to the content
      </a>
      <header class="top">
        <a class="brand" href="/inspect">
          <img src="/assets/icon.svg" alt="" width="28" height="28" />
          torino <span>explorer</span>
        </a>
        <nav aria-label="Pages">
          {PAGES.map(([name, label]) => (
            <a key={name} href={`/${name}`} aria-current={name === page ? "page" : undefined}>
              {label}
            </a>
          ))}
        </nav>
        <span class="spacer" />
        {info && (
          <span class="model help">
            {info.model}
            {info.sae ? ` · ${info.sae.name}` : ""}
          </span>
        )}
        <button type="button" class="quiet theme" aria-label={`Theme: ${theme}. Change it`} title={`Theme: ${theme}`} onClick={() => setTheme(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]!)}>
          {theme === "auto" ? "◐" : theme === "light" ? "☀" : "☾"}
        </button>
      </header>
      <main id="content" tabIndex={-1}>
        <Problem text={problem} />
        {info && <Body page={page} info={info} />}
        {!info && !problem && <p class="loading" role="status">Loading …</p>}
      </main>
    </>
  );
}

function Body({ page, info }: { page: string; info: Info }) {
  switch (page) {
    case "compare":
      return <Compare info={info} />;
    case "atlas":
      return <Atlas info={info} />;
    case "runs":
      return <Runs info={info} />;
    case "api":
      return <ApiDoc />;
    default:
      return <Inspect info={info} />;
  }
}

render(<App />, document.getElementById("app")!);
