"""Loads the models of a run onto the devices of their roles."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from posttrain.algorithms import Algorithm, OnlineAlgorithm
from posttrain.algorithms.base import CriticSettings, TeacherSettings
from posttrain.algorithms.opd import SELF, is_address
from posttrain.cluster.worker_host import RoleRef
from posttrain.config.sections import DataConfig, ModelConfig, OnlineConfig
from posttrain.core.errors import UsageError
from posttrain.data.encoding.encoder import Encoder
from posttrain.data.encoding.templates import template_stop_ids
from posttrain.engines.base import EngineSpec, check_samples
from posttrain.models.freezing import without_freezing
from posttrain.models.loading import read_config, vocabulary_size
from posttrain.models.paths import base_model_path, resolve_path
from posttrain.models.tokenizers import load_tokenizer
from posttrain.train.alignment import TextAlignment
from posttrain.train.critic import Critic
from posttrain.train.layout_check import layout_of
from posttrain.train.learner import Learner
from posttrain.train.learner_group import LearnerGroup
from posttrain.train.offload import Offloader
from posttrain.train.reference import ReferenceModel
from posttrain.train.reward_model import RewardModel
from posttrain.train.rollout_workers import SLOTS_PER_WORKER, RolloutWorker, RolloutWorkers, WeightSender
from posttrain.train.run import Run
from posttrain.train.teachers import LocalTeacher, ServiceTeacher, Teacher, TeacherPrompts, Teachers

TEACHER_LENGTH = 2**20  # of a prompt with a teacher's context or tokens
REWARD_DATA = DataConfig(max_length=2**31 - 1)  # data.max_length and rollout.max_tokens limit rollouts already


class ModelLoader:
    """Loads policy, reference, critic, reward models and rollout workers, each with the layout of its role."""

    def __init__(self, run: Run, algorithm: Algorithm) -> None:
        self.run, self.config, self.algorithm = run, run.config, algorithm
        self.offloader = Offloader(run.config.cluster.offload)

    def policy(self) -> LearnerGroup:
        """Load the model that is trained, and the teacher beside it."""
        model, path = self.run.model, self.algorithm.teacher_path()
        options: dict[str, Any] = {}
        if isinstance(self.config, OnlineConfig):
            separate = self.run.placement.has_rollout_devices
            options["sampler_copy"] = bool(self.config.rollout.ahead) and not separate
            options["value_head"] = "values" in self.algorithm.outputs()
            if not separate:
                options["engine"] = rollout_engine(self.config)
        policy = self.load(
            model,
            role="actor",
            trainable=True,
            head=self.algorithm.head,
            teacher=replace(model, path=path, lora_rank=0) if path else None,
            template=self.config.data.chat_template,
            **options,
        )
        self.offloader.policy = policy
        return policy

    def reference(self, policy: LearnerGroup) -> ReferenceModel | None:
        """Load the reference, if the algorithm needs one; with LoRA it is the policy without its adapters."""
        if "ref_logprobs" not in self.algorithm.needs():
            return None
        algorithm, path = self.algorithm, self.algorithm.reference_path()
        return ReferenceModel(
            self.run,
            policy,
            None if self.config.model.lora_rank and not path else self.frozen(path),
            self.offloader,
            distribution=algorithm.distribution,
            sync_steps=algorithm.reference_sync_steps(),
            mixup_alpha=algorithm.reference_mixup_alpha(),
            load=self.frozen,
        )

    def teachers(self, policy: LearnerGroup) -> Teachers | None:
        """Load the teachers that are asked before the update, or connect to them, if the algorithm has any."""
        settings = self.algorithm.teachers() if isinstance(self.algorithm, OnlineAlgorithm) else None
        if settings is None:
            return None
        own, vocabulary = self.run.tokenizer, vocabulary_size(self.run.model)
        prompts = alignment = None
        if settings.context_column:
            data = replace(self.config.data, max_length=TEACHER_LENGTH)
            prompts = TeacherPrompts(Encoder(own, data, "prompt", vocabulary), settings.context_column)
        if settings.tokenizer:
            model = ModelConfig(path=settings.tokenizer)
            tokenizer = load_tokenizer(model)
            check_other_tokenizer(own, tokenizer, settings.tokenizer)
            encoder = Encoder(tokenizer, DataConfig(max_length=TEACHER_LENGTH), "prompt", len(tokenizer))
            alignment = TextAlignment(own, tokenizer, encoder, template_stop_ids(own))
        loaded = [self.teacher(path, number, settings, policy) for number, path in enumerate(settings.teachers)]
        found = Teachers(loaded, settings, prompts, alignment)
        found.check([prompt for (prompt,) in self.run.data.train.prompts])
        return found

    def teacher(self, path: str, number: int, settings: TeacherSettings, policy: LearnerGroup) -> Teacher:
        """Load one teacher, or connect to it."""
        if is_address(path):
            return ServiceTeacher(path, settings)
        if path == SELF:
            return LocalTeacher(policy, nullcontext, self.algorithm.distribution)
        name = f"reference-{number}" if number else "reference"
        model = self.frozen(path, name=name, other_vocabulary=bool(settings.tokenizer))
        self.offloader.offload("reference", model)
        on_device = partial(self.offloader.on_device, "reference", model)
        return LocalTeacher(model, on_device, self.algorithm.distribution)

    def frozen(self, path: str, *, name: str = "reference", other_vocabulary: bool = False) -> LearnerGroup:
        """Load a language model that is not trained; without a path, the initial policy."""
        if other_vocabulary:
            model = ModelConfig(path=resolve_path(path), dtype=self.run.model.dtype)
            return self.load(model, role="reference", name=name, head="token", trainable=False)
        if path and (theirs := vocabulary_size(ModelConfig(path=path))) != (ours := vocabulary_size(self.run.model)):
            raise UsageError(
                f"{path} has a vocabulary of {theirs:,} tokens, {self.run.model.path} of {ours:,}: probabilities of "
                "the same tokens can only be compared in one vocabulary. Choose a model of the same family."
            )
        model = replace(self.run.model, path=path or self.run.model.path, lora_rank=0, router_aux_loss_coef=0.0)
        return self.load(model, role="reference", name=name, head="token", trainable=False)

    def critic(self, settings: CriticSettings, first_reward_model: str) -> Critic:
        """Load the critic: from its own path, else from the first reward model, else from the policy."""
        path = settings.path or first_reward_model or self.run.model.path
        coef = self.run.model.router_aux_loss_coef
        router_loss = coef if coef and has_router(path) else 0.0
        model = replace(without_freezing(self.run.model), path=path, router_aux_loss_coef=router_loss)
        learners = self.load(model, role="critic", head="score", trainable=True)
        return Critic(learners, settings, self.offloader, router_loss)

    def reward_model(self, path: str, index: int, *, normalize: bool) -> RewardModel:
        """Load a reward model; `index`: its number among the run's rewards."""
        model = replace(self.run.model, path=resolve_path(path), tokenizer="", lora_rank=0, router_aux_loss_coef=0.0)
        vocabulary = int(read_config(model.path, "score").get_text_config().vocab_size)
        encoder = Encoder(load_tokenizer(model), REWARD_DATA, "labelled", vocabulary)
        learners = self.load(model, role=f"reward-{index}", head="score", trainable=False)
        reward_model = RewardModel(
            learners,
            encoder,
            policy_tokenizer=self.run.tokenizer,
            statistics=learners.score_statistics() if normalize else (0.0, 1.0),
            on_device=partial(self.offloader.on_device, "reward", learners),
        )
        self.offloader.offload("reward", learners)
        return reward_model

    def rollout_workers(self) -> RolloutWorkers | None:
        """Start engines on devices of their own, which receive the policy's weights; None: the policy generates."""
        placement = self.run.placement
        if not placement.has_rollout_devices:
            return None
        assert isinstance(self.config, OnlineConfig)
        model = replace(self.run.model, lora_rank=0, router_aux_loss_coef=0.0)  # adapters arrive merged
        engine, template, seed = rollout_engine(self.config), self.config.data.chat_template, self.config.seed
        inflight = self.config.rollout.inflight_updates
        sender = placement.pool("actor").start("actor.sender", WeightSender, RoleRef("actor"))
        slots = placement.rollout_slots(
            lambda pool: pool.start("rollout", RolloutWorker, model, engine, template, seed, inflight)
        )
        path = base_model_path(resolve_path(model.path))
        vocabulary = int(read_config(path, "token").get_text_config().vocab_size)
        check = partial(check_samples, vocabulary=vocabulary, engine="a rollout worker")
        # On a CPU equal runs compute equally; vLLM has a queue of its own, and ranks that must have the same requests.
        streams = placement.on_accelerators and engine.name == "local"
        how = {"slots_per_worker": SLOTS_PER_WORKER if streams else 0}
        return RolloutWorkers(slots, sender, placement.rendezvous, check, **how)

    def load(self, model: ModelConfig, *, role: str, name: str = "", **options: Any) -> LearnerGroup:
        """Start a learner on every device of the role; `name`: if a role has several; `options`: of Learner."""
        layout = layout_of(self.config, role)
        pool = self.run.placement.pool(role)
        self.run.log.message(f"loading {model.path}" + f" ({role})" * (role != "actor"))
        with self.run.log.phase("load"):
            workers = pool.start(
                name or role, Learner, model, self.config.train, seed=self.config.seed, layout=layout, **options
            )
        return LearnerGroup(workers, layout.ranks_per_sample, layout.pipeline_parallel)


def check_other_tokenizer(own: Any, other: Any, path: str) -> None:
    """Raise UsageError if a teacher's tokenizer is the student's own: tokens can be compared then."""
    if own.get_vocab() == other.get_vocab():
        raise UsageError(
            f"algo.teacher_tokenizer {path} has the student's vocabulary: leave it out; tokens are compared one by one"
        )


def rollout_engine(config: OnlineConfig) -> EngineSpec:
    """Return the engine that generates; on devices of its own a vLLM engine may be divided among several."""
    options, divided = dict(config.rollout.vllm_options), config.cluster.rollout_tensor_parallel_size
    if config.cluster.rollout_devices and divided > 1:
        options["tensor_parallel_size"] = divided
    return EngineSpec(
        config.rollout.engine,
        options,
        quantization=config.rollout.quantization,
        kv_cache_dtype=config.rollout.kv_cache_dtype,
        speculative_tokens=config.rollout.speculative_tokens,
        speculative_max_sequences=config.rollout.speculative_max_sequences,
    )


def has_router(path: str) -> bool:
    """Whether a model is a mixture of experts with a balance loss; a critic need not be one where the policy is."""
    return hasattr(read_config(resolve_path(path), "score").get_text_config(), "router_aux_loss_coef")
