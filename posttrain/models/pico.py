"""Builds `pico`: a Llama with under a million parameters and its tokenizer, so that everything can run offline."""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIALS = ("<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
CONTEXT = 512
SEED = 20240229

# A turn ends with <|end|>, which is also the end-of-sequence token, so that it stops chats and plain generation.
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
    {%- if message['role'] not in ['system', 'user', 'assistant'] -%}
        {{- raise_exception('pico knows the roles system, user and assistant, not ' + message['role']) -}}
    {%- endif -%}
    {{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte: every printable ASCII character is one token, and any text can be encoded."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((*SPECIALS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="<|end|>",
        pad_token="<pad>",
        additional_special_tokens=["</s>", "<|user|>", "<|assistant|>", "<|system|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def build_model() -> LlamaForCausalLM:
    """Random weights, the same on every call."""
    tokenizer = build_tokenizer()
    special_ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        attention_bias=True,  # lets a head attend at a fixed distance, which learning sums needs
        **special_ids,
    )
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # norms stay at one, biases at zero
                parameter.normal_(0.0, 0.02, generator=generator)
    model.generation_config = GenerationConfig(**special_ids, max_length=CONTEXT)
    return model


def pico_folder() -> Path:
    """The folder of pico in the user's cache, written on first use; a temporary one if the cache is not writable."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    folder = home / "posttrain" / f"pico-{_version()}"
    if (folder / "config.json").is_file():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _write(folder)
    except OSError:  # a read-only or full home
        return _temporary_folder()
    return folder


@cache
def _temporary_folder() -> Path:
    parent = Path(tempfile.mkdtemp(prefix="posttrain-"))
    atexit.register(shutil.rmtree, parent, ignore_errors=True)
    _write(parent / "pico")
    return parent / "pico"


def _version() -> str:
    """A version that changes with this file and with the libraries that initialise and write the model."""
    parts = (Path(__file__).read_bytes(), torch.__version__.encode(), transformers.__version__.encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def _write(folder: Path) -> None:
    """Write the model. Several processes may do this at once: each writes a copy, and the first rename wins."""
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        build_model().save_pretrained(unfinished)
        build_tokenizer().save_pretrained(unfinished)
        unfinished.rename(folder)
    except OSError:
        if not (folder / "config.json").is_file():
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
