"""`posttrain plan`: the ledger against what a run does, and advice that holds."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from posttrain.algorithms import ALGORITHMS
from posttrain.cli import plan as plan_command
from posttrain.cli import plan_pipeline
from posttrain.cli import plan_training as plan
from posttrain.config import sections as configs
from posttrain.config.sections import Config
from posttrain.core.errors import UsageError
from posttrain.models import memory
from posttrain.models.loading import compute_dtype
from posttrain.pipelines.settings import PipelineConfig, pipeline_defaults
from tests.tiny import tiny_folder


def settings(verb: str, **options) -> Config:
    """A verb's defaults with some options changed, as {"model.path": "pico"}."""
    algorithm = ALGORITHMS[verb]
    config = configs.with_algorithm(algorithm)
    for key, value in options.items():
        section, _, option = key.rpartition(".")
        setattr(getattr(config, section) if section else config, option, value)
    return config


def lines_of(out: str) -> dict[str, tuple[str, str]]:
    """{name: (value, note)} of the printed lines."""
    found = re.findall(r"^  (\S.*?)  +(\S+(?: [GM]iB)?)(?:  (.*))?$", out, re.MULTILINE)
    return {name: (value, note) for name, value, note in found}


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    for module in (plan, plan_pipeline):
        monkeypatch.setattr(module, "default_device", lambda: torch.device("cpu"))


@pytest.fixture
def rows(tmp_path: Path) -> str:
    file = tmp_path / "rows.jsonl"
    pairs = [{"prompt": "x" * (5 + i), "chosen": "yes", "rejected": "no"} for i in range(10)]
    file.write_text("".join(json.dumps(row) + "\n" for row in pairs))
    return str(file)


def test_batch_rows_count_what_a_run_would_do(rows, capsys):
    options = {"model.path": "pico", "data.train": (rows,), "train.batch_size": 4, "train.micro_batch_tokens": 64}
    config = settings("dpo", **options, **{"data.eval_fraction": 0.1, "train.epochs": 2.0})
    assert plan.plan_training("dpo", config) == 0
    out = capsys.readouterr().out
    ledger = lines_of(out)
    assert out.count("dpo of pico: ") == 1
    assert ledger["examples"][0] == "9" and ledger["evaluation examples"][0] == "1"
    assert ledger["samples"] == ("18", "2 per example")
    assert ledger["steps"][0] == "5" and "2.00 epochs" in ledger["steps"][1]  # 18 rows in steps of 4
    from posttrain.data.packing import pack_into_micro_batches
    from posttrain.models.tokenizers import load_tokenizer
    from posttrain.train.run_data import load_data

    algo = ALGORITHMS["dpo"](config.algo)
    data = load_data(config, algo, load_tokenizer(config.model), 263)
    tokens = sum(len(sample) for row in data.train.examples for sample in row)
    assert ledger["tokens"][0] == f"{tokens:,}"
    counts, largest = [], 0
    for before, after in pairwise(data.examples_after):
        samples = data.stream.take(after - before)
        packs = pack_into_micro_batches(samples, 64, 2)
        counts.append(len(packs))
        largest = max([largest, *(sum(len(samples[i]) for i in part) for part in packs)])
    assert ledger["micro-batches per step"][0] == f"{sum(counts) / 5:.1f}"
    assert ledger["largest micro-batch"][0] == f"{largest:,}"


def test_without_data_the_largest_possible_pack_is_assumed(capsys):
    config = settings("dpo", **{"model.path": "pico", "data.max_length": 100, "train.micro_batch_tokens": 1000})
    plan.plan_training("dpo", config)
    assert lines_of(capsys.readouterr().out)["micro-batch tokens"][0] == "1,000"
    config.data.max_length = 700  # a pair alone is more than the budget, and gets a pack of its own
    plan.plan_training("dpo", config)
    ledger = lines_of(capsys.readouterr().out)
    assert ledger["micro-batch tokens"][0] == "1,400" and ledger["examples"][0] == "?"


def test_memory_lines_of_a_bfloat16_run_with_everything(capsys):
    config = settings("dpo", **{"model.path": "pico", "model.dtype": "bfloat16", "train.ema_decay": 0.9})
    plan.plan_training("dpo", config)
    ledger = lines_of(capsys.readouterr().out)
    parameters = 920_448

    def mib(bytes_a_parameter: int) -> str:
        return f"{parameters * bytes_a_parameter / 2**20:.1f} MiB"

    expected = {"weights": 2, "master weights": 4, "gradients": 4, "AdamW": 8, "EMA": 4, "reference": 2}
    assert {name: ledger[name][0] for name in expected} == {name: mib(size) for name, size in expected.items()}
    assert "with model.gradient_checkpointing" in ledger["activations"][1]
    assert set(ledger) >= {"forward and backward", "optimizer step", "evaluation"}


def test_float32_has_no_masters_and_adapters_need_no_reference(capsys):
    pytest.importorskip("peft")
    plan.plan_training("dpo", settings("dpo", **{"model.path": "pico", "model.lora_rank": 4}))
    out = capsys.readouterr().out
    ledger = lines_of(out)
    assert ledger["master weights"][0] == "0.0 MiB" and "reference" not in ledger and "EMA" not in ledger
    assert "of them trained" in out


def test_a_reference_that_is_precomputed_is_freed(capsys):
    config = settings("dpo", **{"model.path": "pico"})
    config.algo.precompute_reference = True
    plan.plan_training("dpo", config)
    ledger = lines_of(capsys.readouterr().out)
    assert ledger["reference"][1] == "freed before the first step" and "reference beforehand" in ledger


def test_a_teacher_is_counted_and_must_have_the_same_vocabulary(tmp_path, capsys):
    config = settings("distill", **{"model.path": "pico"})
    config.algo.teacher = "pico"
    plan.plan_training("distill", config)
    ledger = lines_of(capsys.readouterr().out)
    assert ledger["teacher"][0] == ledger["weights"][0]
    config.algo.teacher = str(tiny_folder("llama", tmp_path))
    with pytest.raises(UsageError, match=r"algo\.teacher .* vocabulary of 104, model\.path pico of 263"):
        plan.plan_training("distill", config)


@pytest.mark.parametrize("verb", sorted(ALGORITHMS))
def test_every_trainer_can_be_planned(verb, capsys):
    config = settings(verb, **{"model.path": "pico", "data.max_length": 64, "train.micro_batch_tokens": 128})
    if verb in ("distill", "opd"):
        config.algo.teacher = "pico"
    assert plan.plan_training(verb, config) == 0
    assert "It fits: about" in capsys.readouterr().out


@pytest.fixture
def device_of(monkeypatch):
    """Pretends that the device has this many bytes, and that libraries take nothing."""

    def pretend(size: int) -> None:
        monkeypatch.setattr(memory, "BASE_BYTES", 0)
        monkeypatch.setattr(plan, "device_memory", lambda device: ("pretended", size))

    return pretend


MIB = 2**20


@pytest.mark.parametrize(
    ("size", "advice"),
    [
        (2000 * MIB, ""),
        (200 * MIB, "It fits with --train.micro_batch_tokens 2048"),
        (120 * MIB, "It fits with --model.gradient_checkpointing --train.micro_batch_tokens 4096"),
        (40 * MIB, "It fits with --model.gradient_checkpointing --train.micro_batch_tokens 1024"),
        (14 * MIB, "It fits with --model.lora_rank 16 --model.gradient_checkpointing --train.micro_batch_tokens 256"),
        (1 * MIB, "Use a smaller model, more devices or devices with more memory."),
    ],
)
def test_advice_is_the_change_that_costs_the_least_time(size, advice, device_of, capsys):
    pytest.importorskip("peft")
    device_of(size)
    config = settings("sft", **{"model.path": "pico", "data.max_length": 256})
    plan.plan_training("sft", config)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("It does not fit" if advice else "It fits") and last.endswith(advice)
    if "--" not in advice:
        return
    for option, value in re.findall(r"--(\S+)(?: (\d+))?", advice):  # taken, the advice holds
        section, name = option.split(".")
        setattr(getattr(config, section), name, int(value) if value else True)
    plan.plan_training("sft", config)
    assert capsys.readouterr().out.splitlines()[-1].startswith("It fits")


def test_an_architecture_that_looks_at_values_is_planned_without_activations(monkeypatch, capsys):
    def looks(*_):
        raise RuntimeError("Tensor.item() cannot be called on meta tensors")

    monkeypatch.setattr("posttrain.models.memory.forward", looks)
    plan.plan_training("sft", settings("sft", **{"model.path": "pico"}))
    out = capsys.readouterr().out
    assert lines_of(out)["activations"][0] == "?" and "could not be counted" in out.splitlines()[-1]


def test_no_weight_is_loaded(tmp_path, capsys):
    folder = tiny_folder("llama", tmp_path)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    plan.plan_training("sft", settings("sft", **{"model.path": str(folder)}))
    assert "It fits" in capsys.readouterr().out
    assert torch.float32 == compute_dtype(configs.ModelConfig(), torch.device("cpu"))
    assert torch.bfloat16 == compute_dtype(configs.ModelConfig(), torch.device("cuda"))


def test_devices_divide_what_is_trained_and_layers_are_gathered(capsys):
    from posttrain.models import memory

    config = settings("sft", **{"model.path": "pico", "cluster.devices": 8, "cluster.tensor_parallel_size": 2})
    assert plan.plan_training("sft", config, device_gib=80.0) == 0
    out = capsys.readouterr().out
    ledger = lines_of(out)
    assert ledger["devices"] == ("8", "data parallel 4, tensor parallel 2; ZeRO stage 3")
    assert "on each device with 80.0 GiB" in out and "It fits" in out
    model = memory.empty_model(config.model, "token", torch.bfloat16)
    one = memory.model_memory(model, average=False)
    four = memory.sharded_memory(model, memory.Sharding(4), average=False)
    assert four.masters == pytest.approx(one.masters / 4, rel=1e-3) and four.weights == 0
    assert four.optimizer == pytest.approx(one.optimizer / 4, rel=1e-2)
    split = memory.sharded_memory(model, memory.Sharding(4, 2), average=False)
    assert 0.5 < split.masters / four.masters < 1, "embeddings stay whole"
    by_vocabulary = memory.sharded_memory(model, memory.Sharding(4, 2, sequence=True), average=False)
    assert by_vocabulary.masters == pytest.approx(one.masters / 8, rel=2e-2), "these too"
    whole = sum(p.numel() for p in model.parameters()) * 2
    assert memory.gathered_bytes(model, memory.Sharding(4, zero=2)) >= whole
    assert memory.gathered_bytes(model, memory.Sharding(4)) < memory.gathered_bytes(model, memory.Sharding(4, zero=2))


def test_sequence_parallelism_divides_activations(capsys):
    found = []
    for sequence in (False, True):
        options = {"model.path": "pico", "cluster.devices": 2, "cluster.tensor_parallel_size": 2}
        options |= {"model.gradient_checkpointing": True}
        config = settings("sft", **options, **{"cluster.sequence_parallel": sequence})
        assert plan.plan_training("sft", config, device_gib=80.0) == 0
        ledger = lines_of(capsys.readouterr().out)
        found.append([float(ledger["activations"][0].split()[0]), ledger["devices"][1]])
    (whole, _), (divided, note) = found
    assert divided == pytest.approx(whole / 2, rel=0.1)
    assert note == "data parallel 1, tensor parallel 2 with sequence parallelism; ZeRO stage 3"


def test_context_ranks_divide_the_tokens(capsys):
    found = {}
    for size in (1, 4):
        sizes = {"cluster.devices": 8, "data.max_length": 4096, "train.micro_batch_tokens": 4096}
        config = settings("sft", **{"model.path": "pico", "cluster.context_parallel_size": size} | sizes)
        assert plan.plan_training("sft", config, device_gib=80.0) == 0
        found[size] = lines_of(capsys.readouterr().out)
    one, four = found.values()
    assert four["devices"] == ("8", "data parallel 2, context parallel 4; ZeRO stage 3")
    assert (one["micro-batch tokens"][0], four["micro-batch tokens"][0]) == ("4,096", "16,384")
    assert one["activations"] == four["activations"], "as many tokens on each"


def test_pipeline_stages_divide_the_layers(capsys):
    from posttrain.models import memory

    found = {}
    for size in (1, 4):
        sizes = {"cluster.devices": 4, "data.max_length": 512, "train.micro_batch_tokens": 512}
        config = settings("sft", **{"model.path": "pico", "cluster.pipeline_parallel_size": size} | sizes)
        assert plan.plan_training("sft", config, device_gib=80.0) == 0
        found[size] = lines_of(capsys.readouterr().out)
    assert found[4]["devices"] == ("4", "data parallel 1, pipeline parallel 4; ZeRO stage 3")
    assert found[1]["activations"] == found[4]["activations"], "four micro-batches of a quarter of the layers"
    model = memory.empty_model(config.model, "token", torch.bfloat16)
    whole = sum(p.numel() for p in model.parameters())
    stages = [sum(p.numel() for _, p in held) for held in memory.Sharding(1, pipeline=4).parameters(model)]
    assert sum(stages) == whole
    assert memory.sharded_memory(model, memory.Sharding(1, pipeline=4), average=False).masters == 4 * max(stages)


def test_experts_that_stay_are_not_gathered(capsys, tmp_path):
    from posttrain.models import memory

    folder = str(tiny_folder("mixtral", tmp_path))
    config = settings("sft", **{"model.path": folder, "cluster.devices": 4, "cluster.expert_parallel_size": 4})
    assert plan.plan_training("sft", config, device_gib=80.0) == 0
    note = "data parallel 4, expert parallel 4; ZeRO stage 3"
    assert lines_of(capsys.readouterr().out)["devices"] == ("4", note)
    model = memory.empty_model(config.model, "token", torch.bfloat16)
    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    four, groups = (memory.sharded_memory(model, memory.Sharding(4, experts=size), average=False) for size in (4, 2))
    assert groups.masters - four.masters == sum(p.numel() for p in experts), "a half of them, not a quarter"
    layer = sum(p.numel() for p in experts) // model.config.num_hidden_layers
    all_of_them, own = (memory.gathered_bytes(model, memory.Sharding(4, experts=n)) for n in (1, 4))
    expected = layer * (2 * 2 + 2 + 4) - 2 * sum(p.numel() for p in experts) // 4
    assert all_of_them - own == expected, "two layers and gradients on their way, but a copy in half precision"


def test_roles_on_devices_of_their_own_are_told_apart(capsys):
    own = {"cluster.critic_devices": 2, "cluster.reference_devices": 1, "cluster.rollout_devices": 4}
    together = settings("ppo", **{"model.path": "pico", "cluster.devices": 8})
    apart = settings("ppo", **{"model.path": "pico", "cluster.devices": 8} | own)
    plan.plan_training("ppo", together, device_gib=80.0)
    ledger = lines_of(capsys.readouterr().out)
    assert {"critic", "reference", "generation weights"} <= set(ledger)
    plan.plan_training("ppo", apart, device_gib=80.0)
    out = capsys.readouterr().out
    ours, others = out.split("memory on each device of other roles:")
    assert not {"critic", "reference", "generation weights"} & set(lines_of(ours))
    assert "4 engines" in lines_of(others)["rollout"][1] and "2 devices" in lines_of(others)["critic"][1]


# Pipelines


def pipeline(verb: str, file: str, **options) -> PipelineConfig:
    config = pipeline_defaults(verb)
    given = {
        "model.path": "pico",
        "data.train": (file,),
        "data.eval": (file,),
        "reward.functions": ("gsm8k",),
        "prompts_per_iteration": 4,
    }
    for key, value in (given | {"train.batch_size": 3} | options).items():
        section, _, option = key.rpartition(".")
        setattr(getattr(config, section) if section else config, option, value)
    return config


@pytest.mark.parametrize(
    ("verb", "selected"), [("rejection-sampling", 4), ("iterative-dpo", 4), ("conditional-sft", 12)]
)
def test_the_stages_of_a_pipeline_add_up(verb, selected, tmp_path, capsys):
    rows = str(tmp_path / "prompts.jsonl")
    Path(rows).write_text(10 * '{"prompt": "1+1?"}\n')
    options = {
        "generate.samples_per_prompt": 3,
        "generate.max_tokens": 7,
        "generate.batch_size": 6,
        "train.epochs": 2.0,
        "iterations": 2,
    }
    assert plan_pipeline.plan_pipeline(verb, pipeline(verb, rows, **options)) == 0
    out = capsys.readouterr().out
    ledger = lines_of(out)
    assert ledger["generate"][0] == ledger["score"][0] == "12" and "4 prompts x 3; at most 84 tokens" in out
    assert ledger["batches"][0] == "2" and ledger["select"][0] == str(selected)
    assert ledger["train"] == (str(-(-2 * selected // 3)), "steps at most of 3 examples")
    assert ledger["held-out"][0] == "10"
    assert ("reference" in ledger) == (verb == "iterative-dpo")
    assert "KV cache" in ledger and re.search("^It fits: ", out, re.MULTILINE)


def test_a_pipeline_of_the_datas_own_answers(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text(5 * '{"prompt": "a", "completion": "b"}\n')
    changes = {"generate.samples_per_prompt": 0, "iterations": 1, "prompts_per_iteration": 0, "data.eval": ()}
    assert (
        plan_pipeline.plan_pipeline(
            "conditional-sft", pipeline("conditional-sft", str(tmp_path / "rows.jsonl"), **changes)
        )
        == 0
    )
    ledger = lines_of(capsys.readouterr().out)
    assert "generate" not in ledger and ledger["score"][0] == ledger["select"][0] == "5"


def test_the_command_plans_pipelines(capsys):
    config = Path(__file__).parents[3] / "configs/rejection-sampling.yaml"
    options = ["--data.train", f"{config.parents[1]}/examples/data/questions.jsonl", "--data.eval", "--reward", "gsm8k"]
    assert plan_command.run([str(config), *options, "--device_gib", "80"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("rejection-sampling of pico") and "with 80.0 GiB" in out
