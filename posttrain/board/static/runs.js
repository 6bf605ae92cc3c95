// The list of runs.
import { h, number, duration, ago, pill, swatch, select } from "./dom.js";
import { get } from "./api.js";
import { spark } from "./chart.js";

const chosen = new Set();
const ORDER = { running: 0, failed: 1, killed: 2, stopped: 3, unknown: 4, finished: 5 };
const link = run => `#/run/${run.id}`;
// The value in the column metric.
const figure = run => (run.figure ? run.figure.value : run.last[run.main_metric]) ?? null;

export function steps(run) {
  const text = run.total_steps ? `${number(run.step)} / ${number(run.total_steps)}` : number(run.step);
  return [h("div", { class: "row between small" }, h("span", { class: "number" }, text), h("span", { class: "muted number" }, run.eta_seconds !== null ? `${duration(run.eta_seconds)} left` : "")),
    h("progress", { class: run.state, max: run.total_steps || 1, value: run.total_steps ? Math.min(run.step, run.total_steps) : 0, "aria-label": `${text} steps` })];
}

export async function showRuns(page) {
  page.path([]);
  page.title("Runs");
  const search = h("input", { type: "search", placeholder: "Filter by name, task, model …", "aria-label": "Filter runs", value: page.values.get("q") || "" });
  const body = h("tbody"), bar = h("div"), count = h("span", { class: "muted" });
  let order = page.values.get("order") || "newest", runs = [], shown = "";
  const orderBox = select(order, [["newest", "newest first"], ["state", "by state"], ["name", "by name"], ["highest", "highest metric"], ["lowest", "lowest metric"]], value => { order = value; page.remember({ order: value === "newest" ? "" : value }); draw(true); });
  const table = h("table", { class: "runs" }, h("thead", {}, h("tr", {}, h("th"), h("th", {}, "run"), h("th", {}, "state"), h("th", {}, "steps"), h("th", { class: "number" }, "speed"), h("th", { class: "number" }, "metric"), h("th", {}, ""), h("th", { class: "number" }, "memory"), h("th", { class: "number" }, "changed"))), body);
  search.addEventListener("input", () => { page.remember({ q: search.value }); draw(true); });
  page.main.replaceChildren(h("div", { class: "top" }, h("h1", {}, "Runs"), count, h("span", { class: "space" }), search, orderBox, h("a", { class: "button primary", href: "#/launch" }, "New run")), h("section", { class: "card list" }, h("div", { class: "scroll" }, table)), bar);

  const toggle = run => { if (chosen.has(run.id)) chosen.delete(run.id); else chosen.add(run.id); draw(true); };
  const row = run => {
    const metric = run.figure ? run.figure.name : run.main_metric, value = figure(run);
    return h("tr", { class: `open${chosen.has(run.id) ? " chosen" : ""}`, tabindex: "0", data: { row: run.id }, on: {
      click: event => { if (!event.target.closest("a, input")) location.hash = link(run); },
      keydown: event => { if (event.key === "Enter" && event.target === event.currentTarget) location.hash = link(run); },
    } },
      h("td", {}, h("input", { type: "checkbox", checked: chosen.has(run.id), "aria-label": `Choose ${run.name}`, on: { change: () => toggle(run) } })),
      h("td", { class: "name wrap" }, h("a", { href: link(run) }, run.name), h("div", { class: "muted small" }, [run.verb, run.model].filter(Boolean).join(" · ") || "no configuration yet")),
      h("td", { class: "state", title: run.reason }, pill(run.state), run.resumed_at.length ? h("div", { class: "muted small" }, `resumed at ${run.resumed_at.map(s => number(s)).join(", ")}`) : null),
      h("td", { class: "steps", style: { minWidth: "150px" } }, run.verb === "eval" ? null : steps(run)),
      h("td", { class: "number optional" }, run.tokens_per_second ? `${number(run.tokens_per_second, 3)} tok/s` : "–", h("div", { class: "muted small" }, run.seconds_per_step ? `${number(run.seconds_per_step, 3)} s/step` : "")),
      h("td", { class: "number metric" }, number(value), h("div", { class: "muted small" }, metric)),
      h("td", { class: "spark" }, run.spark.length > 1 ? spark(run.spark) : null),
      h("td", { class: "number optional" }, run.memory_gib ? `${number(run.memory_gib, 3)} GiB` : "–"),
      h("td", { class: "number muted optional" }, ago(run.updated)));
  };

  function draw(force) {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = runs.filter(run => words.every(w => `${run.name} ${run.verb} ${run.model} ${run.state}`.toLowerCase().includes(w)));
    const newest = (a, b) => (b.created || b.updated || 0) - (a.created || a.updated || 0);
    const by_metric = sign => (a, b) => (figure(a) === null) - (figure(b) === null) || sign * (figure(a) - figure(b)) || newest(a, b);
    const orders = { newest, name: (a, b) => a.name.localeCompare(b.name), state: (a, b) => ORDER[a.state] - ORDER[b.state] || newest(a, b), highest: by_metric(-1), lowest: by_metric(1) };
    fits.sort(orders[order] || newest);
    const key = JSON.stringify([fits, [...chosen]]);
    if (key === shown && !force) return;
    shown = key;
    const focused = document.activeElement.closest?.("[data-row]")?.dataset.row;
    body.replaceChildren(...fits.map(row));
    if (focused) body.querySelector(`[data-row="${focused}"]`)?.focus({ preventScroll: true });
    if (!fits.length) body.append(h("tr", {}, h("td", { colspan: "9", class: "empty" }, runs.length ? "No run fits the filter." : "No runs here yet. A run appears as soon as it starts.")));
    const by = state => runs.filter(run => run.state === state).length;
    count.textContent = `${runs.length} run${runs.length === 1 ? "" : "s"}${by("running") ? `, ${by("running")} running` : ""}`;
    const picked = runs.filter(run => chosen.has(run.id)), ids = picked.map(run => run.id).join(",");
    bar.replaceChildren(...(picked.length ? [h("div", { class: "bar" },
      ...picked.slice(0, 8).map((run, i) => h("span", { class: "row" }, swatch(i), run.name)), picked.length > 8 ? `and ${picked.length - 8} more` : null, h("span", { class: "space" }),
      h("button", { class: "quiet", on: { click: () => { chosen.clear(); draw(true); } } }, "Clear"),
      h("button", { class: "primary", on: { click: () => { location.hash = `#/compare/curves?runs=${ids}`; } } }, picked.length > 1 ? `Compare ${picked.length} runs` : "Curves"))] : []));
  }
  Object.assign(page.keys, {
    x: at => { const run = runs.find(r => r.id === at.closest("[data-row]")?.dataset.row); if (run) toggle(run); },
    c: () => { if (chosen.size) location.hash = `#/compare/curves?runs=${[...chosen].join(",")}`; },
  });
  addEventListener("themechange", () => draw(true), { signal: page.signal });
  await page.keep(async () => { runs = (await get("runs", {}, page.signal)).runs; draw(false); });
}
