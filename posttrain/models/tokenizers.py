"""Loads tokenizers: of a model, of a folder of their own, or of a bare vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoTokenizer, GPT2Tokenizer, PreTrainedTokenizerBase, Qwen2Tokenizer

from posttrain.config.sections import ModelConfig
from posttrain.core.errors import tokenizer_errors
from posttrain.core.model_limits import check_added_tokens, check_tokenizer_files
from posttrain.models import paths


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model. If it has no padding token, the end token is used; none is added."""
    option = "model.tokenizer" if model.tokenizer else "model.path"
    source = tokenizer_folder(model.tokenizer) or paths.resolve_path(model.tokenizer or model.path)
    while paths.is_adapter(source) and not (Path(source) / "tokenizer_config.json").is_file():
        source = paths.resolve_base(source)
    check_tokenizer_files(Path(source), f"{option}: {source}")
    with paths.loading_errors(source, option), tokenizer_errors(f"{option}: {source}"):
        if is_bare_vocabulary(Path(source)):
            tokenizer = tokenizer_from_vocabulary(Path(source))
        else:
            tokenizer = AutoTokenizer.from_pretrained(source, **paths.hub_options(source))
    check_added_tokens(len(tokenizer.added_tokens_decoder), f"{option}: {source}")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def tokenizer_folder(path: str) -> str:
    """Return the path if it is a folder that holds a tokenizer, with or without a model; otherwise an empty text."""
    folder = Path(path).expanduser()
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    return str(folder) if path and any((folder / name).is_file() for name in names) else ""


def is_bare_vocabulary(folder: Path) -> bool:
    """Whether a folder has vocab.json and merges.txt, and no file that names the tokenizer's class."""
    described = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "config.json"))
    return not described and all((folder / name).is_file() for name in ("vocab.json", "merges.txt"))


def tokenizer_from_vocabulary(folder: Path) -> PreTrainedTokenizerBase:
    """Return GPT-2's tokenizer if its end token is in vocab.json, else Qwen's, whose control tokens come after it."""
    vocabulary = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    try:
        if "<|endoftext|>" in vocabulary:
            return GPT2Tokenizer.from_pretrained(folder)
        return Qwen2Tokenizer.from_pretrained(folder, extra_special_tokens=["<|im_start|>", "<|im_end|>"])
    except Exception as error:  # what the library raises if merges do not fit the vocabulary
        raise ValueError(str(error)) from error


def score_padding_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the padding token for a score model; never the end token.

    Stock code scores the last token that is not padding: if padding were the end token, it would miss the last token.
    None (there is no other special token): stock code then scores one sequence at a time and says so.
    """
    candidates = (tokenizer.pad_token_id, tokenizer.unk_token_id, *tokenizer.all_special_ids)
    return next((token for token in candidates if token is not None and token != tokenizer.eos_token_id), None)
