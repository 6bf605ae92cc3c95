"""The command `posttrain`: find the verb, run it, turn errors into one message and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from posttrain.algorithms import ALGORITHMS
from posttrain.config.verbs import PIPELINES, TOOLS
from posttrain.core.errors import PosttrainError, UsageError
from posttrain.core.imports import prepare_exit


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
    """Exit codes: 0 all done, 1 failure, 2 wrong use, 128 + N stopped by signal N (129, 130, 143)."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        code = dispatch(args)
        if sys.stdout:  # None if it was closed by the caller
            sys.stdout.flush()  # if that fails, the command has failed
        return code
    except PosttrainError as error:
        return fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return fail("interrupted", 130)
    except BrokenPipeError:  # the reader of our output went away
        output_problem()
        return 0
    except OSError as error:
        return fail(output_problem() or system_error(error), 1)
    except (MemoryError, RuntimeError) as error:
        from posttrain.core.host import out_of_memory_message

        message = out_of_memory_message(error)
        if not message:
            raise
        return fail(message, 1)


def run_process() -> NoReturn:
    """Run the command of this process and end it: what `posttrain` and `python -m posttrain` call."""
    try:
        sys.exit(main())
    finally:
        prepare_exit()


def fail(message: str, code: int) -> int:
    """Print why the command failed, and return its exit code."""
    with suppress(OSError):  # the terminal may be closed
        print(f"posttrain: {message}", file=sys.stderr, flush=True)
    return code


def output_problem() -> str:
    """Describe why standard output cannot be written to; empty if it can. What is left of the output is dropped."""
    try:
        if sys.stdout:
            sys.stdout.flush()
    except OSError as error:
        from posttrain.core.disk import ADVICE, is_disk_full

        with suppress(OSError, ValueError):  # otherwise Python tries it again at the end, and prints another error
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.stdout.flush()
        return f"standard output: cannot be written: {error.strerror}." + f" {ADVICE}" * is_disk_full(error)
    return ""


def system_error(error: OSError) -> str:
    """Describe an error of the system: the file that it names, what is known about full disks, what to do."""
    from posttrain.core.disk import ADVICE, full_file_systems, is_disk_full, space

    if not error.strerror:
        return str(error)
    if error.filename is not None:
        path = Path(os.fsdecode(error.filename)) if not isinstance(error.filename, int) else Path()
        full = f" {space(path, path)}. {ADVICE}" if is_disk_full(error) else ""
        return f"{error.filename}: {error.strerror}{full}"
    if not is_disk_full(error):
        return f"{error.strerror} (error {error.errno})"
    known = full_file_systems() or "no file system that is usually written to is full: check where the output goes"
    return f"a file could not be written: {error.strerror}. {known[0].upper()}{known[1:]}. {ADVICE}"


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
