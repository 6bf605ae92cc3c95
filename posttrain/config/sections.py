"""The options of training as dataclasses in two levels, `section.option`; the string below a field is its help text.

checks.py holds the conditions between values, parsing.py reads them, renames.py knows their previous names. A section
whose class has `main` may be given by its bare name: `--model X` is `--model.path X`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import yaml

SPECULATIVE_MAX_SEQUENCES = 32
ROLES = ("actor", "critic", "reference", "reward", "rollout")
ONLINE_PARTS = ("critic", "reward", "optimizer", "policy", "engine")
"""Parts of cluster.offload that are idle in some phase of the online loop only."""


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """The model to train and how it is loaded."""

    main: ClassVar[str] = "path"

    path: str = ""
    """Required. Model directory, Hugging Face name, run directory (newest valid checkpoint) or `pico`, a toy model."""
    tokenizer: str = ""
    """Directory or Hugging Face name of the tokenizer; empty: the model's own."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights; auto: float32 on CPU, bfloat16 with float32 master weights on an accelerator. float16 also
    keeps master weights and scales the loss, for devices without bfloat16."""
    lora_rank: int = 0
    """Rank of LoRA adapters to train instead of the weights; 0 trains all weights."""
    lora_alpha: float = 16.0
    """Adapter outputs are scaled by lora_alpha / lora_rank."""
    use_rslora: bool = False
    """Scale adapter outputs by lora_alpha / sqrt(lora_rank) instead (rsLoRA)."""
    use_dora: bool = False
    """Adapters also train the length of each row of the weights (DoRA); slower, on one device."""
    lora_init: Literal["zeros", "pissa", "pissa_niter_16"] = "zeros"
    """How adapters begin; zeros: they add nothing before the first step. pissa: the largest singular values and vectors
    of the weights are trained (PiSSA); pissa_niter_16: the same by a fast approximation. Saved adapters then have twice
    the rank."""
    lora_dropout: float = 0.0
    """Dropout in front of the adapters (the model's own dropout is always off)."""
    lora_target_modules: tuple[str, ...] = ("all-linear",)
    """Names of the modules that get an adapter; all-linear: every linear layer except the head."""
    load_in_4bit: bool = False
    """Keep the frozen weights in 4 bits (QLoRA); needs lora_rank and the package bitsandbytes."""
    freeze_layers: int = 0
    """Freeze the embeddings and this many of the first decoder layers."""
    trainable_layers: int = 0
    """Train only this many of the last decoder layers (below 0: of the first); everything else is frozen; 0: all."""
    frozen_parameters: tuple[str, ...] = ()
    """Freeze the weights whose names these regular expressions match from their beginning."""
    trainable_parameters: tuple[str, ...] = ()
    """Train only the weights whose names these match, besides model.trainable_layers."""
    router_aux_loss_coef: float = 0.0
    """Weight of the load-balancing loss of mixture-of-experts models."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """The examples to train and to evaluate on."""

    main: ClassVar[str] = "train"

    train: tuple[str, ...] = ()
    """Required. Files, directories, globs or dataset names to train on."""
    weights: tuple[float, ...] = ()
    """Mix the training sources by these weights, one per source; empty: read them one after the other."""
    eval: tuple[str, ...] = ()
    """Files to evaluate on."""
    eval_fraction: float = 0.0
    """Share of the training examples to hold out for evaluation, instead of data.eval."""
    repeat: bool = False
    """With data.weights: restart a source when it is used up, instead of ending the epoch there."""
    max_examples: int = 0
    """Use only this many examples of the training files (of each source, with data.weights); 0: all."""
    max_mixture_examples: int = 0
    """With data.weights: end an epoch of the mixture after this many examples; 0: where a source is used up."""
    on_bad_example: Literal["stop", "quarantine"] = "stop"
    """stop: an unusable example ends the run before it starts; quarantine: it is written to a file and counted."""
    map_keys: dict[str, str] = field(default_factory=dict)
    """Column names of the files by the names used here, as JSON: {"prompt": "question", "response": "answer"}."""
    chat_template: str = ""
    """Chat template by name (chatml, llama3, qwen_r1 ...), file, or text with {} such as "Human: {}\\nAssistant: "."""
    max_length: int = 2048
    """Longest sequence in tokens; data.on_overlong decides what happens to longer ones."""
    on_overlong: Literal["truncate", "drop", "error"] = "truncate"
    """truncate: cut the end (plain text is split, so nothing is lost); drop: leave the example out and count it."""
    shuffle: bool = True
    """Draw a new order of the examples in every epoch, determined by the seed."""


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    """The optimizer, its schedule and the batch."""

    max_steps: int = 0
    """Number of optimizer steps (for online trainers: of rollout batches); 0: as many as train.epochs needs."""
    epochs: float = 1.0
    """Passes over the training examples when train.max_steps is 0."""
    batch_size: int = 32
    """Examples per step: conversations, preference pairs, or prompts for online trainers."""
    micro_batch_tokens: int = 8192
    """Tokens per forward pass on one device; bounds memory and does not change the result."""
    fit_memory: bool = True
    """If a step would not fit into the accelerator's memory, use smaller micro-batches, then gradient checkpointing."""
    fp8: bool = False
    """Compute the linear layers in 8 bits while the model trains, but not the gradients of weights: faster for large
    models on GPUs with fp8, less exact."""
    optimizer: Literal["adamw", "adamw_8bit", "muon", "adafactor", "schedule_free"] = "adamw"
    """adamw; adamw_8bit: AdamW with states of 8 bits (bitsandbytes); muon: orthogonalised updates of the layers'
    matrices, AdamW for the rest; adafactor: squared gradients by row and column; schedule_free: AdamW at a
    constant learning rate, evaluated and saved at an average of the weights. Only adamw on several devices."""
    learning_rate: float = 1e-5
    """Peak learning rate."""
    lr_scheduler: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning rate after warm-up."""
    min_lr_ratio: float = 0.1
    """Learning rate at the end of the cosine or linear schedule, as a fraction of the peak."""
    lr_decay_steps: int = 0
    """Step, counted with the warm-up, at which the schedule reaches min_lr_ratio; 0: the last step of the run."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    warmup_ratio: float = 0.0
    """Warm-up as a fraction of all steps, instead of train.warmup_steps."""
    weight_decay: float = 0.0
    """Decoupled weight decay; not applied to norms and biases."""
    adam_beta1: float = 0.9
    """AdamW's decay rate of the average of gradients."""
    adam_beta2: float = 0.95
    """AdamW's decay rate of the average of squared gradients."""
    max_grad_norm: float = 1.0
    """Scale gradients down to this norm; 0: no clipping."""
    neftune_noise_alpha: float = 0.0
    """Add uniform noise of size alpha / sqrt(tokens * hidden size) to the embeddings of an example in training
    (NEFTune), such as 5; offline trainers only."""
    ema_decay: float = 0.0
    """Keep an exponential moving average of the weights with this decay, such as 0.992; `posttrain export --ema`
    exports it."""
    profile_steps: int = 0
    """Profile this many steps, after the first one of the command: traces and a page in the run directory's profile/;
    short: --profile N."""
    profile_ranks: tuple[int, ...] = (0,)
    """Learner ranks that train.profile_steps profiles."""


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    """When to evaluate, on what besides data.eval, and which metric decides."""

    every_steps: int = 0
    """Steps between evaluations; 0: only at the end, if there is evaluation data."""
    harness: Literal["", "lm-eval", "inspect-ai"] = ""
    """Evaluate also, or instead of data.eval, with the tasks and scores of this package: eval.tasks."""
    tasks: tuple[str, ...] = ()
    """Tasks of eval.harness by name or file."""
    num_fewshot: int = -1
    """Solved examples in each prompt of lm-eval; -1: as the task says."""
    apply_chat_template: bool = False
    """Render the prompts of lm-eval as conversations, by the model's chat template."""
    max_task_examples: int = 0
    """Use only this many examples of each of eval.tasks; 0: all."""
    metric_for_best_model: str = ""
    """Metric of evaluations that decides which checkpoint is the best, such as TASK/acc; empty: loss, or reward for
    online trainers."""
    metric_mode: Literal["auto", "min", "max"] = "auto"
    """Whether smaller (min) or larger (max) values of it are better; auto: smaller for losses, perplexities and
    errors."""
    early_stopping_patience: int = 0
    """End the run when this many evaluations in a row have not improved the metric; 0: never."""
    early_stopping_threshold: float = 0.0
    """Smaller improvements do not count for eval.early_stopping_patience."""


@dataclass(kw_only=True, slots=True)
class SaveConfig:
    """When to save and which checkpoints to keep."""

    every_steps: int = 200
    """Steps between checkpoints; 0: save only at the end and when the run is stopped."""
    max_checkpoints: int = 3
    """Number of checkpoints to keep; the best and the newest valid one are never deleted."""
    max_gigabytes: float = 0.0
    """Delete old checkpoints beyond this total size; 0: no limit."""


@dataclass(kw_only=True, slots=True)
class LogConfig:
    """Where metrics are logged besides metrics.jsonl."""

    report_to: tuple[Literal["tensorboard", "wandb", "trackio", "mlflow", "swanlab"], ...] = ()
    """Trackers that get the metrics too; tensorboard: files in the run directory."""
    project: str = ""
    """Project of the run in trackers (in MLflow: the experiment); empty: posttrain."""
    run_name: str = ""
    """Name of the run in trackers; empty: that of the run directory."""
    group: str = ""
    """Group of the run in trackers."""
    tracker_dir: str = ""
    """Directory for local files of wandb, trackio, mlflow and swanlab; empty: logs in the run directory."""
    completions_every_steps: int = 10
    """Steps between tables of completions in trackers, for online trainers; 0: none."""
    prometheus_file: str = ""
    """File that gets the metrics of the last step in the format of Prometheus: NAME.prom in a directory that
    node_exporter collects."""
    tensorboard_dir: str = ""
    """Directory for tensorboard's files; empty: logs/tensorboard in the run directory."""
    communication_every_steps: int = 0
    """Steps between measurements of communication and of the slowest rank, with torch's profiler; 0: none."""


@dataclass(slots=True, frozen=True)
class RoleLayout:
    """Where a role's model is placed and how it is divided."""

    place: str  # the role whose devices it is on: itself, where it has devices of its own, or `actor`
    devices: int
    tensor_parallel: int
    context_parallel: int
    expert_parallel: int
    zero: int
    replicate: int = 1
    pipeline_parallel: int = 1
    virtual_stages: int = 1
    layers_per_stage: tuple[int, ...] = ()
    ulysses_degree: int = 0

    @property
    def ranks_per_sample(self) -> int:
        """The number of ranks that process the same samples."""
        return self.tensor_parallel * self.context_parallel


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    """Devices, and how models are divided among them."""

    devices: int = 1
    """Number of worker processes, one per device (on CPU: each with a share of the cores). torchrun or srun set it."""
    ray_address: str = ""
    """Place the workers on a Ray cluster: `auto`, or its address."""
    tensor_parallel_size: int = 1
    """Devices that each matrix is divided among."""
    sequence_parallel: bool = False
    """Divide activations between attention and MLPs by tokens among these devices, and embedding and head."""
    context_parallel_size: int = 1
    """Devices that each sequence is divided among."""
    ulysses_degree: int = 0
    """Devices of cluster.context_parallel_size that exchange heads in attention (Ulysses); the others form a ring (ring
    attention); 0: as many as the model's heads allow."""
    pipeline_parallel_size: int = 1
    """Devices that the layers of each model are divided among; each holds a stage of consecutive layers, or several."""
    pipeline_schedule: Literal["1f1b", "interleaved"] = "1f1b"
    """Order of forward and backward passes; interleaved: each device holds several stages, which shortens idle time."""
    virtual_pipeline_parallel_size: int = 1
    """Stages that each device holds with pipeline_schedule interleaved."""
    pipeline_layers_per_stage: tuple[int, ...] = ()
    """Number of layers of each stage, from the first to the last; empty: equally many, as far as possible."""
    expert_parallel_size: int = 1
    """Devices that the experts of a mixture-of-experts model are divided among."""
    replicate_size: int = 1
    """Copies of each model on the policy's devices (HSDP): each is sharded over the devices divided by this number."""
    defer_gradient_reduction: bool = False
    """Reduce gradients once per step instead of after every micro-batch: faster, but each device holds whole ones."""
    zero_stage: Literal[2, 3] = 3
    """3: free gathered parameters after each layer; 2: keep them until the backward pass, faster with more memory."""
    offload: tuple[
        Literal[
            "reference", "critic", "reward", "optimizer", "policy", "engine", "moments", "activations", "parameters"
        ],
        ...,
    ] = ()
    """Keep these in host memory while they are not used. activations: the inputs of layers that
    model.gradient_checkpointing saves; moments: those of AdamW, which pass through the device in each optimizer step;
    optimizer: moments and master weights, while an online trainer generates; policy: its weights and optimizer, while
    reference, critic or reward models work or an engine generates with a copy (vLLM, or a divided policy); engine: the
    whole copy of a divided policy that generates, which is freed while the policy trains."""
    max_restarts: int = 0
    """Number of times that a run restarts by itself from its last checkpoint after it lost a worker."""
    worker_timeout_seconds: float = 1800.0
    """Longest wait for a worker; then it counts as lost."""
    reference_devices: int = 0
    """Devices for the reference model alone; 0: it shares those of the policy."""
    reference_tensor_parallel_size: int = 0
    """cluster.tensor_parallel_size of the reference model; 0: as for all models."""
    reference_context_parallel_size: int = 0
    """cluster.context_parallel_size of the reference model; 0: as for all models."""
    reference_pipeline_parallel_size: int = 0
    """cluster.pipeline_parallel_size of the reference model; 0: as for all models."""
    reference_expert_parallel_size: int = 0
    """cluster.expert_parallel_size of the reference model; 0: as for all models."""
    reference_zero_stage: Literal[0, 2, 3] = 0
    """cluster.zero_stage of the reference model; 0: as for all models."""

    def of(self, role: str) -> RoleLayout:
        """Return the layout of a role: actor, reference, critic, rollout, or reward-N for the Nth reward (from 0)."""
        own = self.own_devices()
        place = role if role in own else role.partition("-")[0]
        if place in own:
            size = own[place]
        elif (other := self.option(role, "colocate_with", "actor")) != "actor":
            shared = self.of(other)
            place, size = shared.place, shared.devices
        else:
            place, size = "actor", self.devices - sum(own.values())
        if role == "rollout":  # engines divide a model in their own way
            return RoleLayout(place, size, self.option(role, "tensor_parallel_size", 1), 1, 1, 3)
        return RoleLayout(
            place,
            size,
            self.option(role, "tensor_parallel_size", 0) or self.tensor_parallel_size,
            self.option(role, "context_parallel_size", 0) or self.context_parallel_size,
            self.option(role, "expert_parallel_size", 0) or self.expert_parallel_size,
            self.option(role, "zero_stage", 0) or self.zero_stage,
            self.replicate_size if place == "actor" else 1,
            *self.pipeline_of(role),
            self.ulysses_degree_of(role),
        )

    def ulysses_degree_of(self, role: str) -> int:
        """Return the devices of a role that exchange heads; the option is for the common context_parallel_size."""
        own = self.option(role, "context_parallel_size", 0) or self.context_parallel_size
        return self.ulysses_degree if own == self.context_parallel_size > 1 else 0

    def pipeline_of(self, role: str) -> tuple[int, int, tuple[int, ...]]:
        """Return pipeline ranks, stages per rank and listed layers of a role; the latter are for the common size."""
        size = self.option(role, "pipeline_parallel_size", 0) or self.pipeline_parallel_size
        if size == 1 or size != self.pipeline_parallel_size:
            return size, 1, ()
        return size, self.virtual_pipeline_parallel_size, self.pipeline_layers_per_stage

    def option(self, role: str, name: str, default: Any) -> Any:
        """Return a role's own option. Of a list, reward-1 takes the second value, or the only one."""
        kind, _, index = role.partition("-")
        value = getattr(self, f"{kind}_{name}", default)
        if not isinstance(value, tuple):
            return value
        if len(value) == 1:
            return value[0]
        return value[int(index)] if index and int(index) < len(value) else default

    def own_devices(self) -> dict[str, int]:
        """Return place -> number of devices, for roles that do not share the policy's."""
        found = {role: getattr(self, f"{role}_devices", 0) for role in ("reference", "critic", "rollout")}
        rewards = getattr(self, "reward_devices", ())
        names = ["reward"] if len(rewards) == 1 else [f"reward-{index}" for index in range(len(rewards))]
        return {place: count for place, count in [*found.items(), *zip(names, rewards, strict=True)] if count}


@dataclass(kw_only=True, slots=True)
class OnlineClusterConfig(ClusterConfig):
    """The same with the further roles of online trainers."""

    reference_colocate_with: Literal["actor", "critic", "reward", "rollout"] = "actor"
    """Role whose devices the reference model shares, if it has none of its own."""
    critic_devices: int = 0
    """Devices for the critic alone; 0: it shares those of the policy."""
    critic_colocate_with: Literal["actor", "reference", "reward", "rollout"] = "actor"
    """Role whose devices the critic shares, if it has none of its own."""
    critic_tensor_parallel_size: int = 0
    """cluster.tensor_parallel_size of the critic; 0: as for all models."""
    critic_context_parallel_size: int = 0
    """cluster.context_parallel_size of the critic; 0: as for all models."""
    critic_pipeline_parallel_size: int = 0
    """cluster.pipeline_parallel_size of the critic; 0: as for all models."""
    critic_expert_parallel_size: int = 0
    """cluster.expert_parallel_size of the critic; 0: as for all models."""
    critic_zero_stage: Literal[0, 2, 3] = 0
    """cluster.zero_stage of the critic; 0: as for all models."""
    reward_devices: tuple[int, ...] = ()
    """Devices for reward models: one number for all of them together, or one per entry of reward.functions."""
    reward_colocate_with: tuple[Literal["actor", "reference", "critic", "rollout"], ...] = ()
    """Role whose devices reward models share: one for all, or one per entry of reward.functions."""
    reward_tensor_parallel_size: tuple[int, ...] = ()
    """cluster.tensor_parallel_size of reward models: one for all, or one per entry of reward.functions."""
    reward_context_parallel_size: tuple[int, ...] = ()
    """cluster.context_parallel_size of reward models: one for all, or one per entry of reward.functions."""
    reward_pipeline_parallel_size: tuple[int, ...] = ()
    """cluster.pipeline_parallel_size of reward models: one for all, or one per entry of reward.functions."""
    reward_expert_parallel_size: tuple[int, ...] = ()
    """cluster.expert_parallel_size of reward models: one for all, or one per entry of reward.functions."""
    reward_zero_stage: tuple[Literal[0, 2, 3], ...] = ()
    """cluster.zero_stage of reward models: one for all, or one per entry of reward.functions."""
    rollout_devices: int = 0
    """Devices for engines that only generate; 0: the policy's devices generate too."""
    rollout_tensor_parallel_size: int = 1
    """Devices of one vLLM engine on cluster.rollout_devices."""


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    """How completions are generated for training."""

    samples_per_prompt: int = 8
    """Completions per prompt and step."""
    max_tokens: int = 512
    """Longest completion in tokens; with an environment or an agent, all turns together."""
    temperature: float = 1.0
    """Sampling temperature; the trainer computes log-probabilities with it, and with top_p, top_k and min_p, too."""
    top_p: float = 1.0
    """Sample only from the most likely tokens whose probabilities add up to this."""
    top_k: int = 0
    """Sample only from this many of the most likely tokens; 0: from all."""
    min_p: float = 0.0
    """Sample only tokens at least this many times as likely as the most likely one."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion, besides the end-of-turn token."""
    ahead: int = 0
    """Batches generated in advance, with older weights, while earlier ones are trained on; 0: on-policy."""
    partial_prompts: int = 0
    """Prompts in progress beyond train.batch_size: a step ends when train.batch_size of all are complete, and
    completions that are cut off carry on in the next step, with its weights; 0: each step finishes its prompts."""
    partial_tokens: int = 256
    """Tokens by which completions advance before the complete prompts are counted, with rollout.partial_prompts."""
    max_staleness: int = 2
    """Most updates between the weights that begin a completion and those at its end, with rollout.partial_prompts; 0:
    each step finishes its prompts."""
    prompts_per_stage: int = 0
    """Divide a batch into parts of this many prompts: while one is generated, roles on other devices compute rewards,
    log-probabilities and values of those before; 0: one stage after the other. On-policy either way."""
    dynamic_sampling: bool = False
    """Replace groups with equal rewards by other prompts, since they have no gradient (DAPO)."""
    dynamic_sampling_max_batches: int = 10
    """Most batches that dynamic sampling generates for one step."""
    skip_epochs: int = 0
    """Leave out a prompt for this many epochs after all its completions had the same reward; 0: never."""
    replay_max_age: int = 0
    """Replace groups whose rewards are all equal by earlier groups whose rewards differ, each used once more, at most
    this many steps old; 0: never."""
    prompt_sampling: Literal["uniform", "difficulty"] = "uniform"
    """difficulty: take a prompt again with probability 4p(1-p), at least 0.1; p: share of completions that solved it
    when it was used last."""
    environment: str = ""
    """Environment of multi-turn episodes: FILE.py:CLASS with start(row) and step(reply), or reasoning_gym:NAME,
    gymnasium:ID, openenv:URL."""
    tools: tuple[str, ...] = ()
    """Tools that the model may call before its last reply: FILE.py:FUNCTION, mcp:COMMAND, mcp:http://...,
    mcp-session:COMMAND for a server of each conversation's own, or sandbox, which runs Python programs."""
    environment_workers: int = 0
    """Child processes of the environment or the tools; each runs one step at a time; 0: as many as reward.workers."""
    environment_schedule: Literal["auto", "concurrent", "lock_step"] = "auto"
    """concurrent: episodes advance independently; lock_step: turn by turn, all together; auto: concurrent where the
    local engine generates on an accelerator."""
    max_concurrent_episodes: int = 0
    """Most episodes with an environment or tools that go on at the same time; 0: all of a batch."""
    max_turns: int = 0
    """Most replies of the model in an episode, which then ends as truncated; 0: no limit but rollout.max_tokens."""
    episode_timeout_seconds: float = 0.0
    """Time limit for one episode, checked after each turn; beyond it the episode fails and is left out; 0: none."""
    agent: str = ""
    """Program that talks to the policy as to OpenAI's API: FILE.py:FUNCTION, a command line, or verifiers:NAME."""
    agent_workers: int = 16
    """Conversations of rollout.agent that go on at the same time, each in a child process."""
    agent_timeout_seconds: float = 300.0
    """Time limit for one conversation of rollout.agent; beyond it the conversation fails and is left out."""
    replay: str = ""
    """Take completions from this run directory's records instead of generating them; they are scored again."""
    record_entropy: bool = False
    """Record each token's entropy and the trainer's log-probability, which the board shows as colours: one more forward
    pass per step."""
    max_mismatch: float = 0.1
    """Stop when sampler and trainer differ by this KL per token at equal weights in three steps in a row; warn at a
    tenth of it."""
    router_replay: bool = False
    """Train a mixture of experts with the experts chosen while sampling, not with those the router chooses again."""
    engine: Literal["local", "vllm"] = "local"
    """What generates: the local engine, which shares the trainer's weights, or vLLM."""
    vllm_options: dict[str, Any] = field(default_factory=dict)
    """Options of vLLM by its own names, as JSON: {"gpu_memory_utilization": 0.4, "max_num_seqs": 256}."""
    quantization: Literal["none", "fp8"] = "none"
    """fp8: the local engine generates with 8-bit copies of the layers' weights, made again at each update; faster on
    GPUs with fp8, but sampler_kl grows."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """fp8: the local engine stores keys and values as 8-bit floats: half the memory and half the reading for long
    completions, but sampler_kl grows; auto: the model's precision."""
    speculative_tokens: int = 0
    """Speculative decoding by the local engine: most tokens drafted per sequence and step, from n-grams of its prompt
    and completions; 0: off."""
    speculative_max_sequences: int = SPECULATIVE_MAX_SEQUENCES
    """Draft tokens only while at most this many sequences are being generated, with rollout.speculative_tokens."""
    inflight_updates: bool = False
    """Give new weights to completions in progress; needs rollout.ahead and cluster.rollout_devices."""


@dataclass(kw_only=True, slots=True)
class RewardFunctionsConfig:
    """What scores completions, and its limits."""

    main: ClassVar[str] = "functions"

    functions: tuple[str, ...] = ()
    """Required. Verifiers by name (`posttrain rewards list`), FILE.py:FUNCTION, judge:RUBRIC.yaml, model:PATH or http://..."""
    weights: tuple[float, ...] = ()
    """Weight of each reward; empty: 1 each."""
    timeout_seconds: float = 10.0
    """Time limit for one completion; beyond it the completion fails and is left out."""
    memory_gib: float = 2.0
    """Memory limit of a process that runs reward functions."""
    max_failure_rate: float = 0.1
    """Share of a batch that may fail before the run stops."""
    workers: int = 2
    """Child processes that run reward functions."""
    env: tuple[str, ...] = ()
    """Names of environment variables that reward functions, environments and agents may read, such as API keys."""
    allow_unprotected_code: bool = False
    """Run programs of the model (reward code) also where they cannot be isolated, with the rights of this user."""


@dataclass(kw_only=True, slots=True)
class RewardConfig(RewardFunctionsConfig):
    """The same with what online trainers do with the rewards."""

    clip: float = 0.0
    """Clip the sum of rewards to [-clip, clip]; 0: no clipping."""
    clip_min: float | None = None
    """Raise a sum of rewards below this to it, where both bounds are not the same size; none: no lower bound."""
    clip_max: float | None = None
    """Lower a sum of rewards above this to it; none: no upper bound."""
    normalize: Literal["none", "saved", "running"] = "none"
    """saved: standardise the scores of reward models by the mean and the deviation saved with them; running: divide the
    sum of rewards by the deviation of all sums so far."""
    overlong_tokens: int = 0
    """Number of last tokens before rollout.max_tokens in which a length penalty grows from 0 (DAPO); 0: none."""
    overlong_penalty: float = 1.0
    """Penalty at rollout.max_tokens, with reward.overlong_tokens."""

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """Bounds of the sum of rewards; infinite where there are none."""
        size = self.clip or math.inf
        return (
            -size if self.clip_min is None else self.clip_min,
            size if self.clip_max is None else self.clip_max,
        )

    @property
    def clips(self) -> bool:
        return self.clip_bounds != (-math.inf, math.inf)


@dataclass(kw_only=True, slots=True)
class OnlineEvalConfig(EvalConfig):
    samples_per_prompt: int = 1
    """Completions per evaluation prompt: n of mean@n and pass@k."""
    temperature: float = 0.0
    """Temperature of evaluation; 0 takes the most likely token."""
    max_examples: int = 0
    """Evaluate on this many examples only; 0: all."""


@dataclass(kw_only=True, slots=True)
class Config:
    """Options of every trainer. `algo` holds the options of the algorithm itself."""

    output_dir: str = ""
    """Run directory; empty: the next free runs/<verb>-NNN."""
    seed: int = 0
    """Seed of data order, initialisation, sampling and dropout."""
    resume: bool = False
    """Continue from the newest valid checkpoint of the run directory."""
    allow_changed_data: bool = False
    """With resume: continue although data, seed or data.shuffle changed, so that examples are repeated or left out."""
    quiet: bool = False
    """Print only warnings, errors and the last line."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    log: LogConfig = field(default_factory=LogConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    algo: Any = None


@dataclass(kw_only=True, slots=True)
class OnlineConfig(Config):
    """Options of online trainers, which train on completions of their own policy."""

    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    eval: OnlineEvalConfig = field(default_factory=OnlineEvalConfig)
    cluster: OnlineClusterConfig = field(default_factory=OnlineClusterConfig)


def with_algorithm(algorithm: Any) -> Config:
    """Return the defaults of a verb: the common ones, overridden by the algorithm (a class of posttrain.algorithms)."""
    base = OnlineConfig if algorithm.online else Config
    own = [("algo", algorithm.Config, field(default_factory=algorithm.Config))]
    config = dataclasses.make_dataclass("Config", own, bases=(base,), kw_only=True)()
    for key, value in algorithm.defaults.items():
        section, option = key.split(".")
        setattr(getattr(config, section), option, value)
    return config


def option_value(config: Any, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def as_mapping(config: Config) -> dict[str, Any]:
    """Return the resolved configuration as plain values, fit for YAML and for `from_mapping`."""
    plain = dataclasses.asdict(config)
    return {
        k: {a: tuple_as_list(b) for a, b in v.items()} if isinstance(v, dict) else tuple_as_list(v)
        for k, v in plain.items()
    }


def as_yaml(verb: str, config: Config) -> str:
    return yaml.safe_dump({"verb": verb} | as_mapping(config), sort_keys=False, allow_unicode=True)


def tuple_as_list(value: Any) -> Any:
    """Return a tuple as a list, other values unchanged."""
    return list(value) if isinstance(value, tuple) else value
