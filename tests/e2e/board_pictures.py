"""Takes the pictures of docs/board.md: python -m tests.e2e.board_pictures RUNS docs [PICTURE ...]."""

import sys
import tempfile
from pathlib import Path

from tests.e2e.chromium import Chromium
from tests.unit.board.made import board

# Picture: route, size, colours, and what the page shows when it is ready. {online}, {two}, {evaluated}: ids of runs.
PICTURES = {
    "board-runs": ("", (1200, 640), "light", "document.querySelectorAll('.runs tbody tr .pill').length"),
    "board-phone": ("", (390, 844), "dark", "document.querySelectorAll('.runs tbody tr .pill').length"),
    "board-curves": (
        "compare/curves?runs={two}&metrics=reward,length,entropy,grad_norm&smoothing=0.6",
        (1200, 760),
        "light",
        "document.querySelectorAll('.chart canvas[aria-label*=Last]').length === 4",
    ),
    "board-group": ("group/{online}/0", (1200, 760), "light", "document.querySelectorAll('.side .tokens').length"),
    "board-evaluations": ("run/{evaluated}/evaluations", (1200, 760), "light", "document.querySelector('table.pairs')"),
    "board-launch": (
        "launch?trainer=dpo&values=%7B%22model.path%22%3A%22pico%22%2C%22data.train%22%3A%5B%22"
        "examples%2Fdata%2Fpairs.jsonl%22%5D%2C%22train.max_steps%22%3A%222%22%7D",
        (1200, 860),
        "light",
        "document.querySelector('.code').innerText.includes('--train.max_steps 2')",
    ),
}
CHECK = "[...document.querySelectorAll('.result button')].find(b => b.textContent === 'Check the data')"


def take(browser, server, folder, names=tuple(PICTURES)):
    """Write pictures of a board that has at least two online runs and one with evaluations."""
    runs = server.board.list.find()
    online = [run.id for run in runs if run.summary()["has_rollouts"]]
    evaluated = next(run.id for run in runs if run.folder.entries("evals")[0])
    ids = {"online": online[0], "two": ",".join(online[:2]), "evaluated": evaluated}
    for name in names:
        route, size, colours, ready = PICTURES[name]
        browser.size(*size, mobile=size[0] < 500)
        browser.colours(colours)
        for key, value in ids.items():
            route = route.replace(f"{{{key}}}", value)
        browser.open(f"{server.address}/#/{route}")
        browser.wait(ready)
        if name == "board-launch" and browser.evaluate(f"!{CHECK}.disabled"):
            browser.evaluate(f"{CHECK}.click()")
            browser.wait("document.querySelector('.result mark')")
        browser.screenshot(folder / f"{name}.png")


def main(runs, folder, *names):
    token = "token-of-pictures"
    with board(runs, token=token, allow_control=True) as server, tempfile.TemporaryDirectory() as profile:
        browser = Chromium(Path(profile) / "profile")
        try:
            browser.open(f"{server.address}/#token={token}")
            browser.wait("document.querySelector('h1')")
            take(browser, server, Path(folder), names or tuple(PICTURES))
        finally:
            browser.close()
            server.board.launcher.end_checks()


if __name__ == "__main__":
    main(*sys.argv[1:])
