"""What commands share: options from a YAML file, and the options of rewards."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from posttrain.core.errors import UsageError

WORDS: dict[Any, str] = {int: "a whole number", float: "a number"}


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the list of all options in front of it."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized"):
            wrong = next((word for word in message.split() if word.startswith("-")), "")
            near = difflib.get_close_matches(wrong, self._option_string_actions, n=1, cutoff=0.5)
            message = f"{wrong}: no such option. Did you mean {near[0]}?" if near else message
        raise UsageError(f"{message}\n{self.prog} --help lists all options.")


def parse(parser: argparse.ArgumentParser, args: Sequence[str]) -> argparse.Namespace:
    """`[CONFIG.yaml] [what is typed]`: entries of the file are options, and what is typed counts more.

    What has no dashes on the command line (MODEL, DATA ...) is an entry under its name in the file, too.
    """
    if not args or Path(args[0]).suffix not in (".yaml", ".yml"):
        return parser.parse_args(args)
    entries = entries_of_file(Path(args[0]), parser)
    actions = {action.dest: action for action in parser._actions}
    typed = list(args[1:])
    for name, value in entries.items():
        action = actions[name]
        action.default, action.required = value, False
        if not action.option_strings:  # may be left out now
            action.nargs = "*" if action.nargs == "+" else "?"
    return parser.parse_args(typed)


def entries_of_file(file: Path, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Checked as if they were typed; errors name the line."""
    import yaml

    from posttrain.config.parsing import read_yaml

    verb = parser.prog.split()[-1]
    actions = {action.dest: action for action in parser._actions if action.dest != "help"}
    found: dict[str, Any] = {}
    root = read_yaml(file)
    for key_node, value_node in root.value if root else []:
        key, where = str(key_node.value), f"{file}:{key_node.start_mark.line + 1}: "
        value = yaml.SafeLoader("").construct_object(value_node, deep=True)
        if key == "verb":
            if value != verb:
                raise UsageError(f"{where}is for `posttrain {value}`, not for `posttrain {verb}`")
            continue
        if key not in actions:
            near = difflib.get_close_matches(key, actions, n=1, cutoff=0.5)
            hint = f"Did you mean {near[0]}?" if near else f"posttrain {verb} --help lists all options."
            raise UsageError(f"{where}{key}: no such option. {hint}")
        found[key] = checked(actions[key], value, f"{where}{key} is {value!r}; it must be")
    return found


def checked(action: argparse.Action, value: Any, complaint: str) -> Any:
    """The value as the option would have it."""
    if action.nargs == 0:  # a switch
        if not isinstance(value, bool):
            raise UsageError(f"{complaint} true or false.")
        return value
    if action.nargs in ("+", "*"):
        if isinstance(value, dict) or value is None:
            raise UsageError(f"{complaint} a list.")
        return [one(action, entry, complaint) for entry in (value if isinstance(value, list) else [value])]
    return one(action, value, complaint)


def one(action: argparse.Action, value: Any, complaint: str) -> Any:
    if isinstance(value, dict) and action.type is None:  # an option that takes JSON
        import json

        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict | list | bool) or value is None:
        raise UsageError(f"{complaint} {WORDS.get(action.type, 'text')}.")
    try:
        found = action.type(str(value)) if callable(action.type) else str(value)
    except ValueError:
        raise UsageError(f"{complaint} {WORDS.get(action.type, 'text')}.") from None
    if action.choices is not None and found not in action.choices:
        raise UsageError(f"{complaint} one of {', '.join(map(str, action.choices))}.")
    return found


# Rewards


def add_rewards(parser: argparse.ArgumentParser, *, models: bool = True) -> None:
    """Who judges, and what that may take."""
    kinds = "verifier, file.py:function, http://..." + (", model:RUN_OR_FOLDER" if models else "")
    parser.add_argument("--reward", nargs="+", required=True, metavar="REWARD", help=kinds)
    parser.add_argument("--weights", nargs="+", type=float, default=[], help="one for each reward; default: 1 each")
    parser.add_argument("--timeout_seconds", type=float, default=10.0, help="for one answer (10)")
    parser.add_argument("--memory_gib", type=float, default=2.0, help="of one process (2)")
    parser.add_argument("--workers", type=int, default=2, help="processes for functions (2)")
    parser.add_argument("--env", nargs="+", default=[], help="environment variables that functions may see")


def rewards_of(options: argparse.Namespace) -> dict[str, Any]:
    """The same as arguments of `Rewards` and `Scoring`, apart from the rewards themselves."""
    return {
        "weights": tuple(options.weights),
        "timeout_seconds": options.timeout_seconds,
        "memory_gib": options.memory_gib,
        "workers": options.workers,
        "env": tuple(options.env),
    }
