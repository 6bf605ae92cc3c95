"""Chats with one model or two side by side, in a terminal or through a pipe."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from posttrain.core.errors import PosttrainError, UsageError
from posttrain.data.reading.cells import make_message
from posttrain.data.reading.examples import Message
from posttrain.endpoint.text_stream import TextStream
from posttrain.engines.base import GenerationRequest, Sampling, seed_for
from posttrain.inference.model import CONDITION, InferenceModel, check_sampling, conditioned, has_position_table
from posttrain.inference.terminal_text import escape_controls

HELP = """\
/clear           start a new conversation (also: clear, new)
/system TEXT     set the system message; without TEXT remove it
/set             show all settings
/set NAME VALUE  change a setting
/save FILE       append the conversation to a .jsonl file, for posttrain sft
/help            show this text
exit             leave (also: quit, q, or Ctrl-D). Ctrl-C stops a completion"""
NUMBERS = {"temperature": float, "top_p": float, "top_k": int, "min_p": float, "repetition_penalty": float}
NUMBERS |= {"max_tokens": int}
LEAVE, CLEAR = ("exit", "quit", "q", "/exit", "/quit"), ("clear", "new", "/clear", "/new")

Write = Callable[[str], None]


@dataclass(kw_only=True, slots=True)
class ChatOptions:
    """Settings of a chat, the same for all models."""

    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    history_turns: int = 10  # earlier turns that are part of the prompt; 0: all
    system: str = ""
    condition: float | None = None  # the reward that prompts ask for
    condition_template: str = CONDITION


class Conversation:
    """The conversation with one model: pairs of a user's message and the model's completion."""

    def __init__(self, model: InferenceModel, name: str) -> None:
        self.model, self.name = model, name
        self.turns: list[tuple[str, str]] = []

    def ask(self, message: str, options: ChatOptions, write: Write) -> str:
        """Stream the completion of a user's message; return a remark on how it ended, or nothing.

        An interrupted completion is kept as far as it went; then KeyboardInterrupt is raised.
        """
        prompt = self.prompt(message, options)
        stream, pieces = TextStream(self.model.tokenizer), list[str]()

        def show(text: str) -> None:
            pieces.append(text)
            write(escape_controls(text))

        sampling = replace(options.sampling, stop_ids=self.model.stop_ids)
        request = GenerationRequest(prompt=prompt, seed=seed_for(options.seed, len(self.turns), 0), reuse_prefix=True)
        try:
            (found,) = self.model.generate([request], sampling, lambda _, token: show(stream.add(token)))
        finally:
            rest = stream.finish()
            completion = "".join([*pieces, rest])
            if completion.strip():  # chat templates do not accept empty messages
                self.turns.append((message, completion))
            write(escape_controls(rest))
        if found.finish == "length":
            return f"[stopped at max_tokens = {sampling.max_tokens}: /set max_tokens N allows more]"
        return "" if completion.strip() else "[empty completion]"

    def prompt(self, message: str, options: ChatOptions) -> Any:
        """Return the tokens of the newest turns: at most history_turns, and as many as fit."""
        first = max(0, len(self.turns) - options.history_turns) if options.history_turns else 0
        limit = self.model.context
        while True:
            messages = self.messages(first, options, message)
            tokens = self.model.encode(messages).tokens
            too_long = limit is not None and len(tokens) + options.sampling.max_tokens > limit
            if not too_long or first == len(self.turns):
                break
            first += 1
        if too_long and has_position_table(self.model.learner.model.config):
            raise UsageError(
                f"the prompt has {len(tokens)} tokens and max_tokens is {options.sampling.max_tokens}, but the model "
                f"has {limit} positions: send a shorter message, or lower it with /set max_tokens N"
            )
        return tokens

    def messages(self, first: int, options: ChatOptions, message: str | None = None) -> list[Message]:
        """Return the messages from turn number `first` on; `message`: a new one of the user, at the end."""
        messages = [make_message("system", options.system)] if options.system else []
        for user_message, completion in self.turns[first:]:
            messages += [make_message("user", user_message), make_message("assistant", completion)]
        if message is None:
            return messages
        messages.append(make_message("user", message))
        if options.condition is not None:
            return conditioned(messages, options.condition, options.condition_template)
        return messages


class Chat:
    """Handles lines of the user and writes completions; `handle` returns whether the chat continues."""

    def __init__(
        self, models: Sequence[InferenceModel], options: ChatOptions, write: Write, *, remarks: bool = False
    ) -> None:
        """`remarks`: also write how a completion ended, if that is unusual."""
        names = [model.name for model in models]
        if len(set(names)) < len(names):  # settings are the same for all models
            raise UsageError(f"{names[0]} is given twice; give two different models")
        self.conversations = [Conversation(model, escape_controls(model.name)) for model in models]
        self.options, self.write, self.remarks = options, write, remarks

    def handle(self, line: str) -> bool:
        """Run a command, or send a message to the models. Errors are written, and the chat continues."""
        words = line.strip()
        if words in LEAVE:
            return False
        try:
            if words in CLEAR:
                self.clear()
            elif words.startswith("/"):
                self.command(words)
            elif words:
                self.ask(words)
        except KeyboardInterrupt:
            self.write("\n[stopped]\n")
        except PosttrainError as error:
            self.write(f"{escape_controls(str(error))}\n")
        return True

    def ask(self, message: str) -> None:
        for conversation in self.conversations:
            if len(self.conversations) > 1:
                self.write(f"[{conversation.name}]\n")
            remark = conversation.ask(message, self.options, self.write)
            self.write("\n")
            if self.remarks and remark:
                self.write(f"{remark}\n")

    def clear(self) -> None:
        for conversation in self.conversations:
            conversation.turns.clear()
        self.write("the conversation is cleared\n")

    def command(self, words: str) -> None:
        name, _, rest = words.partition(" ")
        rest = rest.strip()
        if name == "/help":
            self.write(HELP + "\n")
        elif name == "/system":
            self.options = replace(self.options, system=rest)
            self.write(f"system message: {escape_controls(rest) or 'none'}\n")
        elif name == "/set":
            self.set(rest)
        elif name == "/save":
            self.save(rest)
        else:
            raise UsageError(f"unknown command {name}; /help lists the commands")

    def set(self, words: str) -> None:
        if not words:
            self.write("".join(f"{name} is {value}\n" for name, value in changeable_settings(self.options).items()))
            return
        name, _, value = words.replace("=", " ", 1).partition(" ")
        self.options = with_setting(self.options, name, value.strip())
        self.write(f"{name} is {value.strip()}\n")

    def save(self, name: str) -> None:
        """Append one line per model."""
        if not name:
            raise UsageError("name the file: /save chat.jsonl")
        rows = [
            {"model": conversation.model.name, "messages": conversation.messages(0, self.options)}
            for conversation in self.conversations
        ]
        if not self.conversations[0].turns:
            raise UsageError("the conversation is empty")
        path = Path(name).expanduser()
        try:
            with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}") from error
        self.write(f"saved to {path}\n")


def changeable_settings(options: ChatOptions) -> dict[str, Any]:
    """Return the current values of the settings that /set can change."""
    found = {name: getattr(options.sampling, name) for name in NUMBERS}
    found |= {"seed": options.seed, "history_turns": options.history_turns}
    return found | {"condition": "none" if options.condition is None else options.condition}


def with_setting(options: ChatOptions, name: str, value: str) -> ChatOptions:
    """Return the options with one of them changed; UsageError for an unknown name or a wrong value."""
    known = changeable_settings(options)
    if name not in known:
        raise UsageError(f"unknown setting {name!r}; the settings are {', '.join(known)}")
    try:
        if name in NUMBERS:
            sampling: Any = replace(options.sampling, **{name: NUMBERS[name](value)})
            return replace(options, sampling=check_sampling(sampling))
        if name == "condition":
            return replace(options, condition=None if value in ("", "none") else float(value))
        number = int(value)
        if number < 0:
            raise UsageError(f"{name} is {number}; it must be at least 0.")
        return replace(options, seed=number) if name == "seed" else replace(options, history_turns=number)
    except ValueError:
        raise UsageError(f"{name}: {value!r} is not a number") from None
