// The documentation of the API, drawn from its own description; nothing is loaded from other servers.

import { useEffect, useState } from "preact/hooks";
import { get, message } from "./api";
import { Panel, Problem } from "./parts";

interface Parameter {
  name: string;
  in: string;
  required?: boolean;
  description?: string;
  schema?: { default?: unknown; type?: string };
}

interface Operation {
  summary?: string;
  description?: string;
  tags?: string[];
  parameters?: Parameter[];
  requestBody?: unknown;
}

interface Description {
  info: { title: string; version: string };
  paths: Record<string, Record<string, Operation>>;
}

export function ApiDoc() {
  const [found, setFound] = useState<Description | null>(null);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    get<Description>("/api/openapi.json")
      .then(setFound)
      .catch((error: unknown) => setProblem(message(error)));
  }, []);
  return (
    <div class="apidoc">
      <h1>API</h1>
      <p>
        The page uses nothing but this interface. Its description in OpenAPI: <a href="/api/openapi.json">/api/openapi.json</a>. Errors are one sentence in <code>error.message</code>.
      </p>
      <Problem text={problem} />
      {found &&
        Object.entries(found.paths).flatMap(([path, operations]) =>
          Object.entries(operations).map(([verb, operation]) => (
            <Panel key={verb + path} title={`${verb.toUpperCase()} ${path}`}>
              <p>{operation.description ?? operation.summary}</p>
              {operation.parameters && operation.parameters.length > 0 && (
                <ul>
                  {operation.parameters.map((parameter) => (
                    <li key={parameter.name}>
                      <code>{parameter.name}</code> <span class="help">in {parameter.in}</span> {parameter.description ?? ""}
                      {parameter.schema?.default !== undefined && parameter.schema.default !== "" && (
                        <span class="help"> default: {String(parameter.schema.default)}</span>
                      )}
                    </li>
                  ))}
                </ul>
              )}
            </Panel>
          )),
        )}
    </div>
  );
}
