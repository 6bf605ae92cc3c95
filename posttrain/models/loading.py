"""Loads models for training and inference: all weights in one process, or on the meta device to be sharded."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from posttrain.checkpoints.tensor_files import TensorFiles
from posttrain.config.sections import ModelConfig
from posttrain.core.errors import UsageError
from posttrain.core.model_limits import check_files, check_generation_config, check_model_config, weight_file_bytes
from posttrain.core.types import Head
from posttrain.models import adapters, paths
from posttrain.models.freezing import freeze_weights
from posttrain.models.tensors import abbreviate, file_tensors, module_tensors, read_shards
from posttrain.models.tokenizers import load_tokenizer, score_padding_id
from posttrain.nn import attention
from posttrain.parallel.fsdp import ModelShards
from posttrain.parallel.layouts import QUANTIZED

AUTO_CLASSES: dict[Head, Any] = {"token": AutoModelForCausalLM, "score": AutoModelForSequenceClassification}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

log = logging.getLogger("posttrain")


def vocabulary_size(model: ModelConfig) -> int:
    """Return the number of token ids in the model's vocabulary; often larger than the tokenizer's."""
    source = paths.resolve_path(model.path)
    while paths.is_adapter(source) and not (Path(source) / "config.json").is_file():
        source = paths.resolve_base(source)
    return int(read_config(source, "token").get_text_config().vocab_size)


def compute_dtype(model: ModelConfig, device: torch.device) -> torch.dtype:
    """Return the type that the model computes in."""
    return DTYPES.get(model.dtype) or (torch.float32 if device.type == "cpu" else torch.bfloat16)


def load_model(
    model: ModelConfig,
    head: Head,
    *,
    device: torch.device,
    trainable: bool,
    seed: int,
    shards: ModelShards | None = None,
) -> PreTrainedModel:
    """Load a model for packed training or inference. `seed` initialises what is not in the files.

    With `shards` it stays in host memory until it is sharded, and trained parameters are float32.
    """
    if model.load_in_4bit and trainable and not model.lora_rank:
        raise UsageError("model.load_in_4bit: 4-bit weights cannot be trained; set model.lora_rank to train adapters")
    if model.load_in_4bit and shards is not None:
        raise UsageError(QUANTIZED)
    dtype = compute_dtype(model, device)
    source = paths.resolve_path(model.path)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        meta_model, folder = load_meta_model(source, head, dtype) if shards is not None else (None, Path())
        loaded = meta_model or read_model(source, head, dtype, device=device, in_4bit=model.load_in_4bit)
        if adapters.is_adapted(loaded):
            # Merged, so that the model without its new adapters is this one, as a reference model must be.
            adapters.merge(loaded)
        if model.path == "pico":  # its folder is only a cache
            loaded.name_or_path = "pico"
        if head == "score":
            loaded.config.pad_token_id = score_padding_id(load_tokenizer(replace(model, path=source)))
        loaded.get_input_embeddings().padding_idx = None  # nothing is padded, so the padding token is trained too
        if trainable and model.lora_rank:
            with meta_as_cpu(loaded):
                adapters.add_adapters(loaded, model, head)
        elif trainable:
            freeze_weights(loaded, model, head)
        else:
            loaded.requires_grad_(False)
    if shards is not None:
        for parameter in trainable_parameters(loaded).values():
            parameter.data = parameter.data.float()
        if meta_model is not None:
            unread = {name for name, tensor in module_tensors(loaded).items() if tensor.is_meta}
            unread |= module_tensors(loaded).keys() - dict(loaded.named_parameters()).keys()
            shards.unread.append(lambda: read_shards(loaded, folder, unread))
    elif not model.load_in_4bit:  # which was moved when it was quantized
        loaded.to(device)
    attention.use_packed(loaded)
    if trainable and model.gradient_checkpointing:
        loaded.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return loaded.train(trainable)


def read_model(
    source: str, head: Head, dtype: torch.dtype | str, *, device: torch.device | None = None, in_4bit: bool = False
) -> PreTrainedModel:
    """Read the model at `source` and check that no weight is missing; adapters are injected, not merged."""
    if paths.is_adapter(source):
        if in_4bit:
            raise UsageError(f"model.load_in_4bit: {source} holds adapters; `posttrain export` it and load the result")
        model = read_model(paths.resolve_base(source), head, dtype)
        if adapters.is_adapted(model):
            adapters.merge(model)
        adapters.inject_saved(model, Path(source))
        if (Path(source) / "config.json").is_file():  # it has values that training added, such as score_mean
            for name, value in read_config(source, head).to_dict().items():
                if not hasattr(model.config, name):
                    setattr(model.config, name, value)
        model.name_or_path = str(Path(source).absolute())
        return model
    extra: dict[str, Any] = {}
    if in_4bit:
        assert isinstance(dtype, torch.dtype) and device is not None
        extra = {"quantization_config": adapters.nf4_config(dtype, head), "device_map": {"": device}}
    config = read_config(source, head)
    with paths.loading_errors(source):
        model, report = AUTO_CLASSES[head].from_pretrained(
            source,
            config=config,
            dtype=dtype,
            use_safetensors=True,  # the other format is pickle
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # check_loading_report has the better message
            **paths.hub_options(source),
            **extra,
        )
    if in_4bit:
        adapters.disable_cpu_repacking(model)
    check_loading_report(source, head, report)
    if "score.weight" in report["missing_keys"]:
        init_score_head(model)
    return prepare_model(model, source)


def prepare_model(model: PreTrainedModel, source: str) -> PreTrainedModel:
    """Turn off dropout, record where the model comes from, and make sure that it can be saved."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if Path(source).is_dir():
        model.name_or_path = str(Path(source).absolute())
    if model.can_generate():
        fix_generation_config(model)
    return model


def load_meta_model(source: str, head: Head, dtype: torch.dtype) -> tuple[PreTrainedModel | None, Path]:
    """Return a model on the meta device and the folder from which processes read their shards of its weights.

    None instead of the model if its files can only be read in full. A new score head is initialised already, and
    buffers are on the CPU; no other weight is missing in the files.
    """
    folder = local_folder(source)
    has_weights = any((folder / f"model.safetensors{ending}").is_file() for ending in ("", ".index.json"))
    if not has_weights or paths.is_adapter(folder):
        log.info("%s: every process reads the full model and keeps its shard", source)
        return None, folder
    config = read_config(source, head)
    with paths.loading_errors(source):
        files = TensorFiles(folder, "model")
        with meta_parameters():
            model = AUTO_CLASSES[head].from_config(config, dtype=dtype)
    for name in model._keep_in_fp32_modules_strict or ():
        for module in model.modules():
            module._buffers |= {
                key: value.float() for key, value in module._buffers.items() if key == name and value is not None
            }
    present = files.places.keys()
    if head == "score" and "score.weight" not in present:
        model.score = torch.nn.utils.skip_init(torch.nn.Linear, model.score.in_features, 1, bias=False, dtype=dtype)
        model._init_weights(model.score)  # as transformers does: keeps the random stream the same
        init_score_head(model)
    elif head == "token" and "score.weight" in present:
        refuse_reward_model(source)
    wanted = unread_tensors(model)
    if not wanted.keys() <= present:
        log.info("%s: its tensor names are not the model's: every process reads the full model", source)
        return None, folder
    report = {"missing_keys": [], "unexpected_keys": present - wanted.keys() - tied_names(model)}
    shapes = ((name, files.shape(name), shape) for name, shape in wanted.items())
    check_loading_report(
        source, head, report | {"mismatched_keys": [entry for entry in shapes if entry[1] != entry[2]]}
    )
    if (folder / "generation_config.json").is_file() and model.can_generate():
        with paths.loading_errors(source):
            model.generation_config = GenerationConfig.from_pretrained(folder)
    return prepare_model(model, source), folder


def local_folder(source: str) -> Path:
    """Return the folder of a model; a hub name is downloaded first."""
    if Path(source).is_dir():
        return Path(source)
    with paths.loading_errors(source):
        patterns, offline = ["*.json", "*.safetensors"], not paths.hub_is_reachable()
        return Path(snapshot_download(source, allow_patterns=patterns, local_files_only=offline))


def unread_tensors(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Return names and shapes, as files hold them, of the tensors that are still to be read."""
    found: dict[str, tuple[int, ...]] = {}
    for name, tensor in module_tensors(model).items():
        if tensor.is_meta or not isinstance(tensor, torch.nn.Parameter):
            parts = file_tensors(model, name, torch.empty(tensor.shape, device="meta"))
            found |= {key: tuple(part.shape) for key, part in parts.items()}
    return found


def tied_names(model: PreTrainedModel) -> set[str]:
    """Return the names of parameters that are tied to another one and not saved."""
    return {name for name, _ in model.named_parameters(remove_duplicate=False)} - dict(model.named_parameters()).keys()


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Construct modules in the block with parameters on the meta device, but with real buffers."""
    register = torch.nn.Module.register_parameter

    def register_on_meta(self: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        register(self, name, parameter)
        if parameter is not None and not parameter.is_meta:
            self._parameters[name] = torch.nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    torch.nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


@contextmanager
def meta_as_cpu(model: PreTrainedModel) -> Iterator[None]:
    """Let parameters on the meta device pretend to be on the CPU in the block, so that adapters are created there."""
    absent = {
        p: torch.nn.Parameter(torch.empty((), dtype=p.dtype).expand(p.shape)) for p in model.parameters() if p.is_meta
    }
    for parameter, pretended in absent.items():
        torch.utils.swap_tensors(parameter, pretended)
    yield
    for parameter, pretended in absent.items():
        trained = parameter.requires_grad
        torch.utils.swap_tensors(parameter, pretended)
        parameter.requires_grad_(trained)


def read_config(source: str, head: Head) -> PreTrainedConfig:
    """Read the model's configuration and switch off dropout: sampler and trainer must compute the same function."""
    with paths.loading_errors(source):
        check_files(Path(source), f"model.path: {source}")
        check_generation_config(Path(source), f"model.path: {source}")
        written, _ = PreTrainedConfig.get_config_dict(source, **paths.hub_options(source))
        check_model_config(written, f"model.path: {source}", weight_file_bytes(Path(source)))
        config = AutoConfig.from_pretrained(source, **paths.hub_options(source))
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        for name, value in part.to_dict().items():
            if ("drop" in name or "jitter" in name) and isinstance(value, float):
                setattr(part, name, 0.0)
    config.use_cache = False
    if head == "score":
        config.num_labels = 1
    return config


def check_loading_report(source: str, head: Head, report: dict[str, Any]) -> None:
    """Refuse missing weights, except those of a new score head; warn of weights that the model does not use."""
    missing, unexpected = set(report["missing_keys"]), set(report["unexpected_keys"])
    if "score.weight" in unexpected:
        refuse_reward_model(source)
    if head == "score":  # it replaces the language model's head
        missing.discard("score.weight")
        unexpected = {name for name in unexpected if not name.startswith(("lm_head.", "embed_out."))}
    for name, found, expected in sorted(report["mismatched_keys"]):
        raise UsageError(f"model.path: {source}: tensor {name} has shape {tuple(found)}, but must be {tuple(expected)}")
    if missing:
        raise UsageError(f"model.path: {source}: tensors of the model that are not in the files: {abbreviate(missing)}")
    if unexpected:
        log.warning("%s: tensors in the files that are not in the model: %s", source, abbreviate(unexpected))


def refuse_reward_model(source: str) -> None:
    raise UsageError(f"model.path: {source} is a reward model; a language model is needed here")


@torch.no_grad()
def init_score_head(model: PreTrainedModel) -> None:
    """Draw weights of variance 1 / (hidden + 1), as in "Learning to summarize from human feedback" (2020)."""
    weight = model.score.weight
    drawn = torch.randn(weight.shape, generator=torch.default_generator) * (weight.shape[1] + 1) ** -0.5
    weight.copy_(drawn)


def fix_generation_config(model: PreTrainedModel) -> None:
    """Repair a generation config that transformers loads but would refuse to save, before training and not after."""
    config = model.generation_config
    try:
        config.validate(strict=True)
    except ValueError:
        config.do_sample = True  # temperature or the like is set, but sampling is not
    try:
        config.validate(strict=True)
    except ValueError as error:
        log.warning("generation_config.json of %s is not valid and is ignored: %s", model.name_or_path, error)
        model.generation_config = GenerationConfig.from_model_config(model.config)


def trainable_parameters(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that the optimizer updates, by name and in the model's order; tied weights once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
