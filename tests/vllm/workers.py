"""Run by test_workers.py in several processes: each generates its own requests and compares log-probabilities."""

import sys

import numpy as np
import torch
import torch.distributed as dist

from posttrain.config.sections import ModelConfig
from posttrain.core.types import ForwardRequest as Wanted
from posttrain.data.packing import collate
from posttrain.engines.base import GenerationRequest, Sampling
from posttrain.engines.vllm.engine import VllmEngine
from posttrain.models.loading import load_model
from posttrain.models.tokenizers import load_tokenizer
from posttrain.nn.forward import ModelRunner, forward


def main(divided: str, kind: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    config = ModelConfig(path="pico")
    model = load_model(config, "token", device=torch.device("cpu"), trainable=False, seed=0)
    engine = VllmEngine(model.config, load_tokenizer(config), {"tensor_parallel_size": divided})
    engine.load(model.named_parameters(), 3)
    mine = 7 if kind == "same" else rank
    prompts = [np.array([1, 3, 20 + mine, 30 + i], dtype=np.int32) for i in range(2 + mine)]
    asked = [GenerationRequest(prompt=prompt, seed=10 * mine + i) for i, prompt in enumerate(prompts)]
    heard: dict[int, list[int]] = {}
    samples = engine.generate(asked, Sampling(max_tokens=6), lambda i, token: heard.setdefault(i, []).append(token))
    assert [heard[i] for i in range(len(asked))] == [sample.tokens[sample.mask].tolist() for sample in samples]
    assert [sample.tokens[:4].tolist() for sample in samples] == [prompt.tolist() for prompt in prompts]
    expected = forward(ModelRunner.from_model(model), collate(samples), Wanted()).logprobs
    assert expected is not None
    found = np.concatenate([sample.logprobs for sample in samples if sample.logprobs is not None])
    assert np.abs(expected.detach().numpy() - found).max() < 1e-4
    assert engine.generate([], Sampling(max_tokens=2)) == []
    dist.barrier()
    print(f"rank {rank} agrees on {len(samples)} answers", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
