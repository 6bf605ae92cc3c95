"""Handlers by name: turn records of a file into columns of token ids, with the encoding that training uses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from posttrain.config.sections import DataConfig
from posttrain.core.errors import DataError, UsageError, tokenizer_errors
from posttrain.core.lazy import PreTrainedTokenizerBase
from posttrain.core.types import ExampleKind, Sample
from posttrain.data.encoding.encoder import Encoded, Encoder
from posttrain.data.preprocessing.indexed import Numbers, token_dtype
from posttrain.data.preprocessing.sentences import sentences
from posttrain.data.reading.cells import cell_error, filled_text
from posttrain.data.reading.columns import KeyMap
from posttrain.data.reading.examples import ChatExample, Example, Message, TextExample
from posttrain.data.reading.formats import SourceFormat
from posttrain.data.reading.records import Record

IGNORED = -100  # the label of a token that is not trained on
UNLIMITED = 2**31 - 1
Columns = dict[str, Numbers]
Document = dict[str, list[Numbers]]  # what is written for an example: one or more sequences per key


@dataclass(kw_only=True, slots=True)
class PreprocessConfig:
    """Options of `posttrain data preprocess`."""

    input: tuple[str, ...] = ()
    """Required. Files, directories, globs or dataset names to read."""
    handler_name: str = ""
    """Required. Format of the examples and of the files to write; an unknown name lists all handlers."""
    tokenizer: str = ""
    """Required. Directory or Hugging Face name of the tokenizer, or `pico`."""
    output_prefix: str = ""
    """Required. Files are written to <output_prefix>_<key>_document.bin and .idx; post-training handlers add
    _packed."""
    chat_template: str = ""
    """Chat template by name (qwen, llama3, qwen_r1 ...) or file; empty: the tokenizer's own."""
    map_keys: dict[str, str] = field(default_factory=dict)
    """Column names of the files by the handler's names, as JSON: {"prompt": "problem", "response": "answer"}."""
    seq_length: int = 0
    """Drop and count examples with this many tokens or more (except GeneralPretrainHandler); 0: no limit."""
    append_eod: bool = False
    """Append the end-of-sequence token to every example that does not end with it."""
    pack: bool = False
    """Instruction handlers: pack examples into sequences of seq_length tokens."""
    neat_pack: bool = False
    """Like pack, with examples numbered from 1 in attention_mask, so that each attends only to itself."""
    json_keys: tuple[str, ...] = ("text",)
    """GeneralPretrainHandler: the columns to encode, each into its own files."""
    split_sentences: bool = False
    """GeneralPretrainHandler: write each sentence as a sequence, to files named _sentence instead of _document."""
    dataset_additional_keys: tuple[str, ...] = ()
    """R1AlpacaStyleInstructionHandler: further columns to encode unchanged."""
    placeholder: str = "ки"
    """AlpacaStyleProcessRewardHandler: the text that marks the end of a step."""
    reward_tokens: tuple[str, ...] = ("+", "-")
    """AlpacaStyleProcessRewardHandler: labels of a correct and of an incorrect step, one token each."""
    on_bad_example: Literal["stop", "quarantine"] = "stop"
    """stop: an unusable example ends the command; quarantine: it is written to a file and counted."""
    workers: int = 1
    """Number of encoding processes. The result does not depend on it."""
    n_subs: int = 0
    """Approximate number of parts that an interrupted command resumes from; 0: one part per 64 MB."""
    cache_dir: str = ""
    """Directory for unfinished parts; empty: next to the output."""
    log_interval: int = 10_000
    """Examples between two lines of progress."""


@dataclass(slots=True)
class EncodedColumn:
    """One column of many examples."""

    numbers: Numbers  # all sequences, concatenated
    lengths: Numbers  # of the sequences
    documents: Numbers  # number of sequences of each example


@dataclass(slots=True)
class EncodedChunk:
    """The result of encoding a chunk of records."""

    columns: dict[str, EncodedColumn]
    counts: dict[str, int]
    bad: list[dict[str, Any]] = field(default_factory=list)  # quarantined records, with the reason


class Handler:
    """Turns records into columns. Subclasses define the examples of a record and the columns of a sample."""

    kind: ExampleKind | Literal["prompt"] = "chat"
    keys: tuple[str, ...] = ("attention_mask", "labels", "input_ids")  # in the order of publication
    suffix = "_packed"  # part of the file names that other trainers expect for post-training data
    level = "document"  # what a sequence is; the file names end with it
    can_pack = False

    def __init__(self, config: PreprocessConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.encoder = self._encoder()
        self.renamer = ColumnRenamer(config.map_keys, self.names)

    # Subclasses may override these

    names: dict[str, str] = {}  # noqa: RUF012  column name in map_keys -> column name of the format

    def examples(self, record: Record, source: SourceFormat) -> list[Example]:
        return source.examples(self.renamer.apply(record))

    def columns(self, record: Record, example: Example, samples: list[Sample]) -> Columns:
        """Return the columns to write for an example's samples."""
        raise NotImplementedError

    def manifest_entries(self) -> dict[str, Any]:
        """Return further manifest entries that readers of the files need."""
        return {}

    # Shared by all handlers

    def _encoder(self) -> Encoder:
        config = DataConfig(
            max_length=self.config.seq_length - 1 if self.config.seq_length else UNLIMITED,
            on_overlong="drop",
        )
        kind: ExampleKind = "chat" if self.kind == "prompt" else self.kind
        return Encoder(self.tokenizer, config, kind, len(self.tokenizer), self.config.placeholder)

    def dtype(self, key: str) -> np.dtype[Any]:
        """Return a column's type: int32 for labels, which include -100; else two bytes per token if they suffice."""
        return np.dtype("<i4") if key.endswith("labels") else token_dtype(len(self.tokenizer))

    def encode(self, chunk: Sequence[Record]) -> EncodedChunk:
        """Encode all records of a chunk, in order."""
        counts = dict.fromkeys(("read", "kept", "dropped", "bad", "tokens", "quoted"), 0)
        counts["read"] = len(chunk)
        documents: list[Document] = []
        bad: list[dict[str, Any]] = []
        try:
            documents = self._encode(chunk, counts)
        except DataError:
            if self.config.on_bad_example == "stop":
                raise
            counts |= dict.fromkeys(counts.keys() - {"read"}, 0)
            for record in chunk:
                try:
                    documents += self._encode([record], counts)
                except DataError as error:
                    bad.append({"reason": str(error), "row": record.values})
        counts["kept"], counts["bad"] = len(documents), len(bad)
        columns: dict[str, EncodedColumn] = {}
        for key in self.keys:
            sequences = [sequence for document in documents for sequence in document[key]]
            numbers = np.concatenate(sequences) if sequences else np.zeros(0, dtype=np.int64)
            columns[key] = EncodedColumn(
                numbers.astype(self.dtype(key)),
                np.array([len(sequence) for sequence in sequences], dtype=np.int32),
                np.array([len(document[key]) for document in documents], dtype=np.int64),
            )
            counts["tokens"] += len(numbers) if key.endswith("input_ids") or self.kind == "text" else 0
        return EncodedChunk(columns, counts, bad)

    def _encode(self, chunk: Sequence[Record], counts: dict[str, int]) -> list[Document]:
        source = SourceFormat(self.encoder.kind, self.config.placeholder)
        pairs = [(record, example) for record in chunk for example in self.examples(record, source)]
        documents: list[Document] = []
        for (record, example), encoded in zip(pairs, self.samples([example for _, example in pairs]), strict=True):
            counts["quoted"] += encoded.quoted
            counts["dropped"] += encoded.dropped
            if not encoded.dropped:
                columns = self.columns(record, example, encoded.samples)
                documents.append({key: [numbers] for key, numbers in columns.items()})
        return documents

    def samples(self, examples: Sequence[Example]) -> list[Encoded]:
        return self.encoder.encode_all(examples)

    def ids_and_labels(self, sample: Sample, prefix: str = "") -> Columns:
        """Return token ids and labels: the ids themselves where a token is trained on, else -100."""
        tokens, labels = sample.tokens, np.where(sample.mask, sample.tokens, IGNORED)
        if self.config.append_eod and tokens[-1] != self.encoder.tokens.eos_id:
            tokens, labels = (np.append(numbers, self.encoder.tokens.eos_id) for numbers in (tokens, labels))
        return {f"{prefix}input_ids": tokens, f"{prefix}labels": labels}


class ColumnRenamer:
    """Renames columns by map_keys; columns that already have the format's names need no entry."""

    def __init__(self, keys: dict[str, str], names: dict[str, str]) -> None:
        given = KeyMap.parse(keys)
        for name in given.columns:
            if names and name not in names:
                raise UsageError(f"map_keys: unknown column {name!r}; known are {', '.join(names)}")
        self.keys = KeyMap({names.get(name, name): column for name, column in given.columns.items()}, given.tags)
        self.columns = set(names.values())

    def apply(self, record: Record) -> Record:
        """Return the record with only the format's columns, under the format's names."""
        renamed = self.keys.apply(record)
        if not self.columns:
            return renamed
        return Record({name: value for name, value in renamed.values.items() if name in self.columns}, record.origin)


class GeneralPretrainHandler(Handler):
    """Encodes each of json_keys into its own files; no example is dropped."""

    kind = "text"
    suffix = ""

    def __init__(self, config: PreprocessConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        if not config.json_keys:
            raise UsageError("json_keys is empty: name the columns to encode, for example --json_keys text")
        super().__init__(config, tokenizer)
        self.keys = config.json_keys
        self.level = "sentence" if config.split_sentences else "document"
        self.encoder.config.max_length = UNLIMITED

    def dtype(self, key: str) -> np.dtype[Any]:
        return token_dtype(len(self.tokenizer))

    def _encode(self, chunk: Sequence[Record], counts: dict[str, int]) -> list[Document]:
        texts_of = [{key: self._sequences_of(self._text(record, key)) for key in self.keys} for record in chunk]
        texts = [
            TextExample(origin=record.origin, text=text)
            for record, by_key in zip(chunk, texts_of, strict=True)
            for key in self.keys
            for text in by_key[key]
        ]
        encoded = self.encoder.encode_all(texts)
        counts["quoted"] += sum(one.quoted for one in encoded)
        sequences = iter([one.samples[0].tokens for one in encoded])
        return [
            {key: self._trim_specials([next(sequences) for _ in by_key[key]]) for key in self.keys}
            for by_key in texts_of
        ]

    def _sequences_of(self, text: str) -> list[str]:
        return sentences(text) if self.config.split_sentences else [text]

    def _trim_specials(self, sequences: list[Numbers]) -> list[Numbers]:
        """Remove the BOS and EOS tokens inside a document: the encoder adds them to every sentence."""
        begun, last = sequences[0][0] == self.encoder.bos_id, len(sequences) - 1
        return [
            numbers[int(begun and index > 0) : None if self.config.append_eod and index == last else -1]
            for index, numbers in enumerate(sequences)
        ]

    def _text(self, record: Record, key: str) -> str:
        if key not in record.values:
            raise cell_error(record, key, f"missing column; the columns are {', '.join(record.values)}")
        return filled_text(record, key, record.values[key], "text")


ALPACA = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "system": "system",
    "history": "history",
}


class AlpacaStyleInstructionHandler(Handler):
    """Columns instruction, input, output, system, history; labels on the completion."""

    names = ALPACA
    can_pack = True

    def columns(self, record: Record, example: Example, samples: list[Sample]) -> Columns:
        columns = self.ids_and_labels(samples[0])
        return columns | {"attention_mask": np.ones(len(columns["input_ids"]), dtype=np.int32)}


class SharegptStyleInstructionHandler(AlpacaStyleInstructionHandler):
    """Conversations of from and value (or messages of role and content); labels on the assistant's messages."""

    names = {"messages": "conversations", "system": "system"}  # noqa: RUF012

    def examples(self, record: Record, source: SourceFormat) -> list[Example]:
        values = record.values
        if "conversations" not in values and "messages" in values and "conversations" not in self.renamer.keys.columns:
            renamed = {"conversations" if name == "messages" else name: value for name, value in values.items()}
            record = Record(renamed, record.origin)
        return super().examples(record, source)


class HunyuanInstructionHandler(AlpacaStyleInstructionHandler):
    """As AlpacaStyleInstructionHandler, for Hunyuan-Large: the tokenizer's own chat template is used."""

    def __init__(self, config: PreprocessConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise UsageError(
                "HunyuanInstructionHandler needs a tokenizer with a chat template; or give --chat_template"
            )
        super().__init__(config, tokenizer)


class R1AlpacaStyleInstructionHandler(Handler):
    """The prompt with the generation prompt; the reference completion as `labels`, for reward functions."""

    kind = "prompt"
    names = ALPACA

    def __init__(self, config: PreprocessConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(config, tokenizer)
        self.extra_keys = tuple(key for key in config.dataset_additional_keys if key != "labels")
        self.keys = (*self.extra_keys, "labels", "input_ids")

    def samples(self, examples: Sequence[Example]) -> list[Encoded]:
        """Encode the prompts as samples in which no token is trained on."""
        sequences = [self.encoder.chat.prompt(prompt_messages(example), False, example.origin) for example in examples]
        encoded: list[Encoded] = []
        for example, segments, ids in zip(examples, sequences, self.encoder.tokens.encode(sequences), strict=True):
            tokens = np.array([token for of_segment in ids for token in of_segment], dtype=np.int32)
            sample = Sample(tokens=tokens, mask=np.zeros(len(tokens), dtype=np.bool_), origin=example.origin)
            dropped = len(tokens) > self.encoder.config.max_length
            quoted = any(self.encoder.tokens.quotes_control(segment) for segment in segments)
            encoded.append(Encoded([] if dropped else [sample], dropped=dropped, quoted=quoted))
        return encoded

    def columns(self, record: Record, example: Example, samples: list[Sample]) -> Columns:
        assert isinstance(example, ChatExample)
        columns = {"input_ids": samples[0].tokens, "labels": self._plain(example.messages[-1]["content"])}
        for key in self.extra_keys:
            if record.values.get(key) is None:
                raise cell_error(record, key, "missing column, but dataset_additional_keys names it")
            value = record.values[key]
            columns[key] = self._plain(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        return columns

    def _plain(self, text: str) -> Numbers:
        with tokenizer_errors(f"a text that begins with {text[:40]!r}"):
            return np.array(self.tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)


def prompt_messages(example: Example) -> list[Message]:
    assert isinstance(example, ChatExample)
    return example.messages[:-1]


PAIR = {"chosen": "chosen", "rejected": "rejected"}


class PPOAlpacaStyleInstructionHandler(R1AlpacaStyleInstructionHandler):
    """The prompt with the generation prompt alone, for reward models and reward functions that need nothing else."""

    def __init__(self, config: PreprocessConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(config, tokenizer)
        self.keys = ("attention_mask", "input_ids")

    def columns(self, record: Record, example: Example, samples: list[Sample]) -> Columns:
        tokens = samples[0].tokens
        return {"input_ids": tokens, "attention_mask": np.ones(len(tokens), dtype=np.int32)}


class AlpacaStylePairwiseHandler(Handler):
    """A prompt with a chosen and a rejected completion; labels on the completions."""

    kind = "pair"
    keys = ("rejected_labels", "rejected_input_ids", "chosen_labels", "chosen_input_ids")
    names = ALPACA | PAIR

    def columns(self, record: Record, example: Example, samples: list[Sample]) -> Columns:
        chosen, rejected = samples
        return self.ids_and_labels(chosen, "chosen_") | self.ids_and_labels(rejected, "rejected_")


class SharegptStylePairwiseHandler(AlpacaStylePairwiseHandler, SharegptStyleInstructionHandler):
    """Like AlpacaStylePairwiseHandler, with conversations."""

    names = {"messages": "conversations", "system": "system", **PAIR}  # noqa: RUF012
    can_pack = False


class AlpacaStyleProcessRewardHandler(Handler):
    """Completions in steps; the placeholder after each step is labelled with a token for correct or incorrect."""

    kind = "stepwise"

    def __init__(self, config: PreprocessConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(config, tokenizer)
        if len(config.reward_tokens) != 2:
            raise UsageError(
                f"reward_tokens is {list(config.reward_tokens)}; give two, for correct and for incorrect steps"
            )
        self.correct, self.incorrect = (self._one_token(text) for text in config.reward_tokens)

    def manifest_entries(self) -> dict[str, Any]:
        return {"reward_ids": [self.correct, self.incorrect]}

    def _one_token(self, text: str) -> int:
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1 or ids[0] == self.tokenizer.unk_token_id:
            raise UsageError(
                f"reward_tokens: {text!r} is {len(ids)} tokens in this tokenizer; it must be one known token."
            )
        return ids[0]

    def columns(self, record: Record, example: Example, samples: list[Sample]) -> Columns:
        sample = samples[0]
        assert sample.targets is not None
        if not np.isin(sample.targets, (0, 1)).all():
            raise DataError(
                f"{record.origin}: a label between 0 and 1 cannot be written; use 1 (correct step) or 0 (incorrect)"
            )
        labels = np.full(len(sample), IGNORED, dtype=np.int32)
        labels[sample.mask] = np.where(sample.targets[sample.mask] == 1, self.correct, self.incorrect)
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
        HunyuanInstructionHandler,
        R1AlpacaStyleInstructionHandler,
        PPOAlpacaStyleInstructionHandler,
        AlpacaStylePairwiseHandler,
        SharegptStylePairwiseHandler,
        AlpacaStyleProcessRewardHandler,
    )
}


def make_handler(config: PreprocessConfig, tokenizer: PreTrainedTokenizerBase) -> Handler:
    """Create the handler that the configuration names."""
    return handler_class(config.handler_name)(config, tokenizer)


def handler_class(name: str) -> type[Handler]:
    if name not in HANDLERS:
        problem = f"no handler {name!r}" if name else "handler_name is not set"
        raise UsageError(f"{problem}. Handlers: {', '.join(HANDLERS)}")
    return HANDLERS[name]
