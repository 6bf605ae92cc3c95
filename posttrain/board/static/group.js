// The completions of one prompt in one step, side by side, with values per token as colours.
import { h, long, number, select, visible } from "./dom.js";
import { get } from "./api.js";
import { advantageOf, conversation, rewardText } from "./completions.js";

const FEW_TOKENS = 2500;
const NAMES = { logprobs: "log-probability (sampler)", old_logprobs: "log-probability (trainer)", ref_logprobs: "log-probability (reference)", ratio: "ratio trainer / sampler", "logprobs - ref_logprobs": "log-ratio policy / reference", advantages: "advantage", values: "value", returns: "return", entropy: "entropy" };
const NOT_RECORDED = "none recorded";
const CENTRE = { ratio: 1, advantages: 0, "logprobs - ref_logprobs": 0 };
const FULL_COLOUR = { ratio: 0.01, advantages: 1e-6, "logprobs - ref_logprobs": 0.01 }; // the least distance from the centre that has it: rounding has none
const mix = (name, share) => `color-mix(in srgb, var(${name}) ${Math.round(100 * Math.min(1, Math.max(0, share)))}%, transparent)`;

// Returns value -> background of one kind of values, over all completions of the group.
function painter(kind, completions) {
  if (["none", "mask", NOT_RECORDED].includes(kind)) return () => "";
  const all = completions.flatMap(c => c.tokens?.streams[kind] || []).filter(v => v !== null);
  if (kind in CENTRE) {
    const most = all.reduce((m, v) => Math.max(m, Math.abs(v - CENTRE[kind])), FULL_COLOUR[kind]);
    return v => v === CENTRE[kind] ? "" : mix(v > CENTRE[kind] ? "--c4" : "--c3", 0.65 * Math.abs(v - CENTRE[kind]) / most);
  }
  if (kind.endsWith("logprobs")) return v => mix("--c1", 0.72 * (1 - Math.exp(Math.max(-8, v))) ** 1.5);
  const low = all.reduce((m, v) => Math.min(m, v), Infinity), high = all.reduce((m, v) => Math.max(m, v), -Infinity);
  return v => mix("--c7", 0.65 * (v - low) / (high - low || 1));
}

function scale(kind, completions) {
  const all = completions.flatMap(c => c.tokens?.streams[kind] || []).filter(v => v !== null);
  if (!all.length) return null;
  const low = all.reduce((m, v) => Math.min(m, v), Infinity), high = all.reduce((m, v) => Math.max(m, v), -Infinity), paint = painter(kind, completions);
  const stops = [0, 0.25, 0.5, 0.75, 1].map(part => paint(low + part * (high - low)) || "transparent");
  let digits = 3;
  while (digits < 9 && low !== high && number(low, digits) === number(high, digits)) digits += 1;
  return h("span", { class: "row small muted" }, number(low, digits), h("span", { class: "scale", style: { background: `linear-gradient(90deg, ${stops.join(", ")})` } }), number(high, digits));
}

export async function showGroup(page) {
  const [, id, at] = page.parts;
  const [run, group] = await Promise.all([get("run", { run: id }, page.signal), get("group", { run: id, number: at }, page.signal)]);
  page.path([[run.name, `#/run/${id}`], ["Completions", `#/run/${id}/completions`], [`step ${number(group.step)}, group ${number(group.group)}`, null]]);
  page.title(`${run.name}, group ${group.group}`);
  const completions = group.completions, readable = completions.filter(c => !c.unreadable);
  const kinds = [...new Set(readable.flatMap(c => Object.keys(c.tokens?.streams || {})))];
  let kind = page.values.get("color") || (kinds.includes("logprobs") ? "logprobs" : "mask"), whole = page.values.get("whole") === "yes", edges = page.values.get("edges") === "yes", order = page.values.get("order") || "reward";
  const side = h("div", { class: "side" }), legend = h("span"), hint = h("span", { class: "muted small" });
  const go = number => { if (number !== null) location.hash = `#/group/${id}/${number}`; };
  const { before, after } = group.neighbours;
  Object.assign(page.keys, { "[": () => go(before), "]": () => go(after) });
  const wholeBox = h("input", { type: "checkbox", checked: whole, on: { change: event => { whole = event.target.checked; page.remember({ whole: whole ? "yes" : "" }); draw(); } } });
  const edgesBox = h("input", { type: "checkbox", checked: edges, on: { change: event => { edges = event.target.checked; page.remember({ edges: edges ? "yes" : "" }); draw(); } } });
  const first = readable[0];
  const rewards = readable.filter(c => !c.failure && c.reward !== null).map(c => c.reward), mean = rewards.reduce((a, b) => a + b, 0) / (rewards.length || 1);
  page.main.replaceChildren(h("div", { class: "stack" },
    h("div", { class: "top", style: { marginBottom: 0 } }, h("h1", {}, `Step ${number(group.step)}, group ${number(group.group)}`), h("span", { class: "muted" }, `${number(group.count)} completions${rewards.length ? `, mean reward ${number(mean)}` : ""}${group.count > completions.length ? `, the first ${completions.length} are shown` : ""}`), h("span", { class: "space" }),
      h("span", { class: "row together" }, h("button", { disabled: before === null, title: "Previous group ([)", on: { click: () => go(before) } }, "← previous"), h("button", { disabled: after === null, title: "Next group (])", on: { click: () => go(after) } }, "next →"))),
    first ? h("section", { class: "card" }, h("div", { class: "row between" }, h("h2", { style: { margin: 0 } }, "Prompt"), h("span", { class: "muted small wrap" }, visible(first.origin))), conversation(first.whole ? promptOf(first) : first.messages), first.columns && first.columns !== "{}" ? h("details", {}, h("summary", { class: "muted small" }, "columns of the example"), h("div", { class: "pre mono" }, visible(first.columns))) : null) : null,
    h("section", { class: "card row" }, h("label", {}, "colour", select(kind, [["none", "none"], ["mask", "trained tokens"], ...kinds.map(k => [k, NAMES[k] || k]), ...(kinds.includes("entropy") ? [] : [[NOT_RECORDED, "entropy, ratio: not recorded"]])], value => { kind = value; page.remember({ color: value }); draw(); })), legend, hint, h("label", {}, wholeBox, "with the prompt"), h("label", {}, edgesBox, "token edges"), h("span", { class: "space" }), h("label", {}, "order", select(order, [["reward", "by reward"], ["recorded", "as recorded"], ["length", "by length"]], value => { order = value; page.remember({ order: value }); draw(); }))),
    first && first.tokens && !first.tokens.texts ? h("p", { class: "notice" }, "The run has not saved a checkpoint yet, so the texts of single tokens are not known; their numbers are shown.") : null, side));

  function tokens(c, paint) {
    const { ids, texts, mask, streams, left_out } = c.tokens, box = h("div", { class: `tokens${edges ? " edges" : ""}`, tabindex: "0" }), info = h("div", { class: "about-token muted" });
    let counted = 0, shown = 0, all = false;
    const spans = [], start = whole ? 0 : Math.max(0, mask.indexOf("1"));
    const place = [...mask].map(m => m === "1" ? counted++ : -1);
    const build = limit => {
      box.replaceChildren();
      for (let i = start; i < ids.length && i - start < limit; i++) {
        const text = texts ? texts[i] : `${ids[i]} `, value = streams[kind]?.[place[i]];
        const span = h("span", { class: mask[i] === "1" ? "" : "off", data: { i } }, text === "" ? h("i", { class: "gap" }, "·") : visible(text));
        if (kind === "mask" && mask[i] === "1") span.style.backgroundColor = mix("--c4", 0.3);
        else if (mask[i] === "1" && value !== null && value !== undefined) span.style.backgroundColor = paint(value);
        box.append(span);
      }
      const left = ids.length - start - limit;
      if (left > 0) box.append(h("button", { on: { click: () => build(Infinity) } }, `show ${number(left)} more tokens`));
      if (left_out) box.append(h("span", { class: "muted" }, ` … ${number(left_out)} more tokens are recorded`));
    };
    build(FEW_TOKENS);
    const tell = span => {
      box.querySelector(".here")?.classList.remove("here");
      if (!span) { info.textContent = ""; return; }
      span.classList.add("here");
      const i = Number(span.dataset.i), values = place[i] < 0 ? ["not trained on"] : Object.entries(streams).map(([name, v]) => `${NAMES[name] || name} ${number(v[place[i]])}`);
      info.textContent = visible([`token ${i}: id ${ids[i]}${texts ? ` ${JSON.stringify(texts[i])}` : ""}`, ...values].join(" · "));
    };
    box.addEventListener("pointerover", event => tell(event.target.closest("[data-i]")));
    box.addEventListener("keydown", event => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!move) return;
      event.preventDefault();
      const all = [...box.querySelectorAll("[data-i]")], here = all.indexOf(box.querySelector(".here"));
      const next = all[Math.min(all.length - 1, Math.max(0, here + move))];
      tell(next); next?.scrollIntoView({ block: "nearest" });
    });
    return [box, info];
  }

  function draw() {
    const paint = painter(kind, readable), sorted = [...completions], best = Math.max(...rewards), worst = Math.min(...rewards);
    if (order === "reward") sorted.sort((a, b) => (b.failure || b.unreadable ? -Infinity : b.reward) - (a.failure || a.unreadable ? -Infinity : a.reward));
    if (order === "length") sorted.sort((a, b) => (b.length || 0) - (a.length || 0));
    legend.replaceChildren(...[scale(kind, readable)].filter(Boolean));
    hint.replaceChildren(...(kind === NOT_RECORDED ? ["A run records them with ", h("code", {}, "--rollout.record_entropy"), "."] : []));
    side.replaceChildren(...sorted.map(c => c.unreadable ? h("section", { class: "card notice" }, `Line ${c.number + 1} cannot be read: it is longer than 64 MiB, damaged, or changed.`) :
      h("section", { class: `card answer${!c.failure && best > worst && c.reward === best ? " best" : ""}`, data: { number: c.number } },
        h("div", { class: "row between" }, h("span", { class: "row" }, rewardText(c), c.advantage !== null ? h("span", { class: "small muted" }, `advantage ${number(advantageOf(c), 3)}`) : null), h("span", { class: "muted small number" }, `${number(c.length)} tokens${c.finish === "length" ? ", cut off" : ""}${c.turns > 1 ? `, ${c.turns} turns` : ""}`)),
        Object.keys(c.rewards).length ? h("div", { class: "row small" }, Object.entries(c.rewards).map(([name, value]) => h("span", { class: "pill plain" }, `${visible(name)} ${number(value)}`))) : null,
        c.failure ? h("p", { class: "notice bad pre small" }, visible(c.failure)) : null,
        c.whole ? h("details", { open: true }, h("summary", {}, "conversation"), conversation(c.messages.slice(promptOf(c).length))) : null,
        c.tokens ? tokens(c, paint) : h("div", { class: "tokens" }, long(c.text)),
        c.tokens && !c.tokens.texts && !c.whole ? h("div", { class: "pre" }, long(c.text)) : null,
        c.letters > c.text.length ? h("p", { class: "muted small" }, `The text has ${number(c.letters)} letters; the first ${number(c.text.length)} are here.`) : null,
        c.version !== undefined ? h("div", { class: "muted small" }, `by the weights of step ${number(c.version)}${c.newest !== undefined && c.newest !== c.version ? ` to ${number(c.newest)}` : ""}; line ${number(c.number + 1)} of rollouts.jsonl`) : null)));
  }
  draw();
}

// The messages before the first reply of the model.
function promptOf(c) {
  const reply = c.messages.findIndex(m => m.role === "assistant");
  return reply < 0 ? c.messages : c.messages.slice(0, reply);
}
