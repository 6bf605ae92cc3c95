"""Writes charts as one HTML page that needs no network: SVG, light and dark, values under the pointer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from posttrain.plots import svg
from posttrain.plots.chart import Histogram, Panel

PAGE_STYLE = """
body{margin:0 auto;padding:24px 16px;max-width:880px;background:var(--background);color:var(--text);
font-family:system-ui,sans-serif}
h1{font-size:20px} figure{margin:0 0 20px;position:relative} svg.chart{width:100%;height:auto;display:block}
.value{position:absolute;pointer-events:none;background:var(--background);border:1px solid var(--grid);
border-radius:6px;padding:6px 9px;font-size:12px;white-space:nowrap;visibility:hidden;box-shadow:0 2px 8px #0003}
.value i{display:inline-block;width:10px;height:10px;border-radius:5px;margin-right:6px}
.cursor{stroke:var(--muted);stroke-dasharray:3 3;visibility:hidden}
"""

# The curves of a panel are JSON in the page; the pointer's position chooses the nearest point of each curve.
SCRIPT = """
for (const figure of document.querySelectorAll("figure[data-curves]")) {
  const data = JSON.parse(figure.dataset.curves), svg = figure.querySelector("svg");
  const box = figure.querySelector(".value"), cursor = figure.querySelector(".cursor");
  const hide = () => { box.style.visibility = cursor.style.visibility = "hidden"; };
  figure.addEventListener("mouseleave", hide);
  svg.addEventListener("mousemove", event => {
    const area = svg.getBoundingClientRect(), scale = data.width / area.width;
    const part = ((event.clientX - area.left) * scale - data.left) / data.inner;
    if (part < 0 || part > 1) return hide();
    const x = data.low + part * (data.high - data.low);
    let shown = null;
    const lines = data.curves.map(curve => {
      let best = 0;
      curve.x.forEach((value, i) => { if (Math.abs(value - x) < Math.abs(curve.x[best] - x)) best = i; });
      if (shown === null || Math.abs(curve.x[best] - x) < Math.abs(shown - x)) shown = curve.x[best];
      return [curve, best];
    });
    box.replaceChildren();
    const head = document.createElement("b");
    head.textContent = data.label + " " + Number(shown.toPrecision(7)).toLocaleString("en");
    box.append(head);
    for (const [curve, best] of lines) {
      const line = document.createElement("div"), mark = document.createElement("i");
      mark.style.background = curve.color;
      line.append(mark, curve.label + "  " + Number(curve.y[best].toPrecision(5)));
      box.append(line);
    }
    const across = data.left + (shown - data.low) / (data.high - data.low) * data.inner;
    cursor.setAttribute("x1", across); cursor.setAttribute("x2", across);
    box.style.visibility = cursor.style.visibility = "visible";
    const left = across / scale, flip = left > area.width / 2;
    box.style.left = flip ? "" : left + 12 + "px";
    box.style.right = flip ? area.width - left + 12 + "px" : "";
    box.style.top = data.top / scale + "px";
  });
}
"""


def page(charts: Sequence[Panel | Histogram], title: str) -> str:
    """Return the page."""
    light, dark = svg.variables(svg.COLORS, svg.LIGHT), svg.variables(svg.DARK_COLORS, svg.DARK)
    style = f":root{{color-scheme:light dark;{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}{svg.STYLE}{PAGE_STYLE}</style></head>"
        f"<body><h1>{escape(title)}</h1>\n{''.join(map(figure_element, charts))}"
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def figure_element(chart: Panel | Histogram) -> str:
    drawn, height = svg.draw_chart(chart)
    attribute = more = ""
    if isinstance(chart, Panel):
        attribute = f' data-curves="{escape(json.dumps(pointer_data(chart, height)))}"'
        more = f'<line class="cursor" y1="{height - svg.HEIGHT - svg.BOTTOM:g}" y2="{height - svg.BOTTOM:g}"/>'
    return (
        f'<figure{attribute}><svg class="chart" viewBox="0 0 {svg.FULL_WIDTH} {height:g}" role="img" '
        f'aria-label="{escape(chart.title)}">{drawn}{more}</svg><div class="value"></div></figure>\n'
    )


def pointer_data(panel: Panel, height: float) -> dict[str, Any]:
    """Return what the script needs to show values under the pointer."""
    axis = panel.x_axis
    return {
        "label": panel.x_label,
        "low": axis.low,
        "high": axis.high,
        "left": svg.LEFT,
        "inner": svg.WIDTH,
        "width": svg.FULL_WIDTH,
        "top": height - svg.HEIGHT - svg.BOTTOM,
        "curves": [{"label": c.label, "color": svg.color(c.color), "x": c.x, "y": c.y} for c in panel.curves],
    }
