"""Conversations -> segments of text, of which exactly the assistant's words and their end-of-turn are trained.

A chat template is a program; what it wrote and what the assistant said can look alike. So each shape of conversation is
rendered once with marks instead of contents: that shows where the contents go. Then every row is rendered as it is, and
must come out as the template's text with the contents put in. Where it does not, the row is refused.

    <s>[INST] Hi [/INST]      | Hello! </s>      | <s>[INST] Bye [/INST]    | Bye! </s>
    prompt: not trained       | trained          | not trained              | trained

A response begins where the generation prompt ends: what a model sees when it is to answer is what it was trained on.
It ends with the end-of-turn. Where that is no token but mere text, or nothing, the end token comes after the last one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from posttrain.core.errors import DataError, UsageError
from posttrain.data.encoding.templates import turn_ends
from posttrain.data.encoding.tokens import Segment, TextPart, TokenEncoder, any_of
from posttrain.data.reading.examples import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = re.compile("xMARK([0-9]+)x")
# Some templates write the date. It must not change from day to day, or no run could be resumed tomorrow.
TODAY = datetime(2024, 7, 26)


@dataclass(frozen=True, slots=True)
class Outline:
    """A segment with message numbers in the places of their contents."""

    pieces: tuple[str | int, ...]
    trained: bool = False
    end: bool = False

    def fill(self, contents: Sequence[str]) -> Segment:
        parts = [TextPart(contents[p], False) if isinstance(p, int) else TextPart(p, True) for p in self.pieces]
        return Segment(tuple(parts), self.trained, self.end)


@dataclass(frozen=True, slots=True)
class Plan:
    """How conversations of one shape are cut into segments."""

    outlines: tuple[Outline, ...]
    prompt_length: int  # so many outlines are what the model sees before its last answer
    tail: str  # what the template writes after the last end-of-turn; nothing that is trained comes after it


class ChatRenderer:
    """Cuts conversations into segments, by the tokenizer's chat template or, of mere strings, without any."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, encoder: TokenEncoder) -> None:
        self.tokenizer = tokenizer
        self.encoder = encoder
        self.is_plain = not tokenizer.chat_template
        self.ends = self._end_pattern()
        self._plans: dict[tuple[tuple[str, ...], int], Plan] = {}  # by roles and the first answer to train
        self._prompt_plans: dict[tuple[str, ...], Plan] = {}

    def segments(
        self, messages: list[Message], answers_from: int, plain: bool, origin: str, tools: list[Any] | None = None
    ) -> list[Segment]:
        """The conversation in segments; the assistant's messages from number `answers_from` on are trained."""
        if self._has_tools(messages, tools, origin):
            return self._by_prefixes(messages, answers_from, self._render(messages, origin, tools=tools), origin, tools)
        if not self.is_plain:
            return self._by_chat_template(messages, answers_from, origin)
        if plain:
            prompt, answer = messages  # two strings in the row
            return [_said(prompt), _said(answer, trained=True, end=True)]
        return _no_template(origin)

    def prompt(
        self, messages: list[Message], plain: bool, origin: str, tools: list[Any] | None = None
    ) -> list[Segment]:
        """What the model sees when it is to answer: the messages and the beginning of its turn."""
        if self._has_tools(messages, tools, origin):
            self._refuse_quotes(messages, origin, tools)
            return [Segment((TextPart(self._render(messages, origin, generate=True, tools=tools), True),))]
        if not self.is_plain:
            rendered = self._render(messages, origin, generate=True)
            filled = self._fill(self._asking(messages, origin), messages, rendered)
            if filled is None:
                self._refuse_quotes(messages, origin)
                return [Segment((TextPart(rendered, True),))]
            return filled
        if plain:
            return [_said(message) for message in messages]
        return _no_template(origin)

    def continuation(self, messages: list[Message], reply: int, ended: str, origin: str) -> Segment:
        """All that comes between message number `reply`, which the model wrote, and its next: to be appended as it is.

        `ended` is the end-of-turn that the model wrote itself, as text; empty if it wrote none.
        """
        if self.is_plain:
            return Segment(tuple(TextPart(message["content"], False) for message in messages[reply + 1 :]))
        # What was said up to here is never written again: marks stand for it, so that no template can look into it.
        told = [*_marks(messages[: reply + 1]), *messages[reply + 1 :]]
        rendered = self._render(told, origin, generate=True)
        pieces = self._asking(messages, origin).outlines[0].pieces
        if pieces.count(reply) != 1:
            raise UsageError(f"{origin}: the chat template writes the assistant's message {reply} more than once")
        contents = _match(pieces, [message["content"] for message in told], rendered)
        if contents is None:
            self._refuse_quotes(messages[reply + 1 :], origin)
            contents, pieces = [], (reply, rendered.partition(f"xMARK{reply}x")[2])
        at = pieces.index(reply)
        after = str(pieces[at + 1])
        if ended:
            space, written, rest = after.partition(ended)
            after = rest if written and not space.strip() else after
        return Outline((after, *pieces[at + 2 :])).fill(contents)

    # The tokenizer's chat template

    def _by_chat_template(self, messages: list[Message], answers_from: int, origin: str) -> list[Segment]:
        key = (tuple(message["role"] for message in messages), answers_from)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._plan(messages, answers_from, origin)
        rendered = self._render(messages, origin)
        filled = self._fill(plan, messages, rendered)
        if filled is None:
            return self._by_prefixes(messages, answers_from, rendered, origin)
        prompt = self._render(messages[: _answers(messages, 0)[-1]], origin, generate=True)
        if prompt != "".join([segment.text for segment in filled[: plan.prompt_length]]):
            raise DataError(f"{origin}: the chat template's generation prompt depends on the text of this row")
        return filled

    def _asking(self, messages: list[Message], origin: str) -> Plan:
        """How conversations of this shape look to a model that is to answer: one outline."""
        roles = tuple(message["role"] for message in messages)
        if roles not in self._prompt_plans:
            pieces = self._marked(messages, origin, generate=True)
            self._prompt_plans[roles] = Plan((Outline(tuple(pieces)),), prompt_length=1, tail="")
        return self._prompt_plans[roles]

    def _plan(self, messages: list[Message], answers_from: int, origin: str) -> Plan:
        pieces = self._marked(messages, origin)
        places = {piece: at for at, piece in enumerate(pieces) if isinstance(piece, int)}
        answers = _answers(messages, answers_from)
        for index in answers:
            if pieces.count(index) != 1:
                raise UsageError(f"{origin}: the chat template writes the assistant's message {index} more than once")
        gaps = self._gaps(messages, {index: str(pieces[places[index] - 1]) for index in answers}, origin)
        outlines: list[Outline] = []
        done = prompt_length = 0
        for index in answers:
            at, gap = places[index], gaps[index]
            header, after = str(pieces[at - 1]), str(pieces[at + 1])
            outlines.append(Outline((*pieces[done : at - 1], header.removesuffix(gap))))
            prompt_length = len(outlines)
            if gap.strip():  # words that the template puts into the assistant's mouth are not the assistant's
                outlines.append(Outline((gap,)))
                gap = ""
            end_of_turn, end = self._end_of_turn(after, last=at + 2 == len(pieces), origin=origin, index=index)
            outlines.append(Outline((gap, index, end_of_turn), trained=True, end=end))
            pieces[at + 1] = after.removeprefix(end_of_turn)
            done = at + 1
        return Plan(tuple(outlines), prompt_length, "".join(map(str, pieces[done:])))

    def _marked(self, messages: list[Message], origin: str, generate: bool = False) -> list[str | int]:
        """The rendering of such a conversation, as text of the template and numbers of messages in turn."""
        pieces: list[str | int] = list(MARK.split(self._render(_marks(messages), origin, generate)))
        pieces[1::2] = [int(number) for number in pieces[1::2]]
        for index, message in enumerate(messages):
            if index not in pieces:
                raise DataError(f"{origin}: the chat template leaves out message {index} (role {message['role']})")
        return pieces

    def _gaps(self, messages: list[Message], headers: dict[int, str], origin: str) -> dict[int, str]:
        """For each answer, what the template writes between the generation prompt and the answer.

        `headers` has the template's text before each. The last answer decides; a template may rewrite the past.
        """
        marks = _marks(messages)
        rendered = self._render(marks, origin)
        known: dict[str, str] = {}
        for index, header in reversed(headers.items()):
            if header in known:
                continue
            before = rendered[: rendered.index(marks[index]["content"])]
            prompt = self._render(marks[:index], origin, generate=True)
            candidates = [before[len(prompt) :]] if before.startswith(prompt) else list(known.values())
            gap = next((gap for gap in candidates if header.endswith(gap)), None)
            if gap is None:
                raise UsageError(
                    f"{origin}: no exact mask: with this chat template a model is asked to answer after "
                    f"{prompt[-40:]!r}, but in a conversation the answer comes after {before[-40:]!r}. "
                    "Use another data.chat_template"
                )
            known[header] = gap
        return {index: known[header] for index, header in headers.items()}

    def _end_pattern(self) -> re.Pattern[str]:
        """An end-of-turn with white space in front: a token, or a text that the template is known to end turns with."""
        texts = [text for text in turn_ends(self.tokenizer.chat_template) if text not in self.encoder.whole]
        eos = re.escape(self.tokenizer.eos_token) if self.tokenizer.eos_token else "(?!)"
        token = any_of(self.encoder.whole).pattern
        return re.compile(rf"\s*(?:(?P<text>{any_of(texts).pattern})(?P<eos>\s*{eos})?|{token})")

    def _end_of_turn(self, after: str, last: bool, origin: str, index: int) -> tuple[str, bool]:
        """What ends the turn, empty where the conversation just ends; and whether the end token must follow."""
        match = self.ends.match(after)
        if match:
            return match.group(), last and match["text"] is not None and match["eos"] is None
        if last and not after.strip():
            return "", True
        raise UsageError(
            f"{origin}: no exact mask: the chat template writes no end-of-turn token after the assistant's message "
            f"{index}; what follows is {after[:40]!r}. Use another data.chat_template"
        )

    def _fill(self, plan: Plan, messages: list[Message], rendered: str) -> list[Segment] | None:
        """The plan with the contents, as they are or without the white space around them, if that is the rendering."""
        contents = [message["content"] for message in messages]
        filled = [outline.fill(contents) for outline in plan.outlines]
        if "".join([segment.text for segment in filled]) + plan.tail == rendered:
            return filled
        pieces = [piece for outline in plan.outlines for piece in outline.pieces] + [plan.tail]
        stripped = _match(pieces, contents, rendered)
        return None if stripped is None else [outline.fill(stripped) for outline in plan.outlines]

    def _by_prefixes(
        self,
        messages: list[Message],
        answers_from: int,
        rendered: str,
        origin: str,
        tools: list[Any] | None = None,
    ) -> list[Segment]:
        """For templates that look into contents (as those with <think> do) and for tools: each answer by its prompt."""
        self._refuse_quotes(messages, origin, tools)
        segments: list[Segment] = []
        done = 0
        for index in _answers(messages, answers_from):
            prompt = self._render(messages[:index], origin, generate=True, tools=tools)
            if not rendered.startswith(prompt):
                _rewritten(messages, index, origin)
            rest = rendered[len(prompt) :]
            called = "tool_calls" in messages[index]
            if called:
                answer = self._calls(messages[: index + 1], prompt, origin, tools)
            else:
                space = rest[: len(rest) - len(rest.lstrip())]
                spellings = [gap + text for text in _spellings(messages[index]["content"]) for gap in ("", space)]
                answer = next((text for text in spellings if rest.startswith(text)), None)
            if answer is None or not rest.startswith(answer):
                _rewritten(messages, index, origin)
            last = index == len(messages) - 1
            end_of_turn, end = self._end_of_turn(rest.removeprefix(answer), last, origin, index)
            segments.append(Segment((TextPart(rendered[done : len(prompt)], True),)))
            segments.append(Segment((TextPart(answer, called), TextPart(end_of_turn, True)), trained=True, end=end))
            done = len(prompt) + len(answer + end_of_turn)
        return segments

    def _calls(self, messages: list[Message], prompt: str, origin: str, tools: list[Any] | None) -> str | None:
        """Calls of tools as the template writes them: all between the prompt and the end-of-turn of plain answers."""
        asked = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
        plain = self._render([*messages[: asked + 1], {"role": "assistant", "content": "xMARK0x"}], origin, tools=tools)
        end_of_turn, _ = self._end_of_turn(plain.partition("xMARK0x")[2], True, origin, len(messages) - 1)
        written = self._render(messages, origin, tools=tools)
        if not written.startswith(prompt):
            return None
        if not end_of_turn:
            return written[len(prompt) :].rstrip()
        called, found, _ = written[len(prompt) :].rpartition(end_of_turn)
        return called if found else None

    def _has_tools(self, messages: list[Message], tools: list[Any] | None, origin: str) -> bool:
        """Whether there is more than roles and contents. What the template has no place for is refused."""
        template = str(self.tokenizer.chat_template)
        no_place = "the chat template has no place for it; write it as text"
        if tools and "tools" not in template:
            raise DataError(f"{origin}: tools: {no_place}")
        if not tools and not any(len(message) > 2 for message in messages):
            return False
        for index, message in enumerate(messages):
            if "tool_calls" in message and "tool_calls" not in template:
                raise DataError(f"{origin}: message {index}: tool_calls: {no_place}")
        return not self.is_plain

    def _refuse_quotes(self, messages: list[Message], origin: str, tools: list[Any] | None = None) -> None:
        texts = {f"message {i}": f"{m['content']}{m.get('tool_calls', '')}" for i, m in enumerate(messages)}
        for place, text in ({"tools": str(tools)} | texts).items():
            if found := self.encoder.control.search(text):
                raise DataError(
                    f"{origin}: {place} contains {found.group()!r}, and the chat template changes what it is given: "
                    "what is text and what is the control token cannot be told apart"
                )

    def _render(
        self, messages: list[Message], origin: str, generate: bool = False, tools: list[Any] | None = None
    ) -> str:
        from jinja2.exceptions import TemplateError

        try:
            rendered = self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=generate, strftime_now=TODAY.strftime
            )
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            raise DataError(f"{origin}: the chat template refuses the conversation: {error}") from error
        assert isinstance(rendered, str)
        return rendered


def _marks(messages: Sequence[Message]) -> list[Message]:
    return [{"role": message["role"], "content": f"xMARK{index}x"} for index, message in enumerate(messages)]


def _answers(messages: Sequence[Message], answers_from: int) -> list[int]:
    return [i for i, message in enumerate(messages) if i >= answers_from and message["role"] == "assistant"]


def _said(message: Message, trained: bool = False, end: bool = False) -> Segment:
    return Segment((TextPart(message["content"], False),), trained, end)


def _spellings(content: str) -> list[str]:
    """A content as templates write it: as it is, or with white space taken off."""
    return list(dict.fromkeys((content, content.rstrip(), content.lstrip(), content.strip())))


def _match(pieces: Sequence[str | int], contents: Sequence[str], rendered: str) -> list[str] | None:
    """The spelling of each content with which the pieces make up the rendering; None if there is none."""
    chosen = list(contents)
    at = 0
    for number, piece in enumerate(pieces):
        if isinstance(piece, int):
            following = pieces[number + 1]
            assert isinstance(following, str)
            fitting = [text for text in _spellings(contents[piece]) if rendered.startswith(text + following, at)]
            if not fitting:
                return None
            chosen[piece] = fitting[0]
            at += len(fitting[0])
        elif rendered.startswith(piece, at):
            at += len(piece)
        else:
            return None
    return chosen if at == len(rendered) else None


def _no_template(origin: str) -> NoReturn:
    raise DataError(
        f"{origin}: a conversation, but the tokenizer has no chat template: give data.chat_template (chatml, say, "
        'or "Human: {}\\nAssistant: "), or a model with a chat template'
    )


def _rewritten(messages: Sequence[Message], index: int, origin: str) -> NoReturn:
    raise DataError(
        f"{origin}: no exact mask: the chat template changes the text of message {index} "
        f"(role {messages[index]['role']}) or of one before it"
    )
