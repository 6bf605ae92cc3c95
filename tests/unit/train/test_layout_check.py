"""What a plan accepts a run accepts, and the other way round; what it proposes too."""

import json
import random
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from posttrain.algorithms import ALGORITHMS
from posttrain.cli import plan_training
from posttrain.cli.train import read
from posttrain.config.sections import Config, ModelConfig
from posttrain.core.errors import UsageError
from posttrain.models import memory
from posttrain.parallel.fsdp import ModelShards
from posttrain.train import memory_plan
from posttrain.train.layout_check import check_layouts, layout_of
from tests.tiny import tiny_folder

FAMILIES = ("llama", "qwen3", "mixtral", "deepseek_v3", "gpt2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    return {family: str(tiny_folder(family, place)) for family in FAMILIES}


def options_of(rng: random.Random, folders: dict[str, str]) -> list[str]:
    """A layout, valid or not; most sizes are small, so that about half are."""
    sizes = {name: rng.choice((1, 1, 1, 1, 1, 2, 2, 3, 4)) for name in ("tensor", "context", "expert")}
    chosen = {f"cluster.{name}_parallel_size": size for name, size in sizes.items()}
    chosen |= {"cluster.devices": rng.choice((1, 2, 4, 4, 6, 8, 8, 16)), "model.lora_rank": rng.choice((0, 0, 4))}
    chosen["cluster.replicate_size"] = rng.choice((1, 1, 1, 2))
    chosen["cluster.pipeline_parallel_size"] = rng.choice((1, 1, 1, 2, 2, 4))
    words: list[str] = []
    if chosen["cluster.pipeline_parallel_size"] > 1 and rng.random() < 0.3:
        chosen |= {"cluster.virtual_pipeline_parallel_size": 2, "cluster.pipeline_schedule": "interleaved"}
    elif chosen["cluster.pipeline_parallel_size"] == 2 and rng.random() < 0.5:
        words += ["--cluster.pipeline_layers_per_stage", "1", rng.choice("123")]
    chosen["cluster.zero_stage"] = rng.choice((2, 3, 3))
    if sizes["context"] == 4:
        chosen["cluster.ulysses_degree"] = rng.choice((0, 1, 2, 3))
    words += ["--model.gradient_checkpointing"] * (rng.random() < 0.5)
    words += ["--cluster.defer_gradient_reduction"] * (rng.random() < 0.3)
    words += ["--cluster.sequence_parallel"] * (sizes["tensor"] > 1 and rng.random() < 0.4)
    chosen |= {"model.path": folders[rng.choice(FAMILIES)]}
    words += [str(word) for name, value in chosen.items() for word in (f"--{name}", value)]
    offloaded = rng.choice(((), (), (), (), (), (), ("parameters",), ("activations",), ("parameters", "activations")))
    return words + ["--cluster.offload", *offloaded] * bool(offloaded)


def planned(words: list[str], verb: str = "sft") -> str:
    """Why `posttrain plan` refuses it; empty: it does not."""
    try:
        config = read(verb, words, data=False)
        check_layouts(config, ALGORITHMS[verb](config.algo))
    except UsageError as error:
        return str(error)
    return ""


def run(words: list[str]) -> str:
    """Why the processes of a run refuse it."""
    try:
        config = read("sft", words, data=False)
    except UsageError as error:
        return str(error)
    return sharded(config, "actor", config.model)


def sharded(config: Config, role: str, model: ModelConfig, head: str = "token") -> str:
    """Why the processes of a role refuse: each shards its model, in a group whose other members are pretended."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=config.cluster.of(role).devices)
    try:
        layout = layout_of(config, role)
        if layout.is_sharded():
            empty = memory.empty_model(model, head, torch.float32).to_empty(device="cpu")
            ModelShards.create(layout, torch.device("cpu"), torch.float32).shard(empty)
    except UsageError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return ""


def test_plan_and_run_agree_on_two_hundred_layouts(folders):
    rng, reasons = random.Random(0), []
    for _ in range(200):
        words = options_of(rng, folders)
        reasons.append(planned(words))
        assert run(words) == reasons[-1], words
    assert 20 < reasons.count("") < 180 and len({reason[:30] for reason in reasons}) > 5, "some of each kind"


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_adapters_on_a_divided_vocabulary_are_refused(folders, target):
    words = [
        "--model.path",
        folders["llama"],
        "--model.lora_rank",
        "4",
        "--model.lora_target_modules",
        "q_proj",
        target,
    ]
    words += ["--cluster.devices", "2", "--cluster.tensor_parallel_size", "2"]
    assert planned(words) == run(words) == ""
    words += ["--cluster.sequence_parallel"]
    assert "have adapters. Leave them out of model.lora_target_modules" in planned(words) == run(words)


def roles_of(rng: random.Random, folders: dict[str, str]) -> list[str]:
    """PPO with a reference, a critic, a reward model and an engine, each on devices of its own or beside the policy."""
    path = folders[rng.choice(FAMILIES)]
    chosen = {"cluster.devices": rng.choice((4, 16, 16, 16)), "model.path": path, "algo.kl_coef": 0.1}
    chosen["reward.functions"] = rng.choice(("gsm8k", f"model:{path}", f"model:{folders[rng.choice(FAMILIES)]}"))
    for role in ("critic", "reference", "reward", "rollout"):
        if rng.random() < 0.6:
            chosen[f"cluster.{role}_devices"] = rng.choice((1, 2, 2, 2))
    for role in ("critic", "reference", "reward"):
        for size in rng.sample(("tensor", "context", "expert", "pipeline"), 1) if rng.random() < 0.5 else ():
            chosen[f"cluster.{role}_{size}_parallel_size"] = 2
    if rng.random() < 0.5:
        chosen["rollout.engine"] = "vllm"
        if "cluster.rollout_devices" in chosen:
            chosen["cluster.rollout_tensor_parallel_size"] = rng.choice((1, 2, 2, 3))
        else:
            chosen["rollout.vllm_options"] = json.dumps({"tensor_parallel_size": rng.choice((1, 2, 2, 3))})
    chosen["model.lora_rank"] = rng.choice((0, 0, 4))
    return [str(word) for name, value in chosen.items() for word in (f"--{name}", value)]


def run_roles(words: list[str]) -> str:
    """Why the processes of some role refuse it, in the order in which models are loaded."""
    try:
        config = read("ppo", words, data=False)
    except UsageError as error:
        return str(error)
    cluster, own, frozen = config.cluster, config.model, replace(config.model, lora_rank=0)
    rewards = [text.removeprefix("model:") for text in config.reward.functions if text.startswith("model:")]
    models = [("actor", own, "token")] + [("reference", frozen, "token")] * (not own.lora_rank)
    models += [(f"reward-{number}", replace(frozen, path=path), "score") for number, path in enumerate(rewards)]
    models.append(("critic", replace(own, path=rewards[0] if rewards else own.path), "score"))
    for role, model, head in models:
        if reason := sharded(config, role, model, head):
            return reason if role == "actor" else f"{reason} (role {role})"
    engine = int(config.rollout.vllm_options.get("tensor_parallel_size", 1)) if config.rollout.engine == "vllm" else 1
    if "rollout" not in cluster.own_devices() and cluster.of("actor").devices % engine:  # as VllmEngine finds
        return f"tensor_parallel_size is {engine}, which does not divide"
    return ""


def test_plan_and_run_agree_on_forty_layouts_of_roles(folders):
    rng, reasons = random.Random(0), []
    for _ in range(40):
        words = roles_of(rng, folders)
        reasons.append(planned(words, "ppo"))
        found = run_roles(words)
        assert bool(found) == bool(reasons[-1]) and found in reasons[-1], (words, found, reasons[-1])
    assert 5 < reasons.count("") < 35 and len({reason[:30] for reason in reasons}) > 5, "some of each kind"


def test_a_teacher_is_refused_with_stages(folders):
    words = ["--model.path", folders["llama"], "--algo.teacher", folders["llama"]]
    config = read("distill", [*words, "--cluster.devices", "2", "--cluster.pipeline_parallel_size", "2"], data=False)
    with pytest.raises(UsageError, match=r"^algo.teacher and cluster.pipeline_parallel_size cannot be combined"):
        check_layouts(config, ALGORITHMS["distill"](config.algo))


def test_frozen_weights_are_looked_for_in_the_policy_only(folders, capsys):
    """A critic has no lm_head, and a reference may have fewer layers."""
    frozen = ["--model.path", folders["llama"], "--model.frozen_parameters", "lm_head", "--cluster.devices", "4"]
    reward = ["--reward", f"model:{folders['qwen3']}", "--cluster.critic_devices", "2"]
    config = read("ppo", [*frozen, *reward], data=False)
    check_layouts(config, ALGORITHMS["ppo"](config.algo))
    plan_training.plan_training("ppo", config, 80.0)
    assert "It fits" in capsys.readouterr().out


SIZES = "--cluster.devices 8 --data.max_length 512 --train.micro_batch_tokens 512"
ADVISED = {"sft": SIZES, "grpo": f"{SIZES} --reward gsm8k --rollout.max_tokens 64"}


@pytest.mark.parametrize("verb", ADVISED)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_what_is_advised_fits_and_is_accepted(verb, family, folders, monkeypatch, capsys):
    """At sizes at which less and less fits."""
    monkeypatch.setattr(memory, "BASE_BYTES", 0)
    words = [*shlex.split(ADVISED[verb]), "--model.path", folders[family], "--model.dtype", "bfloat16"]
    seen = set()
    for mebibytes in (1.2, 0.9, 0.7, 0.5, 0.35):
        plan_training.plan_training(verb, read(verb, words, data=False), mebibytes / 1024)
        advice = re.search(r"(?:It fits with|A run sets by itself:) (.*)", capsys.readouterr().out)
        if advice is None:
            continue
        changed = read(verb, [*words, *shlex.split(advice[1])], data=False)
        plan_training.plan_training(verb, changed, mebibytes / 1024)
        assert "It fits: about" in capsys.readouterr().out.splitlines()[-1], (mebibytes, advice[1])
        seen |= set(re.findall(r"--(\S+)", advice[1]))
    assert any(name.startswith("cluster.") for name in seen), seen


def test_a_device_that_is_nearly_full_is_no_fit(capsys):
    config = read("sft", ["--model.path", "pico", "--data.max_length", "256"], data=False)
    plan_training.plan_training("sft", config, 80.0)
    needed = re.search(r"It fits: about ([\d.]+) MiB", capsys.readouterr().out)
    assert needed is not None
    plan_training.plan_training("sft", config, float(needed[1]) / 1024 / 0.995)
    assert "It does not fit" in capsys.readouterr().out.splitlines()[-1]


def test_vllm_beside_the_policy_has_its_share_while_it_generates(capsys):
    options = ["--model.path", "pico", "--reward", "gsm8k", "--cluster.devices", "4", "--rollout.engine", "vllm"]

    def row(name: str, *more: str) -> str:
        plan_training.plan_training("grpo", read("grpo", [*options, *more], data=False), 80.0)
        return next((line for line in capsys.readouterr().out.splitlines() if line.startswith(f"  {name} ")), "")

    assert "32.0 GiB  1.8 MiB of weights" in row("vLLM") and "while completions are generated" in row("vLLM")
    assert not row("generation weights"), "no copy of the learners' own"
    assert "0.9 MiB of weights" in row("vLLM", "--rollout.vllm_options", '{"tensor_parallel_size": 2}')
    assert "40.0 GiB" in row("vLLM", "--rollout.vllm_options", '{"gpu_memory_utilization": 0.5}')
    awake = row("forward and backward", "--rollout.vllm_options", '{"enable_sleep_mode": false}')
    assert "32." in awake and "32." not in row("forward and backward")
    assert "32." in row("generation")


def test_8_bit_copies_count_where_the_local_engine_generates(capsys):
    options = ["--model.path", "pico", "--reward", "gsm8k", "--cluster.devices", "4", "--model.dtype", "bfloat16"]

    def ledger(*more: str) -> dict[str, float]:
        plan_training.plan_training("grpo", read("grpo", [*options, *more], data=False), 80.0)
        found = re.findall(r"^  (\S.*?)  +([\d.]+) MiB", capsys.readouterr().out, re.MULTILINE)
        return {name: float(size) for name, size in found}

    fp8 = ["--rollout.quantization", "fp8"]
    plain, shared = ledger(), ledger(*fp8)
    model = memory.empty_model(read("grpo", options, data=False).model, "token", torch.bfloat16)
    size = memory.eight_bit_bytes(model) / 2**20
    assert "8-bit weights" not in plain and shared["8-bit weights"] == pytest.approx(size, abs=0.06)
    assert shared["optimizer step"] - plain["optimizer step"] == pytest.approx(size, abs=0.11)
    apart = ["--cluster.rollout_devices", "1"]
    assert ledger(*apart, *fp8)["rollout"] - ledger(*apart)["rollout"] == pytest.approx(size, abs=0.11)
    assert "8-bit weights" not in ledger(*apart, *fp8), "they are on the devices that generate"


def test_an_8_bit_kv_cache_needs_about_half_of_the_memory(capsys):
    options = ["--model.path", "pico", "--reward", "gsm8k", "--model.dtype", "bfloat16"]

    def planned(*more: str) -> int:
        config = read("grpo", [*options, *more], data=False)
        model = memory.empty_model(config.model, "token", torch.bfloat16)
        return memory_plan.kv_cache_bytes(config, model.config, torch.device("cpu"), torch.bfloat16, [])

    exact, rounded = planned(), planned("--rollout.kv_cache_dtype", "fp8")
    width = memory.empty_model(read("grpo", options, data=False).model, "token", torch.bfloat16).config.head_dim
    assert rounded == pytest.approx(exact * (width + 1) / (2 * width), rel=1e-6) and exact > 0
    with pytest.raises(UsageError, match=r"set kv_cache_dtype in rollout\.vllm_options"):
        read("grpo", [*options, "--rollout.engine", "vllm", "--rollout.kv_cache_dtype", "fp8"], data=False)


def test_a_copy_that_is_freed_while_training_counts_while_generating(capsys):
    options = ["--model.path", "pico", "--reward", "gsm8k", "--cluster.devices", "2", "--rollout.max_tokens", "8"]
    config = read("grpo", [*options, "--data.max_length", "64"], data=False)
    algo = ALGORITHMS["grpo"](config.algo)
    held = memory_plan.estimate_memory(config, algo, torch.device("cpu"), [])
    config.cluster.offload = ("engine",)
    freed = memory_plan.estimate_memory(config, algo, torch.device("cpu"), [])
    assert held.sampler == freed.sampler > 0 and "generation" not in held.phases
    assert held.phases["optimizer step"] - freed.phases["optimizer step"] == held.sampler
    assert freed.phases["generation"] == held.phases["evaluation"] - held.gathered, "nothing is gathered meanwhile"


def test_a_role_that_does_not_fit_is_named(tmp_path: Path, capsys):
    options = ["--model.path", "pico", "--reward", "gsm8k", "--cluster.devices", "4", "--cluster.rollout_devices", "1"]
    plan_training.plan_training("grpo", read("grpo", [*options, "--rollout.max_tokens", "8"], data=False), 0.5)
    assert "a device of the role rollout needs" in capsys.readouterr().out.splitlines()[-1]
