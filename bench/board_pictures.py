"""Take the pictures of docs/board.md: a real board over given runs, in headless Chromium. This is not a benchmark.

    posttrain demo
    python -m bench.board_pictures runs docs runs/demo-001/grpo

The last argument is the online run whose completions are shown.
"""

import argparse
import tempfile
from pathlib import Path

from tests.e2e.chromium import Chromium
from tests.unit.board.made import board, get

READY = "document.querySelector('main').innerText.length > 80 && !document.body.innerText.includes('Loading')"
PAUSE = "new Promise(done => setTimeout(done, 600))"  # curves are drawn after the page


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("online", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as profile, board(options.runs) as server:
        found = get(server, "runs")["runs"]
        online = next(run["id"] for run in found if Path(run["path"]) == options.online.resolve())
        others = [run["id"] for run in found if run["has_rollouts"] and run["id"] != online and run["step"]]
        ids = ",".join([online, *others][:3])
        browser = Chromium(profile)

        def take(name, route, size, condition=READY, scheme="light", mobile=False):
            browser.size(*size, mobile=mobile)
            browser.colours(scheme)
            browser.open(f"{server.address}/#/{route}")
            browser.wait("document.querySelector('main')")
            browser.wait(condition)
            browser.evaluate(PAUSE)
            browser.screenshot(options.folder / f"board-{name}.png")

        mixed = "[...document.querySelectorAll('.answer')].some(a => a.classList.contains('best'))"
        group = best_group(server, online)
        take("runs", "", (1200, 640))
        take(
            "curves",
            f"compare/curves?runs={ids}&smoothing=0.6",
            (1200, 760),
            "document.querySelectorAll('canvas').length > 3",
        )
        take("group", f"group/{online}/{group}", (1200, 760), mixed, "dark")
        take("phone", "", (390, 700), scheme="dark", mobile=True)
        browser.close()


def best_group(server, run):
    """Return a completion of a group whose rewards differ, of a late step."""
    server.board.reader(server.board.run(run)).index.refresh(None)  # to its end
    rows = get(server, "completions", run=run, max_reward=0.5, limit=200)["rows"]
    return next(
        row["number"]
        for row in rows
        if len({one["reward"] for one in get(server, "group", run=run, number=row["number"])["completions"]}) > 1
    )


if __name__ == "__main__":
    main()
