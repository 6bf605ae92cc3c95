"""Split conversations into segments, of which exactly the assistant's text and its end-of-turn are trained on.

A chat template is a program, and its own text can look like the assistant's. So each sequence of roles is rendered once
with markers instead of contents, which shows where the contents go. Then every conversation is rendered as it is, and
the result must be the template's text with the contents inserted. Where it is not, the example is refused.

    <s>[INST] Hi [/INST]      | Hello! </s>      | <s>[INST] Bye [/INST]    | Bye! </s>
    prompt: not trained       | trained          | not trained              | trained

A completion begins where the generation prompt ends, so that the prompts of training and generation are equal. It ends
with the end-of-turn. Where that is plain text or empty, the end-of-sequence token is appended to the last completion.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

from posttrain.core.errors import DataError, UsageError
from posttrain.core.lazy import PreTrainedTokenizerBase
from posttrain.data.encoding.templates import turn_ends
from posttrain.data.encoding.tokens import Segment, TextPart, TokenEncoder, any_of
from posttrain.data.reading.examples import Message

MARKER = re.compile("xMARK([0-9]+)x")
REPLY_MARK = "xREPLYx"
REASONING = "reasoning_content"
REASONING_KEYS = (REASONING, "thinking")  # as templates call it
# Some templates write the date. It is fixed, as a run could not be resumed on another day otherwise.
TODAY = datetime(2024, 7, 26)


@dataclass(frozen=True, slots=True)
class SegmentTemplate:
    """A segment with message numbers in place of the contents."""

    pieces: tuple[str | int, ...]
    trained: bool = False
    end: bool = False

    def fill(self, contents: Sequence[str]) -> Segment:
        parts = [TextPart(contents[p], False) if isinstance(p, int) else TextPart(p, True) for p in self.pieces]
        return Segment(tuple(parts), self.trained, self.end)


@dataclass(frozen=True, slots=True)
class RenderPlan:
    """How conversations with the same roles are split into segments."""

    segment_templates: tuple[SegmentTemplate, ...]
    prompt_length: int  # number of segments before the last completion
    tail: str  # text of the template after the last end-of-turn; not part of a segment


class ChatRenderer:
    """Splits conversations into segments by the tokenizer's chat template; plain strings need none."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, encoder: TokenEncoder) -> None:
        self.tokenizer = tokenizer
        self.encoder = encoder
        self.is_plain = not tokenizer.chat_template
        self.ends = self._end_pattern()
        self._plans: dict[tuple[tuple[str, ...], tuple[int, ...]], RenderPlan] = {}  # by roles and trained messages
        self._prompt_plans: dict[tuple[str, ...], RenderPlan] = {}

    def segments(
        self, messages: list[Message], train_from: int, plain: bool, origin: str, tools: list[Any] | None = None
    ) -> list[Segment]:
        """Split a conversation; the assistant's messages from number `train_from` on are trained on.

        A message with `train: False` is not, and what comes after the last one that is trained on is left out.
        """
        trained = [i for i in _assistant_messages(messages, train_from) if messages[i].get("train", True)]
        messages = self._for_template(messages[: trained[-1] + 1], origin)
        if self._has_tools(messages, tools, origin):
            return self._split_by_prefixes(
                messages, trained, self._render(messages, origin, tools=tools), origin, tools
            )
        if not self.is_plain:
            return self._split_by_template(messages, trained, origin)
        if plain:
            prompt, completion = messages  # two strings
            return [_content_segment(prompt), _content_segment(completion, trained=True, end=True)]
        return _raise_no_template(origin)

    def prompt(
        self, messages: list[Message], plain: bool, origin: str, tools: list[Any] | None = None
    ) -> list[Segment]:
        """Return the segments of a prompt: the messages and the generation prompt."""
        messages = self._for_template(messages, origin)
        if self._has_tools(messages, tools, origin):
            self._refuse_control_tokens(messages, origin, tools)
            return [Segment((TextPart(self._render(messages, origin, generate=True, tools=tools), True),))]
        if not self.is_plain:
            rendered = self._render(messages, origin, generate=True)
            filled = self._fill(self._prompt_plan(messages, origin), messages, rendered)
            if filled is None:
                self._refuse_control_tokens(messages, origin)
                return [Segment((TextPart(rendered, True),))]
            return filled
        if plain:
            return [_content_segment(message) for message in messages]
        return _raise_no_template(origin)

    def continuation(
        self, messages: list[Message], reply: int, ended: str, origin: str, tools: list[Any] | None = None
    ) -> Segment:
        """Return the text between message `reply`, which the model generated, and its next one, to be appended.

        `ended` is the end-of-turn that the model generated, as text; empty if it generated none.
        """
        if self._has_tools(messages, tools, origin):
            return self._continuation_with_tools(messages, reply, ended, origin, tools)
        if self.is_plain:
            return Segment(tuple(TextPart(message["content"], False) for message in messages[reply + 1 :]))
        # Markers replace the messages so far: their tokens exist, and the template must not depend on their text.
        shown = [*_with_markers(messages[: reply + 1]), *messages[reply + 1 :]]
        rendered = self._render(shown, origin, generate=True)
        pieces = self._prompt_plan(messages, origin).segment_templates[0].pieces
        if pieces.count(reply) != 1:
            raise UsageError(f"{origin}: the chat template writes message {reply} of the assistant more than once")
        contents = _match_contents(pieces, [message["content"] for message in shown], rendered)
        if contents is None:
            self._refuse_control_tokens(messages[reply + 1 :], origin)
            contents, pieces = [], (reply, rendered.partition(f"xMARK{reply}x")[2])
        at = pieces.index(reply)
        after = _without_end(str(pieces[at + 1]), ended)
        return SegmentTemplate((after, *pieces[at + 2 :])).fill(contents)

    def _continuation_with_tools(
        self, messages: list[Message], reply: int, ended: str, origin: str, tools: list[Any] | None
    ) -> Segment:
        """Return the text after a reply where messages have tool calls or reasoning, or there are tools.

        A mark in the reply shows where it is: in its content, or in the arguments of its last call. What the template
        writes between the mark and the end-of-turn belongs to the reply, which has it already.
        """
        messages = self._for_template(messages, origin)
        before, after = messages[:reply], messages[reply + 1 :]
        marked = _with_reply_mark(messages[reply])
        closing = self._render([*before, marked], origin, tools=tools).rpartition(REPLY_MARK)[2]
        plain = self._render([*before, {"role": "assistant", "content": REPLY_MARK}], origin, tools=tools)
        end_of_turn = plain.rpartition(REPLY_MARK)[2]
        if not closing.endswith(end_of_turn):
            raise UsageError(f"{origin}: the chat template ends message {reply}, with tool calls, in another way")
        closing = closing.removesuffix(end_of_turn) if end_of_turn else closing
        texts = [
            self._render([*before, marked, *following], origin, generate=True, tools=tools)
            for following in (after, [{**m, "content": f"xMARK{i}x"} for i, m in enumerate(after)])
        ]
        if any(text.count(REPLY_MARK) != 1 for text in texts):
            raise UsageError(f"{origin}: the chat template does not write message {reply} of the assistant once")
        rendered, shape = (text.partition(REPLY_MARK)[2] for text in texts)
        if not (rendered.startswith(closing) and shape.startswith(closing)):
            raise UsageError(f"{origin}: what the chat template writes of message {reply} depends on what follows")
        pieces: list[str | int] = list(MARKER.split(shape[len(closing) :]))
        pieces[1::2] = [int(str(number)) for number in pieces[1::2]]
        contents = _match_contents(pieces, [message["content"] for message in after], rendered[len(closing) :])
        if contents is None:
            self._refuse_control_tokens(after, origin)
            return Segment((TextPart(_without_end(rendered[len(closing) :], ended), True),))
        return SegmentTemplate((_without_end(str(pieces[0]), ended), *pieces[1:])).fill(contents)

    # The tokenizer's chat template

    def _for_template(self, messages: list[Message], origin: str) -> list[Message]:
        """Return messages as the template reads them: the reasoning under the template's own name for it."""
        if not any("train" in message or REASONING in message for message in messages):
            return messages
        template = str(self.tokenizer.chat_template)
        found: list[Message] = []
        for index, message in enumerate(messages):
            shown = {key: value for key, value in message.items() if key not in ("train", REASONING)}
            if REASONING in message:
                key = reasoning_key(template)
                if key is None:
                    raise DataError(
                        f"{origin}: message {index} has {REASONING}, which the chat template does not write: put it "
                        "into content, for example as <think>...</think>, or use another data.chat_template"
                    )
                shown[key] = message[REASONING]
            found.append(shown)
        return found

    def _split_by_template(self, messages: list[Message], trained: Sequence[int], origin: str) -> list[Segment]:
        key = (tuple(message["role"] for message in messages), tuple(trained))
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._plan(messages, trained, origin)
        rendered = self._render(messages, origin)
        filled = self._fill(plan, messages, rendered)
        if filled is None:
            return self._split_by_prefixes(messages, trained, rendered, origin)
        prompt = self._render(messages[: trained[-1]], origin, generate=True)
        if prompt != "".join([segment.text for segment in filled[: plan.prompt_length]]):
            raise DataError(f"{origin}: the chat template's generation prompt depends on the text of this example")
        return filled

    def _prompt_plan(self, messages: list[Message], origin: str) -> RenderPlan:
        """Return the plan for prompts with these roles: a single segment."""
        roles = tuple(message["role"] for message in messages)
        if roles not in self._prompt_plans:
            pieces = self._render_markers(messages, origin, generate=True)
            self._prompt_plans[roles] = RenderPlan((SegmentTemplate(tuple(pieces)),), prompt_length=1, tail="")
        return self._prompt_plans[roles]

    def _plan(self, messages: list[Message], trained: Sequence[int], origin: str) -> RenderPlan:
        pieces = self._render_markers(messages, origin)
        places = {piece: at for at, piece in enumerate(pieces) if isinstance(piece, int)}
        for index in trained:
            if pieces.count(index) != 1:
                raise UsageError(f"{origin}: the chat template writes message {index} of the assistant more than once")
        gaps = self._gaps(messages, {index: str(pieces[places[index] - 1]) for index in trained}, origin)
        segment_templates: list[SegmentTemplate] = []
        done = prompt_length = 0
        for index in trained:
            at, gap = places[index], gaps[index]
            header, after = str(pieces[at - 1]), str(pieces[at + 1])
            segment_templates.append(SegmentTemplate((*pieces[done : at - 1], header.removesuffix(gap))))
            prompt_length = len(segment_templates)
            if gap.strip():  # text that the template writes at the start of the assistant's turn is not trained on
                segment_templates.append(SegmentTemplate((gap,)))
                gap = ""
            end_of_turn, end = self._end_of_turn(after, last=at + 2 == len(pieces), origin=origin, index=index)
            segment_templates.append(SegmentTemplate((gap, index, end_of_turn), trained=True, end=end))
            pieces[at + 1] = after.removeprefix(end_of_turn)
            done = at + 1
        return RenderPlan(tuple(segment_templates), prompt_length, "".join(map(str, pieces[done:])))

    def _render_markers(self, messages: list[Message], origin: str, generate: bool = False) -> list[str | int]:
        """Render a conversation with markers; return the template's text and message numbers, alternating."""
        pieces: list[str | int] = list(MARKER.split(self._render(_with_markers(messages), origin, generate)))
        pieces[1::2] = [int(number) for number in pieces[1::2]]
        for index, message in enumerate(messages):
            if index not in pieces:
                raise DataError(f"{origin}: the chat template leaves out message {index} (role {message['role']})")
        return pieces

    def _gaps(self, messages: list[Message], headers: dict[int, str], origin: str) -> dict[int, str]:
        """For each completion, return what the template writes between the generation prompt and the completion.

        `headers` has the template's text before each. The last one decides, as templates may rewrite earlier turns.
        """
        marked = _with_markers(messages)
        rendered = self._render(marked, origin)
        known: dict[str, str] = {}
        for index, header in reversed(headers.items()):
            if header in known:
                continue
            before = rendered[: rendered.index(marked[index]["content"])]
            prompt = self._render(marked[:index], origin, generate=True)
            candidates = [before[len(prompt) :]] if before.startswith(prompt) else list(known.values())
            gap = next((gap for gap in candidates if header.endswith(gap)), None)
            if gap is None:
                raise UsageError(
                    f"{origin}: no exact mask: the generation prompt of this chat template ends with "
                    f"{prompt[-40:]!r}, but in a conversation the completion comes after {before[-40:]!r}. "
                    "Use another data.chat_template"
                )
            known[header] = gap
        return {index: known[header] for index, header in headers.items()}

    def _end_pattern(self) -> re.Pattern[str]:
        """Return a pattern for an end-of-turn after white space: a token, or a text that the template names."""
        texts = [text for text in turn_ends(self.tokenizer.chat_template) if text not in self.encoder.whole]
        eos = re.escape(self.tokenizer.eos_token) if self.tokenizer.eos_token else "(?!)"
        token = any_of(self.encoder.whole).pattern
        return re.compile(rf"\s*(?:(?P<text>{any_of(texts).pattern})(?P<eos>\s*{eos})?|{token})")

    def _end_of_turn(self, after: str, last: bool, origin: str, index: int) -> tuple[str, bool]:
        """Return the end-of-turn, empty if the conversation ends without one; and whether to append the EOS token."""
        match = self.ends.match(after)
        if match:
            return match.group(), last and match["text"] is not None and match["eos"] is None
        if last and not after.strip():
            return "", True
        raise UsageError(
            f"{origin}: no exact mask: the chat template writes no end-of-turn token after message {index} of the "
            f"assistant; it continues with {after[:40]!r}. Use another data.chat_template"
        )

    def _fill(self, plan: RenderPlan, messages: list[Message], rendered: str) -> list[Segment] | None:
        """Fill the plan with the contents, unchanged or stripped; None if the result is not the rendering."""
        contents = [message["content"] for message in messages]
        filled = [segment_template.fill(contents) for segment_template in plan.segment_templates]
        if "".join([segment.text for segment in filled]) + plan.tail == rendered:
            return filled
        pieces = [piece for segment_template in plan.segment_templates for piece in segment_template.pieces] + [
            plan.tail
        ]
        stripped = _match_contents(pieces, contents, rendered)
        return (
            None
            if stripped is None
            else [segment_template.fill(stripped) for segment_template in plan.segment_templates]
        )

    def _split_by_prefixes(
        self,
        messages: list[Message],
        trained: Sequence[int],
        rendered: str,
        origin: str,
        tools: list[Any] | None = None,
    ) -> list[Segment]:
        """Find each completion by its prompt: for tools, and templates that change contents (as for <think>)."""
        self._refuse_control_tokens(messages, origin, tools)
        segments: list[Segment] = []
        done = 0
        for index in trained:
            prompt = self._render(messages[:index], origin, generate=True, tools=tools)
            if not rendered.startswith(prompt):
                _raise_rewritten(messages, index, origin)
            rest = rendered[len(prompt) :]
            composed = len(messages[index]) > 2  # tool calls or reasoning, which the template formats
            if composed:
                completion = self._composed_text(messages[: index + 1], prompt, origin, tools)
                reasoning = next((messages[index][key] for key in REASONING_KEYS if key in messages[index]), "")
                if completion is not None and reasoning.strip() not in completion:
                    raise DataError(f"{origin}: the chat template leaves out the reasoning of message {index}")
            else:
                space = rest[: len(rest) - len(rest.lstrip())]
                variants = [
                    gap + text for text in _stripped_variants(messages[index]["content"]) for gap in ("", space)
                ]
                completion = next((text for text in variants if rest.startswith(text)), None)
            if completion is None or not rest.startswith(completion):
                _raise_rewritten(messages, index, origin)
            last = index == len(messages) - 1
            end_of_turn, end = self._end_of_turn(rest.removeprefix(completion), last, origin, index)
            segments.append(Segment((TextPart(rendered[done : len(prompt)], True),)))
            segments.append(
                Segment((TextPart(completion, composed), TextPart(end_of_turn, True)), trained=True, end=end)
            )
            done = len(prompt) + len(completion + end_of_turn)
        return segments

    def _composed_text(self, messages: list[Message], prompt: str, origin: str, tools: list[Any] | None) -> str | None:
        """Return the last message as the template writes it: the text from the prompt to the end-of-turn."""
        first_user = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
        plain = self._render(
            [*messages[: first_user + 1], {"role": "assistant", "content": "xMARK0x"}], origin, tools=tools
        )
        end_of_turn, _ = self._end_of_turn(plain.partition("xMARK0x")[2], True, origin, len(messages) - 1)
        written = self._render(messages, origin, tools=tools)
        if not written.startswith(prompt):
            return None
        if not end_of_turn:
            return written[len(prompt) :].rstrip()
        called, found, _ = written[len(prompt) :].rpartition(end_of_turn)
        return called if found else None

    def _has_tools(self, messages: list[Message], tools: list[Any] | None, origin: str) -> bool:
        """Whether there are tools, or a message has more than role and content; DataError if unsupported."""
        template = str(self.tokenizer.chat_template)
        unsupported = "not supported by the chat template; write it as text"
        if tools and "tools" not in template:
            raise DataError(f"{origin}: tools: {unsupported}")
        if not tools and not any(len(message) > 2 for message in messages):
            return False
        for index, message in enumerate(messages):
            if "tool_calls" in message and "tool_calls" not in template:
                raise DataError(f"{origin}: message {index}: tool_calls: {unsupported}")
        return not self.is_plain

    def _refuse_control_tokens(self, messages: list[Message], origin: str, tools: list[Any] | None = None) -> None:
        texts = {f"message {i}": "".join(str(m[key]) for key in m if key != "role") for i, m in enumerate(messages)}
        for place, text in ({"tools": str(tools)} | texts).items():
            if found := self.encoder.control.search(text):
                raise DataError(
                    f"{origin}: {place} contains {found.group()!r}, and the chat template changes the text: the "
                    "control token and the quoted text cannot be distinguished"
                )

    def _render(
        self, messages: list[Message], origin: str, generate: bool = False, tools: list[Any] | None = None
    ) -> str:
        from jinja2.exceptions import TemplateError

        from posttrain.data.encoding.template_limits import render

        options: dict[str, Any] = {"tools": tools, "add_generation_prompt": generate, "strftime_now": TODAY.strftime}
        try:
            return render(self.tokenizer, messages, **options)
        except UsageError as error:
            raise UsageError(f"{origin}: {error}") from None
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise DataError(f"{origin}: the chat template rejects the conversation: {error}") from error


def reasoning_key(template: str) -> str | None:
    """Return under which name a chat template reads the reasoning of a message; None if it does not."""
    return next((key for key in REASONING_KEYS if re.search(rf"""[.'"]{key}\b""", template)), None)


def _with_markers(messages: Sequence[Message]) -> list[Message]:
    return [{"role": message["role"], "content": f"xMARK{index}x"} for index, message in enumerate(messages)]


def _with_reply_mark(message: Message) -> Message:
    """Return a reply with a mark where its text ends: in the arguments of its last call, or as its content."""
    if not message.get("tool_calls"):
        return {"role": "assistant", "content": REPLY_MARK}
    *calls, last = message["tool_calls"]
    function = {**last["function"], "arguments": {"x": REPLY_MARK}}
    return {"role": "assistant", "content": message["content"], "tool_calls": [*calls, {**last, "function": function}]}


def _without_end(text: str, ended: str) -> str:
    """Return what follows a reply without its end-of-turn, if the model generated it."""
    if not ended:
        return text
    space, written, rest = text.partition(ended)
    return rest if written and not space.strip() else text


def _assistant_messages(messages: Sequence[Message], train_from: int) -> list[int]:
    return [i for i, message in enumerate(messages) if i >= train_from and message["role"] == "assistant"]


def _content_segment(message: Message, trained: bool = False, end: bool = False) -> Segment:
    return Segment((TextPart(message["content"], False),), trained, end)


def _stripped_variants(content: str) -> list[str]:
    """Return a content as templates write it: unchanged, or with white space removed."""
    return list(dict.fromkeys((content, content.rstrip(), content.lstrip(), content.strip())))


def _match_contents(pieces: Sequence[str | int], contents: Sequence[str], rendered: str) -> list[str] | None:
    """Return the variant of each content with which the pieces give the rendering; None if there is none."""
    chosen = list(contents)
    at = 0
    for number, piece in enumerate(pieces):
        if isinstance(piece, int):
            following = pieces[number + 1]
            assert isinstance(following, str)
            fitting = [
                text for text in _stripped_variants(contents[piece]) if rendered.startswith(text + following, at)
            ]
            if not fitting:
                return None
            chosen[piece] = fitting[0]
            at += len(fitting[0])
        elif rendered.startswith(piece, at):
            at += len(piece)
        else:
            return None
    return chosen if at == len(rendered) else None


def _raise_no_template(origin: str) -> NoReturn:
    raise DataError(
        f"{origin}: conversations need a chat template, and the tokenizer has none: set data.chat_template (for "
        'example chatml or "Human: {}\\nAssistant: "), or use a model with a chat template'
    )


def _raise_rewritten(messages: Sequence[Message], index: int, origin: str) -> NoReturn:
    raise DataError(
        f"{origin}: no exact mask: the chat template changes the text of message {index} "
        f"(role {messages[index]['role']}) or of one before it"
    )
