"""A beginning that neighbours have in common is computed once; losses and gradients stay what they are."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.attention.varlen
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.types import ForwardRequest, Sample
from posttrain.data.packing import collate, pack_into_micro_batches
from posttrain.nn import attention
from posttrain.nn.forward import ModelRunner, forward, kernel_shares_prefixes, verify_against_stock
from tests.tiny import NAMES, tiny_model

# Prompts shorter and longer than the windows of the tiny models (8), a group of one, an answer that is empty,
# neighbouring answers of equal length, and pieces of one padded group that are padded by more than a window.
GROUPS = [(20, (5, 12, 1)), (3, (9, 9)), (30, (4,)), (6, (0, 7, 16)), (11, (6, 6)), (40, (17, 17)), (20, (32, 32))]


def rows(groups=GROUPS, seed=0, alike=0):
    """(prompt length, answer lengths) of groups -> samples whose answers count."""
    rng = np.random.default_rng(seed)
    common, found = rng.integers(3, 60, alike), []
    for prompt, answers in groups:
        beginning = np.concatenate([common, rng.integers(3, 60, prompt)])
        for answer in answers:
            tokens = np.concatenate([beginning, rng.integers(3, 60, answer)]).astype(np.int32)
            mask = np.arange(len(tokens)) >= max(1, len(beginning))
            found.append(Sample(tokens=tokens, mask=mask, advantages=rng.normal(0, 1, len(tokens)).astype(np.float32)))
    return found


def packed(model):
    model.set_attn_implementation(attention.NAME)
    return ModelRunner.from_model(model)


def outcome(runner, batch, request):
    """Outputs and gradients of a weighted sum of all of them."""
    runner.model.zero_grad()
    out = forward(runner, batch, request)
    total = torch.zeros((), device=batch.tokens.device)
    found = {name: getattr(out, name) for name in (*request.names, "router_loss") if getattr(out, name) is not None}
    for value in found.values():
        weights = torch.randn(value.shape, generator=torch.Generator().manual_seed(1)).to(value.device)
        total = total + (weights * value).sum()
    total.backward()
    return {name: value.detach() for name, value in found.items()}, {
        name: p.grad.clone() for name, p in runner.model.named_parameters() if p.grad is not None
    }


def assert_same(found, expected, tolerance=1e-6):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            scale = max(1.0, float(value.abs().max()))
            assert float((ours[name] - value).abs().max()) <= tolerance * scale, name


def compare(runner, samples, request, share=1):
    shared, plain = (collate(samples, min_shared_prefix=share), collate(samples))
    assert shared.sharing is not None and plain.sharing is None
    assert len(shared.sharing.tokens) < len(plain.tokens)
    assert_same(outcome(runner, shared, request), outcome(runner, plain, request))


@pytest.mark.parametrize("name", NAMES)
def test_logprobs_and_gradients_equal_the_unshared(name):
    router_loss = 0.1 if name == "mixtral" else 0.0
    request = ForwardRequest(
        names=frozenset({"logprobs", "entropy", "choices"}),
        choice_ids=(5, 9, 11),
        entropy_gradient=True,
        router_loss=router_loss,
    )
    compare(packed(tiny_model(name)), rows(), request)


@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral"])
def test_scores_and_values_equal_the_unshared(name):
    compare(packed(tiny_model(name, head="score")), rows(), ForwardRequest(names=frozenset({"scores", "values"})))


def test_attention_sinks_are_kept():
    q, k, v = (torch.randn(1, 2, 11, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    samples = [
        Sample(tokens=np.array(t, dtype=np.int32), mask=np.arange(len(t)) > 0) for t in ([1, 2, 3, 4], [1, 2, 3, 9, 9])
    ]
    plain, shared = collate(samples), collate(samples, min_shared_prefix=1)
    at = shared.sharing.place.new_empty(len(shared.sharing.tokens))
    at[shared.sharing.place] = torch.arange(9)  # one of a shared token's places in the plain micro-batch
    q, k, v = (stream[:, :, shared.sharing.place] for stream in (q, k, v))
    sinks = torch.tensor([0.5, -1.0])
    for window in (None, 2):
        results = []
        for batch, streams in ((plain, (q, k, v)), (shared, [stream[:, :, at] for stream in (q, k, v)])):
            packing = attention.packing_for(batch, varlen_kernel=False)
            how = {"packing": packing, "sliding_window": window, "softcap": 3.0, "s_aux": sinks}
            results.append(attention.packed_attention(torch.nn.Module(), *streams, None, **how)[0][0])
        assert torch.allclose(results[1][shared.sharing.place], results[0], atol=1e-6)


group = st.tuples(st.integers(1, 24), st.lists(st.integers(0, 20), min_size=1, max_size=5))


@settings(max_examples=25, deadline=None)
@given(st.lists(group, min_size=1, max_size=4), st.integers(0, 12), st.integers(1, 16), st.integers(20, 150))
def test_any_groups_in_any_packs(groups, alike, share, budget):
    runner, samples = packed(tiny_model("mistral")), rows(groups, alike=alike)
    request = ForwardRequest()
    expected = forward(runner, collate(samples), request).logprobs.split([len(s) for s in samples])
    seen = []
    for members in pack_into_micro_batches(samples, budget, min_shared_prefix=share):
        batch = collate([samples[i] for i in members], min_shared_prefix=share)
        computed = len(batch.tokens if batch.sharing is None else batch.sharing.tokens)
        assert computed <= budget or len(members) == 1
        for i, stream in zip(members, forward(runner, batch, request).logprobs.split(batch.lengths), strict=True):
            assert torch.allclose(stream, expected[i], atol=5e-6)
        seen += members
    assert sorted(seen) == list(range(len(samples)))


def test_an_answer_sees_its_prompt_and_itself_alone():
    runner, samples = packed(tiny_model("llama")), rows([(20, (6, 8, 7))])

    def states():
        batch = collate(samples, min_shared_prefix=1)
        return runner.run_layers(batch).last_hidden_state[0][batch.sharing.place].split(batch.lengths)

    before = states()
    samples[1].tokens[20:] = 60
    for index, (a, b) in enumerate(zip(before, states(), strict=True)):
        assert torch.equal(a[:20], b[:20]) and torch.equal(a[20:], b[20:]) == (index != 1)
    for sample in samples:
        sample.tokens[0] = 60
    assert not any(torch.equal(a[-1], b[-1]) for a, b in zip(before, states(), strict=True))


def test_checkpointed_activations_and_shared_prefixes_go_together():
    model = tiny_model("qwen2").train()
    runner, request, batch = packed(model), ForwardRequest(), collate(rows(), min_shared_prefix=1)
    expected = outcome(runner, batch, request)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(outcome(runner, batch, request), expected, 0.0)


@pytest.mark.parametrize("name", NAMES)
def test_proof_allows_sharing(name):
    runner = packed(tiny_model(name))
    assert not runner.shares_prefixes
    verify_against_stock(runner)
    assert runner.shares_prefixes


def test_proof_forbids_sharing_that_goes_wrong(monkeypatch):
    runner = packed(tiny_model("llama"))
    right = attention.causal_mask_after_prefix
    monkeypatch.setattr(attention, "causal_mask_after_prefix", lambda before, *rest: right(before * 0, *rest))
    verify_against_stock(runner)
    assert not runner.shares_prefixes


def twin_of_the_kernel(behind):
    """varlen_attn in plain words; `behind`: queries stand at the last of their keys, as the flash kernel has it."""

    def varlen_attn(q, k, v, starts, key_starts, most, max_keys, *, scale, window_size, enable_gqa=True):
        parts = []
        for (a, b), (c, d) in zip(pairwise(starts.tolist()), pairwise(key_starts.tolist()), strict=True):
            assert b - a <= most and d - c <= max_keys
            back = torch.arange(b - a)[:, None] - torch.arange(d - c) + ((d - c) - (b - a)) * behind
            mask = (back >= 0) & (back <= (window_size[0] if window_size[0] >= 0 else 10**6))
            streams = (q[a:b].transpose(0, 1), k[c:d].transpose(0, 1), v[c:d].transpose(0, 1))
            out = torch.nn.functional.scaled_dot_product_attention(
                *streams, attn_mask=mask, scale=scale, enable_gqa=True
            )
            parts.append(out.transpose(0, 1))
        return torch.cat(parts)

    return varlen_attn


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_the_arguments_of_the_varlen_kernel(name, monkeypatch):
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", twin_of_the_kernel(behind=True))
    runner = packed(tiny_model(name))
    runner.varlen_kernel = True
    verify_against_stock(runner)
    assert runner.shares_prefixes
    compare(runner, rows(), ForwardRequest())


def test_a_kernel_that_puts_its_queries_elsewhere_is_not_used_to_share(monkeypatch):
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", twin_of_the_kernel(behind=False))
    runner = packed(tiny_model("llama"))
    runner.varlen_kernel = True
    assert not kernel_shares_prefixes(torch.float32, torch.device("cpu"))
    verify_against_stock(runner)
    assert not runner.shares_prefixes


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_flash_kernel_sees_shared_keys(name):
    """In half precision, next to the float32 of the plain route: shared is as near to it as unshared."""
    head = {"head_dim": 16, "hidden_size": 64}
    model = tiny_model(name, **head).cuda()
    samples, request = rows([(40, (9, 33, 1, 0)), (70, (20, 5)), (12, (8,))]), ForwardRequest()
    exact = outcome(packed(model), collate(samples, "cuda"), request)
    runner = packed(model.to(torch.bfloat16))
    assert runner.varlen_kernel
    verify_against_stock(runner)
    assert runner.shares_prefixes

    def error(batch):
        found, gradients = outcome(runner, batch, request)
        pairs = [(found["logprobs"], exact[0]["logprobs"]), *((gradients[n], exact[1][n]) for n in gradients)]
        return [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs]

    shared, plain = error(collate(samples, "cuda", min_shared_prefix=1)), error(collate(samples, "cuda"))
    assert all(s <= 1.5 * p + 0.01 for s, p in zip(shared, plain, strict=True)), (shared, plain)
