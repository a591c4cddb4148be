// The run's curves: what the policy is paid, how good it is, how it spawns, what was dropped, and how it learns.

import { chart } from "./chart.js";
import { fill, h, num, plural } from "./dom.js";
import { follow, store } from "./store.js";

const COSTS = new Set(["critical_steps", "total_steps"]);
const words = (key) => key.replace(/^[a-z]+\//, "").replaceAll("_", " ");

/** The charts that every run is looked at by; a line whose metric a run has not is left out. */
const CHARTS = [
  { title: "Item-F1", note: "cells right; dots on held-out tasks", zero: true, keys: { "rollout/item_f1": "item-F1", "rollout/row_f1": "row-F1", "rollout/success": "success", "eval/item_f1": "held out" } },
  { title: "Score", note: "dots on held-out tasks", zero: true, keys: { "rollout/score": "score", "rollout/success": "success", "eval/score": "held out" }, needs: "rollout/score" },
  { title: "λ", note: "weights of the shaping, annealed to exactly 0", zero: true, keys: { "reward/lambda_parallel": "λ₁ parallel", "reward/lambda_finish": "λ₂ finish" } },
  { title: "Critical steps", note: "the longest chain, what a user waits for", zero: true, keys: { "rollout/critical_steps": "critical", "rollout/total_steps": "total", "eval/critical_steps": "held out" } },
  { title: "Parallelism", note: "most subagents at once", zero: true, keys: { "rollout/width": "width", "eval/parallelism": "held out" } },
  { title: "Spawning", note: "share of episodes that spawn; of assignments that brought a needed row", zero: true, keys: { "rollout/spawn_rate": "spawn", "rollout/finish_rate": "finish", "rollout/spurious_rate": "spurious" } },
  { title: "Contexts", note: "rewrites of the context a rollout", zero: true, keys: { "rollout/compactions": "compactions", "rollout/truncations": "truncations" } },
  { title: "Drift", note: "engine against learner, nats a token", log: true, keys: { "train/drift_mean": "mean", "train/drift_max": "largest" } },
  { title: "Change of the policy", note: "an update's KL, nats a token", zero: true, keys: { "train/policy_approx_kl": "KL", "train/policy_stopped_fraction": "clipped share" } },
  { title: "Entropy", note: "nats a token", zero: true, keys: { "train/policy_entropy": "entropy" } },
  { title: "Critic", note: "explained variance of the return", keys: { "train/explained_variance": "explained" } },
  { title: "Gradients", note: "norms before clipping", log: true, keys: { "train/policy_grad_norm": "policy", "train/critic_grad_norm": "critic" } },
  { title: "Staleness", note: "updates between sampling and learning", zero: true, keys: { "train/staleness": "staleness" } },
  { title: "Time", note: "seconds an iteration", zero: true, keys: { "time/rollout": "rollouts", "time/train": "update" } },
];

export function curves(main) {
  const page = h("div", { class: "page" });
  main.append(page);
  draw(page);
  return follow(() => draw(page));
}

function draw(page) {
  if (page.contains(document.activeElement) && document.activeElement.classList.contains("chart")) return; // it is being read
  const { metrics, about } = store;
  const opened = page.querySelector("details")?.open;
  const used = new Set(CHARTS.flatMap((c) => Object.keys(c.keys)));
  const figures = [rewardChart(), ...CHARTS.map(ofMetrics), dropsChart(used), statusChart(used)].filter(Boolean);
  fill(page, h("h1", {}, "Curves"), summary(), metrics.length ? [h("div", { class: "charts" }, figures), others(used, opened)] : nothing(about));
}

function nothing(about) {
  const inside = about.runs.length ? [" It holds runs of its own, each of which can be viewed: ", h("b", {}, about.runs.join(", ")), "."] : " They come with the first iteration.";
  return h("p", { class: "empty" }, "No metrics yet.", inside);
}

function summary() {
  const last = store.metrics.at(-1);
  if (!last) return null;
  const total = store.about.recipe.iterations;
  const facts = [
    ["iteration", total ? `${num(last.iteration)} of ${num(total)}` : num(last.iteration)],
    ["optimizer step", num(last.optimizer_step)],
    ["rollouts", num(store.rollouts.length)],
    ["failed", num(store.rollouts.filter((row) => row.failed).length)],
  ];
  return h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

const pick = (iteration) => {
  location.hash = `#/rollouts?q=${encodeURIComponent(`iteration:${iteration}`)}`;
};

const series = (key) => store.metrics.filter((row) => typeof row[key] === "number").map((row) => [row.iteration ?? row.step, row[key]]);

function ofMetrics({ keys, needs, ...rest }) {
  if (needs && !series(needs).length) return null;
  if (rest.title === "Item-F1" && !series("rollout/item_f1").length) return null;
  const lines = Object.entries(keys).map(([key, name]) => ({ name, points: series(key), dots: key.startsWith("eval/") }));
  return chart({ ...rest, lines, onpick: pick });
}

/** The mean reward and its parts, by iteration, of the rollouts that did not fail. */
function rewardChart() {
  const sums = new Map();
  const names = new Set();
  for (const row of store.rollouts) {
    if (row.reward === null || row.failed) continue;
    if (!sums.has(row.iteration)) sums.set(row.iteration, { n: 0, total: 0 });
    const sum = sums.get(row.iteration);
    sum.n += 1;
    sum.total += row.reward;
    for (const [part, value] of Object.entries(row.parts)) {
      if (COSTS.has(part)) continue;
      names.add(part);
      sum[`part ${part}`] = (sum[`part ${part}`] ?? 0) + value;
    }
  }
  const points = (key) => [...sums].sort(([a], [b]) => a - b).map(([x, sum]) => [x, sum[key] / sum.n]);
  const parts = [...names].map((name) => ({ name, points: points(`part ${name}`) }));
  return chart({ title: "Reward and its parts", note: "means of the recorded rollouts; the total is weighted, the parts are not", zero: true, lines: [{ name: "total", points: points("total") }, ...parts], onpick: pick });
}

/** What was counted: errors, refusals, drops; statuses have a chart of their own. */
function dropsChart(used) {
  const keys = countKeys(used).filter((key) => !key.startsWith("count/status_"));
  const lines = keys.map((key) => ({ name: words(key), points: series(key) })).filter(({ points }) => points.some(([, y]) => y > 0));
  for (const key of keys) used.add(key);
  return chart({ title: "Drops and refusals", note: "events an iteration, by reason", zero: true, lines, onpick: pick });
}

function statusChart(used) {
  const keys = countKeys(used).filter((key) => key.startsWith("count/status_"));
  for (const key of keys) used.add(key);
  return chart({ title: "How rollouts ended", note: "rollouts an iteration", zero: true, lines: keys.map((key) => ({ name: words(key).replace("status ", ""), points: series(key) })), onpick: pick });
}

const countKeys = (used) => [...new Set(store.metrics.flatMap(Object.keys))].filter((key) => key.startsWith("count/") && !used.has(key)).sort();

function others(used, opened) {
  const keys = [...new Set(store.metrics.flatMap(Object.keys))].filter((key) => key.includes("/") && !used.has(key)).sort();
  const figures = keys.map((key) => chart({ title: key, lines: [{ name: words(key), points: series(key) }], onpick: pick })).filter(Boolean);
  if (!figures.length) return null;
  return h("details", { class: "more", open: opened }, h("summary", {}, `All other metrics (${plural(figures.length, "chart")})`), h("div", { class: "charts" }, figures));
}
