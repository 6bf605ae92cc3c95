"""What ranks report: memory, utilisation, time in communication, and a slow rank by name."""

import json
import re
from weakref import WeakSet

import numpy as np
import pytest
import torch

from posttrain.algorithms import ALGORITHMS
from posttrain.cluster.local import LocalPool
from posttrain.config.sections import ModelConfig, TrainConfig
from posttrain.core.device_rates import DEVICES, DeviceRates
from posttrain.core.types import count_units
from posttrain.data.packing import collate
from posttrain.parallel.communication import covered
from posttrain.train import learner, rank_report
from posttrain.train.learner_group import LearnerGroup
from posttrain.train.rank_report import RankReport, rank_metrics, slow_rank_warning
from posttrain.train.summary import average_updates
from tests.e2e.commands import command, rows_of
from tests.e2e.rows import write_rows
from tests.oracle.batches import samples as random_samples


def reports(seconds, waiting, device="CPU"):
    return [
        RankReport(f"node{rank}", device, 1.0 + rank, took, 1e12, wait)
        for rank, (took, wait) in enumerate(zip(seconds, waiting, strict=True))
    ]


def test_the_rank_that_others_wait_for_is_named():
    found = reports([10.0, 10.0, 10.0, 10.0], [6.0, 6.2, 1.0, 5.8])
    metrics = rank_metrics(found, 1)
    assert metrics["slowest_rank"] == 2 and metrics["slowest_rank_ratio"] == pytest.approx(9.0 / 4.0)
    assert metrics["communication_seconds"] == pytest.approx(4.75) and metrics["memory_gib"] == 4.0
    said = slow_rank_warning(found, 7)
    assert said.startswith("step 7: rank 2 on node2 (CPU) computes 2.2 times as long")
    even = reports([10.0, 10.0], [3.0, 3.1])
    assert not slow_rank_warning(even, 1) and rank_metrics(even, 1)["slowest_rank_ratio"] < 1.1
    unmeasured = reports([10.0, 10.0], [None, None])
    assert not slow_rank_warning(unmeasured, 1) and rank_metrics(unmeasured, 1) == {"memory_gib": 2.0}


def test_utilisation_counts_samples_once_and_every_device():
    metrics = rank_metrics(reports([2.0] * 4, [None] * 4, device="NVIDIA H100 80GB HBM3"), 2)
    expected = 2e12 / 2.0 / 4 / DEVICES["h100"].flops  # two data ranks of two devices each
    assert metrics["model_flop_utilisation"] == pytest.approx(expected, abs=5e-5)
    staged = rank_metrics(reports([2.0] * 4, [None] * 4, device="NVIDIA H100 80GB HBM3"), 1, stages=2)
    assert staged == metrics, "two data ranks of two pipeline stages each"


def test_spans_that_overlap_count_once():
    assert covered([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.5)]) == 4.0 and covered([]) == 0.0


def test_a_rank_has_no_average():
    updates = [{"slowest_rank": 3.0, "slowest_rank_ratio": 1.1}, {"slowest_rank": 0.0, "slowest_rank_ratio": 1.9}, {}]
    assert average_updates(updates) == {"slowest_rank": 0.0, "slowest_rank_ratio": pytest.approx(1.5)}


def test_a_learner_counts_the_flops_of_what_it_computes(monkeypatch):
    """On a CPU whose rate is pretended; 6 FLOPs per weight and token, and attention."""
    rates = DeviceRates(memory_gib=1, flops=1e9, memory=1, link=1, network=1, host=1)
    for module in (learner, rank_report):
        monkeypatch.setattr(module, "rates_of", lambda name: rates)
    monkeypatch.setattr(learner, "LEARNERS", WeakSet())
    workers = LocalPool().start("actor", learner.Learner, ModelConfig(path="pico", dtype="float32"), TrainConfig())
    (policy,) = learner.LEARNERS
    algo = ALGORITHMS["sft"](ALGORITHMS["sft"].Config())
    objective = algo.objective(algo.forward_request(lambda _: 0))
    samples = random_samples(np.random.default_rng(0), 1)
    group = LearnerGroup(workers)
    group.forward_backward(samples, objective, count_units(samples, "token"), sum(map(len, samples)))
    metrics = group.step(0.0)
    (report,) = group.reports
    batch = collate(samples)
    linear = [m for m in policy.model.model.modules() if isinstance(m, torch.nn.Linear)]
    weights, head = sum(m.weight.numel() for m in linear), policy.model.lm_head.weight.numel()
    config = policy.model.config
    pairs = sum(len(sample) ** 2 for sample in samples)
    attention = 3 * config.num_hidden_layers * 2 * config.hidden_size * pairs
    expected = 6 * weights * sum(map(len, samples)) + 6 * head * len(batch.counted) + attention
    assert report.flops == pytest.approx(expected) and report.seconds > 0
    assert metrics["model_flop_utilisation"] == pytest.approx(report.flops / report.seconds / 1e9, abs=1e-4)
    assert policy.rank_report().flops == 0, "a report begins anew"


def test_a_run_over_two_processes_logs_its_ranks(tmp_path):
    data = write_rows("chat", tmp_path)
    options = "--train.max_steps 4 --train.batch_size 4 --cluster.devices 2 --log.communication_every_steps 2"
    run = tmp_path / "run"
    words = f"sft --model pico --data {data} --output_dir {run} {options}".split()
    assert command(*words) == 0
    rows, ranks = rows_of(run / "metrics.jsonl"), rows_of(run / "logs" / "ranks.jsonl")
    assert [row["step"] for row in ranks] == [1, 2, 3, 4] and {len(row["ranks"]) for row in ranks} == {2}
    for row, each in zip(rows, ranks, strict=True):
        measured = row["step"] % 2 == 0
        assert ("communication_seconds" in row) == measured == ("slowest_rank" in row)
        assert all((rank["communication_seconds"] is not None) == measured for rank in each["ranks"])
        assert row["memory_gib"] == pytest.approx(max(rank["memory_gib"] for rank in each["ranks"]), abs=0.001)
        assert row["tokens_per_second_per_device"] == pytest.approx(row["tokens_per_second"] / 2, abs=0.1)
        if measured:
            assert 0 < row["communication_seconds"] < max(rank["seconds"] for rank in each["ranks"])
            assert row["slowest_rank"] in (0, 1)
    assert not re.search("model_flop_utilisation", json.dumps(rows)), "the rate of a CPU is not known"
