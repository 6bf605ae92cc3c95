"""Encodes one conversation for generation."""

from __future__ import annotations

from typing import Any

from posttrain.core.errors import UsageError
from posttrain.core.types import Prompt
from posttrain.data.encoding.encoder import Encoder
from posttrain.data.reading.examples import Message, PromptExample


def encode_conversation(encoder: Encoder, messages: list[Message], name: str, tools: list[Any] | None = None) -> Prompt:
    """Encode a conversation up to where the completion begins; `name`: of the model, for errors."""
    if not encoder.tokenizer.chat_template:
        raise UsageError(
            f"{name}: the model has no chat template. Set one, for example --chat_template chatml, or "
            '--chat_template "Human: {}\\nAssistant: "'
        )
    (prompt,) = encoder.prompts([PromptExample(origin="the conversation", prompt=messages, tools=tools)])
    assert prompt is not None, "nothing is dropped unless data.on_overlong is drop"
    return prompt
