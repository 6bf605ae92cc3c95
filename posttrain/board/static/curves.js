// Curves of one or several runs: any metrics, smoothed, on a logarithmic axis, by steps, tokens or minutes, a part of it.
import { h, field, select, save, swatch } from "./dom.js";
import { get, getBlob } from "./api.js";
import { Chart } from "./chart.js";

const group = name => name.includes("/") ? name.split("/")[0] : "";

export async function showCurves(page, runs, box) {
  const ids = runs.map(run => run.id).join(","), charts = new Map();
  const values = page.values;
  let wanted = values.get("metrics") ? values.get("metrics").split(",") : null, names = [];
  const filter = h("input", { type: "search", placeholder: "Find a metric", "aria-label": "Find a metric" });
  const list = h("div"), grid = h("div", { class: "grid two" }), note = h("div");
  const smoothing = h("input", { type: "range", min: "0", max: "0.99", step: "0.01", value: values.get("smoothing") || "0", "aria-label": "Smoothing" });
  const shownSmoothing = h("output", {}, smoothing.value);
  const log = h("input", { type: "checkbox", checked: values.get("log") === "yes" });
  let axis = values.get("x_axis") || "step", shown = values.get("x_from") && values.get("x_to") ? [Number(values.get("x_from")), Number(values.get("x_to"))] : null;
  const hidden = new Set((values.get("hidden") || "").split(",").filter(Boolean));
  const zoom = part => {
    if (part && axis === "step") part = [Math.floor(part[0]), Math.ceil(part[1])];
    shown = part && part.map(x => Number(x.toPrecision(8)));
    page.remember({ x_from: shown ? shown[0] : "", x_to: shown ? shown[1] : "" });
    again();
  };
  const reset = h("button", { on: { click: () => zoom(null) } }, "Whole axis");
  const axisBox = select(axis, [["step", "steps"], ["tokens", "tokens"], ["time", "minutes"]], value => { axis = value; page.remember({ x_axis: value === "step" ? "" : value }); zoom(null); });
  const csv = h("button", { on: { click: async () => save(await getBlob("csv", { runs: ids, metrics: wanted.join(",") }), "metrics.csv") } }, "CSV");
  smoothing.addEventListener("input", () => { shownSmoothing.textContent = smoothing.value; });
  smoothing.addEventListener("change", () => { page.remember({ smoothing: smoothing.value === "0" ? "" : smoothing.value }); again(); });
  log.addEventListener("change", () => { page.remember({ log: log.checked ? "yes" : "" }); again(); });
  filter.addEventListener("input", pick);
  const toggle = (run, i) => h("button", { class: "quiet toggle", title: "Show or hide its curves", "aria-label": `Show ${run.name}`, "aria-pressed": String(!hidden.has(run.id)), on: { click: event => {
    if (hidden.has(run.id)) hidden.delete(run.id); else hidden.add(run.id);
    event.currentTarget.setAttribute("aria-pressed", String(!hidden.has(run.id)));
    page.remember({ hidden: [...hidden].join(",") });
    again();
  } } }, swatch(i));
  const legend = runs.length > 1 ? h("div", { class: "legend" }, runs.map((run, i) => h("span", {}, toggle(run, i), h("a", { href: `#/run/${run.id}` }, run.name)))) : null;
  box.replaceChildren(h("div", { class: "curves" }, h("aside", { class: "card picker" }, filter, list),
    h("div", { class: "stack" }, h("section", { class: "card row" }, h("label", {}, "smoothing", smoothing, shownSmoothing), h("label", {}, log, "log scale"), h("label", {}, "axis", axisBox), reset, h("span", { class: "space" }), csv, legend), note, grid)));

  function pick() {
    const groups = new Map();
    for (const entry of names) if (entry.name.toLowerCase().includes(filter.value.toLowerCase())) groups.set(group(entry.name), [...(groups.get(group(entry.name)) || []), entry]);
    list.replaceChildren(...[...groups].sort((a, b) => a[0].localeCompare(b[0])).flatMap(([title, entries]) => [title ? h("h3", {}, title) : null, ...entries.map(entry => h("label", { title: `logged by ${entry.runs} of ${runs.length} runs` },
      h("input", { type: "checkbox", checked: wanted.includes(entry.name), on: { change: event => { wanted = event.target.checked ? [...wanted, entry.name] : wanted.filter(n => n !== entry.name); page.remember({ metrics: wanted.join(",") }); again(); } } }), entry.name))].filter(Boolean)));
  }

  async function load() {
    const found = await get("curves", { runs: ids, metrics: wanted.join(","), x_axis: axis, smoothing: smoothing.value, x_from: shown?.[0], x_to: shown?.[1] }, page.signal);
    const ends = found.runs.filter(run => run.ends && !hidden.has(run.run)).map(run => run.ends), whole = ends.length ? [Math.min(...ends.map(e => e[0])), Math.max(...ends.map(e => e[1]))] : null;
    reset.hidden = !shown;
    note.replaceChildren(...found.runs.filter(r => r.problem).map(r => h("p", { class: "notice" }, `${r.name}: ${r.problem}`)));
    const label = { step: "step", tokens: "tokens", time: "minutes" }[axis];
    for (const name of [...charts.keys()]) if (!wanted.includes(name)) { charts.get(name).element.remove(); charts.delete(name); }
    grid.querySelector(":scope > .empty")?.remove();
    for (const [i, name] of wanted.entries()) {
      if (!charts.has(name)) {
        const download = h("button", { class: "quiet", title: "Download as CSV", on: { click: async () => save(await getBlob("csv", { runs: ids, metrics: name }), `${name.replace(/\W+/g, "-")}.csv`) } }, "CSV");
        charts.set(name, new Chart(name, { actions: [download], zoom }));
      }
      const chart = charts.get(name);
      if (grid.children[i] !== chart.element) grid.insertBefore(chart.element, grid.children[i] || null); // an element that is moved loses the focus
      chart.set(found.runs.flatMap((run, i) => run.curves[name] && !hidden.has(run.run) ? [{ label: run.name, color: i, ...run.curves[name] }] : []), { log: log.checked, xLabel: label, range: shown || whole, whole });
    }
    if (!wanted.length) grid.replaceChildren(h("p", { class: "empty" }, names.length ? "Choose metrics on the left." : "No step is logged yet."));
  }
  // After a control was used; leaving the page meanwhile is no error.
  function again() { load().catch(error => { if (!page.signal.aborted) note.replaceChildren(h("p", { class: "notice bad" }, error.message)); }); }
  await page.keep(async () => {
    const before = names.length;
    names = (await get("metrics", { runs: ids }, page.signal)).metrics;
    if (wanted === null || (!values.get("metrics") && before === 0)) {
      const extra = ["reward", "loss", "eval/loss", "eval/reward", "accuracy", "entropy", "length", "kl", "grad_norm", "learning_rate", "tokens_per_second"];
      wanted = [...new Set([...names.filter(n => n.usual).map(n => n.name), ...extra.filter(n => names.some(m => m.name === n))])].slice(0, 6);
    }
    if (names.length !== before) pick();
    await load();
  });
}
