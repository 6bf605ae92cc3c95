"""Policy gradients as their papers write them, in loops over single tokens with Python floats.

`rows` are the current log-probabilities of each sample's tokens and may be moved to find a gradient; `now` are the same
numbers at rest, for what a paper puts behind a stop-gradient. None of this shares a line with the package.
"""

import math


def counted(sample):
    return [i for i, counts in enumerate(sample.mask.tolist()) if counts]


def clip(x, low, high):
    return max(low, min(high, x))


def kl_k(log_ratio, estimator):
    """http://joschu.net/blog/kl-approx.html, with r = reference / policy and x drawn from the policy."""
    r = math.exp(-log_ratio)
    return {"k1": -math.log(r), "k2": math.log(r) ** 2 / 2, "k3": r - 1 - math.log(r)}[estimator]


def old_of(sample, row_now):
    return row_now if sample.old_logprobs is None else sample.old_logprobs.tolist()


def sampler_weight(kind, gaps, t, mode, low, high):
    """What corrects the difference of sampler and trainer at token t; `gaps`: {position: log(trainer / sampler)}."""
    if not high:
        return 1.0
    product = math.exp(sum(gaps.values()))
    average = math.exp(sum(gaps.values()) / len(gaps))
    token = average if kind in ("gspo", "gmpo") else math.exp(gaps[t])
    if mode == "token_truncate":
        return clip(token, low, high)
    if mode == "token_mask":  # IcePop
        return token if low <= token <= high else 0.0
    if mode == "sequence_truncate":
        return clip(product, low, high)
    if mode == "sequence_mask":
        return product if low <= product <= high else 0.0
    assert mode == "geometric_mask"
    return token if low <= average <= high else 0.0


def surrogate(kind, ratio, at_rest, row_t, a, low, high, dual_clip, temperatures):
    """What is to be made large at a token with advantage a."""
    bounded = clip(ratio, 1 - low, 1 + high) if low or high else ratio
    if kind == "cispo":
        return (clip(at_rest, 1 - low, 1 + high) if low or high else at_rest) * a * row_t
    if kind == "sapo":  # f(r) = sigmoid(tau (r - 1)) 4 / tau
        tau = temperatures[0] if a > 0 else temperatures[1]
        return 4 / tau / (1 + math.exp(-tau * (ratio - 1))) * a
    found = min(ratio * a, bounded * a)
    return max(found, dual_clip * a) if dual_clip and a < 0 else found


def geometric_mean_ratio(row, old, where, a, low, high):
    """arXiv:2507.20673: the product of min(ratio^s, clip(ratio)^s)^s to the power 1/|y|; s: sign of the advantage."""
    product = 1.0
    for t in where:
        ratio = math.exp(row[t] - old[t])
        bounded = clip(ratio, math.exp(-low), math.exp(high)) if low or high else ratio
        product *= (min if a > 0 else max)(ratio, bounded)
    return product ** (1 / len(where))


def token_terms(
    kind, sample, row, row_now, low, high, cap, floor, mode, dual_clip, temperatures, off_policy_mask_threshold
):
    """What is to be made large at each counted token, without KL and entropy."""
    old, sampled = old_of(sample, row_now), sample.logprobs.tolist()
    advantages = sample.advantages.tolist()
    where = counted(sample)
    gaps = {t: old[t] - sampled[t] for t in where}
    drift = sum(sampled[t] - row_now[t] for t in where) / max(1, len(where))
    terms = {}
    for t in where:
        ratio = math.exp(row[t] - old[t])
        if kind == "gspo":  # s = (pi(y|x) / pi_old(y|x)) ** (1 / |y|)
            ratio = math.exp(sum(row[k] - old[k] for k in where) / len(where))
        if kind == "gmpo":
            term = geometric_mean_ratio(row, old, where, advantages[t], low, high) * advantages[t]
        else:
            at_rest = math.exp(row_now[t] - old[t])
            term = surrogate(kind, ratio, at_rest, row[t], advantages[t], low, high, dual_clip, temperatures)
        if off_policy_mask_threshold and advantages[t] < 0 and drift > off_policy_mask_threshold:
            term = 0.0
        terms[t] = term * sampler_weight(kind, gaps, t, mode, floor, cap)
    return terms


def highest(values, fraction):
    """Positions of the highest share of the values, rounded up; of equal ones the earlier."""
    order = sorted(values, key=lambda t: (-values[t], t))
    return set(order[: math.ceil(fraction * len(values) - 1e-6)])


def largest_covariances(samples, fraction):
    """The tokens, as (sample, place), with the largest covariance of log-probability and advantage over the batch."""
    places = [(i, t) for i, sample in enumerate(samples) for t in counted(sample)]
    logprobs = {(i, t): old_of(samples[i], samples[i].logprobs.tolist())[t] for i, t in places}
    gains = {(i, t): samples[i].advantages.tolist()[t] for i, t in places}
    centre = [mean(list(numbers.values())) for numbers in (logprobs, gains)]
    covariance = {at: (logprobs[at] - centre[0]) * (gains[at] - centre[1]) for at in places}
    return set(sorted(places, key=lambda at: -covariance[at])[: max(1, int(fraction * len(places)))])


def length_weighted(rewards, lengths):
    """arXiv:2505.23585: the reward minus the mean weighted by lengths."""
    mean_reward = sum(n * r for n, r in zip(lengths, rewards, strict=True)) / sum(lengths)
    return [r - mean_reward for r in rewards]


def best_minus_second(rewards):
    """The best completion gets its lead over the second; the others nothing."""
    best = max(range(len(rewards)), key=lambda i: rewards[i])
    second = max(r for i, r in enumerate(rewards) if i != best)
    return [r - second if i == best else 0.0 for i, r in enumerate(rewards)]


def kl_term(row, row_now, t, sample, estimator, bias_correction, bound):
    """The KL of a token in the loss."""
    kl = kl_k(row[t] - sample.ref_logprobs.tolist()[t], estimator)
    kl = clip(kl, -bound, bound) if bound else kl
    return math.exp(row[t] - old_of(sample, row_now)[t]) * kl if bias_correction else kl


def policy(
    samples,
    rows,
    now,
    entropies,
    kind="ppo",
    clip_low=0.2,
    clip_high=0.2,
    dual_clip=0.0,
    off_policy_mask_threshold=0.0,
    temperature_positive=1.0,
    temperature_negative=1.05,
    importance_cap=2.0,
    importance_floor=0.0,
    importance_mode="token_truncate",
    kl_coef=0.0,
    kl_estimator="k3",
    kl_in="loss",
    kl_bias_correction=False,
    kl_clip=0.0,
    entropy_coef=0.0,
    top_entropy_fraction=1.0,
    kl_cov_fraction=0.0,
    kl_cov_coef=1.0,
    mini_batch_size=0,
    loss_aggregation="token_mean",
    longest=0,
):
    """The loss of a batch, summed over tokens (token_mean) or answers."""
    result = 0.0
    temperatures = (temperature_positive, temperature_negative)
    weights = (importance_cap, importance_floor, importance_mode)
    for sample, row, row_now, chaos in zip(samples, rows, now, entropies, strict=True):
        bounds = (clip_low, clip_high, *weights, dual_clip, temperatures, off_policy_mask_threshold)
        terms = token_terms(kind, sample, row, row_now, *bounds)
        answer = 0.0
        kept = highest({t: chaos[t] for t in terms}, top_entropy_fraction)
        for t, term in terms.items():
            if t not in kept:
                term = 0.0
            if kl_coef and kl_in == "loss":
                term -= kl_coef * kl_term(row, row_now, t, sample, kl_estimator, kl_bias_correction, kl_clip)
            if kl_cov_fraction and sample.penalties.tolist()[t]:
                term -= kl_cov_coef * abs(row[t] - old_of(sample, row_now)[t])
            answer -= term + entropy_coef * chaos[t]
        if loss_aggregation == "sample_mean":
            answer /= max(1, len(terms))
        elif loss_aggregation == "fixed_length":
            answer /= longest
        result += answer
    return result


def mindrlhf(samples, rows, now, beta=0.01):
    """exp(lp - stop_gradient(lp)) A - beta (exp(d) - d - 1), d = log(reference / policy): mean of a row, then sum."""
    result = 0.0
    for sample, row, row_now in zip(samples, rows, now, strict=True):
        where, answer = counted(sample), 0.0
        for t in where:
            d = sample.ref_logprobs.tolist()[t] - row[t]
            answer += math.exp(row[t] - row_now[t]) * sample.advantages.tolist()[t] - beta * (math.exp(d) - d - 1)
        if where:
            result -= answer / len(where)
    return result


def values(samples, rows, value_clip=0.2, loss_aggregation="token_mean", longest=0):
    """Half the squared error, the worse of free and clipped."""
    result = 0.0
    for sample, row in zip(samples, rows, strict=True):
        answer, where = 0.0, counted(sample)
        for t in where:
            old, target = sample.values.tolist()[t], sample.returns.tolist()[t]
            error = (row[t] - target) ** 2
            if value_clip:
                error = max(error, (clip(row[t], old - value_clip, old + value_clip) - target) ** 2)
            answer += error / 2
        if loss_aggregation == "sample_mean":
            answer /= max(1, len(where))
        elif loss_aggregation == "fixed_length":
            answer /= longest
        result += answer
    return result


# Credit


def mean(numbers):
    return sum(numbers) / len(numbers)


def std(numbers):
    """Unbiased."""
    centre = mean(numbers)
    return math.sqrt(sum((x - centre) ** 2 for x in numbers) / (len(numbers) - 1))


def standardize(numbers, epsilon):
    if len(set(numbers)) < 2:
        return [0.0] * len(numbers)
    centre, width = mean(numbers), std(numbers)
    return [(x - centre) / (width + epsilon) for x in numbers]


def token_rewards(sample, reward, kl, estimator):
    """{position: reward}: the KL taken off every token, the answer's reward at the last."""
    where = counted(sample)
    drawn = sample.logprobs if sample.old_logprobs is None else sample.old_logprobs
    found = {
        t: -kl * kl_k(drawn.tolist()[t] - sample.ref_logprobs.tolist()[t], estimator) if kl else 0.0 for t in where
    }
    if where:
        found[where[-1]] += reward
    return found


def groups_of(samples):
    found = {}
    for sample in samples:
        found.setdefault(sample.group, []).append(sample)
    return list(found.values())


def whole_reward(sample, kl, estimator):
    return sample.reward + sum(token_rewards(sample, 0.0, kl, estimator).values())


def group_credit(samples, gains, kl=0.0, estimator="k1"):
    """{id of sample: {position: advantage}}"""
    credit = {}
    for group in groups_of(samples):
        rewards = [whole_reward(sample, kl, estimator) for sample in group]
        for sample, gain in zip(group, gains(rewards), strict=True):
            credit[id(sample)] = dict.fromkeys(counted(sample), gain)
    return credit


def turn_credit(samples, gains, credit, discount=1.0, weight=1.0, kl=0.0, estimator="k1"):
    """{id of sample: {position: advantage}}, turn by turn; the rewards from a turn on, summed one by one."""
    whole = group_credit(samples, gains, kl, estimator)
    found = {id(sample): dict.fromkeys(counted(sample), 0.0) for sample in samples}
    for group in groups_of(samples):
        alike = {}
        for sample in group:
            penalties = token_rewards(sample, 0.0, kl, estimator)
            rewards = []
            for first, end, reward, _ in sample.turns:
                rewards.append(reward + sum(x for t, x in penalties.items() if first <= t < end))
            rewards[-1] += sample.reward - sum(reward for _, _, reward, _ in sample.turns)
            for number, (first, end, _, state) in enumerate(sample.turns):
                later = sum(discount ** (j - number) * rewards[j] for j in range(number, len(rewards)))
                key = number if credit == "turn" else state or tuple(sample.tokens[:first].tolist())
                alike.setdefault(key, []).append((sample, first, end, later))
        for turns in alike.values():
            for (sample, first, end, _), gain in zip(turns, gains([turn[3] for turn in turns]), strict=True):
                for t in counted(sample):
                    if first <= t < end:
                        found[id(sample)][t] += gain * (1.0 if credit == "turn" else weight)
    if credit == "step_group":
        for key, tokens in found.items():
            for t in tokens:
                tokens[t] += whole[key][t]
    return found


def turn_token_rewards(sample, reward, kl, estimator):
    """The reward of each turn at its last token that counts; the rest of the reward at the last of all."""
    found = token_rewards(sample, reward - sum(turn[2] for turn in sample.turns), kl, estimator)
    for first, end, earned, _ in sample.turns:
        inside = [t for t in counted(sample) if first <= t < end] or counted(sample)
        if inside:
            found[inside[-1]] += earned
    return found


def leave_one_out(rewards):
    if len(rewards) == 1:
        return [0.0]
    return [r - mean([other for j, other in enumerate(rewards) if j != i]) for i, r in enumerate(rewards)]


def batch_standardized(credit):
    flat = [(key, t, x) for key, tokens in credit.items() for t, x in tokens.items()]
    numbers = standardize([x for _, _, x in flat], 1e-6)
    result = {key: {} for key in credit}
    for (key, t, _), x in zip(flat, numbers, strict=True):
        result[key][t] = x
    return result


def to_go(rewards, gamma):
    places = list(rewards)
    return {t: sum(gamma ** (j - i) * rewards[places[j]] for j in range(i, len(places))) for i, t in enumerate(places)}


def reinforce_credit(samples, gamma=1.0, baseline=False, kl=0.0, estimator="k1"):
    credit = {}
    for group in groups_of(samples):
        usual = mean([sample.reward for sample in group]) if baseline else 0.0
        for sample in group:
            credit[id(sample)] = to_go(token_rewards(sample, sample.reward - usual, kl, estimator), gamma)
    return batch_standardized(credit)


def remax_credit(samples, kl=0.0, estimator="k1"):
    return {
        id(sample): {
            t: x - sample.baseline for t, x in to_go(token_rewards(sample, sample.reward, kl, estimator), 1.0).items()
        }
        for sample in samples
    }


def gae_credit(samples, gamma=1.0, gae_lambda=0.95, whiten=True, kl=0.0, estimator="k1"):
    """A_t = sum_l (gamma lambda)^l delta_{t+l}, and the returns A + V."""
    credit, returns = {}, {}
    for sample in samples:
        rewards, where, expected = token_rewards(sample, sample.reward, kl, estimator), counted(sample), sample.values
        delta = []
        for i, t in enumerate(where):
            following = expected.tolist()[where[i + 1]] if i + 1 < len(where) else 0.0
            delta.append(rewards[t] + gamma * following - expected.tolist()[t])
        credit[id(sample)] = {
            t: sum((gamma * gae_lambda) ** (j - i) * delta[j] for j in range(i, len(delta)))
            for i, t in enumerate(where)
        }
        returns[id(sample)] = {t: x + expected.tolist()[t] for t, x in credit[id(sample)].items()}
    return (batch_standardized(credit) if whiten else credit), returns
