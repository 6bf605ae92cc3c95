"""`python -m posttrain.config.foreign.page docs/coming-from.md` writes the tables of options into that page.

A table stands between `<!-- options of NAME -->` and `<!-- end of options -->`; all else in the page stays.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from posttrain.config.foreign.answer import LIBRARIES
from posttrain.config.foreign.meanings import EVERY, OFFLINE, ONLINE, Library, Meaning, Table, as_meaning

BLOCK = re.compile(r"(<!-- options of (.+?) -->\n).*?(<!-- end of options -->)", re.DOTALL)
LABELS = {EVERY: "all", OFFLINE: "offline", ONLINE: "online"}


def filled(text: str) -> str:
    """Return the page with its tables regenerated."""
    by_name = {library.name: library for library in LIBRARIES}
    return BLOCK.sub(lambda match: f"{match[1]}\n{library_table(by_name[match[2]])}\n{match[3]}", text)


def library_table(library: Library) -> str:
    """Return the options of a library that exist here, then the others with the reason."""
    lines = [f"| {library.name} | trainers | here |", "|---|---|---|"]
    reasons: dict[str, dict[str, None]] = {}
    for verbs, rows in library.tables:
        if not set(verbs) <= set(EVERY):
            continue
        for meaning, names in by_meaning(rows):
            if meaning.options or meaning.verbs:
                lines.append(f"| {coded(names)} | {label(verbs)} | {counterpart(meaning)} |")
            else:
                reasons.setdefault(meaning.note, {}).update(dict.fromkeys(names))
    lines.append("")
    lines += [f"- {coded(names)}: {reason}" for reason, names in reasons.items()]
    return "\n".join(lines) + "\n"


def by_meaning(rows: Table) -> list[tuple[Meaning, list[str]]]:
    """Group the names of a table by meaning."""
    found: dict[str | int, tuple[Meaning, list[str]]] = {}
    for names, entry in rows.items():
        key = names if isinstance(entry, str) else id(entry)
        found.setdefault(key, (as_meaning(entry), []))[1].extend(names.split())
    return list(found.values())


def counterpart(meaning: Meaning) -> str:
    if meaning.options:
        return ", ".join(f"`{option}`" for option in meaning.options) + (f": {meaning.note}" if meaning.note else "")
    values = [f"{value}: `posttrain {verbs[0]}`" for value, verbs in meaning.verbs.items() if verbs]
    return ", ".join(values)


def label(verbs: tuple[str, ...]) -> str:
    if verbs in LABELS:
        return LABELS[verbs]
    if len(verbs) > 3 and set(verbs) <= set(ONLINE):
        return f"online, not {', '.join(verb for verb in ONLINE if verb not in verbs)}"
    return ", ".join(verbs) if len(verbs) < 8 else "all that it has"


def coded(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
