// Finds the page of the address, keeps it up to date, and handles keys.
import { h, visible } from "./dom.js";
import { setToken, TOKEN } from "./api.js";
import { showRuns } from "./runs.js";
import { showRun } from "./run.js";
import { showCompare } from "./compare.js";
import { showGroup } from "./group.js";
import { showLaunch } from "./launch.js";

const PAGES = { "": showRuns, run: showRun, compare: showCompare, group: showGroup, launch: showLaunch };
const REFRESH_MS = 3000;
const main = document.getElementById("main"), live = document.getElementById("live"), dialog = document.getElementById("dialog");
let leave = new AbortController();

export const address = () => {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { parts: path.split("/").map(decoded), values: new URLSearchParams(query) };
};
const decoded = text => { try { return decodeURIComponent(text); } catch { return text; } };

function failed(error) {
  if (error.name === "AbortError") return;
  if (error.status === 401) return askToken();
  live.textContent = "";
  const box = h("p", { class: "notice bad", role: "alert" }, error.message);
  const old = main.querySelector(":scope > .notice.bad");
  if (old) old.replaceWith(box); else main.prepend(box);
}

function askToken() {
  const input = h("input", { type: "password", autocomplete: "off", "aria-label": "Token" });
  const form = h("form", { class: "row", on: { submit: event => { event.preventDefault(); setToken(input.value); route(); } } }, input, h("button", { class: "primary" }, "Open"));
  main.replaceChildren(h("section", { class: "card" }, h("h2", {}, "This board needs its token"), h("p", { class: "muted" }, "It is in the address that the command printed, after #token="), form));
  input.focus();
}

async function route() {
  if (TOKEN.test(location.hash)) return location.reload(); // an address with a token, pasted into an open page: api.js takes it
  leave.abort();
  leave = new AbortController();
  const signal = leave.signal, { parts, values } = address();
  const page = {
    signal, parts, values, main,
    path: links => document.getElementById("path").replaceChildren(...links.map(([text, href]) => href ? h("a", { href }, text) : h("span", {}, text))),
    title: text => { document.title = visible(`${text} – posttrain board`); },
    // Calls `update` now and then every few seconds while the page is open and visible.
    keep: async update => {
      const again = async () => {
        if (signal.aborted) return;
        if (document.visibilityState === "visible") {
          try {
            await update();
            live.textContent = "live";
            main.querySelector(":scope > .notice.bad[role=alert]")?.remove();
          } catch (error) { if (!signal.aborted) failed(error); if (error.status === 401) return; }
        }
        setTimeout(again, REFRESH_MS);
      };
      await again();
    },
    // Writes values into the address without loading the page again, so that a refresh loses nothing.
    remember: changes => {
      const now = address(), next = now.values;
      for (const [name, value] of Object.entries(changes)) if (value === "" || value === null || value === undefined) next.delete(name); else next.set(name, value);
      const text = next.toString();
      history.replaceState(null, "", `#/${now.parts.map(encodeURIComponent).join("/")}${text ? "?" + text : ""}`);
      for (const name of [...values.keys()]) values.delete(name);
      for (const [name, value] of next) values.set(name, value);
    },
    keys: {},
  };
  current = page;
  live.textContent = "";
  scrollTo(0, 0);
  try { await (PAGES[parts[0]] || showRuns)(page); } catch (error) { if (!signal.aborted) failed(error); }
}

let current = { keys: {} };
const HELP = [["g r", "runs"], ["g n", "new run"], ["j / k", "next and previous row"], ["Enter", "open"], ["x", "choose a run"], ["c", "compare the chosen runs"], ["1 … 7", "tabs of a run"], ["/", "search"], ["[ and ]", "previous and next group"], ["← →", "values of a chart, or tokens, that have the focus"], ["+ − 0", "a part of the axis, or all of it"], ["t", "light, dark, as the system"], ["?", "this list"]];

document.getElementById("help").addEventListener("click", () => {
  dialog.replaceChildren(h("h2", {}, "Keys"), h("table", {}, HELP.map(([keys, text]) => h("tr", {}, h("td", {}, h("kbd", {}, keys)), h("td", {}, text)))), h("div", { class: "row end" }, h("button", { on: { click: () => dialog.close() } }, "Close")));
  dialog.showModal();
});

// The part after # names a page here, so that the link must not change it.
document.querySelector(".skip").addEventListener("click", event => { event.preventDefault(); main.focus(); main.scrollIntoView(); });

const theme = document.getElementById("theme"), system = matchMedia("(prefers-color-scheme: dark)");
function paint() {
  const chosen = localStorage.getItem("theme") || "auto";
  document.documentElement.dataset.theme = chosen === "auto" ? (system.matches ? "dark" : "light") : chosen;
  theme.textContent = { auto: "◐", light: "☀", dark: "☾" }[chosen];
  theme.title = `Colours: ${chosen}`;
  dispatchEvent(new Event("themechange"));
}
theme.addEventListener("click", () => {
  const order = ["auto", "light", "dark"], next = order[(order.indexOf(localStorage.getItem("theme") || "auto") + 1) % 3];
  localStorage.setItem("theme", next);
  paint();
});
system.addEventListener("change", paint);

let waiting = "";
addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || dialog.open) return;
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (event.key === "Escape" && typing) return event.target.blur();
  if (typing && event.target.type !== "checkbox") return;
  const key = waiting + event.key;
  waiting = "";
  if (key === "g") { waiting = "g "; return; }
  const rows = [...main.querySelectorAll("[data-row]")], here = rows.indexOf(document.activeElement.closest?.("[data-row]"));
  const actions = {
    "g r": () => { location.hash = "#/"; },
    "g n": () => { location.hash = "#/launch"; },
    "?": () => document.getElementById("help").click(),
    t: () => theme.click(),
    j: () => rows[Math.min(rows.length - 1, here + 1)]?.focus(),
    k: () => rows[Math.max(0, here - 1)]?.focus(),
    "/": () => main.querySelector("input[type=search]")?.focus(),
    ...current.keys,
  };
  if (actions[key]) { event.preventDefault(); actions[key](document.activeElement); }
});

addEventListener("hashchange", route);
paint();
route();
