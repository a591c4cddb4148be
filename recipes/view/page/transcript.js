// What one agent saw and said: its context windows, turn by turn, every sampled token in the colour of a signal.

import { fixed, h, num, plural, shortName } from "./dom.js";
import { colour, extent, SIGNALS } from "./scale.js";

const MARKER = /(<\|[^|>]*\|>|<\/?tool_\w+>|<\/?think>|<\w+_of_turn>)/;
const LONG = 1600;

/**
 * `data`: the answer of api/rollout with a lane; `lane`: the agent; `onlane(lane)` for a subagent that it started;
 * `onfork(turn)` where a turn can be forked from, else null.
 */
export function transcript(data, lanes, lane, signal, onlane, onfork) {
  const agent = lanes[lane];
  const used = data.credit || signal === "logprob" ? signal : "logprob";
  const sampled = data.windows.flatMap((w) => w.spans).filter((span) => span.kind === "sampled");
  const range = extent(used, sampled.flatMap((span) => span[used]));
  const windows = data.windows.map((window, k) => h("section", { "aria-label": `Context ${k + 1}` }, data.windows.length > 1 || window.opened_by !== "start" ? divider(window, k) : null, spans(window.spans, { agent, lanes, used, range, onlane, onfork })));
  return h(
    "div",
    { class: "windows", tabindex: 0, role: "region", "aria-label": `Transcript of ${agent.name}` },
    data.note ? h("p", { class: "note" }, data.note) : null,
    used !== signal ? h("p", { class: "note" }, `No ${SIGNALS[signal].name} is recorded here: tokens are coloured by log-probability.`) : null,
    windows,
    agent.error ? h("p", { class: "note bad" }, agent.error) : null,
  );
}

const OPENED = { start: "the start", compaction: "a compaction: it goes on from its summary", truncation: "a truncation: the oldest steps were dropped", fork: "a fork" };
const divider = (window, k) => h("h4", { class: "divider" }, `Context ${k + 1}, after ${OPENED[window.opened_by] ?? window.opened_by}`);

/** Sampled spans that follow one another are one turn, though the weights may have changed under way. */
function spans(list, at) {
  const out = [];
  for (const span of list) {
    if (span.kind !== "sampled") out.push(heard(span));
    else if (out.at(-1)?.dataset.turn === String(span.turn)) out.at(-1).querySelector(".said").append(...tokens(span, at));
    else out.push(turn(span, at));
  }
  return out;
}

function heard(span) {
  const name = span.kind === "prompt" ? "Prompt" : "Observed";
  const body = h("pre", {}, marked(span.text.replace(/^\n+|\n+$/g, "")));
  const head = [h("b", {}, name), " ", h("span", { class: "soft" }, plural(span.tokens, "token"))];
  if (span.text.length <= LONG) return h("div", { class: "heard" }, h("p", { class: "said-by" }, head), body);
  return h("details", { class: "heard" }, h("summary", { class: "said-by" }, head, h("span", { class: "soft" }, ` ${span.text.slice(0, 90).replaceAll("\n", " ")} …`)), body);
}

const marked = (text) => text.split(MARKER).map((part, k) => (k % 2 ? h("span", { class: "marker" }, part) : part));

function turn(span, at) {
  const found = at.agent.turns[span.turn];
  const steps = found.steps > found.own ? `${num(found.own)} + ${num(found.steps - found.own)} steps` : plural(found.own, "step");
  const facts = [plural(found.tokens, "token"), steps, `mean log p ${fixed(found.logprob, 2)}`];
  for (const name of ["advantage", "value"]) if (found.signals[name]) facts.push(`${name} ${fixed(found.signals[name][0], 3)}`);
  if (span.version) facts.push(span.version < 0 ? "given by a fork, not sampled" : `weights ${num(span.version)}`);
  return h(
    "article",
    { class: "turn-card", "data-turn": span.turn, "aria-label": `Turn ${span.turn + 1}` },
    h("p", { class: "said-by" }, h("b", {}, `Turn ${span.turn + 1}`), " ", h("span", { class: "soft" }, facts.join(" · ")), at.onfork ? h("button", { type: "button", class: "small", onclick: () => at.onfork(span.turn) }, "Fork") : null),
    h("pre", { class: "said" }, tokens(span, at)),
    found.children.length ? children(found.children, at) : null,
  );
}

function tokens(span, { used, range }) {
  return span.pieces.map((piece, k) => {
    const style = { background: colour(used, span[used][k], range) };
    const marker = MARKER.test(piece) && piece.replace(MARKER, "") === "";
    return h("span", { class: marker ? "token marker" : "token", title: told(span, k), style: style.background ? style : {} }, piece);
  });
}

function told(span, k) {
  const lines = [`token ${span.ids[k]}`, `log-probability ${fixed(span.logprob[k], 3)} (p ${num(Math.exp(span.logprob[k]))})`];
  for (const name of ["advantage", "value", "ratio"]) if (span[name]) lines.push(`${name} ${fixed(span[name][k], 4)}`);
  return lines.join("\n");
}

function children(numbers, { lanes, onlane }) {
  const chips = numbers.map((n) => h("button", { type: "button", class: "chip", "data-path": lanes[n].critical, title: lanes[n].prompt, onclick: () => onlane(n) }, shortName(lanes[n].name), " ", h("span", { class: "soft" }, num(lanes[n].steps))));
  return h("p", { class: "chips" }, h("span", { class: "soft" }, "started "), chips);
}

/** The legend of the colours. */
export function legend(signal, values) {
  const range = extent(signal, values);
  if (!range) return null;
  const stops = [0, 0.25, 0.5, 0.75, 1].map((share) => range.low + share * (range.high - range.low));
  const paint = stops.map((v) => colour(signal, v, range) ?? "transparent").join(", ");
  return h("span", { class: "scale", role: "img", "aria-label": `${SIGNALS[signal].name} from ${num(range.low)} to ${num(range.high)}` }, num(range.low, 2), h("i", { style: { background: `linear-gradient(to right, ${paint})` } }), num(range.high, 2), ` ${SIGNALS[signal].unit}`);
}
