"""Conversations of the policy with environments: all advance together, turn by turn, and tokens are only appended.

tokens   prompt | reply 1 | environment | reply 2      what was sampled is what is trained on
mask        0   |    1    |      0      |    1         what the environment said is not
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from posttrain.config.sections import OnlineConfig
from posttrain.core.errors import PosttrainError
from posttrain.core.types import Prompt, Sample
from posttrain.data.encoding.chat import ChatRenderer
from posttrain.data.encoding.tokens import Segment, TokenEncoder
from posttrain.engines.base import GenerationRequest, Sampling
from posttrain.rollout.environments import Environments, Talk
from posttrain.rollout.records import ENVIRONMENT_FAILED, Rollout
from posttrain.rollout.rollouts import Generator, seed_for


@dataclass(slots=True)
class Dialogue:
    """One conversation as the model sees it."""

    position: int
    prompt: Prompt
    seed: int
    talk: Talk
    messages: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    ended: str = ""  # the end-of-turn that the last reply has, as text
    finish: str = ""
    versions: list[int] = field(default_factory=list)  # of the weights, at both ends of each reply

    def append(self, tokens: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        """Log-probabilities are those of tokens that the model chose."""
        self.tokens += tokens
        self.mask += [logprobs is not None] * len(tokens)
        self.logprobs += [0.0] * len(tokens) if logprobs is None else logprobs

    def fail(self, reason: str) -> None:
        self.talk.failure, self.finish = reason, "error"

    @property
    def answer_length(self) -> int:
        """Of all turns, the environment's too."""
        return len(self.tokens) - len(self.prompt.tokens)

    def rollout(self) -> Rollout:
        sample = Sample(
            tokens=np.array(self.tokens, dtype=np.int32),
            mask=np.array(self.mask, dtype=np.bool_),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            group=self.position,
            version=self.versions[0] if self.versions else 0,
            newest=self.versions[-1] if self.versions else 0,
            finish=self.finish,
            origin=self.prompt.origin,
        )
        failure = self.talk.failure
        return Rollout(
            sample=sample,
            prompt=self.prompt,
            text=self.text,
            messages=self.messages,
            turns=len(self.talk.replies),
            parts={"environment": sum(outcome.reward for outcome in self.talk.outcomes)},
            failure=f"{ENVIRONMENT_FAILED}{failure}" if failure else "",
        )


class Dialogues:
    """Plays conversations: a reply of each in one call of the generator, then a step of each environment, and so on."""

    def __init__(
        self, environments: Environments, policy: Generator, config: OnlineConfig, sampling: Sampling, tokenizer: Any
    ) -> None:
        self.environments, self.policy, self.sampling, self.tokenizer = environments, policy, sampling, tokenizer
        self.longest_prompt = config.data.max_tokens
        self.encoder = TokenEncoder(tokenizer)
        self.chat = ChatRenderer(tokenizer, self.encoder)

    def play(
        self, prompts: Sequence[tuple[int, Prompt]], seeds: Sequence[int], *, greedy: bool = False
    ) -> list[Rollout]:
        """A rollout for each prompt and seed; RewardError if too many environments failed."""
        dialogues = [
            Dialogue(position, prompt, seed, Talk(prompt.columns | {"messages": prompt.messages}))
            for (position, prompt), seed in zip(prompts, seeds, strict=True)
        ]
        talks = [dialogue.talk for dialogue in dialogues]
        self.environments.advance(talks)
        for dialogue in dialogues:
            self.begin(dialogue)
        turn = 0
        while going := [dialogue for dialogue in dialogues if not dialogue.finish]:
            self.hear(going, turn, greedy)
            self.environments.advance([dialogue.talk for dialogue in going])
            for dialogue in going:
                self.go_on(dialogue)
            turn += 1
        self.environments.end(talks)
        self.environments.check_failures(talks)
        return [dialogue.rollout() for dialogue in dialogues]

    def begin(self, dialogue: Dialogue) -> None:
        """The opening, in tokens."""
        talk, asked = dialogue.talk, dialogue.prompt
        tokens = asked.tokens
        if not talk.failure:
            dialogue.messages = list(talk.outcomes[0].messages or [])
            try:
                segments = self.chat.prompt(dialogue.messages, self.chat.is_plain, asked.origin)
                [encoded] = self.encoder.encode([segments])
                tokens = np.array([token for ids in encoded for token in ids], dtype=np.int32)
            except PosttrainError as error:  # a template that refuses this conversation
                talk.failure = str(error)
        if not 0 < len(tokens) <= self.longest_prompt:
            talk.failure = f"what start returned has {len(tokens)} tokens; data.max_tokens is {self.longest_prompt}"
            tokens = asked.tokens
        dialogue.prompt = replace(asked, tokens=tokens, messages=list(dialogue.messages or asked.messages))
        dialogue.append(tokens.tolist())
        if talk.failure:
            dialogue.fail(talk.failure)

    def hear(self, dialogues: Sequence[Dialogue], turn: int, greedy: bool) -> None:
        """The next reply of each, within what is left of rollout.max_tokens."""
        requests = [
            GenerationRequest(
                prompt=np.array(dialogue.tokens, dtype=np.int32),
                group=dialogue.position,
                seed=seed_for(dialogue.seed, turn, 0) if turn else dialogue.seed,  # one turn: as without environment
            )
            for dialogue in dialogues
        ]
        rooms = [self.sampling.max_tokens - dialogue.answer_length for dialogue in dialogues]
        sampling = replace(self.sampling, max_tokens=max(rooms))
        if greedy:
            sampling = replace(sampling, temperature=0.0)
        for dialogue, room, sample in zip(dialogues, rooms, self.policy.generate(requests, sampling), strict=True):
            start = len(dialogue.tokens)
            tokens = sample.tokens[start:].tolist()
            assert sample.logprobs is not None, "a sampler gives log-probabilities"
            dialogue.versions += [sample.version, sample.newest]
            dialogue.append(tokens[:room], sample.logprobs[start : start + room].tolist())
            dialogue.finish = "length" if len(tokens) > room else sample.finish
            dialogue.text = self.tokenizer.decode(tokens[:room], skip_special_tokens=True)
            dialogue.ended = self.end_of(tokens[:room], dialogue.text) if dialogue.finish == "stop" else ""
            dialogue.messages.append({"role": "assistant", "content": dialogue.text})
            dialogue.talk.replies.append(dialogue.text)

    def end_of(self, tokens: list[int], text: str) -> str:
        """The stop token or the stop text that a reply ends with."""
        if tokens[-1] in self.sampling.stop_ids:
            return self.tokenizer.decode(tokens[-1:], skip_special_tokens=False)
        return next((stop for stop in self.sampling.stop_texts if text.endswith(stop)), "")

    def go_on(self, dialogue: Dialogue) -> None:
        """What the environment said, in tokens; or the end."""
        talk = dialogue.talk
        if talk.failure:
            dialogue.fail(talk.failure)
            return
        said = talk.outcomes[-1].messages
        if said is None or dialogue.finish == "length":
            return
        messages = [*dialogue.messages, *said]
        try:
            segment = self.chat.continuation(
                messages, len(dialogue.messages) - 1, dialogue.ended, dialogue.prompt.origin
            )
            [[_, tokens]] = self.encoder.encode([[Segment(()), segment]])  # behind a text: no second BOS
        except PosttrainError as error:
            dialogue.fail(str(error))
            return
        if dialogue.answer_length + len(tokens) >= self.sampling.max_tokens:
            dialogue.finish = "length"  # no room for another reply
            return
        dialogue.append(tokens)
        dialogue.messages, dialogue.finish = messages, ""
