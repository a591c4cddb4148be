// Agents as lanes over one axis, in steps or in seconds, the critical path marked; by mouse and by arrow keys.

import { h, num, plural, say, seconds, shortName, ticks } from "./dom.js";
import { colour, extent, SIGNALS } from "./scale.js";

/** `show`: {axis: "steps" | "seconds", order, signal, lane, turn, most}; `onpick(lane, turn)` when one is chosen. */
export class Timeline {
  constructor(rollout, show, onpick) {
    Object.assign(this, { rollout, show, onpick });
    this.element = h("div", { class: "timeline" });
    this.draw();
  }

  get timed() {
    return this.show.axis === "seconds";
  }

  draw() {
    const { lanes } = this.rollout;
    const root = lanes[0];
    this.most = this.show.most ?? Math.max(this.timed ? ends(lanes, "start_s", "seconds") : ends(lanes, "start", "steps"), 1e-9);
    this.range = extent(this.show.signal, lanes.flatMap((lane) => lane.turns.map((turn) => mean(turn, this.show.signal))));
    this.rows = this.ordered(lanes).map((lane) => this.row(lane));
    const path = lanes.filter((lane) => this.onPath(lane)).length;
    const words = `${plural(lanes.length, "agent")} over ${this.timed ? seconds(root.seconds) : plural(root.steps, "critical step")}, ${num(path)} on the critical path`;
    this.list = h("div", { class: "lanes", role: "listbox", "aria-label": `Agents: ${words}`, onkeydown: (e) => this.key(e) }, this.rows);
    this.element.replaceChildren(this.axis(), this.list);
  }

  /** Those started in one turn stay together, the slowest first if asked for. */
  ordered(lanes) {
    if (this.show.order !== "slowest") return lanes;
    const cost = this.timed ? "slack_s" : "slack";
    const below = (parent) => lanes.filter((lane) => lane.parent === parent).sort((a, b) => a.turn - b.turn || a[cost] - b[cost]);
    const walk = (lane) => [lane, ...below(lane.lane).flatMap(walk)];
    return below(-1).flatMap(walk);
  }

  onPath(lane) {
    return this.timed ? lane.critical_s : lane.critical;
  }

  percent(value) {
    return `${((value / this.most) * 100).toFixed(3)}%`;
  }

  axis() {
    const marks = ticks(0, this.most, 8).map((v) => h("span", { style: { left: this.percent(v) } }, this.timed ? `${num(v)} s` : num(v)));
    return h("div", { class: "lane axis", "aria-hidden": "true" }, h("span", { class: "name" }, "agent"), h("span", { class: "track" }, marks), ["steps", "time", "rows"].map((t) => h("span", { class: "cell" }, t)));
  }

  row(lane) {
    const chosen = lane.lane === this.show.lane;
    const depth = lane.name.split("/").length - 1;
    const path = this.onPath(lane);
    const rows = lane.parent < 0 ? num(lane.rows) : lane.turns.some((t) => t.children.length) ? num(lane.wanted) : lane.new === lane.wanted ? num(lane.new) : `${num(lane.new)} of ${num(lane.wanted)}`;
    return h(
      "div",
      { class: "lane", role: "option", "data-lane": lane.lane, "data-path": path, "data-state": lane.status, "aria-selected": chosen ? "true" : "false", "aria-label": this.words(lane, path), tabindex: chosen ? 0 : -1, onclick: () => this.pick(lane.lane, -1) },
      h("span", { class: "name", style: { paddingLeft: `${depth * 0.9}rem` }, title: lane.prompt }, shortName(lane.name), lane.status === "answered" ? null : h("em", {}, lane.status), lane.parent < 0 ? null : h("small", {}, lane.prompt.split("\n")[0])),
      h("span", { class: "track" }, lane.turns.flatMap((turn, k) => this.turn(lane, turn, k))),
      h("span", { class: "cell" }, num(lane.steps)),
      h("span", { class: "cell" }, seconds(lane.seconds)),
      h("span", { class: "cell", title: "wanted rows that nobody started before it had, of those that it brought", "data-none": lane.parent >= 0 && lane.new === 0 }, rows),
    );
  }

  words(lane, path) {
    const slack = this.timed ? seconds(lane.slack_s) : plural(lane.slack, "step");
    const rows = lane.parent < 0 ? "" : `, ${plural(lane.new, "new wanted row")}`;
    return `${lane.name}, ${lane.status}, ${plural(lane.steps, "step")}, ${seconds(lane.seconds)}, ${plural(lane.turns.length, "turn")}${rows}, ${path ? "on the critical path" : `${slack} sooner than the slowest`}`;
  }

  /** The turn itself, and the wait for its subagents. */
  turn(lane, turn, k) {
    const [start, own, whole] = this.timed ? [turn.start_s, turn.own_s, turn.seconds] : [turn.start, turn.own, turn.steps];
    const chosen = lane.lane === this.show.lane && k === this.show.turn;
    const value = mean(turn, this.show.signal);
    const title = `turn ${k + 1}: ${plural(turn.tokens, "token")}, ${plural(turn.own, "step")} of its own, ${SIGNALS[this.show.signal].name} ${num(value)}`;
    const bar = h("span", { class: "turn", "data-turn": k, "data-chosen": chosen, title, style: { left: this.percent(start), width: this.percent(own) }, onclick: (e) => (e.stopPropagation(), this.pick(lane.lane, k)) }, h("i", { style: { background: colour(this.show.signal, value, this.range) ?? "transparent" } }));
    const wait = whole > own ? h("span", { class: "wait", style: { left: this.percent(start + own), width: this.percent(whole - own) } }) : null;
    return [bar, wait];
  }

  key(event) {
    const at = this.rows.findIndex((row) => Number(row.dataset.lane) === this.show.lane);
    const moved = { ArrowDown: 1, ArrowUp: -1, Home: -this.rows.length, End: this.rows.length }[event.key];
    const turned = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (moved) this.pick(Number(this.rows[Math.max(0, Math.min(this.rows.length - 1, at + moved))].dataset.lane), -1, true);
    else if (turned) {
      const turns = this.rollout.lanes[this.show.lane].turns.length;
      this.pick(this.show.lane, Math.max(0, Math.min(turns - 1, this.show.turn + turned)), true);
    } else if (event.key === "Enter") document.querySelector(".transcript .windows")?.focus();
    else return;
    event.preventDefault();
  }

  pick(lane, turn, focus = false) {
    this.choose(lane, turn);
    if (focus) this.list.querySelector("[aria-selected='true']").focus();
    if (turn >= 0) say(`turn ${turn + 1} of ${this.rollout.lanes[lane].name}`);
    this.onpick(lane, turn);
  }

  /** Marks a lane and a turn, without telling anybody. */
  choose(lane, turn) {
    Object.assign(this.show, { lane, turn });
    for (const row of this.rows) {
      const chosen = Number(row.dataset.lane) === lane;
      row.setAttribute("aria-selected", chosen ? "true" : "false");
      row.setAttribute("tabindex", chosen ? "0" : "-1");
      for (const bar of row.querySelectorAll(".turn")) bar.dataset.chosen = chosen && Number(bar.dataset.turn) === turn;
    }
    this.list.querySelector("[aria-selected='true']")?.scrollIntoView({ block: "nearest" });
  }
}

export const mean = (turn, signal) => (signal === "logprob" ? turn.logprob : turn.signals[signal]?.[0]);
const ends = (lanes, start, length) => Math.max(...lanes.map((lane) => lane[start] + lane[length]));
