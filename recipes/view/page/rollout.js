// One rollout: what is worth a look, the agents in time, a transcript beside them, the answer, the reward, the ledger.

import { answer } from "./answer.js";
import { ledger, reward } from "./costs.js";
import { choice, fixed, h, num, plural, seconds } from "./dom.js";
import { forkDialog } from "./fork.js";
import { list } from "./rollouts.js";
import { SIGNALS } from "./scale.js";
import { get, store } from "./store.js";
import { Timeline } from "./timeline.js";
import { legend, transcript } from "./transcript.js";

/** How rollouts are looked at, kept from one to the next. */
const look = { axis: "steps", order: "started", signal: "logprob" };

export function rollout(main, { parts: [id], options }) {
  const page = new Page(main, id);
  page.open(Number(options.get("lane") ?? 0), Number(options.get("turn") ?? -1));
  const keys = (event) => page.key(event);
  document.addEventListener("keydown", keys);
  return () => {
    page.left = true;
    document.removeEventListener("keydown", keys);
  };
}

class Page {
  constructor(main, id) {
    Object.assign(this, { main, id, asked: 0, left: false });
    this.side = h("aside", { class: "transcript card", "aria-label": "Transcript" });
  }

  async open(lane, turn) {
    this.main.replaceChildren(h("p", { class: "empty" }, "Reading the rollout …"));
    try {
      this.rollout = await get(`api/rollout?id=${encodeURIComponent(this.id)}`);
    } catch (error) {
      if (!this.left) this.main.replaceChildren(h("p", { class: "empty", role: "alert" }, error.message, " ", h("a", { href: "#/rollouts" }, "To the list")));
      return;
    }
    if (this.left) return;
    if (!this.rollout.credit) look.signal = "logprob";
    const { lanes } = this.rollout;
    this.show = { ...look, lane: lanes[lane] ? lane : 0, turn };
    this.timeline = new Timeline(this.rollout, this.show, (l, t) => this.picked(l, t));
    this.draw();
    this.picked(this.show.lane, turn);
  }

  draw() {
    const onlane = (lane) => this.go(lane, -1);
    const left = h("div", { class: "column" }, this.head(), this.findings(), h("section", { class: "card" }, this.tools(), this.timeline.element, this.key_()), answer(this.rollout, onlane), h("div", { class: "pair" }, reward(this.rollout), ledger(this.rollout)));
    this.main.replaceChildren(h("div", { class: "page split" }, left, this.side));
  }

  head() {
    const { task, lanes, total_steps: total, reward: found, failed, harness } = this.rollout;
    const row = store.byId.get(this.id);
    const [name, number] = this.id.split(/:(?=\d+$)/);
    const facts = [
      ["reward", found ? fixed(found.total, 3) : "none"],
      ["critical steps", num(lanes[0].steps)],
      ["total steps", num(total)],
      ["subagents", num(lanes.length - 1)],
      ["time", seconds(lanes[0].seconds)],
      ...(row?.contexts > 1 ? [["contexts", num(row.contexts)]] : []),
      ...(harness ? [["harness", harness]] : []),
    ];
    const status = failed ? "error" : lanes[0].status;
    return h(
      "header",
      { class: "rollout-head" },
      h("p", { class: "crumbs" }, h("a", { href: "#/rollouts" }, "Rollouts"), " / ", `${name.replace(/_0*/, " ")}, number ${number}`, this.origin(), h("span", { class: "pill", "data-state": status }, failed ? "failed" : status), this.step(-1, "Before"), this.step(1, "After")),
      h("h1", { class: "query" }, task.query.split("\n")[0]),
      task.query.includes("\n") ? h("p", { class: "soft query-rest" }, task.query.split("\n").slice(1).join(" · ")) : null,
      h("dl", { class: "facts" }, facts.map(([term, value]) => h("div", {}, h("dt", {}, term), h("dd", {}, value)))),
    );
  }

  /** Of a branch, what it was made of. */
  origin() {
    const made = this.rollout.made_of;
    if (!made) return null;
    const both = [made.id, this.id].map(encodeURIComponent).join("/");
    return h("span", {}, `forked at turn ${made.turn + 1} of ${made.agent}`, " ", h("a", { class: "button small", href: `#/compare/${both}` }, "Compare with its parent"));
  }

  neighbour(way) {
    const order = list.order.length ? list.order : store.rollouts.map((row) => row.id);
    return order[order.indexOf(this.id) + way] ?? null;
  }

  step(way, words) {
    const id = this.neighbour(way);
    return id && order(this.id) ? h("a", { class: "button small", href: `#/rollout/${encodeURIComponent(id)}`, title: `the rollout ${words.toLowerCase()} this one in the list` }, words) : null;
  }

  findings() {
    const found = this.rollout.findings.map((f) =>
      h("li", {}, h("button", { type: "button", class: "finding", "data-kind": f.kind, onclick: () => this.go(f.lane, f.turn, true) }, h("b", {}, f.title), h("span", {}, f.text.replace(/(^|\s)-(?=\d)/g, "$1−")))),
    );
    return found.length ? h("section", { "aria-label": "Worth a look" }, h("ul", { class: "findings" }, found)) : null;
  }

  tools() {
    const set = (name) => (value) => {
      look[name] = this.show[name] = value;
      this.timeline.draw();
      if (name === "signal" && this.data) this.fill();
    };
    const signals = Object.entries(SIGNALS).filter(([key]) => key === "logprob" || this.rollout.credit).map(([key, s]) => [key, s.name]);
    this.axis = choice("axis", [["steps", "critical steps"], ["seconds", "seconds"]], this.show.axis, set("axis"));
    return h("header", { class: "card-head" }, h("h2", {}, "Agents in time"), h("div", { class: "tools" }, this.rollout.lanes[0].seconds > 0 ? this.axis : null, choice("order", [["started", "as started"], ["slowest", "slowest first"]], this.show.order, set("order")), signals.length > 1 ? choice("colour", signals, this.show.signal, set("signal")) : null));
  }

  key_() {
    const words = [
      this.rollout.lanes.every((lane) => lane.timed) ? "" : "An agent's length in seconds is measured; where a turn lies within it is shared out by tokens. ",
      this.rollout.fork ? "It cannot be forked: its record is without what its calls gave back. " : "",
      this.rollout.credit ? "" : "Advantage, value and ratio are offered where the trainer left its credit file.",
    ].join("");
    return h("p", { class: "lane-key soft" }, h("i", { class: "on" }), "on the critical path", h("i", { class: "off" }), "not on it", h("i", { class: "waits" }), "waits", words ? h("span", {}, words) : null);
  }

  go(lane, turn, focus = false) {
    this.timeline.choose(lane, turn);
    if (focus) this.timeline.list.querySelector("[aria-selected='true']")?.focus({ preventScroll: true });
    this.picked(lane, turn);
  }

  async picked(lane, turn) {
    const agent = this.rollout.lanes[lane];
    history.replaceState(null, "", `#/rollout/${encodeURIComponent(this.id)}?lane=${lane}${turn >= 0 ? `&turn=${turn}` : ""}`);
    const asked = ++this.asked;
    if (this.data?.lane !== lane) {
      this.side.setAttribute("aria-busy", "true");
      let data, failed;
      try {
        data = await get(`api/rollout?id=${encodeURIComponent(this.id)}&lane=${lane}`);
      } catch (error) {
        failed = error;
      }
      if (asked !== this.asked || this.left) return;
      this.data = data;
      if (failed) {
        this.side.removeAttribute("aria-busy");
        this.side.replaceChildren(h("p", { class: "empty", role: "alert" }, `${agent.name}: ${failed.message}`));
        return;
      }
      this.fill();
    }
    this.side.removeAttribute("aria-busy");
    this.point(turn);
  }

  fill() {
    const { lanes } = this.rollout;
    const { lane } = this.data;
    const agent = lanes[lane];
    const values = this.data.windows.flatMap((w) => w.spans).filter((s) => s.kind === "sampled").flatMap((s) => s[this.show.signal] ?? s.logprob);
    const used = this.data.credit ? this.show.signal : "logprob";
    const up = agent.parent >= 0 ? h("button", { type: "button", class: "small", onclick: () => this.go(agent.parent, agent.turn) }, `To turn ${agent.turn + 1} that started it`) : null;
    const checkpoint = agent.checkpoint ? h("span", { title: `sha256 ${agent.checkpoint}` }, `checkpoint ${agent.checkpoint.slice(0, 8)}`) : agent.parent < 0 ? "the policy" : "";
    const facts = [agent.status, plural(agent.steps, "step"), seconds(agent.seconds), `${num(agent.ledger.tokens_sampled)} sampled`].join(" · ");
    this.side.removeAttribute("aria-busy");
    this.side.replaceChildren(
      h("header", {}, h("h2", {}, agent.name), h("p", { class: "soft" }, facts, checkpoint ? " · " : "", checkpoint), h("div", { class: "tools" }, legend(used, values), up)),
      transcript(this.data, lanes, lane, this.show.signal, (n) => this.go(n, -1), this.rollout.fork ? null : (turn) => this.fork(turn)),
    );
  }

  fork(turn) {
    const spans = this.data.windows.flatMap((w) => w.spans).filter((span) => span.turn === turn);
    const said = spans.flatMap((span) => span.pieces).join("");
    forkDialog(this.rollout, this.rollout.lanes[this.data.lane], turn, said, this.data.came[turn] ?? []);
  }

  /** Brings a turn into sight, within the transcript alone. */
  point(turn) {
    const windows = this.side.querySelector(".windows");
    for (const card of windows.querySelectorAll(".turn-card")) card.toggleAttribute("data-chosen", Number(card.dataset.turn) === turn);
    const card = windows.querySelector("[data-chosen]");
    windows.scrollTop = card ? card.offsetTop - 12 : 0;
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog") || !this.rollout) return;
    const next = { "[": -1, "]": 1 }[event.key];
    if (next && this.neighbour(next)) location.hash = `#/rollout/${encodeURIComponent(this.neighbour(next))}`;
    else if (event.key === "Escape") location.hash = "#/rollouts";
    else if (event.key === "s" && this.rollout.lanes[0].seconds > 0) {
      const select = this.axis.querySelector("select");
      select.value = this.show.axis === "steps" ? "seconds" : "steps";
      select.dispatchEvent(new Event("change"));
    } else return;
    event.preventDefault();
  }
}

const order = (id) => !list.order.length || list.order.includes(id);
