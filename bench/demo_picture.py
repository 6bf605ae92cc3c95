"""Draw docs/demo.svg: the terminal output of a real run of `posttrain demo`. This is not a benchmark; it takes minutes.

    python -m bench.demo_picture                    runs the demo on the CPU and draws docs/demo.svg
    python -m bench.demo_picture --keep raw.txt     also keeps the terminal output, byte for byte
    python -m bench.demo_picture --redraw raw.txt   draws again from that output; runs nothing

The demo runs in an empty directory, so its paths are relative. Its output is about 75 lines: the picture has the title
and the result of each stage, then everything from the curve on, as its title states.
"""

import argparse
import io
import os
import pty
import re
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS, ROWS = 100, 50
PICTURE = Path(__file__).parents[1] / "docs" / "demo.svg"
TITLE = "posttrain demo (of each stage: its title and what came out)"
FONTS = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.demo_picture", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", type=Path, metavar="FILE")
    parser.add_argument("--redraw", type=Path, metavar="FILE")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", default=PICTURE)
    options = parser.parse_args()
    raw = options.redraw.read_bytes() if options.redraw else run_on_a_terminal()
    if options.keep:
        options.keep.write_bytes(raw)
    options.picture.write_text(draw(raw.decode()), encoding="utf-8")


def run_on_a_terminal() -> bytes:
    """Run the demo in a pseudo-terminal and return its output."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (ROWS, COLUMNS))
    unset = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"TERM": "xterm-256color", "COLORTERM": "", "PYTHONUTF8": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "posttrain", "demo"]
    with tempfile.TemporaryDirectory() as folder:
        demo = subprocess.Popen(command, cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        raw = bytearray()
        while part := read(ours):
            raw += part
            os.write(sys.stdout.fileno(), part)
        os.close(ours)
        if status := demo.wait():
            sys.exit(f"posttrain demo ended with {status}; nothing was drawn")
    return bytes(raw)


def read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux reports that the other end of the terminal is closed
        return b""


def draw(raw: str) -> str:
    # Of a line that was rewritten from_ansi keeps what follows the last carriage return; the demo clears it each time.
    lines = Text.from_ansi(raw.replace("\r\n", "\n").rstrip()).split("\n")
    curve = next(number for number, line in enumerate(lines) if "reward, step by step" in line.plain)
    stages = [line for line in lines[:curve] if line.plain.startswith(("─", "done: "))]
    shown = Text("\n").join([*stages, *lines[curve:]])
    for place in (tempfile.gettempdir(), str(Path.home()), str(PICTURE.parents[1])):
        assert place not in shown.plain, f"a path of this machine is in the picture: {place}"
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(shown)
    return polished(console.export_svg(title=TITLE))


def polished(svg: str) -> str:
    """Remove external fonts and enlarge letters a little without clipping, so that bars and boxes have no seams."""
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r' clip-path="[^"]*"|<clipPath.*?</clipPath>\s*', "", svg, flags=re.DOTALL)
    svg = svg.replace("Fira Code, monospace", FONTS).replace("font-family: arial", "font-family: arial, sans-serif")
    return svg.replace("font-size: 20px", "font-size: 21.5px")


if __name__ == "__main__":
    main()
