// Checks a dashboard's JSON against Grafana's own types: node dashboard.mjs FILE
//
// The JSON becomes a literal in TypeScript, so the compiler also reports names that Grafana does not know.

import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import path from "node:path";
import { fileURLToPath } from "node:url";

const here = path.dirname(fileURLToPath(import.meta.url));
const dashboard = JSON.parse(readFileSync(process.argv[2], "utf8"));
// The other fields of a query depend on its data source. Grafana's types allow any in a panel but not in an annotation.
for (const { target } of dashboard.annotations.list) {
  delete target.expr;
  delete target.legendFormat;
}
const panels = dashboard.panels.filter((panel) => panel.type !== "row");
const kinds = [...new Set(panels.map((panel) => panel.type))];
const module = (kind) => {
  const name = { timeseries: "TimeSeries", heatmap: "Heatmap", stat: "Stat", table: "Table" }[kind];
  if (!name) throw new Error(`panels of type ${kind} are not checked: add it here`);
  return `@grafana/schema/dist/esm/raw/composable/${kind}/panelcfg/x/${name}PanelCfg_types.gen`;
};

const source = `
import type { Dashboard } from "@grafana/schema";
${kinds.map((kind) => `import type * as ${kind} from "${module(kind)}";`).join("\n")}

// JSON has a string where Grafana's code has a member of an enum.
type Json<T> = T extends string ? \`\${T}\` : T extends object ? { [K in keyof T]: Json<T[K]> } : T;

export const dashboard: Json<Dashboard> = ${JSON.stringify(dashboard, null, 1)};
${panels.map((panel) => `export const options${panel.id}: Json<Partial<${panel.type}.Options>> = ${JSON.stringify(panel.options)};`).join("\n")}
${panels
  .filter((panel) => panel.fieldConfig.defaults.custom && ["timeseries", "heatmap"].includes(panel.type))
  .map(
    (panel) =>
      `export const fields${panel.id}: Json<${panel.type}.FieldConfig> = ${JSON.stringify(panel.fieldConfig.defaults.custom)};`,
  )
  .join("\n")}
`;

const folder = mkdtempSync(path.join(here, "node_modules", ".dashboard-"));
try {
  const file = path.join(folder, "dashboard.ts");
  writeFileSync(file, source);
  const flags = ["--noEmit", "--strict", "--skipLibCheck", "--module", "nodenext", "--target", "es2022"];
  execFileSync(path.join(here, "node_modules", ".bin", "tsc"), [...flags, file], { stdio: "inherit" });
} catch (error) {
  process.exitCode = 1;
  console.error(error.message);
} finally {
  rmSync(folder, { recursive: true });
}
