const SPOKEN = new Set(["title", "aria-label", "placeholder"]); // attributes that people read

// Builds elements. Everything that a run wrote goes through text nodes, with control characters made visible; there is
// no way here to insert markup.
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") for (const [event, act] of Object.entries(value)) element.addEventListener(event, act);
    else if (name === "class") element.className = value;
    else if (name === "style") Object.assign(element.style, value);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name === "value" || name === "checked" || name === "disabled") element[name] = value;
    else element.setAttribute(name, value === true ? "" : SPOKEN.has(name) ? visible(value) : value);
  }
  element.append(...children.flat(9).filter(child => child !== null && child !== undefined && child !== false).map(child => typeof child === "string" ? visible(child) : child));
  return element;
}

// Control characters become visible, so that a text cannot hide or reorder what surrounds it.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
export const visible = text => String(text).replace(HIDDEN, letter => {
  const code = letter.charCodeAt(0);
  return code < 32 ? String.fromCharCode(0x2400 + code) : code === 127 ? "\u2421" : `\\u${code.toString(16).padStart(4, "0")}`;
});

// A long text: its beginning, and a button for the rest; laying out one endless word takes a browser long.
export function long(text, limit = 20000) {
  if (text.length <= limit) return visible(text);
  const box = h("span", {}, visible(text.slice(0, limit)));
  box.append(h("button", { on: { click: event => { event.stopPropagation(); box.replaceChildren(visible(text)); } } }, `show ${number(text.length - limit)} more letters`));
  return box;
}

export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0"; // also -0, which axes have
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace("e+", "e");
  return Number(value.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 8 });
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const s = Math.round(seconds), two = n => String(n).padStart(2, "0");
  if (s >= 86400) return `${Math.floor(s / 86400)} d ${Math.floor(s / 3600) % 24} h`;
  return s >= 3600 ? `${Math.floor(s / 3600)}:${two(Math.floor(s / 60) % 60)}:${two(s % 60)}` : `${Math.floor(s / 60)}:${two(s % 60)}`;
}

export function ago(time) {
  if (!time) return "–";
  const s = Math.max(0, Date.now() / 1000 - time);
  return s < 60 ? "just now" : s < 3600 ? `${Math.floor(s / 60)} min ago` : s < 86400 ? `${Math.floor(s / 3600)} h ago` : new Date(time * 1000).toISOString().slice(0, 10);
}

export const color = index => `var(--c${index % 8})`;
export const swatch = index => h("i", { class: "swatch", style: { background: color(index) } });
export const pill = (state, text) => h("span", { class: `pill ${state}` }, text || state);
export const card = (title, ...children) => h("section", { class: "card" }, title ? h("h2", {}, title) : null, ...children);
export const field = (name, control, wide) => h("label", { class: wide ? "field wide" : "field" }, name, control);
export const select = (value, options, change) => {
  const element = h("select", { on: { change: event => change(event.target.value) } }, options.map(([key, text]) => h("option", { value: key }, text)));
  element.value = value;
  return element;
};

// A row of links of which one is the page that is shown; on a phone it scrolls to that one. entries: [href, text, is current].
export function tabBar(label, entries) {
  const bar = h("nav", { class: "tabs", "aria-label": label }, entries.map(([href, text, current]) => h("a", { href, "aria-current": current ? "page" : null }, text)));
  requestAnimationFrame(() => bar.querySelector("[aria-current]")?.scrollIntoView({ inline: "center", block: "nearest" }));
  return bar;
}

export function save(blob, name) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
