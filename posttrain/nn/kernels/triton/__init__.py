"""The functions of kernels/reference.py, which documents each one, as Triton kernels.

Imported only where there is a GPU with Triton. In the forward direction one program works on one row (or one head of
it), so that the result of a row does not depend on the other rows.
"""

from posttrain.nn.kernels.triton.adapters import (
    add_low_rank,
    low_rank_inner,
    rows_by_adapter,
)
from posttrain.nn.kernels.triton.attention import (
    gather_backward,
    rotate_and_store,
    rotate_backward,
)
from posttrain.nn.kernels.triton.experts import (
    combine_rows,
    expert_linear,
    expert_weight_gradients,
    route,
    sort_by_expert,
    weighted_silu_and_mul_backward,
)
from posttrain.nn.kernels.triton.fp8 import (
    quantize_rows,
    quantized_linear,
)
from posttrain.nn.kernels.triton.layers import (
    add_norm,
    norm_backward,
    silu_and_mul,
    silu_and_mul_backward,
)
from posttrain.nn.kernels.triton.loss import (
    divergence,
    divergence_backward,
    target_logprobs,
    target_logprobs_backward,
)

__all__ = [
    "add_low_rank",
    "add_norm",
    "combine_rows",
    "divergence",
    "divergence_backward",
    "expert_linear",
    "expert_weight_gradients",
    "gather_backward",
    "low_rank_inner",
    "norm_backward",
    "quantize_rows",
    "quantized_linear",
    "rotate_and_store",
    "rotate_backward",
    "route",
    "rows_by_adapter",
    "silu_and_mul",
    "silu_and_mul_backward",
    "sort_by_expert",
    "target_logprobs",
    "target_logprobs_backward",
    "weighted_silu_and_mul_backward",
]
