// Line charts on a canvas: linear or logarithmic, values under the pointer or by arrow keys, a part of the axis, PNG.
import { h, number, color, save, visible } from "./dom.js";

const LEFT = 56, RIGHT = 12, TOP = 10, BOTTOM = 26;
const FEW_POINTS = 40; // of a curve: each is marked, so that one sees where values are
const DRAG_PIXELS = 6;
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const cssColor = index => css(`--c${index % 8}`);

function niceTicks(low, high, count) {
  const rough = (high - low) / count || 1, size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find(f => f * size >= rough) * size, ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step || 0);  // not -0
  return ticks;
}
function logTicks(low, high) {
  const ticks = [], first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const every = Math.max(1, Math.ceil((last - first) / 6));
  for (let e = first; e <= last; e += every) for (const f of last - first <= 2 ? [1, 2, 5] : [1]) ticks.push(f * 10 ** e);
  const inside = ticks.filter(t => t >= low * 0.999 && t <= high * 1.001);
  return inside.length > 1 ? inside : niceTicks(low, high, 4).filter(t => t > 0); // a part of a decade
}
const short = value => {
  const size = Math.abs(value);
  if (size >= 1e9) return `${number(value / 1e9, 3)}B`;
  if (size >= 1e6) return `${number(value / 1e6, 3)}M`;
  return size >= 1e4 ? `${number(value / 1e3, 3)}k` : number(value, 4);
};

export class Chart {
  // actions: elements beside the title; zoom: called with the part of the axis that was chosen, [from, to], or null for all
  constructor(title, { height = 220, actions = [], fileName = title, zoom = null } = {}) {
    this.title = title; this.height = height; this.series = []; this.log = false; this.at = null; this.xLabel = "step"; this.drag = null; this.range = null;
    this.canvas = h("canvas", { tabindex: "0", role: "img" });
    this.tip = h("div", { class: "tip", hidden: true });
    this.box = h("div", { class: "chart" }, this.canvas, this.tip);
    const png = h("button", { class: "quiet", title: "Download as PNG", on: { click: () => this.png(fileName) } }, "PNG");
    this.heading = h("div", { class: "chart-head" }, h("h3", { title }, title), ...actions, png);
    this.element = h("section", { class: "card" }, this.heading, this.box);
    const across = event => event.clientX - this.canvas.getBoundingClientRect().left;
    this.canvas.addEventListener("pointermove", event => { if (this.drag) { this.drag[1] = across(event); this.draw(); } else this.point(across(event)); });
    this.canvas.addEventListener("pointerleave", () => this.point(null));
    if (zoom) {
      this.canvas.title = "Drag to zoom, double-click for all";
      this.canvas.addEventListener("pointerdown", event => { // a finger scrolls and reads values
        if (event.pointerType !== "mouse" || event.button || !this.frame) return;
        this.drag = [across(event), across(event)];
        this.canvas.setPointerCapture(event.pointerId);
      });
      const end = event => {
        if (!this.drag) return;
        const ends = [...this.drag].sort((a, b) => a - b);
        this.drag = null;
        this.draw();
        if (event.type === "pointerup" && this.frame && ends[1] - ends[0] > DRAG_PIXELS) zoom(ends.map(x => this.value(x)));
      };
      this.canvas.addEventListener("pointerup", end);
      this.canvas.addEventListener("pointercancel", end);
      this.canvas.addEventListener("dblclick", () => zoom(null));
      this.canvas.addEventListener("keydown", event => {
        if (!["+", "-", "0"].includes(event.key) || !this.frame) return;
        event.preventDefault();
        const { x0, x1 } = this.frame, middle = this.at ?? (x0 + x1) / 2, half = (x1 - x0) * (event.key === "+" ? 0.25 : 1);
        const wanted = [middle - half, middle + half];
        zoom(event.key === "0" || (this.whole && wanted[0] <= this.whole[0] && wanted[1] >= this.whole[1]) ? null : wanted);
      });
    }
    this.canvas.addEventListener("blur", () => this.point(null));
    this.canvas.addEventListener("keydown", event => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!move || !this.frame || !this.xs.length) return;
      event.preventDefault();
      const here = this.at === null ? (move > 0 ? -1 : this.xs.length) : this.xs.indexOf(this.at);
      this.at = this.xs[Math.min(this.xs.length - 1, Math.max(0, here + move))];
      this.draw(); this.showTip();
    });
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.box);
    addEventListener("themechange", () => this.draw());
  }

  // series: [{label, color (index), x, y, raw}]; range: the part of the axis to draw; whole: all that there is
  set(series, { log = false, xLabel = "step", range = null, whole = range } = {}) {
    this.log = log; this.xLabel = xLabel; this.range = range; this.whole = whole; this.hiddenPoints = 0;
    const keep = v => !log || v > 0;
    this.series = series.map(s => {
      const place = s.y.map((v, i) => i).filter(i => keep(s.y[i]));
      this.hiddenPoints += s.y.length - place.length;
      return { ...s, x: place.map(i => s.x[i]), y: place.map(i => s.y[i]), raw: s.raw && place.map(i => s.raw[i]) };
    }).filter(s => s.x.length);
    this.xs = [...new Set(this.series.flatMap(s => s.x))].sort((a, b) => a - b);
    const last = this.series.map(s => `${s.label}: ${number(s.y[s.y.length - 1])}`).join(", ");
    this.canvas.setAttribute("aria-label", visible(`${this.title} by ${xLabel}. Last values: ${last || "none"}. Arrow keys read values.`));
    this.draw();
  }

  draw(canvas = this.canvas, width = this.box.clientWidth, scale = devicePixelRatio || 1, background = null) {
    const height = this.height;
    if (!width) return;
    canvas.width = Math.round(width * scale); canvas.height = Math.round(height * scale);
    if (canvas === this.canvas) canvas.style.height = `${height}px`;
    const g = canvas.getContext("2d");
    g.setTransform(scale, 0, 0, scale, 0, 0);
    g.clearRect(0, 0, width, height);
    if (background) { g.fillStyle = background; g.fillRect(0, 0, width, height); }
    g.font = "11px system-ui, sans-serif"; g.lineJoin = "round";
    const text = css("--muted"), grid = css("--line");
    if (!this.series.length) {
      g.fillStyle = text; g.textAlign = "center";
      g.fillText(this.log && this.hiddenPoints ? "no positive values for a logarithmic axis" : "no values", width / 2, height / 2);
      this.frame = null;
      return;
    }
    let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity;
    for (const s of this.series) {
      for (const v of s.x) { if (v < x0) x0 = v; if (v > x1) x1 = v; }
      for (const v of s.y) { if (v < y0) y0 = v; if (v > y1) y1 = v; }
      for (const v of s.raw || []) if (!this.log || v > 0) { if (v < y0) y0 = v; if (v > y1) y1 = v; }
    }
    if (this.range) [x0, x1] = this.range;
    if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
    if (this.log) { y0 /= 1.12; y1 *= 1.12; } else { const pad = (y1 - y0 || Math.abs(y1) || 1) * 0.07; y0 -= pad; y1 += pad; }
    const up = this.log ? Math.log : v => v, low = up(y0), high = up(y1);
    const px = x => LEFT + (x - x0) / (x1 - x0) * (width - LEFT - RIGHT);
    const py = y => TOP + (high - up(y)) / (high - low) * (height - TOP - BOTTOM);
    this.frame = { px, py, x0, x1, width };
    g.textBaseline = "middle"; g.textAlign = "right"; g.lineWidth = 1;
    for (const tick of this.log ? logTicks(y0, y1) : niceTicks(y0, y1, 5)) {
      const y = Math.round(py(tick)) + 0.5;
      g.strokeStyle = grid; g.beginPath(); g.moveTo(LEFT, y); g.lineTo(width - RIGHT, y); g.stroke();
      g.fillStyle = text; g.fillText(short(tick), LEFT - 7, y);
    }
    g.textBaseline = "top"; g.textAlign = "center";
    for (const tick of niceTicks(x0, x1, Math.max(3, Math.floor(width / 80)))) {
      if (px(tick) > width - RIGHT - 46 && this.xLabel) continue;
      g.fillStyle = text; g.fillText(short(tick), px(tick), height - BOTTOM + 8);
    }
    g.textAlign = "right"; g.fillStyle = text; g.fillText(this.xLabel, width - RIGHT, height - BOTTOM + 8);
    const line = (s, values, wide, alpha) => {
      g.globalAlpha = alpha; g.lineWidth = wide; g.strokeStyle = cssColor(s.color); g.beginPath();
      let drawing = false;
      values.forEach((v, i) => {
        if (this.log && v <= 0) { drawing = false; return; }
        if (drawing) g.lineTo(px(s.x[i]), py(v)); else g.moveTo(px(s.x[i]), py(v));
        drawing = true;
      });
      g.stroke(); g.globalAlpha = 1;
    };
    const dots = s => {
      g.fillStyle = cssColor(s.color);
      s.y.forEach((v, i) => { g.beginPath(); g.arc(px(s.x[i]), py(v), s.x.length === 1 ? 3 : 2.2, 0, 7); g.fill(); });
    };
    g.save(); g.beginPath(); g.rect(LEFT - 2, TOP - 4, width - LEFT - RIGHT + 6, height - TOP - BOTTOM + 8); g.clip();
    for (const s of this.series) if (s.raw) line(s, s.raw, 1, 0.28);
    for (const s of this.series) { line(s, s.y, 1.9, 1); if (s.x.length <= FEW_POINTS) dots(s); }
    g.restore();
    if (this.drag && canvas === this.canvas) {
      const inside = x => Math.min(width - RIGHT, Math.max(LEFT, x)), [a, b] = this.drag.map(inside);
      g.globalAlpha = 0.15; g.fillStyle = css("--accent"); g.fillRect(Math.min(a, b), TOP, Math.abs(b - a), height - TOP - BOTTOM); g.globalAlpha = 1;
    }
    if (this.at !== null && canvas === this.canvas) {
      g.strokeStyle = text; g.setLineDash([3, 3]); g.lineWidth = 1; g.beginPath(); g.moveTo(px(this.at), TOP); g.lineTo(px(this.at), height - BOTTOM); g.stroke(); g.setLineDash([]);
      for (const s of this.series) { const i = nearest(s.x, this.at); g.fillStyle = cssColor(s.color); g.beginPath(); g.arc(px(s.x[i]), py(s.y[i]), 3.4, 0, 7); g.fill(); }
    }
  }

  point(x) {
    if (!this.frame) return;
    if (x === null || x < LEFT - 10 || x > this.frame.width) { if (this.at !== null) { this.at = null; this.tip.hidden = true; this.draw(); } return; }
    const at = this.xs[nearest(this.xs, this.value(x))];
    if (at !== this.at) { this.at = at; this.draw(); this.showTip(); }
  }

  // Where a place of the canvas is on the horizontal axis.
  value(x) {
    const { x0, x1, width } = this.frame, part = (x - LEFT) / (width - LEFT - RIGHT);
    return x0 + Math.min(1, Math.max(0, part)) * (x1 - x0);
  }

  showTip() {
    if (!this.frame || this.at === null) return;
    const across = this.frame.px(this.at), right = across > this.frame.width / 2;
    this.tip.replaceChildren(h("b", {}, `${this.xLabel} ${number(this.at, 6)}`), ...this.series.slice(0, 16).map(s => {
      const i = nearest(s.x, this.at);
      const raw = s.raw ? ` (${number(s.raw[i])})` : "";
      return h("div", {}, h("i", { class: "swatch", style: { background: color(s.color) } }), h("span", {}, s.label), h("b", {}, number(s.y[i], 5) + raw));
    }));
    this.tip.hidden = false;
    Object.assign(this.tip.style, { top: "6px", left: right ? "" : `${across + 14}px`, right: right ? `${this.frame.width - across + 14}px` : "" });
  }

  png(name) {
    const canvas = document.createElement("canvas"), inner = document.createElement("canvas"), width = 900, scale = 2;
    this.draw(inner, width, scale, css("--card"));
    const named = this.series.length > 1 ? this.series : [], legend = 30 + Math.ceil(named.length / 3) * 20;
    canvas.width = width * scale; canvas.height = (this.height + legend) * scale;
    const g = canvas.getContext("2d");
    g.scale(scale, scale); g.fillStyle = css("--card"); g.fillRect(0, 0, width, this.height + legend);
    g.fillStyle = css("--text"); g.font = "600 15px system-ui, sans-serif"; g.fillText(visible(this.title), 12, 21);
    g.font = "12px system-ui, sans-serif";
    named.forEach((s, i) => {
      const x = 14 + (i % 3) * 295, y = 34 + Math.floor(i / 3) * 20;
      g.fillStyle = cssColor(s.color); g.fillRect(x, y, 11, 11); g.fillStyle = css("--text"); g.fillText(visible(s.label).slice(0, 44), x + 17, y + 10);
    });
    g.drawImage(inner, 0, legend, width, this.height);
    this.draw();
    canvas.toBlob(blob => save(blob, `${name.replace(/[^\w.-]+/g, "-")}.png`));
  }
}

export function nearest(sorted, wanted) {
  let low = 0, high = sorted.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (sorted[middle] < wanted) low = middle; else high = middle; }
  return Math.abs(sorted[high] - wanted) < Math.abs(sorted[low] - wanted) ? high : low;
}

export function spark(values, index = 0) {
  const canvas = h("canvas", { width: 216, height: 52, style: { width: "108px", height: "26px" }, "aria-hidden": "true" });
  const g = canvas.getContext("2d"), low = Math.min(...values), high = Math.max(...values);
  g.strokeStyle = cssColor(index); g.lineWidth = 3; g.lineJoin = "round"; g.beginPath();
  values.forEach((v, i) => g.lineTo(4 + i / Math.max(1, values.length - 1) * 208, 46 - (high > low ? (v - low) / (high - low) : 0.5) * 40));
  g.stroke();
  return canvas;
}
