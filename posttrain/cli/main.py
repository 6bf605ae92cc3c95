"""The command `posttrain`: find the verb, run it, turn errors into one message and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from posttrain.algorithms import ALGORITHMS
from posttrain.config.verbs import PIPELINES, TOOLS
from posttrain.core.errors import PosttrainError, UsageError


def overview() -> str:
    lines = ["usage: posttrain <verb> [CONFIG.yaml] [--section.option value ...]", "", "train:"]
    lines += [f"  {verb:<10} {algorithm.help}" for verb, algorithm in ALGORITHMS.items()]
    lines += ["", "train in iterations:"]
    lines += [f"  {verb:<19} {text}" for verb, text in PIPELINES.items()]
    lines += ["", "more:"]
    lines += [f"  {verb:<10} {text}" for verb, text in TOOLS.items()]
    lines += [
        "",
        "posttrain <verb> --help lists a verb's options. Start with: posttrain demo",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 all done, 1 failure, 2 wrong use, 130/143 stopped by a signal."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        return dispatch(args)
    except PosttrainError as error:
        print(f"posttrain: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("posttrain: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away
        return 0
    except OSError as error:  # a full disk, say; the message names the file
        print(f"posttrain: {error}", file=sys.stderr)
        return 1


def dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    verb, rest = args[0], args[1:]
    if verb in ("-V", "--version", "version"):
        from posttrain import __version__

        print(f"posttrain {__version__}")
        return 0
    if verb in ALGORITHMS:
        from posttrain.cli.train import run

        return run(verb, rest)
    if verb in PIPELINES:
        from posttrain.cli.pipelines import run

        return run(verb, rest)
    if verb in TOOLS:
        from posttrain.cli.tools import run

        return run(verb, rest)
    import difflib

    near = difflib.get_close_matches(verb, [*ALGORITHMS, *PIPELINES, *TOOLS], n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise UsageError(f"there is no verb {verb!r}.{hint} posttrain --help lists them.")
