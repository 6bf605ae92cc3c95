"""Set-up of a run: builds the objects that a loop uses and connects them. This is the wiring of the whole trainer.

Offline   examples -> reference log-probabilities -> credit -> update
Online    prompts -> rollouts (generator, environment, rewards) -> log-probabilities, values -> credit -> update
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from posttrain.algorithms import ALGORITHMS, Algorithm, OnlineAlgorithm, RolloutSettings
from posttrain.config.sections import Config, OnlineConfig
from posttrain.core.errors import UsageError
from posttrain.core.types import Objective, SamplingDistribution
from posttrain.engines.base import Generator, Sampling
from posttrain.rewards.base import Rewards
from posttrain.rollout import records
from posttrain.rollout.environments import Environments
from posttrain.rollout.episodes import EpisodeRunner
from posttrain.rollout.rollouts import Rollouts
from posttrain.rollout.scoring import RolloutScorer
from posttrain.train.held_out_eval import HeldOutEval
from posttrain.train.model_loader import ModelLoader
from posttrain.train.offline import OfflineLoop
from posttrain.train.online import OnlineLoop
from posttrain.train.pretraining_mix import PretrainingMix
from posttrain.train.reward_model import check_reward_model
from posttrain.train.run import Run
from posttrain.train.streams import StreamFiller


@contextmanager
def open_offline(verb: str, config: Config) -> Iterator[OfflineLoop]:
    """Builds an offline loop with its models loaded, at the step it starts or resumes from."""
    algorithm = ALGORITHMS[verb](config.algo)
    with Run.open(verb, config, algorithm) as run:
        objective = make_objective(run, algorithm)
        models = ModelLoader(run, algorithm)
        policy = models.policy()
        policy.annotate(algorithm.annotations())
        reference = models.reference(policy)
        if reference is not None and algorithm.precompute_reference():
            reference.precompute()
        streams = StreamFiller(algorithm, policy, reference)
        yield OfflineLoop(
            run=run,
            algorithm=algorithm,
            objective=objective,
            policy=policy,
            streams=streams,
            step=run.resume(policy),
        )


@contextmanager
def open_online(verb: str, config: OnlineConfig) -> Iterator[OnlineLoop]:
    """Builds an online loop with its models loaded, at the step it starts or resumes from; cheap checks come first."""
    algorithm = make_online_algorithm(verb, config)
    with ExitStack() as stack:
        rewards = stack.enter_context(make_rewards(config))
        rewards.check()  # before anything else is read or loaded
        for _, path in rewards.models:
            check_reward_model(path)
        if config.rollout.replay:
            records.find_file(Path(config.rollout.replay))
        environments = make_environments(config)
        if environments is not None:
            stack.enter_context(environments).check()
        run = stack.enter_context(Run.open(verb, config, algorithm))
        rewards.check(sorted(run.data.train.rows[0][0].columns))  # the data's columns are known now
        objective = make_objective(run, algorithm)

        models = ModelLoader(run, algorithm)
        policy = models.policy()
        reference = models.reference(policy)
        normalize = config.reward.normalize == "saved"
        reward_models = {place: models.reward_model(path, place, normalize=normalize) for place, path in rewards.models}
        settings = algorithm.critic()
        first_reward_model = next((path for _, path in rewards.models), "")
        critic = models.critic(settings, first_reward_model) if settings is not None else None
        streams = StreamFiller(algorithm, policy, reference, critic)

        sampling = make_sampling(config, policy.stop_ids())
        rollout_workers = models.rollout_workers()
        generator: Generator = rollout_workers or policy
        scorer = RolloutScorer(rewards, dict(reward_models), config, run.tokenizer)
        episodes = partial(make_episodes, run, config, environments)
        rollouts = Rollouts(
            generator,
            scorer,
            run.data.stream,
            config,
            sampling,
            run.tokenizer,
            phase=run.log.phase,
            greedy_baseline=algorithm.greedy_baseline,
            episodes=episodes(generator, sampling),
            recorded=records.read_steps(Path(config.rollout.replay)) if config.rollout.replay else None,
            update_weights=rollout_workers.update if rollout_workers else policy.update_generator,
        )
        held_out = None
        if run.data.eval is not None:
            prompts = [row[0] for row in run.data.eval.rows]
            held_out = HeldOutEval(prompts, config, sampling, scorer, run.tokenizer, episodes)

        loop = OnlineLoop(
            run=run,
            config=config,
            algorithm=algorithm,
            objective=objective,
            policy=policy,
            reference=reference,
            critic=critic,
            streams=streams,
            offloader=models.offloader,
            scorer=scorer,
            rollouts=rollouts,
            rollout_workers=rollout_workers,
            held_out=held_out,
            pretraining=PretrainingMix(run, algorithm) if algorithm.pretrain_files() else None,
        )
        loop.resume()
        stack.callback(loop.record.wait)  # before another process may write to the run directory
        yield loop
        loop.record.flush()


def make_online_algorithm(verb: str, config: OnlineConfig) -> OnlineAlgorithm:
    """Constructs the algorithm with its options and with what the run decides about completions."""
    cls, rollout = ALGORITHMS[verb], config.rollout
    assert issubclass(cls, OnlineAlgorithm), f"{verb} does not generate"
    distribution = SamplingDistribution(
        temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k, min_p=rollout.min_p
    )
    algorithm = cls(config.algo, RolloutSettings(max_completion_tokens=rollout.max_tokens, distribution=distribution))
    if rollout.samples_per_prompt < algorithm.min_samples_per_prompt():
        raise UsageError(
            f"rollout.samples_per_prompt is {rollout.samples_per_prompt}, but {verb} compares the completions of a "
            f"prompt: set it to at least {algorithm.min_samples_per_prompt()}"
        )
    if algorithm.reference_sync_steps() and config.model.lora_rank:
        raise UsageError(
            f"algo.reference is {config.algo.reference}, but with model.lora_rank the reference is the policy without "
            "its adapters, which does not change: leave one of them out"
        )
    return algorithm


def make_objective(run: Run, algorithm: Algorithm) -> Objective:
    """Returns what the learners compute, minimise and divide by."""

    def token_id(text: str) -> int:
        ids = run.tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise UsageError(f"algo.reward_tokens: {text!r} is {len(ids)} tokens in this tokenizer; it must be one.")
        if ids[0] == run.tokenizer.unk_token_id:
            raise UsageError(f"algo.reward_tokens: this tokenizer does not know {text!r}.")
        return ids[0]

    return algorithm.objective(
        replace(algorithm.forward_request(token_id), router_loss=run.config.model.router_aux_loss_coef)
    )


def make_rewards(config: OnlineConfig) -> Rewards:
    limits = config.reward
    return Rewards(
        limits.functions,
        limits.weights,
        timeout_seconds=limits.timeout_seconds,
        memory_gib=limits.memory_gib,
        workers=limits.workers,
        max_failure_rate=limits.max_failure_rate,
    )


def make_environments(config: OnlineConfig) -> Environments | None:
    limits = config.reward
    if not config.rollout.environment:
        return None
    return Environments(
        config.rollout.environment,
        workers=limits.workers,
        timeout_seconds=limits.timeout_seconds,
        memory_gib=limits.memory_gib,
        max_failure_rate=limits.max_failure_rate,
    )


def make_episodes(
    run: Run, config: OnlineConfig, environments: Environments | None, generator: Generator, sampling: Sampling
) -> EpisodeRunner | None:
    """Returns what runs episodes of a generator with the environment; None: completions have one turn."""
    if environments is None:
        return None
    return EpisodeRunner(environments, generator, config, sampling, run.tokenizer)


def make_sampling(config: OnlineConfig, stop_ids: list[int]) -> Sampling:
    rollout = config.rollout
    return Sampling(
        max_tokens=rollout.max_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop_ids=tuple(stop_ids),
        stop_texts=rollout.stop,
    )
