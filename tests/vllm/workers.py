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


def load(engine: VllmEngine, model: torch.nn.Module, kind: str) -> None:
    """Load whole tensors, or what each process needs, twice."""
    if kind != "parts":
        return engine.load(model.named_parameters(), 3)
    weights = dict(model.named_parameters())
    parts = engine.needed_parts(lambda: {name: tuple(tensor.shape) for name, tensor in weights.items()})
    assert parts is not None
    received = {name: weights[name][tuple(slice(*bounds) for bounds in part)] for name, part in parts.items()}
    assert weights.keys() == received.keys()
    sizes = [sum(tensor.numel() for tensor in tensors.values()) for tensors in (received, weights)]
    assert sizes[0] < 0.52 * sizes[1], "matrices are halved; norms are not"
    for _ in range(2):
        engine.load(((name, tensor.clone()) for name, tensor in received.items()), 3, in_parts=True)
    return None


def main(divided: str, kind: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    config = ModelConfig(path="pico")
    model = load_model(config, "token", device=torch.device("cpu"), trainable=False, seed=0)
    engine = VllmEngine(model.config, load_tokenizer(config), {"tensor_parallel_size": divided})
    load(engine, model, kind)
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
