"""The engine against transformers' generate, a teacher-forced forward pass, and itself in other batches."""

import numpy as np
import pytest
import torch

from posttrain.core.types import ForwardRequest as Wanted
from posttrain.core.types import Sample
from posttrain.data.packing import collate
from posttrain.engines import local
from posttrain.engines.base import GenerationRequest, Sampling
from posttrain.engines.decoder import FusedDecoder
from posttrain.engines.executor import bucket_size
from posttrain.engines.local import LocalEngine
from posttrain.nn import attention
from posttrain.nn.forward import ModelRunner, forward
from posttrain.nn.layers import supports_fused_layers
from tests.tiny import MIXTURES, NAMES, tiny_model, tiny_tokenizer


def engine_for(model, slots=4):
    model.set_attn_implementation(attention.NAME)
    return LocalEngine(ModelRunner.from_model(model.eval()), tiny_tokenizer(), slots=slots)


@pytest.fixture(params=[False, True], ids=["own code", "fused"])
def fused(request, monkeypatch):
    """Whether mixtures of experts use the fused decoder, as they do on a GPU."""
    if request.param:
        monkeypatch.setattr(FusedDecoder, "supports", staticmethod(supports_fused_layers))
    return request.param


def prompts(lengths=(5, 11, 3, 8, 20, 1), seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(8, 60, n).astype(np.int32) for n in lengths]


@pytest.mark.parametrize("name", MIXTURES)
def test_greedy_with_experts_equals_transformers_generate(name, fused):
    test_greedy_equals_transformers_generate(name)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_equals_transformers_generate(name):
    model = tiny_model(name).eval()
    asked = prompts()
    model.set_attn_implementation("eager")
    expected = []
    for prompt in asked:
        ids = torch.as_tensor(prompt).long()[None]
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0
        )
        expected.append(out[0, len(prompt) :].tolist())
    stops = model.generation_config.eos_token_id
    stops = tuple(stops) if isinstance(stops, list) else (stops,)
    requests = [GenerationRequest(prompt=prompt, group=i) for i, prompt in enumerate(asked)]
    found = engine_for(model, slots=3).generate(requests, Sampling(max_tokens=12, temperature=0.0, stop_ids=stops))
    for prompt, sample, tokens in zip(asked, found, expected, strict=True):
        assert sample.tokens[: len(prompt)].tolist() == prompt.tolist()
        assert sample.tokens[len(prompt) :].tolist() == tokens
        assert sample.mask.tolist() == [False] * len(prompt) + [True] * len(tokens)
        assert sample.finish == ("stop" if tokens[-1] in stops else "length")


SETTINGS = [
    {},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "min_p": 0.01},
    {"temperature": 1.7, "top_k": 5},
    {"top_p": 0.5},
    {"min_p": 0.2},
]


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "mistral", "deepseek_v3", "mixtral"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_logprobs_equal_a_teacher_forced_pass(name, settings):
    from posttrain.core import ops

    model = tiny_model(name).eval()
    engine = engine_for(model)
    requests = [GenerationRequest(prompt=p, group=i, seed=i) for i, p in enumerate(prompts())]
    for sample in engine.generate(requests, Sampling(max_tokens=15, **settings)):
        hidden = engine.runner.run_layers(collate([sample])).last_hidden_state[0]
        logprobs = ops.tempered(engine.runner.logits(hidden[:-1]), **settings).log_softmax(-1)
        expected = logprobs.gather(-1, torch.as_tensor(sample.tokens[1:]).long()[:, None])[:, 0].detach().numpy()
        assert np.abs(sample.logprobs[1:] - expected)[sample.mask[1:]].max() < 1e-5


def test_plain_sampling_agrees_with_the_trainer():
    model = tiny_model("qwen2").eval()
    engine = engine_for(model)
    samples = engine.generate(
        [GenerationRequest(prompt=p, seed=i) for i, p in enumerate(prompts())], Sampling(max_tokens=9)
    )
    out = forward(engine.runner, collate(samples), Wanted())
    theirs = np.concatenate([sample.logprobs for sample in samples])
    assert np.abs(out.logprobs.detach().numpy() - theirs).max() < 1e-5


def test_a_completion_does_not_depend_on_its_batch():
    model = tiny_model("llama").eval()
    requests = [
        GenerationRequest(prompt=p, group=i // 2, seed=100 + i)
        for i, p in enumerate(p for p in prompts() for _ in "ab")
    ]
    sampling = Sampling(max_tokens=20, stop_ids=(2, 9, 17))
    together = engine_for(model, slots=5).generate(requests, sampling)
    for request, sample in zip(requests, together, strict=True):
        (alone,) = engine_for(model, slots=1).generate([request], sampling)
        assert alone.tokens.tolist() == sample.tokens.tolist()
    assert len({tuple(s.tokens[: len(r.prompt) + 4]) for r, s in zip(requests, together, strict=True)}) > 10
    assert {sample.finish for sample in together} == {"stop", "length"}


def test_samples_follow_the_distribution():
    model = tiny_model("llama").eval()
    prompt = prompts((6,))[0]
    engine = engine_for(model, slots=64)
    drawn = 4000
    samples = engine.generate([GenerationRequest(prompt=prompt, seed=i) for i in range(drawn)], Sampling(max_tokens=1))
    counts = np.bincount([int(sample.tokens[-1]) for sample in samples], minlength=104)
    hidden = engine.runner.run_layers(collate([Sample(tokens=prompt, mask=np.zeros(6, dtype=bool))])).last_hidden_state[
        0, -1:
    ]
    expected = engine.runner.logits(hidden).softmax(-1)[0].detach().numpy() * drawn
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert statistic < 103 + 4 * (2 * 103) ** 0.5  # chi-square with 103 degrees of freedom, 4 standard deviations


def test_stop_text_and_streaming():
    model = tiny_model("llama").eval()
    engine = engine_for(model)
    heard = []
    requests = [GenerationRequest(prompt=p, seed=i) for i, p in enumerate(prompts())]
    free = engine.generate(requests, Sampling(max_tokens=20), on_token=lambda i, token: heard.append((i, token)))
    for index, (request, sample) in enumerate(zip(requests, free, strict=True)):
        assert [token for i, token in heard if i == index] == sample.tokens[len(request.prompt) :].tolist()
    text = engine.tokenizer.decode(free[0].tokens[len(requests[0].prompt) :])
    stop = text[5:7]
    (stopped,) = engine.generate(requests[:1], Sampling(max_tokens=20, stop_texts=(stop,)))
    answer = engine.tokenizer.decode(stopped.tokens[len(requests[0].prompt) :])
    assert stopped.finish == "stop" and answer == text[: text.index(stop) + len(stop)]


def test_streaming_reports_each_token_once_while_others_start_and_finish():
    engine = engine_for(tiny_model("llama").eval(), slots=3)
    requests = [GenerationRequest(prompt=p, seed=i) for i, p in enumerate(prompts((5, 3, 9, 2, 7, 4, 6, 8, 1, 5)))]
    heard = {}
    samples = engine.generate(
        requests,
        Sampling(max_tokens=30, stop_ids=tuple(range(8, 16)), stop_texts=("zq",)),
        on_token=lambda i, token: heard.setdefault(i, []).append(token),
    )
    assert len({int(sample.mask.sum()) for sample in samples}) > 3  # they end at different times
    for index, sample in enumerate(samples):
        assert heard[index] == sample.tokens[sample.mask].tolist()


def test_repetition_penalty_equals_transformers():
    model = tiny_model("llama").eval()
    prompt = prompts((9,))[0]
    ids = torch.as_tensor(prompt).long()[None]
    model.set_attn_implementation("eager")
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=10,
        do_sample=False,
        repetition_penalty=1.3,
        pad_token_id=0,
    )
    (sample,) = engine_for(model).generate(
        [GenerationRequest(prompt=prompt)],
        Sampling(max_tokens=10, temperature=0.0, repetition_penalty=1.3, stop_ids=(2,)),
    )
    assert sample.tokens.tolist() == out[0].tolist()


class AsOnAGPU(LocalEngine):
    """Runs on a CPU as on a GPU, without capture: few step sizes, a check every few steps, prefills of many prompts."""

    class Eager:
        def __init__(self):
            self.sizes = []

        def run(self, key, function):
            self.sizes.append(key[0])
            function()

    def allocate(self, *sizes):
        executor = super().allocate(*sizes)
        executor.graphs, executor.bucketed = self.eager, True
        return executor

    @property
    def eager(self):
        self.__dict__.setdefault("run_eagerly", self.Eager())
        return self.run_eagerly


SOME_STOPS = (8, 9, 10)


def test_bucket_sizes():
    counts = (1, 2, 8, 9, 33, 64, 65, 129, 192, 193, 300, 385, 512, 513)
    assert [bucket_size(n) for n in counts] == [1, 8, 8, 32, 64, 64, 128, 192, 192, 256, 384, 512, 512, 768]


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"top_p": 0.7}, {"temperature": 0.0}, {"repetition_penalty": 1.4}, {"stop_texts": ("e", "a", "xy")}],
    ids=str,
)
def test_completions_are_the_same_when_the_host_checks_rarely(name, settings):
    model = tiny_model(name).eval()
    asked = [p for p in prompts((5, 11, 3, 8, 20, 1, 9, 14, 2, 6), seed=3) for _ in range(6)]
    requests = [GenerationRequest(prompt=p, group=i // 6, seed=i) for i, p in enumerate(asked)]
    sampling = Sampling(max_tokens=40, stop_ids=SOME_STOPS, **settings)
    expected = engine_for(model, slots=7).generate(requests, sampling)
    engine = AsOnAGPU(engine_for(model).runner, tiny_tokenizer(), slots=32)
    found = engine.generate(requests, sampling)
    same = [(a, b) for a, b in zip(found, expected, strict=True) if a.tokens.tolist() == b.tokens.tolist()]
    assert len(same) >= len(found) - 1  # a last bit may put a boundary between two tokens elsewhere
    for sample, other in same:
        assert (sample.finish, sample.group) == (other.finish, other.group)
        assert np.abs(sample.logprobs - other.logprobs).max() < 1e-5
    if not settings:
        assert {sample.finish for sample in found} == {"stop", "length"}
        assert set(engine.eager.sizes) >= {32, 8}  # smaller steps as the batch thins out


def test_an_optimizer_step_changes_what_is_generated():
    """Weights that the engine joins in storage are still those that the optimizer writes and autograd reads."""
    model = tiny_model("qwen2").eval()
    engine = engine_for(model)
    requests = [GenerationRequest(prompt=p, seed=i) for i, p in enumerate(prompts())]
    engine.generate(requests, Sampling(max_tokens=4))
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    batch = collate(engine.generate(requests, Sampling(max_tokens=12)))
    forward(engine.runner, batch, Wanted()).logprobs.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    torch.optim.SGD(model.parameters(), lr=0.05).step()
    after = engine.generate(requests, Sampling(max_tokens=12))
    out = forward(engine.runner, collate(after), Wanted())
    assert np.abs(out.logprobs.detach().numpy() - np.concatenate([s.logprobs for s in after])).max() < 1e-5
    assert addresses == [parameter.data_ptr() for parameter in model.parameters()]


def test_weights_that_moved_are_found_again():
    model = tiny_model("llama").eval()
    engine = engine_for(model)
    requests = [GenerationRequest(prompt=p, seed=i) for i, p in enumerate(prompts())]
    first = engine.generate(requests, Sampling(max_tokens=8))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.clone() * 1.1
    second = engine.generate(requests, Sampling(max_tokens=8))
    assert [s.tokens.tolist() for s in first] != [s.tokens.tolist() for s in second]
    out = forward(engine.runner, collate(second), Wanted())
    assert np.abs(out.logprobs.detach().numpy() - np.concatenate([s.logprobs for s in second])).max() < 1e-5


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_packed_weights_give_the_same(name, monkeypatch):
    model = tiny_model(name).eval()
    engine = engine_for(model)
    requests = [GenerationRequest(prompt=p, seed=i) for i, p in enumerate(prompts())]
    expected = engine.generate(requests, Sampling(max_tokens=12))
    monkeypatch.setattr(local, "MIN_PACKED_REQUESTS", 1)
    monkeypatch.setattr(local, "MIN_PACKED_TOKENS", 1)
    packed = []
    found = engine.generate(requests, Sampling(max_tokens=12), on_token=lambda *_: packed.append(is_packed(engine)))
    assert all(packed) and not is_packed(engine)  # the copy is gone when all is said
    for one, other in zip(found, expected, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist() and np.abs(one.logprobs - other.logprobs).max() < 1e-5


def is_packed(engine):
    return engine.decoder.packed


def test_frozen_weights_are_packed_once(monkeypatch):
    monkeypatch.setattr(local, "MIN_PACKED_REQUESTS", 1)
    monkeypatch.setattr(local, "MIN_PACKED_TOKENS", 1)
    model = tiny_model("llama").eval()
    engine = engine_for(model)
    request = GenerationRequest(prompt=prompts()[0], seed=3)
    (expected,) = engine.generate([request], Sampling(max_tokens=9))
    engine.frozen, copies, samples = True, [], []
    for length in (9, 9, 200):  # the last one needs more room
        samples += engine.generate([request], Sampling(max_tokens=length))
        copies.append(engine.decoder.head.packed)
    assert copies[0] is copies[1] and all(copy is not None for copy in copies)
    assert all(sample.tokens[: len(expected.tokens)].tolist() == expected.tokens.tolist() for sample in samples)


def test_weights_that_change_are_packed_again(monkeypatch):
    monkeypatch.setattr(local, "MIN_PACKED_REQUESTS", 1)
    monkeypatch.setattr(local, "MIN_PACKED_TOKENS", 1)
    model = tiny_model("qwen2_untied").eval()
    engine = engine_for(model)
    versions = []

    def louder():
        model.lm_head.weight.data.mul_(1.5)  # in place, as an optimizer writes it; nothing in the cache depends on it
        versions.append(len(versions) + 1)
        return versions[-1]

    for between in (None, louder):  # before an answer, and in the middle of one
        louder()
        (sample,) = engine.generate(
            [GenerationRequest(prompt=prompts()[0], seed=1)], Sampling(max_tokens=6), between_steps=between
        )
        out = forward(engine.runner, collate([sample]), Wanted()).logprobs.detach().numpy()
        error = np.abs(out - sample.logprobs)[-6:]
        assert error[-1] < 1e-5 and (error[:-1].max() < 1e-5) == (between is None)


def test_packing_respects_host_memory(monkeypatch):
    monkeypatch.setattr(local, "MIN_PACKED_REQUESTS", 1)
    monkeypatch.setattr(local, "MIN_PACKED_TOKENS", 1)
    engine = engine_for(tiny_model("llama").eval())
    size = sum(parameter.nbytes for parameter in engine.runner.model.parameters())
    for memory, packs in ((size * 15, False), (size * 17, True)):
        monkeypatch.setattr(local, "host_memory", lambda memory=memory: memory)
        found = set()
        note = lambda *_, found=found: found.add(is_packed(engine))  # noqa: E731
        engine.generate([GenerationRequest(prompt=prompts()[0])], Sampling(max_tokens=2), on_token=note)
        assert found == {packs}


def test_joined_weights_are_saved_as_before(tmp_path):
    model = tiny_model("qwen3").eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine_for(model).generate([GenerationRequest(prompt=prompts()[0])], Sampling(max_tokens=2))
    model.save_pretrained(tmp_path)
    after = type(model).from_pretrained(tmp_path).state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("together", [False, True])
def test_adapters_take_part(together, monkeypatch):
    """Computed by peft's modules, as on a CPU, and together, as on an accelerator."""
    monkeypatch.setattr("posttrain.engines.decoder.fuses_adapters", lambda device: together)
    from posttrain.config.sections import ModelConfig
    from posttrain.models.adapters import add_adapters

    model = tiny_model("qwen2").eval()
    engine = engine_for(model)
    requests = [GenerationRequest(prompt=p, seed=i) for i, p in enumerate(prompts())]
    before = engine.generate(requests, Sampling(max_tokens=8))
    add_adapters(
        model, ModelConfig(path="tiny", lora_rank=4, lora_target_modules=("q_proj", "up_proj", "down_proj")), "token"
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter.data, generator=torch.Generator().manual_seed(0))
    after = engine.generate(requests, Sampling(max_tokens=8))
    assert [s.tokens.tolist() for s in before] != [s.tokens.tolist() for s in after]
    out = forward(engine.runner, collate(after), Wanted())
    assert np.abs(out.logprobs.detach().numpy() - np.concatenate([s.logprobs for s in after])).max() < 1e-5


@pytest.mark.parametrize("name", sorted({*NAMES, *MIXTURES}))
def test_which_models_the_fused_decoder_supports(name):
    dense = ("llama", "qwen2", "qwen2_untied", "qwen3", "mistral")
    model = tiny_model(name)
    assert supports_fused_layers(model) == (name in (*dense, *MIXTURES))
    assert FusedDecoder.supports(model) == (name in dense), "on a CPU"


@pytest.mark.parametrize("name", MIXTURES)
def test_completions_of_experts_are_the_same_in_any_batch(name, monkeypatch):
    """By the fused decoder: with few and many slots, when the host checks rarely, and with packed weights."""
    monkeypatch.setattr(FusedDecoder, "supports", staticmethod(supports_fused_layers))
    model = tiny_model(name).eval()
    asked = [p for p in prompts((5, 11, 3, 8, 20, 1, 9), seed=3) for _ in range(6)]
    requests = [GenerationRequest(prompt=p, group=i // 6, seed=i) for i, p in enumerate(asked)]
    sampling = Sampling(max_tokens=20, stop_ids=SOME_STOPS)
    expected = engine_for(model, slots=7).generate(requests, sampling)
    rarely = AsOnAGPU(engine_for(model).runner, tiny_tokenizer(), slots=32)
    found = [rarely.generate(requests, sampling)]
    assert rarely.decoder is not None and rarely.decoder.can_capture
    monkeypatch.setattr(local, "MIN_PACKED_REQUESTS", 1)
    monkeypatch.setattr(local, "MIN_PACKED_TOKENS", 1)
    found.append(engine_for(model, slots=5).generate(requests, sampling))
    for samples in found:
        same = [(a, b) for a, b in zip(samples, expected, strict=True) if a.tokens.tolist() == b.tokens.tolist()]
        assert len(same) >= len(samples) - 1  # a last bit may put a boundary between two tokens elsewhere
        assert all(np.abs(a.logprobs - b.logprobs).max() < 1e-5 for a, b in same)
    batch = collate(expected)
    out = forward(engine_for(model).runner, batch, Wanted())
    assert np.abs(out.logprobs.detach().numpy() - np.concatenate([s.logprobs for s in expected])).max() < 1e-5


def test_dynamic_rope_is_not_supported_by_the_fused_decoder():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    assert not FusedDecoder.supports(tiny_model("llama", rope_parameters=rope))


def test_completions_are_reported_as_soon_as_they_are_finished():
    model = tiny_model("llama").eval()
    requests = [GenerationRequest(prompt=prompt, group=i, seed=i) for i, prompt in enumerate(prompts())]
    sampling = Sampling(max_tokens=8, temperature=1.0)
    told = []
    samples = engine_for(model, slots=2).generate(requests, sampling, on_completion=lambda i, s: told.append((i, s)))
    assert sorted(index for index, _ in told) == list(range(len(requests)))
    assert [index for index, _ in told][:2] in ([0, 1], [1, 0]), "two slots: these two come first"
    assert all(samples[index] is sample for index, sample in told)
