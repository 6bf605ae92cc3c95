"""The cache of words gives the ids of the tokenizer itself, for every pattern that it takes, on any text."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from posttrain.data.encoding.word_cache import PATTERNS, WordCache
from tests.unit.data.made import SENTENCES, sentencepiece

# White space at the end makes tokens of several spaces and line breaks, which a wrong cut would tear apart or make.
SPACED = ["a\n\n", "a  ", "a   ", "a \n", "a \n\n", "a\n \n", "a\r\n\r\n", "\t\t", "a.\n\n", "a.\n"] * 9
TRAINING = [*SENTENCES, "it's we'll   a\n\nb  \n c\t\td x,y .\nThen 12 34,567 (no) 'S ’s e\u0301 日本 語", *SPACED] * 3


def split(pattern):
    pieces = pre_tokenizers.Split(Regex(pattern), "isolated", invert=False)
    return pre_tokenizers.Sequence([pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
CUTTERS = {
    "GPT-2": GPT2,
    "digits": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    **{name: split(pattern) for pattern, name in PATTERNS.items()},
}


def tokenizer_of(cutter, normalizer=None, **model):
    tokenizer = Tokenizer(models.BPE(**model))
    tokenizer.pre_tokenizer, tokenizer.decoder = cutter, decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TRAINING, trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


TOKENIZERS = {name: tokenizer_of(cutter) for name, cutter in CUTTERS.items()}
TOKENIZERS["NFC"] = tokenizer_of(GPT2, normalizers.NFC())
CACHES = {name: WordCache.of(tokenizer) for name, tokenizer in TOKENIZERS.items()}

SPACES = (" ", "  ", "\n", "\n\n", "\r\n", "\t", " \n", "\n ", "\u3000", "\xa0", "\x85", "\x1c", "\u200b", "\u0301")
SIGNS = ("'s", "'LL", "’", ".", ".com", "<think>", "<|end|>", "!!", "(", "/", "_", "-")
LETTERS = ("a", "Then", "12", "3456", "é", "ß", "日本")
hard = st.sampled_from(SPACES + SIGNS + LETTERS)
texts = st.lists(st.one_of(hard, st.text(max_size=4)), max_size=30).map("".join)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300, deadline=None)
@given(st.lists(texts, min_size=1, max_size=3))
def test_the_same_ids_as_without_a_cache(name, texts):
    backend = TOKENIZERS[name].backend_tokenizer
    expected = [encoding.ids for encoding in backend.encode_batch(texts, add_special_tokens=False)]
    assert CACHES[name].encode(texts) == expected
    assert CACHES[name].encode(texts[::-1]) == expected[::-1]


def test_the_patterns_are_those_of_the_tokenizers():
    """Written out once, so that a slip in putting them together shows."""
    assert set(PATTERNS) >= {
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
    }


def test_words_are_learned_once_and_forgotten_when_there_are_too_many(monkeypatch):
    monkeypatch.setattr("posttrain.data.encoding.word_cache.MAX_WORDS", 4)
    tokenizer = tokenizer_of(GPT2)
    cache = WordCache.of(tokenizer)
    assert cache.encode(["a b a b", "a\nb"]) == [
        tokenizer.encode(text, add_special_tokens=False) for text in ("a b a b", "a\nb")
    ]
    assert len(cache.ids) == 5  # a and b alone and behind a space, and a line
    cache.encode(["c"])
    assert list(cache.ids) == ["\nc"]


@pytest.mark.parametrize(
    "tokenizer",
    [
        sentencepiece(None, legacy=False),
        sentencepiece(None, legacy=True),
        tokenizer_of(pre_tokenizers.ByteLevel(add_prefix_space=True)),
        tokenizer_of(pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])),
        tokenizer_of(split(r"\S+ \S+|\s+")),
        tokenizer_of(GPT2, normalizers.NFKC()),
        tokenizer_of(GPT2, dropout=0.1),
    ],
    ids=["metaspace", "legacy", "prefix space", "no pattern", "unknown pattern", "NFKC", "dropout"],
)
def test_others_are_left_alone(tokenizer):
    assert WordCache.of(tokenizer) is None


@pytest.mark.parametrize("options", [{"lstrip": True}, {"rstrip": True}, {"single_word": True}, {"content": "a b"}])
def test_added_tokens_that_look_around_are_left_alone(options):
    tokenizer = tokenizer_of(GPT2)
    tokenizer.add_tokens([AddedToken(**({"content": "<x>"} | options))])
    assert WordCache.of(tokenizer) is None


def test_the_pattern_must_be_the_last_word():
    """A cut by something unknown after the pattern could depend on what stands around."""
    cutter = json.loads(split(next(iter(PATTERNS))).__getstate__())
    assert cutter["pretokenizers"][-1]["type"] == "ByteLevel"
    assert WordCache.of(tokenizer_of(pre_tokenizers.Sequence([GPT2, pre_tokenizers.Punctuation()]))) is None
