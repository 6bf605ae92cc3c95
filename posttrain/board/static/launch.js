// The launch form: options of a trainer, the command and YAML that they mean, checks of data and memory, and the start.
import { h, card, long, number, save, select, visible } from "./dom.js";
import { get, post } from "./api.js";
import { confirmed } from "./run.js";

const FIRST = ["model.path", "data.train", "reward.functions", "output_dir"]; // what a run cannot do without
const POLL_MS = 700, PAUSE_MS = 250;

export async function showLaunch(page) {
  page.path([["New run", null]]);
  page.title("New run");
  const { trainers, checks, control } = await get("trainers", {}, page.signal);
  const from = page.values.get("from");
  let trainer = page.values.get("trainer") || "sft", values = read(page.values.get("values")), options = [], all = page.values.get("all") === "yes", timer = 0, round = 0, filter = "";
  if (from) {
    ({ trainer, values } = await get("values", { run: from }, page.signal));
    page.remember({ from: "" });
  }
  const form = h("div", { class: "stack" }), problem = h("div", { role: "status" }), command = h("div", { class: "code mono" }), yaml = h("pre", { class: "code" }), data = h("div"), plan = h("div"), started = h("div");
  const copy = h("button", { on: { click: async () => { await navigator.clipboard.writeText(command.textContent.trim()); copy.textContent = "Copied"; setTimeout(() => { copy.textContent = "Copy"; }, 1500); } } }, "Copy");
  const download = h("button", { on: { click: () => save(new Blob([yaml.textContent], { type: "text/yaml" }), `${trainer}.yaml`) } }, "Download");
  const check = (name, text, box, show) => h("button", { disabled: !checks, title: checks ? null : "Needs a board with --allow_control or a token", on: { click: () => follow(box, text, () => post("check", { ...request(), check: name }), show) } }, text);
  const start = h("button", { class: "primary", disabled: true, title: control ? null : "Needs a board with --allow_control", on: { click: launch } }, "Start the run");
  page.main.replaceChildren(h("div", { class: "top" }, h("h1", {}, "New run")), h("div", { class: "stack" },
    checks ? null : h("p", { class: "notice" }, "This board only reads: it shows the command and the YAML. With ", h("code", {}, "posttrain board --allow_control"), " it also checks the data, plans memory and starts the run."),
    h("div", { class: "launch" }, form, h("div", { class: "stack result" },
      h("section", { class: "card stack" }, h("div", { class: "row between" }, h("h2", {}, "Command"), copy), command, problem, h("div", { class: "row" }, check("data", "Check the data", data, dataReport), check("plan", "Plan memory and steps", plan, planReport), h("span", { class: "space" }), start)),
      started, data, plan, h("section", { class: "card stack" }, h("div", { class: "row between" }, h("h2", {}, "YAML"), download), yaml)))));

  const request = () => ({ trainer, values });

  function remember() { page.remember({ trainer, values: Object.keys(values).length ? JSON.stringify(values) : "", all: all ? "yes" : "" }); }

  function set(key, value) {
    if (value === null) delete values[key]; else values[key] = value;
    remember();
    clearTimeout(timer);
    timer = setTimeout(preview, PAUSE_MS);
  }

  async function preview() {
    const mine = ++round;
    try {
      const found = await post("preview", request());
      if (mine !== round || page.signal.aborted) return;
      if (found.command) { command.replaceChildren(...visible(found.command).split(" ").flatMap(word => [h("span", {}, word), " "])); yaml.textContent = found.yaml; }
      problem.replaceChildren(...(found.problem ? [h("p", { class: `notice ${found.command ? "" : "bad"}` }, visible(found.problem))] : []));
      start.disabled = !control || Boolean(found.problem);
    } catch (error) {
      if (mine !== round || page.signal.aborted) return;
      problem.replaceChildren(h("p", { class: "notice bad" }, visible(error.message)));
      start.disabled = true;
    }
  }

  function control_of(option) {
    const { key, control: kind, choices } = option, value = values[key], id = `option-${key}`, about = { id, "aria-describedby": `${id}-help` };
    const changed = next => { set(key, next); field.classList.toggle("set", key in values); };
    let input;
    if (kind === "switch") input = h("label", {}, h("input", { type: "checkbox", ...about, checked: value === undefined ? option.default : value, on: { change: event => changed(event.target.checked === option.default ? null : event.target.checked) } }), option.default ? "on by default" : "off by default");
    else if (choices.length && kind === "text") { input = select(value ?? "", [["", option.default ? `${option.default} (default)` : "not set"], ...choices.filter(c => c !== option.default).map(c => [c, c])], next => changed(next || null)); input.id = id; input.setAttribute("aria-describedby", `${id}-help`); }
    else if (kind === "list") input = h("textarea", { ...about, rows: Math.max(1, (value || []).length), spellcheck: "false", placeholder: option.default || (choices.length ? choices.join(", ") : "one per line"), value: (value || []).join("\n"), on: { input: event => { const lines = event.target.value.split("\n").filter(line => line.trim()); event.target.rows = Math.max(1, event.target.value.split("\n").length); changed(lines.length ? lines : null); } } });
    else input = h("input", { ...about, type: "text", autocomplete: "off", spellcheck: "false", placeholder: key === "output_dir" ? `the next free ${trainer}-NNN` : option.default || "not set", value: value ?? "", on: { input: event => changed(event.target.value.trim() === "" ? null : event.target.value) } });
    const field = h("div", { class: `option${key in values ? " set" : ""}${FIRST.includes(key) ? " wide" : ""}` }, h("b", {}, h("label", { for: id }, key)), input, h("span", { id: `${id}-help` }, visible(option.help).replaceAll("`", "")));
    return field;
  }

  function draw(presets = []) {
    const choice = select(trainer, trainers.map(t => [t.name, t.name]), async next => { trainer = next; remember(); await load(); });
    choice.id = "option-trainer";
    const preset = presets.length ? h("div", { class: "option" }, h("b", {}, h("label", { for: "option-preset" }, "preset")), Object.assign(select("", [["", "none"], ...presets.map(name => [name, name])], async name => { if (name) { ({ values } = await get("values", { trainer, preset: name }, page.signal)); remember(); draw(presets); preview(); } }), { id: "option-preset" }), h("span", {}, "Fills the form with the options of a file in configs/.")) : null;
    const search = h("input", { type: "search", placeholder: "Find an option", "aria-label": "Find an option", value: filter, on: { input: event => { filter = event.target.value; sections(); } } });
    const every = h("input", { type: "checkbox", checked: all, on: { change: event => { all = event.target.checked; remember(); sections(); } } });
    const clear = h("button", { class: "quiet", on: { click: () => { values = {}; remember(); draw(presets); preview(); } } }, "Clear");
    const rest = h("div", { class: "stack" }), essential = options.filter(o => FIRST.includes(o.key)).sort((a, b) => FIRST.indexOf(a.key) - FIRST.indexOf(b.key));
    form.replaceChildren(h("section", { class: "card stack" }, h("div", { class: "fields" }, h("div", { class: preset ? "option" : "option wide" }, h("b", {}, h("label", { for: "option-trainer" }, "trainer")), choice, h("span", {}, trainers.find(t => t.name === trainer)?.help || "")), preset, essential.map(control_of))),
      h("div", { class: "row" }, search, h("label", {}, every, `all ${options.length} options`), h("span", { class: "space" }), clear), rest);
    function sections() {
      const wanted = filter.toLowerCase(), shown = options.filter(o => !FIRST.includes(o.key) && (wanted ? `${o.key} ${o.help}`.toLowerCase().includes(wanted) : all || o.usual || o.key in values));
      const titles = [...new Set(shown.map(o => o.section))];
      rest.replaceChildren(...titles.map(title => h("details", { class: "card", open: !all || Boolean(wanted) }, h("summary", {}, title), h("div", { class: "fields" }, shown.filter(o => o.section === title).map(control_of)))));
      if (!shown.length) rest.append(h("p", { class: "empty" }, "No option fits."));
    }
    sections();
  }

  // Starts a job and shows it until it has ended.
  async function follow(box, title, begin, show) {
    box.replaceChildren(card(title, h("p", { class: "muted", role: "status" }, "Working … this loads libraries first, which takes some seconds.")));
    try {
      let job = await begin();
      const mine = box.dataset.job = job.job;
      while (job.exit_code === null || show === runReport) {
        if (page.signal.aborted || box.dataset.job !== mine) return;
        if (show === runReport) { box.replaceChildren(show(job)); if (job.exit_code !== null || job.run) break; }
        await new Promise(done => setTimeout(done, POLL_MS));
        job = await get("job", { job: mine }, page.signal);
      }
      if (!page.signal.aborted && box.dataset.job === mine) box.replaceChildren(show(job));
    } catch (error) { if (!page.signal.aborted) box.replaceChildren(card(title, h("p", { class: "notice bad" }, visible(error.message)))); }
  }

  async function launch() {
    if (await confirmed("Start this run? It trains on this machine with the command that is shown, and goes on when the board ends.", "Start")) follow(started, "Run", () => post("launch", request()), runReport);
  }

  async function load() {
    const found = await get("form", { trainer }, page.signal);
    options = found.options;
    const known = new Set(options.map(o => o.key));
    values = Object.fromEntries(Object.entries(values).filter(([key]) => known.has(key)));
    draw(found.presets);
    await preview();
  }
  await load();
  if (checks) for (const job of (await get("jobs", {}, page.signal)).jobs.slice(0, 1)) if (job.exit_code !== 0) started.replaceChildren(runReport(job));
}

const read = text => { try { const found = JSON.parse(text || "{}"); return found && typeof found === "object" && !Array.isArray(found) ? found : {}; } catch { return {}; } };

function runReport(job) {
  const ended = job.exit_code !== null;
  return card("Run", h("p", { class: ended && job.exit_code ? "notice bad" : "notice good" }, ended ? `Ended with exit code ${job.exit_code}.` : job.run ? "Running." : "Starting …", " ", job.run ? h("a", { href: `#/run/${job.run}` }, "Open the run") : null),
    h("p", { class: "mono wrap small" }, visible(job.command)), job.output ? h("pre", { class: "code" }, visible(job.output)) : null);
}

function planReport(job) {
  return card("Plan", job.exit_code ? h("p", { class: "notice bad" }, `The plan failed with exit code ${job.exit_code}.`) : null, h("pre", { class: "code wide", tabindex: "0" }, visible(job.output)));
}

function dataReport(job) {
  if (!job.report) return card("Data check", h("p", { class: "notice bad" }, `The check failed with exit code ${job.exit_code}.`), h("pre", { class: "code" }, visible(job.output)));
  return card("Data check", job.report.sources.map(source => h("div", { class: "stack" },
    h("p", {}, h("b", { class: "wrap" }, visible(source.source)), h("br"), source.formats.map(f => `${f.format} (for ${f.trainers.join(", ")})`).join("; ") || "no known format"),
    h("div", { class: "facts" }, fact(number(source.examples), "examples"), fact(number(source.unusable), "unusable"), fact(number(source.duplicates), "exact duplicates"), fact(number(source.mean_tokens, 3), "tokens, mean"), fact(number(source.most_tokens), "tokens, most"), fact(number(source.too_long), "longer than max_length")),
    source.problems.map(text => h("p", { class: "notice bad pre small" }, visible(text))),
    source.rendered.map(example => h("div", {}, h("p", { class: "muted small wrap" }, visible(example.origin)), example.samples.map((sample, i) => h("div", {}, source.kind === "pair" ? h("b", { class: "small" }, i % 2 ? "rejected" : "chosen") : null, h("div", { class: "tokens", tabindex: "0" }, sample.map(part => part.trained ? h("mark", {}, long(part.text)) : h("span", { class: "off" }, long(part.text)))))))),
    source.rendered.length ? h("p", { class: "muted small" }, h("mark", {}, "Marked"), " text is trained on.") : null)));
}
const fact = (value, name) => h("div", { class: "fact" }, h("b", {}, value), h("span", {}, name));
