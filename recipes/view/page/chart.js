// One chart of lines over iterations: drawn as SVG, read by mouse, by arrow keys and by a screen reader.

import { h, num, say, ticks } from "./dom.js";

const W = 420;
const H = 190;
const PAD = { left: 46, right: 12, top: 10, bottom: 24 };
const MOST_POINTS = 600;

/** A figure. `lines`: [{name, points: [[x, y]], dots}]; `onpick(x)` when an iteration is chosen; `log`: the y axis. */
export function chart({ title, note, lines, log = false, zero = false, onpick = null }) {
  const drawn = lines.map((line) => ({ ...line, points: line.points.filter(([, y]) => Number.isFinite(y) && (!log || y > 0)) })).filter((l) => l.points.length);
  if (!drawn.length) return null;
  const scale = scales(drawn, log, zero);
  const cursor = h("g", { class: "cursor", visibility: "hidden" });
  const picture = h(
    "svg",
    { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": described(title, drawn), tabindex: 0, class: "chart" },
    grid(scale),
    drawn.map((line, k) => curve(line, k, scale, hides(drawn, k))),
    cursor,
  );
  const values = drawn.map((line, k) => h("span", { class: "key" }, h("i", { class: `ink-${k % 6}`, "aria-hidden": "true" }), line.name, " ", h("b", {}, num(line.points.at(-1)[1]))));
  const where = h("span", { class: "where" }, "last");
  const figure = h("figure", { class: "card figure" }, h("figcaption", {}, h("h2", {}, title), note ? h("p", { class: "soft" }, note) : null), picture, h("p", { class: "legend" }, values, where));
  reads(picture, drawn, scale, { cursor, values, where, title, onpick });
  return figure;
}

function described(title, lines) {
  const parts = lines.map(({ name, points }) => {
    const ys = points.map(([, y]) => y);
    return `${name}: ${points.length} points, first ${num(ys[0])}, last ${num(ys.at(-1))}, least ${num(Math.min(...ys))}, most ${num(Math.max(...ys))}`;
  });
  return `${title}. ${parts.join("; ")}. Arrow keys read the points.`;
}

function scales(lines, log, zero) {
  const xs = lines.flatMap((line) => line.points.map(([x]) => x));
  const ys = lines.flatMap((line) => line.points.map(([, y]) => y));
  const x0 = Math.min(...xs);
  const x1 = Math.max(...xs, x0 + 1);
  let y0 = zero ? Math.min(0, ...ys) : Math.min(...ys);
  let y1 = Math.max(...ys);
  if (log) [y0, y1] = [10 ** Math.floor(Math.log10(y0)), 10 ** Math.ceil(Math.log10(y1))];
  else if (zero && y0 === 0) y1 = ticks(0, y1 || 1, 4)[1] * Math.ceil(y1 / ticks(0, y1 || 1, 4)[1] - 1e-9);
  if (y1 === y0) [y0, y1] = [y0 - (Math.abs(y0) || 1) / 2, y1 + (Math.abs(y1) || 1) / 2];
  const f = log ? Math.log10 : (y) => y;
  const x = (v) => PAD.left + ((v - x0) / (x1 - x0)) * (W - PAD.left - PAD.right);
  const y = (v) => H - PAD.bottom - ((f(v) - f(y0)) / (f(y1) - f(y0))) * (H - PAD.top - PAD.bottom);
  const marks = log ? ticks(Math.log10(y0), Math.log10(y1), 4).filter(Number.isInteger).map((e) => 10 ** e) : ticks(y0, y1, 4);
  return { x, y, xs: [...new Set(xs)].sort((a, b) => a - b), yTicks: marks, xTicks: ticks(x0, x1, 6).filter(Number.isInteger) };
}

function grid({ x, y, yTicks, xTicks }) {
  return [
    yTicks.map((v) => [
      h("line", { class: "rule", x1: PAD.left, x2: W - PAD.right, y1: y(v), y2: y(v) }),
      h("text", { x: PAD.left - 6, y: y(v) + 3.5, "text-anchor": "end" }, num(v)),
    ]),
    xTicks.map((v) => h("text", { x: x(v), y: H - 7, "text-anchor": "middle" }, num(v))),
  ];
}

/** Whether a line lies on an earlier one: it is dashed, so that both are seen. */
const hides = (lines, k) => lines.slice(0, k).some((line) => String(line.points) === String(lines[k].points));

function curve({ points, dots }, k, { x, y }, again) {
  const every = Math.ceil(points.length / MOST_POINTS);
  const kept = points.filter((_, i) => i % every === 0 || i === points.length - 1);
  if (dots || kept.length === 1) return kept.map(([a, b]) => h("circle", { class: `ink-${k % 6}`, cx: x(a), cy: y(b), r: 3 }));
  return h("polyline", { class: `ink-${k % 6}${again ? " again" : ""}`, points: kept.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ") });
}

/** Moves the cursor, shows the values there, and opens an iteration. */
function reads(picture, lines, { x, y, xs }, { cursor, values, where, title, onpick }) {
  let at = null;
  const show = (index, aloud) => {
    at = index;
    const v = index === null ? null : xs[index];
    cursor.setAttribute("visibility", v === null ? "hidden" : "visible");
    where.textContent = v === null ? "last" : `iteration ${v}`;
    const texts = lines.map((line, k) => {
      const point = v === null ? line.points.at(-1) : line.points.find(([a]) => a === v);
      values[k].querySelector("b").textContent = point ? num(point[1]) : "–";
      return point ? `${line.name} ${num(point[1])}` : null;
    });
    if (v === null) return;
    const marks = lines.map((line, k) => [line.points.find(([a]) => a === v), k]).filter(([p]) => p);
    cursor.replaceChildren(
      h("line", { x1: x(v), x2: x(v), y1: PAD.top, y2: H - PAD.bottom }),
      ...marks.map(([[a, b], k]) => h("circle", { class: `ink-${k % 6}`, cx: x(a), cy: y(b), r: 3.5 })),
    );
    if (aloud) say(`${title}, iteration ${v}: ${texts.filter(Boolean).join(", ")}`);
  };
  const nearest = (event) => {
    const box = picture.getBoundingClientRect();
    const wanted = ((event.clientX - box.left) / box.width) * W;
    return xs.reduce((best, v, k) => (Math.abs(x(v) - wanted) < Math.abs(x(xs[best]) - wanted) ? k : best), 0);
  };
  picture.addEventListener("pointermove", (event) => show(nearest(event)));
  picture.addEventListener("pointerleave", () => show(null));
  picture.addEventListener("blur", () => show(null));
  picture.addEventListener("click", (event) => onpick?.(xs[nearest(event)]));
  picture.addEventListener("keydown", (event) => {
    const moved = { ArrowLeft: -1, ArrowRight: 1, Home: -xs.length, End: xs.length }[event.key];
    if (moved) show(Math.max(0, Math.min(xs.length - 1, (at ?? (moved > 0 ? -1 : xs.length)) + moved)), true);
    else if (event.key === "Enter" && at !== null) onpick?.(xs[at]);
    else return;
    event.preventDefault();
  });
}
