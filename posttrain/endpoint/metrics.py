"""Counters of a server in the text format that Prometheus reads."""

from __future__ import annotations

from collections import defaultdict

BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)  # seconds
Labels = tuple[tuple[str, str], ...]


class ServerMetrics:
    """Counters (`count`) and histograms of seconds (`observe`); `page` renders them together with current gauges."""

    def __init__(self, meanings: dict[str, str]) -> None:
        """`meanings`: every name that is used, with its help text."""
        self.meanings = meanings
        self.counts: dict[str, dict[Labels, float]] = defaultdict(dict)
        self.times: dict[str, list[float]] = {}

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        found, key = self.counts[name], tuple(labels.items())
        found[key] = found.get(key, 0) + amount

    def observe(self, name: str, seconds: float) -> None:
        sums = self.times.setdefault(name, [0.0] * (len(BUCKETS) + 2))
        for place, bound in enumerate(BUCKETS):
            if seconds <= bound:
                sums[place] += 1
        sums[-2] += 1
        sums[-1] += seconds

    def page(self, gauges: dict[str, float]) -> str:
        """Return all metrics in Prometheus' text format; `gauges`: current values, which are kept elsewhere."""
        lines: list[str] = []
        for name, meaning in self.meanings.items():
            full = f"posttrain_{name}"
            kind = "counter" if name.endswith("_total") else "gauge" if name in gauges else "histogram"
            lines += [f"# HELP {full} {meaning}", f"# TYPE {full} {kind}"]
            if name in gauges:
                lines.append(f"{full} {gauges[name]:.12g}")
            elif kind == "counter":
                found = self.counts[name] or {(): 0}
                lines += [f"{full}{label_text(labels)} {amount:.12g}" for labels, amount in found.items()]
            else:
                *buckets, total, seconds = self.times.get(name, [0.0] * (len(BUCKETS) + 2))
                bounds = [*(f"{bound:g}" for bound in BUCKETS), "+Inf"]
                for bound, amount in zip(bounds, [*buckets, total], strict=True):
                    lines.append(f"{full}_bucket{label_text((('le', bound),))} {amount:.12g}")
                lines += [f"{full}_sum {seconds:.6g}", f"{full}_count {total:.12g}"]
        return "\n".join(lines) + "\n"


def label_text(labels: Labels) -> str:
    escaped = [(name, value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")) for name, value in labels]
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped) + "}" if labels else ""
