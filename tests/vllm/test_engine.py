"""vLLM against the local engine and the trainer's own log-probabilities. Run with `make test-vllm`."""

import copy
import importlib.util
import random

import numpy as np
import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here", allow_module_level=True)

from posttrain.config.sections import ModelConfig, TrainConfig
from posttrain.core.errors import PosttrainError, UsageError
from posttrain.core.types import Sample, SamplingDistribution
from posttrain.engines.base import GenerationRequest, Sampling
from posttrain.engines.vllm.engine import VllmEngine
from posttrain.engines.vllm.options import parse_options
from posttrain.models import adapters
from posttrain.train.learner import Learner
from tests.tiny import tiny_folder

HEADS = {"hidden_size": 128, "intermediate_size": 96}  # 4 heads of 32, the smallest that vLLM has kernels for
MODELS = {
    "tied": ("qwen2", {}),
    "untied": ("llama", {"attention_bias": True}),
    "normed": ("qwen3", {"head_dim": 32}),
    "experts": ("mixtral", {}),
}


class Both:
    """A learner and a vLLM engine with its weights."""

    def __init__(self, folder, **model):
        self.learner = Learner(ModelConfig(path=str(folder), **model), TrainConfig(learning_rate=1e-2))
        self.engine = VllmEngine(self.learner.model.config, self.learner.tokenizer, {"max_num_seqs": 16})
        self.engine.load(weights_of(self.learner), 0)


def weights_of(learner):
    return learner.weights()  # those that are tied once


@pytest.fixture(scope="module", params=MODELS)
def both(request, tmp_path_factory):
    name, changes = MODELS[request.param]
    both = Both(tiny_folder(name, tmp_path_factory.mktemp("model"), **(HEADS | changes)))
    yield both
    both.engine.close()


def requests(lengths=(5, 11, 3, 8, 20, 1), each=2, seed=0):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(8, 60, n).astype(np.int32) for n in lengths]
    return [GenerationRequest(prompt=p, group=g, seed=g * 100 + i) for g, p in enumerate(prompts) for i in range(each)]


def test_greedy_equals_the_local_engine(both):
    sampling = Sampling(max_tokens=24, temperature=0.0, stop_ids=(5, 9, 17))
    theirs = both.engine.generate(requests(), sampling)
    ours = both.learner.generate(requests(), sampling)
    assert len({tuple(s.tokens) for s in ours}) > 4
    for mine, other in zip(ours, theirs, strict=True):
        assert other.tokens.tolist() == mine.tokens.tolist()
        assert other.mask.tolist() == mine.mask.tolist()
        assert (other.finish, other.group) == (mine.finish, mine.group)
        assert np.abs(other.logprobs - mine.logprobs).max() < 1e-4


SETTINGS = [
    {},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 50},
    {"temperature": 0.8, "top_p": 0.7},
    {"temperature": 1.7, "top_k": 5},
    {"temperature": 0.8, "top_k": 20, "min_p": 0.05},
    {"min_p": 0.2},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "min_p": 0.01},
    {"temperature": 1.5, "top_p": 0.8, "min_p": 0.2},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_logprobs_are_the_trainers(both, settings):
    samples = both.engine.generate(requests(), Sampling(max_tokens=20, **settings))
    assert len({tuple(s.tokens) for s in samples}) == len(samples)
    # A token whose probability is at the boundary of min_p up to rounding may be kept by one and not by the other.
    boundaries = [1.0, 1 + 1e-5, 1 - 1e-5] if "min_p" in settings else [1.0]
    distributions = [settings | {"min_p": settings.get("min_p", 0.0) * factor} for factor in boundaries]
    expected = [
        np.concatenate(both.learner.logprobs(samples, distribution=SamplingDistribution(**entry, min_p_first=True)))
        for entry in distributions
    ]
    found = np.concatenate([sample.logprobs for sample in samples])
    errors = np.abs(found - np.stack(expected))
    assert errors.min(axis=0).max() < 1e-4 and (errors[0] > 1e-4).sum() <= 1


def test_new_weights_change_the_completions_and_the_version(both):
    learner, engine = both.learner, both.engine
    sampling = Sampling(max_tokens=12, temperature=0.0)
    before = engine.generate(requests(each=1), sampling)
    old = copy.deepcopy(learner.model.state_dict())
    try:
        with torch.no_grad():
            for parameter in learner.model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        engine.load(weights_of(learner), 7)
        after, ours = engine.generate(requests(each=1), sampling), learner.generate(requests(each=1), sampling)
        assert [s.tokens.tolist() for s in after] == [s.tokens.tolist() for s in ours]
        assert [s.tokens.tolist() for s in after] != [s.tokens.tolist() for s in before]
        assert {sample.version for sample in after} == {7}
        samples = engine.generate(requests(), Sampling(max_tokens=12))
        for sample, logprobs in zip(samples, learner.logprobs(samples), strict=True):
            assert np.abs(sample.logprobs - logprobs).max() < 1e-4
        assert engine.check(samples, learner.logprobs(samples), 1e-4) < 1e-4
    finally:
        learner.model.load_state_dict(old)
        engine.load(weights_of(learner), 0)


def test_check_sees_weights_that_did_not_arrive(both):
    learner, engine = both.learner, both.engine
    samples = [Sample(tokens=r.prompt, mask=np.arange(len(r.prompt)) > 0) for r in requests((9, 14))]
    expected = learner.logprobs(samples)
    assert engine.check(samples, expected, 1e-4) < 1e-4
    wrong = {name: tensor.clone() for name, tensor in weights_of(learner)}
    wrong["model.layers.1.self_attn.o_proj.weight"].add_(0.3)
    try:
        engine.load(wrong.items(), 1)
        with pytest.raises(PosttrainError, match=r"differ from the trainer's .* version 1"):
            engine.check(samples, expected, 1e-2)
        wrong.pop("model.norm.weight")
        with pytest.raises(PosttrainError, match=r"no tensor for model\.norm\.weight"):
            engine.load(wrong.items(), 2)
    finally:
        engine.load(weights_of(learner), 0)
    assert engine.check(samples, expected, 1e-4) < 1e-4


def test_a_tied_weight_may_come_under_both_its_names(both):
    learner, engine = both.learner, both.engine
    samples = engine.generate(requests(each=1), Sampling(max_tokens=5))
    engine.load([(name, tensor * 0.5) for name, tensor in weights_of(learner)], 1)
    with pytest.raises(PosttrainError):
        engine.check(samples, learner.logprobs(samples), 1e-4)
    both_names = {name: tensor for name, tensor in learner.model.state_dict().items() if name == "lm_head.weight"}
    engine.load([*weights_of(learner), *both_names.items()], 0)
    engine.check(samples, learner.logprobs(samples), 1e-4)


def test_stop_texts_and_streaming(both):
    learner, engine = both.learner, both.engine
    heard = {}
    asked = requests(each=1)
    free = engine.generate(asked, Sampling(max_tokens=20), lambda i, token: heard.setdefault(i, []).append(token))
    assert [heard[i] for i in range(len(asked))] == [s.tokens[s.mask].tolist() for s in free]
    answer, decode = free[0].tokens[free[0].mask].tolist(), learner.tokenizer.decode
    stop = decode(answer[4:6])
    expected = next(answer[:n] for n in range(1, 21) if stop in decode(answer[:n]))
    (stopped,) = engine.generate(asked[:1], Sampling(max_tokens=20, stop_texts=("nowhere", stop)))
    assert stopped.tokens[stopped.mask].tolist() == expected and stopped.finish == "stop"
    sampling = Sampling(max_tokens=20, stop_texts=(stop,), temperature=0.0)
    for mine, other in zip(learner.generate(asked, sampling), engine.generate(asked, sampling), strict=True):
        assert other.tokens.tolist() == mine.tokens.tolist() and other.finish == mine.finish


def test_repetition_penalty_equals_the_local_engine(both):
    sampling = Sampling(max_tokens=16, temperature=0.0, repetition_penalty=1.3)
    for mine, other in zip(
        both.learner.generate(requests(), sampling), both.engine.generate(requests(), sampling), strict=True
    ):
        assert other.tokens.tolist() == mine.tokens.tolist()
        assert np.abs(other.logprobs - mine.logprobs).max() < 1e-4


def test_the_same_seeds_give_the_same_completions(both):
    first, second = (both.engine.generate(requests(), Sampling(max_tokens=10)) for _ in range(2))
    assert [s.tokens.tolist() for s in first] == [s.tokens.tolist() for s in second]
    (alone,) = both.engine.generate(requests()[3:4], Sampling(max_tokens=10))
    assert alone.tokens.tolist() == first[3].tokens.tolist()


def test_a_listener_that_fails_leaves_nothing_behind(both):
    def listen(index, token):
        raise KeyError("enough")

    with pytest.raises(KeyError):
        both.engine.generate(requests(), Sampling(max_tokens=10), listen)
    assert len(both.engine.generate(requests(each=1), Sampling(max_tokens=3))) == 6


def test_what_does_not_agree_with_the_trainer_is_refused(both):
    with pytest.raises(UsageError, match=r"128 tokens of prompt and.*max_model_len"):
        both.engine.generate(requests((128,)), Sampling(max_tokens=3))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"gpu_memory_utilisation": 0.4}, "no option gpu_memory_utilisation; did you mean gpu_memory_utilization?"),
        ({"logprobs_mode": "raw_logprobs"}, "logprobs_mode cannot be set"),
        ({"max_num_seqs": "many"}, "max-num-seqs"),
    ],
)
def test_options_are_vllms_own(option, message):
    with pytest.raises(UsageError, match=message):
        parse_options(option)


def test_options_are_read_as_vllm_reads_them():
    options = {
        "max_num_seqs": 7,
        "enforce_eager": True,
        "enable_prefix_caching": "false",
        "kv_cache_memory_bytes": "2G",
    }
    read = parse_options(options)
    assert read == {
        "max_num_seqs": 7,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 2 * 2**30,
    }


def test_random_numbers_and_threads_are_left_alone():
    learner = Learner(ModelConfig(path="pico"), TrainConfig())

    def draw():
        return torch.rand(2).tolist(), np.random.rand(), random.random()

    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    expected = draw()
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    threads, setter = torch.get_num_threads(), torch.set_num_threads
    engine = VllmEngine(learner.model.config, learner.tokenizer)
    assert draw() == expected
    assert (torch.get_num_threads(), torch.set_num_threads) == (threads, setter)
    engine.close()


def test_completions_of_a_group_share_their_prompt():
    learner = Learner(ModelConfig(path="pico"), TrainConfig())
    engine = VllmEngine(learner.model.config, learner.tokenizer, {"block_size": 32})
    engine.load(learner.weights(), 0)
    prompt = (np.arange(100) % 90 + 8).tolist()
    params = [engine.sampling_params(Sampling(max_tokens=3), seed, streaming=False) for seed in range(4)]
    assert [progress.output.num_cached_tokens for progress in engine.run([prompt] * 4, params)] == [0, 96, 96, 96]
    engine.load(learner.weights(), 1)
    assert engine.run([prompt], params[:1])[0].output.num_cached_tokens == 0, "computed with the weights before"
    engine.close()


def test_adapters_alone_are_sent(tmp_path):
    folder = tiny_folder("qwen2", tmp_path, **HEADS)
    learner = Learner(ModelConfig(path=str(folder), lora_rank=4, lora_alpha=16), TrainConfig())
    settings = adapters.adapter_config(learner.model)
    engine = VllmEngine(learner.model.config, learner.tokenizer, base=str(folder), adapter=settings)
    before = {}
    for version in range(3):
        with torch.no_grad():
            for parameter in learner.parameters().values():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        engine.load(adapters.adapter_tensors(learner.model).items(), version)
        samples = engine.generate(requests(), Sampling(max_tokens=12, temperature=0.8))
        for sample, logprobs in zip(
            samples, learner.logprobs(samples, distribution=SamplingDistribution(temperature=0.8)), strict=True
        ):
            assert sample.version == version and np.abs(sample.logprobs - logprobs).max() < 2e-4
        assert engine.check(samples, learner.logprobs(samples), 2e-4) < 2e-4
        before[version] = [sample.tokens.tolist() for sample in samples]
    assert before[0] != before[1] != before[2]
    engine.close()
