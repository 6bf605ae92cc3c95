"""`posttrain data preprocess`: tokenizes examples once into indexed files."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, Literal

from posttrain.config.sections import ModelConfig
from posttrain.config.tools import ToolArgs, read_tool
from posttrain.core.errors import UsageError
from posttrain.core.lazy import PreTrainedTokenizerBase
from posttrain.data.preprocessing.handlers import PreprocessConfig

DEFAULT_HANDLER = "GeneralPretrainHandler"  # what preprocess_data.py takes where a script names none


@dataclass(kw_only=True)
class PreprocessArgs(PreprocessConfig, ToolArgs):
    """Options of the command: those of preprocessing, and flags of MindSpeed-LLM's preprocess_data.py."""

    verb: ClassVar[str] = "data preprocess"
    about: ClassVar[str] = "tokenize examples once into indexed files (.bin and .idx) that trainers read directly"
    example: ClassVar[str] = (
        "posttrain data preprocess --input examples/data/text.jsonl --handler_name GeneralPretrainHandler "
        "--tokenizer pico --output_prefix out/text"
    )
    group: ClassVar[str] = "flags of MindSpeed-LLM 2.0.0, for existing scripts"

    tokenizer_name_or_path: str = ""
    """The same as tokenizer."""
    prompt_type: str = ""
    """The same as chat_template."""
    prompt_type_path: str = ""
    """File with the template that prompt_type names, such as templates.json; the same as chat_template FILE:NAME."""
    json_key: tuple[str, ...] = ()
    """The same as json_keys."""
    vocab_file: str = ""
    """vocab.json of a tokenizer; its directory is the tokenizer, unless tokenizer is given."""
    merge_file: str = ""
    """merges.txt of a tokenizer; has no effect: it is read from the directory of vocab_file."""
    overwrite_cache: bool = False
    """Has no effect: parts of another command are never used."""
    placeholder_token: str = ""
    """The same as placeholder."""
    tokenizer_not_use_fast: bool = False
    """Has no effect, as slow_tokenizer."""
    slow_tokenizer: bool = False
    """Has no effect: transformers 5 has one implementation of each tokenizer."""
    tokenizer_type: Literal["PretrainedFromHF", "HuggingFaceTokenizer", "GPT2BPETokenizer"] = "PretrainedFromHF"
    """Has no effect: tokenizers are those of Hugging Face."""
    seed: int = 0
    """Has no effect: preprocessing uses no random numbers."""

    def __post_init__(self) -> None:
        """Set the options that have the meaning of the flags given."""
        folder = str(Path(self.vocab_file).parent) if self.vocab_file else ""
        self.tokenizer = self.tokenizer_name_or_path or self.tokenizer or folder
        named = f"{self.prompt_type_path}:{self.prompt_type}" if self.prompt_type_path else self.prompt_type
        self.chat_template = named or self.chat_template
        self.json_keys = self.json_key or self.json_keys
        self.placeholder = self.placeholder_token or self.placeholder

    def config(self) -> PreprocessConfig:
        """Return the options without the flags."""
        return PreprocessConfig(**{entry.name: getattr(self, entry.name) for entry in fields(PreprocessConfig)})


def run(args: list[str]) -> int:
    options = read_tool(PreprocessArgs(), args)
    for name in ("slow_tokenizer", "tokenizer_not_use_fast"):
        if getattr(options, name):
            reason = "transformers 5 has one implementation of each tokenizer"
            print(f"posttrain: --{name} has no effect: {reason}", file=sys.stderr)
    if not options.handler_name:
        options.handler_name = DEFAULT_HANDLER
        print(f"posttrain: --handler_name is not given: {DEFAULT_HANDLER}, for plain text", file=sys.stderr)
    config = options.config()
    from posttrain.data.preprocessing.preprocess import check_settings, preprocess

    check_settings(config)  # before the tokenizer is loaded
    if not config.tokenizer:
        raise UsageError("tokenizer is not set. Give a directory, a Hugging Face name or pico: --tokenizer MODEL")
    from posttrain.core.logging import quiet_libraries

    quiet_libraries()
    preprocess(config, open_tokenizer(config))
    return 0


def open_tokenizer(config: PreprocessConfig) -> PreTrainedTokenizerBase:
    from posttrain.models import tokenizers

    try:
        return tokenizers.load_tokenizer(ModelConfig(path=config.tokenizer))
    except UsageError as error:
        raise UsageError(str(error).replace("model.path", "tokenizer")) from error
