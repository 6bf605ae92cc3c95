"""MindRLHF's Python names on top of the public API, so that its scripts train here after a change of imports.

    from posttrain.mindrlhf import GRPOConfig, GRPOTrainer, LlamaConfig, init_grpo_dataset

Keywords and defaults are MindRLHF's. What differs:

- Weights are Hugging Face directories (`checkpoint_name_or_path`); data are files in the formats of docs/data.md. The
  sampler has the trainer's weights: `sft_model_config_infer` names the same directory as `sft_model_config_train`.
- `warmup_step` and `decay_steps` count steps of the loop (an experience and the training on it), not single updates.
- With `grpo_epochs` above 1 the later passes weight tokens by the ratio of new to old probabilities, without clipping.
  MindRLHF's ratio is 1 in every pass; in the first pass both are the same.
- An unknown field, and a field whose value could not be honoured, is an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from posttrain.api import trainers
from posttrain.core.errors import UsageError
from posttrain.core.files import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from posttrain.api.options import LoadedTokenizer
    from posttrain.rollout.records import Rollout

accuracy_reward, format_reward = "accuracy_reward", "format_reward"  # verifiers: `posttrain rewards list`
qwen_accuracy_reward, accuracy_reward_2 = "qwen_accuracy_reward", "accuracy_reward_2"

NORMALIZE = {None: "none", False: "none", "running": "running", "ref": "saved"}  # scale_reward -> reward.normalize
SHAPES = {  # MindFormers' names -> those of config.json
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "intermediate_size": "intermediate_size",
}


@dataclass(slots=True, kw_only=True)
class SharedFields:
    """Fields that GRPOConfig and PPOConfig have in common."""

    epochs: int = 10
    """Passes over the prompts; for PPO the number of experiences."""
    batch_size: int = 1
    """Completions per optimizer step."""
    num_rollouts: int = 8
    chunk_size: int = 1
    """Prompts per experience: for GRPO chunk_size times num_rollouts, for PPO num_rollouts."""
    checkpoint_interval: int = 10_000
    """Steps between checkpoints; there is also one at the end of each pass over the prompts (GRPO), or of all (PPO)."""
    optimizer: str = "adamw"
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.01
    start_lr: float = 5e-7
    """Peak learning rate."""
    end_lr: float = 1e-10
    """Learning rate from step `decay_steps` on."""
    warmup_step: int = 10
    decay_steps: int = 200_000
    opt_offload: bool = False
    """Keep the optimizer's states in host memory while completions are generated."""
    seq_length: int = 1024
    """Longest prompt and completion together."""
    max_decode_length: int = 512
    """Longest completion."""
    save_ckpt_dir: str = ""
    """Run directory; empty: the next free runs/VERB-NNN."""
    save_data_file: str = ""
    """File for the elements of the last experience, as JSON lines."""
    use_parallel: bool = False
    """Train on the devices of `parallel_config` of the model's configuration."""

    def train_options(self) -> dict[str, Any]:
        """Return the section `train` without the length of the run."""
        for name, value, only in (("optimizer", self.optimizer, "adamw"), ("eps", self.eps, 1e-8)):
            if value != only:
                raise UsageError(f"{name} is {value}; here the optimizer is AdamW with eps 1e-8")
        if not 0 < self.end_lr <= self.start_lr:
            raise UsageError(f"end_lr is {self.end_lr} and start_lr {self.start_lr}: 0 < end_lr <= start_lr is needed")
        return {
            "learning_rate": self.start_lr,
            "min_lr_ratio": self.end_lr / self.start_lr,
            "lr_scheduler": "cosine",
            "lr_decay_steps": self.decay_steps,
            "warmup_steps": self.warmup_step,
            "weight_decay": self.weight_decay,
            "adam_beta1": self.beta1,
            "adam_beta2": self.beta2,
        }

    def arguments(self, parallel_config: Any) -> dict[str, Any]:
        """Return the arguments of a trainer that do not depend on the algorithm."""
        prompt = self.seq_length - self.max_decode_length
        if prompt < 2:
            raise UsageError(
                f"seq_length is {self.seq_length} and max_decode_length {self.max_decode_length}: no room for a prompt"
            )
        return {
            "output_dir": self.save_ckpt_dir or None,
            "train": self.train_options(),
            "save": {"every_steps": self.checkpoint_interval},
            "max_length": prompt,
            "max_tokens": self.max_decode_length,
            "cluster": cluster_options(parallel_config if self.use_parallel else None)
            | ({"offload": ["optimizer"]} if self.opt_offload else {}),
        }


@dataclass(slots=True, kw_only=True)
class GRPOConfig(SharedFields):
    """MindRLHF's settings of GRPO."""

    beta: float = 0.01
    """Weight of the KL to the reference."""
    num_generations: int = 2
    """Completions per prompt."""
    grpo_epochs: int = 2
    """Passes over each experience."""
    sync_ref_model: bool = True
    """Replace the reference by the policy every `ref_model_sync_steps` steps."""
    ref_model_sync_steps: int = 50
    mind_dataset_dir: str = ""
    """File with the prompts."""

    def train_options(self) -> dict[str, Any]:
        """Return the section `train`."""
        return SharedFields.train_options(self) | {
            "epochs": self.epochs,
            "batch_size": self.chunk_size * self.num_rollouts,
        }

    def algo_options(self, reference: str) -> dict[str, Any]:
        """Return the section `algo`; see configs/mindrlhf-grpo.yaml."""
        return {
            "clip_low": 0.0,
            "clip_high": 0.0,
            "kl_coef": self.beta,
            "kl_estimator": "k3",
            "kl_in": "loss",
            "loss_aggregation": "sample_mean",
            "std_epsilon": 1e-4,
            "importance_cap": 0.0,
            "epochs_per_batch": self.grpo_epochs,
            "mini_batch_size": self.batch_size,
            "reference": reference if self.beta else "",
            "reference_sync_steps": self.ref_model_sync_steps if self.beta and self.sync_ref_model else 0,
        }


@dataclass(slots=True, kw_only=True)
class PPOConfig(SharedFields):
    """MindRLHF's settings of PPO."""

    epochs: int = 2
    batch_size: int = 2
    start_lr: float = 9e-6
    warmup_step: int = 3200
    ppo_epochs: int = 1
    """Passes over each experience."""
    init_kl_coef: float = 0.1
    """First weight of the KL to the reference, adapted by `target` and `horizon`."""
    kl_coef: float = 0.02
    """Weight of the KL if `target` is 0."""
    target: float = 6.0
    horizon: int = 10_000
    gamma: float = 1.0
    lam: float = 0.95
    cliprange: float = 0.2
    cliprange_value: float = 0.2
    vf_coef: float = 1.0
    is_shared_backbone: bool = True
    """The critic is a head on the policy."""
    pretrain_coef: float = 0.9
    """Weight of the language modelling loss on `pretrain_dataset_dir`."""
    pretrain_dataset_dir: list[str] = field(default_factory=list)
    """Files with texts; empty: no such loss."""
    scale_reward: str | bool | None = None
    """running: divide rewards by their running deviation; ref: by what the reward model's directory records."""
    train_dataset_dir: list[str] = field(default_factory=list)
    val_dataset_dir: list[str] = field(default_factory=list)
    """Files with prompts."""
    checkpoint_name_or_path: str = ""
    """Hugging Face directory of the policy."""
    critic_model_path: str = ""
    """Hugging Face directory of the critic, if it is not shared; empty: the reward model."""
    parallel_config: Any = None

    def train_options(self) -> dict[str, Any]:
        """Return the section `train`."""
        return SharedFields.train_options(self) | {"max_steps": self.epochs, "batch_size": self.num_rollouts}

    def algo_options(self, reference: str) -> dict[str, Any]:
        """Return the section `algo`."""
        return {
            "epochs_per_batch": self.ppo_epochs,
            "mini_batch_size": self.batch_size,
            "kl_coef": self.init_kl_coef if self.target else self.kl_coef,
            "kl_target": self.target,
            "kl_horizon": self.horizon,
            "gamma": self.gamma,
            "gae_lambda": self.lam,
            "clip_low": self.cliprange,
            "clip_high": self.cliprange,
            "value_clip": self.cliprange_value,
            "value_loss_coef": self.vf_coef,
            "share_critic": self.is_shared_backbone,
            "critic": self.critic_model_path,
            "critic_learning_rate": self.start_lr,
            "reference": reference,
            "pretrain_data": self.pretrain_dataset_dir,
            "pretrain_coef": [self.pretrain_coef],
        }


@dataclass(slots=True, kw_only=True)
class RMConfig:
    """MindRLHF's settings of a reward model."""

    checkpoint_name_or_path: str = ""
    """Hugging Face directory: of a reward model for PPO, of a language model to train one from."""
    seq_length: int = 550
    batch_size: int = 10
    """Pairs per step."""
    epochs: int = 1
    learning_rate: float = 1e-5
    save_ckpt_dir: str = ""


class LlamaConfig:
    """MindFormers' configuration of a model: an attribute per keyword.

    `checkpoint_name_or_path` is the Hugging Face directory. Sizes that are given must be those of its config.json.
    """

    checkpoint_name_or_path: str = ""
    parallel_config: Any = None

    def __init__(self, **model_config: Any) -> None:
        self.__dict__.update(model_config)


def values_of(config: Any) -> dict[str, Any]:
    """Return the entries of a mapping, or the attributes of an object; a path and None have none."""
    if config is None or isinstance(config, str | os.PathLike):
        return {}
    return dict(config) if isinstance(config, Mapping) else vars(config)


def model_path(config: Any, argument: str) -> str:
    """Return the directory that a configuration, a mapping or a path names, after comparing sizes with its own."""
    if isinstance(config, str | os.PathLike):
        return os.fspath(config)
    values = values_of(config)
    path = values.get("checkpoint_name_or_path") or values.get("_name_or_path") or ""
    if not path:
        raise UsageError(f"{argument} names no weights: set its checkpoint_name_or_path to a Hugging Face directory")
    file = Path(path) / "config.json"
    known = read_json(file) if file.is_file() else {}
    for theirs, ours in SHAPES.items():
        if theirs in values and ours in known and values[theirs] is not None and values[theirs] != known[ours]:
            raise UsageError(f"{argument}: {theirs} is {values[theirs]}, but {ours} in {file} is {known[ours]}")
    return str(path)


def sampling_options(config: Any) -> dict[str, Any]:
    """Return the section `rollout` of what a model's configuration says about sampling."""
    values = values_of(config)
    if values.get("repetition_penalty") not in (None, 1, 1.0):
        raise UsageError(
            f"repetition_penalty is {values['repetition_penalty']}: the sampler would not be the policy that is trained"
        )
    return {name: values[name] for name in ("temperature", "top_p", "top_k", "min_p") if values.get(name) is not None}


def cluster_options(parallel_config: Any) -> dict[str, Any]:
    """Return the section `cluster` of MindFormers' parallel_config."""
    if parallel_config is None:
        return {}
    values = values_of(parallel_config)
    data, model, stages = (int(values.get(name) or 1) for name in ("data_parallel", "model_parallel", "pipeline_stage"))
    options = {"devices": data * model * stages, "tensor_parallel_size": model}
    return options | ({"pipeline_parallel_size": stages} if stages > 1 else {})


def prompts_of(path: Any, argument: str) -> list[str]:
    """Return data files; a mindrecord cannot be read, its original can."""
    paths = [path] if isinstance(path, str | os.PathLike) else list(path)
    if not paths:
        raise UsageError(f"{argument} names no file: give one in a format of docs/data.md")
    names = [str(one) for one in paths]
    for name in names:
        if name.endswith(".mindrecord"):
            raise UsageError(f"{argument}: {name} is MindSpore's own format; give the file that it was made from")
    return names


def Qwen2Tokenizer(  # noqa: N802  MindRLHF's name
    vocab_file: str, merges_file: str, *, add_bos_token: bool = False, add_eos_token: bool = False
) -> PreTrainedTokenizerBase:
    """Return Qwen's tokenizer of vocab.json and merges.txt."""
    from transformers import Qwen2Tokenizer as Tokenizer

    if add_bos_token or add_eos_token:
        raise UsageError("add_bos_token and add_eos_token: chat templates and formats add these tokens here")
    merges = Path(merges_file).read_text(encoding="utf-8").splitlines()
    pairs = [tuple(line.split()) for line in merges if line and not line.startswith("#version")]
    return Tokenizer(vocab=read_json(Path(vocab_file)), merges=pairs)


# GRPO


class PromptDataset:
    """The prompts of a trainer, with the two sizes that MindRLHF's loop asks for."""

    def __init__(self, size: int, batch_size: int) -> None:
        self.size, self.batch_size = size, batch_size

    def get_dataset_size(self) -> int:
        return self.size

    def get_batch_size(self) -> int:
        """Return the number of prompts of an experience."""
        return self.batch_size


class MindTrainer:
    """An open run of the public API that is called as MindRLHF's trainers are: experience and training in turns."""

    def __init__(self, trainer: trainers.OnlineTrainer, config: SharedFields) -> None:
        self.trainer, self.config = trainer, config
        self.store: list[Rollout] = []
        loop = trainer._loop
        self.prompt_dataset = PromptDataset(loop.run.data.stream.examples_per_epoch, loop.config.train.batch_size)

    def experience(self, what: str, asked: int | None, configured: int) -> list[Rollout]:
        """Make the next experience; `asked`: a size that the configuration has, too."""
        if asked not in (None, configured):
            raise UsageError(f"{what} is {asked}, but it is {configured} in the configuration: set it there")
        self.store = self.trainer.make_experience()
        if self.config.save_data_file:
            from posttrain.rollout.records import as_row

            lines = [json.dumps(as_row(rollout, self.trainer.step + 1), ensure_ascii=False) for rollout in self.store]
            Path(self.config.save_data_file).write_text("\n".join(lines) + "\n", encoding="utf-8")
        return self.store

    def train_on(self, rollouts: Sequence[Rollout], steps_of_pass: int) -> dict[str, float]:
        """Train on an experience; save every `checkpoint_interval` steps and after each pass."""
        metrics = self.trainer.train_step(list(rollouts))
        step, interval = self.trainer.step, self.config.checkpoint_interval
        if step % steps_of_pass == 0 or (interval and step % interval == 0):
            self.trainer.save()
        return metrics

    def save_checkpoint(self, rank_id: int = 0, steps: int = 0) -> Path:
        """Save the current step; its number and the ranks' files are posttrain's own."""
        return self.trainer.save()

    def close(self) -> None:
        """Free the models and release the run directory."""
        self.trainer.close()


class MindGRPOTrainer(MindTrainer):
    """MindRLHF's GRPOTrainer."""

    def __init__(
        self,
        grpo_config: GRPOConfig,
        sft_model_config_infer: Any,
        sft_model_config_train: Any,
        ref_model_config: Any,
        reward_funcs: str | Callable[..., Any] | Sequence[str | Callable[..., Any]],
        reward_weights: Sequence[float] | None = None,
        tokenizer: LoadedTokenizer | str | None = None,
    ) -> None:
        policy = model_path(sft_model_config_train, "sft_model_config_train")
        sampler = model_path(sft_model_config_infer, "sft_model_config_infer")
        reference = model_path(ref_model_config, "ref_model_config")
        if sampler != policy:
            raise UsageError(
                f"sft_model_config_infer names {sampler} and sft_model_config_train {policy}; the sampler has the "
                "trainer's weights here: name one directory"
            )
        functions = [reward_funcs] if isinstance(reward_funcs, str) or callable(reward_funcs) else list(reward_funcs)
        super().__init__(
            trainers.GRPOTrainer(
                policy,
                {"functions": functions} | ({"weights": list(reward_weights)} if reward_weights else {}),
                prompts_of(grpo_config.mind_dataset_dir or (), "mind_dataset_dir"),
                tokenizer=tokenizer,
                samples_per_prompt=grpo_config.num_generations,
                rollout=sampling_options(sft_model_config_infer),
                algo=grpo_config.algo_options("" if reference == policy else reference),
                **grpo_config.arguments(values_of(sft_model_config_train).get("parallel_config")),
            ),
            grpo_config,
        )
        self.grpo_config = grpo_config

    def make_experience(self, num_generations: int | None = None, rank_id: int = 0) -> None:
        """Generates, scores and stores the next experience."""
        self.experience("num_generations", num_generations, self.grpo_config.num_generations)

    def train(self, grpo_with_grad: Any, dataset: Sequence[Rollout]) -> dict[str, float]:
        """Train on an experience; `grpo_with_grad` is this trainer's own network."""
        prompts = self.prompt_dataset
        return self.train_on(dataset, max(1, prompts.get_dataset_size() // prompts.get_batch_size()))


GRPOTrainer = MindGRPOTrainer


class TrainingCell(NamedTuple):
    """Stands for a network with its optimizer, which the trainer holds."""

    model: Any
    optimizer: Any


def init_grpo_network_and_optimizer(trainer: MindGRPOTrainer) -> TrainingCell:
    """Return the network that GRPOTrainer.train is given; the trainer has loaded it already."""
    return TrainingCell(trainer.trainer, trainer.config)


def init_grpo_dataset(trainer: MindGRPOTrainer) -> list[Rollout]:
    """Return the elements of the last experience."""
    return trainer.store


# PPO


class RoleModel(NamedTuple):
    """A model by its directory; the trainer loads it."""

    role: str
    path: str


def create_experience_dataset(config: PPOConfig) -> tuple[list[str], list[str]]:
    """Return the files with the prompts to train and to evaluate on."""
    train = prompts_of(config.train_dataset_dir, "train_dataset_dir")
    return train, prompts_of(config.val_dataset_dir, "val_dataset_dir") if config.val_dataset_dir else []


def init_models(config: PPOConfig, rm_config: RMConfig) -> tuple[RoleModel, RoleModel, RoleModel]:
    """Return policy, reference and reward model; policy and reference start from one directory."""
    policy, reward = model_path(config_of(config), "PPOConfig"), model_path(config_of(rm_config), "RMConfig")
    return RoleModel("policy", policy), RoleModel("reference", policy), RoleModel("reward", reward)


def config_of(config: PPOConfig | RMConfig) -> dict[str, Any]:
    return {"checkpoint_name_or_path": config.checkpoint_name_or_path}


def init_optimizer(model: RoleModel, config: PPOConfig) -> dict[str, Any]:
    """Return the optimizer's settings."""
    return config.train_options()


def PPOTrainOneStepCell(model: RoleModel, optimizer: Mapping[str, Any]) -> TrainingCell:  # noqa: N802  MindRLHF's name
    """Return a model with its optimizer."""
    return TrainingCell(model, optimizer)


class MindPPOTrainer(MindTrainer):
    """MindRLHF's trainer of PPO."""

    def __init__(
        self,
        config: PPOConfig,
        rm_config: RMConfig,
        train_dataset: Sequence[str],
        eval_dataset: Sequence[str],
        ppo_model: RoleModel,
        ref_model: RoleModel,
        reward_model: RoleModel,
        optimizer: Mapping[str, Any],
        ppo_with_grad: TrainingCell,
    ) -> None:
        arguments = config.arguments(config.parallel_config)
        arguments["train"] = dict(optimizer)
        super().__init__(
            trainers.PPOTrainer(
                ppo_model.path,
                {"functions": [f"model:{reward_model.path}"], "normalize": NORMALIZE[config.scale_reward]},
                list(train_dataset),
                eval_data=list(eval_dataset) or None,
                algo=config.algo_options("" if ref_model.path == ppo_model.path else ref_model.path),
                **arguments,
            ),
            config,
        )

    @property
    def ppo_elements(self) -> list[Rollout]:
        """The elements of the last experience."""
        return self.store

    def generate_experience(self, num_rollouts: int | None = None) -> None:
        """Generates, scores and stores the next experience."""
        self.experience("num_rollouts", num_rollouts, self.config.num_rollouts)

    def train(self, dataset: Sequence[Rollout]) -> dict[str, float]:
        """Train on an experience."""
        return self.train_on(dataset, self.config.epochs)

    def evaluate(self) -> float:
        """Return the mean reward on the evaluation prompts."""
        return self.trainer.evaluate()["eval/reward"]


PPOTrainer = MindPPOTrainer


def create_ppo_dataset(ppo_elements: Sequence[Rollout], config: PPOConfig) -> Sequence[Rollout]:
    """Return the elements as MindPPOTrainer.train takes them."""
    return ppo_elements


# Reward models


class MindRewardTrainer(trainers.RewardTrainer):
    """Trains a reward model on the pairs of a file."""

    def __init__(self, rm_config: RMConfig, train_dataset: str | Sequence[str]) -> None:
        super().__init__(
            model_path(config_of(rm_config), "RMConfig"),
            prompts_of(train_dataset, "train_dataset"),
            max_length=rm_config.seq_length,
            batch_size=rm_config.batch_size,
            epochs=rm_config.epochs,
            learning_rate=rm_config.learning_rate,
            output_dir=rm_config.save_ckpt_dir or None,
        )


RewardTrainer = MindRewardTrainer
