"""Writes an Ollama Modelfile whose Go template renders conversations as the model's chat template does.

Chat templates are Jinja programs, which Ollama does not run. Most have a simple form: a text before and after the
content of each role. This form is found by rendering conversations, and then checked on other conversations: a
template that does not have it gets no Modelfile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

from posttrain.data.encoding.template_limits import render
from posttrain.publish.divergence import TEMPLATE_ERRORS

MARKS = {"system": "SYSTEMmark7", "user": "USERmark7", "assistant": "ASSISTANTmark7"}
CHECKED = (
    ("user",),
    ("system", "user"),
    ("user", "assistant", "user"),
    ("system", "user", "assistant", "user"),
    ("user", "assistant", "user", "assistant", "user"),
    ("system", "user", "assistant", "user", "assistant", "user", "assistant", "user"),
)


class UnknownTemplateError(Exception):
    """Says why a chat template cannot be written as a Go template."""


@dataclass(slots=True)
class TurnFormat:
    """The texts around the contents of a conversation."""

    start: str
    """What a conversation without a system message starts with, such as a default system message."""
    start_with_system: str | None
    """What comes before the content of a system message; None: the template has no system messages."""
    after_system: str
    system_in_user: Literal["", "first", "last"]
    """Which user message the system message is a part of: none, the first, or the last (Mistral)."""
    before_user: str
    before_assistant: str
    after_assistant: str
    reply_start: str
    """What comes before the reply that is asked for; some templates begin it unlike earlier ones."""

    def render(self, messages: list[dict[str, str]]) -> str:
        """Render a conversation that ends with a user message, up to where the assistant begins."""
        has_system = messages[0]["role"] == "system"
        system = f"{self.start_with_system}{messages[0]['content']}{self.after_system}"
        host = {"first": 1, "last": len(messages) - 1}.get(self.system_in_user)
        text = self.start if not has_system or self.system_in_user == "last" else ""
        for number, message in enumerate(messages):
            content = message["content"]
            if message["role"] == "system":
                text += "" if self.system_in_user else system
            elif message["role"] == "user":
                text += (system if has_system and number == host else self.before_user) + content
            else:
                text += self.before_assistant + content + self.after_assistant
        return text + self.reply_start

    def go_template(self) -> str:
        """Return the same as a Go template of Ollama."""
        before_user, before_reply = go_text(self.before_user), go_text(self.before_assistant)
        start = go_text(self.start)
        if self.start_with_system is not None:
            system, after_system = go_text(self.start_with_system), go_text(self.after_system)
            if self.system_in_user == "last":
                inside = system + "{{ $.System }}" + after_system
                before_user = "{{ if and $.System $last }}" + inside + "{{ else }}" + before_user + "{{ end }}"
            elif self.system_in_user:  # what comes before the system message contains what comes before a user message
                start = "{{ $system := .System }}{{ if not $system }}" + start + "{{ end }}"
                inside = system + "{{ $system }}" + after_system + '{{ $system = "" }}'
                before_user = "{{ if $system }}" + inside + "{{ else }}" + before_user + "{{ end }}"
            else:
                start = (
                    "{{ if .System }}" + system + "{{ .System }}" + after_system + "{{ else }}" + start + "{{ end }}"
                )
        user = before_user + "{{ .Content }}"
        after_reply = "{{ if not $last }}" + go_text(self.after_assistant) + "{{ end }}"
        reply = before_reply + "{{ .Content }}" + after_reply
        return (
            start
            + "{{ range $i, $_ := .Messages }}{{ $last := eq (len (slice $.Messages $i)) 1 }}"
            + '{{ if eq .Role "user" }}'
            + user
            + '{{ else if eq .Role "assistant" }}'
            + reply
            + '{{ end }}{{ if and $last (ne .Role "assistant") }}'
            + go_text(self.reply_start)
            + "{{ end }}{{ end }}"
        )


def go_text(text: str) -> str:
    """Return a text that a Go template prints as it is."""
    return text.replace("{{", '{{ "{{" }}')


def turn_format(tokenizer: PreTrainedTokenizerBase) -> TurnFormat:
    """Find the form of a chat template; UnknownTemplateError if it has another one."""
    template = tokenizer.chat_template
    if not isinstance(template, str) or not template:
        raise UnknownTemplateError("the tokenizer has no chat template, or several")
    if "strftime_now" in template:
        raise UnknownTemplateError("the chat template writes the date of the day, which a Go template cannot")
    one, two = rendered(tokenizer, ("user",)), rendered(tokenizer, ("user", "assistant", "user"))
    if one is None or two is None:
        raise UnknownTemplateError("the chat template does not render conversations of user and assistant")
    user, assistant = MARKS["user"], MARKS["assistant"]
    if one.count(user) != 1 or two.count(user) != 2 or two.count(assistant) != 1:
        raise UnknownTemplateError("the chat template repeats or leaves out messages")
    start, tail = one.split(user)
    first, between, last = two.split(user)
    before_reply, after_reply = between.split(assistant)
    if first != start or last != tail:
        raise UnknownTemplateError("the chat template changes the first or the last message of longer conversations")
    # What comes after a user message cannot be told from what comes before a reply; together they are `before_reply`.
    before_user = common_end(start, after_reply)
    found = TurnFormat(
        start=start.removesuffix(before_user),
        start_with_system=None,
        after_system="",
        system_in_user="",
        before_user=before_user,
        before_assistant=before_reply,
        after_assistant=after_reply.removesuffix(before_user),
        reply_start=tail,
    )
    add_system(found, tokenizer)
    return found


def add_system(found: TurnFormat, tokenizer: PreTrainedTokenizerBase) -> None:
    """Find how a system message is rendered, and check everything on several conversations."""
    text = rendered(tokenizer, ("system", "user"))
    system, user = MARKS["system"], MARKS["user"]
    if text is not None and text.count(system) == 1 and text.count(user) == 1:
        before, rest = text.split(system)
        after = rest.split(user)[0]
        if found.before_user and after.endswith(found.before_user):
            found.start_with_system, found.after_system = before, after.removesuffix(found.before_user)
        else:
            found.start_with_system, found.after_system = before, after
            found.system_in_user = "first"
            longer = ("system", "user", "assistant", "user")
            if before.startswith(found.start) and rendered(tokenizer, longer) != found.render(conversation(longer)):
                found.start_with_system, found.system_in_user = before.removeprefix(found.start), "last"
    elif text is not None:
        raise UnknownTemplateError("the chat template repeats or leaves out the system message")
    for roles in CHECKED:
        if "system" in roles and found.start_with_system is None:
            continue
        if rendered(tokenizer, roles) != found.render(conversation(roles)):
            raise UnknownTemplateError(f"the chat template is not a plain sequence of turns ({', '.join(roles)})")


def common_end(a: str, b: str) -> str:
    """Return the longest text that both end with."""
    length = 0
    while length < min(len(a), len(b)) and a[-1 - length] == b[-1 - length]:
        length += 1
    return a[len(a) - length :]


def conversation(roles: tuple[str, ...]) -> list[dict[str, str]]:
    return [{"role": role, "content": MARKS[role]} for role in roles]


def rendered(tokenizer: PreTrainedTokenizerBase, roles: tuple[str, ...]) -> str | None:
    """Render a conversation of these roles, without a first BOS token that the runtime adds; None if it is refused."""
    try:
        text = render(tokenizer, conversation(roles), add_generation_prompt=True)
    except TEMPLATE_ERRORS:
        return None
    return text.removeprefix(tokenizer.bos_token) if adds_bos(tokenizer) else text


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer puts the BOS token before a text; the runtime then does so, too."""
    encoded: list[int] = tokenizer("a")["input_ids"]
    return bool(encoded) and tokenizer.bos_token_id is not None and encoded[0] == tokenizer.bos_token_id


def modelfile(tokenizer: PreTrainedTokenizerBase, file: str, stops: list[int]) -> tuple[str, list[str]]:
    """Return the Modelfile for a GGUF file, and remarks on what it does not do as the chat template does."""
    found = turn_format(tokenizer)
    remarks = []
    if found.start_with_system is None:
        remarks.append("the chat template refuses system messages; Ollama leaves them out")
    padded = render(tokenizer, [{"role": "user", "content": " padded "}], add_generation_prompt=True)
    if " padded " not in padded:
        remarks.append("the chat template trims spaces around contents; Ollama does not")
    template = found.go_template()
    if '"""' in template:
        raise UnknownTemplateError('the chat template contains """, which a Modelfile cannot')
    ends = [tokenizer.convert_ids_to_tokens(number) for number in stops]
    lines = [f"FROM ./{file}", f'TEMPLATE """{template}"""', *(f'PARAMETER stop "{end}"' for end in ends)]
    return "\n".join(lines) + "\n", remarks
