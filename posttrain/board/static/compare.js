// Several runs beside each other: curves, configuration, completions of the same prompts, time.
import { h, long, number, swatch, tabBar, visible } from "./dom.js";
import { get } from "./api.js";
import { showCurves } from "./curves.js";
import { showConfig } from "./config.js";
import { phasesCard } from "./phases.js";
import { conversation, rewardText } from "./completions.js";

export async function showCompare(page) {
  const tab = page.parts[1] || "curves", ids = (page.values.get("runs") || "").split(",").filter(Boolean);
  if (!ids.length) { location.hash = "#/"; return; }
  const runs = await Promise.all(ids.map(run => get("run", { run }, page.signal)));
  page.path([["Compare", null]]);
  page.title(runs.map(run => run.name).join(" and "));
  const box = h("div"), both = runs.filter(run => run.has_rollouts).length >= 2;
  const tabs = [["curves", "Curves"], ["config", "Configuration"], ...(both ? [["completions", "Completions"]] : []), ["time", "Time and memory"]];
  page.main.replaceChildren(h("div", { class: "top" }, h("h1", {}, runs.length > 1 ? `${runs.length} runs` : runs[0].name)),
    tabBar("Parts of the comparison", tabs.map(([key, text]) => [`#/compare/${key}?runs=${ids.join(",")}`, text, key === tab])), box);
  tabs.forEach(([key], i) => { page.keys[i + 1] = () => { location.hash = `#/compare/${key}?runs=${ids.join(",")}`; }; });
  if (tab === "config") await showConfig(page, runs, box);
  else if (tab === "completions") await showPrompts(page, runs.filter(run => run.has_rollouts), box);
  else if (tab === "time") box.replaceChildren(h("div", { class: "grid two" }, runs.map((run, i) => h("div", {}, h("p", { class: "row" }, swatch(i), h("b", {}, run.name)), phasesCard(run)))));
  else await showCurves(page, runs, box);
}

async function showPrompts(page, runs, box) {
  const ids = runs.map(run => run.id).join(","), list = h("section", { class: "card list" }), detail = h("div"), note = h("p", { class: "muted" });
  box.replaceChildren(note, h("div", { class: "halves" }, list, detail));
  const open = async prompt => {
    page.remember({ prompt });
    const found = await get("prompt", { runs: ids, prompt }, page.signal);
    const first = found.runs.map(r => r.completions[0]).find(Boolean);
    detail.replaceChildren(h("section", { class: "card" }, h("h2", {}, "Prompt"), first ? conversation((first.whole ? first.messages.slice(0, 1) : first.messages)) : null),
      h("div", { class: "side", style: { marginTop: "1rem" } }, found.runs.map((entry, i) => h("section", { class: "card" }, h("h2", { class: "row" }, swatch(i), runs[i].name),
        entry.completions.map(c => c.unreadable ? h("p", { class: "notice" }, "This line cannot be read.") : h("article", { class: "message assistant" }, h("b", {}, `step ${number(c.step)}`), " ", rewardText(c), h("span", { class: "muted small" }, ` ${number(c.length)} tokens `), h("a", { class: "small", href: `#/group/${entry.run}/${c.number}` }, "group"), h("div", { class: "pre" }, c.text ? long(c.text) : h("span", { class: "muted" }, "empty"))))))));
    for (const row of list.querySelectorAll("[data-row]")) row.classList.toggle("chosen", row.dataset.row === prompt);
  };
  const load = async () => {
    const found = await get("prompts", { runs: ids }, page.signal);
    note.textContent = found.shared ? `${number(found.shared)} prompts were completed in all of these runs; those whose mean rewards differ most come first.` : "No prompt was completed in all of these runs.";
    list.replaceChildren(h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "prompt"), runs.map((run, i) => h("th", { class: "number" }, swatch(i), " ", run.name)))),
      h("tbody", {}, found.prompts.map(entry => h("tr", { class: "open", tabindex: "0", data: { row: entry.prompt }, on: { click: () => open(entry.prompt), keydown: event => { if (event.key === "Enter") open(entry.prompt); } } }, h("td", { class: "wrap" }, visible(entry.text)), entry.runs.map(r => h("td", { class: "number" }, number(r.reward), h("span", { class: "muted small" }, ` (${number(r.count)})`))))))))) ;
    return found;
  };
  const found = await load();
  const wanted = page.values.get("prompt") || found.prompts[0]?.prompt;
  if (wanted) await open(wanted);
}
