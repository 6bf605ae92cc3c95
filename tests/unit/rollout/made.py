"""Prompts, a generator with given completions, and configurations, for the tests of rollouts."""

from __future__ import annotations

import numpy as np

from posttrain.config.sections import OnlineConfig
from posttrain.core.types import Prompt, Sample
from posttrain.engines.base import Sampling
from posttrain.models.pico import build_tokenizer

TOKENIZER = build_tokenizer()
END = TOKENIZER.eos_token_id
SAMPLING = Sampling(max_tokens=64, stop_ids=(END,), stop_texts=("STOP",))


def ids(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def prompt(text, **columns):
    return Prompt(
        tokens=np.array(ids(f"<s><|user|>{text}<|end|><|assistant|>"), dtype=np.int32),
        messages=[{"role": "user", "content": text}],
        columns={"question": text, **columns},
        origin=f"rows.jsonl:{text}",
    )


class FakeGenerator:
    """Completes each request with the text that a function returns for it; records requests and sampling settings."""

    def __init__(self, words):
        self.words = words
        self.requests = []
        self.samplings = []
        self.versions = []

    def generate(self, requests, sampling, *, on_completion=None):
        self.requests += requests
        self.samplings.append(sampling)
        found = [self.answer(request, sampling) for request in requests]
        for index, sample in enumerate(found) if on_completion else ():
            on_completion(index, sample)
        return found

    def answer(self, request, sampling):
        tokens = ids(self.words(request))[: sampling.max_tokens]
        said = np.array(tokens, dtype=np.int32)
        before = len(request.prompt)
        stopped = tokens[-1] in sampling.stop_ids or any(
            TOKENIZER.decode(tokens).endswith(text) for text in sampling.stop_texts
        )
        return Sample(
            tokens=np.concatenate([request.prompt, said]),
            mask=np.arange(before + len(said)) >= before,
            logprobs=np.concatenate([np.zeros(before), -0.01 * (1 + np.arange(len(said)))]).astype(np.float32),
            group=request.group,
            finish="stop" if stopped else "length",
        )

    def update_weights(self, version):
        self.versions.append(version)


def online(**options):
    """A configuration; `section__option=value`."""
    config = OnlineConfig()
    for key, value in options.items():
        section, _, option = key.rpartition("__")
        setattr(getattr(config, section) if section else config, option, value)
    return config
