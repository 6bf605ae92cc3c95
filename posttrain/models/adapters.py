"""Low-rank adapters through peft, injected in place: the Hugging Face model stays the object everybody holds."""

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
from posttrain.core.types import Head
from posttrain.parallel.shards import full_tensor, local_shard, shard_slices

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # peft's files name the layers from the outside of its own wrapper
TASKS: dict[Head, str] = {"token": "CAUSAL_LM", "score": "SEQ_CLS"}

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # peft imports it, and it misses a kernel that nobody needs


def need(*packages: str, option: str) -> None:
    """Raise UsageError, with the command that helps, if a package is not installed."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise UsageError(f"{option} needs {' and '.join(missing)}: pip install {' '.join(missing)}")


def is_adapted(model: PreTrainedModel) -> bool:
    """Whether the model has adapters inside."""
    return bool(getattr(model, "peft_config", None))


def add_adapters(model: PreTrainedModel, config: ModelConfig, head: Head) -> None:
    """Freeze the weights and put new adapters, which change nothing yet, beside those that model.lora_targets names.

    all-linear: every matrix but embeddings and heads; peft counts routers and fused experts of mixtures among them.
    """
    need("peft", option="model.lora_rank")
    from peft import LoraConfig

    every = config.lora_targets == ("all-linear",)
    if not every:
        check_targets(model, config.lora_targets)
    adapter = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules="all-linear" if every else list(config.lora_targets),
        modules_to_save=["score"] if head == "score" else None,
        task_type=TASKS[head],
        base_model_name_or_path=model.name_or_path,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),  # GPT-2 stores W transposed
    )
    inject(model, adapter)


def check_targets(model: PreTrainedModel, targets: tuple[str, ...]) -> None:
    """peft ignores a name that fits nothing as long as another one fits."""
    names = [name for name, _ in model.named_modules()]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            layers = {n.split(".")[-1] for n, m in model.named_modules() if isinstance(m, torch.nn.Linear | Conv1D)}
            raise UsageError(
                f"model.lora_targets: {type(model).__name__} has no module {target!r}. "
                f"Choose among {', '.join(sorted(layers))}, or all-linear."
            )


def inject(model: PreTrainedModel, adapter: Any) -> None:
    """Let peft put adapters into the model, and refuse those that could not be merged later."""
    from peft import inject_adapter_in_model

    assert not is_adapted(model), "adapters on adapters: merge first"
    try:
        with warnings.catch_warnings():  # peft's own patterns for fused experts, of which it says that it ignores them
            warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match")
            inject_adapter_in_model(adapter, model)
    except ValueError as error:  # a module that cannot take an adapter, or not with this dropout
        raise UsageError(f"{type(model).__name__} cannot take these adapters (model.lora_*): {error}") from error
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for name, layer in adapted_layers(model):
        if any(uses[id(parameter)] > 1 for parameter in layer.get_base_layer().parameters()):
            raise UsageError(
                f"model.lora_targets: {name} shares its weight with another layer (tied embeddings), "
                "so an adapter on it could not be merged. Leave it out."
            )


def adapted_layers(model: PreTrainedModel) -> list[tuple[str, Any]]:
    """Layers with an adapter beside them, by name."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [(name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]


def replaced_modules(model: PreTrainedModel) -> list[tuple[str, Any]]:
    """Modules that are trained whole, as the score head is, by name."""
    from peft.utils import ModulesToSaveWrapper

    return [(name, module) for name, module in model.named_modules() if isinstance(module, ModulesToSaveWrapper)]


@contextmanager
def disabled(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the model computes what it would without its adapters: a reference model for free."""
    assert is_adapted(model), "the model has no adapters to switch off"
    switches = [module for _, module in adapted_layers(model) + replaced_modules(model)]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for switch in switches:
        switch.enable_adapters(False)
    try:
        yield
    finally:
        for switch in switches:
            switch.enable_adapters(True)
        # peft's switch also decides what is trained; a frozen model stays frozen
        model.requires_grad_(False)
        for parameter in trained:
            parameter.requires_grad_(True)


def merge(model: PreTrainedModel) -> PreTrainedModel:
    """Add the adapters to the weights they stand beside, in place, and take them out."""
    assert not getattr(model, "is_quantized", False), "weights in 4 bits cannot take up an adapter"
    layers = adapted_layers(model)
    for _, layer in layers:
        layer.merge(safe_merge=True)
    for name, layer in layers:
        if not name.endswith(".base_layer"):  # the experts of a mixture have one wrapper around another
            model.set_submodule(name, layer.get_base_layer())
    for name, wrapper in replaced_modules(model):
        model.set_submodule(name, wrapper.modules_to_save[wrapper.active_adapters[0]])
    del model.peft_config
    return model


def adapter_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The adapters' live tensors (and the score head's) by their name in peft's files."""
    from peft import get_peft_model_state_dict

    # "auto" would ask the hub whether the vocabulary was resized; it never is
    tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
    return {PREFIX + name: tensor for name, tensor in tensors.items()}


def is_beside(name: str) -> bool:
    """Whether a tensor of an adapted model has no counterpart in the plain one, or is not what it computes with."""
    return any(part in name for part in (".lora_A.", ".lora_B.", ".original_module."))


def plain_name(name: str) -> str:
    """What a tensor of an adapted model is called in the plain one."""
    return name.replace(".base_layer", "").replace(".modules_to_save.default.", ".")


@torch.no_grad()
def merged(model: PreTrainedModel, name: str, weight: torch.Tensor) -> torch.Tensor:
    """A whole tensor with its adapter, if it has one, added in float32; processes that share a model call together."""
    owner, _, rest = name.partition(".base_layer.")
    if not rest:
        return weight
    layer: Any = model.get_submodule(owner)
    if not isinstance(layer.get_base_layer(), torch.nn.Linear | Conv1D):
        raise UsageError(f"{owner}: adapters on experts cannot be merged on the way to another engine")
    if rest != "weight":
        return weight
    down, up = (matrix["default"].weight for matrix in (layer.lora_A, layer.lora_B))
    product = (
        full_tensor(local_shard(up), up).float()
        @ full_tensor(local_shard(down), down).float()
        * layer.scaling["default"]
    )
    if isinstance(layer.get_base_layer(), Conv1D):
        product = product.T
    return (weight.float() + product).to(weight.dtype)


def save_adapter(model: PreTrainedModel, folder: Path, *, write: bool = True) -> None:
    """Write the adapters alone, as peft does: adapter_config.json and adapter_model.safetensors.

    `write`: of processes that hold a model together, one does; all of them call.
    """
    live = adapter_tensors(model)
    tensors = {name: full_tensor(local_shard(tensor), tensor).contiguous() for name, tensor in live.items()}
    if not write:
        return
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(settings(model), indent=2, sort_keys=True) + "\n", encoding="utf-8")


def settings(model: PreTrainedModel) -> dict[str, Any]:
    """What adapter_config.json says of the adapters."""
    config = model.peft_config["default"].to_dict() | {"inference_mode": True}
    return {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}


@torch.no_grad()
def load_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Read saved adapters into the model's own, in place."""
    live, saved = adapter_tensors(model), load_file(folder / WEIGHTS)
    if live.keys() != saved.keys():
        difference = ", ".join(sorted(live.keys() ^ saved.keys())[:5])
        raise CheckpointError(
            f"{folder / WEIGHTS} does not fit the model's adapters; in one of them only: {difference}"
        )
    for name, tensor in saved.items():
        if tensor.shape != live[name].shape:
            raise CheckpointError(
                f"{folder / WEIGHTS}: {name} is {tuple(tensor.shape)}, the model's is {tuple(live[name].shape)}"
            )
        local_shard(live[name]).copy_(tensor[shard_slices(live[name])])


def attach(model: PreTrainedModel, folder: Path) -> None:
    """Inject the adapters that lie in a folder into their base model."""
    need("peft", option=f"{folder} holds adapters and")
    from peft import PeftConfig, PeftType

    adapter = PeftConfig.from_pretrained(str(folder))
    if adapter.peft_type != PeftType.LORA:
        raise UsageError(f"{folder} holds adapters of type {adapter.peft_type.value}; only LORA is known here")
    inject(model, adapter)
    load_adapter(model, folder)


def base_of(folder: Path) -> str:
    """The model that the adapters in a folder belong to."""
    base = json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not base:
        raise UsageError(f"{folder / CONFIG} names no base model: set base_model_name_or_path in it")
    return str(base)


def four_bits(dtype: torch.dtype, head: Head) -> BitsAndBytesConfig:
    """QLoRA's storage of frozen weights: normal-float 4 bits, with their scales quantised too."""
    need("bitsandbytes", "accelerate", option="model.load_in_4bit")
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=["score"] if head == "score" else None,  # None: all but the output layer
    )


def hold_still(model: PreTrainedModel) -> None:
    """Keep bitsandbytes from packing 4-bit weights anew in eval mode on some CPUs.

    That rounds their scales, and saving rounds them again: a run would not be the same after an evaluation.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
