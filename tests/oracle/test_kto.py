"""KTO's baseline: mismatched pairs, the KL over the whole step, and nothing else that crosses samples."""

import numpy as np
import pytest
import torch

from posttrain.algorithms.kto import KTO
from posttrain.core.errors import UsageError
from posttrain.core.types import Outputs, Sample

from .batches import batch_of, samples


def row(prompt, answer, label, logprobs=None, reference=None) -> Sample:
    """`logprobs` and `reference` are of the answer's tokens."""
    blank = [0.0] * len(prompt)

    def stream(values):
        return None if values is None else np.array(blank + values, dtype=np.float32)

    return Sample(
        tokens=np.array(prompt + answer, dtype=np.int32),
        mask=np.array([False] * len(prompt) + [True] * len(answer)),
        label=label,
        logprobs=stream(logprobs),
        ref_logprobs=stream(reference),
    )


def fill(sample: Sample, policy: list[float], reference: list[float]) -> None:
    """What the helpers do; prompt positions hold nonsense that the mask must keep out."""
    prompt = [99.0] * (len(sample) - len(policy))
    sample.logprobs = np.array(prompt + policy, dtype=np.float32)
    sample.ref_logprobs = np.array([-99.0] * len(prompt) + reference, dtype=np.float32)


def test_mismatched_pairs_take_the_next_rows_answer():
    rows = [row([1, 2], [10, 11], 1), row([3], [20], 0), row([4, 5], [30, 31], 1)]
    prepared = KTO(KTO.Config()).prepare(rows)
    assert prepared[:3] == rows
    extra = prepared[3:]
    assert [pair.tokens.tolist() for pair in extra] == [[1, 2, 20], [3, 30, 31], [4, 5, 10, 11]]
    assert [pair.mask.tolist() for pair in extra] == [[0, 0, 1], [0, 1, 1], [0, 0, 1, 1]]
    assert [pair.label for pair in extra] == [-1, -1, -1]
    assert all(pair.tokens.dtype == np.int32 for pair in extra)


def test_a_prompt_is_not_matched_with_its_own_other_answer():
    """Pairs split into two rows lie side by side: the next row with another prompt is taken."""
    rows = [row([1], [10], 1), row([1], [11], 0), row([2], [20], 1), row([2], [21], 0)]
    extra = KTO(KTO.Config()).prepare(rows)[4:]
    assert [pair.tokens.tolist() for pair in extra] == [[1, 20], [1, 20], [2, 10], [2, 10]]


def test_one_prompt_throughout_is_matched_with_the_next_answer():
    rows = [row([1], [10], 1), row([1], [11], 0)]
    extra = KTO(KTO.Config()).prepare(rows)[2:]
    assert [pair.tokens.tolist() for pair in extra] == [[1, 11], [1, 10]]


def test_mismatched_pairs_are_no_longer_than_the_longest_row():
    rows = [row([1, 2, 3, 4], [10], 1), row([5], [20, 21, 22], 0)]
    extra = KTO(KTO.Config()).prepare(rows)[2:]
    assert [pair.tokens.tolist() for pair in extra] == [[1, 2, 3, 4, 20], [5, 10]]
    assert extra[0].mask.tolist() == [0, 0, 0, 0, 1]


def test_later_turns_keep_their_mask_and_an_empty_answer_adds_nothing():
    two_turns = row([1], [10, 11, 12], 1)
    two_turns.mask[2] = False
    empty = row([5, 6], [], 0)
    extra = KTO(KTO.Config()).prepare([two_turns, empty])[2:]
    assert [pair.tokens.tolist() for pair in extra] == [[1], [5, 6, 10, 11]]
    assert [pair.mask.tolist() for pair in extra] == [[0], [0, 0, 1, 0]]


def test_baseline_is_the_mean_log_ratio_of_the_mismatched_pairs():
    algo = KTO(KTO.Config())
    samples = algo.prepare([row([1], [10], 1), row([3], [20, 21], 0)])
    fill(samples[2], [-1.0, -1.5], [-2.0, -1.25])  # log-ratio 0.75
    fill(samples[3], [-0.5], [-0.75])  # log-ratio 0.25
    real = algo.assign_credit(samples)
    assert real == samples[:2]
    assert [sample.baseline for sample in real] == [0.5, 0.5]


def test_baseline_per_token_when_lengths_are_normalised():
    algo = KTO(KTO.Config(length_normalize=True))
    samples = algo.prepare([row([1], [10], 1), row([3], [20, 21], 0)])
    fill(samples[2], [-1.0, -1.5], [-2.0, -1.25])  # 0.75 over 2 tokens
    fill(samples[3], [-0.5], [-0.75])
    assert algo.assign_credit(samples)[0].baseline == (0.375 + 0.25) / 2


def test_baseline_is_never_negative():
    algo = KTO(KTO.Config())
    samples = algo.prepare([row([1], [10], 1), row([3], [20], 0)])
    fill(samples[2], [-2.0], [-1.0])
    fill(samples[3], [-1.0], [-1.5])
    assert [sample.baseline for sample in algo.assign_credit(samples)] == [0, 0]


def test_vanilla_measures_each_side_against_the_other():
    algo = KTO(KTO.Config(variant="vanilla"))
    rows = [
        row([1], [10], 1, logprobs=[-1.0], reference=[-2.0]),  # desirable: 1.0
        row([2], [20], 0, logprobs=[-1.0], reference=[-1.25]),  # undesirable: 0.25
        row([3], [30], 1, logprobs=[-2.0], reference=[-2.5]),  # desirable: 0.5
        row([4], [40], 0, logprobs=[-1.0], reference=[-1.75]),  # undesirable: 0.75
    ]
    assert algo.prepare(rows) == rows
    assert algo.assign_credit(rows) == rows
    assert [sample.baseline for sample in rows] == [0.5, 0.75, 0.5, 0.75]


def test_vanilla_clamps_each_side():
    algo = KTO(KTO.Config(variant="vanilla"))
    rows = [row([1], [10], 1, [-3.0], [-2.0]), row([2], [20], 0, [-1.0], [-2.0])]
    assert [sample.baseline for sample in algo.assign_credit(rows)] == [1.0, 0.0]


def test_only_what_measures_the_baseline_needs_the_policy():
    algo = KTO(KTO.Config())
    real, _, pair, _ = algo.prepare([row([1], [10], 1), row([3], [20], 0)])
    assert algo.needs() == {"ref_logprobs", "logprobs"}
    assert [algo.is_needed("logprobs", sample) for sample in (real, pair)] == [False, True]
    assert [algo.is_needed("ref_logprobs", sample) for sample in (real, pair)] == [True, True]
    assert KTO(KTO.Config(variant="vanilla")).is_needed("logprobs", real)


def test_only_the_baseline_crosses_samples():
    """A sample's gradient does not move when another sample's log-probabilities do."""
    rows = [row([1], [10, 11], 1, reference=[-1.0, -2.0]), row([3], [20], 0, reference=[-0.5])]
    batch, algo = batch_of(rows), KTO(KTO.Config(beta=0.5))
    gradients = []
    for other in (-0.5, -2.5):
        logprobs = torch.tensor([0, -1.0, -1.5, 0, other], dtype=torch.float64, requires_grad=True)
        algo.loss(Outputs(logprobs=logprobs), batch).total.backward()
        gradients.append(logprobs.grad.tolist())
    assert gradients[0][:3] == gradients[1][:3]
    assert gradients[0][4] != gradients[1][4]


def test_metrics_count_their_own_side():
    rows = [
        row([1], [10], 1, reference=[-2.0]),
        row([2], [20], 1, reference=[-1.0]),
        row([3], [30], 0, reference=[-1.0]),
    ]
    for sample in rows:
        sample.baseline = 0.25
    logprobs = torch.tensor([0, -1.0, 0, -1.5, 0, -2.0], dtype=torch.float64)
    metrics = KTO(KTO.Config(beta=0.5)).loss(Outputs(logprobs=logprobs), batch_of(rows)).metrics
    assert [value.item() for value in metrics["desirable_reward"]] == [0.5 * (1.0 - 0.5), 2]
    assert [value.item() for value in metrics["undesirable_reward"]] == [0.5 * -1.0, 1]
    assert metrics["kl"].item() == 0.75
    assert metrics["accuracy"].item() == 2  # the second desirable answer lies below the baseline


def test_steps_that_cannot_be_scored_are_refused():
    with pytest.raises(UsageError, match=r"at least 2 examples per step.*train\.batch_size"):
        KTO(KTO.Config()).prepare([row([1], [10], 1)])
    one_sided = [row([1], [10], 1, [-1.0], [-1.0]), row([2], [20], 1, [-1.0], [-1.0])]
    with pytest.raises(UsageError, match=r"algo\.variant vanilla needs desirable and undesirable"):
        KTO(KTO.Config(variant="vanilla")).assign_credit(one_sided)
    with pytest.raises(UsageError, match=r"algo\.precompute_reference.*algo\.variant"):
        KTO(KTO.Config(precompute_reference=True))


def test_without_pairs_and_without_a_baseline():
    rows = samples(np.random.default_rng(0), 1)
    algo = KTO(KTO.Config(variant="apo_zero_unpaired", precompute_reference=True))
    assert algo.needs() == {"ref_logprobs"} and algo.prepare(rows) == rows
    assert [row.baseline for row in algo.assign_credit(rows)] == [0.0] * len(rows)
