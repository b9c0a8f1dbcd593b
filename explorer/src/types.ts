// What the server sends; see /api/openapi.json.

export interface Method {
  name: string;
  label: string;
  summary: string;
  concepts: boolean;
  kd: boolean;
  budget: boolean;
  adaptive: boolean;
  in_tower: boolean;
  merges: boolean;
}

export interface PhotoEntry {
  id: string;
  name: string;
}

export interface PhotoPage {
  total: number;
  photos: PhotoEntry[];
}

export interface SaeInfo {
  name: string;
  kind: string;
  latents: number;
  levels: number[];
  names: number;
  read_only: string;
}

export interface Info {
  version: string;
  model: string;
  methods: Method[];
  default: string;
  sae: SaeInfo | null;
  photos: PhotoPage;
  own_photos: boolean;
  runs: number;
  edits: boolean;
  limits: { bytes: number; pixels: number };
}

export type Grid = [rows: number, columns: number];

export interface Photo {
  id: string;
  name: string;
  texts: string[];
  notes: string[];
  grid: Grid;
  width: number;
  height: number;
  seconds: number;
  stored: boolean;
  k: number;
  indices: number[];
  values: number[];
  names: Record<string, string>;
}

export interface Reduction {
  by: string;
  spec: string;
  before: number;
  after: number;
  milliseconds: number;
  assigned: number[];
  anchor: number[];
  concept: number[];
  size: number[];
  role: string[];
  score: (number | null)[];
  pruning: boolean;
}

export interface Token {
  token: number;
  anchor: number;
  role: string;
  concept: number | null;
  name: string | null;
  score: number | null;
  sources: number[];
  weights: number[];
  stands_for: number[];
  explanation: string;
}

export type AnswerEvent =
  | { method: number; event: "plan"; reduction: Reduction }
  | { method: number; event: "text"; text: string }
  | { method: number; event: "error"; message: string }
  | {
      method: number;
      event: "done";
      answer: string;
      tokens: number;
      before: number;
      new_tokens: number;
      seconds: Record<string, number>;
      total: number;
    };

export interface ConceptSummary {
  id: number;
  name: string;
  level: number;
  patch_share?: number;
  photo_share?: number;
  specificity?: number;
  mean?: number;
  max?: number;
  monosemanticity?: number | null;
}

export interface ConceptReference {
  id: number;
  name: string;
}

export interface TopPhoto {
  photo: number;
  name: string;
  value: number;
  grid: Grid;
  patches: number[];
  values: number[];
}

export interface Concept extends ConceptSummary {
  nearest: (ConceptReference & { cosine: number })[];
  cofiring: (ConceptReference & { patches: number; jaccard: number })[];
  parent: ConceptReference | null;
  children: ConceptReference[];
  histogram: { edges: number[]; counts: number[] } | null;
  photos: TopPhoto[];
  patches: { photo: number; patch: number; value: number; grid: Grid }[];
}

export interface Branch extends ConceptReference {
  level: number;
  children: number;
}

export interface AtlasStatus {
  ready: boolean;
  done: number;
  total: number;
  photos: string;
  limited: boolean;
  error: string;
  dead: number | null;
  monosemanticity: number | null;
  chance: number | null;
}

export interface RunSetting {
  id: string;
  method: string;
  label: string;
  spec: string;
  budget: string;
  answered: number;
  accuracy: number | null;
}

export interface Run {
  number: number;
  name: string;
  model: string;
  tasks: { task: string; samples: number }[];
  settings: RunSetting[];
  budgets: string[];
  answers: number;
  planned: number;
  finished: boolean;
  notes: string[];
}

export interface SampleRow {
  task: string;
  index: string;
  question: string;
  answers: number;
  correct: number;
  wrong: number;
}

export interface Sample {
  photo: string;
  task: string;
  index: string;
  question: string;
  prompt: string;
  truth: string[];
  answers: {
    setting: string;
    label: string;
    spec: string;
    budget: string;
    answer: string | null;
    error: string | null;
    tokens: number | null;
    before: number | null;
    correct: boolean | null;
  }[];
}
