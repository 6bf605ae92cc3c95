"""Tiny models with tokenizers that llama.cpp has: byte-level BPE, and BPE with byte fallback as of sentencepiece."""

from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import Gemma3TextConfig, PreTrainedTokenizerFast

from posttrain.publish.divergence import TEXTS
from posttrain.publish.gguf_tokenizer import CHECK_TEXTS, SPLITS
from tests.tiny import _COMMON, CHAT_TEMPLATE, CONFIGS, tiny_model

SPECIALS = ("<pad>", "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>")
VOCABULARY = 400
CHANGES = {
    "gemma2": {"query_pre_attn_scalar": 8, "hidden_activation": "gelu_pytorch_tanh"},
    "gemma3": {"num_hidden_layers": 6},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}
CONFIGS_HERE = {
    "gemma3": (Gemma3TextConfig, _COMMON | {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8}),
    "llama3": CONFIGS["llama"],
}


def wrapped(tokenizer, bos=False):
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token="<pad>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def byte_level(split="gpt-2", bos=False):
    """A byte-level BPE tokenizer that splits words as llama.cpp's pre-tokenizer of this name does."""
    tokenizer = Tokenizer(models.BPE())
    regex = next((pattern for pattern, name in SPLITS.items() if name == split), None)
    if split == "smollm":
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    elif regex is None:
        steps = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        steps = [pre_tokenizers.Split(Regex(regex), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIALS]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 20, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*TEXTS, *CHECK_TEXTS], trainer)
    return wrapped(tokenizer, bos)


def sentencepiece_like(prefix=True):
    """A BPE tokenizer with byte fallback, as those of Llama 2 and Gemma."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>"], show_progress=False, max_token_length=6)
    trained.train_from_iterator([text for text in TEXTS if text.isascii()], trainer)
    words = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))]
    learned = [t for t, _ in sorted(trained.get_vocab().items(), key=lambda i: i[1]) if t not in words]
    vocabulary = {token: number for number, token in enumerate([*words, *learned])}
    merges = [(t[:i], t[i:]) for t in learned if len(t) > 1 for i in range(1, len(t)) if {t[:i], t[i:]} <= {*learned}]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    steps = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return wrapped(tokenizer, bos=True)


def model_folder(name, folder: Path, tokenizer, **changes):
    """A folder with a tiny model whose vocabulary is larger than its tokenizer's."""
    CONFIGS.update({key: value for key, value in CONFIGS_HERE.items() if key == name})
    model = tiny_model(name, vocab_size=VOCABULARY, **(CHANGES.get(name, {}) | changes))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
