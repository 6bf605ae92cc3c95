"""Packed samples never see each other, on every architecture, and equal the stock model run on each alone."""

import numpy as np
import pytest
import torch

from posttrain.core.errors import PosttrainError
from posttrain.core.types import ForwardRequest, Sample
from posttrain.data.packing import collate
from posttrain.nn import attention
from posttrain.nn.forward import ModelRunner, forward, verify_against_stock
from tests.tiny import NAMES, tiny_model

LENGTHS = (3, 17, 9, 2, 30, 17, 8)


def samples(lengths=LENGTHS, seed=0):
    rng = np.random.default_rng(seed)
    return [Sample(tokens=rng.integers(3, 60, n).astype(np.int32), mask=np.arange(n) > 0) for n in lengths]


def packed(model):
    model.set_attn_implementation(attention.NAME)
    return ModelRunner.from_model(model)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lengths", [LENGTHS, (6, 6, 6)], ids=["ragged", "equal"])
def test_packed_logprobs_and_gradients_equal_the_stock_model_alone(name, lengths):
    model = tiny_model(name).eval()
    rows = samples(lengths)
    out = forward(packed(model), collate(rows), ForwardRequest(names=frozenset({"logprobs", "entropy"})))
    out.logprobs.sum().backward()
    found = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    model.set_attn_implementation("eager")
    for row, stream in zip(rows, out.logprobs.split([len(r) for r in rows]), strict=True):
        ids = torch.as_tensor(row.tokens).long()[None]
        logprobs = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
        expected = logprobs[:-1].gather(-1, ids[0, 1:, None])[:, 0]
        assert stream[0] == 0
        assert torch.allclose(stream[1:], expected, atol=2e-5)
        expected.sum().backward()
    for key, p in model.named_parameters():
        if p.grad is not None:
            assert torch.allclose(found[key], p.grad, atol=2e-4, rtol=2e-4), key


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_does_not_leak_into_its_neighbours(name):
    runner = packed(tiny_model(name).eval())
    rows = samples()
    before = runner.run_layers(collate(rows)).last_hidden_state[0].split(LENGTHS)
    rows[2].tokens[:] = 7
    after = runner.run_layers(collate(rows)).last_hidden_state[0].split(LENGTHS)
    for index, (a, b) in enumerate(zip(before, after, strict=True)):
        assert torch.equal(a, b) == (index != 2), f"sample {index}"


def test_a_window_shorter_than_the_sample_is_kept():
    model = tiny_model("mistral", sliding_window=4).eval()
    rows = samples((20,))
    last = packed(model).run_layers(collate(rows)).last_hidden_state[0, -1]
    rows[0].tokens[0] = 9  # out of sight of the last token: 2 layers x 3 back
    assert torch.equal(packed(model).run_layers(collate(rows)).last_hidden_state[0, -1], last)
    rows[0].tokens[-3] = 9
    assert not torch.equal(packed(model).run_layers(collate(rows)).last_hidden_state[0, -1], last)


def test_activation_checkpointing_gives_the_same_gradients():
    model = tiny_model("qwen2").train()
    runner = packed(model)

    def gradients():
        model.zero_grad()
        forward(runner, collate(samples()), ForwardRequest()).logprobs.sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    plain = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    again = gradients()
    assert all(torch.equal(plain[name], again[name]) for name in plain)


@pytest.mark.parametrize("name", NAMES)
def test_verification_accepts_supported_architectures(name):
    verify_against_stock(packed(tiny_model(name)))


def test_verification_refuses_a_leak(monkeypatch):
    runner = packed(tiny_model("llama"))
    monkeypatch.setattr(attention, "pad_by_length", lambda lengths, *_: one_padded_row(sum(lengths)))
    with pytest.raises(PosttrainError, match="packed forward pass differs"):
        verify_against_stock(runner)


def one_padded_row(total):
    return [attention.PaddedGroup(1, total, None, None)], None


def test_verification_refuses_an_unknown_scaling_of_the_head():
    model = tiny_model("llama")
    runner = packed(model)
    stock = model.forward

    def scaled(*args, **kwargs):
        out = stock(*args, **kwargs)
        out.logits = out.logits * 1.5
        return out

    model.forward = scaled
    with pytest.raises(PosttrainError, match="packed forward pass differs"):
        verify_against_stock(runner)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 50])
def test_flash_attn_4_gives_what_torchs_kernel_gives(window):
    """Where flash-attn-4 is installed; also for pieces that see more keys than they have queries."""
    pytest.importorskip("flash_attn.cute")
    generator = torch.Generator("cuda").manual_seed(0)
    lengths, key_lengths = torch.tensor([128, 256, 256, 77]), torch.tensor([128, 384, 384, 77])
    starts, key_starts = (torch.cat([torch.zeros(1), n.cumsum(0)]).int().cuda() for n in (lengths, key_lengths))
    ranges = (starts, key_starts, 256, 384)
    streams = [
        torch.randn(int(n.sum()), heads, 128, generator=generator, device="cuda", dtype=torch.bfloat16)
        for n, heads in ((lengths, 12), (key_lengths, 2), (key_lengths, 2))
    ]
    assert attention.has_flash_attn_4(streams[0])
    assert attention.kernels_agree(*streams, ranges, None, window)


@pytest.mark.parametrize("broken", [0, 1, 2, 3])
def test_a_kernel_whose_result_or_gradient_is_not_a_number_is_not_trusted(broken, monkeypatch):
    def torchs(q, k, v, *how):
        return q + 2 * k + 3 * v

    def newer(q, k, v, *how):
        if not broken:
            return torchs(q, k, v) * torch.nan
        streams = [q, k, v]
        streams[broken - 1] = streams[broken - 1] * 1.0
        streams[broken - 1].register_hook(lambda gradient: gradient * torch.nan)
        return torchs(*streams)

    monkeypatch.setattr(attention, "torch_varlen_kernel", torchs)
    monkeypatch.setattr(attention, "flash_attn_4_kernel", torchs)
    starts = torch.tensor([0, 3])  # and one key behind the last
    streams = [*[torch.ones(4, 2, 8)] * 3, (starts, starts, 3, 3), None, None]
    assert attention.kernels_agree(*streams)
    monkeypatch.setattr(attention, "flash_attn_4_kernel", newer)
    assert not attention.kernels_agree(*streams)


def test_what_a_kernel_leaves_behind_the_last_key_is_not_compared(monkeypatch):
    def kernel(q, k, v, *how):
        for stream in (k, v):
            stream.register_hook(lambda gradient: torch.cat([gradient[:3], gradient[3:] * torch.nan]))
        return q + 2 * k + 3 * v

    monkeypatch.setattr(attention, "torch_varlen_kernel", kernel)
    monkeypatch.setattr(attention, "flash_attn_4_kernel", kernel)
    starts = torch.tensor([0, 3])
    assert attention.kernels_agree(*[torch.ones(4, 2, 8)] * 3, (starts, starts, 3, 3), None, None)


def test_flash_attn_4_is_verified_again_where_samples_are_longer(monkeypatch):
    tried = []

    def kernels_agree(q, k, v, ranges, scaling, window):
        tried.append(ranges[2])
        return ranges[2] < 1000

    monkeypatch.setattr(attention, "verified", {})
    monkeypatch.setattr(attention, "has_flash_attn_4", lambda q: True)
    monkeypatch.setattr(attention, "kernels_agree", kernels_agree)
    streams, starts = [torch.zeros(8, 2, 64)] * 3, torch.zeros(2)
    found = [
        attention.flash_attn_4_is_verified(*streams, (starts, starts, longest, longest), None, None)
        for longest in (200, 256, 8000, 250, 7000)
    ]
    assert found == [True, True, False, True, False] and tried == [200, 8000]


def test_values_wider_than_keys_are_not_cut():
    """Latent attention whose values are wider than its keys: nothing pads them, and the result is the stock model's."""
    model = tiny_model("deepseek_v3", v_head_dim=24).eval()
    row = samples((9,))[0]
    found = forward(packed(model), collate([row]), ForwardRequest()).logprobs
    model.set_attn_implementation("eager")
    ids = torch.as_tensor(row.tokens).long()[None]
    expected = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)[:-1]
    assert torch.allclose(found[1:], expected.gather(-1, ids[0, 1:, None])[:, 0], atol=2e-5)
    keys, values = torch.ones(5, 2, 16), torch.ones(5, 2, 24)
    assert attention.as_wide_as_keys(keys, values).shape == values.shape
    with pytest.raises(AssertionError, match="wider than keys"):
        attention.as_wide_as_keys(values, keys)
