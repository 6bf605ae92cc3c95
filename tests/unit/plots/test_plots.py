"""Curves of runs: what is chosen, what is drawn, and that pages and pictures hold it."""

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from posttrain.cli.main import main
from posttrain.core.errors import UsageError
from posttrain.plots.chart import Axis, Histogram, Panel, tick_label
from posttrain.plots.page import page
from posttrain.plots.runs import is_number, open_runs, panels_of, smoothed
from posttrain.plots.svg import svg
from posttrain.plots.terminal import draw_panel

ROWS = [
    {"step": step, "loss": 4 / step, "tokens": 10, "time/train": 30.0, "time/eval": 30.0, "learning_rate": 0.0}
    for step in range(1, 9)
]
ROWS[3]["eval/loss"] = ROWS[7]["eval/loss"] = 2.0
ROWS[5] |= {"loss": None, "not_finite": ["loss"]}


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, rows in (("a", ROWS), ("b", ROWS[:4]), ("rl/a", [{"step": 1, "reward": 0.5, "loss": 1.0}])):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 9')
    return tmp_path


def test_the_usual_metrics_of_a_run(runs):
    (panel,) = panels_of(open_runs(["a"]))
    assert (panel.title, panel.x_label) == ("loss", "step")
    assert [(curve.label, curve.dashed) for curve in panel.curves] == [("loss", False), ("eval/loss", True)]
    assert panel.curves[0].x == [1, 2, 3, 4, 5, 7, 8] and panel.curves[0].y[0] == 4  # step 6 was not finite
    assert panel.curves[1].x == [4, 8]
    assert [panel.title for panel in panels_of(open_runs(["rl/a"]))] == ["reward"]


def test_several_runs_share_panels_and_keep_their_colours(runs):
    (loss, rate) = panels_of(open_runs(["a", "b"]), ["loss", "eval/*", "learn*"])
    assert [(c.label, c.color) for c in loss.curves] == [("a", 0), ("a eval/loss", 0), ("b", 1), ("b eval/loss", 1)]
    assert [curve.label for curve in rate.curves] == ["a", "b"]
    (panel,) = panels_of(open_runs(["a", "rl/a"]), ["loss"])
    assert [curve.label for curve in panel.curves] == ["a", "a eval/loss", "rl/a"][::2]  # by path: the names are equal


@pytest.mark.parametrize(
    ("x_axis", "label", "last"), [("step", "step", 8), ("tokens", "tokens", 80), ("time", "minutes", 8)]
)
def test_the_horizontal_axis(runs, x_axis, label, last):
    (panel,) = panels_of(open_runs(["a"]), ["loss"], x_axis)
    assert panel.x_label == label and panel.curves[0].x[-1] == last


def test_smoothing_keeps_the_values_and_starts_with_the_first():
    assert smoothed([1.0, 1.0, 1.0], 0.9) == pytest.approx([1, 1, 1])
    assert smoothed([0.0, 1.0], 0.5) == pytest.approx([0, 2 / 3])
    assert smoothed([3.0, 5.0], 0.0) == [3, 5]


def test_wrong_use(runs):
    for arguments, words in (
        ({"patterns": ["los"]}, "no step has logged the metric 'los'; there are loss, tokens"),
        ({"smoothing": 1.0}, "smoothing is 1.0"),
        ({"patterns": ["learning_rate"], "log_scale": True}, "learning_rate has the value 0"),
    ):
        with pytest.raises(UsageError, match=words):
            panels_of(open_runs(["a"]), **arguments)
    with pytest.raises(UsageError, match="has not logged the metric 'tokens'"):
        panels_of(open_runs(["rl/a"]), (), "tokens")
    for name, words in ((".", "it has the runs a, b"), ("gone", "no run in this directory")):
        with pytest.raises(UsageError, match=words):
            open_runs([name])
    for text, words in (
        ("", "no step is logged"),
        ("[]\n", "a line has no 'step'"),
        ("{\n", "not the metrics of a run"),
    ):
        (runs / "a/metrics.jsonl").write_text(text)
        with pytest.raises(UsageError, match=words):
            open_runs(["a"])


def test_the_command(runs, capsys):
    assert main(["plot", "a", "b", "--smoothing", "0.5"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("loss\n") and "a a\n" in said and "c b\n" in said and "step 8" in said
    assert main(["plot", "a", "b", "--output_file", "new/c.html"]) == 0
    assert capsys.readouterr().out == "done: 1 plot in new/c.html\n"
    assert main(["plot", "a", "--output_file", "new/c.html"]) == 2
    assert "already exists. Add --overwrite" in capsys.readouterr().err
    assert main(["plot", "a", "--output_file", "c.pdf"]) == 2
    assert "ends in .svg, .png, .html" in capsys.readouterr().err
    assert main(["plot", "a", "--output_file", "c.png"]) == 0
    assert (runs / "c.png").read_bytes().startswith(b"\x89PNG")


def test_pictures_hold_every_point_and_names_are_escaped(runs):
    (runs / "a").rename(runs / "<b>&\"'")
    panels = panels_of(open_runs(["<b>&\"'", "b"]), ["loss", "learning_rate"], smoothing=0.5)
    root = ElementTree.fromstring(svg(panels, "<title>"))
    lines = [
        element.get("d") for element in root.iter("{http://www.w3.org/2000/svg}path") if element.get("class") == "line"
    ]
    assert sorted(line.count("L") + 1 for line in lines if "h18" not in line) == [4, 4, 7, 8]
    assert "<b>&\"'" in [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    text = page(panels, "<title>")
    assert "<b>" not in text and "&lt;title&gt;" in text


class Attributes(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        self.found += [(tag, name, value or "") for name, value in attributes]


def test_the_page_needs_no_network_and_has_a_dark_variant(runs):
    text = page(panels_of(open_runs(["a", "b"]), ["loss"], log_scale=True), "a, b")
    parser = Attributes()
    parser.feed(text)
    assert not [found for found in parser.found if found[1] in ("src", "href")] and "url(" not in text
    assert "http" not in re.sub(r'xmlns="[^"]*"', "", text)
    assert "prefers-color-scheme:dark" in text
    (data,) = [json.loads(value) for _, name, value in parser.found if name == "data-curves"]
    assert data["curves"][0]["x"] == [1, 2, 3, 4, 5, 7, 8] and data["curves"][1]["y"][-1] == 1


def test_curves_in_the_terminal():
    rising = Panel("up", [_curve("up", range(10))])
    both = Panel("both", [_curve("up", range(10)), _curve("down", range(9, -1, -1))])
    text = drawn(rising)
    lines = [line.partition("│")[2] for line in text.splitlines() if "│" in line]
    first, last = lines[0].rstrip("\u2800 "), lines[-1]
    assert len(lines) == 12 and len(first) > 60 and last.lstrip(" \u2800") != "" and last[0] not in " \u2800"
    letters = [line.partition("│")[2] for line in drawn(both).splitlines() if "│" in line]
    assert letters[0][0] == "b" and letters[0].rstrip()[-1] == "a" and letters[-1][0] == "a"
    coloured = drawn(both, colours=True)
    assert "\x1b[34m" in coloured and "\x1b[33m" in coloured


def _curve(name, values):
    from posttrain.plots.chart import Curve

    return Curve(name, [float(x) for x in range(len(values))], [float(y) for y in values], int(name == "down"))


def drawn(panel, colours=False):
    console = Console(width=100, force_terminal=colours, color_system="standard" if colours else None, highlight=False)
    with console.capture() as capture:
        draw_panel(console, panel)
    return capture.get()


@given(st.floats(-1e12, 1e12), st.floats(-1e12, 1e12), st.booleans())
@example(1.0, 0.0001, True)
@example(0.0, -1e-05, True)
def test_ticks_are_inside_the_axis_and_few(a, b, log):
    low, high = sorted((a, b))
    if log:
        low, high = 10 ** (low / 1e12 * 6), 10 ** (high / 1e12 * 6)
    if high - low < 1e-9 * max(abs(low), abs(high)) or high - low < 1e-200:
        high = low
    axis = Axis.fit([low, high], log)
    assert 0 <= axis.fraction(low) <= axis.fraction(high) <= 1
    ticks = axis.ticks()
    assert 1 <= len(ticks) <= 10 and all(-1e-6 <= axis.fraction(tick) <= 1 + 1e-6 for tick in ticks)
    assert ticks == sorted(ticks) and all(math.isfinite(tick) for tick in ticks)


def test_tick_labels():
    labels = {0: "0", 0.25: "0.25", 150: "150", 1500: "1.5k", 30_000: "30k", 2e6: "2M", 1e-5: "1e-05", -0.5: "-0.5"}
    assert {value: tick_label(value) for value in labels} == labels


@given(st.lists(st.integers(0, 100_000), min_size=1, max_size=50))
def test_bins_count_every_value_once(values):
    bins = Histogram("", values).bins
    assert sum(count for *_, count in bins) == len(values) and len(bins) <= 30
    for low, high, count in bins:
        assert count == sum(low <= value < high for value in values)


@pytest.mark.parametrize("value", [10**400, -(10**400), float("nan"), float("inf"), True, "1", None])
def test_what_cannot_be_drawn_is_left_out(value):
    assert not is_number(value)
    assert is_number(10**300) and is_number(0) and is_number(-0.5)
