"""Encode examples as samples: tokens, and a mask of those to train on; apply length limits and check both."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from posttrain.config.sections import DataConfig
from posttrain.core.errors import DataError, UsageError
from posttrain.core.lazy import PreTrainedTokenizerBase
from posttrain.core.types import ExampleKind, Prompt, Sample
from posttrain.data.encoding.chat import ChatRenderer
from posttrain.data.encoding.templates import apply_template
from posttrain.data.encoding.tokens import Segment, TextPart, TokenEncoder
from posttrain.data.reading.cells import SCORE_PAIRS
from posttrain.data.reading.examples import (
    ChatExample,
    Example,
    LabelledExample,
    Message,
    PairExample,
    PromptExample,
    SegmentsExample,
    StepwiseExample,
    TextExample,
)

MAX_CHARACTERS = 2**23  # per sequence; tokenizers need more than a hundred bytes for each
MAX_MESSAGES = 4096  # per conversation; the time to find the mask is quadratic in it
APPLIED_TEMPLATE = re.compile(
    r"\s*(?:<s>|<bos>|<\|begin_of_text\|>)?\s*(?:"
    r"(?P<chatml><\|im_start\|>)(?:system|user)\b.*<\|im_end\|>|(?P<llama2>\[INST\]).*\[/INST\]|"
    r"(?P<llama3><\|start_header_id\|>).*<\|eot_id\|>|(?P<gemma><start_of_turn>).*<end_of_turn>|"
    r"(?P<zephyr><\|(?:user|system)\|>).*<\|assistant\|>)",
    re.DOTALL,
)
"""Matches a prompt to which the chat template of a well-known model was applied."""


@dataclass(slots=True)
class Encoded:
    """The result of encoding one example."""

    samples: list[Any]  # Sample; for examples of kind prompt, Prompt
    truncated: bool = False
    dropped: bool = False
    quoted: bool = False  # text that looks like a control token was kept as text


class Encoder:
    """Encodes examples of one kind as samples."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        kind: ExampleKind,
        vocab_size: int,
        placeholder: str = "ки",
        needs_margin: bool = False,
    ) -> None:
        """`needs_margin`: a pair without a margin is an error; else its margin is 0."""
        if config.max_length < 2:
            raise UsageError(f"data.max_length is {config.max_length}: a sequence needs at least 2 tokens")
        if kind == "stepwise" and not placeholder.strip():
            raise UsageError("the placeholder that marks the end of a step is empty")
        self.tokenizer = tokenizer
        self.config = config
        self.kind = kind
        self.vocab_size = vocab_size
        self.placeholder = placeholder
        self.needs_margin = needs_margin
        apply_template(tokenizer, config.chat_template)
        self.tokens = TokenEncoder(tokenizer)
        self.chat = ChatRenderer(tokenizer, self.tokens)
        self.bos_id = tokenizer.bos_token_id

    def encode(self, example: Example) -> list[Sample]:
        """Return the samples of an example: one; two for a pair; the parts of a long text; none if it is dropped."""
        return self.encode_all([example])[0].samples

    def encode_all(self, examples: Sequence[Example]) -> list[Encoded]:
        """Encode many examples, which is faster than one by one."""
        if self.kind == "prompt":
            prompts = [example for example in examples if isinstance(example, PromptExample)]
            assert len(prompts) == len(examples), "examples of kind prompt must be PromptExamples"
            return [Encoded([prompt] if prompt else [], dropped=prompt is None) for prompt in self.prompts(prompts)]
        sequences = [self._sequences(example) for example in examples]
        for example, of_example in zip(examples, sequences, strict=True):
            self._check_size(example, of_example)
        flat = [segments for of_example in sequences for segments in of_example]
        ids = iter(self.tokens.encode(flat))
        return [
            self._encoded(example, of_example, [next(ids) for _ in of_example])
            for example, of_example in zip(examples, sequences, strict=True)
        ]

    def prompts(self, examples: Sequence[PromptExample]) -> list[Prompt | None]:
        """Encode prompts; None for one that is dropped for its length."""
        segments = [self.chat.prompt(e.prompt, e.plain, e.origin, e.tools) for e in examples]
        for example, of_example in zip(examples, segments, strict=True):
            self._refuse_applied_template(example.prompt, of_example, example.origin)
        encoded = self.tokens.encode(segments)
        return [
            self.prompt(example, np.array([token for of_segment in ids for token in of_segment], dtype=np.int64))
            for example, ids in zip(examples, encoded, strict=True)
        ]

    def prompt(self, example: PromptExample, tokens: npt.NDArray[np.int64]) -> Prompt | None:
        """Check the tokens of a prompt; None if it is dropped for its length."""
        origin, limit = example.origin, self.config.max_length
        if not len(tokens):
            raise DataError(f"{origin}: the tokenizer has no tokens for the prompt")
        self._check_vocabulary(tokens, origin)
        if len(tokens) > limit and self.config.on_overlong == "drop":
            return None
        if len(tokens) > limit:  # a truncated prompt would be another prompt
            raise DataError(
                f"{origin}: the prompt has {len(tokens)} tokens, more than data.max_length = {limit}, and cannot be "
                "truncated: raise data.max_length, or set data.on_overlong to drop"
            )
        return Prompt(tokens=tokens.astype(np.int32), messages=example.prompt, columns=example.columns, origin=origin)

    def _sequences(self, example: Example) -> list[list[Segment]]:
        match example:
            case TextExample(text=text):
                return [[Segment((TextPart(text, False),), trained=True, end=True)]]
            case ChatExample(messages=messages):
                return [self._conversation([], messages, example.plain, example.origin, example.tools)]
            case SegmentsExample():
                return [[Segment((TextPart(text, True),), trained=trained) for text, trained in example.segments]]
            case PairExample(raw=True):
                return [_continued(example.prompt, text) for text in (example.chosen, example.rejected)]
            case LabelledExample(raw=True):
                return [_continued(example.prompt, example.completion)]
            case PairExample(prompt=prompt):
                completions = (example.chosen, example.rejected)
                return [
                    self._conversation(prompt, completion, example.plain, example.origin) for completion in completions
                ]
            case LabelledExample(cut_off=True):
                return [self._cut_off(example)]
            case LabelledExample():
                return [self._conversation(example.prompt, example.completion, example.plain, example.origin)]
            case StepwiseExample():
                return [self._steps(example)]
        raise AssertionError(f"unknown kind of example: {example}")

    def _conversation(
        self,
        prompt: list[Message],
        completion: list[Message],
        plain: bool,
        origin: str,
        tools: list[Any] | None = None,
    ) -> list[Segment]:
        messages = prompt + completion
        if len(messages) > MAX_MESSAGES:
            raise DataError(f"{origin}: {len(messages):,} messages; a conversation may have at most {MAX_MESSAGES:,}")
        segments = self.chat.segments(messages, len(prompt), plain, origin, tools)
        self._refuse_applied_template(messages, segments, origin)
        return segments

    def _refuse_applied_template(self, messages: list[Message], segments: list[Segment], origin: str) -> None:
        """Raise a DataError if a template was applied twice; one that writes the text alone may be used."""
        first = next((message["content"] for message in messages if message["role"] != "system"), "")
        applied = None if self.chat.is_plain else APPLIED_TEMPLATE.match(first)
        if applied and not segments[0].text.startswith(first):
            mark = next(text for text in applied.groups() if text)
            raise DataError(
                f"{origin}: the prompt begins with {mark}: a chat template was applied to it before, and would be "
                'applied again; take the messages out of the text with data.map_keys {"function": "FILE.py:FUNCTION"}'
            )

    def _cut_off(self, example: LabelledExample) -> list[Segment]:
        """Return the prompt and the completion without an end-of-turn: the tokens of a generation that was cut off."""
        text = "".join(message["content"] for message in example.completion)
        prompt = self.chat.prompt(example.prompt, example.plain, example.origin)
        return [*prompt, Segment((TextPart(text, False),), trained=bool(text))]

    def _check_size(self, example: Example, sequences: list[list[Segment]]) -> None:
        for segments in sequences:
            size = sum(len(part.text) for segment in segments for part in segment.parts)
            if size > MAX_CHARACTERS:
                raise DataError(
                    f"{example.origin}: {size:,} characters; an example may have at most {MAX_CHARACTERS:,}: "
                    "split it into several"
                )

    def _steps(self, example: StepwiseExample) -> list[Segment]:
        """Return the prompt and the steps, each followed by its placeholder; the placeholders are trained on."""
        segments = self.chat.prompt(example.prompt, example.plain, example.origin) if example.prompt else []
        steps = list(example.steps)
        if segments and not segments[-1].text[-1:].isspace() and not steps[0][:1].isspace() and self.chat.is_plain:
            steps[0] = "\n" + steps[0]  # plain strings have no separator
        for step in steps:
            segments.append(Segment((TextPart(step, False),)))
            segments.append(Segment((TextPart(self.placeholder, True),), trained=True))
        return segments

    def _encoded(self, example: Example, sequences: list[list[Segment]], ids: list[list[list[int]]]) -> Encoded:
        pairs = zip(sequences, ids, strict=True)
        samples = [self._sample(example, segments, segment_ids) for segments, segment_ids in pairs]
        quoted = any(self.tokens.quotes_control(segment) for segments in sequences for segment in segments)
        longest, limit = max(map(len, samples)), self.config.max_length
        if longest <= limit:
            return Encoded(samples, quoted=quoted)
        if self.config.on_overlong == "drop":
            return Encoded([], dropped=True, quoted=quoted)
        if self.config.on_overlong == "error":
            raise DataError(
                f"{example.origin}: {longest} tokens, more than data.max_length = {limit}: raise data.max_length, "
                "or set data.on_overlong to truncate or drop"
            )
        if isinstance(example, TextExample):
            return Encoded(list(self._split(samples[0])), quoted=quoted)
        return Encoded([self._truncate(sample) for sample in samples], truncated=True, quoted=quoted)

    def _sample(self, example: Example, segments: list[Segment], ids: list[list[int]]) -> Sample:
        origin = example.origin
        if isinstance(example, TextExample) and self.bos_id is not None and ids[0][:1] != [self.bos_id]:
            segments, ids = [Segment(()), *segments], [[self.bos_id], *ids]
        tokens = np.array(list(chain.from_iterable(ids)), dtype=np.int64)
        mask = np.zeros(len(tokens), dtype=np.bool_)
        targets = None
        ends = np.cumsum([len(of_segment) for of_segment in ids])
        for segment, of_segment, end in zip(segments, ids, ends, strict=True):
            if segment.trained:
                self._check_has_tokens(segment, of_segment, origin)
                mask[end - len(of_segment) : end] = True
        if isinstance(example, StepwiseExample):
            last_of_placeholders = ends[[segment.trained for segment in segments]] - 1
            mask[:] = False
            mask[last_of_placeholders] = True
            targets = np.zeros(len(tokens), dtype=np.float32)
            targets[last_of_placeholders] = example.labels
        elif isinstance(example, TextExample | SegmentsExample):
            mask[0] = False  # no token comes before it
        if mask[0]:
            raise DataError(f"{origin}: the prompt has no tokens, so that no token comes before the completion")
        self._check_vocabulary(tokens, origin)
        return Sample(
            tokens=tokens.astype(np.int32),
            mask=mask,
            targets=targets,
            label=example.label if isinstance(example, LabelledExample) else 0.0,
            margin=self._margin(example) if isinstance(example, PairExample) else 0.0,
            origin=origin,
        )

    def _margin(self, example: PairExample) -> float:
        if example.margin is None and self.needs_margin:
            pairs = ", ".join(" and ".join(pair) for pair in SCORE_PAIRS)
            raise DataError(
                f"{example.origin}: algo.use_margin is set, but this example has no margin: expected a column margin, "
                f"or two columns such as {pairs}"
            )
        if self.needs_margin and example.margin is not None and example.margin < 0:
            raise DataError(
                f"{example.origin}: the margin is {example.margin:g}: by its scores the rejected completion is better. "
                "Exchange both, or remove the example"
            )
        return example.margin or 0.0

    def _check_has_tokens(self, segment: Segment, ids: list[int], origin: str) -> None:
        """Check that a trained segment has tokens: text unknown to the tokenizer may leave only the end-of-turn."""
        has_text = any(part.text and not part.from_template and not part.text.isspace() for part in segment.parts)
        if not ids or (has_text and all(token in self.tokens.special_ids for token in ids)):
            raise DataError(f"{origin}: the tokenizer has no tokens for the completion {segment.text[:40]!r}")

    def _check_vocabulary(self, tokens: npt.NDArray[np.int64], origin: str) -> None:
        if tokens.min() >= 0 and tokens.max() < self.vocab_size:
            return
        wrong = int(tokens[(tokens < 0) | (tokens >= self.vocab_size)][0])
        token = self.tokenizer.convert_ids_to_tokens(wrong) if wrong >= 0 else None
        raise DataError(
            f"{origin}: token id {wrong} ({token!r}) is outside the model's vocabulary of {self.vocab_size}: "
            "is this the model's own tokenizer?"
        )

    def _truncate(self, sample: Sample) -> Sample:
        limit = self.config.max_length
        if not sample.mask[:limit].any():
            what = "first step" if self.kind == "stepwise" else "completion"
            start = int(sample.mask.argmax())
            raise DataError(
                f"{sample.origin}: no token of the {what} is within data.max_length = {limit}: it "
                f"{'ends' if self.kind == 'stepwise' else 'begins'} at token {start + 1}. "
                "Raise data.max_length, or set data.on_overlong to drop"
            )
        targets = None if sample.targets is None else sample.targets[:limit]
        return replace(sample, tokens=sample.tokens[:limit], mask=sample.mask[:limit], targets=targets)

    def _split(self, sample: Sample) -> Iterator[Sample]:
        """Split a text. Each part begins with a token not trained on: BOS, or the last token of the part before."""
        room = self.config.max_length - 1
        for start in range(1, len(sample), room):
            first = sample.tokens[:1] if self.bos_id is not None else sample.tokens[start - 1 : start]
            tokens = np.concatenate([first, sample.tokens[start : start + room]])
            yield Sample(tokens=tokens, mask=np.arange(len(tokens)) > 0, origin=sample.origin)


def _continued(prompt: list[Message], completion: list[Message]) -> list[Segment]:
    """Return a text and its continuation, which is trained on, without a chat template."""
    text, more = ("".join(message["content"] for message in messages) for messages in (prompt, completion))
    return [Segment((TextPart(text, False),)), Segment((TextPart(more, False),), trained=True, end=True)]
