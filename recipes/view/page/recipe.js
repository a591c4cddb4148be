// What the run was made with, how it ended, and who its subagents were.

import { fill, h, num } from "./dom.js";
import { store } from "./store.js";

export function recipe(main) {
  const { about } = store;
  fill(
    main,
    h("h1", {}, "Recipe"),
    about.done ? h("section", { class: "card" }, h("h2", {}, "How it ended"), fields(flat(about.done))) : null,
    about.roster.length ? h("section", { class: "card" }, h("h2", {}, "Subagents over time"), roster(about.roster)) : null,
    h("section", { class: "card" }, h("h2", {}, "Every setting"), fields(flat(about.recipe))),
  );
}

function flat(value, name = "") {
  const nested = value !== null && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length;
  if (!nested) return [[name, value]];
  return Object.entries(value).flatMap(([key, inner]) => flat(inner, name ? `${name}.${key}` : key));
}

const fields = (rows) =>
  h("dl", { class: "fields" }, rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, shown(value)))));

const shown = (value) => (typeof value === "number" ? num(value, 6) : typeof value === "string" ? value || "–" : JSON.stringify(value));

function roster(entries) {
  const rows = entries.flatMap((entry) =>
    Object.entries(entry.cast).flatMap(([role, players]) =>
      players.map((p) => h("tr", {}, [entry.iteration, entry.by, role || "everybody else", p.path.split("/").pop(), p.sha256.slice(0, 12), num(p.weight)].map((c) => h("td", {}, String(c))))),
    ),
  );
  const heads = ["from iteration", "by", "role", "checkpoint", "sha256", "weight"].map((c) => h("th", { scope: "col" }, c));
  return h("table", { class: "plain" }, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, rows));
}
