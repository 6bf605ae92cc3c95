"""`posttrain chat MODEL_OR_RUN [MODEL2]`: in a terminal, through a pipe, or one question with --ask."""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
from typing import TYPE_CHECKING

from posttrain.cli.generate import add_condition, add_model, add_sampling, add_template, model_of, sampling_of
from posttrain.cli.options import Parser
from posttrain.config.sections import DataConfig
from posttrain.config.verbs import TOOLS
from posttrain.core.errors import UsageError

if TYPE_CHECKING:
    from posttrain.inference.chat import Chat

LONGEST_PROMPT = 2**20  # tokens; the model's own limit is what counts


def run(args: list[str]) -> int:
    """0 when the user leaves, or the questions end."""
    options = parser().parse_args(args)
    if len(options.models) > 2:
        raise UsageError("chat takes one model, or two to compare")
    if options.history_turns < 0:
        raise UsageError(f"history_turns is {options.history_turns}; it must be at least 0.")
    terminal = sys.stdout.isatty()
    if terminal:
        sys.stderr.write(f"loading {' and '.join(options.models)} ...\n")
    from posttrain.core.logging import quiet_libraries

    quiet_libraries()
    from posttrain.inference.chat import Chat, ChatOptions
    from posttrain.inference.model import CONDITION, InferenceModel, check_sampling
    from posttrain.inference.text_stream import WordWrap

    asked = ChatOptions(
        sampling=check_sampling(sampling_of(options)),
        seed=options.seed,
        history_turns=options.history_turns,
        system=options.system,
        condition=options.condition,
        condition_template=options.condition_template or CONDITION,
    )
    data = DataConfig(chat_template=options.template, max_length=LONGEST_PROMPT, on_overlong="error")
    models = [InferenceModel(model_of(path, options), data) for path in options.models]
    for model in models:
        model.encode([{"role": "user", "content": "a"}])  # without a template nothing can be asked: say so now
    well_formed(sys.stdin, sys.stdout)
    obeys = terminal and os.environ.get("TERM") != "dumb"
    lines = WordWrap(write, lambda: shutil.get_terminal_size().columns) if obeys else write
    chat = Chat(models, asked, lines, remarks=terminal)
    if options.ask:
        for question in options.ask:
            chat.ask(question)
        return 0
    talk(chat)
    return 0


def talk(chat: Chat) -> None:
    """Line by line, until the user leaves or the input ends."""
    terminal = sys.stdin.isatty()
    if terminal:
        import readline  # noqa: F401  gives input() a history and arrow keys

        write("/help lists the commands; exit leaves\n")
    while True:
        try:
            line = input("You >> " if terminal else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            write("\nexit leaves\n")
            continue
        if not chat.handle(line):
            return


def write(text: str) -> None:
    """At once: an answer is read as it grows."""
    sys.stdout.write(text)
    sys.stdout.flush()


def well_formed(*streams: object) -> None:
    """UTF-8 in and out whatever the locale; bytes that are none become a sign for that."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")


def parser() -> argparse.ArgumentParser:
    found = Parser(prog="posttrain chat", description=TOOLS["chat"])
    found.add_argument(
        "models", metavar="MODEL", nargs="+", help="folder, hub name, run folder (its newest checkpoint) or pico; two"
    )
    found.add_argument("--ask", nargs="+", default=[], metavar="TEXT", help="ask these, print the answers and leave")
    found.add_argument("--system", default="", help="system message")
    found.add_argument("--history_turns", type=int, default=10, help="so many turns are told again; 0: all (10)")
    add_sampling(found, max_tokens=512, temperature=0.7)
    found.add_argument("--seed", type=int, default=0, help="the same seed gives the same answers")
    add_condition(found)
    add_model(found)
    add_template(found.add_argument_group("template"))
    return found
