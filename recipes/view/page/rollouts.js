// The list of all rollouts: searched, sorted, and drawn only where it is looked at, so that its length does not matter.

import { fill, fixed, h, num, plural, say, seconds } from "./dom.js";
import { matcher, sorted, valueOf } from "./query.js";
import { follow, store } from "./store.js";

const ROW = 34;
const AROUND = 4;
const COSTS = new Set(["critical_steps", "total_steps"]);
const score = (value) => fixed(value, 3);

/** Column, heading, what it means, how it is shown, its width; texts sort upwards first, numbers downwards. */
const COLUMNS = [
  ["iteration", "iter.", "Iteration, of the run or a fork", (n) => (n ? num(n) : "fork"), "4.5rem"],
  ["index", "#", "Place in the iteration", num, "3.6rem"],
  ["query", "task", "What was asked", null, "minmax(14rem, 1fr)"],
  ["domain", "family", "Family of the task", null, "7rem"],
  ["wanted", "rows", "Rows of the gold table", num, "4.4rem"],
  ["reward", "reward", "Weighted sum of the parts", score, "5.4rem"],
];
const MORE = [
  ["critical_steps", "crit.", "Critical steps", num, "4.4rem"],
  ["total_steps", "total", "Steps of all agents", num, "4.6rem"],
  ["agents", "sub.", "Subagents", num, "4.2rem"],
  ["width", "width", "Most subagents at once", num, "4.8rem"],
  ["tokens", "tokens", "Sampled by all agents", num, "5.2rem"],
  ["seconds", "time", "Wall clock of the first agent", seconds, "5rem"],
  ["status", "ended", "How the first agent ended", null, "7rem"],
];
const TEXTS = new Set(["query", "domain", "status"]);

/** What the list is like when it is come back to; `order` is what [ and ] follow on the page of a rollout. */
export const list = { text: "", column: "iteration", down: true, at: null, top: 0, marked: [], order: [] };

export function rollouts(main, { options }) {
  if (options.has("q")) Object.assign(list, { text: options.get("q"), top: 0, at: null });
  const view = new List();
  main.append(view.page);
  view.refresh();
  view.body.scrollTop = list.top;
  view.draw();
  const stop = follow(() => view.refresh());
  const sized = new ResizeObserver(() => view.draw());
  sized.observe(view.body);
  return () => {
    stop();
    sized.disconnect();
  };
}

class List {
  constructor() {
    this.columns = [];
    this.search = h("input", { id: "search", type: "search", value: list.text, spellcheck: "false", autocomplete: "off", placeholder: "words, reward<0.5, status:exhausted, iteration:30, -domain:city", "aria-label": "Search the rollouts", "aria-describedby": "found", oninput: () => this.searched(), onkeydown: (e) => this.fromSearch(e) });
    this.found = h("p", { id: "found", class: "soft", role: "status" });
    this.compare = h("p", { class: "marked" });
    this.head = h("div", { class: "head", role: "row" });
    this.spacer = h("div", { class: "spacer", role: "presentation" });
    this.body = h("div", { class: "body", role: "rowgroup", tabindex: -1, onscroll: () => this.scrolled() }, this.spacer);
    this.grid = h("div", { class: "grid", role: "grid", "aria-label": "Rollouts", "aria-multiselectable": "true", onkeydown: (e) => this.key(e) }, h("div", { class: "heads", role: "rowgroup" }, this.head), this.body);
    this.page = h("div", { class: "page list" }, h("h1", {}, "Rollouts"), h("div", { class: "tools" }, this.search, this.found, this.compare), this.grid);
  }

  /** The rows anew, from the run: it may have grown. */
  refresh() {
    const parts = [...new Set(store.rollouts.flatMap((row) => Object.keys(row.parts)))].filter((p) => !COSTS.has(p));
    const columns = [...COLUMNS, ...parts.slice(0, 4).map((p) => [p, p, `Reward part ${p}`, score, "5.4rem"]), ...MORE];
    if (columns.length !== this.columns.length) {
      this.columns = columns;
      this.spacer.replaceChildren();
      this.heads();
    }
    this.rows = sorted(store.rollouts.filter(matcher(list.text)), list.column, list.down);
    list.order = this.rows.map((row) => row.id);
    this.found.textContent = this.rows.length === store.rollouts.length ? plural(this.rows.length, "rollout") : `${num(this.rows.length)} of ${plural(store.rollouts.length, "rollout")}`;
    this.grid.setAttribute("aria-rowcount", this.rows.length + 1);
    this.spacer.style.height = `${this.rows.length * ROW}px`;
    this.marks();
    this.draw();
  }

  heads() {
    this.grid.style.setProperty("--columns", this.columns.map(([, , , , width]) => width).join(" "));
    this.head.replaceChildren(
      ...this.columns.map(([key, heading, meaning]) =>
        h("div", { role: "columnheader", class: TEXTS.has(key) ? "text" : "", "aria-sort": key === list.column ? (list.down ? "descending" : "ascending") : "none" }, h("button", { type: "button", title: meaning, "aria-label": meaning, onclick: () => this.sort(key) }, heading)),
      ),
    );
  }

  sort(key) {
    list.down = list.column === key ? !list.down : !TEXTS.has(key);
    list.column = key;
    const focused = this.columns.findIndex(([k]) => k === key);
    this.heads();
    this.head.children[focused].firstChild.focus();
    this.body.scrollTop = 0;
    this.refresh();
    say(`sorted by ${this.columns[focused][2]}, ${list.down ? "largest" : "smallest"} first`);
  }

  searched() {
    list.text = this.search.value;
    this.body.scrollTop = 0;
    this.refresh();
  }

  scrolled() {
    list.top = this.body.scrollTop;
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.draw());
  }

  /** Only the rows in sight and a few around them; a row that was there keeps its element, and so the focus. */
  draw() {
    const first = Math.max(0, Math.floor(this.body.scrollTop / ROW) - AROUND);
    const last = Math.min(this.rows.length, Math.ceil((this.body.scrollTop + this.body.clientHeight) / ROW) + AROUND);
    const there = new Map([...this.spacer.children].map((e) => [e.dataset.id, e]));
    const focused = this.spacer.contains(document.activeElement) ? document.activeElement : null;
    const elements = this.rows.slice(first, last).map((row, k) => this.placed(there.get(row.id) ?? this.row(row), row, first + k));
    if (!elements.length) elements.push(h("p", { class: "empty" }, this.empty()));
    arrange(this.spacer, elements);
    if (!this.spacer.querySelector("[tabindex='0']")) elements[0].setAttribute("tabindex", "0");
    if (focused && !focused.isConnected) this.body.focus({ preventScroll: true });
  }

  empty() {
    if (store.rollouts.length) return "No rollout has all of that.";
    const { runs } = store.about;
    if (!store.version.ready) return "Reading the records …";
    return runs.length ? `This run keeps its rollouts in runs of its own: ${runs.join(", ")}.` : "No rollouts are recorded yet.";
  }

  row(row) {
    const cells = this.columns.map(([key, , , shown]) => {
      const value = valueOf(row, key);
      if (key === "status") return h("div", { role: "gridcell", class: "text" }, h("span", { class: "pill", "data-state": row.failed ? "error" : value }, row.failed ? "failed" : value));
      return h("div", { role: "gridcell", class: TEXTS.has(key) ? "text" : "", title: key === "query" ? row.query : null }, shown ? (value === undefined || value === null ? "–" : shown(value)) : String(value));
    });
    return h("div", { role: "row", class: "row", "data-id": row.id, onclick: (e) => this.clicked(e, row), onfocus: () => this.focused(row.id) }, cells);
  }

  placed(element, row, k) {
    element.dataset.k = k;
    element.setAttribute("aria-rowindex", k + 2);
    element.setAttribute("aria-selected", list.marked.includes(row.id) ? "true" : "false");
    element.setAttribute("tabindex", row.id === list.at ? 0 : -1);
    element.style.transform = `translateY(${k * ROW}px)`;
    return element;
  }

  focused(id) {
    list.at = id;
    for (const other of this.spacer.querySelectorAll("[tabindex='0']")) if (other.dataset.id !== id) other.setAttribute("tabindex", "-1");
    this.spacer.querySelector(`[data-id="${CSS.escape(id)}"]`)?.setAttribute("tabindex", "0");
  }

  clicked(event, row) {
    if (event.shiftKey || event.ctrlKey || event.metaKey) this.mark(row.id);
    else open(row.id);
  }

  key(event) {
    if (event.target.closest("[role=columnheader]")) return;
    const k = this.rows.findIndex((row) => row.id === list.at);
    const page = Math.max(1, Math.floor(this.body.clientHeight / ROW) - 1);
    const to = { ArrowDown: k + 1, ArrowUp: k - 1, PageDown: k + page, PageUp: k - page, Home: 0, End: this.rows.length - 1 }[event.key];
    if (to !== undefined) this.move(to);
    else if (event.key === "Enter") k >= 0 && open(list.at);
    else if (event.key === "x") k >= 0 && this.mark(list.at);
    else return;
    event.preventDefault();
  }

  fromSearch(event) {
    if (event.key === "ArrowDown" || event.key === "Enter") this.move(0);
    else if (event.key === "Escape" && !this.search.value) this.search.blur();
    else return;
    event.preventDefault();
  }

  move(to) {
    if (!this.rows.length) return;
    const k = Math.max(0, Math.min(this.rows.length - 1, to));
    const { scrollTop, clientHeight } = this.body;
    if (k * ROW < scrollTop) this.body.scrollTop = k * ROW;
    if ((k + 1) * ROW > scrollTop + clientHeight) this.body.scrollTop = (k + 1) * ROW - clientHeight;
    this.draw();
    this.spacer.querySelector(`[data-k="${k}"]`)?.focus({ preventScroll: true });
  }

  mark(id) {
    list.marked = list.marked.includes(id) ? list.marked.filter((m) => m !== id) : [...list.marked, id].slice(-2);
    this.marks();
    this.draw();
    say(`${plural(list.marked.length, "rollout")} marked`);
  }

  marks() {
    const names = list.marked.map((id) => h("span", { class: "chip" }, id.replace("iteration_", "")));
    const hint = ["Mark two with ", h("kbd", {}, "x"), " to compare them."];
    const both = list.marked.map(encodeURIComponent).join("/");
    fill(this.compare, names.length ? names : hint, names.length === 2 ? h("a", { class: "button", href: `#/compare/${both}` }, "Compare") : null);
  }
}

/** Makes these the children, moving only what is not in its place. */
function arrange(parent, elements) {
  const wanted = new Set(elements);
  for (const child of [...parent.children]) if (!wanted.has(child)) child.remove();
  let at = parent.firstChild;
  for (const element of elements) {
    if (element === at) at = at.nextSibling;
    else parent.insertBefore(element, at);
  }
}

function open(id) {
  location.hash = `#/rollout/${encodeURIComponent(id)}`;
}
