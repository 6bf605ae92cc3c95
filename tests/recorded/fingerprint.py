"""Computes a fingerprint of this machine's arithmetic: bits can be equal only where it equals the recorded one.

The bits of a float32 result depend on the torch build and on the kernels that it selects for the CPU, so the
fingerprint hashes results of the operations that training and generation use, at the sizes of the tiny models.
"""

import hashlib
import random

import numpy as np
import torch
import torch.nn.functional as F
import transformers


def fingerprint():
    """Returns versions and a hash of results that were computed with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        digest = hashlib.sha256()
        with torch.random.fork_rng(devices=[]):
            for tensor in results():
                digest.update(tensor.detach().float().numpy().tobytes())
    finally:
        torch.set_num_threads(threads)
    return {"torch": torch.__version__, "transformers": transformers.__version__, "operations": digest.hexdigest()}


def results():
    draws = torch.Generator().manual_seed(1)
    yield torch.tensor([random.Random(1).random(), np.random.default_rng(1).random()])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for rows, inner, columns in ((1, 128, 384), (7, 32, 48), (153, 128, 384), (153, 384, 128), (90, 128, 263)):
            left = torch.randn(rows, inner, generator=draws).to(dtype)
            right = torch.randn(columns, inner, generator=draws).to(dtype)
            yield left @ right.T
            yield F.linear(left, right, torch.ones(columns, dtype=dtype))
            yield left.T @ left
    wide = torch.randn(90, 263, generator=draws) * 3
    yield from (wide.softmax(-1), wide.log_softmax(-1), wide.logsumexp(-1), wide.exp(), wide.sigmoid(), F.silu(wide))
    yield from (F.gelu(wide), F.logsigmoid(wide), wide.rsqrt().nan_to_num(), wide.sum(0), wide.mean(), wide.std())
    yield from (F.layer_norm(wide, (263,)), F.rms_norm(wide, (263,)), wide.cumsum(-1), wide.cos(), wide.tanh())
    yield torch.multinomial(wide.softmax(-1), 1, generator=draws)
    for heads, length, size in ((4, 52, 32), (4, 9, 8)):
        query, key, value = torch.randn(3, 1, heads, length, size, generator=draws).unbind(0)
        yield F.scaled_dot_product_attention(query, key, value, is_causal=True)
        yield F.scaled_dot_product_attention(query[:, :, -1:], key, value)
    yield from trained(draws)


def trained(draws):
    """Yields the weights of a small network after two steps of AdamW, and its gradient norms."""
    weights = [
        torch.nn.Parameter(torch.randn(*shape, generator=draws) * 0.05)
        for shape in ((384, 128), (263, 384), (263, 128))
    ]
    optimizer = torch.optim.AdamW(weights, lr=1e-3)
    tokens = torch.randint(0, 263, (64,), generator=draws)
    for _ in range(2):
        hidden = F.silu(F.rms_norm(F.embedding(tokens, weights[2]), (128,)) @ weights[0].T)
        F.cross_entropy(hidden @ weights[1].T, tokens.roll(1)).backward()
        yield torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    yield from weights
