"""Text of a model on a terminal: without control sequences, wrapped at words."""

from __future__ import annotations

from collections.abc import Callable

from rich.cells import cell_len

NARROWEST, TAB = 20, 8  # columns
HARMLESS = "\n\t\u200d"  # not printable, but wanted: the last one joins emoji


def escape_controls(text: str) -> str:
    """Escape every character that a terminal could interpret as control, except line feeds and tabs."""
    return "".join(letter if letter.isprintable() or letter in HARMLESS else repr(letter)[1:-1] for letter in text)


class WordWrap:
    """Writes text to a terminal as it arrives; a word that reaches the edge moves to the next line as a whole."""

    def __init__(self, write: Callable[[str], None], width: Callable[[], int]) -> None:
        self.write, self.width = write, width
        self.column = 0
        self.word = ""  # what of it is on this line

    def __call__(self, text: str) -> None:
        width = max(self.width(), NARROWEST)
        self.write("".join(self.placed(letter, width) for letter in text))

    def placed(self, letter: str, width: int) -> str:
        """Return a letter with what must be written before it; a space at the edge becomes a line break."""
        if letter == "\n":
            self.column, self.word = 0, ""
            return letter
        cells = TAB - self.column % TAB if letter == "\t" else cell_len(letter)
        if ends_word := letter in " \t" or cells > 1:  # wide letters are words of their own
            self.word = ""
        before = ""
        if self.column + cells >= width:  # terminals treat the last column differently
            before = self.turn()
            if letter in " \t":
                return before
        self.column += cells
        self.word += "" if ends_word else letter
        return before + letter

    def turn(self) -> str:
        """Return a line break that takes the current word along, unless it fills the whole line."""
        cells = cell_len(self.word)
        moves = 0 < cells < self.column
        self.column, self.word = (cells, self.word) if moves else (0, "")
        return f"\x1b[{cells}D\x1b[K\n{self.word}" if moves else "\n"
