// Recorded completions: filters, search, a histogram of rewards.
import { h, number, field, long, select, visible } from "./dom.js";
import { get } from "./api.js";

// A reward is coloured by what it means for training: the sign of the advantage.
export const rewardText = c => c.failure ? h("span", { class: "reward bad" }, "failed") : h("span", { class: `reward ${advantageOf(c) > 0 ? "good" : advantageOf(c) < 0 ? "bad" : ""}`, title: c.advantage === null ? "no advantage is recorded" : `advantage ${number(advantageOf(c), 3)}` }, number(c.reward));
// An advantage that only rounding made differ from 0 is 0.
export const advantageOf = c => c.advantage !== null && Math.abs(c.advantage) < 1e-6 ? 0 : c.advantage;

export function conversation(messages) {
  return h("div", {}, messages.map(m => h("div", { class: `message ${/^\w+$/.test(m.role) ? m.role : ""}` }, h("b", {}, visible(m.role) + (m.name ? ` · ${visible(m.name)}` : "")),
    m.reasoning ? h("div", { class: "pre reasoning" }, visible(m.reasoning)) : null, m.content ? h("div", { class: "pre" }, long(m.content)) : null,
    (m.tool_calls || []).map(call => h("div", { class: "call" }, h("b", {}, visible(call.name)), h("pre", { class: "pre" }, long(pretty(call.arguments))))))));
}
const pretty = text => { try { return JSON.stringify(JSON.parse(text), null, 1); } catch { return text; } };

const FIELDS = ["text", "step", "min_reward", "max_reward", "min_length", "max_length", "failed", "truncated", "many_turns", "order"];

export async function showCompletions(page, run, box) {
  const values = Object.fromEntries(FIELDS.map(name => [name, page.values.get(name) || ""]));
  const list = h("section", { class: "card list" }), summary = h("div", { class: "row between" }), bars = h("div", { class: "histogram", role: "group", "aria-label": "Histogram of rewards; a bar filters by it" }), ends = h("div", { class: "row between muted small ends" }), fresh = h("div"), more = h("div", { class: "row", style: { justifyContent: "center", margin: "1rem" } }), progress = h("div");
  let loaded = 0, round = 0, timer = 0, known = 0;
  const set = (name, value) => { values[name] = value; page.remember({ [name]: value }); const control = controls[name]; if (control && control.value !== value) control.value = value; start(); };
  const later = (name, value) => { clearTimeout(timer); timer = setTimeout(() => set(name, value), 250); };
  const input = (name, type, extra = {}) => h("input", { type, value: values[name], ...extra, on: { input: event => later(name, event.target.value) } });
  const yesNo = (name, any, yes, no) => select(values[name], [["", any], ["yes", yes], ["no", no]], value => set(name, value));
  const controls = {
    text: input("text", "search", { placeholder: "Text of prompt or completion" }), step: input("step", "number", { min: 0 }), min_reward: input("min_reward", "number", { step: "any" }), max_reward: input("max_reward", "number", { step: "any" }), min_length: input("min_length", "number", { min: 0 }), max_length: input("max_length", "number", { min: 0 }),
    failed: yesNo("failed", "any", "failed", "scored"), truncated: yesNo("truncated", "any", "cut off", "complete"), many_turns: yesNo("many_turns", "any", "several", "one"),
    order: select(values.order || "newest", [["newest", "newest first"], ["oldest", "oldest first"], ["reward_high", "highest reward"], ["reward_low", "lowest reward"], ["longest", "longest"], ["shortest", "shortest"]], value => set("order", value)),
  };
  const reset = h("button", { class: "quiet", on: { click: () => { for (const name of FIELDS) { values[name] = ""; controls[name].value = name === "order" ? "newest" : ""; page.remember({ [name]: "" }); } start(); } } }, "Reset");
  box.replaceChildren(h("div", { class: "stack" }, h("section", { class: "card stack" }, h("details", { open: innerWidth > 760 || FIELDS.some(name => values[name]) }, h("summary", { class: "muted" }, "Filters"), h("div", { class: "filters" }, field("search", controls.text, true), field("step", controls.step), field("reward from", controls.min_reward), field("reward to", controls.max_reward), field("tokens from", controls.min_length), field("tokens to", controls.max_length), field("result", controls.failed), field("end", controls.truncated), field("turns", controls.many_turns), field("order", controls.order), reset)), h("div", {}, bars, ends), summary, progress), fresh, list, more));

  const row = c => c.unreadable ? h("div", { class: "completion" }, h("span", { class: "muted" }, `line ${c.number + 1}`), h("span", { class: "notice" }, "This line cannot be read: it is longer than 64 MiB, damaged, or changed while it was read.")) :
    h("a", { class: "completion", href: `#/group/${run.id}/${c.number}`, data: { row: c.number } },
      h("div", {}, h("div", {}, rewardText(c)), h("div", { class: "muted small" }, `step ${number(c.step)}`)),
      h("div", {}, h("div", { class: "asked muted small" }, visible(c.prompt_text)), h("div", { class: "said" }, c.failure ? h("span", { class: "bad" }, visible(c.failure.trim().split("\n").pop())) : visible(c.text) || h("span", { class: "muted" }, "empty"))),
      h("div", { class: "muted small number" }, h("div", {}, `${number(c.length)} tokens`), c.turns > 1 ? h("div", {}, `${c.turns} turns`) : null, c.finish === "length" ? h("div", {}, "cut off") : h("div", {}, `group ${number(c.group)}`), c.letters > c.text.length ? h("div", {}, `${number(c.letters)} letters`) : null));

  function describe(found) {
    known = found.statistics.all;
    const s = found.statistics, most = Math.max(1, ...s.histogram.counts);
    bars.hidden = ends.hidden = s.histogram.counts.length < 2;
    ends.replaceChildren(...(bars.hidden ? [] : [h("span", {}, number(s.histogram.edges[0])), h("span", {}, "rewards, count by value"), h("span", {}, number(s.histogram.edges.at(-1)))]));
    bars.replaceChildren(...s.histogram.counts.map((n, i) => { const [a, b] = [s.histogram.edges[i], s.histogram.edges[i + 1]]; return h("button", { disabled: !n, title: `${number(n)} with a reward from ${number(a)} to ${number(b)}`, "aria-label": `${n} with a reward from ${number(a)} to ${number(b)}`, style: { height: `${n ? Math.max(4, 100 * n / most) : 1}%` }, on: { click: () => { values.min_reward = controls.min_reward.value = String(a); page.remember({ min_reward: String(a) }); set("max_reward", String(b)); } } }); }));
    summary.replaceChildren(h("span", {}, h("b", {}, number(found.matching)), ` of ${number(s.all)} completions`, values.text ? " before the search" : ""), h("span", { class: "muted small" }, [s.mean_reward !== null ? `mean reward ${number(s.mean_reward)}` : "", s.mean_length !== null ? `mean length ${number(s.mean_length)}` : "", `${number(s.failed)} failed`, `${number(s.truncated)} cut off`, s.unreadable ? `${number(s.unreadable)} unreadable` : "", s.last_step !== null ? `steps ${number(s.first_step)} to ${number(s.last_step)}` : "", "rewards are green or red by the sign of the advantage"].filter(Boolean).join(" · ")));
    const index = found.index, building = index.of && index.bytes < index.of && !index.error;
    progress.replaceChildren(...(building ? [h("div", { class: "muted small" }, `reading the record: ${number(index.rows)} completions so far`), h("progress", { max: index.of, value: index.bytes })] : index.error ? [h("p", { class: "notice bad" }, `rollouts.jsonl cannot be read: ${index.error}`)] : []));
    return building;
  }

  async function load(offset, mine) {
    const found = await get("completions", { run: run.id, ...values, offset, limit: 50 }, page.signal);
    if (mine !== round) return;
    const building = describe(found);
    if (offset === 0) list.replaceChildren();
    list.append(...found.rows.map(row));
    loaded += found.rows.length;
    const searching = values.text && found.next !== null && loaded < 50;
    if (values.text) summary.append(h("span", { class: "muted small" }, searching ? `searching: ${number(found.searched)} of ${number(found.matching)}` : `${number(loaded)} found in ${number(found.searched)} searched`));
    if (searching) return load(found.next, mine);
    if (!loaded) list.replaceChildren(h("p", { class: "empty" }, building ? "Reading the record …" : "No completion fits."));
    more.replaceChildren(...(found.next !== null ? [h("button", { on: { click: event => { event.target.disabled = true; loaded = 0; load(found.next, round); } } }, values.text ? "Search on" : "More")] : []));
    if (building) setTimeout(() => { if (mine === round && !page.signal.aborted) start(); }, 700);
  }
  function start() { loaded = 0; round += 1; fresh.replaceChildren(); return load(0, round).catch(error => { if (!page.signal.aborted) progress.replaceChildren(h("p", { class: "notice bad" }, error.message)); }); }
  await start();
  if (run.state !== "running") return;
  // The list stays as it is while one reads it; a button shows what the run has recorded since.
  await page.keep(async () => {
    const mine = round, { statistics } = await get("completions", { run: run.id, limit: 1 }, page.signal);
    if (mine !== round || statistics.all === known) return;
    if (!known) return start();
    fresh.replaceChildren(h("div", { class: "row", style: { justifyContent: "center" } }, h("button", { on: { click: start } }, `${number(Math.abs(statistics.all - known))} ${statistics.all > known ? "new" : "fewer"} completions: show`)));
  });
}
