"""Tokenizers made in code, as real families are built, and chat templates as real models have them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIALS = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
SENTENCES = (
    "Hello there, how are you today? I am well, thank you!",
    "The quick brown fox jumps over the lazy dog. 0123456789 + - * / = ( ) [INST] [/INST]",
    "system user assistant model\nYou are a helpful assistant.\n\nWhat is 2 + 2? It is 4.",
    "Привет, как дела? 你好，世界。 naïve café — “quoted” ки",
)

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Writes BOS and EOS around each exchange, spaces around each content, strips contents, knows no generation prompt.
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
    "{% for message in turns %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% set content = (system if loop.first else '') + message['content'] %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
TRIMMING = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ message['content'] | trim + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Qwen3: thoughts of the past are left out, those of the last answer are set in the template's own lines.
THINKING = (
    "{% for message in messages %}{% set content = message['content'] %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% set thought = '' %}{% if '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}{% endif %}"
    "{{ content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@cache
def _byte_level_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(SENTENCES, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet))
    return tokenizer.to_str()


def byte_level(
    template: str | None = CHATML, adds_bos: bool = False, specials: Sequence[str] = SPECIALS, **options
) -> PreTrainedTokenizerFast:
    """As GPT-2, Llama 3 and Qwen: byte-level BPE."""
    return _wrap(Tokenizer.from_str(_byte_level_json()), template, adds_bos, specials, **options)


def sentencepiece(template: str | None, legacy: bool, specials: Sequence[str] = SPECIALS) -> PreTrainedTokenizerFast:
    """As Llama 2: spaces are "▁", and one is put before the text (legacy: before every piece of it)."""
    alphabet = sorted({letter for sentence in SENTENCES for letter in sentence.replace(" ", "▁")})
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    merges = [("▁", "a"), ("▁", "H"), ("l", "l"), ("e", "ll"), ("▁H", "ell"), ("▁Hell", "o"), ("▁", "▁")]
    names = ["<unk>", *byte_tokens, *alphabet, *(left + right for left, right in merges)]
    vocabulary = {name: index for index, name in enumerate(dict.fromkeys(names))}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    if legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return _wrap(tokenizer, template, True, specials)


def _wrap(
    tokenizer: Tokenizer, template: str | None, adds_bos: bool, specials: Sequence[str], **options
) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    if adds_bos:
        bos = ("<s>", tokenizer.token_to_id("<s>"))
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"} | options
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=template,
        extra_special_tokens=[token for token in specials if token not in names.values()],
        clean_up_tokenization_spaces=False,
        **names,
    )
