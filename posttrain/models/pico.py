"""Builds `pico`: a Llama with under a million parameters and its tokenizer, so that everything can run offline."""

from __future__ import annotations

import atexit
import hashlib
import os
import tempfile
from functools import cache
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from posttrain.core.errors import UsageError
from posttrain.core.files import new_folder
from posttrain.core.temporary import TemporaryFolder

SPECIALS = ("<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
CONTEXT = 512
SEED = 20240229

# A turn ends with <|end|>, which is also the end-of-sequence token, so that it stops chats and plain generation. The
# context is short: of tools the model is told the names and parameters. Calls are written as Hermes and Qwen do.
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- if tools -%}
    {{- '<|system|>' -}}
    {%- for tool in tools -%}
        {{- tool.function.name + '(' + (tool.function.parameters.properties or {}) | join(', ') + ')\\n' -}}
    {%- endfor -%}
    {{- '<|end|>' -}}
{%- endif -%}
{%- set called = namespace(tools=false) -%}
{%- for message in messages -%}
    {%- if message['role'] not in ['system', 'user', 'assistant'] + (['tool'] if called.tools else []) -%}
        {{- raise_exception('pico knows the roles system, user and assistant, and tool after a call, not '
            + message['role']) -}}
    {%- endif -%}
    {{- '<|' + ('user' if message['role'] == 'tool' else message['role']) + '|>' + message['content'] -}}
    {%- for call in message.tool_calls or [] -%}
        {%- set called.tools = true -%}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
        {{- (call.function.arguments | tojson) + '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per byte, so that any text can be encoded."""
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
    """Build the model with random weights, the same on every call."""
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
    """Return pico's folder in the user's cache, written on first use; a temporary one if that is not writable."""
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
    parent = TemporaryFolder(Path(tempfile.gettempdir()), "posttrain-pico")
    atexit.register(parent.close)
    _write(parent.path / "pico")
    return parent.path / "pico"


def _version() -> str:
    """Return a version that changes with this file and with the libraries that initialise and write the model."""
    parts = (Path(__file__).read_bytes(), torch.__version__.encode(), transformers.__version__.encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def _save(model: LlamaForCausalLM, folder: Path) -> None:
    """Write what model.save_pretrained writes; in a process group that writes on rank 0 alone."""
    model.config.architectures, model.config.dtype = [type(model).__name__], model.dtype
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})


def _write(folder: Path) -> None:
    """Write the model. Several processes may do this at once: each writes a copy, and the first rename wins."""
    try:
        with new_folder(folder) as unfinished:
            _save(build_model(), unfinished)
            build_tokenizer().save_pretrained(unfinished)
    except (OSError, UsageError):
        if not (folder / "config.json").is_file():
            raise
