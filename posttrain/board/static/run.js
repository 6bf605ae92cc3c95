// One run: overview, curves, completions, configuration, examples, logs.
import { h, number, duration, ago, pill, card, visible, select, tabBar } from "./dom.js";
import { get, post } from "./api.js";
import { steps } from "./runs.js";
import { Chart } from "./chart.js";
import { showCurves } from "./curves.js";
import { showCompletions } from "./completions.js";
import { showEvaluations } from "./evaluations.js";
import { showConfig } from "./config.js";
import { phasesCard } from "./phases.js";

const FEW = 40; // values of a curve: these are not smoothed
const TABS = [["", "Overview"], ["curves", "Curves"], ["completions", "Completions"], ["evaluations", "Evaluations"], ["config", "Configuration"], ["examples", "Data check"], ["logs", "Logs"]];

export async function showRun(page) {
  const [, id, asked = ""] = page.parts;
  const run = await get("run", { run: id }, page.signal), tab = asked || (run.verb === "eval" ? "evaluations" : "");
  page.path([[run.name, `#/run/${id}`]]);
  page.title(run.name);
  const box = h("div"), state = h("span"), control = h("span", { class: "row" }), href = key => `#/run/${id}${key ? "/" + key : ""}`;
  const tabs = TABS.filter(([key]) => (key !== "completions" || run.has_rollouts || tab === key) && (run.verb !== "eval" || ["evaluations", "config"].includes(key)));
  const head = h("div", { class: "top" }, h("h1", {}, run.name), state, h("span", { class: "muted" }, [run.verb, run.model].filter(Boolean).join(" · ")), h("span", { class: "space" }), control);
  page.main.replaceChildren(head, tabBar("Parts of the run", tabs.map(([key, text]) => [href(key), text, key === tab])), box);
  tabs.forEach(([key], i) => { page.keys[i + 1] = () => { location.hash = href(key); }; });
  const painted = now => {
    state.replaceChildren(pill(now.state));
    control.replaceChildren(...buttons(now, page));
  };
  painted(run);
  await ({ curves: () => showCurves(page, [run], box), completions: () => showCompletions(page, run, box), evaluations: () => showEvaluations(page, run, box), config: () => showConfig(page, [run], box), examples: () => showExamples(page, run, box), logs: () => showLogs(page, run, box) }[tab] || (() => showOverview(page, run, box, painted)))();
}

export function confirmed(question, action) {
  const dialog = document.getElementById("dialog"), close = value => () => dialog.close(value);
  dialog.returnValue = "";
  dialog.replaceChildren(h("p", { class: "wrap" }, question), h("div", { class: "row end" }, h("button", { on: { click: close("") } }, "Cancel"), h("button", { class: "primary", on: { click: close("yes") } }, action)));
  dialog.showModal();
  return new Promise(done => dialog.addEventListener("close", () => done(dialog.returnValue === "yes"), { once: true }));
}

function buttons(run, page) {
  if (!run.control) return [];
  const act = (name, question, text, kind) => h("button", { class: kind, on: { click: async event => {
    if (!await confirmed(question, text)) return;
    event.target.disabled = true;
    try { await post(name, { run: run.id }); event.target.textContent = "sent"; }
    catch (error) { event.target.disabled = false; page.main.prepend(h("p", { class: "notice bad" }, error.message)); }
  } } }, text);
  if (run.state === "running") return [act("stop", `Stop ${run.name}? It finishes its step, saves a checkpoint and ends.`, "Stop after saving", "danger")];
  if (run.state !== "finished" && run.verb) return [act("resume", `Resume ${run.name} from its newest checkpoint, with the command: posttrain ${run.verb} --output_dir … --resume`, "Resume", "primary")];
  return [];
}

async function showOverview(page, first, box, painted) {
  const facts = h("section", { class: "card" }), reason = h("div"), charts = h("div", { class: "grid" }), phases = h("div"), log = h("section", { class: "card" }), drawn = new Map();
  box.replaceChildren(h("div", { class: "stack" }, reason, facts, charts, h("div", { class: "grid two" }, phases, log)));
  const fact = (value, name) => h("div", { class: "fact" }, h("b", {}, value), h("span", {}, name));
  let names = null;
  await page.keep(async () => {
    const run = await get("run", { run: first.id }, page.signal);
    painted(run);
    const bad = run.state === "failed" || run.state === "killed";
    reason.replaceChildren(...(run.reason && run.state !== "finished" ? [h("p", { class: `notice pre ${bad ? "bad" : ""}` }, visible(run.reason))] : []),
      ...(run.bad_metric_lines ? [h("p", { class: "notice" }, `${run.bad_metric_lines} lines of metrics.jsonl cannot be read.`)] : []),
      ...(run.started ? [h("details", { class: "card", open: run.started.exit_code !== null && run.started.exit_code !== 0 }, h("summary", {}, run.started.exit_code === null ? "Started from this board" : `Started from this board; ended with exit code ${run.started.exit_code}`), h("p", { class: "mono wrap" }, run.started.command), h("pre", { class: "log" }, visible(run.started.output)))] : []));
    facts.replaceChildren(h("div", {}, steps(run)), h("div", { class: "facts", style: { marginTop: ".8rem" } },
      run.main_metric ? fact(number(run.last[run.main_metric]), run.main_metric) : null, run.state === "running" ? fact(run.eta_seconds === null ? "–" : duration(run.eta_seconds), "remaining") : null, fact(duration(run.phases.reduce((sum, p) => sum + p.seconds, 0)), "time in steps"), fact(run.tokens_per_second ? number(run.tokens_per_second, 4) : "–", "tokens per second"),
      fact(run.seconds_per_step ? number(run.seconds_per_step, 3) : "–", "seconds per step"), fact(run.memory_gib ? `${number(run.memory_gib, 3)} GiB` : "–", "peak memory"), fact(run.checkpoints.length ? run.checkpoints.map(s => number(s)).slice(-3).join(", ") : "none", "checkpoints (newest steps)"), fact(ago(run.updated), "last change"), run.resumed_at.length ? fact(run.resumed_at.map(s => number(s)).join(", "), "resumed at step") : null));
    phases.hidden = !run.phases.length;
    phases.replaceChildren(...[phasesCard(run)].filter(Boolean));
    log.replaceChildren(h("h2", {}, "End of the log"), logText(run.log.join("\n")));
    if (names === null || !drawn.size) {
      names = (await get("metrics", { runs: run.id }, page.signal)).metrics;
      const liked = ["reward", "eval/reward", "loss", "eval/loss", "accuracy", "entropy", "length", "kl", "grad_norm"];
      names = liked.filter(n => names.some(m => m.name === n)).slice(0, 4);
      for (const name of names) { drawn.set(name, new Chart(name, { height: 180, fileName: `${run.name}-${name}` })); charts.append(drawn.get(name).element); }
    }
    if (names.length) {
      const found = (await get("curves", { runs: run.id, metrics: names.join(","), smoothing: run.step > FEW ? 0.6 : 0 }, page.signal)).runs[0];
      for (const name of names) {
        const curve = found.curves[name], plain = curve?.raw && curve.count <= FEW ? { x: curve.x, y: curve.raw } : curve;
        drawn.get(name).set(curve ? [{ label: name, color: 0, ...plain }] : [], { range: found.ends });
      }
    }
  });
}

// Lines of a log, coloured by their level; continued lines keep it.
export function logText(text, filter = "") {
  let level = "";
  const lines = text.split("\n").map(line => {
    const found = /^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (info|warning|error): (.*)$/.exec(line);
    if (!found) return [line, h("div", { class: level }, visible(line) || " ")];
    level = found[2];
    return [line, h("div", { class: level }, h("span", { class: "time" }, `${found[1]} `), level === "info" ? "" : `${level}: `, visible(found[3]))];
  });
  return h("pre", { class: "log" }, lines.filter(([line]) => line.toLowerCase().includes(filter)).map(([, element]) => element));
}

async function showLogs(page, run, box) {
  let file = page.values.get("file") || "", text = "", drawn = null;
  const search = h("input", { type: "search", placeholder: "Filter lines", "aria-label": "Filter lines" }), chooser = h("span"), size = h("span", { class: "muted" }), place = h("div");
  const follow = h("input", { type: "checkbox", checked: true });
  box.replaceChildren(h("section", { class: "card stack" }, h("div", { class: "row" }, chooser, search, h("label", {}, follow, "follow"), h("span", { class: "space" }), size), place));
  const draw = () => {
    const element = logText(text.replace(/\n$/, ""), search.value.toLowerCase());
    const top = place.firstChild?.scrollTop;
    place.replaceChildren(text ? element : h("p", { class: "empty" }, "There is no log."));
    element.scrollTop = follow.checked ? element.scrollHeight : top || 0;
  };
  search.addEventListener("input", draw);
  let files = "";
  const load = async () => {
    const found = await get("log", { run: run.id, file }, page.signal);
    if (files !== found.files.join()) { files = found.files.join(); chooser.replaceChildren(select(found.file, found.files.map(name => [name, name]), value => { file = value; page.remember({ file }); load().catch(() => {}); /* the next one says so */ })); }
    size.textContent = `${number(found.bytes)} bytes${found.bytes > found.text.length * 4 ? ", the end of it" : ""}`;
    if (found.text !== drawn) { drawn = text = found.text; draw(); }
  };
  await page.keep(load);
}

async function showExamples(page, run, box) {
  const { examples } = await get("examples", { run: run.id }, page.signal);
  const example = ({ step, row }) => {
    const text = typeof row.text === "string" ? row.text : null, counts = typeof row.counts === "string" ? row.counts : "";
    const marked = part => h("mark", { title: "These tokens are trained on" }, visible(part));
    const spans = Array.isArray(row.spans) && row.spans.every(Array.isArray) && row.spans.map(([part]) => part).join("") === text;
    // Earlier runs have no spans. Marked only where there is no doubt: the trained text is one piece, and occurs once.
    const at = text !== null && counts && text.indexOf(counts) === text.lastIndexOf(counts) ? text.indexOf(counts) : -1;
    const shown = spans ? row.spans.map(([part, trained]) => trained === true ? marked(part) : visible(part)) : text === null ? visible(JSON.stringify(row, null, 1)) : at < 0 ? visible(text) : [visible(text.slice(0, at)), marked(counts), visible(text.slice(at + counts.length))];
    return h("section", { class: "card" }, h("div", { class: "row between" }, h("span", { class: "wrap" }, h("b", {}, visible(row.origin || `step ${step}`)), typeof row.role === "string" ? ` · ${visible(row.role)}` : ""), h("span", { class: "muted" }, row.tokens !== undefined ? `${row.tokens} tokens` : "")),
      h("div", { class: "tokens" }, shown), counts && !spans && at < 0 ? [h("p", { class: "muted small" }, "Trained on (in several pieces, or a text that occurs more than once):"), h("div", { class: "tokens" }, visible(counts))] : null,
      row.columns ? h("details", {}, h("summary", { class: "muted small" }, "columns for rewards and environments"), h("pre", { class: "pre" }, visible(JSON.stringify(row.columns, null, 1)))) : null);
  };
  box.replaceChildren(h("div", { class: "stack" }, h("p", { class: "muted" }, "The first examples as the model sees them, with the chat template applied. ", h("mark", {}, "Marked"), " text is trained on; prompts of online runs have none."),
    ...(examples.length ? examples.map(example) : [card("", h("p", { class: "empty" }, "This run has recorded no examples."))])));
}
