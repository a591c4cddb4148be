// The answer beside the gold table: row by row, cell by cell, and who brought which row.

import { choice, h, num, shortName } from "./dom.js";

const SIGN = { right: "✓", partial: "≈", missing: "−", extra: "+" };
const WORDS = { right: "right", partial: "some cells wrong", missing: "missing", extra: "not wanted" };

export function answer(rollout, onlane) {
  const { lines, task, lanes } = rollout;
  const count = (verdict) => lines.filter((line) => line.verdict === verdict).length;
  const facts = Object.keys(SIGN).filter(count).map((v) => h("span", { class: "verdict", "data-verdict": v }, h("b", {}, num(count(v))), ` ${WORDS[v]}`));
  const body = h("div", { class: "sheet", tabindex: 0, role: "region", "aria-label": "Answer and gold table" });
  const fill = (which) => body.replaceChildren(table(task, lanes, lines.filter((line) => which === "all" || line.verdict !== "right"), onlane));
  fill("all");
  const pick = choice("show", [["all", "all rows"], ["wrong", "only what is wrong"]], "all", fill);
  const empty = lines.length ? null : h("p", { class: "empty" }, "This task has no gold table, and the answer no rows.");
  const said = h("details", {}, h("summary", {}, "The last message"), h("pre", { class: "last" }, lanes[0].answer || "nothing was said"));
  return h("section", { class: "card" }, h("header", { class: "card-head" }, h("h2", {}, "Answer and gold table"), h("p", { class: "verdicts" }, facts), lines.length ? pick : null), empty ?? body, said);
}

function table(task, lanes, lines, onlane) {
  if (!lines.length) return h("p", { class: "empty" }, "Every row is right.");
  const spawned = lanes.length > 1;
  const heads = ["", ...task.columns, ...(spawned ? ["brought by"] : [])].map((name) => h("th", { scope: "col" }, name || h("span", { class: "hidden" }, "verdict")));
  return h("table", { class: "plain answer" }, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, lines.map((line) => row(line, task, lanes, spawned, onlane))));
}

function row(line, task, lanes, spawned, onlane) {
  const words = line.again ? "its key is there already" : WORDS[line.verdict];
  const cells = task.columns.map((_, k) => cell(line, k));
  const by = (line.by ?? []).map((n) => h("button", { type: "button", class: "chip", onclick: () => onlane(n) }, shortName(lanes[n].name)));
  return h("tr", { "data-verdict": line.verdict }, h("td", { class: "sign", title: words }, h("span", { "aria-hidden": "true" }, SIGN[line.verdict]), h("span", { class: "hidden" }, words)), cells, spawned ? h("td", {}, by) : null);
}

/** One cell: what is right as it is, what is wrong struck out above what was wanted. */
function cell({ verdict, gold = [], found = [], right = [] }, k) {
  if (verdict === "missing") return h("td", {}, gold[k]);
  if (verdict === "extra") return h("td", {}, found[k] ?? "");
  if (right[k]) return h("td", {}, found[k]);
  return h("td", { class: "wrong" }, h("del", {}, found[k] || "nothing"), h("ins", {}, gold[k]));
}
