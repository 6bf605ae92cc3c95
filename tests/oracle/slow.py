"""The losses as their papers write them, in loops over single tokens with Python floats.

Each takes the samples and, for each sample, a list with the policy's log-probability of every token; it returns the sum
over the loss's unit. None of this shares a line with the package.
"""

import math


def sigmoid(x):
    if x >= 0:
        return 1 / (1 + math.exp(-x))
    return math.exp(x) / (1 + math.exp(x))


def log_sigmoid(x):
    if x < -700:
        return x
    return -math.log(1 + math.exp(-x)) if x > -30 else x - math.log(1 + math.exp(x))


def total(values, mask):
    """Sum over the tokens that count."""
    result = 0.0
    for value, counts in zip(values, mask.tolist(), strict=True):
        if counts:
            result += value
    return result


def length(mask):
    """Tokens that count; an empty answer is divided by 1."""
    found = 0
    for counts in mask.tolist():
        if counts:
            found += 1
    return found if found else 1


def mean(values, mask):
    return total(values, mask) / length(mask)


def log_ratio(sample, logprobs, length_normalize=False):
    """log pi(y|x) - log ref(y|x), or its mean over tokens."""
    reference = sample.ref_logprobs.tolist()
    result = 0.0
    for policy, ref, counts in zip(logprobs, reference, sample.mask.tolist(), strict=True):
        if counts:
            result += policy - ref
    return result / length(sample.mask) if length_normalize else result


def pairs_of(samples, logprobs):
    for i in range(0, len(samples), 2):
        yield samples[i], logprobs[i], samples[i + 1], logprobs[i + 1]


def nll(samples, logprobs):
    result = 0.0
    for sample, row in zip(samples, logprobs, strict=True):
        result -= total(row, sample.mask)
    return result


def dft(samples, logprobs, at_rest=None):
    """Each token weighted by its own probability, which is behind a stop-gradient."""
    result = 0.0
    for sample, row, fixed in zip(samples, logprobs, at_rest or logprobs, strict=True):
        result -= total(
            [math.exp(w) * x if counts else 0.0 for w, x, counts in zip(fixed, row, sample.mask.tolist(), strict=True)],
            sample.mask,
        )
    return result


def shape(h, loss, beta, epsilon):
    """The losses on h = beta * margin; IPO on the margin itself."""
    if loss == "sigmoid":
        return -(1 - epsilon) * log_sigmoid(h) - epsilon * log_sigmoid(-h)
    if loss == "robust":
        clean, flipped = -log_sigmoid(h), -log_sigmoid(-h)
        return ((1 - epsilon) * clean - epsilon * flipped) / (1 - 2 * epsilon)
    if loss == "hinge":
        return max(0.0, 1 - h)
    assert loss == "ipo"
    return (h / beta - 1 / (2 * beta)) ** 2


def pair_shape(good, bad, loss, beta, epsilon, tau):
    """The losses on the rewards of both answers."""
    if loss == "apo_zero":
        return (1 - sigmoid(good)) + sigmoid(bad)
    if loss == "apo_down":
        return sigmoid(good) + (1 - sigmoid(good - bad))
    if loss == "exo_pair":  # KL(q || p), q the policy's preference, p = (1 - epsilon, epsilon)
        q = sigmoid(good - bad)
        return q * math.log(q / (1 - epsilon)) + (1 - q) * math.log((1 - q) / epsilon)
    if loss == "nca_pair":
        return -log_sigmoid(good) - (log_sigmoid(-good) + log_sigmoid(-bad)) / 2
    if loss == "bco_pair":
        return -log_sigmoid(good) - log_sigmoid(-bad)
    if loss == "sppo_hard":
        return (good / beta - 1 / (2 * beta)) ** 2 + (bad / beta + 1 / (2 * beta)) ** 2
    if loss == "discopop":
        share = sigmoid((good - bad) / tau)
        return (1 - share) * math.log(1 + math.exp(bad - good)) + share * math.exp(bad - good)
    return shape(good - bad, loss, beta, epsilon)


def f_score(ratio, kind, alpha):
    """f'(u) of arXiv:2309.16240 without its constant, u = policy / reference."""
    u = math.exp(ratio)
    if kind == "forward_kl":
        return -1 / u
    if kind == "js_divergence":
        return math.log(u / (1 + u))
    if kind == "alpha_divergence":
        return u ** (alpha - 1) / (alpha - 1)
    return ratio


def weighted_log_ratio(sample, row, other, ld_alpha, length_normalize):
    """The log-ratio, with a smaller weight of what is longer than the other answer."""
    limit, place, result = sum(other.mask.tolist()), 0, 0.0
    for policy, ref, counts in zip(row, sample.ref_logprobs.tolist(), sample.mask.tolist(), strict=True):
        if counts:
            place += 1
            result += (policy - ref) * (ld_alpha if place > limit else 1.0)
    return result / length(sample.mask) if length_normalize else result


def dpo(
    samples,
    logprobs,
    loss_type="sigmoid",
    beta=0.1,
    label_smoothing=0.0,
    sft_coef=0.0,
    length_normalize=False,
    loss_types=(),
    loss_weights=(),
    discopop_tau=0.05,
    f_divergence="reverse_kl",
    f_alpha=0.5,
    ld_alpha=1.0,
    weight_by_policy=False,
    at_rest=None,
):
    result, rest = 0.0, list(pairs_of(samples, at_rest or logprobs))
    weights = dict(zip(loss_types, loss_weights, strict=True)) if loss_types else {loss_type: 1.0}
    for number, (chosen, chosen_row, rejected, rejected_row) in enumerate(pairs_of(samples, logprobs)):
        scale = 1.0
        if weight_by_policy:  # arXiv:2406.11827 without its alignment; behind a stop-gradient
            _, fixed_good, _, fixed_bad = rest[number]
            scale = min(1.0, math.exp(mean(fixed_good, chosen.mask) + mean(fixed_bad, rejected.mask)))
        better = weighted_log_ratio(chosen, chosen_row, rejected, ld_alpha, length_normalize)
        worse = weighted_log_ratio(rejected, rejected_row, chosen, ld_alpha, length_normalize)
        good, bad = (beta * f_score(ratio, f_divergence, f_alpha) for ratio in (better, worse))
        for name, weight in weights.items():
            result += scale * weight * pair_shape(good, bad, name, beta, label_smoothing, discopop_tau)
        result += sft_coef * -mean(chosen_row, chosen.mask)
    return result


def aot(samples, logprobs, loss_type="aot", beta=0.1, label_smoothing=0.0, length_normalize=False):
    """Sorted numbers of the whole step are compared; Python's sort is all that it takes (arXiv:2406.05882)."""
    read = mean if length_normalize else total
    policy = [read(row, sample.mask) for sample, row in zip(samples, logprobs, strict=True)]
    reference = [read(sample.ref_logprobs.tolist(), sample.mask) for sample in samples]
    if loss_type == "aot":
        first = [policy[i] - policy[i + 1] for i in range(0, len(policy), 2)]
        second = [reference[i] - reference[i + 1] for i in range(0, len(policy), 2)]
    else:
        first = [policy[i] - reference[i] for i in range(0, len(policy), 2)]
        second = [policy[i] - reference[i] for i in range(1, len(policy), 2)]
    result = 0.0
    for a, b in zip(sorted(first), sorted(second), strict=True):
        result += shape(beta * (a - b), "sigmoid", beta, label_smoothing)
    return result


def simpo(samples, logprobs, loss_type="sigmoid", beta=2.5, gamma_beta_ratio=1.4, label_smoothing=0.0, sft_coef=0.0):
    gamma = gamma_beta_ratio * beta
    result = 0.0
    for chosen, chosen_row, rejected, rejected_row in pairs_of(samples, logprobs):
        h = beta * mean(chosen_row, chosen.mask) - beta * mean(rejected_row, rejected.mask) - gamma
        result += shape(h, loss_type, beta, label_smoothing) + sft_coef * -mean(chosen_row, chosen.mask)
    return result


def cpo(samples, logprobs, loss_type="sigmoid", beta=0.1, label_smoothing=0.0, sft_coef=1.0):
    result = 0.0
    for chosen, chosen_row, rejected, rejected_row in pairs_of(samples, logprobs):
        h = beta * total(chosen_row, chosen.mask) - beta * total(rejected_row, rejected.mask)
        result += shape(h, loss_type, beta, label_smoothing) + sft_coef * -mean(chosen_row, chosen.mask)
    return result


def orpo(samples, logprobs, odds_ratio_coef=0.1):
    def odds(row, mask):
        p = math.exp(min(mean(row, mask), -1e-6))  # the documented bound: odds stay finite at p = 1
        return p / (1 - p)

    result = 0.0
    for chosen, chosen_row, rejected, rejected_row in pairs_of(samples, logprobs):
        ratio = odds(chosen_row, chosen.mask) / odds(rejected_row, rejected.mask)
        result += -mean(chosen_row, chosen.mask) - odds_ratio_coef * log_sigmoid(math.log(ratio))
    return result


def kto(samples, logprobs, beta=0.1, desirable_weight=1.0, undesirable_weight=1.0, length_normalize=False):
    result = 0.0
    for sample, row in zip(samples, logprobs, strict=True):
        r, z = log_ratio(sample, row, length_normalize), sample.baseline
        if sample.label == 1:
            result += desirable_weight * (1 - sigmoid(beta * (r - z)))
        else:
            result += undesirable_weight * (1 - sigmoid(beta * (z - r)))
    return result


def reward(samples, scores, loss_type="sigmoid", use_margin=False, center_coef=0.0):
    """`scores`: a number a sample."""
    result = 0.0
    for i in range(0, len(samples), 2):
        chosen, rejected = scores[i], scores[i + 1]
        wanted = samples[i].margin if use_margin else 0.0
        if loss_type == "sigmoid":
            result -= math.log(sigmoid(chosen - rejected - wanted))
        else:
            result += math.log(1 + math.exp(rejected - chosen + wanted))
        result += center_coef * (chosen + rejected) ** 2
    return result


def prm(samples, choices):
    """`choices`: for each counted token in order, the log-probabilities of right and wrong."""
    result, step = 0.0, 0
    for sample in samples:
        for target, counts in zip(sample.targets.tolist(), sample.mask.tolist(), strict=True):
            if counts:
                right, wrong = choices[step]
                result -= target * right + (1 - target) * wrong
                step += 1
    assert step == len(choices)
    return result


def gradient(function, values, where, h=1e-3):
    """d function / d values[i][j] for each (i, j) of `where`, by the five-point stencil (error h^4)."""
    found = {}
    for i, j in where:
        samples = []
        for k in (-2, -1, 1, 2):
            moved = [list(row) for row in values]
            moved[i][j] += k * h
            samples.append(function(moved))
        two_down, down, up, two_up = samples
        found[i, j] = (two_down - 8 * down + 8 * up - two_up) / (12 * h)
    return found
