"""Q4_K and Q6_K against the loops of llama.cpp's reference, written out for single blocks."""

import gguf
import numpy as np
import pytest
import torch

from posttrain.publish import k_quants

F = np.float32


def slow_affine(x, weights):
    """make_qkx2_quants of ggml-quants.c, with 15 codes, rmin -1, rdelta 0.1 and 20 steps."""
    low, high = min(x.min(), F(0)), x.max()
    if high == low:
        return F(0), -low
    sum_w, sum_x = weights.sum(dtype=F), (weights * x).sum(dtype=F)
    codes = np.clip(np.rint(15 / (high - low) * (x - low)), 0, 15)
    scale, minimum = (high - low) / 15, low
    best = (weights * (scale * codes + minimum - x) ** 2).sum(dtype=F)
    for step in range(21):
        codes = np.clip(np.rint(F(-1 + 0.1 * step + 15) / (high - minimum) * (x - minimum)), 0, 15).astype(F)
        sum_l, sum_l2, sum_xl = ((weights * v).sum(dtype=F) for v in (codes, codes * codes, codes * x))
        determinant = sum_w * sum_l2 - sum_l * sum_l
        if determinant > 0:
            this_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant
            this_min = (sum_l2 * sum_x - sum_l * sum_xl) / determinant
            if this_min > 0:
                this_min, this_scale = F(0), sum_xl / sum_l2
            error = (weights * (this_scale * codes + this_min - x) ** 2).sum(dtype=F)
            if error < best:
                best, scale, minimum = error, this_scale, this_min
    return scale, -minimum


def slow_q4_k(block):
    """The values that quantize_row_q4_K_ref stores."""
    pairs = []
    for x in block.reshape(8, 32):
        pairs.append(slow_affine(x, np.sqrt((x * x).mean(dtype=F)) + np.abs(x)))
    scales, minima = (np.array(values, dtype=F) for values in zip(*pairs, strict=True))
    d, d_min = (F(np.float16(max(values.max(), F(0)) / 63)) for values in (scales, minima))
    found = []
    for x, scale, minimum in zip(block.reshape(8, 32), scales, minima, strict=True):
        step = d * min(63, np.rint(63 / scales.max() * scale)) if scales.max() > 0 else F(0)
        offset = d_min * min(63, np.rint(63 / minima.max() * minimum)) if minima.max() > 0 else F(0)
        codes = np.clip(np.rint((x + offset) / step), 0, 15) if step else np.zeros(32)
        found.append(step * codes - offset)
    return np.concatenate(found)


def slow_symmetric(x):
    """make_qx_quants of ggml-quants.c with 32 codes, weighted by x * x."""
    largest = x[np.abs(x).argmax()]
    if abs(largest) < 1e-15:
        return F(0)
    best, scale = None, F(0)
    for step in (0, *range(-9, 0), *range(1, 10)):
        codes = np.clip(np.rint(-F(32 + 0.1 * step) / largest * x), -32, 31)
        sum_xl, sum_l2 = (x * x * x * codes).sum(dtype=F), (x * x * codes * codes).sum(dtype=F)
        if best is None or (sum_l2 > 0 and sum_xl * sum_xl > best * sum_l2):
            scale = sum_xl / sum_l2
            best = scale * sum_xl
    return scale


def slow_q6_k(block):
    scales = np.array([slow_symmetric(x) for x in block.reshape(16, 16)], dtype=F)
    largest = scales[np.abs(scales).argmax()]
    if abs(largest) < 1e-15:
        return np.zeros(256, dtype=F)
    d = F(np.float16(1 / (F(-128) / largest)))
    found = []
    for x, scale in zip(block.reshape(16, 16), scales, strict=True):
        step = d * min(127, np.rint(F(-128) / largest * scale))
        found.append(step * np.clip(np.rint(x / step), -32, 31) if step else np.zeros(16))
    return np.concatenate(found)


def blocks():
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(12, 256, generator=generator) * 0.02
    heavy = torch.randn(4, 256, generator=generator) ** 5
    special = torch.stack([torch.zeros(256), torch.full((256,), 0.5), torch.full((256,), -0.25), torch.arange(256.0)])
    special[3, :64] = 0
    return torch.cat([normal, heavy, special])


@pytest.mark.parametrize(("kind", "slow"), [("Q4_K", slow_q4_k), ("Q6_K", slow_q6_k)])
def test_the_same_values_as_the_reference(kind, slow):
    some = blocks()
    stored = k_quants.quantize(some, kind)
    found = gguf.quants.dequantize(stored.numpy(), gguf.GGMLQuantizationType[kind])
    for number, (block, values) in enumerate(zip(some.numpy(), found, strict=True)):
        expected = slow(block)
        # another order of a sum may turn the choice between two scales of equal error
        distances = [np.abs(v - block).sum() for v in (expected, values)]
        assert np.allclose(values, expected, rtol=1e-5, atol=1e-7) or distances[1] <= 1.001 * distances[0], number
    assert stored.shape[1] == {"Q4_K": 144, "Q6_K": 210}[kind]


def test_rows_of_a_matrix_stay_rows():
    matrix = torch.randn(3, 512, generator=torch.Generator().manual_seed(1))
    whole = k_quants.quantize(matrix, "Q6_K")
    assert whole.shape == (3, 420)
    assert torch.equal(whole[1], k_quants.quantize(matrix[1:2], "Q6_K")[0])
