"""Set-up of a run: builds the objects that a loop uses and connects them. This is the wiring of the whole trainer.

Offline   examples -> reference log-probabilities -> credit -> update
Online    prompts -> rollouts (generator, environment, rewards) -> log-probabilities, values -> credit -> update
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.algorithms import ALGORITHMS, Algorithm, OnlineAlgorithm, RolloutSettings
from posttrain.config.sections import Config, OnlineConfig
from posttrain.core.devices import default_device, device_memory
from posttrain.core.errors import UsageError
from posttrain.core.types import Objective, Sample, SamplingDistribution
from posttrain.data.encoding.encoder import Encoder
from posttrain.engines.base import Generator, Sampling
from posttrain.models.loading import vocabulary_size
from posttrain.rewards.base import Rewards
from posttrain.rollout import records
from posttrain.rollout.data_completions import DataCompletions
from posttrain.rollout.environments import Environments
from posttrain.rollout.episodes import EpisodePlayer, EpisodeRunner
from posttrain.rollout.group_replay import GroupReplay
from posttrain.rollout.overlap import OverlappingStages, PartStage
from posttrain.rollout.records import Rollout
from posttrain.rollout.rollouts import Rollouts
from posttrain.rollout.scoring import RolloutScorer
from posttrain.rollout.tools import ToolRunner, Tools
from posttrain.train.held_out_eval import HeldOutEval
from posttrain.train.inputs import NO_INPUTS, RunInputs
from posttrain.train.layout_check import check_layouts
from posttrain.train.memory_plan import StepSize, fit_to_memory
from posttrain.train.model_loader import ModelLoader
from posttrain.train.offline import OfflineLoop
from posttrain.train.online import OnlineLoop
from posttrain.train.pretraining_mix import PretrainingMix
from posttrain.train.reward_model import check_reward_model
from posttrain.train.run import Run
from posttrain.train.streams import StreamFiller
from posttrain.train.task_eval import TaskEval, task_settings

if TYPE_CHECKING:
    from posttrain.rollout.agents import Agents


@contextmanager
def open_offline(verb: str, config: Config, inputs: RunInputs = NO_INPUTS) -> Iterator[OfflineLoop]:
    """Build an offline loop with its models loaded, at the step it starts or resumes from."""
    algorithm = ALGORITHMS[verb](config.algo)
    check_reference(algorithm, config)
    tasks = task_settings(config, algorithm)
    with Run.open(verb, config, algorithm, inputs) as run:
        if run.metric_functions and run.data.eval is None:
            raise UsageError(f"metrics of {verb} are computed on evaluation data: give eval_data, or data.eval")
        objective = make_objective(run, algorithm)
        check_layouts(run.config, algorithm)
        fit_step_to_memory(run, algorithm)
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
            tasks=TaskEval(tasks, policy, run.directory.path) if tasks else None,
            step=run.resume(policy),
        )


@contextmanager
def open_online(verb: str, config: OnlineConfig, inputs: RunInputs = NO_INPUTS) -> Iterator[OnlineLoop]:
    """Build an online loop with its models loaded, at the step it starts or resumes from; cheap checks come first."""
    algorithm = make_online_algorithm(verb, config)
    tasks = task_settings(config, algorithm)
    with ExitStack() as stack:
        rewards = stack.enter_context(make_rewards(config))
        rewards.check()  # before anything else is read or loaded
        for _, path in rewards.models:
            check_reward_model(path)
        if config.rollout.replay:
            records.find_file(Path(config.rollout.replay))
        programs = make_programs(config)
        if programs is not None:
            stack.enter_context(programs)
            programs.check()
        run = stack.enter_context(Run.open(verb, config, algorithm, inputs))
        check_layouts(run.config, algorithm)
        fit_step_to_memory(run, algorithm)
        assert isinstance(run.config, OnlineConfig)
        config = run.config  # data and functions that were given in memory are files now, which it names
        for child_processes in (rewards, programs):
            if child_processes is not None:
                child_processes.stop_when(lambda: run.signals.received is not None)
        check_rewards_with_data(rewards, run)
        objective = make_objective(run, algorithm)

        models = ModelLoader(run, algorithm)
        policy = models.policy()
        reference = models.reference(policy)
        normalize = config.reward.normalize == "saved"
        reward_models = {index: models.reward_model(path, index, normalize=normalize) for index, path in rewards.models}
        model_scorers = {index: model.score_rollouts for index, model in reward_models.items()}
        settings = algorithm.critic()
        first_reward_model = next((path for _, path in rewards.models), "")
        critic = models.critic(settings, first_reward_model) if settings is not None else None
        streams = StreamFiller(algorithm, policy, reference, critic)
        teachers = models.teachers(policy)

        rollout_workers = models.rollout_workers()  # before a call of the policy, which waits until it is loaded
        sampling = Sampling.of(config.rollout, policy.stop_ids())
        generator: Generator = rollout_workers or policy
        if rollout_workers is None and "policy" in config.cluster.offload and engine_has_copy(config):
            generator = models.offloader.generator(policy)
        scorer = RolloutScorer(rewards, model_scorers, config, run.tokenizer)
        episodes = partial(make_episodes, run, config, programs)
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
            stages=overlapping_stages(config, scorer, streams) if config.rollout.prompts_per_stage else None,
            recorded=records.read_steps(Path(config.rollout.replay)) if config.rollout.replay else None,
            update_weights=rollout_workers.update if rollout_workers else policy.update_generator,
            data_completions=make_data_completions(run, config, algorithm),
        )
        held_out = make_held_out_eval(run, config, sampling, scorer, episodes)
        loop = OnlineLoop(
            run=run,
            config=config,
            algorithm=algorithm,
            objective=objective,
            policy=policy,
            reference=reference,
            critic=critic,
            streams=streams,
            teachers=teachers,
            offloader=models.offloader,
            scorer=scorer,
            rollouts=rollouts,
            rollout_workers=rollout_workers,
            held_out=held_out,
            replay=GroupReplay(config.rollout.replay_max_age) if config.rollout.replay_max_age else None,
            tasks=TaskEval(tasks, policy, run.directory.path) if tasks else None,
            pretraining=PretrainingMix(run, algorithm) if algorithm.pretrain_sources() else None,
        )
        loop.resume()
        stack.callback(loop.writer.close)  # before another process may write to the run directory
        yield loop
        loop.writer.flush()


def check_rewards_with_data(rewards: Rewards, run: Run) -> None:
    """Raise UsageError if a reward needs a column or a ground truth that the data does not have."""
    rewards.check(sorted(run.data.train.prompts[0][0].columns))
    for data in (run.data.train, run.data.eval):
        rewards.check_examples((row[0].columns, row[0].origin) for row in (data.prompts if data else ()))


def make_held_out_eval(
    run: Run,
    config: OnlineConfig,
    sampling: Sampling,
    scorer: RolloutScorer,
    episodes: Callable[[Generator, Sampling], EpisodePlayer | None],
) -> HeldOutEval | None:
    """Return what evaluates on the evaluation prompts; None without any."""
    if run.data.eval is None:
        return None
    prompts = [prompt for (prompt,) in run.data.eval.prompts]
    return HeldOutEval(prompts, config, sampling, scorer, run.tokenizer, episodes, run.metric_functions)


def fit_step_to_memory(run: Run, algorithm: Algorithm) -> None:
    """Make the run's micro-batches smaller, or recompute activations, if a step would not fit into device memory."""
    device = default_device()
    if device.type == "cpu" and "activations" in run.config.cluster.offload:
        run.log.message("cluster.offload activations: the device is the CPU, so nothing is moved")
    if device.type == "cpu" or not run.config.train.fit_memory:
        return
    fitted = fit_to_memory(run.config, algorithm, device, run.data, device_memory(device)[1])
    if fitted is run.config:
        return
    before = run.config.train.micro_batch_tokens
    options = StepSize.of(fitted).options(run.config)
    run.log.message(f"memory: a step with micro-batches of {before:,} tokens does not fit; using {' '.join(options)}")
    checkpointing = fitted.model.gradient_checkpointing
    run.config, run.model = fitted, replace(run.model, gradient_checkpointing=checkpointing)


def make_online_algorithm(verb: str, config: OnlineConfig) -> OnlineAlgorithm:
    """Construct the algorithm with its options and with the sampling settings of the run."""
    cls, rollout = ALGORITHMS[verb], config.rollout
    assert issubclass(cls, OnlineAlgorithm), f"{verb} does not generate"
    distribution = SamplingDistribution(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        min_p_first=rollout.engine == "vllm",
    )
    settings = RolloutSettings(
        max_completion_tokens=rollout.max_tokens, distribution=distribution, router_replay=rollout.router_replay
    )
    algorithm = cls(config.algo, settings)
    if rollout.samples_per_prompt < algorithm.min_samples_per_prompt():
        raise UsageError(
            f"rollout.samples_per_prompt is {rollout.samples_per_prompt}, but {verb} compares the completions of a "
            f"prompt: set it to at least {algorithm.min_samples_per_prompt()}"
        )
    check_teachers(algorithm, config)
    check_reference(algorithm, config)
    return algorithm


def check_reference(algorithm: Algorithm, config: Config) -> None:
    """Raise UsageError if the reference should follow the policy and cannot."""
    if algorithm.reference_sync_steps() and config.model.lora_rank:
        raise UsageError(
            f"algo.reference_sync_steps is {algorithm.reference_sync_steps()}, but with model.lora_rank the reference "
            "is the policy without its adapters, which does not change: leave one of them out"
        )


def check_teachers(algorithm: OnlineAlgorithm, config: OnlineConfig) -> None:
    """Raise UsageError if teachers, or completions of the data, do not go with other settings of the run."""
    settings, rollout, parallel = algorithm.teachers(), config.rollout, config.cluster.context_parallel_size
    program = rollout.environment or rollout.agent or " ".join(rollout.tools)
    if settings is not None and program and (settings.context_column or settings.tokenizer):
        raise UsageError(
            "algo.teacher_context_column and algo.teacher_tokenizer are for completions of one turn: leave them out "
            f"with {program}"
        )
    if settings is not None and settings.top_k and parallel > 1:
        raise UsageError(
            f"cluster.context_parallel_size is {parallel}, but a teacher's likeliest tokens are compared on one "
            "device: set it to 1, or algo.objective to policy_gradient"
        )
    if algorithm.data_fraction() and (program or rollout.replay):
        raise UsageError(
            "algo.student_fraction mixes in completions of one turn: leave out rollout.environment, rollout.agent, "
            "rollout.tools and rollout.replay"
        )


def make_objective(run: Run, algorithm: Algorithm) -> Objective:
    """Return what the learners compute, minimise and divide by."""

    def token_id(text: str) -> int:
        ids = run.tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise UsageError(
                f"{text!r} is {len(ids)} tokens in this tokenizer; algo.positive_token and algo.negative_token must be "
                "one token each."
            )
        if ids[0] == run.tokenizer.unk_token_id:
            raise UsageError(
                f"This tokenizer does not know {text!r}; choose another algo.positive_token or algo.negative_token."
            )
        return ids[0]

    return algorithm.objective(
        replace(algorithm.forward_request(token_id), router_loss=run.config.model.router_aux_loss_coef)
    )


def make_data_completions(run: Run, config: OnlineConfig, algorithm: OnlineAlgorithm) -> DataCompletions | None:
    """Return the data's completions that take the place of generated ones, if the algorithm mixes them in."""
    if not algorithm.data_fraction():
        return None
    data = replace(config.data, max_length=2**31 - 1)
    encoder = Encoder(run.tokenizer, data, "labelled", vocabulary_size(run.model))
    given = DataCompletions(
        encoder, algorithm.completion_column(), algorithm.data_fraction(), config.seed, config.rollout.max_tokens
    )
    given.check([prompt for (prompt,) in run.data.train.prompts])
    return given


def engine_has_copy(config: OnlineConfig) -> bool:
    """Whether an engine on the policy's devices has weights of its own: vLLM has, and a divided policy is gathered."""
    return config.rollout.engine == "vllm" or config.cluster.of("actor").devices > 1


def overlapping_stages(config: OnlineConfig, scorer: RolloutScorer, streams: StreamFiller) -> OverlappingStages:
    """Return what follows generation, by the place that computes it; stages of one place run one after the other."""
    stages: dict[str, list[PartStage]] = {}

    def add(role: str, stage: PartStage) -> None:
        stages.setdefault(config.cluster.of(role).place, []).append(stage)

    for index in scorer.models:
        add(f"reward-{index}", partial(scorer.score_by_model, index))
    reference, critic = streams.reference, streams.critic
    if reference is not None:
        add("actor" if reference.model is None else "reference", lambda part: reference.fill(samples_of(part)))
    add("actor", lambda part: streams.fill_logprobs(samples_of(part)))
    add("actor" if critic is None else "critic", lambda part: streams.fill_values(samples_of(part)))
    return OverlappingStages(stages, "rollout" if config.cluster.rollout_devices else "actor")


def samples_of(part: list[Rollout]) -> list[Sample]:
    """Return the samples of the rollouts that were generated; a failed one is not trained on."""
    return [rollout.sample for rollout in part if not rollout.failure]


def make_rewards(config: OnlineConfig) -> Rewards:
    """Make the rewards; a judge that compares completions needs several of each prompt."""
    reward = config.reward
    rewards = Rewards(
        reward.functions,
        reward.weights,
        timeout_seconds=reward.timeout_seconds,
        memory_gib=reward.memory_gib,
        workers=reward.workers,
        max_failure_rate=reward.max_failure_rate,
        env=reward.env,
        allow_unprotected_code=reward.allow_unprotected_code,
    )
    sections = [("rollout", config.rollout.samples_per_prompt)]
    sections += [("eval", config.eval.samples_per_prompt)] if config.data.eval else []
    for section, samples in sections:
        if rewards.comparing and samples < 2:
            judge = rewards.specs[rewards.comparing[0]].text
            raise UsageError(
                f"{section}.samples_per_prompt is {samples}, but {judge} compares completions of one prompt: set "
                f"{section}.samples_per_prompt to 2 or more, or use mode: pointwise"
            )
    return rewards


def make_programs(config: OnlineConfig) -> Environments | Agents | None:
    """Return the processes of the environment, the tools or the agent; None if completions have one turn."""
    reward, rollout = config.reward, config.rollout
    common: dict[str, Any] = {
        "memory_gib": reward.memory_gib,
        "max_failure_rate": reward.max_failure_rate,
        "env": reward.env,
    }
    if rollout.environment or rollout.tools:
        common |= {
            "workers": rollout.environment_workers or reward.workers,
            "timeout_seconds": reward.timeout_seconds,
        }
    if rollout.environment:
        return Environments(rollout.environment, **common)
    if rollout.tools:
        return Tools(rollout.tools, allow_unprotected=reward.allow_unprotected_code, **common)
    if rollout.agent:
        from posttrain.rollout.agents import Agents  # the HTTP server

        return Agents(
            rollout.agent, workers=rollout.agent_workers, timeout_seconds=rollout.agent_timeout_seconds, **common
        )
    return None


def make_episodes(
    run: Run, config: OnlineConfig, programs: Environments | Agents | None, generator: Generator, sampling: Sampling
) -> EpisodePlayer | None:
    """Return what plays episodes of several turns; None without an environment or agent."""
    if programs is None:
        return None
    if isinstance(programs, Tools):
        return ToolRunner(programs, generator, config, sampling, run.tokenizer)
    if isinstance(programs, Environments):
        return EpisodeRunner(programs, generator, config, sampling, run.tokenizer)
    from posttrain.rollout.agents import AgentRunner

    return AgentRunner(programs, generator, config, sampling, run.tokenizer)
