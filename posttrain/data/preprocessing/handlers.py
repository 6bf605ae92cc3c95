"""Handlers by name: rows of a file -> columns of token ids, through the same encoding that training uses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from posttrain.config.sections import DataConfig
from posttrain.core.errors import DataError, UsageError
from posttrain.core.types import ExampleKind, Sample
from posttrain.data.encoding.encoder import Encoded, Encoder
from posttrain.data.preprocessing.indexed import Numbers, token_dtype
from posttrain.data.preprocessing.sentences import sentences
from posttrain.data.reading.columns import KeyMap
from posttrain.data.reading.examples import ChatExample, Example, Message, TextExample, fault, filled_text
from posttrain.data.reading.formats import SourceFormat
from posttrain.data.reading.sources import Record

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100  # the label of a token that does not count
UNLIMITED = 2**31 - 1
Columns = dict[str, Numbers]
Document = dict[str, list[Numbers]]  # what is written of a row: a sequence a key, or several


@dataclass(kw_only=True, slots=True)
class PreprocessConfig:
    """What `posttrain data preprocess` takes."""

    input: tuple[str, ...] = ()
    """Files, folders, globs or hub names to read."""
    handler_name: str = ""
    """What the rows are and what is written of them; a wrong name lists all."""
    tokenizer_name_or_path: str = ""
    """Folder or hub name of the tokenizer, or `pico`."""
    output_prefix: str = ""
    """Files are written to <output_prefix>_<key>_document.bin and .idx; post-training handlers add _packed."""
    tokenizer_type: Literal["PretrainedFromHF", "HuggingFaceTokenizer"] = "PretrainedFromHF"
    """Two names for the same: a tokenizer of Hugging Face."""
    tokenizer_not_use_fast: bool = False
    """Take the slow tokenizer, where there is one."""
    prompt_type: str = ""
    """Chat template by name (qwen, llama3, qwen_r1 ...) or file, instead of the tokenizer's own."""
    map_keys: str = ""
    """Columns under other names, as JSON: {"prompt": "problem", "query": "", "response": "answer"}."""
    json_keys: tuple[str, ...] = ("text",)
    """GeneralPretrainHandler: the columns to encode, each into files of its own."""
    dataset_additional_keys: tuple[str, ...] = ()
    """R1AlpacaStyleInstructionHandler: further columns to encode as they are."""
    placeholder_token: str = "ки"
    """AlpacaStyleProcessRewardHandler: marks the end of a step."""
    reward_tokens: tuple[str, ...] = ("+", "-")
    """AlpacaStyleProcessRewardHandler: labels of a right and of a wrong step, one token each."""
    seq_length: int = 0
    """Rows of so many tokens or more are left out and counted (not by GeneralPretrainHandler); 0: no limit."""
    append_eod: bool = False
    """End every row with the end token, if it does not end so already."""
    split_sentences: bool = False
    """GeneralPretrainHandler: each sentence is a sequence of its document, in files named _sentence, not _document."""
    pack: bool = False
    """Instruction handlers: put rows together until they fill seq_length tokens."""
    neat_pack: bool = False
    """pack, and number the rows in attention_mask from 1, so that each attends to itself alone."""
    workers: int = 1
    """Processes that encode. The result does not depend on it."""
    n_subs: int = 0
    """About so many parts are kept until the end: an interrupted run goes on after the last. 0: one for 64 MB."""
    cache_dir: str = ""
    """Where unfinished parts are kept; default: beside the output."""
    log_interval: int = 10_000
    """Say how far it is every so many rows."""
    on_bad_row: Literal["stop", "quarantine"] = "stop"
    """stop: a row that cannot be used ends the run; quarantine: it is set aside in a file and counted."""
    seed: int = 0
    """Taken for the sake of other tools' files: nothing here is left to chance."""


@dataclass(slots=True)
class Written:
    """A column of many rows."""

    numbers: Numbers  # of all sequences, end to end
    lengths: Numbers  # of the sequences
    documents: Numbers  # how many sequences each row has


@dataclass(slots=True)
class Outcome:
    """What became of a chunk of rows."""

    columns: dict[str, Written]
    counts: dict[str, int]
    bad: list[dict[str, Any]] = field(default_factory=list)  # rows set aside, with the reason


class Handler:
    """Rows to columns. Subclasses say which examples a row gives, and which columns a sample."""

    kind: ExampleKind | Literal["prompt"] = "chat"
    keys: tuple[str, ...] = ("attention_mask", "labels", "input_ids")  # the last is published last
    mark = "_packed"  # what other trainers look for in the names of post-training files
    level = "document"  # what a sequence is: the end of the files' names
    can_pack = False

    def __init__(self, config: PreprocessConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.encoder = self._encoder()
        self.renaming = Renaming(config.map_keys, self.names)

    # What a subclass may change

    names: dict[str, str] = {}  # noqa: RUF012  what map_keys calls a column -> the name by which formats know it

    def examples(self, row: Record, source: SourceFormat) -> list[Example]:
        return source.examples(self.renaming.apply(row))

    def columns(self, row: Record, example: Example, samples: list[Sample]) -> Columns:
        """The row to write, of an example's samples."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """What a reader of the files must know besides."""
        return {}

    # The same for all

    def _encoder(self) -> Encoder:
        config = DataConfig(
            max_tokens=self.config.seq_length - 1 if self.config.seq_length else UNLIMITED,
            on_long="drop",
        )
        kind: ExampleKind = "chat" if self.kind == "prompt" else self.kind
        return Encoder(self.tokenizer, config, kind, len(self.tokenizer), self.config.placeholder_token)

    def dtype(self, key: str) -> np.dtype[Any]:
        """Labels have a place for -100; token ids and masks have not, and take two bytes where these suffice."""
        return np.dtype("<i4") if key.endswith("labels") else token_dtype(len(self.tokenizer))

    def encode(self, chunk: Sequence[Record]) -> Outcome:
        """All rows of a chunk, in their order."""
        counts = dict.fromkeys(("read", "kept", "dropped", "bad", "tokens", "quoted"), 0)
        counts["read"] = len(chunk)
        written: list[Document] = []
        bad: list[dict[str, Any]] = []
        try:
            written = self._encode(chunk, counts)
        except DataError:
            if self.config.on_bad_row == "stop":
                raise
            counts |= dict.fromkeys(counts.keys() - {"read"}, 0)
            for row in chunk:
                try:
                    written += self._encode([row], counts)
                except DataError as error:
                    bad.append({"reason": str(error), "row": row.values})
        counts["kept"], counts["bad"] = len(written), len(bad)
        columns: dict[str, Written] = {}
        for key in self.keys:
            parts = [part for row in written for part in row[key]]
            numbers = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
            columns[key] = Written(
                numbers.astype(self.dtype(key)),
                np.array([len(part) for part in parts], dtype=np.int32),
                np.array([len(row[key]) for row in written], dtype=np.int64),
            )
            counts["tokens"] += len(numbers) if key.endswith("input_ids") or self.kind == "text" else 0
        return Outcome(columns, counts, bad)

    def _encode(self, chunk: Sequence[Record], counts: dict[str, int]) -> list[Document]:
        source = SourceFormat(self.encoder.kind, self.config.placeholder_token)
        pairs = [(row, example) for row in chunk for example in self.examples(row, source)]
        written: list[Document] = []
        for (row, example), encoded in zip(pairs, self.samples([example for _, example in pairs]), strict=True):
            counts["quoted"] += encoded.quoted
            counts["dropped"] += encoded.dropped
            if not encoded.dropped:
                columns = self.columns(row, example, encoded.samples)
                written.append({key: [numbers] for key, numbers in columns.items()})
        return written

    def samples(self, examples: Sequence[Example]) -> list[Encoded]:
        return self.encoder.encode_all(examples)

    def labelled(self, sample: Sample, prefix: str = "") -> Columns:
        """Token ids, and labels that are the ids themselves where they count."""
        tokens, labels = sample.tokens, np.where(sample.mask, sample.tokens, IGNORED)
        if self.config.append_eod and tokens[-1] != self.encoder.tokens.eos_id:
            tokens, labels = (np.append(numbers, self.encoder.tokens.eos_id) for numbers in (tokens, labels))
        return {f"{prefix}input_ids": tokens, f"{prefix}labels": labels}


class Renaming:
    """map_keys: which column of the file stands for which column of the format; a format's own names need none."""

    def __init__(self, text: str, names: dict[str, str]) -> None:
        given = KeyMap.parse(text)
        for name in given.columns:
            if names and name not in names:
                raise UsageError(f"map_keys: {name!r} is not known here; known are {', '.join(names)}")
        self.keys = KeyMap({names.get(name, name): theirs for name, theirs in given.columns.items()}, given.tags)
        self.columns = set(names.values())

    def apply(self, row: Record) -> Record:
        """The row with only the columns that the format has, under its names."""
        renamed = self.keys.apply(row)
        if not self.columns:
            return renamed
        return Record({name: value for name, value in renamed.values.items() if name in self.columns}, row.origin)


class GeneralPretrainHandler(Handler):
    """Each of json_keys into files of its own; nothing is left out."""

    kind = "text"
    mark = ""

    def __init__(self, config: PreprocessConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        if not config.json_keys:
            raise UsageError("json_keys is empty: name the columns to encode, as --json_keys text")
        super().__init__(config, tokenizer)
        self.keys = config.json_keys
        self.level = "sentence" if config.split_sentences else "document"
        self.encoder.config.max_tokens = UNLIMITED

    def dtype(self, key: str) -> np.dtype[Any]:
        return token_dtype(len(self.tokenizer))

    def _encode(self, chunk: Sequence[Record], counts: dict[str, int]) -> list[Document]:
        pieces = [{key: self._pieces(self._text(row, key)) for key in self.keys} for row in chunk]
        texts = [
            TextExample(origin=row.origin, text=piece)
            for row, by_key in zip(chunk, pieces, strict=True)
            for key in self.keys
            for piece in by_key[key]
        ]
        encoded = self.encoder.encode_all(texts)
        counts["quoted"] += sum(one.quoted for one in encoded)
        sequences = iter([one.samples[0].tokens for one in encoded])
        return [{key: self._joined([next(sequences) for _ in by_key[key]]) for key in self.keys} for by_key in pieces]

    def _pieces(self, text: str) -> list[str]:
        return sentences(text) if self.config.split_sentences else [text]

    def _joined(self, sequences: list[Numbers]) -> list[Numbers]:
        """Of a document, which begins and ends once; the encoder begins and ends every text."""
        begun, last = sequences[0][0] == self.encoder.bos_id, len(sequences) - 1
        return [
            numbers[int(begun and place > 0) : None if self.config.append_eod and place == last else -1]
            for place, numbers in enumerate(sequences)
        ]

    def _text(self, row: Record, key: str) -> str:
        if key not in row.values:
            raise fault(row, key, f"missing column; found {', '.join(row.values)}")
        return filled_text(row, key, row.values[key], "text")


ALPACA = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "system": "system",
    "history": "history",
}


class AlpacaStyleInstructionHandler(Handler):
    """instruction, input, output, system, history; labels on the answers."""

    names = ALPACA
    can_pack = True

    def columns(self, row: Record, example: Example, samples: list[Sample]) -> Columns:
        columns = self.labelled(samples[0])
        return columns | {"attention_mask": np.ones(len(columns["input_ids"]), dtype=np.int32)}


class SharegptStyleInstructionHandler(AlpacaStyleInstructionHandler):
    """conversations of from and value (or messages of role and content); labels on the assistant's."""

    names = {"messages": "conversations", "system": "system"}  # noqa: RUF012

    def examples(self, row: Record, source: SourceFormat) -> list[Example]:
        values = row.values
        if "conversations" not in values and "messages" in values and "conversations" not in self.renaming.keys.columns:
            row = Record(
                {"conversations" if name == "messages" else name: value for name, value in values.items()}, row.origin
            )
        return super().examples(row, source)


class R1AlpacaStyleInstructionHandler(Handler):
    """The prompt alone, as a model is asked; the answer as `labels`, for a reward to compare with."""

    kind = "prompt"
    names = ALPACA

    def __init__(self, config: PreprocessConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(config, tokenizer)
        self.further = tuple(key for key in config.dataset_additional_keys if key != "labels")
        self.keys = (*self.further, "labels", "input_ids")

    def samples(self, examples: Sequence[Example]) -> list[Encoded]:
        """Prompts have nothing to learn, so they are samples without a mask."""
        sequences = [self.encoder.chat.prompt(prompt_of(example), False, example.origin) for example in examples]
        encoded: list[Encoded] = []
        for example, segments, ids in zip(examples, sequences, self.encoder.tokens.encode(sequences), strict=True):
            tokens = np.array([token for of_segment in ids for token in of_segment], dtype=np.int32)
            sample = Sample(tokens=tokens, mask=np.zeros(len(tokens), dtype=np.bool_), origin=example.origin)
            dropped = len(tokens) > self.encoder.config.max_tokens
            quoted = any(self.encoder.tokens.quotes_control(segment) for segment in segments)
            encoded.append(Encoded([] if dropped else [sample], dropped=dropped, quoted=quoted))
        return encoded

    def columns(self, row: Record, example: Example, samples: list[Sample]) -> Columns:
        assert isinstance(example, ChatExample)
        columns = {"input_ids": samples[0].tokens, "labels": self._plain(example.messages[-1]["content"])}
        for key in self.further:
            if row.values.get(key) is None:
                raise fault(row, key, "missing (dataset_additional_keys)")
            value = row.values[key]
            columns[key] = self._plain(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        return columns

    def _plain(self, text: str) -> Numbers:
        return np.array(self.tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)


def prompt_of(example: Example) -> list[Message]:
    assert isinstance(example, ChatExample)
    return example.messages[:-1]


PAIR = {"chosen": "chosen", "rejected": "rejected"}


class AlpacaStylePairwiseHandler(Handler):
    """A prompt with a chosen and a rejected answer; labels on the answers."""

    kind = "pair"
    keys = ("rejected_labels", "rejected_input_ids", "chosen_labels", "chosen_input_ids")
    names = ALPACA | PAIR

    def columns(self, row: Record, example: Example, samples: list[Sample]) -> Columns:
        chosen, rejected = samples
        return self.labelled(chosen, "chosen_") | self.labelled(rejected, "rejected_")


class SharegptStylePairwiseHandler(AlpacaStylePairwiseHandler, SharegptStyleInstructionHandler):
    """The same with conversations."""

    names = {"messages": "conversations", "system": "system", **PAIR}  # noqa: RUF012
    can_pack = False


class AlpacaStyleProcessRewardHandler(Handler):
    """Answers in steps; after each a placeholder, whose label is the token for a right or a wrong step."""

    kind = "stepwise"

    def __init__(self, config: PreprocessConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(config, tokenizer)
        if len(config.reward_tokens) != 2:
            raise UsageError(f"reward_tokens is {list(config.reward_tokens)}; give two, for right and for wrong steps")
        self.right, self.wrong = (self._one_token(text) for text in config.reward_tokens)

    def facts(self) -> dict[str, Any]:
        return {"reward_ids": [self.right, self.wrong]}

    def _one_token(self, text: str) -> int:
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1 or ids[0] == self.tokenizer.unk_token_id:
            raise UsageError(
                f"reward_tokens: {text!r} is {len(ids)} tokens in this tokenizer; it must be one it knows."
            )
        return ids[0]

    def columns(self, row: Record, example: Example, samples: list[Sample]) -> Columns:
        sample = samples[0]
        assert sample.targets is not None
        if not np.isin(sample.targets, (0, 1)).all():
            raise DataError(
                f"{row.origin}: a label between 0 and 1 has no token; write 1 for right steps and 0 for wrong"
            )
        labels = np.full(len(sample), IGNORED, dtype=np.int32)
        labels[sample.mask] = np.where(sample.targets[sample.mask] == 1, self.right, self.wrong)
        return {
            "input_ids": sample.tokens,
            "attention_mask": np.ones(len(sample), dtype=np.int32),
            "labels": labels,
        }


HANDLERS: dict[str, type[Handler]] = {
    handler.__name__: handler
    for handler in (
        GeneralPretrainHandler,
        AlpacaStyleInstructionHandler,
        SharegptStyleInstructionHandler,
        R1AlpacaStyleInstructionHandler,
        AlpacaStylePairwiseHandler,
        SharegptStylePairwiseHandler,
        AlpacaStyleProcessRewardHandler,
    )
}


def make_handler(config: PreprocessConfig, tokenizer: PreTrainedTokenizerBase) -> Handler:
    """The handler that the configuration names."""
    return handler_class(config.handler_name)(config, tokenizer)


def handler_class(name: str) -> type[Handler]:
    if name not in HANDLERS:
        said = f"there is no handler {name!r}" if name else "handler_name is not set"
        raise UsageError(f"{said}. Handlers: {', '.join(HANDLERS)}")
    return HANDLERS[name]
