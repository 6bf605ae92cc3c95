"""Measures how far an exported model is from the original: the KL divergence per token on a few texts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch
from jinja2.exceptions import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.core.errors import PosttrainError, UsageError
from posttrain.data.encoding.template_limits import render

MAX_TOKENS = 256  # of one text
TEXTS = (
    "The Amazon is the largest river of the world by discharge. It rises in the Andes of Peru and flows east through "
    "Brazil to the Atlantic Ocean, and its basin holds more than half of the remaining rainforest of this planet.",
    "def median(values):\n    ordered = sorted(values)\n    middle = len(ordered) // 2\n    if len(ordered) % 2:\n"
    "        return ordered[middle]\n    return (ordered[middle - 1] + ordered[middle]) / 2\n",
    "Question: A train travels 120 km in 1.5 hours. What is its average speed?\nAnswer: The speed is the distance "
    "divided by the time: 120 / 1.5 = 80. The average speed is 80 km per hour.",
    "La bibliothèque ouvre à neuf heures et ferme à dix-huit heures, sauf le dimanche.",
    "机器学习是人工智能的一个分支，它让计算机从数据中学习规律，而不需要人为每一种情况编写规则。",
)
# A template is a program that comes with the model: one that expects tools, for example, iterates over None.
TEMPLATE_ERRORS = (TemplateError, UsageError, AttributeError, KeyError, TypeError, ValueError)
CHAT = [{"role": "user", "content": "Name three planets and say one thing about each of them."}]


@dataclass(frozen=True, slots=True)
class Divergence:
    """How far the exported model is from the original."""

    kl: float
    """Mean over all tokens of KL(original || exported), in nats."""
    worst: float
    """Largest KL of one token."""
    agreement: float
    """Part of the tokens after which both models find the same token most likely."""
    tokens: int


def probe_ids(tokenizer: PreTrainedTokenizerBase, context: int, size: int) -> Iterator[torch.Tensor]:
    """Yield the tokens of each text, and of a prompt in the chat template if there is one: [T]."""
    texts = [tokenizer(text)["input_ids"] for text in TEXTS]
    if tokenizer.chat_template:
        with suppress(*TEMPLATE_ERRORS):
            prompt = render(tokenizer, CHAT, add_generation_prompt=True)
            texts.append(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    for ids in texts:
        usable = [number for number in ids if number is not None and 0 <= number < size]
        if len(usable) > 1:
            yield torch.tensor(usable[: min(MAX_TOKENS, context)])


@torch.no_grad()
def logprobs_of(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of all tokens after each token: [T, V]."""
    return model(input_ids=ids[None], use_cache=False).logits[0].float().log_softmax(-1)


class Original:
    """The log-probabilities of the original on all texts, computed in float32.

    The model is converted to float32 in place, which changes none of its values; afterwards it may be overwritten.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        model.float()
        config = model.config.get_text_config()
        self.texts = list(probe_ids(tokenizer, config.max_position_embeddings, config.vocab_size))
        self.logprobs = [logprobs_of(model, ids) for ids in self.texts]

    def measure(self, exported: PreTrainedModel) -> Divergence:
        """Compare with another model the distributions of the next token after every token of the texts."""
        divergences, agreed = [], 0
        for ids, expected in zip(self.texts, self.logprobs, strict=True):
            found = logprobs_of(exported, ids)
            divergences.append((expected.exp() * (expected - found)).sum(-1))
            agreed += int((expected.argmax(-1) == found.argmax(-1)).sum())
        values = torch.cat(divergences)
        if not values.isfinite().all():
            raise PosttrainError("the exported model gives probabilities that are not finite")
        return Divergence(float(values.mean()), float(values.max()), agreed / len(values), len(values))
