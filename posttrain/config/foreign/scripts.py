"""Reads the commands of a shell script without running it.

Variables are replaced by the values that the script gives them. Conditions that can be decided from them are; the
commands of both branches are read where a condition cannot. What a script sources is read too.
"""

from __future__ import annotations

import operator
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from posttrain.core.errors import UsageError

SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")


ASSIGNMENT = re.compile(r"(?:export\s+|readonly\s+|local\s+|declare\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
HEREDOC = re.compile(r"read\s+-r\s+-d\s+(?:''|\"\")\s+(\w+)\s*<<-?\s*['\"]?(\w+)['\"]?\s*$")
OWN = r'"?(?:\$0|\$\{BASH_SOURCE(?:\[0\])?\}|\$BASH_SOURCE)"?'
OWN_FOLDER = re.compile(
    rf'\$\(\s*cd\s+"?\$\(\s*dirname\s+{OWN}\s*\)"?\s*(?:&&|;)\s*pwd\s*\)|\$\(\s*dirname\s+{OWN}\s*\)'
)
LOOP = re.compile(r"\(\(\s*\$?\w+\s*<\s*(\d+)\s*\)\)")
STARTERS = ("bash", "sh", "source", ".", "sbatch")
MAX_DEPTH = 3  # of scripts that start scripts
COMPARISONS = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
VARIABLE = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::?-([^}]*))?\}|\$(\w+)|\"\$[@*]\"|\$[@*]|\"\$\{@\}\"|\$\{@\}")
KEYWORDS = ("if", "then", "else", "do", "exec", "time", "nohup", "sudo", "eval", "srun", "!")
SHELL_OPERATORS = "|&;<>"


class Words(list[str]):
    """The words of a command, and how often a loop around it runs; 0: it is in no loop, or that is unknown."""

    rounds = 0


def script_commands(
    text: str, where: str, script: Path | None = None, arguments: Sequence[str] = (), depth: int = 0
) -> Iterator[Words]:
    """Yield the words of each command of a shell script, with variables replaced; `arguments`: its $1, $2 ..."""
    values = {"PWD": str(Path.cwd())} | {name: os.environ[name] for name in ("HOME", "USER") if name in os.environ}
    yield from _commands(text, where, script, arguments, values, depth)


def _commands(
    text: str, where: str, script: Path | None, arguments: Sequence[str], values: dict[str, str], depth: int
) -> Iterator[Words]:
    folder = script.parent if script else Path()
    own = {str(place): word for place, word in enumerate(arguments, 1)}
    rounds, branches = 0, list[bool | None]()
    for statement in statements(OWN_FOLDER.sub(str(folder), text).replace("$(pwd)", str(Path.cwd()))):
        known = values | own
        word = statement.split(maxsplit=1)[0]
        if word in ("if", "elif"):
            holds = condition_holds(statement[len(word) :].strip(), known)
            earlier = branches.pop() if word == "elif" and branches else False
            branches.append(None if holds is None or earlier is None else holds and not earlier)
            continue
        if word == "fi":
            branches = branches[:-1]
            continue
        if word == "else":
            branches[-1:] = [None if entry is None else not entry for entry in branches[-1:]]
        if word in ("then", "else", "do"):
            statement = statement[len(word) :].strip()
        if word == "while":
            loop = LOOP.search(replaced(statement, known))
            rounds = int(loop[1]) if loop else 0
            continue
        if word == "done":
            rounds = 0
            continue
        if not statement or False in branches:
            continue
        heredoc = HEREDOC.match(statement.partition("\n")[0])
        if heredoc:
            values[heredoc[1]] = replaced(statement.partition("\n")[2].replace("\\\n", " "), known)
            continue
        assignment = ASSIGNMENT.fullmatch(statement)
        raw = assignment[2].strip() if assignment else ""
        if assignment and (raw[:1] == "(" or len(split_words(replaced(raw, known), where)) <= 1):
            whole = replaced(raw, known)
            quoted = whole[:1] in "'\"" and whole[-1:] == whole[:1]
            values[assignment[1]] = whole[1:-1] if quoted or whole[:1] == "(" else whole
            continue
        for one in split_commands(replaced(statement, known), where):
            words = Words(one)
            while words and words[0] in KEYWORDS:
                words.pop(0)
            words.rounds = rounds
            yield from _started(words, where, folder, values, depth)


def _started(words: Words, where: str, folder: Path, values: dict[str, str], depth: int) -> Iterator[Words]:
    """Yield a command, or those of the script that it starts; a sourced one has and sets the same variables."""
    if not words:
        return
    if "-c" in words[1:-1] and Path(words[words.index("-c") - 1]).name in ("bash", "sh"):
        yield from _commands(words[words.index("-c") + 1], where, None, (), values, depth + 1)
        return
    if len(words) > 3 and Path(words[1]).name == "msrun_launcher.sh":  # MindFormers: "PROGRAM AND FLAGS" DEVICES ...
        yield Words(["msrun", "--worker_num", words[3], *shlex.split(words[2])])
        return
    place = 1 if words[0] in STARTERS and len(words) > 1 else 0
    if Path(words[place]).suffix not in SCRIPTS:
        yield words
        return
    files = [Path(words[place]), folder / words[place]]
    file = next((file for file in files if file.is_file()), None)
    if file is None and place and not depth and not folder.parts:
        raise UsageError(f"{words[place]}: no such file")
    if file is None or depth >= MAX_DEPTH:
        return
    shared = values if words[0] in ("source", ".") else dict(values)
    yield from _commands(text_of_file(file), str(file), file, words[place + 1 :], shared, depth + 1)


def condition_holds(text: str, values: Mapping[str, str]) -> bool | None:
    """Return whether a condition holds; None if that is not known."""
    text = replaced(text.rstrip(";").strip(), values)
    arithmetic = re.fullmatch(r"\(\(\s*\$?(\w+)\s*([<>]=?|[!=]=)\s*\$?(\w+)\s*\)\)", text)
    if arithmetic:
        left, sign, right = (values.get(word, word) for word in arithmetic.groups())
        if not (left.isdigit() and right.isdigit()):
            return None
        return COMPARISONS[sign](int(left), int(right))
    inner = re.fullmatch(r"\[\[?\s+(.*?)\s+\]\]?", text, re.DOTALL)
    words = split_words(inner[1], "") if inner else []
    if not words or len(words) > 3:
        return None
    words = ["" if re.fullmatch(r"\$\{?\d\}?", word) else word for word in words]  # an argument that was not given
    if any("$" in word or "`" in word for word in words):
        return None
    match words:
        case ["-z", word]:
            return not word
        case ["-n", word]:
            return bool(word)
        case ["-f" | "-e", word]:
            return Path(word).exists()
        case [left, "==" | "=", right]:
            return left == right
        case [left, "!=", right]:
            return left != right
    return None


def replaced(text: str, values: Mapping[str, str]) -> str:
    """Replace variables that are known; `$@`, which is what a caller adds, becomes empty."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3] or ""
        if not name:
            return ""
        return values.get(name, replaced(match[2], values) if match[2] is not None else match[0])

    return VARIABLE.sub(value, text)


def split_words(text: str, where: str) -> list[str]:
    """Split a command into words; what follows a pipe or a redirection is left out."""
    return next(split_commands(text, where), [])


def split_commands(text: str, where: str) -> Iterator[list[str]]:
    """Yield the words of each of the commands that && and || join, without pipes and redirections."""
    lexer = shlex.shlex(text.replace("\\\n", " ").replace("\n", " "), posix=True, punctuation_chars=SHELL_OPERATORS)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        words = list(lexer)
    except ValueError as error:
        raise UsageError(f"{where}: cannot be read as a shell command: {error}: {text[:80]}") from None
    current, ended = list[str](), False
    for place, word in enumerate([*words, "&&"]):
        if word in ("&&", "||"):
            yield current
            current, ended = [], False
        elif word and set(word) <= set(SHELL_OPERATORS):
            if word[0] in "<>" and current and current[-1] in ("1", "2") and words[place - 1] == current[-1]:
                current.pop()
            ended = True
        elif not ended:
            current.append(word)


def statements(text: str) -> Iterator[str]:
    """Split a script at line ends and semicolons outside quotes and parentheses; comments are removed."""
    lines = iter(text.splitlines())
    current, quote, depth = "", "", 0
    for line in lines:
        if not current and (heredoc := HEREDOC.match(line.strip())):
            body = []
            for inside in lines:
                if inside.strip() == heredoc[2]:
                    break
                body.append(inside)
            yield "\n".join([line.strip(), *body])
            continue
        place = 0
        while place < len(line):
            letter = line[place]
            if quote == '"' and letter == "\\" and place + 1 < len(line):
                current, place = current + line[place : place + 2], place + 2
                continue
            if quote:
                quote = "" if letter == quote else quote
            elif letter in "'\"":
                quote = letter
            elif letter == "\\" and place + 1 < len(line):
                current, place = current + line[place : place + 2], place + 2
                continue
            elif letter == "#" and (place == 0 or line[place - 1].isspace()):
                break
            elif letter in "()":
                depth = max(0, depth + (1 if letter == "(" else -1))
            elif letter == ";" and not depth:
                yield from [current.strip()] if current.strip() else []
                current, place = "", place + 1
                continue
            current, place = current + letter, place + 1
        if line.rstrip().endswith("\\") and not quote:
            current = current.rstrip().removesuffix("\\") + " "
        elif quote or depth:
            current += "\n"
        else:
            yield from [current.strip()] if current.strip() else []
            current = ""
    if current.strip():
        yield current.strip()


def text_of_file(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{file}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: cannot be read: {error}") from None
