"""`posttrain data preprocess CONFIG.yaml --option value ...`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.config.parsing import read_args
from posttrain.config.sections import ModelConfig
from posttrain.core.errors import UsageError
from posttrain.data.preprocessing.handlers import PreprocessConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ABOUT = "Tokenise rows once into indexed files (.bin and .idx) that trainers read directly"


def run(args: list[str]) -> int:
    config = read_args("data preprocess", ABOUT, PreprocessConfig(), args)
    from posttrain.data.preprocessing.preprocess import check, preprocess

    check(config)  # before the tokenizer is loaded
    if not config.tokenizer_name_or_path:
        raise UsageError("tokenizer_name_or_path is not set. Give a folder, a hub name or pico.")
    from posttrain.core.logging import quiet_libraries

    quiet_libraries()
    preprocess(config, load_tokenizer(config))
    return 0


def load_tokenizer(config: PreprocessConfig) -> PreTrainedTokenizerBase:
    from posttrain.models import tokenizers

    name = config.tokenizer_name_or_path
    try:
        if not config.tokenizer_not_use_fast:
            return tokenizers.load_tokenizer(ModelConfig(path=name))
        return tokenizers.load_slow_tokenizer(name)
    except UsageError as error:
        raise UsageError(str(error).replace("model.path", "tokenizer_name_or_path")) from error
