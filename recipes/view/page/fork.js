// A fork from the page: one thing is changed at a turn, the branch runs on, and both are shown beside each other.

import { h } from "./dom.js";
import { post } from "./store.js";

/** Asks what is to be changed at a turn. `said`: its text; `came`: what its calls gave back, one text each. */
export function forkDialog(rollout, agent, turn, said, came) {
  const field = (label, input, note) => h("label", { class: "field" }, h("span", {}, label, note ? h("small", {}, ` ${note}`) : null), input);
  const text = (value, rows) => h("textarea", { rows, spellcheck: "false" }, value);
  const number = (step, hint) => h("input", { type: "number", step, placeholder: hint, min: 0 });
  const say = text(said, Math.min(12, said.split("\n").length + 1));
  const results = came.map((value) => text(value, Math.min(6, value.split("\n").length)));
  const prompt = turn === 0 && agent.parent >= 0 ? text(agent.prompt, 3) : null;
  const [steps, temperature, seed] = [number(1, "as recorded"), number(0.1, "as recorded"), number(1, "as recorded")];
  const told = h("p", { role: "status", class: "soft" });
  const go = h("button", { type: "submit", class: "primary" }, "Run the branch");
  const close = () => {
    dialog.close();
    dialog.remove();
  };
  const dialog = h(
    "dialog",
    { class: "fork", "aria-labelledby": "fork-title", onclose: () => dialog.remove() },
    h(
      "form",
      { onsubmit: (event) => (event.preventDefault(), send()) },
      h("h2", { id: "fork-title" }, `Fork at turn ${turn + 1} of ${agent.name}`),
      h("p", { class: "soft" }, "What was before stays. Change one thing, or nothing to have the turn sampled again; from there the policy goes on."),
      field("What it says", say),
      results.map((area, k) => field(`What call ${k + 1} gives back`, area)),
      prompt ? field("What it was asked", prompt) : null,
      h("div", { class: "tools" }, field("critical steps", steps), field("temperature", temperature), field("seed", seed)),
      told,
      h("p", { class: "tools" }, go, h("button", { type: "button", onclick: close }, "Cancel")),
    ),
  );

  async function send() {
    const asked = { id: rollout.id, agent: agent.name, turn };
    if (say.value !== said) asked.say = say.value;
    const changed = results.flatMap((area, k) => (area.value !== came[k] ? [[k, area.value]] : []));
    if (changed.length) asked.results = Object.fromEntries(changed);
    if (prompt && prompt.value !== agent.prompt) asked.prompt = prompt.value;
    if (steps.value) asked.critical_steps = Number(steps.value);
    if (temperature.value) asked.temperature = Number(temperature.value);
    if (seed.value) asked.seed = Number(seed.value);
    go.disabled = true;
    told.textContent = "The branch runs; the first one opens the engines, which takes a while …";
    try {
      const { id } = await post("api/fork", asked);
      close();
      location.hash = `#/compare/${encodeURIComponent(rollout.id)}/${encodeURIComponent(id)}`;
    } catch (error) {
      told.textContent = error.message;
      go.disabled = false;
    }
  }

  document.body.append(dialog);
  dialog.showModal();
}
