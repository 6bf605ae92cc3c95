"""`posttrain chat MODEL_OR_RUN [MODEL2]`: in a terminal, through a pipe, or one prompt with --ask."""

from __future__ import annotations

import io
import os
import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from posttrain.cli.arguments import engine_of, model_of
from posttrain.config.sections import DataConfig
from posttrain.config.tools import (
    ConditionArgs,
    LoadArgs,
    SamplingArgs,
    SpeculativeArgs,
    TemplateArgs,
    ToolArgs,
    check_at_least,
    positional,
    read_tool,
)
from posttrain.config.verbs import TOOLS
from posttrain.core.errors import UsageError
from posttrain.core.imports import importing_libraries

if TYPE_CHECKING:
    from posttrain.inference.chat import Chat

LONGEST_PROMPT = 2**20  # tokens; the model's own limit is what counts


@dataclass(kw_only=True)
class ChatArgs(TemplateArgs, LoadArgs, SpeculativeArgs, ConditionArgs, SamplingArgs, ToolArgs):
    """Options of `posttrain chat`."""

    verb: ClassVar[str] = "chat"
    about: ClassVar[str] = TOOLS["chat"]
    example: ClassVar[str] = "posttrain chat runs/sft-001"

    models: tuple[str, ...] = positional(())
    """One or two models: directory, Hugging Face name, run directory (newest checkpoint) or `pico`, a toy model."""
    ask: tuple[str, ...] = ()
    """Send these messages, print the completions and exit."""
    system: str = ""
    """System message."""
    history_turns: int = 10
    """Number of earlier turns in the prompt; 0: all."""
    temperature: float = 0.7
    """Sampling temperature; 0 takes the most likely token."""
    seed: int = 0
    """The same seed gives the same completions."""


ARGS = (ChatArgs,)


def run(args: list[str]) -> int:
    """Chat; 0 when the user leaves or the input ends."""
    options = read_tool(ChatArgs(), args)
    if len(options.models) > 2:
        raise UsageError(f"chat takes one model, or two to compare, but there are {len(options.models)}")
    check_at_least(options, history_turns=0)
    terminal = sys.stdout.isatty()
    if terminal:
        sys.stderr.write(f"loading {' and '.join(options.models)} ...\n")
    from posttrain.core.logging import quiet_libraries

    quiet_libraries()
    with importing_libraries():
        from posttrain.engines.base import Sampling
        from posttrain.inference.chat import Chat, ChatOptions
        from posttrain.inference.model import CONDITION, InferenceModel, check_sampling
        from posttrain.inference.terminal_text import WordWrap

    chat_options = ChatOptions(
        sampling=check_sampling(Sampling.of(options)),
        seed=options.seed,
        history_turns=options.history_turns,
        system=options.system,
        condition=options.condition,
        condition_template=options.condition_template or CONDITION,
    )
    data = DataConfig(chat_template=options.chat_template, max_length=LONGEST_PROMPT, on_overlong="error")
    engine = engine_of(options)
    models = [InferenceModel(model_of(path, options), data, engine=engine) for path in options.models]
    for model in models:
        model.encode([{"role": "user", "content": "a"}])  # raises now if there is no chat template
    well_formed(sys.stdin, sys.stdout)
    has_controls = terminal and os.environ.get("TERM") != "dumb"
    lines = WordWrap(write, lambda: shutil.get_terminal_size().columns) if has_controls else write
    chat = Chat(models, chat_options, lines, remarks=terminal)
    if options.ask:
        for message in options.ask:
            chat.ask(message)
        return 0
    read_input(chat)
    return 0


def read_input(chat: Chat) -> None:
    """Handle the input line by line until the user leaves or the input ends."""
    terminal = sys.stdin.isatty()
    if terminal:
        import readline  # noqa: F401  gives input() a history and arrow keys

        write("/help lists the commands; exit ends the chat\n")
    while True:
        try:
            line = input("You >> " if terminal else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            write("\nexit ends the chat\n")
            continue
        if not chat.handle(line):
            return


def write(text: str) -> None:
    """Write without buffering, so that a completion is shown while it is generated."""
    sys.stdout.write(text)
    sys.stdout.flush()


def well_formed(*streams: object) -> None:
    """Use UTF-8 for input and output in any locale; invalid bytes become replacement characters."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")
