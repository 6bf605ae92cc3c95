"""`posttrain plan --device` and `--search`: times, and layouts that fit, that a run accepts and that none beats."""

import re
import shlex

import pytest
import torch

from posttrain.algorithms import ALGORITHMS
from posttrain.cli import plan
from posttrain.cli.plan_search import LayoutSearch, search_layouts
from posttrain.cli.plan_training import Target, plan_training
from posttrain.cli.train import read
from posttrain.core.device_rates import DEVICES
from posttrain.core.errors import UsageError
from posttrain.models import memory
from posttrain.train.time_plan import step_lengths
from tests.tiny import tiny_folder

SIZES = ["--data.max_length", "512", "--train.micro_batch_tokens", "512", "--train.batch_size", "64"]
ONLINE = [*SIZES, "--reward", "gsm8k", "--rollout.max_tokens", "64", "--algo.kl_coef", "0.01"]
CASES = {
    "sft, experts": ("sft", "mixtral", [*SIZES, "--cluster.devices", "8"]),
    "grpo": ("grpo", "llama", [*ONLINE, "--cluster.devices", "8"]),
    "grpo, vLLM, ahead": (
        "grpo",
        "llama",
        [*ONLINE, "--cluster.devices", "6", "--rollout.engine", "vllm", "--rollout.ahead", "1"],
    ),
}


def pretended(mebibytes: float) -> Target:
    """An H100 with little memory, in machines of 4."""
    return Target(torch.device("cuda"), "one device", round(mebibytes * 2**20), DEVICES["h100"], 4)


@pytest.fixture(autouse=True)
def no_libraries(monkeypatch):
    monkeypatch.setattr(memory, "BASE_BYTES", 0)


@pytest.mark.parametrize("mebibytes", [64.0, 0.8])
@pytest.mark.parametrize("case", CASES)
def test_what_is_found_fits_and_is_accepted_and_none_is_faster(case, mebibytes, tmp_path, capsys):
    verb, family, words = CASES[case]
    words = [*words, "--model.path", str(tiny_folder(family, tmp_path)), "--model.dtype", "bfloat16"]
    config, target = read(verb, words, data=False), pretended(mebibytes)
    algo = ALGORITHMS[verb](config.algo)
    with memory.keep_estimates():
        search = LayoutSearch(config, algo, target, step_lengths(config, algo, None), config.data.max_length)
        found, compared = search.best()
        every = [each for changes in search.layouts() if (each := search.fitting(changes)) is not None]
    assert compared > 20 and len(found) == 3 and len(every) >= 3
    assert found[0].times.seconds == pytest.approx(min(each.times.seconds for each in every), rel=1e-9)
    assert len({str(each.config.cluster) for each in found}) == 3, "three different ones"
    for each in found:
        changed = read(verb, [*words, *shlex.split(" ".join(each.options))], data=False)
        plan_training(verb, changed, target=target)
        assert "It fits: about" in capsys.readouterr().out.splitlines()[-1], each.options


def test_the_search_prints_times_and_bounds_and_says_if_nothing_fits(tmp_path, capsys):
    verb, family, words = CASES["grpo"]
    words = [*words, "--model.path", str(tiny_folder(family, tmp_path)), "--model.dtype", "bfloat16"]
    assert plan.run([verb, *words, "--device", "h100", "--search"]) == 0
    out = capsys.readouterr().out
    assert len(re.findall(r"^\d\. .* per step:  ", out, re.MULTILINE)) == 3
    assert len(re.findall(r"bounded by (?:generate|train|helpers|weights): .* \(\d+% of it\)", out)) == 3
    assert "generate " in out and "helpers " in out, "the reference's passes count"
    assert search_layouts(verb, read(verb, words, data=False), pretended(0.01)) == 1
    assert "layouts fits 8 devices of" in capsys.readouterr().out


def test_a_plan_for_a_known_device_has_the_time_of_a_step(capsys):
    words = ["sft", "--model", "pico", "--data.max_length", "256", "--train.batch_size", "8"]
    assert plan.run([*words, "--device", "h100"]) == 0
    out = capsys.readouterr().out
    assert "80.0 GiB" in out and "time of a step:" in out and "per device" in out and "of 989 TFLOP/s" in out
    assert plan.run([*words, "--device_gib", "80"]) == 0
    assert "time of a step:" not in capsys.readouterr().out, "rates of an unknown device are not guessed"
    with pytest.raises(UsageError, match=r"the rates of one device are not known\. Name the device: --device h100"):
        plan.run([*words, "--device_gib", "80", "--search"])
    with pytest.raises(UsageError, match="are for single trainers"):
        plan.run(["rejection-sampling", "--device", "h100"])


def test_shorter_completions_take_less_time(capsys):
    words = ["grpo", "--model", "pico", "--reward", "gsm8k", "--rollout.max_tokens", "512", "--device", "h100"]

    def seconds(*more: str) -> float:
        plan.run([*words, *more])
        found = re.search(r"^  all +([\d.]+) (m?)s", capsys.readouterr().out, re.MULTILINE)
        assert found is not None
        return float(found[1]) / (1000 if found[2] else 1)

    assert seconds("--completion_tokens", "64") < 0.7 * seconds()


@pytest.mark.parametrize("verb", sorted(ALGORITHMS))
def test_every_trainer_has_a_time(verb, capsys):
    words = ["--model", "pico", "--data.max_length", "64", "--train.micro_batch_tokens", "128", "--device", "h100"]
    words += ["--algo.teacher", "pico"] if verb in ("distill", "opd") else []
    words += ["--reward", "gsm8k"] if ALGORITHMS[verb].online and verb != "opd" else []
    assert plan.run([verb, *words]) == 0
    assert re.search(r"^  all +[\d.]+ m?s", capsys.readouterr().out, re.MULTILINE)
