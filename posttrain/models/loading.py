"""Models and tokenizers from folders, the hub, run folders or `pico`; and back to plain Hugging Face folders."""

from __future__ import annotations

import copy
import json
import logging
import re
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from huggingface_hub import constants as hub
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    GPT2Tokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Tokenizer,
)

from posttrain.checkpoints.checkpoint import resolve_model_folder
from posttrain.checkpoints.tensor_files import TensorFiles, save_sharded
from posttrain.config.sections import ModelConfig
from posttrain.core.errors import CheckpointError, UsageError
from posttrain.core.types import Head
from posttrain.data.reading.sources import MODELSCOPE, modelscope_model
from posttrain.models import adapters
from posttrain.models.pico import pico_folder
from posttrain.models.tensors import module_tensors, read_parts, some_of, stored, stored_entries
from posttrain.nn import attention
from posttrain.parallel.fsdp import ModelShards

AUTO_CLASSES: dict[Head, Any] = {"token": AutoModelForCausalLM, "score": AutoModelForSequenceClassification}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)

log = logging.getLogger("posttrain")


# Where a model is


def resolve_path(path: str) -> str:
    """What the user calls a model -> a folder that transformers can read, or a hub name."""
    if not path:
        raise UsageError("no model: give --model.path a folder, a hub name, a run folder, or pico")
    if path == "pico":
        return str(pico_folder())
    if path.startswith(MODELSCOPE):
        return modelscope_model(path)
    folder = Path(path).expanduser()
    if not folder.exists():
        if HUB_NAME.fullmatch(path):
            return path
        raise UsageError(f"model.path: there is no folder {path}, and it is no hub name (which is like owner/model)")
    if (folder / "checkpoints").is_dir():
        return str(resolve_model_folder(folder))
    for candidate in (folder, folder / "model"):  # the second: a checkpoint of a run
        if (candidate / "config.json").is_file() or is_adapter(candidate):
            return str(candidate)
    raise UsageError(f"model.path: no model in {path}: it has no config.json. {describe(folder)}")


def describe(folder: Path) -> str:
    """What is there instead of a model."""
    if not folder.is_dir():
        return "It is a file; give the folder that holds the model."
    names = sorted(entry.name + "/" * entry.is_dir() for entry in folder.iterdir())
    if not names:
        return "It is empty."
    return f"There is: {', '.join(names[:8])}" + (f" and {len(names) - 8} more." if len(names) > 8 else ".")


def is_adapter(folder: str | Path) -> bool:
    """Whether a folder holds LoRA adapters instead of a model."""
    return (Path(folder) / adapters.CONFIG).is_file()


@cache
def hub_is_reachable() -> bool:
    """Asked before transformers is, which would try for half a minute a file."""
    if hub.is_offline_mode():
        return False
    if urllib.request.getproxies():  # cannot be judged from here
        return True
    address = urlsplit(hub.ENDPOINT)
    try:
        socket.create_connection((address.hostname or "", address.port or 443), timeout=5).close()
    except OSError:
        return False
    return True


def hub_options(source: str) -> dict[str, Any]:
    """Options for every from_pretrained: nothing is fetched in vain and no code of strangers is run."""
    local = Path(source).is_dir() or not hub_is_reachable()
    return {"local_files_only": local, "trust_remote_code": False}


@contextmanager
def explained(source: str, option: str = "model.path") -> Iterator[None]:
    """Turn a loading error into one line for the user."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if "conversion of the weights" in reason:
            reason = "some tensors of its experts are missing or damaged; TRANSFORMERS_VERBOSITY=warning names them"
        if Path(source).is_dir():
            raise UsageError(f"{option}: {source} cannot be loaded: {reason}") from error
        if not hub_is_reachable():
            message = "is no folder here and not in the hub's cache, and the hub cannot be reached. Give a folder."
            raise UsageError(f"{option}: {source} {message}") from error
        raise UsageError(f"{option}: {source} is no folder here, and from the hub: {reason}") from error


# Loading


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a model. Without a padding token, the end token stands in; none is added."""
    option = "model.tokenizer" if model.tokenizer else "model.path"
    source = tokenizer_folder(model.tokenizer) or resolve_path(model.tokenizer or model.path)
    while is_adapter(source) and not (Path(source) / "tokenizer_config.json").is_file():
        source = resolve_path(adapters.base_of(Path(source)))
    with explained(source, option):
        if is_bare_vocabulary(Path(source)):
            tokenizer = tokenizer_of_vocabulary(Path(source))
        else:
            tokenizer = AutoTokenizer.from_pretrained(source, **hub_options(source))
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def tokenizer_folder(path: str) -> str:
    """The path, if it is a folder with a tokenizer, which need not have a model besides; else nothing."""
    folder = Path(path).expanduser()
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    return str(folder) if path and any((folder / name).is_file() for name in names) else ""


def is_bare_vocabulary(folder: Path) -> bool:
    """Whether a folder has vocab.json and merges.txt, and nothing that says whose they are."""
    described = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "config.json"))
    return not described and all((folder / name).is_file() for name in ("vocab.json", "merges.txt"))


def tokenizer_of_vocabulary(folder: Path) -> PreTrainedTokenizerBase:
    """GPT-2's way of cutting text has its end token in vocab.json; Qwen's has its control tokens after the others."""
    vocabulary = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    try:
        if "<|endoftext|>" in vocabulary:
            return GPT2Tokenizer.from_pretrained(folder)
        return Qwen2Tokenizer.from_pretrained(folder, extra_special_tokens=["<|im_start|>", "<|im_end|>"])
    except Exception as error:  # the library knows no other for merges that do not fit the vocabulary
        raise ValueError(str(error)) from error


def vocabulary_size(model: ModelConfig) -> int:
    """How many token ids the model knows; often more than its tokenizer has."""
    source = resolve_path(model.path)
    while is_adapter(source) and not (Path(source) / "config.json").is_file():
        source = resolve_path(adapters.base_of(Path(source)))
    return int(read_config(source, "token").get_text_config().vocab_size)


def compute_dtype(model: ModelConfig, device: torch.device) -> torch.dtype:
    """What the model computes in."""
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
    """A model ready for packed training, or for inference. `seed` decides what the files do not hold.

    With `shards` it stays in host memory until it is cut, and what is trained is float32.
    """
    if model.load_in_4bit and trainable and not model.lora_rank:
        raise UsageError("model.load_in_4bit: weights in 4 bits stay frozen; set model.lora_rank to train adapters")
    if model.load_in_4bit and shards is not None:
        raise UsageError(
            "model.load_in_4bit: weights in 4 bits cannot be shared by processes: cluster.devices must be 1"
        )
    dtype = compute_dtype(model, device)
    source = resolve_path(model.path)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        skeleton, folder = read_skeleton(source, head, dtype) if shards is not None else (None, Path())
        loaded = skeleton or read_model(source, head, dtype, device=device, in_4bit=model.load_in_4bit)
        if adapters.is_adapted(loaded):
            # Merged, so that the weights without new adapters are this model: what a reference has to be.
            adapters.merge(loaded)
        if model.path == "pico":  # its folder is a cache
            loaded.name_or_path = "pico"
        if head == "score":
            loaded.config.pad_token_id = padding_for_scores(load_tokenizer(replace(model, path=source)))
        loaded.get_input_embeddings().padding_idx = None  # nothing is padded: it may be a real token, and must learn
        if trainable and model.lora_rank:
            with as_if_there(loaded):
                adapters.add_adapters(loaded, model, head)
        else:
            loaded.requires_grad_(trainable)
    if shards is not None:
        for parameter in trainable_parameters(loaded).values():
            parameter.data = parameter.data.float()
        if skeleton is not None:
            unread = {name for name, tensor in module_tensors(loaded).items() if tensor.is_meta}
            unread |= module_tensors(loaded).keys() - dict(loaded.named_parameters()).keys()
            shards.unread.append(lambda: read_parts(loaded, folder, unread))
    elif not model.load_in_4bit:  # which went there when it was quantised
        loaded.to(device)
    loaded.set_attn_implementation(attention.NAME)
    if trainable and model.checkpoint_activations:
        loaded.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return loaded.train(trainable)


def read_model(
    source: str, head: Head, dtype: torch.dtype | str, *, device: torch.device | None = None, in_4bit: bool = False
) -> PreTrainedModel:
    """The model that lies at `source`, all weights accounted for; its adapters, if any, injected and not merged."""
    if is_adapter(source):
        if in_4bit:
            raise UsageError(f"model.load_in_4bit: {source} holds adapters; `posttrain export` it and load the result")
        model = read_model(resolve_path(adapters.base_of(Path(source))), head, dtype)
        if adapters.is_adapted(model):
            adapters.merge(model)
        adapters.attach(model, Path(source))
        if (Path(source) / "config.json").is_file():  # with facts that training wrote down, as score_mean
            for name, value in read_config(source, head).to_dict().items():
                if not hasattr(model.config, name):
                    setattr(model.config, name, value)
        model.name_or_path = str(Path(source).absolute())
        return model
    extra: dict[str, Any] = {}
    if in_4bit:
        assert isinstance(dtype, torch.dtype) and device is not None
        extra = {"quantization_config": adapters.four_bits(dtype, head), "device_map": {"": device}}
    config = read_config(source, head)
    with explained(source):
        model, report = AUTO_CLASSES[head].from_pretrained(
            source,
            config=config,
            dtype=dtype,
            use_safetensors=True,  # the other format is pickle
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # check_report names them better
            **hub_options(source),
            **extra,
        )
    if in_4bit:
        adapters.hold_still(model)
    check_report(source, head, report)
    if "score.weight" in report["missing_keys"]:
        initialise_score(model)
    return made_ready(model, source)


def made_ready(model: PreTrainedModel, source: str) -> PreTrainedModel:
    """Without noise, savable, and knowing where it comes from."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if Path(source).is_dir():
        model.name_or_path = str(Path(source).absolute())
    if model.can_generate():
        make_savable(model)
    return model


def read_skeleton(source: str, head: Head, dtype: torch.dtype) -> tuple[PreTrainedModel | None, Path]:
    """A model without its weights, and where processes read their part of them; None where only all of it can be read.

    Nothing is left to be made up but a new score head, which is there already. Buffers are there too.
    """
    folder = Path(source)
    if not folder.is_dir():
        with explained(source):
            kinds, offline = ["*.json", "*.safetensors"], not hub_is_reachable()
            folder = Path(snapshot_download(source, allow_patterns=kinds, local_files_only=offline))
    there = any((folder / f"model.safetensors{ending}").is_file() for ending in ("", ".index.json"))
    if not there or is_adapter(folder):
        log.info("%s: every process reads the whole model, and keeps its part", source)
        return None, folder
    config = read_config(source, head)
    with explained(source):
        files = TensorFiles(folder, "model")
        with parameters_without_memory():
            model = AUTO_CLASSES[head].from_config(config, dtype=dtype)
    for name in model._keep_in_fp32_modules_strict or ():
        for module in model.modules():
            module._buffers |= {
                key: value.float() for key, value in module._buffers.items() if key == name and value is not None
            }
    present = files.places.keys()
    if head == "score" and "score.weight" not in present:
        model.score = torch.nn.utils.skip_init(torch.nn.Linear, model.score.in_features, 1, bias=False, dtype=dtype)
        model._init_weights(model.score)  # as transformers does before: the numbers drawn after it stay the same
        initialise_score(model)
    elif head == "token" and "score.weight" in present:
        check_report(source, head, {"missing_keys": [], "mismatched_keys": [], "unexpected_keys": ["score.weight"]})
    wanted: dict[str, tuple[int, ...]] = {}
    for name, tensor in module_tensors(model).items():
        if tensor.is_meta or not isinstance(tensor, torch.nn.Parameter):
            parts = stored(model, name, torch.empty(tensor.shape, device="meta"))
            wanted |= {key: tuple(part.shape) for key, part in parts.items()}
    if not wanted.keys() <= present:
        log.info("%s: its tensors have names of their own: every process reads the whole model", source)
        return None, folder
    report = {"missing_keys": [], "unexpected_keys": present - wanted.keys() - tied_names(model)}
    shapes = ((name, files.shape(name), shape) for name, shape in wanted.items())
    check_report(source, head, report | {"mismatched_keys": [entry for entry in shapes if entry[1] != entry[2]]})
    if (folder / "generation_config.json").is_file() and model.can_generate():
        with explained(source):
            model.generation_config = GenerationConfig.from_pretrained(folder)
    return made_ready(model, source), folder


def tied_names(model: PreTrainedModel) -> set[str]:
    """Names of parameters that another one stands for."""
    return {name for name, _ in model.named_parameters(remove_duplicate=False)} - dict(model.named_parameters()).keys()


@contextmanager
def parameters_without_memory() -> Iterator[None]:
    """Inside, modules are made with parameters on the device `meta`, but with real buffers."""
    register = torch.nn.Module.register_parameter

    def without_memory(self: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        register(self, name, parameter)
        if parameter is not None and not parameter.is_meta:
            self._parameters[name] = torch.nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    torch.nn.Module.register_parameter = without_memory  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


@contextmanager
def as_if_there(model: PreTrainedModel) -> Iterator[None]:
    """Inside, parameters without memory seem to lie on the CPU, so that what is put beside them does."""
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
    """The model's configuration, without noise in training: the sampler and the trainer must see one model."""
    with explained(source):
        config = AutoConfig.from_pretrained(source, **hub_options(source))
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        for name, value in part.to_dict().items():
            if ("drop" in name or "jitter" in name) and isinstance(value, float):
                setattr(part, name, 0.0)
    config.use_cache = False
    if head == "score":
        config.num_labels = 1
    return config


def check_report(source: str, head: Head, report: dict[str, Any]) -> None:
    """No weight may be made up, except a new score head; one that is left over is at least named."""
    missing, unexpected = set(report["missing_keys"]), set(report["unexpected_keys"])
    if "score.weight" in unexpected:
        raise UsageError(f"model.path: {source} is a reward model; a language model is needed here")
    if head == "score":  # takes the place of the language model's own head
        missing.discard("score.weight")
        unexpected = {name for name in unexpected if not name.startswith(("lm_head.", "embed_out."))}
    for name, found, expected in sorted(report["mismatched_keys"]):
        raise UsageError(f"model.path: {source}: {name} is {tuple(found)}, {tuple(expected)} is needed here")
    if missing:
        raise UsageError(f"model.path: {source} lacks weights: {some_of(missing)}")
    if unexpected:
        log.warning("%s holds weights that this model has no place for: %s", source, some_of(unexpected))


@torch.no_grad()
def initialise_score(model: PreTrainedModel) -> None:
    """Variance 1 / (hidden + 1), as in "Learning to summarize from human feedback" (2020): scores begin near 1."""
    weight = model.score.weight
    drawn = torch.randn(weight.shape, generator=torch.default_generator) * (weight.shape[1] + 1) ** -0.5
    weight.copy_(drawn)


def padding_for_scores(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Stock code scores the last token that is not padding; were padding the end token, it would miss the last.

    None (no other special token): stock code then takes one row at a time, and says so.
    """
    candidates = (tokenizer.pad_token_id, tokenizer.unk_token_id, *tokenizer.all_special_ids)
    return next((token for token in candidates if token is not None and token != tokenizer.eos_token_id), None)


def make_savable(model: PreTrainedModel) -> None:
    """transformers refuses to save some generation configs that it loads: found here, not after the training."""
    config = model.generation_config
    try:
        config.validate(strict=True)
    except ValueError:
        config.do_sample = True  # temperature and its like were set, sampling was not
    try:
        config.validate(strict=True)
    except ValueError as error:
        log.warning("generation_config.json of %s is not valid and left out: %s", model.name_or_path, error)
        model.generation_config = GenerationConfig.from_model_config(model.config)


def trainable_parameters(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """What an optimizer updates, by name, in the model's order; tied weights once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


# Saving


def save_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, shards: ModelShards | None = None
) -> None:
    """Write a plain Hugging Face folder; of an adapted model the adapters alone.

    Where processes hold the model together, each writes some of the tensors and the first one all the rest.
    """
    if adapters.is_adapted(model):
        adapters.save_adapter(model, folder, write=shards is None or shards.rank == 0)
    elif shards is None:
        model.save_pretrained(folder)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        save_sharded(folder, "model", list(stored_entries(model, shards)), shards.rank, shards.size)
        if shards.rank == 0 and model.can_generate():
            model.generation_config.save_pretrained(folder)
    if shards is not None and shards.rank:
        return
    config = copy.deepcopy(model.config)
    config.use_cache = True
    config.dtype = model.dtype if shards is None else shards.dtype
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    if adapters.is_adapted(model) and hasattr(config, "quantization_config"):
        del config.quantization_config  # how the base is held in memory, not what it is
    config.save_pretrained(folder)
    if model.get_output_embeddings() is None and config.pad_token_id is not None:  # a score model, see above
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(config.pad_token_id)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def load_weights(model: PreTrainedModel, folder: Path) -> None:
    """Read what `save_model` wrote into the same tensors, which stay where they are."""
    if adapters.is_adapted(model):
        adapters.load_adapter(model, folder)
        return
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        read_parts(model, folder)
        return
    try:
        saved, report = type(model).from_pretrained(
            folder, dtype=model.dtype, use_safetensors=True, output_loading_info=True, local_files_only=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: the weights cannot be read: {str(error).splitlines()[0]}") from error
    live, read = model.state_dict(), saved.state_dict()
    wrong = set(report["missing_keys"]) | set(report["unexpected_keys"]) | (live.keys() ^ read.keys())
    if wrong:
        raise CheckpointError(f"{folder}: does not fit the model; in one of them only: {some_of(wrong)}")
    for name, tensor in live.items():
        if tensor.shape != read[name].shape:
            raise CheckpointError(f"{folder}: {name} is {tuple(read[name].shape)}, the model's {tuple(tensor.shape)}")
        tensor.copy_(read[name])
