"""Refuses model files whose values would make loading take all time or memory, before anything is built from them."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from posttrain.core.errors import UsageError

LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "num_nextn_predict_layers", "first_k_dense_replace")
HEADS = ("num_attention_heads", "n_head", "num_key_value_heads", "multi_query_group_num")
WIDTHS = ("intermediate_size", "ffn_hidden_size", "n_inner", "moe_intermediate_size", "shared_expert_intermediate_size")
HIDDEN = ("hidden_size", "n_embd", "n_embed")
HEAD_SIZES = ("head_dim", "kv_channels", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
VOCABULARY = ("vocab_size", "padded_vocab_size")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "n_shared_experts", "num_experts_per_tok")
POSITIONS = ("max_position_embeddings", "n_positions")
MAY_BE_ZERO = (*EXPERTS, *WIDTHS, "num_nextn_predict_layers", "first_k_dense_replace", "qk_nope_head_dim")
LIMITS = {  # several times what any known model has
    **dict.fromkeys(LAYERS, 1024),
    **dict.fromkeys(HEADS, 4096),
    **dict.fromkeys(WIDTHS, 2**22),
    **dict.fromkeys(HIDDEN, 2**18),
    **dict.fromkeys(HEAD_SIZES, 2**14),
    **dict.fromkeys(VOCABULARY, 2**24),
    **dict.fromkeys(EXPERTS, 2**14),
    **dict.fromkeys(POSITIONS, 10**9),
}
MAX_DEPTH = 8  # of sections inside sections
MAX_VALUES = 200_000  # of the whole file: labels of a classifier are listed in it
MAX_ADDED_TOKENS = 20_000  # every text is searched for each of them
MAX_STOP_TOKENS = 1_000  # of generation_config.json
MAX_FILE_BYTES = 2**28  # of a file that describes a model or a tokenizer; the largest known have 35 MB
MAX_NORMALIZERS = 100
MAX_GROWTH = 4096  # of a text by the replacements of a tokenizer's normalizers
DESCRIPTIONS = ("*.json", "*.jinja", "*.txt", "*.model")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def check_model_config(config: Any, where: str, weight_bytes: int = 0) -> None:
    """Raise UsageError if a value of config.json is not plausible.

    `weight_bytes`: size of the weight files, if they are known; a matrix cannot have many times as many values.
    """
    if not isinstance(config, dict):
        raise UsageError(f"{where}: config.json holds {type(config).__name__} instead of a mapping")
    for section in nested_mappings(config, where):
        for name, largest in LIMITS.items():
            value = section.get(name)
            if value is None or (isinstance(value, list) and all(isinstance(one, int) for one in value)):
                continue  # absent, or one value for each layer
            smallest = 0 if name in MAY_BE_ZERO else 1
            if isinstance(value, bool) or not isinstance(value, int) or not smallest <= value <= largest:
                shown = f"{value!r}"[:60]
                raise UsageError(f"{where}: config.json: {name} is {shown}; it must be from {smallest} to {largest:,}")
        if weight_bytes:
            check_matrices(section, where, weight_bytes)


def nested_mappings(config: dict[str, Any], where: str) -> Iterator[dict[str, Any]]:
    """Yield the configuration and all mappings in it; refuse one that is nested too deeply or too large."""
    waiting: list[tuple[Any, int]] = [(config, 0)]
    seen = 0
    while waiting:
        value, depth = waiting.pop()
        seen += 1
        if depth > MAX_DEPTH:
            raise UsageError(f"{where}: config.json: sections are nested more than {MAX_DEPTH} deep")
        if isinstance(value, dict):
            yield value
        inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ()
        seen += len(inner)
        if seen > MAX_VALUES:
            raise UsageError(f"{where}: config.json has more than {MAX_VALUES:,} values")
        waiting += [(one, depth + 1) for one in inner if isinstance(one, (dict, list))]


def check_matrices(section: dict[str, Any], where: str, weight_bytes: int) -> None:
    """Refuse a matrix with more values than the weight files can hold, at one bit for each."""

    def first(names: tuple[str, ...]) -> tuple[str, int]:
        return next(((name, value) for name in names if isinstance(value := section.get(name), int)), ("", 0))

    (hidden_name, hidden), (head_name, heads) = first(HIDDEN), first(HEADS)
    for name, width in (first(VOCABULARY), first(WIDTHS), (head_name, heads * first(HEAD_SIZES)[1])):
        if hidden * width > 8 * weight_bytes:
            raise UsageError(
                f"{where}: config.json: {hidden_name} and {name} make a matrix of {hidden:,} x {width:,}, but the "
                f"weight files have {weight_bytes:,} bytes in all"
            )


def weight_file_bytes(folder: Path) -> int:
    """Return the size of a folder's weight files; 0 if it has none, as a hub name or a folder with only a config."""
    return sum(file.stat().st_size for file in folder.glob("model*.safetensors")) if folder.is_dir() else 0


def check_files(folder: Path, where: str) -> None:
    """Raises UsageError if reading a file that describes the model would not end: a pipe, a device, or a huge file."""
    for file in (file for pattern in DESCRIPTIONS for file in folder.glob(pattern)):
        with suppress(OSError):  # a link to nothing: the loader says that the file is missing
            found = file.stat()
            if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
                raise UsageError(f"{where}: {file.name} is not a regular file")
            if found.st_size > MAX_FILE_BYTES:
                raise UsageError(f"{where}: {file.name} has {found.st_size:,} bytes; at most {MAX_FILE_BYTES:,} can be")


def check_generation_config(folder: Path, where: str) -> None:
    """Raises UsageError if the end tokens in generation_config.json are not token ids, or too many to look for."""
    try:
        config = json.loads((folder / "generation_config.json").read_bytes())
    except (OSError, ValueError, RecursionError):  # it has none, or the loader says what is wrong with the file
        return
    ids = config.get("eos_token_id") if isinstance(config, dict) else []
    for one in (several := ids if isinstance(ids, list) else [ids])[: MAX_STOP_TOKENS + 1]:
        if one is not None and (isinstance(one, bool) or not isinstance(one, int) or not -1 <= one < 2**31):
            raise UsageError(f"{where}: generation_config.json: eos_token_id is {repr(one)[:60]}, which is no token id")
    if len(several) > MAX_STOP_TOKENS:
        counts = f"{len(several):,} end tokens; at most {MAX_STOP_TOKENS:,} are allowed"
        raise UsageError(f"{where}: generation_config.json: {counts}")


def check_tokenizer_files(folder: Path, where: str) -> None:
    """Raise UsageError if a tokenizer has more added tokens than can be read and searched for within seconds.

    The same if its normalizers make texts many times as long. config.json is checked too, since transformers reads it
    to choose the tokenizer's class.
    """
    check_files(folder, where)
    with suppress(OSError, ValueError, RecursionError):  # it has none, or the loader says what is wrong with the file
        check_model_config(json.loads((folder / "config.json").read_bytes()), where)
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            content = (folder / name).read_bytes()
            check_added_tokens(content.count(b'"single_word"'), f"{where}: {name}")
            if name == TOKENIZER_FILES[0] and b'"Replace"' in content:
                check_normalizers(content, f"{where}: {name}")
    extra = folder / "added_tokens.json"  # maps each token to its number
    if extra.is_file():
        check_added_tokens(extra.read_bytes().count(b'":'), f"{where}: {extra.name}")


def check_normalizers(content: bytes, where: str) -> None:
    """Raises UsageError if the replacements of a tokenizer.json can make a text thousands of times as long."""
    try:
        waiting = [json.loads(content)["normalizer"]]
    except (ValueError, RecursionError, LookupError, TypeError):  # the loader says what is wrong with the file
        return
    seen, growth = 0, 1.0
    while waiting:
        step = waiting.pop()
        if not isinstance(step, dict):
            continue
        seen += 1
        inner = step.get("normalizers")
        waiting += inner if isinstance(inner, list) else []
        replaced = step.get("pattern")
        if step.get("type") == "Replace" and isinstance(replaced, dict):
            text = replaced.get("String")  # otherwise a regular expression, which may match between two characters
            added = len(str(step.get("content", "")))
            growth *= max(1.0, added / max(1, len(text)) if isinstance(text, str) else 1 + added)
        if seen > MAX_NORMALIZERS or growth > MAX_GROWTH:
            raise UsageError(
                f"{where}: its normalizers could make a text more than {MAX_GROWTH:,} times as long, or are more than "
                f"{MAX_NORMALIZERS}"
            )


def check_added_tokens(count: int, where: str) -> None:
    if count > MAX_ADDED_TOKENS:
        raise UsageError(f"{where}: {count:,} added tokens; at most {MAX_ADDED_TOKENS:,} are allowed")
