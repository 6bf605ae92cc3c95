"""vLLM as the engine: a copy of the model in this process, which takes new weights through weight_loading.py.

The copy starts with random weights and can generate after the first `load`. Weights arrive as (Hugging Face name, whole
tensor, or the part of it that a process of a divided engine needs), so training may use any layout. Log-probabilities
are those of the distribution that tokens are sampled from, as with the local engine. A wrong update still generates
fluent text: `check` compares log-probabilities.
"""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedConfig

from posttrain.core.errors import PosttrainError, UsageError
from posttrain.core.temporary import TemporaryFolder
from posttrain.core.types import Floats, Sample, WeightVersion
from posttrain.engines.base import BetweenSteps, GenerationRequest, OnCompletion, OnToken, Sampling
from posttrain.engines.vllm.environment import name_shared_memory, prepare_environment, preserved_process_state
from posttrain.engines.vllm.options import OPTION, VLLM_SHARE_BESIDE, parse_options
from posttrain.engines.vllm.tensor_parts import PartLoader, Shapes
from posttrain.engines.vllm.weight_loading import replace_lora, replace_weights, transfer_backend
from posttrain.engines.weight_probe import mean_difference
from posttrain.parallel.weight_transfer import NamedTensors, TensorParts

ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has kernels for

SeededPrompt = tuple[list[int], int]
"""A prompt's tokens and a seed."""
OnOutput = Callable[[Any], None]
"""Called with vLLM's output of a request after a step."""


@dataclass(slots=True)
class RequestProgress:
    """The output of a request, and the versions of the weights that sampled its first and last token."""

    output: Any = None  # when it is finished
    version: WeightVersion | None = None
    newest: WeightVersion = 0
    reported: int = 0  # tokens that were passed to on_token


class VllmEngine:
    """Generates with vLLM and the weights of the last `load`."""

    alive = 0  # engines in this process: they share what vLLM sets up there

    def __init__(
        self,
        config: PreTrainedConfig,
        tokenizer: Any,
        options: Mapping[str, Any] | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        base: str = "",
        adapter: dict[str, Any] | None = None,
        beside_trainer: bool = False,
    ) -> None:
        """`options`: by vLLM's own names; `beside_trainer`: a trainer shares the device's memory.

        `adapter`: peft's settings; `load` then takes adapters only, for the model in the folder `base`. Without an
        adapter the engine reads the weights of `base` itself, and no others are loaded.
        """
        self.tokenizer, self.adapter = tokenizer, adapter
        self.folder = TemporaryFolder(Path(tempfile.gettempdir()), "posttrain-vllm")
        self.version = 0 if base and adapter is None else -1  # of the weights; -1: none are loaded
        self.asleep = False
        self.numbers = count()
        self.on_output: dict[str, OnOutput] = {}  # by request id
        self.prefix_cache_is_stale = False  # it holds keys and values of other weights
        self.lora: Any = None
        self.tensor_parallel_group: Any = None  # of the processes that hold this model together
        self.part_loader: PartLoader | None = None  # of what this process holds of it
        self.dtype = dtype
        self.beside_trainer = beside_trainer
        self.single_process, self.closed = True, False
        with preserved_process_state():
            self.llm, self.on_cpu = self.start(config, options or {}, dtype, base)
        VllmEngine.alive += 1
        self.max_length = int(self.llm.model_config.max_model_len)

    def start(
        self, config: PreTrainedConfig, options: Mapping[str, Any], dtype: torch.dtype, base: str
    ) -> tuple[Any, bool]:
        """Start vLLM; returns its LLM, and whether it runs on a CPU."""
        prepare_environment()
        from vllm import LLM
        from vllm.platforms import current_platform

        on_cpu = bool(current_platform.is_cpu())
        given = parse_options(options)
        own = self.folder.path / "model"
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
            "generation_config": "vllm",  # no sampling defaults from the model's files
            "enable_prefix_caching": True,  # completions of a group share their prompt
            "disable_log_stats": True,
        }
        if self.adapter:
            settings |= adapter_settings(int(self.adapter["r"]))
        elif not base:
            settings["weight_transfer_config"] = {"backend": transfer_backend()}
        if on_cpu:
            settings |= {"enforce_eager": True}  # compiling takes minutes and gains little
        elif self.beside_trainer:
            settings |= {"gpu_memory_utilization": VLLM_SHARE_BESIDE, "enable_sleep_mode": True}
        settings |= given
        tensor_parallel_size = settings.get("tensor_parallel_size", 1)
        workers = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        if workers % tensor_parallel_size:
            raise UsageError(
                f"{OPTION}: tensor_parallel_size is {tensor_parallel_size}, but there are {workers} workers to divide "
                "the model among: see cluster.devices"
            )
        shared_memory = ""
        self.single_process = workers == 1
        if workers > 1:  # vLLM joins the existing processes, each with an engine of its own or a part of one
            settings["distributed_executor_backend"] = "external_launcher"
            os.environ.setdefault("RANK", str(torch.distributed.get_rank()))
            os.environ.setdefault("LOCAL_RANK", "0" if on_cpu else str(torch.cuda.current_device()))
            if on_cpu:
                shared_memory = name_shared_memory()
        try:
            llm = LLM(**settings)
        except (ValueError, RuntimeError) as error:
            raise UsageError(f"{OPTION}: {' '.join(str(error).split())}") from error
        if tensor_parallel_size > 1:
            from vllm.distributed.parallel_state import get_tp_group

            self.tensor_parallel_group = get_tp_group().cpu_group
            if shared_memory:
                # All have opened it now. Without its name, nothing is left behind when a process is killed.
                torch.distributed.barrier(self.tensor_parallel_group)
                for file in Path("/dev/shm").glob(f"{shared_memory}-*-cpushm_*"):
                    file.unlink(missing_ok=True)
        return llm, on_cpu

    # Generation

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        sampling: Sampling,
        on_token: OnToken | None = None,
        between_steps: BetweenSteps | None = None,
        on_completion: OnCompletion | None = None,
    ) -> list[Sample]:
        """Generate one sample per request, in order. Tokens, log-probabilities and mask cover prompt and completion."""
        self.check_ready()
        own = [(request.prompt.tolist(), request.seed) for request in requests]
        group = self.tensor_parallel_group
        by_process = [own] if group is None else distinct(gather_prompts(own, group))
        before = sum(len(theirs) for theirs in by_process[: by_process.index(own)])

        def report(index: int, token: int) -> None:
            if on_token is not None and 0 <= index - before < len(own):
                on_token(index - before, token)

        prompts = [prompt for theirs in by_process for prompt in theirs]
        # If weights change in between, each step must be seen to know which of them sampled a request's first token.
        streaming = on_token is not None or between_steps is not None
        params = [self.sampling_params(sampling, seed, streaming=streaming) for _, seed in prompts]
        progress = self.run([prompt for prompt, _ in prompts], params, report, between_steps)
        outputs = progress[before : before + len(own)]
        samples = [self.build_sample(request, output) for request, output in zip(requests, outputs, strict=True)]
        if on_completion is not None:
            for index, sample in enumerate(samples):
                on_completion(index, sample)
        return samples

    def sampling_params(self, sampling: Sampling, seed: int, *, streaming: bool) -> Any:
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
            ignore_eos=True,  # stop_ids has all of them
            detokenize=bool(sampling.stop_texts),
            skip_special_tokens=False,
            logprobs=0,  # of the sampled token only
            output_kind=RequestOutputKind.CUMULATIVE if streaming else RequestOutputKind.FINAL_ONLY,
        )

    def run(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[Any],
        on_token: OnToken | None = None,
        between_steps: BetweenSteps | None = None,
    ) -> list[RequestProgress]:
        """Run steps until every prompt has its output; tokens are reported if the parameters ask for streaming.

        `between_steps` may call this method again: then each step serves both calls.
        """
        engine = self.llm.llm_engine
        if self.prefix_cache_is_stale and not engine.has_unfinished_requests():
            self.prefix_cache_is_stale = not self.llm.reset_prefix_cache()
        requests = [RequestProgress() for _ in prompts]

        def update(index: int, output: Any) -> None:
            request = requests[index]
            tokens = output.outputs[0].token_ids
            if request.version is None:
                request.version = self.version
            if on_token is not None:
                for token in tokens[request.reported :]:
                    on_token(index, token)
                request.reported = len(tokens)
            if output.finished:
                request.output, request.newest = output, self.version

        ids: list[str] = []
        try:
            for index, (prompt, request_params) in enumerate(zip(prompts, params, strict=True)):
                self.check_length(prompt)
                request_id = str(next(self.numbers))
                engine.add_request(request_id, {"prompt_token_ids": prompt}, request_params, lora_request=self.lora)
                self.on_output[request_id] = partial(update, index)
                ids.append(request_id)
            while any(request.output is None for request in requests):
                if between_steps is not None:
                    between_steps()
                if any(request.output is None for request in requests):  # between_steps may have run steps
                    self.step()
        finally:
            for request_id in ids:
                del self.on_output[request_id]
            left = [request_id for request_id, request in zip(ids, requests, strict=False) if request.output is None]
            if left:  # after an error: no request may stay active in the next call
                engine.abort_request(left)
        return requests

    def step(self) -> None:
        """Generate a token for every active request, of this call or another."""
        assert self.llm.llm_engine.has_unfinished_requests(), "there is no active request"
        for output in self.llm.llm_engine.step():
            self.on_output[output.request_id](output)

    def build_sample(self, request: GenerationRequest, progress: RequestProgress) -> Sample:
        assert progress.version is not None, "it has no token"
        completion = progress.output.outputs[0]
        start, n = len(request.prompt), len(request.prompt) + len(completion.token_ids)
        logprobs = np.zeros(n, dtype=np.float32)
        steps = zip(completion.logprobs, completion.token_ids, strict=True)
        logprobs[start:] = [step[token].logprob for step, token in steps]
        return Sample(
            tokens=np.concatenate([request.prompt, np.array(completion.token_ids, dtype=np.int32)]),
            mask=np.arange(n) >= start,
            logprobs=logprobs,
            group=request.group,
            finish="stop" if completion.finish_reason == "stop" else "length",
            version=progress.version,
            newest=progress.newest,
        )

    def check_length(self, prompt: Sequence[int]) -> None:
        if len(prompt) >= self.max_length:
            raise UsageError(
                f"a prompt has {len(prompt)} tokens, but vLLM was started for {self.max_length} tokens of prompt and "
                f"completion: set data.max_length, or max_model_len in {OPTION}"
            )

    # Weights

    def needed_parts(self, shapes: Callable[[], Shapes]) -> TensorParts | None:
        """Return what this process needs of each tensor, if others hold the engine with it; None: whole tensors.

        Called before weights are loaded for the first time. `shapes`: those of all tensors, by name in files.
        """
        if self.tensor_parallel_group is None or self.adapter:
            return None
        if self.part_loader is None:
            assert self.version < 0, "the weights would be lost"
            with torch.no_grad():
                self.part_loader = PartLoader(self.llm, shapes(), self.dtype)
        return self.part_loader.parts

    def load(self, weights: NamedTensors, version: WeightVersion, *, in_parts: bool = False) -> None:
        """Load new weights, or new adapters; they take effect at once, and the prefix cache is cleared.

        Active requests continue with the keys and values that they have. `in_parts`: `weights` has what `needed_parts`
        names, not whole tensors.
        """
        assert not self.asleep, "call wake first"
        self.version = -1
        with torch.no_grad():
            if self.adapter:
                folder = self.folder.path / "adapter"
                self.lora = replace_lora(self.llm, weights, version, self.adapter, folder, self.lora)
            elif in_parts:
                assert self.part_loader is not None, "needed_parts comes first"
                self.part_loader.load(weights, version)
            else:
                replace_weights(self.llm, weights, version)
        self.prefix_cache_is_stale = not self.llm.reset_prefix_cache()  # refused while requests are active
        self.version = version

    def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        """Return the log-probability of each counted token at temperature 1 without truncation, 0 elsewhere."""
        from vllm import SamplingParams

        self.check_ready()
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, ignore_eos=True)
        outputs = self.run([sample.tokens.tolist() for sample in samples], [params] * len(samples))
        found = []
        for sample, progress in zip(samples, outputs, strict=True):
            steps = zip(progress.output.prompt_logprobs, sample.tokens.tolist(), strict=True)
            stream = [step[token].logprob if step else 0.0 for step, token in steps]
            found.append(np.where(sample.mask, np.array(stream, dtype=np.float32), np.float32(0)))
        return found

    def check(self, samples: Sequence[Sample], expected: Sequence[Floats], tolerance: float) -> float:
        """Return the mean difference of log-probabilities from the trainer's; raises if it exceeds the tolerance."""
        found = mean_difference(samples, self.logprobs(samples), expected)
        if not found <= tolerance:
            raise PosttrainError(
                f"vLLM's log-probabilities differ from the trainer's by {found:.3g} on average after the update to "
                f"version {self.version}; {tolerance:g} is allowed. Either the weights did not arrive as they were "
                "sent, or vLLM computes this model differently: use --rollout.engine local, or another vLLM."
            )
        return found

    # Memory

    def sleep(self) -> None:
        """Free device memory for the trainer; on a CPU there is nothing to do.

        Weights are dropped, since new ones are loaded after `wake`; the base model of adapters is kept, since it is
        read only once.
        """
        if self.on_cpu or self.asleep or not self.beside_trainer:
            return
        self.llm.sleep(level=1 if self.adapter else 2)
        self.asleep = True
        if not self.adapter:
            self.version = -1

    def wake(self) -> None:
        """Allocate the memory again; `load` must follow."""
        if self.asleep:
            self.llm.wake_up()
            self.asleep = False

    def check_ready(self) -> None:
        assert not self.asleep, "call wake first"
        assert self.version >= 0, "no weights are loaded: call load first"

    def close(self) -> None:
        """End the engine, and with the last one of this process what vLLM has set up there."""
        from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

        if self.closed:  # else other engines would be counted as ended
            return
        self.closed = True
        self.llm.llm_engine.engine_core.shutdown()
        self.folder.close()
        VllmEngine.alive -= 1
        if self.single_process and not VllmEngine.alive:
            destroy_model_parallel()
            destroy_distributed_environment()


def adapter_settings(rank: int) -> dict[str, Any]:
    """Return vLLM's options for one adapter of this rank."""
    largest = next((size for size in ADAPTER_RANKS if size >= rank), None)
    if largest is None:
        raise UsageError(f"model.lora_rank is {rank}; vLLM supports ranks up to {ADAPTER_RANKS[-1]}")
    return {"enable_lora": True, "max_lora_rank": largest, "max_loras": 1, "max_cpu_loras": 1}


# Processes that hold one engine together must run the same requests


def gather_prompts(own: list[SeededPrompt], group: Any) -> list[list[SeededPrompt]]:
    """Gather the prompts of every process of the group, in order of rank."""
    text = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.long) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(sizes, torch.tensor([len(text)]), group=group)
    longest = max(int(size) for size in sizes)
    texts = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    torch.distributed.all_gather(texts, F.pad(text, (0, longest - len(text))), group=group)
    found = (bytes(text[: int(size)].numpy()) for text, size in zip(texts, sizes, strict=True))
    return [[(prompt, seed) for prompt, seed in json.loads(theirs)] for theirs in found]


def distinct(by_process: list[list[SeededPrompt]]) -> list[list[SeededPrompt]]:
    """Keep each list once: processes that train the same part of the data have the same prompts."""
    return [theirs for index, theirs in enumerate(by_process) if theirs not in by_process[:index]]
