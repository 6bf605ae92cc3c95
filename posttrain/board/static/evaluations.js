// Evaluations of a run: figures with 95% confidence intervals, and two evaluations compared on the same examples.
import { h, card, field, long, number, select, visible } from "./dom.js";
import { get } from "./api.js";

const signed = value => `${value > 0 ? "+" : ""}${number(value)}`;
const interval = f => `[${number(f.low)}, ${number(f.high)}]`;

export async function showEvaluations(page, run, box) {
  const { evaluations, others } = await get("evaluations", { run: run.id }, page.signal);
  if (!evaluations.length && run.verb === "eval") { box.replaceChildren(card("", h("p", { class: "empty" }, run.reason ? `There is no result: ${run.reason}.` : "There is no result yet."))); return; }
  if (!evaluations.length) { box.replaceChildren(card("", h("p", { class: "empty" }, "No evaluation of this run yet. Options eval.harness and eval.tasks evaluate during training; ", h("code", {}, "posttrain eval"), " evaluates afterwards."))); return; }
  const names = [...new Set(evaluations.flatMap(e => Object.keys(e.figures)))], compared = h("div", { class: "stack" });
  const every = [...evaluations.map(e => [e.id, e.label]), ...others.map(e => [e.id, e.label])];
  let first = page.values.get("first") || (evaluations.filter(e => e.run === run.id).pop() || evaluations[evaluations.length - 1]).id, second = page.values.get("second") || (evaluations.length > 1 ? evaluations[0].id : others[0]?.id || "");
  const chooser = (value, change) => select(value, every, next => { change(next); page.remember({ first, second }); compare(); });
  box.replaceChildren(h("div", { class: "stack" },
    h("div", { class: "grid two" }, names.map(name => forest(name, evaluations.filter(e => e.figures[name])))),
    every.length > 1 ? card("Paired comparison", h("div", { class: "row" }, field("evaluation", chooser(first, next => { first = next; })), field("against", chooser(second, next => { second = next; }))), compared) : null));

  async function compare() {
    if (!first || !second || first === second) { compared.replaceChildren(h("p", { class: "muted" }, "Choose two evaluations.")); return; }
    compared.replaceChildren(h("p", { class: "muted", role: "status" }, "Comparing …"));
    let found;
    try { found = await get("pairs", { first, second }, page.signal); }
    catch (error) { if (!page.signal.aborted) compared.replaceChildren(h("p", { class: "notice" }, visible(error.message))); return; }
    const rows = Object.entries(found.comparison).map(([name, c]) => h("tr", {}, h("td", { class: "wrap" }, visible(name)), h("td", { class: "number" }, h("b", {}, signed(c.difference.value)), h("div", { class: "muted small" }, interval(c.difference))), h("td", { class: "number" }, `${number(c.better)} / ${number(c.worse)} / ${number(c.same)}`), h("td", { class: "number" }, number(c.p, 3)),
      h("td", {}, c.p >= 0.05 ? h("span", { class: "muted" }, "no clear difference") : h("span", { class: c.difference.value > 0 ? "good" : "bad" }, c.difference.value > 0 ? "larger" : "smaller"))));
    compared.replaceChildren(h("p", { class: "muted" }, `${number(found.examples)} examples are in both; the scores of ${number(found.differing)} differ. p: how likely a difference this large is if both were equally good (randomization test on pairs).`),
      h("div", { class: "scroll" }, h("table", { class: "pairs" }, h("thead", {}, h("tr", {}, h("th", {}, "score"), h("th", { class: "number" }, "difference, 95% interval"), h("th", { class: "number" }, "better / worse / same"), h("th", { class: "number" }, "p"), h("th", {}, ""))), h("tbody", {}, rows))),
      ...(found.shown.length ? [h("h3", {}, `Examples whose scores differ${found.differing > found.shown.length ? `, the first ${found.shown.length}` : ""}`), ...found.shown.map(example)] : []));
  }
  if (every.length > 1) await compare();
}

function example(e) {
  const scores = s => Object.entries(s).map(([name, value]) => h("span", { class: "pill plain" }, `${visible(name)} ${number(value)}`));
  return h("details", {}, h("summary", {}, `${visible(e.task)} ${visible(e.index)} `, h("span", { class: "muted small" }, `expected ${visible(e.target).slice(0, 120)}`)),
    h("div", { class: "side" }, [0, 1].map(i => h("section", { class: "card" }, h("div", { class: "row small" }, scores(e.scores[i])), h("div", { class: "pre" }, long(e.replies[i]))))));
}

// The values of one figure with their intervals, one row per evaluation, on a common axis.
function forest(name, evaluations) {
  const all = evaluations.map(e => e.figures[name]), low = Math.min(...all.map(f => f.low)), high = Math.max(...all.map(f => f.high)), at = v => high > low ? 100 * (v - low) / (high - low) : 50;
  return h("section", { class: "card" }, h("h2", { class: "wrap" }, visible(name)), h("div", { class: "forest" }, evaluations.map(e => { const f = e.figures[name]; return [h("span", { class: "wrap" }, visible(e.label)),
    h("span", { class: "range", role: "img", "aria-label": `${number(f.value)}, 95% interval ${interval(f)}` }, h("i", { class: "whisker", style: { left: `${at(f.low)}%`, width: `${at(f.high) - at(f.low)}%` } }), h("i", { class: "point", style: { left: `${at(f.value)}%` } })),
    h("span", { class: "number" }, h("b", {}, number(f.value)), h("div", { class: "muted small" }, interval(f)))]; })),
    h("p", { class: "muted small" }, `Bars are 95% confidence intervals, from ${number(low)} to ${number(high)}.`));
}
