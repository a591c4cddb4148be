// The frame: which page stands where, the header that follows the run, and the keys that work everywhere.

import { compare } from "./compare.js";
import { curves } from "./curves.js";
import { h, num } from "./dom.js";
import { recipe } from "./recipe.js";
import { rollout } from "./rollout.js";
import { rollouts } from "./rollouts.js";
import { begin, follow, store } from "./store.js";

const PAGES = { "": curves, rollouts, rollout, compare, recipe };
const KEYS = { 1: "#/", 2: "#/rollouts", 3: "#/recipe" };
const main = document.getElementById("main");
const help = document.getElementById("help");
let leave = () => {};

/** "#/rollout/a:1?lane=2" as {page, parts, options}. */
function place() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [page, ...parts] = path.split("/").map(decodeURIComponent);
  return { page, parts, options: new URLSearchParams(query) };
}

function go() {
  const at = place();
  leave();
  const make = PAGES[at.page];
  main.replaceChildren();
  leave = (make ? make(main, at) : lostPage()) ?? (() => {});
  for (const link of document.querySelectorAll("nav a")) {
    const current = link.dataset.page === ({ "": "curves", rollout: "rollouts", compare: "rollouts" }[at.page] ?? at.page);
    link.toggleAttribute("data-current", current);
    if (current) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  window.scrollTo(0, 0);
}

function lostPage() {
  main.append(h("p", { class: "empty" }, "There is no such page. ", h("a", { href: "#/" }, "To the curves")));
}

function header() {
  const { version, about } = store;
  document.title = `${about.name} · Swarm RL`;
  document.getElementById("run-name").textContent = about.name;
  const state = document.getElementById("run-state");
  const words = store.lost ? "viewer closed" : version.state;
  if (state.textContent !== words) state.textContent = words;
  state.dataset.state = store.lost ? "lost" : version.state;
  document.getElementById("run-count").textContent = num(store.rollouts.length) + (version.ready ? "" : " …");
}

function typing(event) {
  return event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog");
}

document.addEventListener("keydown", (event) => {
  if (typing(event)) return;
  if (event.key === "?") help.showModal();
  else if (KEYS[event.key]) location.hash = KEYS[event.key];
  else if (event.key === "/") {
    if (place().page !== "rollouts") {
      history.pushState(null, "", "#/rollouts");
      go();
    }
    document.getElementById("search")?.focus();
  } else return;
  event.preventDefault();
});
document.getElementById("help-button").addEventListener("click", () => help.showModal());
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
window.addEventListener("hashchange", go);

try {
  await begin();
  follow(header);
  header();
  go();
} catch (error) {
  main.replaceChildren(h("p", { class: "empty", role: "alert" }, `The run cannot be read: ${error.message}`));
}
document.documentElement.dataset.ready = "";
