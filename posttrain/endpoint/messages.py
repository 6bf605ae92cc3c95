"""How completions of a model are read as messages: by its chat template's format of tool calls and of reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from posttrain.core.types import Ints
from posttrain.data.encoding.tokens import whole_tokens
from posttrain.data.encoding.tool_formats import FORMATS, THINK, format_of, writes_reasoning
from posttrain.endpoint.errors import ApiError
from posttrain.endpoint.protocol import CompletionRequest, ParseOptions

PROMPT_END = 8  # tokens of the prompt's end, in which <think> is looked for


class MessageFormat:
    """What a model's chat template says about messages of the assistant."""

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int], name: str) -> None:
        """`name`: of the model, for errors."""
        self.tokenizer, self.stop_ids, self.name = tokenizer, frozenset(stop_ids), name
        self.tools, self.thinks = format_of(tokenizer.chat_template), writes_reasoning(tokenizer.chat_template)
        self.special = {
            token: tokenizer.convert_tokens_to_ids(token) for token in whole_tokens(tokenizer, control_only=True)
        }

    def tools_of(self, request: CompletionRequest) -> list[dict[str, Any]] | None:
        """Return the tools as the chat template reads them; ApiError if it has no known format for calls."""
        tools = request.output.tools
        if tools is None:
            return None
        if self.tools is None:
            supported = ", ".join(format.name for format in FORMATS)
            raise ApiError(
                400,
                f"tools: the chat template of {self.name} writes no tool calls, or in a format that is not known; "
                f"the formats are {supported}",
                param="tools",
            )
        return tools.tools

    def set_parsing(self, request: CompletionRequest, prompt: Ints) -> None:
        """Set how the completion after this prompt is read as a message."""
        tools = request.output.tools
        end = str(self.tokenizer.decode(prompt[-PROMPT_END:])).rstrip()
        format = self.tools if tools else None
        several = tools is None or tools.several
        marks = [self.special[mark] for mark in (format.marks if format else ()) if mark in self.special]
        shown = frozenset(marks) - self.stop_ids
        request.parsing = ParseOptions(format, self.thinks, end.endswith(THINK), several, shown)
        if tools and not several and format and format.end:  # nothing is generated after the first call
            request.end_texts = (format.end,)
