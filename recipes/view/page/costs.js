// What a rollout earned and what it spent: the reward's parts with their weights, and the ledgers.

import { fixed, h, num, plural, seconds, signed } from "./dom.js";

export function reward({ reward: found, failed }) {
  const head = h("h2", {}, "Reward");
  if (!found) return h("section", { class: "card" }, head, h("p", { class: "empty" }, failed ? "None: the infrastructure failed, which is never a reward." : "None was given."));
  const rows = Object.entries(found.parts).map(([name, value]) => [name, value, found.weights[name] ?? 0]);
  const most = Math.max(...rows.map(([, v, w]) => Math.abs(v * w)), 1e-9);
  const body = rows.map(([name, value, weight]) => h("tr", {}, h("th", { scope: "row" }, name.replaceAll("_", " ")), h("td", {}, num(value)), h("td", {}, `× ${num(weight)}`), h("td", {}, signed(value * weight, 3)), h("td", { class: "bar" }, h("i", { "data-less": value * weight < 0, style: { width: `${(Math.abs(value * weight) / most) * 100}%` } }))));
  const total = h("tr", { class: "total" }, h("th", { scope: "row" }, "total"), h("td"), h("td"), h("td", {}, fixed(found.total, 3)), h("td"));
  return h("section", { class: "card" }, head, h("table", { class: "plain numbers" }, h("thead", {}, heads(["part", "value", "weight", "adds", ""])), h("tbody", {}, body, total)));
}

export function ledger(rollout) {
  const { lanes } = rollout;
  const sum = (name) => lanes.reduce((total, lane) => total + lane.ledger[name], 0);
  const rows = [
    ["critical steps", num(lanes[0].steps), ""],
    ["steps", num(lanes[0].turns.reduce((n, t) => n + t.own, 0)), num(rollout.total_steps)],
    ["tokens fed", num(lanes[0].ledger.tokens_prompt), num(sum("tokens_prompt"))],
    ["of them cached", num(lanes[0].ledger.tokens_cached), num(sum("tokens_cached"))],
    ["tokens sampled", num(lanes[0].ledger.tokens_sampled), num(sum("tokens_sampled"))],
    ["time", seconds(lanes[0].seconds), ""],
    ["of it queued", seconds(lanes[0].ledger.seconds_queued), seconds(sum("seconds_queued"))],
  ];
  const body = rows.map(([name, ...values]) => h("tr", {}, h("th", { scope: "row" }, name), values.map((v) => h("td", {}, v))));
  const counts = {};
  for (const lane of lanes) for (const [kind, n] of Object.entries(lane.ledger.counts)) counts[kind] = (counts[kind] ?? 0) + n;
  const events = Object.entries(counts).map(([kind, n]) => h("span", { class: "chip" }, `${kind.replaceAll("_", " ")} ${num(n)}`));
  return h("section", { class: "card" }, h("h2", {}, "Ledger"), h("table", { class: "plain numbers" }, h("thead", {}, heads(["", "first agent", plural(lanes.length, "agent")])), h("tbody", {}, body)), events.length ? h("p", { class: "chips" }, h("span", { class: "soft" }, "events of all agents "), events) : null);
}

const heads = (names) => h("tr", {}, names.map((name) => (name ? h("th", { scope: "col" }, name) : h("td"))));
