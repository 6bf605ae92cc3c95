"""NEFTune's noise: of the size of the paper, the same however a step is split, another in every step."""

import pytest
import torch

from posttrain.algorithms import ALGORITHMS
from posttrain.config.sections import ModelConfig, TrainConfig
from posttrain.core.types import Objective
from posttrain.data.packing import collate
from posttrain.nn.embedding_noise import EmbeddingNoise
from posttrain.train.learner import Learner
from tests.invariance.test_split import gradients, prepared
from tests.tiny import tiny_folder

ALPHA = 50.0  # large, so that a part that is missing is seen


def learner(path, tokens, seed=3, alpha=ALPHA):
    config = TrainConfig(micro_batch_tokens=tokens, neftune_noise_alpha=alpha)
    return Learner(ModelConfig(path=path), config, seed=seed)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("verb", ["sft", "dpo"])
def test_the_split_of_a_step_does_not_change_it(name, verb, tmp_path):
    path = str(tiny_folder(name, tmp_path))
    algo = ALGORITHMS[verb](ALGORITHMS[verb].Config())
    objective = Objective(request=algo.forward_request(len), loss=algo.loss, unit=algo.unit, group_size=algo.group_size)
    found = []
    for tokens, parts in ((4096, 1), (16, 1), (64, 2)):
        model = learner(path, tokens)
        samples = prepared(algo, model, alike=20)  # a prefix that would be shared
        middle = len(samples) // 2 if parts == 2 else len(samples)
        found.append(
            gradients(model, objective, [part for part in (samples[:middle], samples[middle:]) if part], samples)
        )
    for sums, grads in found[1:]:
        assert sums["loss"] == pytest.approx(found[0][0]["loss"], rel=1e-5)
        for key, gradient in grads.items():
            torch.testing.assert_close(gradient, found[0][1][key], rtol=1e-4, atol=1e-6)
    plain = learner(path, 4096, alpha=0.0)
    sums, _ = gradients(plain, objective, [samples], samples)
    assert sums["loss"] != pytest.approx(found[0][0]["loss"], rel=1e-3), "there is noise"
    noisy = learner(path, 4096)
    assert noisy.evaluate(samples, objective)["loss"][0] == plain.evaluate(samples, objective)["loss"][0]


def test_size_and_seeds_of_the_noise():
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(60, 32)
    noise = EmbeddingNoise(embedding, alpha=5.0, seed=1)
    algo = ALGORITHMS["sft"](ALGORITHMS["sft"].Config())
    batch = collate(prepared(algo)[:3])
    plain = embedding(batch.tokens[None])

    def drawn():
        with noise.added(batch):
            return (embedding(batch.tokens[None]) - plain)[0].split(batch.lengths)

    first = drawn()
    for part, length in zip(first, batch.lengths, strict=True):
        bound = 5.0 / (length * 32) ** 0.5
        assert part.abs().max() <= bound * 1.001 and part.abs().max() > 0.9 * bound and (part != 0).all()
    assert all(torch.equal(a, b) for a, b in zip(first, drawn(), strict=True))
    noise.step = 1
    assert not any(torch.equal(a, b) for a, b in zip(first, drawn(), strict=True))
    assert torch.equal(embedding(batch.tokens[None]), plain), "only within the block"
