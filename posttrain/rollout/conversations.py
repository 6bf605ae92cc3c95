"""Conversations of programs with the model, as tokens: what was sampled is what is trained.

A program that talks to a chat endpoint sends its whole history with every request, as text, often not quite as it
received it: JSON of tool calls is spaced differently, thinking is left out, contents are null, ids are added. Encoding
that text again would give other tokens than those that were sampled. So each reply is kept here with its tokens. A
request that continues an earlier one is matched by its messages, and continues the *tokens* of that one: only messages
after the reply are encoded, with the text that the chat template writes around them.

    request 1   user: 2+2?                                     added    reply 1 (sampled)
    request 2   user: 2+2?  assistant: 4  user: 3+3?          added    reply 1   added    reply 2 (sampled)
    mask                                                        0          1       0          1

A request that continues no reply begins a new branch, and so does a second one that continues the same reply. Each
path from the first request to a last reply is one sample. Branches of one conversation share their beginnings; a reply
counts (its mask is true) in the first sample that has it, so that every sampled token is trained on once.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from posttrain.core.errors import PosttrainError
from posttrain.core.types import Experts, Ints, Sample
from posttrain.data.encoding.chat import REASONING, ChatRenderer
from posttrain.data.encoding.tokens import Segment
from posttrain.data.encoding.tool_formats import END_THINK, without_dropped_reasoning
from posttrain.data.reading.examples import Message

Key = tuple[Any, ...]
"""What identifies a message, whatever a client does to its spelling."""


@dataclass(slots=True, eq=False)
class Turn:
    """One request and its reply: the tokens that its messages added, and those that were sampled."""

    parent: Turn | None
    tools: str  # of the request, as canonical JSON
    messages: list[Message]  # those after the parent's reply
    added: Ints  # tokens of these messages, up to where the reply begins
    reply: Message = field(default_factory=dict)
    sample: Sample | None = None  # prompt and reply, as the engine returned them; None until there is a reply
    ended: str = ""  # the end of turn or stop text that the reply ends with, as text; empty if it was cut off
    number: int = -1  # in order of replies
    seconds: tuple[float, float] = (0.0, 0.0)  # of the program, since the reply before; of the model
    keys: list[frozenset[Key]] = field(default_factory=list)  # that each message may have; the reply's last

    @property
    def path(self) -> list[Turn]:
        """The turns from the first request to this one."""
        turns: list[Turn] = [self]
        while turns[-1].parent is not None:
            turns.append(turns[-1].parent)
        return turns[::-1]

    @property
    def sampled(self) -> Sample:
        assert self.sample is not None, "a turn without a reply"
        return self.sample

    @property
    def prompt(self) -> Ints:
        """All tokens up to where the reply begins."""
        return self.added if self.parent is None else np.concatenate([self.parent.sampled.tokens, self.added])

    @property
    def replies(self) -> list[tuple[int, Message]]:
        """The replies of the path, with their places among all messages."""
        return [(len(turn.keys) - 1, turn.reply) for turn in self.path]


class ConversationTree:
    """The requests of one program, in one rollout. Not thread-safe: requests and replies come one at a time."""

    def __init__(self, chat: ChatRenderer, stop_ids: Sequence[int], origin: str) -> None:
        """`stop_ids`: tokens that end a turn; `origin`: of the data row, for errors."""
        self.chat, self.stop_ids, self.origin = chat, frozenset(stop_ids), origin
        self.turns: list[Turn] = []  # with replies, in their order
        self.refusals: list[str] = []  # why tokens of a matched reply could not be continued

    def request(self, messages: Sequence[Message], tools: list[Any] | None = None) -> Turn:
        """Return a turn whose `prompt` continues the tokens of an earlier reply, where one matches.

        Messages are as a client sends them; tool calls have their arguments as objects or JSON text. PosttrainError
        if the chat template refuses them.
        """
        wanted = [normalised_message(message) for message in messages]
        parent, known = self.find(wanted, canonical(tools))
        wanted = without_dropped_reasoning(wanted, self.chat.tokenizer.chat_template)
        if parent is not None:
            try:
                added = self.continued(parent, wanted, known, tools)
                return Turn(parent, canonical(tools), wanted[known:], added)
            except PosttrainError as error:
                self.refusals.append(str(error))
        segments = self.chat.prompt(wanted, self.chat.is_plain, self.origin, tools)
        [encoded] = self.chat.encoder.encode([segments])
        return Turn(None, canonical(tools), wanted, np.array([t for ids in encoded for t in ids], dtype=np.int32))

    def reply(self, turn: Turn, sample: Sample, message: Message, stop_texts: Sequence[str] = ()) -> None:
        """Record what was sampled after `turn.prompt`, and the message that the client was sent for it."""
        size = len(turn.prompt)
        assert sample.tokens[:size].tolist() == turn.prompt.tolist(), "sampled after other tokens"
        tokens = sample.tokens[size:]
        if int(tokens[-1]) in self.stop_ids:
            turn.ended = self.chat.tokenizer.decode(tokens[-1:].tolist(), skip_special_tokens=False)
        elif stop_texts:
            text = self.chat.tokenizer.decode(tokens.tolist())
            turn.ended = next((stop for stop in stop_texts if text.endswith(stop)), "")
        turn.sample, turn.reply, turn.number = sample, normalised_message(message), len(self.turns)
        turn.keys = [] if turn.parent is None else list(turn.parent.keys)
        turn.keys += [frozenset([message_key(found)]) for found in turn.messages]
        spellings = [turn.reply]
        if turn.ended in stop_texts and turn.ended:  # it is not in the message; some clients add it again
            spellings.append({**turn.reply, "content": turn.reply["content"] + turn.ended})
        turn.keys.append(frozenset(map(message_key, spellings)))
        self.turns.append(turn)

    def find(self, messages: Sequence[Message], tools: str) -> tuple[Turn | None, int]:
        """Return the turn whose conversation is the longest beginning of these messages, and its length.

        Of equally long ones it is the one with the most replies that are equal to the letter, then the newest.
        """
        keys = [message_key(message) for message in messages]
        best: tuple[int, int, int] = (0, 0, -1)
        found: Turn | None = None
        for turn in self.turns:
            known = len(turn.keys)
            if turn.tools != tools or known >= len(keys):
                continue
            if all(key in accepted for key, accepted in zip(keys, turn.keys, strict=False)):
                exact = sum(messages[place] == reply for place, reply in turn.replies)
                if (known, exact, turn.number) > best:
                    best, found = (known, exact, turn.number), turn
        return found, best[0]

    def continued(self, parent: Turn, messages: list[Message], known: int, tools: list[Any] | None) -> Ints:
        """Encode the messages after a reply, as the chat template writes them after it."""
        segment = self.chat.continuation(messages, known - 1, parent.ended, self.origin, tools)
        [[_, tokens]] = self.chat.encoder.encode([[Segment(()), segment]])  # not the start of a text: no second BOS
        return np.array(tokens, dtype=np.int32)

    # What is trained

    @property
    def leaves(self) -> list[Turn]:
        """The last turns of all branches, in an order that does not depend on when their replies came."""
        parents = {id(turn.parent) for turn in self.turns}
        return sorted(
            (turn for turn in self.turns if id(turn) not in parents), key=lambda turn: turn.sampled.tokens.tolist()
        )

    @property
    def forks(self) -> int:
        """How many branches there are beside the first: 0 for a conversation that only went on."""
        return max(0, len(self.leaves) - 1)

    def samples(self, group: int = 0) -> Iterator[tuple[Turn, Sample]]:
        """Yield the last turn and the sample of each branch; a reply counts in the first branch that has it."""
        counted: set[int] = set()
        for leaf in self.leaves:
            path = leaf.path
            tokens = leaf.sampled.tokens
            mask, logprobs = np.zeros(len(tokens), dtype=np.bool_), np.zeros(len(tokens), dtype=np.float32)
            for turn in path:
                begin, end = len(turn.prompt), len(turn.sampled.tokens)
                assert turn.sampled.logprobs is not None, "a generator returns log-probabilities"
                logprobs[begin:end] = turn.sampled.logprobs[begin:end]
                mask[begin:end] = turn.number not in counted
                counted.add(turn.number)
            prompts = sum(len(turn.prompt) for turn in path)
            yield (
                leaf,
                Sample(
                    tokens=tokens,
                    mask=mask,
                    logprobs=np.where(mask, logprobs, np.float32(0.0)),
                    group=group,
                    version=path[0].sampled.version,
                    newest=leaf.sampled.newest,
                    finish=leaf.sampled.finish,
                    origin=self.origin,
                    preemptions=sum(turn.sampled.preemptions for turn in path),
                    draft_tokens=sum(turn.sampled.draft_tokens for turn in path),
                    accepted_tokens=sum(turn.sampled.accepted_tokens for turn in path),
                    reused=sum(turn.sampled.reused * len(turn.prompt) for turn in path) / prompts,
                    experts=experts_of(path),
                    turns=tuple((len(turn.prompt), len(turn.sampled.tokens), 0.0, "") for turn in path),
                ),
            )


def experts_of(path: Sequence[Turn]) -> Experts | None:
    """Return the experts of a branch's tokens: of each reply those that sampled it; None if none were recorded."""
    last = path[-1].sampled.experts
    if last is None:
        return None
    experts = last.copy()
    for turn in path[:-1]:
        begin, end = len(turn.prompt), len(turn.sampled.tokens)
        recorded = turn.sampled.experts
        assert recorded is not None, "an engine records the experts of all samples or of none"
        known = recorded[begin:end] >= 0  # all but those of the last token, which the next turn computed
        experts[begin:end] = np.where(known, recorded[begin:end], experts[begin:end])
    return experts


# Messages as clients spell them


def normalised_message(message: Message) -> Message:
    """Return a message as chat templates read it: text content, arguments of tool calls as objects, no empty fields."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content)
    found: Message = {"role": message["role"], "content": content or ""}
    for name in ("name", "tool_call_id", REASONING):
        if message.get(name):
            found[name] = message[name]
    if message.get("tool_calls"):
        found["tool_calls"] = [normalised_call(call) for call in message["tool_calls"]]
    return found


def normalised_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # else compared as text; the template may refuse it
            arguments = json.loads(arguments)
    with_id = {"id": call["id"]} if call.get("id") else {}
    return {**with_id, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def message_key(message: Message) -> Key:
    """Return what a client cannot change by its spelling: role, text, names and arguments of calls.

    Ids are left out, since clients rename them, and so is the thinking of replies, since they drop it. Both replies of
    two branches may then have the same key; `ConversationTree.find` prefers the one that is equal to the letter.
    """
    content = message["content"]
    if message["role"] == "assistant":
        content = content.rpartition(END_THINK)[2].strip()
    calls = tuple(
        (call["function"]["name"], canonical(plain_numbers(call["function"]["arguments"])))
        for call in message.get("tool_calls", ())
    )
    return (message["role"], content, calls)


def plain_numbers(value: Any) -> Any:
    """Return a JSON value in which whole numbers are integers: 2.0 and 2 are one number, spelled by two libraries."""
    if isinstance(value, dict):
        return {name: plain_numbers(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [plain_numbers(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)
