"""Episodes of the policy with environments: all advance together, turn by turn, and tokens are only appended.

tokens   prompt | reply 1 | environment | reply 2      the sampled tokens are the trained tokens
mask        0   |    1    |      0      |    1         the environment's tokens are not trained on
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from posttrain.config.sections import OnlineConfig
from posttrain.core.errors import PosttrainError
from posttrain.core.types import Experts, Prompt, Sample
from posttrain.data.encoding.chat import ChatRenderer
from posttrain.data.encoding.tokens import Segment, TokenEncoder
from posttrain.engines.base import GenerationRequest, Generator, Sampling, seed_for
from posttrain.rollout.environments import Environments, Episode
from posttrain.rollout.records import ENVIRONMENT_FAILED, Rollout
from posttrain.sandbox.supervisor import STOP_SECONDS


@dataclass(slots=True)
class TokenizedEpisode:
    """One episode from the model's side: its tokens, and which of them the model sampled."""

    position: int
    prompt: Prompt
    seed: int
    episode: Episode
    messages: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    experts: Experts | None = None  # of the tokens up to the end of the last reply, if the engine records them
    text: str = ""
    reply_end: str = ""  # the stop token or stop text at the end of the last reply, as text
    finish: str = ""
    versions: list[int] = field(default_factory=list)  # of the weights, at the start and the end of each reply
    preemptions: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    prompt_tokens: int = 0  # of the prompts of all turns
    reused_tokens: float = 0.0  # of them, found in the engine's KV cache

    def append(self, tokens: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        """Append tokens; those with log-probabilities were sampled by the model."""
        self.tokens += tokens
        self.mask += [logprobs is not None] * len(tokens)
        self.logprobs += [0.0] * len(tokens) if logprobs is None else logprobs

    def add_experts(self, experts: Experts) -> None:
        """Add the experts recorded in the last turn. Those of earlier replies are kept: they sampled the replies."""
        experts = experts[: len(self.tokens)].copy()
        if self.experts is not None:
            known = self.experts >= 0
            experts[: len(known)][known] = self.experts[known]
        self.experts = experts

    def fail(self, reason: str) -> None:
        self.episode.failure, self.finish = reason, "error"

    @property
    def completion_length(self) -> int:
        """Tokens of all turns, including the environment's."""
        return len(self.tokens) - len(self.prompt.tokens)

    def rollout(self) -> Rollout:
        sample = Sample(
            tokens=np.array(self.tokens, dtype=np.int32),
            mask=np.array(self.mask, dtype=np.bool_),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            experts=None if self.experts is None else pad_experts(self.experts, len(self.tokens)),
            group=self.position,
            version=self.versions[0] if self.versions else 0,
            newest=self.versions[-1] if self.versions else 0,
            finish=self.finish,
            origin=self.prompt.origin,
            preemptions=self.preemptions,
            draft_tokens=self.draft_tokens,
            accepted_tokens=self.accepted_tokens,
            reused=self.reused_tokens / max(1, self.prompt_tokens),
        )
        failure = self.episode.failure
        return Rollout(
            sample=sample,
            prompt=self.prompt,
            text=self.text,
            messages=self.messages,
            turns=len(self.episode.replies),
            rewards={"environment": sum(result.reward for result in self.episode.results)},
            failure=f"{ENVIRONMENT_FAILED}{failure}" if failure else "",
        )


def pad_experts(experts: Experts, tokens: int) -> Experts:
    """Append tokens without a record: those of the environment after the last reply."""
    return np.pad(experts, ((0, tokens - len(experts)), (0, 0), (0, 0)), constant_values=-1)


class EpisodePlayer(Protocol):
    """Plays episodes of several turns: with environments, or as the conversations of an agent."""

    def play(
        self, prompts: Sequence[tuple[int, Prompt]], seeds: Sequence[int], *, greedy: bool = False
    ) -> list[Rollout]:
        """Return rollouts for each prompt and seed, in order; `greedy`: one for each, without random numbers."""


class EpisodeRunner:
    """Runs episodes: in each turn one call of the generator for all replies, then one step of each environment."""

    def __init__(
        self, environments: Environments, policy: Generator, config: OnlineConfig, sampling: Sampling, tokenizer: Any
    ) -> None:
        self.environments, self.policy, self.sampling, self.tokenizer = environments, policy, sampling, tokenizer
        self.max_prompt_length = config.data.max_length
        # Without batches ahead a stopped batch is made again with the same weights, so nothing is lost.
        self.stop_seconds = STOP_SECONDS if config.rollout.ahead else 0.0
        self.encoder = TokenEncoder(tokenizer)
        self.chat = ChatRenderer(tokenizer, self.encoder)

    def play(
        self, prompts: Sequence[tuple[int, Prompt]], seeds: Sequence[int], *, greedy: bool = False
    ) -> list[Rollout]:
        """Return a rollout for each prompt and seed; a RewardError if too many environments failed."""
        running = [
            TokenizedEpisode(position, prompt, seed, Episode(prompt.columns | {"messages": prompt.messages}))
            for (position, prompt), seed in zip(prompts, seeds, strict=True)
        ]
        episodes = [each.episode for each in running]
        self.environments.advance(episodes, self.stop_seconds)
        for each in running:
            self.start(each)
        turn = 0
        while unfinished := [each for each in running if not each.finish]:
            self.generate_replies(unfinished, turn, greedy)
            self.environments.advance([each.episode for each in unfinished], self.stop_seconds)
            for each in unfinished:
                self.append_environment_turn(each)
            turn += 1
        self.environments.end(episodes)
        self.environments.check_failures(episodes)
        return [each.rollout() for each in running]

    def start(self, tokenized: TokenizedEpisode) -> None:
        """Encode the messages that `start` returned; they replace the prompt."""
        episode, prompt = tokenized.episode, tokenized.prompt
        tokens = prompt.tokens
        if not episode.failure:
            tokenized.messages = list(episode.results[0].messages or [])
            try:
                segments = self.chat.prompt(tokenized.messages, self.chat.is_plain, prompt.origin)
                [encoded] = self.encoder.encode([segments])
                tokens = np.array([token for ids in encoded for token in ids], dtype=np.int32)
            except PosttrainError as error:  # the chat template refuses these messages
                episode.failure = str(error)
        if not 0 < len(tokens) <= self.max_prompt_length:
            limit = f"data.max_length is {self.max_prompt_length}"
            episode.failure = f"the messages that start returned have {len(tokens)} tokens; {limit}"
            tokens = prompt.tokens
        tokenized.prompt = replace(prompt, tokens=tokens, messages=list(tokenized.messages or prompt.messages))
        tokenized.append(tokens.tolist())
        if episode.failure:
            tokenized.fail(episode.failure)

    def generate_replies(self, unfinished: Sequence[TokenizedEpisode], turn: int, greedy: bool) -> None:
        """Generate the next reply of each episode, within what is left of rollout.max_tokens."""
        requests = [
            GenerationRequest(
                prompt=np.array(each.tokens, dtype=np.int32),
                group=each.position,
                seed=seed_for(each.seed, turn, 0) if turn else each.seed,  # first turn: as without an environment
                reuse_prefix=True,
            )
            for each in unfinished
        ]
        limits = [self.sampling.max_tokens - each.completion_length for each in unfinished]
        sampling = replace(self.sampling, max_tokens=max(limits))
        if greedy:
            sampling = replace(sampling, temperature=0.0)
        for each, limit, sample in zip(unfinished, limits, self.policy.generate(requests, sampling), strict=True):
            start = len(each.tokens)
            tokens = sample.tokens[start:].tolist()
            assert sample.logprobs is not None, "a generator returns log-probabilities"
            each.versions += [sample.version, sample.newest]
            each.preemptions += sample.preemptions
            each.draft_tokens += sample.draft_tokens
            each.accepted_tokens += sample.accepted_tokens
            each.prompt_tokens += start
            each.reused_tokens += sample.reused * start
            each.append(tokens[:limit], sample.logprobs[start : start + limit].tolist())
            if sample.experts is not None:
                each.add_experts(sample.experts)
            each.finish = "length" if len(tokens) > limit else sample.finish
            each.text = self.tokenizer.decode(tokens[:limit], skip_special_tokens=True)
            each.reply_end = self.find_reply_end(tokens[:limit], each.text) if each.finish == "stop" else ""
            each.messages.append({"role": "assistant", "content": each.text})
            each.episode.replies.append(each.text)

    def find_reply_end(self, tokens: list[int], text: str) -> str:
        """Return the stop token or the stop text that a reply ends with, as text."""
        if tokens[-1] in self.sampling.stop_ids:
            return self.tokenizer.decode(tokens[-1:], skip_special_tokens=False)
        return next((stop for stop in self.sampling.stop_texts if text.endswith(stop)), "")

    def append_environment_turn(self, tokenized: TokenizedEpisode) -> None:
        """Encode and append the messages that `step` returned; without messages or room the episode is over."""
        episode = tokenized.episode
        if episode.failure:
            tokenized.fail(episode.failure)
            return
        new_messages = episode.results[-1].messages
        if new_messages is None or tokenized.finish == "length":
            return
        messages = [*tokenized.messages, *new_messages]
        try:
            segment = self.chat.continuation(
                messages, len(tokenized.messages) - 1, tokenized.reply_end, tokenized.prompt.origin
            )
            [[_, tokens]] = self.encoder.encode([[Segment(()), segment]])  # not at the start of a text: no second BOS
        except PosttrainError as error:
            tokenized.fail(str(error))
            return
        if tokenized.completion_length + len(tokens) >= self.sampling.max_tokens:
            tokenized.finish = "length"  # no room for another reply
            return
        tokenized.append(tokens)
        tokenized.messages, tokenized.finish = messages, ""
