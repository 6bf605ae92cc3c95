// Time and memory of the phases of a step.
import { h, number, swatch, color } from "./dom.js";

export function phasesCard(run) {
  const all = run.phases.reduce((sum, p) => sum + p.seconds, 0) || 1, withMemory = run.phases.some(p => p.memory_gib);
  if (!run.phases.length) return null;
  return h("section", { class: "card" }, h("h2", {}, "Time and memory per phase"),
    h("div", { class: "phase", role: "img", "aria-label": run.phases.map(p => `${p.name} ${(100 * p.seconds / all).toFixed(0)}%`).join(", ") }, run.phases.map((p, i) => h("i", { title: `${p.name}: ${(100 * p.seconds / all).toFixed(1)}%`, style: { width: `${100 * p.seconds / all}%`, background: color(i) } }))),
    h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "phase"), h("th", { class: "number" }, "share"), h("th", { class: "number" }, "s/step, last 20"), h("th", { class: "number" }, "s in all"), withMemory ? h("th", { class: "number" }, "peak GiB") : null)),
      h("tbody", {}, run.phases.map((p, i) => h("tr", {}, h("td", {}, h("span", { class: "row together" }, swatch(i), p.name)), h("td", { class: "number" }, `${(100 * p.seconds / all).toFixed(1)}%`), h("td", { class: "number" }, number(p.recent, 3)), h("td", { class: "number" }, number(p.seconds, 4)), withMemory ? h("td", { class: "number" }, number(p.memory_gib, 3)) : null))))),
    h("p", { class: "muted small" }, `${number(run.steps)} logged steps; peak memory ${run.peak_gib ? number(run.peak_gib, 3) + " GiB" : "not logged"}.`));
}
