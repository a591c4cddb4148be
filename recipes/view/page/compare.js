// Two rollouts side by side: what each measure says of both, where they part, and both in time over one axis.

import { choice, fill, h, num, signed } from "./dom.js";
import { get } from "./store.js";
import { Timeline } from "./timeline.js";

const look = { axis: "steps" };

export function compare(main, { parts: ids }) {
  let left = false;
  main.replaceChildren(h("p", { class: "empty" }, "Reading both rollouts …"));
  read(ids).then(
    ([both, said]) => left || draw(main, both, said),
    (error) => left || main.replaceChildren(h("p", { class: "empty", role: "alert" }, error.message)),
  );
  return () => {
    left = true;
  };
}

/** Both rollouts, and what their first agents said. */
function read(ids) {
  const each = (options) => Promise.all(ids.map((id) => get(`api/rollout?id=${encodeURIComponent(id)}${options}`)));
  return Promise.all([each(""), each("&lane=0")]);
}

function draw(main, both, said) {
  const same = both[0].task.id === both[1].task.id;
  const axes = h("div", { class: "pair" });
  const turn = (axis) => {
    look.axis = axis;
    fill(axes, timelines(both, axis));
  };
  turn(look.axis);
  fill(
    main,
    h(
      "div",
      { class: "page" },
      h("h1", {}, "Two rollouts"),
      h("p", { class: "soft query-rest" }, same ? both[0].task.query : "They are of different tasks: measures can be compared, answers cannot."),
      h("div", { class: "pair" }, measures(both), parting(said)),
      h("section", { class: "card" }, h("header", { class: "card-head" }, h("h2", {}, "Agents in time"), choice("axis", [["steps", "critical steps"], ["seconds", "seconds"]], look.axis, turn)), axes),
      same ? answers(both) : null,
    ),
  );
}

const link = (rollout) => h("a", { href: `#/rollout/${encodeURIComponent(rollout.id)}` }, rollout.id.replace("iteration_", ""));

function timelines(both, axis) {
  const [start, length] = axis === "seconds" ? ["start_s", "seconds"] : ["start", "steps"];
  const most = Math.max(...both.flatMap((r) => r.lanes.map((lane) => lane[start] + lane[length])), 1e-9);
  return both.map((rollout) => {
    const show = { axis, order: "started", signal: "logprob", lane: 0, turn: -1, most };
    const open = (lane) => (location.hash = `#/rollout/${encodeURIComponent(rollout.id)}?lane=${lane}`);
    const line = new Timeline(rollout, show, () => {});
    line.list.addEventListener("dblclick", () => open(show.lane));
    line.list.addEventListener("keydown", (event) => event.key === "Enter" && open(show.lane));
    return h("div", { class: "half" }, h("h3", {}, link(rollout)), line.element);
  });
}

function measures(both) {
  const part = (name) => (r) => r.reward?.parts[name];
  const parts = [...new Set(both.flatMap((r) => Object.keys(r.reward?.parts ?? {})))].filter((n) => !["critical_steps", "total_steps"].includes(n));
  const sum = (name) => (r) => r.lanes.reduce((n, lane) => n + lane.ledger[name], 0);
  const rows = [
    ["reward", (r) => r.reward?.total],
    ...parts.map((name) => [name.replaceAll("_", " "), part(name)]),
    ["critical steps", (r) => r.lanes[0].steps],
    ["total steps", (r) => r.total_steps],
    ["seconds", (r) => r.lanes[0].seconds],
    ["subagents", (r) => r.lanes.length - 1],
    ["turns of the first agent", (r) => r.lanes[0].turns.length],
    ["tokens sampled", sum("tokens_sampled")],
    ["rows right", (r) => r.lines.filter((line) => line.verdict === "right").length],
    ["rows missing", (r) => r.lines.filter((line) => line.verdict === "missing").length],
  ].map(([name, value]) => [name, ...both.map(value)]);
  const body = rows.map(([name, a, b]) => {
    const difference = (b ?? NaN) - (a ?? NaN);
    const text = Number.isNaN(difference) ? "–" : difference === 0 ? "same" : Number.isInteger(difference) ? signed(difference, 0) : signed(difference, 3);
    return h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, num(a)), h("td", {}, num(b)), h("td", { class: difference ? "" : "soft" }, text));
  });
  const head = h("tr", {}, h("td"), both.map((r) => h("th", { scope: "col" }, link(r))), h("th", { scope: "col" }, "difference"));
  return h("section", { class: "card" }, h("h2", {}, "Measures"), h("table", { class: "plain numbers" }, h("thead", {}, head), h("tbody", {}, body)));
}

/** What the first agents said and saw, up to where they part. */
function parting(said) {
  const [a, b] = said.map((data) => data.windows.flatMap((w) => w.spans));
  let k = 0;
  while (k < a.length && k < b.length && alike(a[k], b[k])) k += 1;
  const head = h("h2", {}, "Where they part");
  if (k === a.length && k === b.length) return h("section", { class: "card" }, head, h("p", { class: "empty" }, "They do not: the first agents saw and said the same, token for token."));
  const turn = a.slice(0, k + 1).filter((s) => s.kind === "sampled").length;
  const texts = [a[k], b[k]].map((span) => (span ? (span.text ?? span.pieces.join("")) : ""));
  const common = shared(...texts);
  const words = a[k]?.kind === "sampled" && b[k]?.kind === "sampled" ? `in turn ${turn}` : turn ? `in what came back after turn ${turn}` : "in the prompt";
  const shown = [a[k], b[k]].map((span, i) => h("pre", { class: "last" }, span ? [h("span", { class: "soft" }, texts[i].slice(0, common)), h("mark", {}, texts[i].slice(common))] : "it ends here"));
  return h("section", { class: "card" }, head, h("p", {}, `The first agents part ${words}${k ? `; before it they are alike, token for token` : ""}.`), h("div", { class: "pair" }, shown));
}

const alike = (a, b) => a.kind === b.kind && (a.kind === "sampled" ? a.ids.join() === b.ids.join() : a.text === b.text);

/** How many letters two texts begin with alike. */
function shared(a, b) {
  let n = 0;
  while (n < a.length && n < b.length && a[n] === b[n]) n += 1;
  return n;
}

/** The rows on which the two differ. */
function answers(both) {
  const key = (line) => JSON.stringify(line.gold ?? []);
  const second = new Map(both[1].lines.filter((l) => l.gold).map((line) => [key(line), line]));
  const rows = both[0].lines.filter((l) => l.gold).map((line) => [line, second.get(key(line))]).filter(([a, b]) => b && a.verdict !== b.verdict);
  const body = rows.map(([a, b]) => h("tr", {}, h("td", {}, a.gold.join(" | ")), [a, b].map((line) => h("td", {}, h("span", { class: "verdict", "data-verdict": line.verdict }, line.verdict)))));
  const head = h("tr", {}, h("th", { scope: "col" }, "wanted row"), both.map((r) => h("th", { scope: "col" }, link(r))));
  return h("section", { class: "card" }, h("h2", {}, "Answers"), rows.length ? h("table", { class: "plain" }, h("thead", {}, head), h("tbody", {}, body)) : h("p", { class: "empty" }, "Every wanted row fares the same in both."));
}
