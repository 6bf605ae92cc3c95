"""Adds, merges, saves and loads LoRA adapters with peft, injected in place: the model stays the same object.

peft is optional, and slow to import: functions that need it import it.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from posttrain.config.sections import ModelConfig
from posttrain.core.errors import CheckpointError, UsageError
from posttrain.core.files import read_json
from posttrain.core.model_limits import check_files
from posttrain.core.types import Head
from posttrain.nn.weights import FROZEN_PART
from posttrain.parallel.expert import adapted_forms
from posttrain.parallel.fsdp import ModelShards
from posttrain.parallel.pipeline import tensors_elsewhere
from posttrain.parallel.shards import full_tensor, local_shard, read_shard

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # peft's files name the layers from the outside of its own wrapper
MAX_RANK = 2**14  # larger than any known model's layers need
TASKS: dict[Head, str] = {"token": "CAUSAL_LM", "score": "SEQ_CLS"}

log = logging.getLogger("posttrain")

# peft imports bitsandbytes, which warns about kernels that are not used.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def require_packages(*packages: str, option: str) -> None:
    """Raise UsageError, with the command that installs it, if a package is missing."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise UsageError(f"{option} needs {' and '.join(missing)}: pip install {' '.join(missing)}")


def is_adapted(model: PreTrainedModel) -> bool:
    """Whether the model has adapters inside."""
    return bool(getattr(model, "peft_config", None))


def add_adapters(model: PreTrainedModel, config: ModelConfig, head: Head) -> None:
    """Freeze the weights and add new adapters, which change nothing yet, to the modules of model.lora_target_modules.

    all-linear: every matrix except embeddings and heads; peft includes routers and fused experts of mixtures.
    With PiSSA an adapter has twice the rank, see init_pissa.
    """
    require_packages("peft", option="model.lora_rank")
    from peft import LoraConfig

    every = config.lora_target_modules == ("all-linear",)
    if not every:
        check_targets(model, config.lora_target_modules)
    twice = config.lora_init != "zeros"
    adapter = LoraConfig(
        r=config.lora_rank * (1 + twice),
        lora_alpha=config.lora_alpha * ((2**0.5 if config.use_rslora else 2) if twice else 1),  # the same scaling
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        lora_dropout=config.lora_dropout,
        target_modules="all-linear" if every else list(config.lora_target_modules),
        modules_to_save=["score"] if head == "score" else None,
        task_type=TASKS[head],
        base_model_name_or_path=model.name_or_path,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),  # GPT-2 stores W transposed
    )
    inject(model, adapter)
    if twice:
        init_pissa(model, config)
    if config.use_dora:
        log.info("model.use_dora: adapted layers run the code of peft, not fused kernels, to train and to generate")


@torch.no_grad()
def init_pissa(model: PreTrainedModel, config: ModelConfig) -> None:
    """Initialise adapters with the largest singular values and vectors of the weights (PiSSA, arXiv:2404.02948).

        W + s (B A - B0 A0)      B = B0, A = A0 at first;  s B0 A0: the best approximation of W of this rank

    B A is trained on top of the rest of W. As W itself is kept, this is one plain adapter of twice the rank, with the
    matrices [A; A0] and [B, -B0], of which A0 and B0 are frozen: it is saved, merged and switched off like any other.
    """
    for name, layer in adapted_layers(model):
        base, rank, scaling = layer.get_base_layer(), config.lora_rank, layer.scaling["default"]
        if not isinstance(base, torch.nn.Linear | Conv1D):
            raise UsageError(
                f"model.lora_init {config.lora_init}: {name} is not a linear layer, but {type(base).__name__}. Name "
                "the modules of linear layers in model.lora_target_modules, or leave lora_init out."
            )
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        setattr(a, FROZEN_PART, (slice(rank, None), slice(None)))
        setattr(b, FROZEN_PART, (slice(None), slice(rank, None)))
        if base.weight.is_meta:
            continue
        weight = base.weight.float()
        first_a, first_b = pissa_factors(
            weight.T if isinstance(base, Conv1D) else weight, rank, scaling, config.lora_init
        )
        a.copy_(torch.cat([first_a, first_a]))
        b.copy_(torch.cat([first_b, -first_b], dim=1))


def pissa_factors(weight: torch.Tensor, rank: int, scaling: float, init: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A0 [r, in] and B0 [out, r] as peft computes them."""
    if init == "pissa":
        left, values, right = torch.linalg.svd(weight, full_matrices=False)
    else:
        left, values, right = torch.svd_lowrank(weight, rank, niter=int(init.rpartition("_")[2]))
        right = right.T
    roots = (values[:rank] / scaling).sqrt()
    if len(roots) < rank:
        raise UsageError(f"model.lora_rank is {rank}, but a matrix of shape {tuple(weight.shape)} has no such rank")
    return roots[:, None] * right[:rank], left[:, :rank] * roots


def check_targets(model: PreTrainedModel, targets: tuple[str, ...]) -> None:
    """Raise UsageError for a name that matches no module, which peft would ignore if another name matches."""
    names = [name for name, _ in model.named_modules()]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            layers = {n.split(".")[-1] for n, m in model.named_modules() if isinstance(m, torch.nn.Linear | Conv1D)}
            raise UsageError(
                f"model.lora_target_modules: {type(model).__name__} has no module {target!r}. "
                f"Choose among {', '.join(sorted(layers))}, or all-linear."
            )


def inject(model: PreTrainedModel, adapter: Any) -> None:
    """Inject adapters into the model with peft; refuse those that could not be merged later."""
    from peft import inject_adapter_in_model

    assert not is_adapted(model), "the model has adapters already: merge them first"
    try:
        with warnings.catch_warnings():  # peft warns of its own patterns for fused experts
            warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match")
            inject_adapter_in_model(adapter, model)
    except ValueError as error:  # a module that does not support adapters, or not with this dropout
        raise UsageError(f"{type(model).__name__} does not support these adapters (model.lora_*): {error}") from error
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for name, layer in adapted_layers(model):
        if any(uses[id(parameter)] > 1 for parameter in layer.get_base_layer().parameters()):
            raise UsageError(
                f"model.lora_target_modules: {name} shares its weight with another layer (tied embeddings), "
                "so an adapter on it could not be merged. Leave it out."
            )


def adapted_layers(model: PreTrainedModel) -> list[tuple[str, Any]]:
    """Return the layers that have an adapter, with their names."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [(name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]


def replaced_modules(model: PreTrainedModel) -> list[tuple[str, Any]]:
    """Return the modules that are trained in full, such as the score head, with their names."""
    from peft.utils import ModulesToSaveWrapper

    return [(name, module) for name, module in model.named_modules() if isinstance(module, ModulesToSaveWrapper)]


@contextmanager
def disabled(model: PreTrainedModel) -> Iterator[None]:
    """Turn off the adapters in the block: the model is then its own reference, which costs no memory."""
    assert is_adapted(model), "the model has no adapters to disable"
    switches = [module for _, module in adapted_layers(model) + replaced_modules(model)]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for switch in switches:
        switch.enable_adapters(False)
    try:
        yield
    finally:
        for switch in switches:
            switch.enable_adapters(True)
        # enable_adapters also changes requires_grad; a frozen model must stay frozen
        model.requires_grad_(False)
        for parameter in trained:
            parameter.requires_grad_(True)


def merge(model: PreTrainedModel) -> PreTrainedModel:
    """Add the adapters to their base weights in place, and remove them from the model."""
    assert not getattr(model, "is_quantized", False), "adapters cannot be merged into 4-bit weights"
    layers = adapted_layers(model)
    for _, layer in layers:
        layer.merge(safe_merge=True)
    for name, layer in layers:
        if not name.endswith(".base_layer"):  # the experts of a mixture have nested wrappers
            model.set_submodule(name, layer.get_base_layer())
    for name, wrapper in replaced_modules(model):
        model.set_submodule(name, wrapper.modules_to_save[wrapper.active_adapters[0]])
    del model.peft_config
    return model


def adapter_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the adapters' tensors (and the score head's) by their names in peft's files."""
    from peft import get_peft_model_state_dict

    # "auto" would ask the hub whether the vocabulary was resized, which it never is
    tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
    return {PREFIX + name: tensor for name, tensor in tensors.items()}


def is_adapter_tensor(name: str) -> bool:
    """Whether a tensor of an adapted model has no counterpart in the plain model, or is a frozen original."""
    parts = (".lora_A.", ".lora_B.", ".lora_magnitude_vector.", ".original_module.")
    return any(part in name for part in parts)


def plain_name(name: str) -> str:
    """Return the name that a tensor of an adapted model has in the plain model."""
    return name.replace(".base_layer", "").replace(".modules_to_save.default.", ".")


@torch.no_grad()
def merge_tensor(model: PreTrainedModel, name: str, weight: torch.Tensor) -> torch.Tensor:
    """Return a full tensor with its adapter, if any, added in float32; all ranks of a sharded model call this."""
    owner, _, rest = name.partition(".base_layer.")
    if not rest:
        return weight
    layer: Any = model.get_submodule(owner)
    if not isinstance(layer.get_base_layer(), torch.nn.Linear | Conv1D):
        return merge_experts(layer, rest.split(".")[-1], weight)
    if rest != "weight":
        return weight
    down, up = (matrix["default"].weight for matrix in (layer.lora_A, layer.lora_B))
    product = (
        full_tensor(local_shard(up), up).float()
        @ full_tensor(local_shard(down), down).float()
        * layer.scaling["default"]
    )
    transposed = isinstance(layer.get_base_layer(), Conv1D)
    if transposed:
        product = product.T
    merged = weight.float() + product
    if "default" in layer.lora_magnitude_vector:  # DoRA: the rows have the trained lengths
        lengths = layer.lora_magnitude_vector["default"].weight.float()
        factors = lengths / torch.linalg.norm(merged.T if transposed else merged, dim=1)
        merged = merged * (factors if transposed else factors[:, None])
    return merged.to(weight.dtype)


def merge_experts(layer: Any, name: str, weight: torch.Tensor) -> torch.Tensor:
    """Return a weight [E, out, in] of experts with its adapter: peft has A as [E r, in] and B as [out, r E].

    A router's weight [out, in] is that of one expert.
    """
    for form in adapted_forms(layer):
        if form.parameter_name == name:
            a, b = (
                full_tensor(local_shard(m), m).float()
                for m in (form.lora_A["default"].weight, form.lora_B["default"].weight)
            )
            experts = len(weight) if weight.ndim == 3 else 1
            a, b = a.view(experts, -1, a.shape[1]), b.view(len(b), -1, experts).permute(2, 0, 1)
            product = torch.bmm(b, a).view(weight.shape)
            return (weight.float() + product * form.scaling["default"]).to(weight.dtype)
    return weight


def file_name(name: str) -> str:
    """Return the name that a tensor of an adapter has in peft's files."""
    return (
        name.replace(".lora_A.default.", ".lora_A.")
        .replace(".lora_B.default.", ".lora_B.")
        .replace(".lora_magnitude_vector.default.weight", ".lora_magnitude_vector")
        .replace(".modules_to_save.default.", ".")
    )


def save_adapter(model: PreTrainedModel, folder: Path, shards: ModelShards | None = None) -> None:
    """Write only the adapters, as peft does: adapter_config.json and adapter_model.safetensors.

    If the model is sharded, all ranks call this, and rank 0 writes.
    """
    live = adapter_tensors(model)
    tensors = {name: full_tensor(local_shard(tensor), tensor).contiguous() for name, tensor in live.items()}
    if shards is not None:
        tensors = shards.tensors_of_all_stages(tensors)
        if shards.rank:
            return
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(adapter_config(model), indent=2, sort_keys=True) + "\n", encoding="utf-8")


def adapter_config(model: PreTrainedModel) -> dict[str, Any]:
    """Return the content of adapter_config.json."""
    config = model.peft_config["default"].to_dict() | {"inference_mode": True}
    return {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}


@torch.no_grad()
def load_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Read saved adapters into the model's adapters, in place."""
    live, saved = adapter_tensors(model), load_file(folder / WEIGHTS)
    elsewhere = {PREFIX + file_name(name) for name in tensors_elsewhere(model)}
    saved = {name: tensor for name, tensor in saved.items() if name not in elsewhere or name in live}
    if live.keys() != saved.keys():
        difference = ", ".join(sorted(live.keys() ^ saved.keys())[:5])
        raise CheckpointError(
            f"{folder / WEIGHTS} does not fit the adapters: these tensors are only in one of the two: {difference}"
        )
    for name, tensor in saved.items():
        if tensor.shape != live[name].shape:
            found, expected = tuple(tensor.shape), tuple(live[name].shape)
            raise CheckpointError(f"{folder / WEIGHTS}: tensor {name} has shape {found}, but {expected} in the model")
        local_shard(live[name]).copy_(read_shard(live[name], tensor.__getitem__))


def inject_saved(model: PreTrainedModel, folder: Path) -> None:
    """Inject the adapters of a folder into their base model."""
    require_packages("peft", option=f"{folder} holds adapters and")
    from peft import PeftConfig, PeftType

    adapter = PeftConfig.from_pretrained(str(folder))
    if adapter.peft_type != PeftType.LORA:
        raise UsageError(f"{folder} holds adapters of type {adapter.peft_type.value}; only LORA is supported")
    for rank in (adapter.r, *(adapter.rank_pattern or {}).values()):
        if not isinstance(rank, int) or not 1 <= rank <= MAX_RANK:
            raise UsageError(f"{folder / CONFIG}: a rank is {repr(rank)[:60]}; it must be from 1 to {MAX_RANK:,}")
    inject(model, adapter)
    load_adapter(model, folder)


def base_model_of(folder: Path) -> str:
    """Return the name or path of the model that the adapters in a folder belong to."""
    check_files(folder, str(folder))
    base = read_json(folder / CONFIG).get("base_model_name_or_path")
    if not base:
        raise UsageError(f"{folder / CONFIG} names no base model: set base_model_name_or_path in it")
    return str(base)


def nf4_config(dtype: torch.dtype, head: Head) -> BitsAndBytesConfig:
    """Return QLoRA's quantization of frozen weights: 4-bit NormalFloat with double quantization."""
    require_packages("bitsandbytes", "accelerate", option="model.load_in_4bit")
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=["score"] if head == "score" else None,  # None: all but the output layer
    )


def disable_cpu_repacking(model: PreTrainedModel) -> None:
    """Keep bitsandbytes from repacking 4-bit weights in eval mode on some CPUs.

    That rounds their scales, and saving rounds them again: an evaluation would change the rest of the run.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
