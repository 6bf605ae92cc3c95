// The configuration of one run, or the differences between several.
import { h, swatch, visible, save } from "./dom.js";
import { get } from "./api.js";

export async function showConfig(page, runs, box) {
  const found = await get("config", { runs: runs.map(run => run.id).join(",") }, page.signal);
  const several = runs.length > 1, search = h("input", { type: "search", placeholder: "Find an option", "aria-label": "Find an option" });
  const only = h("input", { type: "checkbox", checked: several ? page.values.get("all") !== "yes" : page.values.get("changed") === "yes" }), body = h("tbody"), count = h("span", { class: "muted" });
  const differs = option => several ? option.values.some(value => value !== option.values[0]) : option.changed;
  const draw = () => {
    const shown = found.options.filter(o => o.name.toLowerCase().includes(search.value.toLowerCase()) && (!only.checked || differs(o)));
    body.replaceChildren(...shown.map(option => h("tr", { class: !several && option.changed ? "changed" : null }, h("td", { class: "mono" }, visible(option.name)), option.values.map(value => h("td", { class: `mono wrap${several && differs(option) ? " differs" : ""}` }, value === null ? h("span", { class: "muted" }, "not there") : visible(value) || h("span", { class: "muted" }, "empty"))))));
    if (!shown.length) body.append(h("tr", {}, h("td", { class: "empty", colspan: String(runs.length + 1) }, found.options.length ? (only.checked && !search.value ? several ? "The configurations are equal." : "All options have their defaults." : "No option fits.") : "There is no configuration that can be read.")));
    count.textContent = `${found.options.filter(differs).length} of ${found.options.length} options differ${several ? "" : " from their defaults"}`;
  };
  search.addEventListener("input", draw);
  only.addEventListener("change", () => { page.remember(several ? { all: only.checked ? "" : "yes" } : { changed: only.checked ? "yes" : "" }); draw(); });
  const yaml = several ? null : h("button", { on: { click: () => save(new Blob([found.texts[0]], { type: "text/yaml" }), "config.yaml") } }, "YAML");
  box.replaceChildren(h("section", { class: "card stack" }, h("div", { class: "row" }, search, h("label", {}, only, several ? "only differences" : "only changed options"), count, h("span", { class: "space" }), several || !runs[0].verb ? null : h("a", { class: "button", href: `#/launch?from=${runs[0].id}` }, "New run with these"), yaml),
    h("div", { class: "scroll" }, h("table", { class: several ? "options" : "options one" }, h("thead", {}, h("tr", {}, h("th", {}, "option"), runs.map((run, i) => h("th", {}, several ? [swatch(i), " "] : null, several ? run.name : "value")))), body))));
  draw();
}
