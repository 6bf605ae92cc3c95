"""Loads the models of a run onto the devices of their roles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from posttrain.algorithms import Algorithm, OnlineAlgorithm
from posttrain.algorithms.base import CriticSettings
from posttrain.cluster.worker_host import RoleRef
from posttrain.config.sections import ModelConfig, OnlineConfig
from posttrain.engines.base import EngineSpec
from posttrain.models.loading import read_config
from posttrain.models.paths import resolve_path
from posttrain.models.tokenizers import load_tokenizer
from posttrain.parallel.layouts import ParallelLayout
from posttrain.train.critic import Critic
from posttrain.train.learner import Learner
from posttrain.train.learner_group import LearnerGroup
from posttrain.train.offload import Offloader
from posttrain.train.reference import ReferenceModel
from posttrain.train.reward_model import RolloutRewardModel
from posttrain.train.rollout_workers import RolloutWorker, RolloutWorkers, WeightSender
from posttrain.train.run import Run


class ModelLoader:
    """Loads policy, reference, critic, reward models and rollout workers, each with the layout of its role."""

    def __init__(self, run: Run, algorithm: Algorithm) -> None:
        self.run, self.config, self.algorithm = run, run.config, algorithm
        self.offloader = Offloader(run.config.cluster.offload)

    def policy(self) -> LearnerGroup:
        """Loads the model that is trained, and the teacher beside it."""
        model, path = self.run.model, self.algorithm.teacher_path()
        options: dict[str, Any] = {}
        if isinstance(self.config, OnlineConfig):
            apart = self.run.placement.rollouts_apart
            options["sampler_copy"] = bool(self.config.rollout.ahead) and not apart
            options["value_head"] = "values" in self.algorithm.outputs()
            if not apart:
                options["engine"] = engine_of(self.config)
        return self.load(
            model,
            role="actor",
            trainable=True,
            head=self.algorithm.head,
            teacher=replace(model, path=path, lora_rank=0) if path else None,
            template=self.config.data.chat_template,
            **options,
        )

    def reference(self, policy: LearnerGroup) -> ReferenceModel | None:
        """Loads the reference, if the algorithm needs one and the policy without its adapters is not it."""
        if "ref_logprobs" not in self.algorithm.needs():
            return None
        algorithm, path = self.algorithm, self.algorithm.reference_path()
        return ReferenceModel(
            self.run,
            policy,
            None if self.config.model.lora_rank and not path else self.frozen(path),
            self.offloader,
            distribution=algorithm.distribution,
            sync_steps=algorithm.reference_sync_steps() if isinstance(algorithm, OnlineAlgorithm) else 0,
            load=self.frozen,
        )

    def frozen(self, path: str) -> LearnerGroup:
        """Loads a language model that is not trained; the initial policy if there is no path."""
        model = replace(self.run.model, path=path or self.run.model.path, lora_rank=0, router_aux_loss_coef=0.0)
        return self.load(model, role="reference", head="token", trainable=False)

    def critic(self, settings: CriticSettings, first_reward_model: str) -> Critic:
        """Loads the critic: from its own path, else from the first reward model, else from the policy."""
        path = settings.path or first_reward_model or self.run.model.path
        coef = self.run.model.router_aux_loss_coef
        router_loss = coef if coef and has_router(path) else 0.0
        model = replace(self.run.model, path=path, router_aux_loss_coef=router_loss)
        learners = self.load(model, role="critic", head="score", trainable=True)
        return Critic(learners, settings, self.offloader, router_loss)

    def reward_model(self, path: str, place: int, *, normalize: bool) -> RolloutRewardModel:
        """Loads a reward model; `place`: its index among the run's rewards."""
        model = replace(self.run.model, path=resolve_path(path), tokenizer="", lora_rank=0, router_aux_loss_coef=0.0)
        tokenizer: Any = load_tokenizer(model)
        same_tokens = tokenizer.get_vocab() == self.run.tokenizer.get_vocab()
        learners = self.load(model, role=f"reward-{place}", head="score", trainable=False)
        return RolloutRewardModel(learners, tokenizer, self.offloader, same_tokens=same_tokens, normalize=normalize)

    def rollout_workers(self) -> RolloutWorkers | None:
        """Starts engines on devices of their own, which receive the policy's weights; None: the policy generates."""
        placement = self.run.placement
        if not placement.rollouts_apart:
            return None
        assert isinstance(self.config, OnlineConfig)
        model = replace(self.run.model, lora_rank=0, router_aux_loss_coef=0.0)  # adapters arrive merged
        engine, template, seed = engine_of(self.config), self.config.data.chat_template, self.config.seed
        inflight = self.config.rollout.inflight_updates
        sender = placement.pool("actor").start("actor.sender", WeightSender, RoleRef("actor"))
        slots = placement.rollout_slots(
            lambda pool: pool.start("rollout", RolloutWorker, model, engine, template, seed, inflight)
        )
        return RolloutWorkers(slots, sender, placement.rendezvous)

    def load(self, model: ModelConfig, *, role: str, **options: Any) -> LearnerGroup:
        """Starts a learner on every device of the role; `options`: of Learner."""
        cluster, update = self.config.cluster, self.config.train
        found = cluster.of(role)
        layout = ParallelLayout(
            found.tensor_parallel,
            found.zero,
            frozenset(cluster.offload),
            context_parallel=found.context_parallel,
            expert_parallel=found.expert_parallel,
        )
        pool = self.run.placement.pool(role)
        self.run.log.message(f"loading {model.path}" + f" ({role})" * (role != "actor"))
        with self.run.log.phase("load"):
            workers = pool.start(role, Learner, model, update, seed=self.config.seed, layout=layout, **options)
        return LearnerGroup(workers, layout.ranks_per_sample)


def engine_of(config: OnlineConfig) -> EngineSpec:
    """Returns the engine that generates; on devices of its own a vLLM engine may be divided among several."""
    options, divided = dict(config.rollout.vllm_options), config.cluster.rollout_tensor_parallel_size
    if config.cluster.rollout_devices and divided > 1:
        options["tensor_parallel_size"] = divided
    return EngineSpec(config.rollout.engine, options)


def has_router(path: str) -> bool:
    """Whether a model is a mixture of experts with a balance loss; a critic need not be one where the policy is."""
    return hasattr(read_config(resolve_path(path), "score").get_text_config(), "router_aux_loss_coef")
