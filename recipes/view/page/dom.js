// Elements and numbers: the few words in which the other files build the page.

const SVG = "http://www.w3.org/2000/svg";
const DRAWN = new Set(["svg", "path", "line", "circle", "text", "g", "rect", "polyline"]);

/** An element: h("button", {class: "chip", onclick: go}, "text", child). null is left out, and false but for data-*. */
export function h(tag, props = {}, ...children) {
  const element = DRAWN.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined) continue;
    if (name.startsWith("data-")) element.setAttribute(name, value);
    else if (value === false) continue;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style" && typeof value === "object") Object.assign(element.style, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...present(children));
  return element;
}

/** Replaces what is in an element. */
export function fill(element, ...children) {
  element.replaceChildren(...present(children));
}

const present = (children) => children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false);

/** A number for people: 3 significant digits at most, a true minus, – where there is none. */
export function num(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  if (Number.isInteger(value)) return minus(value.toLocaleString("en"));
  const size = Math.abs(value);
  if (size !== 0 && size < 0.001) return minus(value.toExponential(1));
  return minus(size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(digits))));
}

export const fixed = (value, places) => (value === null || value === undefined ? "–" : minus(value.toFixed(places)));
export const signed = (value, places = 2) => (value > 0 ? "+" : "") + fixed(value, places);
export const seconds = (value) => (value >= 100 ? `${Math.round(value)} s` : `${value.toFixed(1)} s`);
export const plural = (n, word) => `${num(n)} ${word}${n === 1 ? "" : "s"}`;
const minus = (text) => text.replace(/^-/, "−").replace(/e-/, "e−");

/** Says something to a screen reader. */
export function say(text) {
  document.getElementById("live").textContent = text;
}

/** A choice of a few, as a labelled select. */
export function choice(label, options, value, onpick) {
  const items = options.map(([key, words]) => h("option", { value: key, selected: key === value }, words));
  return h("label", { class: "choice" }, h("span", {}, label), h("select", { onchange: (e) => onpick(e.target.value) }, items));
}

/** "main/2:a" as its last part, "a", with its place among calls. */
export const shortName = (name) => name.split("/").pop();

/** Up to `many` ticks at round numbers from 0 to `most`. */
export function ticks(low, high, many = 5) {
  if (!(high > low)) return [low];
  const rough = (high - low) / many;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const out = [];
  for (let x = Math.ceil(low / step) * step; x <= high + step * 1e-6; x += step) out.push(Number(x.toPrecision(12)));
  return out;
}
