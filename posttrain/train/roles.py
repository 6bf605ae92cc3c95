"""The models beside the policy: they fill samples with what the algorithm needs, and score answers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.algorithms.base import Algorithm, CriticSettings
from posttrain.checkpoints import checkpoint
from posttrain.core.errors import CheckpointError, UsageError
from posttrain.core.types import ForwardRequest, Objective, Sample, SamplingDistribution
from posttrain.models.loading import load_tokenizer, read_config, resolve_path
from posttrain.rollout.records import Rollout
from posttrain.train.learner import PLAIN
from posttrain.train.learner_group import LearnerGroup
from posttrain.train.run import Run


class Helpers:
    """Fills samples with what the algorithm needs from other models."""

    def __init__(
        self,
        run: Run,
        algo: Algorithm,
        policy: LearnerGroup,
        *,
        distribution: SamplingDistribution = PLAIN,
        sync_steps: int = 0,
    ) -> None:
        """`sync_steps`: the reference is replaced by the current policy every N steps; 0: never."""
        self.algo, self.policy, self.distribution, self.sync_steps = algo, policy, distribution, sync_steps
        self.needs = algo.needs()
        self.reference: LearnerGroup | None = None
        # New adapters start as the identity, so the policy without them is the reference, at no cost.
        self.adapters_off = bool(run.config.model.lora_rank) and not algo.reference_path()
        self.reference_step = 0  # of the policy that the reference is, where it is renewed
        self.precomputed = algo.precompute_reference()
        self.offloaded = run.config.cluster.offload
        if "ref_logprobs" in self.needs and not self.adapters_off:
            self.reference = run.frozen(algo.reference_path())
            self.away("reference", self.reference)
        if self.precomputed:
            run.log.message("computing the reference's log-probabilities of all rows")
            datasets = [run.data.train, run.data.eval] if run.data.eval else [run.data.train]
            for dataset in datasets:
                dataset.rows.hold()
            self.fill_reference([sample for dataset in datasets for row in dataset.rows for sample in row])
            if self.reference is not None:
                self.reference.workers.close()
                self.reference = None

    def fill(self, samples: list[Sample], *, keep: bool = False) -> None:
        """`keep` leaves alone what an earlier call filled: right only if the same samples always come together.

        Sums are rounded differently in other company, so a number kept from another batch would make a resumed run
        differ in its last digits.
        """
        if "ref_logprobs" in self.needs and not self.precomputed:
            self.fill_reference([s for s in samples if s.ref_logprobs is None] if keep else samples)
        for name in ("logprobs", "old_logprobs"):
            if name in self.needs:
                wanted = [sample for sample in samples if self.algo.is_needed(name, sample)]
                streams = self.policy.logprobs(wanted, distribution=self.distribution)
                for sample, stream in zip(wanted, streams, strict=True):
                    setattr(sample, name, stream)

    def fill_reference(self, samples: list[Sample]) -> None:
        if self.adapters_off:
            streams = self.policy.logprobs(samples, adapters=False, distribution=self.distribution)
        else:
            assert self.reference is not None, "the reference was freed too early"
            with self.here("reference", self.reference):
                streams = self.reference.logprobs(samples, distribution=self.distribution)
        for sample, stream in zip(samples, streams, strict=True):
            sample.ref_logprobs = stream

    def renew_reference(self, run: Run, step: int) -> None:
        """With algo.reference every:N the reference is the policy as it was after the last multiple of N steps.

        It is a folder of the run, made of that step's checkpoint, so that a resumed run has the same one.
        """
        every = self.sync_steps
        wanted = step // every * every if every else 0
        if wanted == self.reference_step:
            return
        kept = run.folder.path / "reference"
        checkpoint.remove_temporaries(kept)
        for other in checkpoint.list_checkpoints(kept):
            if checkpoint.step_of(other) > step:  # of a run that got further, and was then resumed from earlier
                shutil.rmtree(other)
        folder = kept / f"step-{wanted:08d}"
        if not checkpoint.is_valid(folder):
            if wanted == step and run.saved_step != step:
                run.save(step, self.policy)
            source = run.folder.checkpoints / folder.name / "model"
            if not source.is_dir():
                raise CheckpointError(f"{folder}: the reference of step {wanted} is gone, so the run cannot go on")

            def write(place: Path) -> None:
                shutil.copytree(source, place / "model", copy_function=link_or_copy)

            checkpoint.write_checkpoint(kept, wanted, write)
        assert self.reference is not None
        self.reference.workers.close()
        self.reference = run.frozen(str((folder / "model").absolute()))
        self.away("reference", self.reference)
        self.reference_step = wanted
        oldest = min(map(checkpoint.step_of, checkpoint.list_checkpoints(run.folder.checkpoints)), default=step)
        for other in checkpoint.list_checkpoints(kept):
            if checkpoint.step_of(other) < oldest // every * every:  # no checkpoint needs it any more
                shutil.rmtree(other)
        run.log.message(f"the reference is now the policy of step {wanted}")

    # Host memory between the phases

    def away(self, role: str, model: LearnerGroup) -> None:
        if role in self.offloaded:
            model.offload("optimizer" if role == "optimizer" else "model")

    @contextmanager
    def here(self, role: str, model: LearnerGroup) -> Iterator[None]:
        """The model is on the device inside; afterwards in host memory again, if cluster.offload says so."""
        if role in self.offloaded:
            model.onload("optimizer" if role == "optimizer" else "model")
        try:
            yield
        finally:
            self.away(role, model)


def link_or_copy(source: str, target: str) -> None:
    """A second name for a file that nobody changes; a copy where the file system has no such thing."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


class Critic:
    """The value model of PPO: a score head on a trunk of its own, or on the policy's."""

    def __init__(self, run: Run, settings: CriticSettings, helpers: Helpers, first_reward_model: str) -> None:
        self.helpers, self.learning_rate = helpers, settings.learning_rate
        path = settings.path or first_reward_model or run.model.path
        balance = run.model.router_loss if run.model.router_loss and has_router(path) else 0.0
        model = replace(run.model, path=path, router_loss=balance)
        self.model = run.start(model, role="critic", head="score", trainable=True)
        helpers.away("critic", self.model)
        request = ForwardRequest(names=frozenset({"values"}), router_loss=model.router_loss)
        self.objective = Objective(request=request, loss=settings.loss, unit="token")

    def fill(self, samples: list[Sample]) -> None:
        with self.helpers.here("critic", self.model):
            fill_values(self.model, samples)


def has_router(path: str) -> bool:
    """Whether a model's experts are balanced by a loss; a critic need not be of the policy's kind."""
    return hasattr(read_config(resolve_path(path), "score").get_text_config(), "router_aux_loss_coef")


def fill_values(model: LearnerGroup, samples: list[Sample]) -> None:
    for sample, values in zip(samples, model.values(samples), strict=True):
        sample.values = values


def check_reward_model(path: str) -> None:
    """Before any model is loaded: is there one, and is it one?"""
    try:
        described = read_config(resolve_path(path), "score")
    except UsageError as error:
        raise UsageError(str(error).replace("model.path", "reward", 1)) from error
    if not any("SequenceClassification" in name for name in described.architectures or ()):
        raise UsageError(f"reward: model:{path}: no reward model: it has no score head. Train one: posttrain reward")


class RewardModel:
    """A score for each answer by a model that `posttrain reward` made, or any with a score head."""

    def __init__(self, run: Run, path: str, helpers: Helpers, *, place: int, normalize: bool) -> None:
        """`place`: its number among the run's rewards."""
        self.helpers = helpers
        config = replace(run.model, path=resolve_path(path), tokenizer="", lora_rank=0, router_loss=0.0)
        self.tokenizer: Any = load_tokenizer(config)
        # Another tokenizer means another spelling of the same conversation.
        self.same_tokens = self.tokenizer.get_vocab() == run.tokenizer.get_vocab()
        self.model = run.start(config, role=f"reward-{place}", head="score", trainable=False)
        self.mean, self.deviation = self.model.score_statistics() if normalize else (0.0, 1.0)
        helpers.away("reward", self.model)

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float]:
        samples = [rollout.sample if self.same_tokens else self.spelled(rollout) for rollout in rollouts]
        with self.helpers.here("reward", self.model):
            return [(score - self.mean) / self.deviation for score in self.model.scores(samples)]

    def spelled(self, rollout: Rollout) -> Sample:
        """The conversation in the reward model's own tokens."""
        messages = rollout.messages or [*rollout.prompt.messages, {"role": "assistant", "content": rollout.text}]
        if self.tokenizer.chat_template:
            ids = self.tokenizer.apply_chat_template(messages, return_dict=False)
        else:
            ids = self.tokenizer("".join(str(message["content"]) for message in messages))["input_ids"]
        tokens = np.array(ids, dtype=np.int32)
        return Sample(tokens=tokens, mask=np.zeros(len(tokens), dtype=np.bool_), origin=rollout.sample.origin)
