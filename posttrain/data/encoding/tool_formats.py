"""How chat templates write tool calls and reasoning, read back from what a model generates.

A chat template writes the calls of an assistant message in a format of its family. `format_of` recognises it by the
template; `MessageParser` splits generated text into reasoning, content and calls, in pieces of any size with the same
result; `message_grammar` describes the format as a grammar, for generation that must call a tool.

    <think>They want a sum.</think>Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
    reasoning                      content     call
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.core.files import refuse_constant
from posttrain.data.encoding.chat import REASONING, reasoning_key
from posttrain.data.reading.examples import Message

THINK, END_THINK = "<think>", "</think>"
WRITES_REASONING = re.compile(r"""reasoning_content|split\(\s*['"]</think>""")
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How llguidance writes JSON: as `json.dumps` does, and as templates do. Free white space could go on for ever."""

MOST_LEVELS = 100  # of objects and lists within arguments of a call; templates and clients read them recursively


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model generated; `arguments` is the JSON text of an object."""

    name: str
    arguments: str
    id: str = ""  # if the format has ids, and the model wrote one

    def __post_init__(self) -> None:
        """Raise ValueError for what no client could be sent, or could send back."""
        if not self.name:
            raise ValueError("a call without a name")
        (self.name + self.arguments + self.id).encode()  # fails for half of a surrogate pair


@dataclass(slots=True)
class MessageDelta:
    """What a piece of text adds to a message."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)

    def __add__(self, more: MessageDelta) -> MessageDelta:
        return MessageDelta(self.content + more.content, self.reasoning + more.reasoning, self.calls + more.calls)


Literal = Callable[[str], str]
"""Writes a text of the format in a grammar: as a special token if it is one, as a string otherwise."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format of tool calls."""

    name: str
    begin: tuple[str, ...]
    """Texts that begin calls; `{` only at the start of the content."""
    end: str
    """The text that ends what `begin` began; empty: they end with the message."""
    marks: tuple[str, ...]
    """Texts of the format that are special tokens in some tokenizers."""
    read: Callable[[str], list[ToolCall]]
    """Reads the text from `begin` to `end`, both included; ValueError if it is not in the format."""
    rules: Callable[[Sequence[tuple[str, str]], bool, Literal], str]
    """Returns the rule `rest` of a grammar: calls without the text that begins them (the last of `begin`).

    Its arguments are tools (name, rule of the arguments) and whether several may be called.
    """
    id_length: int = 0
    """Templates accept ids of this length only, of letters and digits; 0: any."""


def read_object(text: str) -> dict[str, Any]:
    found = json.loads(text, parse_constant=refuse_constant)
    if not isinstance(found, dict):
        raise ValueError("not an object")
    return checked(found)


def checked(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of a call; ValueError if others could not read them when they are written as JSON again."""
    level: list[Any] = [arguments]
    for _ in range(MOST_LEVELS):
        nested = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        if not nested:
            return arguments
        level = [inner for values in nested for inner in values]
        if any(isinstance(inner, float) and not math.isfinite(inner) for inner in level):
            raise ValueError("a number is too large")  # 1e999, which would be written as Infinity
    raise ValueError(f"arguments nested deeper than {MOST_LEVELS} levels")


def call_of(found: Any) -> ToolCall:
    """Read a call from an object with a name and arguments, which Llama calls parameters."""
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        raise ValueError("no call")
    arguments = found.get("arguments", found.get("parameters"))
    if isinstance(arguments, str):
        arguments = read_object(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("no arguments")
    name_of_id = found.get("id")
    return ToolCall(found["name"], dump(checked(arguments)), name_of_id if isinstance(name_of_id, str) else "")


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def alternatives(tools: Sequence[tuple[str, str]], before: str, between: str, after: str) -> str:
    """Return grammar alternatives, one per tool: its name between two texts, then its arguments."""
    return " | ".join(f"{dump(before + name + between)} {arguments} {dump(after)}" for name, arguments in tools)


# Qwen, Hermes: <tool_call>\n{"name": "add", "arguments": {...}}\n</tool_call>


def read_hermes(text: str) -> list[ToolCall]:
    return [call_of(read_object(text.removeprefix("<tool_call>").removesuffix("</tool_call>")))]


def hermes_rules(tools: Sequence[tuple[str, str]], several: bool, literal: Literal) -> str:
    body = alternatives(tools, '{"name": "', '", "arguments": ', "}")
    begin, end = literal("<tool_call>"), literal("</tool_call>")
    more = f" ({dump(chr(10))} {begin} inside)*" if several else ""
    return f"rest: inside{more}\ninside: {dump(chr(10))} body {dump(chr(10))} {end}\nbody: {body}\n"


# Llama 3: {"name": "add", "parameters": {...}}, after <|python_tag|> or not; several calls are separated by ";"


def read_llama(text: str) -> list[ToolCall]:
    decoder, calls = json.JSONDecoder(parse_constant=refuse_constant), []
    rest = text.removeprefix("<|python_tag|>").strip()
    while rest:
        found, end = decoder.raw_decode(rest)
        calls.append(call_of(found))
        rest = rest[end:].strip().removeprefix(";").strip()
    if not calls:
        raise ValueError("no call")
    return calls


def llama_rules(tools: Sequence[tuple[str, str]], several: bool, literal: Literal) -> str:
    body = alternatives(tools, '"name": "', '", "parameters": ', "}")
    return f"rest: {body}\n"  # its templates write one call


# Mistral: [TOOL_CALLS][{"name": "add", "arguments": {...}, "id": "123456789"}]


def read_mistral(text: str) -> list[ToolCall]:
    found = json.loads(text.removeprefix("[TOOL_CALLS]"), parse_constant=refuse_constant)
    if not isinstance(found, list) or not found:
        raise ValueError("not a list of calls")
    return [call_of(call) for call in found]


def mistral_rules(tools: Sequence[tuple[str, str]], several: bool, literal: Literal) -> str:
    body = alternatives(tools, '{"name": "', '", "arguments": ', ', "id": "')
    more = f" ({dump(', ')} call)*" if several else ""
    close = dump('"}')
    return f'rest: "[" call{more} "]"\ncall: body ID {close}\nbody: {body}\nID: /[a-zA-Z0-9]{{9}}/\n'


# Mistral since 2025: [TOOL_CALLS]add[ARGS]{...}


def read_mistral_args(text: str) -> list[ToolCall]:
    calls = []
    for part in text.split("[TOOL_CALLS]")[1:]:
        name, found, arguments = part.partition("[ARGS]")
        if not found:
            raise ValueError("no arguments")
        name, _, name_of_id = name.partition("[CALL_ID]")
        calls.append(ToolCall(name.strip(), dump(read_object(arguments)), name_of_id.strip()))
    return calls


def mistral_args_rules(tools: Sequence[tuple[str, str]], several: bool, literal: Literal) -> str:
    body = " | ".join(f"{dump(name)} {literal('[ARGS]')} {arguments}" for name, arguments in tools)
    more = f" ({literal('[TOOL_CALLS]')} body)*" if several else ""
    return f"rest: body{more}\nbody: {body}\n"


# DeepSeek V3 and R1: ...call▁begin｜>function<｜tool▁sep｜>add\n```json\n{...}\n```<｜tool▁call▁end｜>...
# DeepSeek V3.1:      ...call▁begin｜>add<｜tool▁sep｜>{...}<｜tool▁call▁end｜>...

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
FENCED = re.compile(r"\s*([^\s`]+)\s*```json\s*(.*?)\s*```\s*", re.DOTALL)


def read_deepseek(text: str) -> list[ToolCall]:
    calls = []
    for part in text.removeprefix(CALLS_BEGIN).removesuffix(CALLS_END).split(CALL_BEGIN)[1:]:
        head, found, body = part.partition(CALL_END)[0].partition(SEPARATOR)
        if not found:
            raise ValueError("no name")
        fenced = FENCED.fullmatch(body)
        name, arguments = (fenced[1], fenced[2]) if fenced else (head.strip(), body)
        calls.append(ToolCall(name, dump(read_object(arguments))))
    if not calls:
        raise ValueError("no call")
    return calls


def deepseek_rules(tools: Sequence[tuple[str, str]], several: bool, literal: Literal, fenced: bool = True) -> str:
    separator, (open_fence, close_fence) = literal(SEPARATOR), ("\n```json\n", "\n```")
    bodies = [
        f"{dump('function')} {separator} {dump(name + open_fence)} {arguments} {dump(close_fence)}"
        if fenced
        else f"{dump(name)} {separator} {arguments}"
        for name, arguments in tools
    ]
    gap = dump("\n") + " " if fenced else ""
    more = f" ({gap}call)*" if several else ""
    return (
        f"rest: call{more} {literal(CALLS_END)}\n"
        f"call: {literal(CALL_BEGIN)} body {literal(CALL_END)}\nbody: {' | '.join(bodies)}\n"
    )


def deepseek_v31_rules(tools: Sequence[tuple[str, str]], several: bool, literal: Literal) -> str:
    return deepseek_rules(tools, several, literal, fenced=False)


HERMES_MARKS = ("<tool_call>", "</tool_call>")
DEEPSEEK_MARKS = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)
MISTRAL_MARKS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
HERMES = ToolFormat("hermes", ("<tool_call>",), "</tool_call>", HERMES_MARKS, read_hermes, hermes_rules)
LLAMA = ToolFormat("llama3", ("<|python_tag|>", "{"), "", ("<|python_tag|>",), read_llama, llama_rules)
MISTRAL = ToolFormat("mistral", ("[TOOL_CALLS]",), "", MISTRAL_MARKS, read_mistral, mistral_rules, 9)
MISTRAL_ARGS = ToolFormat(
    "mistral_args", ("[TOOL_CALLS]",), "", MISTRAL_MARKS, read_mistral_args, mistral_args_rules, 9
)
DEEPSEEK = ToolFormat("deepseek3", (CALLS_BEGIN,), CALLS_END, DEEPSEEK_MARKS, read_deepseek, deepseek_rules)
DEEPSEEK_V31 = ToolFormat("deepseek3.1", (CALLS_BEGIN,), CALLS_END, DEEPSEEK_MARKS, read_deepseek, deepseek_v31_rules)
FORMATS = (HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, DEEPSEEK, DEEPSEEK_V31)


def format_of(chat_template: Any) -> ToolFormat | None:
    """Return the format in which a chat template writes tool calls; None if it writes none, or in an unknown format."""
    template = str(chat_template or "")
    if "tool_calls" not in template:
        return None
    if CALLS_BEGIN in template:
        return DEEPSEEK if "```json" in template else DEEPSEEK_V31
    if "[TOOL_CALLS]" in template:
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    if "<tool_call>" in template:
        xml = "<function=" in template or "<arg_key>" in template  # Qwen3-Coder, GLM
        return None if xml else HERMES
    return LLAMA if '"parameters"' in template else None


def writes_reasoning(chat_template: Any) -> bool:
    """Whether a chat template treats text in <think> as reasoning, not as content."""
    return WRITES_REASONING.search(str(chat_template or "")) is not None


def without_dropped_reasoning(messages: list[Message], chat_template: Any) -> list[Message]:
    """Return a prompt's messages without reasoning_content, if the template leaves out the thinking of messages anyway.

    Others write it; those that know nothing of reasoning refuse it (ChatRenderer).
    """
    template = str(chat_template or "")
    if not writes_reasoning(template) or reasoning_key(template):
        return messages
    return [{key: value for key, value in message.items() if key != REASONING} for message in messages]


class MessageParser:
    """Splits the text of one completion into reasoning, content and tool calls, as it arrives.

    White space at the borders belongs to the format. Text that begins like a call and is not one is content.
    """

    def __init__(
        self, tools: ToolFormat | None, *, thinks: bool = False, in_reasoning: bool = False, several: bool = True
    ) -> None:
        """`thinks`: text in <think> is reasoning; `in_reasoning`: the prompt ended with <think>.

        `several`: without it calls after the first are left out.
        """
        self.tools, self.several = tools, several
        self.state = "reasoning" if in_reasoning else "start" if thinks else "content"
        self.held = ""  # text that is not decided yet
        self.gap = ""  # white space before a call
        self.has_content = self.has_reasoning = False
        self.calls = 0

    def add(self, text: str) -> MessageDelta:
        """Return what is certain now."""
        self.held += text
        delta = MessageDelta()
        while self.step(delta, final=False):
            pass
        return delta

    def finish(self) -> MessageDelta:
        """Return the rest."""
        delta = MessageDelta()
        while self.step(delta, final=True):
            pass
        return delta

    def step(self, delta: MessageDelta, *, final: bool) -> bool:
        """Take what is decided of the held text; returns whether the state changed, so that more may be decided."""
        return bool(getattr(self, f"in_{self.state}")(delta, final))

    def in_start(self, delta: MessageDelta, final: bool) -> bool:
        text = self.held.lstrip()
        if not final and THINK.startswith(text):  # also if it is empty
            return False
        thinks = text.startswith(THINK)
        self.state, self.held = ("reasoning", text.removeprefix(THINK)) if thinks else ("content", self.held)
        return True

    def in_reasoning(self, delta: MessageDelta, final: bool) -> bool:
        if not self.has_reasoning:
            self.held = self.held.lstrip("\n")
        inside, found, rest = self.held.partition(END_THINK)
        if found:
            delta.reasoning += inside.rstrip()
            self.state, self.held = "after_reasoning", rest
            return True
        size = len(self.held) - (0 if final else undecided(self.held, (END_THINK,)))
        delta.reasoning += self.held[:size]
        self.has_reasoning = self.has_reasoning or size > 0
        self.held = self.held[size:]
        return False

    def in_after_reasoning(self, delta: MessageDelta, final: bool) -> bool:
        self.held = self.held.lstrip()
        if not self.held:
            return False
        self.state = "content"
        return True

    def in_content(self, delta: MessageDelta, final: bool) -> bool:
        begins = self.tools.begin if self.tools is not None else ()
        found = [at for text in begins if (at := self.find(text)) >= 0]
        if found:
            text, self.held, self.state = self.held[: min(found)], self.held[min(found) :], "call"
            self.gap = text[len(text.rstrip()) :]
            self.emit(delta, text.rstrip())
            return True
        size = len(self.held)
        if begins and not final:
            size -= undecided(self.held, [text for text in begins if text != "{"])
        self.emit(delta, self.held[:size])
        self.held = self.held[size:]
        return False

    def find(self, begin: str) -> int:
        if begin != "{":
            return self.held.find(begin)
        stripped = self.held.lstrip()
        return len(self.held) - len(stripped) if stripped.startswith("{") and not self.has_content else -1

    def emit(self, delta: MessageDelta, text: str) -> None:
        if text.strip():
            self.has_content = True
        elif self.calls:  # white space after a call
            return
        delta.content += text

    def in_call(self, delta: MessageDelta, final: bool) -> bool:
        assert self.tools is not None
        mark, end = self.tools.end, len(self.held)
        if mark and mark in self.held:
            end = self.held.index(mark) + len(mark)
        elif not final:
            return False
        text, self.held = self.held[:end], self.held[end:]
        self.state = "content"
        try:
            calls = self.tools.read(text)
        except (ValueError, RecursionError):
            self.has_content = True  # so that a brace is not taken for a call again
            delta.content += self.gap + text
            return True
        if not self.several:
            calls = calls[: 1 - min(self.calls, 1)]
        self.calls += len(calls)
        delta.calls += calls
        return True


def undecided(text: str, marks: Sequence[str]) -> int:
    """Count the characters at the end of a text that may belong to a mark, or are white space before one."""
    beginning = max(
        (size for mark in marks for size in range(1, min(len(mark), len(text) + 1)) if text.endswith(mark[:size])),
        default=0,
    )
    before = text[: len(text) - beginning]
    return beginning + len(before) - len(before.rstrip())


def parse_message(text: str, tools: ToolFormat | None, **options: bool) -> MessageDelta:
    """Split a whole text."""
    parser = MessageParser(tools, **options)
    return parser.add(text) + parser.finish()


# Grammars


def message_grammar(
    format: ToolFormat | None,
    tools: Sequence[tuple[str, dict[str, Any]]],
    *,
    literal: Literal,
    schema: dict[str, Any] | None = None,
    text: bool = False,
    several: bool = True,
    in_reasoning: bool = False,
) -> str:
    """Return a grammar in llguidance's Lark syntax for messages that call tools, or hold JSON of a schema.

    `tools`: names and schemas of the arguments; none: no calls. `text`: free text is allowed, alone or before calls.
    """
    rules, options = "", []
    if tools:
        assert format is not None
        arguments = [(name, f"arguments{number}") for number, (name, _) in enumerate(tools)]
        rules += f"calls: {literal(format.begin[-1])} rest\n" + format.rules(arguments, several, literal)
        for number, (_, parameters) in enumerate(tools):
            rules += f"arguments{number}: %json {dump(styled(parameters))}\n"
        options.append("calls")
    if schema is not None:
        rules += f"json: %json {dump(styled(schema))}\n"
        options.append("json")
    if text:
        assert format is not None
        more, text_rules = free_text(format.begin[-1], literal)
        rules += text_rules
        options += more
    start = " | ".join(options)
    if in_reasoning:
        rules += ends_with("reasoning", literal(END_THINK))
        start = f"reasoning SPACE ({start})"
        rules += "SPACE: /[ \\n]{0,2}/\n"
    return f"start: {start}\n{rules}"


def free_text(begin: str, literal: Literal) -> tuple[list[str], str]:
    """Return alternatives, and their rules, for text without calls, and for calls after text."""
    mark = literal(begin)
    if begin == "{":
        return ["TEXT"], "TEXT: /[^{\\s](?s:.*)/\n"
    if is_special_token(mark):
        return ["TEXT", "TEXT calls"], "TEXT: /(?s:.+)/\n"
    escaped = re.escape(begin).replace("/", "\\/")
    text = f"TEXT: /(?s:.+)/ & ~/(?s:.*){escaped}(?s:.*)/\n"
    return ["TEXT", "before rest"], text + ends_with("before", mark)


def ends_with(rule: str, mark: str) -> str:
    """Return a rule for text up to and including a mark."""
    return f"{rule}: /(?s:.*)/ {mark}\n" if is_special_token(mark) else f"{rule}[suffix={mark}]: /(?s:.*)/\n"


def is_special_token(mark: str) -> bool:
    return mark.startswith("<[")


def styled(schema: dict[str, Any]) -> dict[str, Any]:
    return {**schema, "x-guidance": JSON_STYLE}
