"""Configurations and commands of other libraries, imported and run: the keys of their examples, with tiny values."""

import json
import shlex
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from posttrain.algorithms import ALGORITHMS
from posttrain.config.parsing import from_mapping
from posttrain.mindrlhf import GRPOConfig
from tests.e2e.commands import command

ALPACA = [{"instruction": f"{a}+{b}=", "input": "", "output": str(a + b)} for a, b in ((1, 2), (3, 4), (5, 6), (7, 8))]
CHAT = [
    {"conversations": [{"from": "human", "value": f"{a}+1="}, {"from": "gpt", "value": str(a + 1)}]} for a in range(4)
]
MESSAGES = [
    {"messages": [{"role": "user", "content": f"{a}+1="}, {"role": "assistant", "content": str(a + 1)}]}
    for a in range(4)
]
PAIRS = [{"prompt": f"{a}+1=", "chosen": str(a + 1), "rejected": str(a)} for a in range(4)]
LABELLED = [{"instruction": f"{a}+1=", "response": str(a + 1), "score": a % 2 == 0} for a in range(4)]
VERL = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{a}+1="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a + 1)},
        "extra_info": {"split": "train", "index": a},
    }
    for a in range(4)
]
PROMPTS = [{"context_messages": [{"role": "user", "content": f"{a}+1="}], "answer": str(a + 1)} for a in range(4)]


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, rows in {
        "alpaca": ALPACA,
        "sharegpt": CHAT,
        "messages": MESSAGES,
        "pairs": PAIRS,
        "labelled": LABELLED,
        "verl": VERL,
        "prompts": PROMPTS,
    }.items():
        write(f"{name}.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows))


def write(name, text):
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text, encoding="utf-8")


def imported(*words, capsys):
    """The YAML that import prints, parsed, and its text."""
    capsys.readouterr()
    assert command("import", *words) == 0
    text = capsys.readouterr().out
    return yaml.safe_load(text), text


def refused(*words, capsys):
    capsys.readouterr()
    assert command("import", *words, "-o", "refused.yaml") == 2
    assert not Path("refused.yaml").exists()
    return capsys.readouterr().err


def steps(folder):
    """The number of steps that a run did."""
    rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return max(row["step"] for row in rows if "step" in row)


# LLaMA-Factory

FACTORY = """\
### model
model_name_or_path: pico
trust_remote_code: true
### method
stage: {stage}
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
{more}
### dataset
dataset: {dataset}
template: chatml
cutoff_len: 128
max_samples: 1000
overwrite_cache: true
preprocessing_num_workers: 16
### output
output_dir: saves/pico/lora/{stage}
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 1.0e-4
num_train_epochs: 1.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: false
ddp_timeout: 180000000
"""
DATASETS = {
    "identity": {"file_name": "../alpaca.jsonl"},
    "alpaca_en_demo": {
        "file_name": "../alpaca.jsonl",
        "columns": {"prompt": "instruction", "query": "input", "response": "output"},
    },
    "talks": {"file_name": "../sharegpt.jsonl", "formatting": "sharegpt", "columns": {"messages": "conversations"}},
    "chats": {
        "file_name": "../messages.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "dpo_en_demo": {
        "file_name": "../pairs.jsonl",
        "ranking": True,
        "columns": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
    },
    "kto_en_demo": {
        "file_name": "../labelled.jsonl",
        "columns": {"prompt": "instruction", "response": "response", "kto_tag": "score"},
    },
    "of_a_hub": {"hf_hub_url": "owner/name", "subset": "part", "split": "train", "columns": {"prompt": "text"}},
    "pictures": {"file_name": "x.json", "columns": {"images": "images"}},
}


@pytest.fixture
def factory():
    write("data/dataset_info.json", json.dumps(DATASETS))


@pytest.mark.usefixtures("factory")
@pytest.mark.parametrize(
    ("stage", "dataset", "more"),
    [
        ("sft", "identity,alpaca_en_demo", ""),
        ("sft", "talks", ""),
        ("sft", "chats", ""),
        ("dpo", "dpo_en_demo", "pref_beta: 0.1\npref_loss: sigmoid"),
        ("kto", "kto_en_demo", "pref_beta: 0.1"),
        ("rm", "dpo_en_demo", ""),
    ],
)
def test_llama_factory_runs(stage, dataset, more):
    write("c.yaml", FACTORY.format(stage=stage, dataset=dataset, more=more))
    assert command("run", "c.yaml", "--devices", 1) == 0
    examples = 8 if "," in dataset else 4
    assert steps(f"saves/pico/lora/{stage}") == examples // 2


@pytest.mark.usefixtures("factory")
def test_every_key_of_llama_factory_is_in_the_file(capsys):
    text = FACTORY.format(stage="sft", dataset="identity,alpaca_en_demo", more="")
    write("c.yaml", text)
    config, written = imported("c.yaml", "--devices", 4, capsys=capsys)
    assert all(key in written for key in yaml.safe_load(text))
    assert config["verb"] == "sft"
    assert config["model"] == {
        "path": "pico",
        "lora_rank": 8,
        "lora_alpha": 16,
        "lora_target_modules": ["all-linear"],
    }
    assert config["data"]["train"] == ["data/../alpaca.jsonl"] * 2 and "map_keys" not in config["data"]
    assert config["train"]["batch_size"] == 1 * 2 * 4 and config["cluster"] == {"devices": 4}
    assert config["train"]["min_lr_ratio"] == 0 and config["train"]["adam_beta2"] == 0.999  # their default
    assert "adam_beta2: 0.999  # adam_beta2 (default of LLaMA-Factory)" in written
    assert "# overwrite_cache: true: not needed: " in written


@pytest.mark.usefixtures("factory")
@pytest.mark.parametrize(
    ("change", "words", "reason"),
    [
        (("dataset: identity", "dataset: nobody"), (), "has no data set nobody"),
        (("dataset: identity", "dataset: pictures"), (), "pictures has images"),
        (("dataset: identity", "dataset: identity,dpo_en_demo"), (), "different data.map_keys"),
        (
            ("lora_target: all", "lora_target: all\noft_rank: 8"),
            (),
            "oft_rank: 8: no counterpart: this way of training",
        ),
        (("lora_target: all", "lora_target: all\npissa_init: true\npissa_iter: 4"), (), "pissa_init: true"),
        (("lora_target: all", "lora_target: all\noptim: lion_32bit"), (), "optim: lion_32bit"),
        (("lora_target: all", "lora_target: all\nfreeze_trainable_modules: mlp"), (), "freeze_trainable_modules: mlp"),
        (("lora_target: all", "lora_target: all\nlora_rnk: 8"), (), "lora_rnk: 8: no such option"),
        (("template: chatml", "template: nonsense"), (), "no template and no file 'nonsense'"),
        (("learning_rate", "lr"), ("--train.batch_size", 1), "lr: 1.0e-4: no such option"),
    ],
)
def test_what_would_change_the_training_is_refused(change, words, reason, capsys):
    write("c.yaml", FACTORY.format(stage="sft", dataset="identity", more="").replace(*change))
    assert reason in refused("c.yaml", "--devices", 1, *words, capsys=capsys)


@pytest.mark.usefixtures("factory")
@pytest.mark.parametrize(
    ("more", "devices", "expected"),
    [
        ("use_dora: true\nuse_rslora: true", 1, {"model.use_dora": True, "model.use_rslora": True}),
        ("pissa_init: true", 1, {"model.lora_init": "pissa_niter_16"}),
        ("pissa_init: true\npissa_iter: -1", 1, {"model.lora_init": "pissa"}),
        ("neftune_noise_alpha: 5", 2, {"train.neftune_noise_alpha": 5.0}),
        ("optim: adamw_bnb_8bit", 1, {"train.optimizer": "adamw_8bit"}),
        ("optim: paged_adamw_8bit", 2, {"train.optimizer": None}),
        ("optim: adafactor", 1, {"train.optimizer": "adafactor"}),
        ("use_muon: true", 1, {"train.optimizer": "muon"}),
        (
            "finetuning_type: freeze\nfreeze_trainable_layers: 1\nfreeze_extra_modules: embed_tokens,norm",
            1,
            {
                "model.trainable_layers": 1,
                "model.trainable_parameters": [".*embed_tokens", ".*norm"],
                "model.lora_rank": None,
            },
        ),
    ],
)
def test_optimizers_adapters_and_frozen_layers_are_taken_over(more, devices, expected, capsys):
    text = FACTORY.format(stage="sft", dataset="identity", more=more)
    write("c.yaml", text.replace("finetuning_type: lora\n", "") if "finetuning_type" in more else text)
    config, _ = imported("c.yaml", "--devices", devices, capsys=capsys)
    found = {key: config.get(key.split(".")[0], {}).get(key.split(".")[1]) for key in expected}  # None: the default
    assert found == expected


@pytest.mark.usefixtures("factory")
def test_sizes_per_device_need_the_number_of_devices(capsys):
    write("c.yaml", FACTORY.format(stage="sft", dataset="identity", more=""))
    assert "Give it with --devices N" in refused("c.yaml", capsys=capsys)
    config, _ = imported("c.yaml", "--train.batch_size", 5, capsys=capsys)
    assert config["train"]["batch_size"] == 5
    config, text = imported("CUDA_VISIBLE_DEVICES=0,1 llamafactory-cli train c.yaml learning_rate=1", capsys=capsys)
    assert config["train"]["batch_size"] == 4 and config["train"]["learning_rate"] == 1
    assert config["cluster"]["devices"] == 2 and "CUDA_VISIBLE_DEVICES" in text


@pytest.mark.usefixtures("factory")
@pytest.mark.parametrize("verb", ["import", "run"])
def test_an_output_file_is_not_replaced_unless_asked_for(verb, capsys):
    write("c.yaml", FACTORY.format(stage="sft", dataset="identity", more=""))
    write("mine.yaml", "seed: 3\n")
    assert command(verb, "c.yaml", "--devices", 1, "-o", "mine.yaml") == 2
    assert "mine.yaml exists" in capsys.readouterr().err
    assert Path("mine.yaml").read_text() == "seed: 3\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("verb: sft\nmodel:\n  path: pico\n", "c.yaml: is a configuration of posttrain already: posttrain sft c.yaml"),
        ("stage: sft\n do_train: true\n", "c.yaml:2: cannot be read as YAML"),
    ],
)
def test_files_that_are_not_of_another_library(text, reason, capsys):
    write("c.yaml", text)
    assert reason in refused("c.yaml", capsys=capsys)


@pytest.mark.usefixtures("factory")
def test_a_key_is_left_out_if_that_is_asked_for(capsys):
    write("c.yaml", FACTORY.format(stage="sft", dataset="identity", more="use_badam: true\noft_rank: 8"))
    words = ("c.yaml", "--devices", 1, "--ignore", "use_badam,oft_rank")
    _, text = imported(*words, capsys=capsys)
    assert "# oft_rank: 8: left out by --ignore (no counterpart: this way of training does not exist)" in text
    assert command("import", *words, "-o", "new.yaml") == 0
    assert "Start it with: posttrain sft new.yaml" in capsys.readouterr().out
    assert command("import", *words, "-o", "new.yaml") == 2


# axolotl

AXOLOTL = """\
base_model: pico
load_in_8bit: false
load_in_4bit: false
strict: false
{head}
dataset_prepared_path: last_run_prepared
val_set_size: 0
output_dir: ./outputs/lora-out
adapter: lora
lora_model_dir:
sequence_len: 256
sample_packing: true
eval_sample_packing: true
pad_to_sequence_len: true
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_fan_in_fan_out:
lora_target_modules:
  - gate_proj
  - down_proj
wandb_project:
wandb_entity:
gradient_accumulation_steps: 2
micro_batch_size: 1
num_epochs: 1
optimizer: adamw_8bit
lr_scheduler: cosine
learning_rate: 0.0002
train_on_inputs: false
group_by_length: false
bf16: auto
fp16:
tf32: false
gradient_checkpointing: true
early_stopping_patience:
resume_from_checkpoint:
local_rank:
logging_steps: 1
flash_attention: true
loss_watchdog_threshold: 5.0
loss_watchdog_patience: 3
warmup_steps: 1
evals_per_epoch: 4
saves_per_epoch: 1
debug:
deepspeed:
weight_decay: 0.0
fsdp:
fsdp_config:
special_tokens:
  pad_token: "<|end_of_text|>"
"""
AXOLOTL_DATA = {
    "alpaca": "datasets:\n  - path: alpaca.jsonl\n    type: alpaca",
    "chat": (
        "chat_template: chatml\ndatasets:\n  - path: sharegpt.jsonl\n    type: chat_template\n"
        "    field_messages: conversations\n    message_property_mappings:\n      role: from\n      content: value\n"
        "    roles:\n      user: [human]\n      assistant: [gpt]"
    ),
    "dpo": "rl: dpo\nchat_template: chatml\ndatasets:\n  - path: pairs.jsonl\n    type: chatml.prompt_pairs",
}


@pytest.mark.parametrize("kind", AXOLOTL_DATA)
def test_axolotl_runs(kind, capsys):
    text = AXOLOTL.format(head=AXOLOTL_DATA[kind])
    write("c.yml", text)
    config, written = imported("axolotl train c.yml", "--devices", 1, capsys=capsys)
    assert all(key in written for key in yaml.safe_load(text))
    assert config["verb"] == ("dpo" if kind == "dpo" else "sft")
    assert config["data"]["chat_template"] == ("alpaca" if kind == "alpaca" else "chatml")
    assert command("run", "c.yml", "--devices", 1) == 0
    assert steps("outputs/lora-out") == 2


# TRL

TRL_SFT = """--model_name_or_path pico --dataset_name messages.jsonl --learning_rate 2.0e-5 --num_train_epochs 1
--packing --per_device_train_batch_size 1 --gradient_accumulation_steps 2 --gradient_checkpointing
--eos_token '<|im_end|>' --use_peft --lora_r 4 --lora_alpha 16 --output_dir out/sft --push_to_hub"""


def test_trl_runs(capsys):
    launcher = "accelerate launch --config_file acc.yaml --num_processes 2 trl/scripts/sft.py "
    config, text = imported(launcher + TRL_SFT.replace("\n", " "), capsys=capsys)
    assert (config["verb"], config["train"]["batch_size"], config["cluster"]["devices"]) == ("sft", 4, 2)
    assert config["model"]["lora_target_modules"] == ["q_proj", "v_proj"] and config["data"]["max_length"] == 1024
    assert "posttrain export --push does" in text and "# accelerate launch" in text
    assert command("run", "--devices", 1, "trl", "sft", *shlex.split(TRL_SFT)) == 0
    assert steps("out/sft") == 2
    write(
        "dpo.yaml",
        "model_name_or_path: pico\ndataset_name: pairs.jsonl\noutput_dir: out/dpo\nbeta: 0.2\nloss_type: sigmoid\n"
        "per_device_train_batch_size: 2\nnum_train_epochs: 1\nlogging_steps: 25\nlr_scheduler_type: cosine\n",
    )
    assert command("run", "trl dpo --config dpo.yaml --learning_rate 1e-4", "--devices", 1) == 0
    assert steps("out/dpo") == 2
    assert "--trainer" in refused("dpo.yaml", "--devices", 1, "--library", "TRL", capsys=capsys)


TRL_GRPO = """--model_name_or_path pico --dataset_name prompts.jsonl --output_dir out/grpo --learning_rate 1e-5
--dtype float32 --max_completion_length 4 --use_vllm --vllm_mode colocate --per_device_train_batch_size 2
--gradient_accumulation_steps 2 --num_generations 2 --reward_funcs accuracy_reward --log_completions --max_steps 1"""


def test_trl_grpo_counts_completions(capsys):
    words = ("trl grpo " + TRL_GRPO.replace("\n", " "), "--devices", 1, "--rollout.engine", "local")
    more = (
        "--data.map_keys",
        '{"prompt": "context_messages", "ground_truth": "answer"}',
        "--reward.functions",
        "gsm8k",
    )
    config, _ = imported(*words, capsys=capsys)
    assert config["train"]["batch_size"] == 2 and config["reward"]["functions"] == ["math"]
    assert config["algo"]["loss_aggregation"] == "token_mean" and config["algo"]["kl_coef"] == 0  # TRL's defaults
    assert command("run", *words, *more) == 0
    assert steps("out/grpo") == 1
    think = words[0].replace("accuracy_reward", "think_format_reward")
    assert "is a function of TRL" in refused(think, *words[1:], capsys=capsys)


# verl

VERL_SCRIPT = """\
set -x
DATA=$PWD
# a comment
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=${DATA}/verl.jsonl \\
    data.val_files="$DATA/verl.jsonl" \\
    data.train_batch_size=4 \\
    data.val_batch_size=1312 \\
    data.max_prompt_length=64 \\
    data.max_response_length=4 \\
    actor_rollout_ref.model.path=pico \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=2 \\
    actor_rollout_ref.actor.ppo_micro_batch_size=128 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    actor_rollout_ref.model.enable_gradient_checkpointing=True \\
    actor_rollout_ref.actor.fsdp_config.param_offload=False \\
    actor_rollout_ref.actor.fsdp_config.grad_offload=False \\
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=False \\
    actor_rollout_ref.rollout.log_prob_micro_batch_size=128 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \\
    actor_rollout_ref.rollout.n=2 \\
    actor_rollout_ref.ref.log_prob_micro_batch_size=128 \\
    actor_rollout_ref.ref.fsdp_config.param_offload=True \\
    algorithm.kl_ctrl.kl_coef=0.001 \\
    trainer.critic_warmup=0 \\
    +trainer.val_before_train=False \\
    trainer.logger=['console','tensorboard'] \\
    trainer.project_name='verl_grpo_example_gsm8k' \\
    trainer.experiment_name='function_rm' \\
    trainer.default_local_dir=out/verl \\
    trainer.n_gpus_per_node=8 \\
    trainer.nnodes=1 \\
    trainer.save_freq=-1 \\
    trainer.test_freq=5 \\
    trainer.total_epochs=1 $@ 2>&1 | tee verl.log
"""


def test_a_script_of_verl_runs(capsys):
    write("run.sh", VERL_SCRIPT)
    assert "reward.functions is not set" in refused("run.sh", capsys=capsys)
    words = ("run.sh", "--reward", "gsm8k")
    config, text = imported(*words, capsys=capsys)
    names = [line.split("=")[0].strip(" +") for line in VERL_SCRIPT.splitlines() if "=" in line][1:]
    assert all(name in text for name in names)
    assert config["verb"] == "grpo" and config["cluster"]["devices"] == 8
    assert config["algo"]["mini_batch_size"] == 4 and config["algo"]["kl_coef"] == 0.001
    assert config["train"]["lr_scheduler"] == "constant" and config["train"]["weight_decay"] == 0.01  # their defaults
    assert config["rollout"]["vllm_options"] == {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.6}
    assert command("run", *words, "--cluster.devices", 1, "--rollout.engine", "local") == 0
    assert steps("out/verl") == 1


def test_a_script_is_never_executed_and_unknown_variables_are_refused(capsys):
    write("run.sh", "touch executed\nMODEL=$(touch executed; echo pico)\n" + VERL_SCRIPT.replace("pico", "$MODEL"))
    assert "nothing is executed" in refused("run.sh", "--reward", "gsm8k", capsys=capsys)
    write("run.sh", VERL_SCRIPT.replace("pico", "$1"))
    assert "$1 is not set" in refused("run.sh", "--reward", "gsm8k", capsys=capsys)
    assert not Path("executed").exists()


# OpenRLHF of June 2024

OPENRLHF_SCRIPT = """\
set -x

read -r -d '' training_commands <<EOF
../train_sft.py \\
    --max_len 128 \\
    --dataset alpaca.jsonl \\
    --dataset_probs 1.0 \\
    --train_batch_size 2 \\
    --micro_train_batch_size 1 \\
    --max_samples 500000 \\
    --pretrain pico \\
    --save_path ./ckpt/sft \\
    --save_steps -1 \\
    --logging_steps 1 \\
    --eval_steps -1 \\
    --zero_stage 2 \\
    --max_epochs 1 \\
    --bf16 \\
    --flash_attn \\
    --learning_rate 5e-6 \\
    --gradient_checkpointing
EOF
    # --wandb [WANDB_TOKENS]

if [[ ${1} != "slurm" ]]; then
    export PATH=$HOME/.local/bin/:$PATH
    deepspeed $training_commands
fi
"""
RM = """deepspeed ../train_rm.py --save_path ckpt/rm --save_steps -1 --logging_steps 1 --eval_steps -1
--train_batch_size 2 --micro_train_batch_size 1 --pretrain pico --max_epochs 1 --max_len 128 --zero_stage 3
--learning_rate 9e-6 --dataset pairs.jsonl --dataset_probs 1.0 --flash_attn --gradient_checkpointing --max_samples 4"""
KTO = """deepspeed ../train_kto.py --save_path ckpt/kto --train_batch_size 2 --micro_train_batch_size 1 --pretrain pico
--max_epochs 1 --max_len 128 --zero_stage 3 --beta 0.1 --learning_rate 5e-7 --dataset labelled.jsonl
--input_key instruction --output_key response --label_key score --flash_attn --gradient_checkpointing"""
PPO = """ray job submit --address="http://127.0.0.1:8265" --runtime-env-json='{"working_dir": "/openrlhf"}' --
python3 examples/train_ppo_ray.py --ref_num_nodes 1 --ref_num_gpus_per_node 2 --reward_num_nodes 1
--reward_num_gpus_per_node 2 --critic_num_nodes 1 --critic_num_gpus_per_node 2 --actor_num_nodes 1
--actor_num_gpus_per_node 2 --vllm_num_engines 2 --vllm_tensor_parallel_size 2 --colocate_critic_reward
--colocate_actor_ref --ref_reward_offload --pretrain pico --reward_pretrain ckpt/rm --save_path ckpt/ppo
--micro_train_batch_size 8 --train_batch_size 4 --micro_rollout_batch_size 16 --rollout_batch_size 4
--max_samples 100000 --max_epochs 1 --prompt_max_len 64 --generate_max_len 4 --zero_stage 3 --bf16
--actor_learning_rate 5e-7 --critic_learning_rate 9e-6 --init_kl_coef 0.01 --prompt_data prompts.jsonl
--input_key context_messages --apply_chat_template --normalize_reward --adam_offload --gradient_checkpointing"""


def test_openrlhf_runs(capsys):
    write("train_sft_llama.sh", OPENRLHF_SCRIPT)
    assert command("run", "train_sft_llama.sh", "--model.dtype", "float32") == 0
    assert steps("ckpt/sft") == 2
    used = yaml.safe_load(Path("ckpt/sft/config.yaml").read_text())
    assert used["data"]["chat_template"].startswith("Human: {}")  # unless apply_chat_template is given
    assert used["train"]["warmup_ratio"] == 0.03 and used["train"]["min_lr_ratio"] == 0
    for text, folder, count in ((RM, "rm", 2), (KTO, "kto", 2)):
        assert command("run", text.replace("\n", " ")) == 0
        assert steps(f"ckpt/{folder}") == count
    words = PPO.replace("\n", " ")
    config, written = imported(words, capsys=capsys)
    assert config["cluster"] == {
        "devices": 8,
        "zero_stage": 3,
        "offload": ["reference", "reward", "optimizer"],
        "critic_devices": 2,
        "reward_colocate_with": ["critic"],
        "rollout_devices": 4,
        "rollout_tensor_parallel_size": 2,
    }
    assert config["data"]["map_keys"] == {"prompt": "context_messages"} and "# ray job submit" in written
    assert (config["train"]["batch_size"], config["algo"]["mini_batch_size"]) == (4, 4)
    assert "chat_template" not in config["data"]  # apply_chat_template is given
    assert command("run", words, "--cluster.devices", 1, "--rollout.engine", "local", "--model.dtype", "float32") == 0
    assert steps("ckpt/ppo") == 1


def test_batch_inference_and_chat_of_openrlhf(capsys):
    generate = (
        "python ../batch_inference.py --eval_task generate --pretrain pico --max_new_tokens 4 --prompt_max_len 64 "
        "--dataset prompts.jsonl --input_key context_messages --apply_chat_template --temperature 1.0 --best_of_n 2 "
        "--iter 0 --rollout_batch_size 2 --output_path generate.jsonl"
    )
    assert command("run", generate) == 0
    assert len(Path("generate.jsonl").read_text().splitlines()) == 4
    config, _ = imported(generate.replace("--eval_task generate ", "--eval_task generate_vllm --tp_size 4 "),
                         capsys=capsys)  # fmt: skip
    assert config["engine"] == "vllm" and config["vllm_options"] == {"tensor_parallel_size": 4}
    assert command("run", RM.replace("\n", " ")) == 0
    for method, count in (("rs", 2), ("iter_dpo", None), ("ca", 4)):
        score = (
            f"deepspeed ../batch_inference.py --eval_task rm --pretrain ckpt/rm --max_len 128 --dataset generate.jsonl "
            f"--dataset_probs 1.0 --zero_stage 0 --post_processor {method} --micro_batch_size 4 "
            f"--output_path {method}.jsonl"
        )
        if count is not None:
            assert command("run", score) == 0
            assert len(Path(f"{method}.jsonl").read_text().splitlines()) == count
        else:
            config, text = imported(score, capsys=capsys)
            assert config["output_file"] == "iter_dpo.jsonl.scored.jsonl" and config["reward"] == ["model:ckpt/rm"]
            assert "# then: posttrain select pairs iter_dpo.jsonl.scored.jsonl --output_file iter_dpo.jsonl" in text
    chat = "python examples/interactive_chat.py --bf16 --pretrain pico"
    config, _ = imported(chat, capsys=capsys)
    assert config == {
        "verb": "chat",
        "models": ["pico"],
        "dtype": "bfloat16",
        "chat_template": "Human: {}\\nAssistant: ",
        "temperature": 0.2,
        "top_p": 0.9,
        "repetition_penalty": 1.2,
    }
    conditional = f"{chat} --enable_ca --ca_prompt '<rm_score>: 5.00'"
    assert imported(conditional, capsys=capsys)[0]["condition"] == 5.0
    assert "--condition" in refused(conditional.replace("rm_score", "score"), capsys=capsys)


DPO = """--save_path ckpt/dpo --save_steps -1 --train_batch_size 2 --micro_train_batch_size 1 --pretrain pico --bf16
--max_epochs 1 --zero_stage 3 --dataset pairs.jsonl,pairs.jsonl --dataset_probs 0.75,0.25 --max_samples 3 --flash_attn
--gradient_checkpointing --adam_offload"""


def test_the_programs_of_2024_had_other_defaults(capsys):
    """examples/train_dpo.py at ff8249f1 (June 2024) and openrlhf/cli/train_dpo.py of 2025 differ."""
    words = DPO.replace("\n", " ")
    old, _ = imported(f"deepspeed ../train_dpo.py {words}", capsys=capsys)
    new, _ = imported(f"deepspeed --module openrlhf.cli.train_dpo {words}", capsys=capsys)
    assert (old["algo"]["beta"], new["algo"]["beta"]) == (0.01, 0.1)
    assert old["data"]["chat_template"] == "Human: {}\\nAssistant: " and "chat_template" not in new["data"]
    assert old["train"]["min_lr_ratio"] == 0 and "min_lr_ratio" not in new["train"]  # here 0.1, as there
    assert old["cluster"]["offload"] == ["moments"]
    ppo = PPO.replace("\n", " ")
    old, _ = imported(ppo, capsys=capsys)
    new, _ = imported(ppo.replace("examples/train_ppo_ray.py", "-m openrlhf.cli.train_ppo_ray"), capsys=capsys)
    assert old["algo"]["loss_aggregation"] == "sample_mean" and "loss_aggregation" not in new["algo"]
    assert old["reward"]["clip"] == new["reward"]["clip"] == 10
    pretraining, _ = imported(f"{ppo} --pretrain_data alpaca.jsonl", capsys=capsys)
    assert pretraining["algo"]["pretrain_coef"] == [0.05]


def test_max_samples_bounds_a_mixture_too(capsys):
    """There the sources are cut to max_samples each, mixed, and the mixture is cut again."""
    words = f"deepspeed ../train_dpo.py {DPO} --learning_rate 5e-7".replace("\n", " ")
    assert command("run", words, "--model.dtype", "float32", "--train.batch_size", 1) == 0
    assert steps("ckpt/dpo") == 3
    one = words.replace("pairs.jsonl,pairs.jsonl", "pairs.jsonl").replace("0.75,0.25", "1.0")
    assert imported(one, capsys=capsys)[0]["data"]["max_examples"] == 3


def test_a_constant_schedule_has_no_warm_up_there(capsys):
    words = f"deepspeed ../train_sft.py {DPO.replace('--adam_offload', '--lr_scheduler constant')}".replace("\n", " ")
    config, _ = imported(words.replace("pairs", "alpaca"), capsys=capsys)
    assert config["train"]["lr_scheduler"] == "constant" and "warmup_ratio" not in config["train"]


def test_kto_of_openrlhf_takes_pairs_too(capsys):
    """Without --unpaired_preference the two sides of a pair are two examples there."""
    keys = "--vanilla_loss --prompt_key prompt --chosen_key chosen --rejected_key rejected"
    words = (
        f"deepspeed ../train_kto.py {DPO} {keys}".replace("\n", " ")
        .replace("pairs.jsonl,pairs.jsonl", "pairs.jsonl")
        .replace("0.75,0.25", "1.0")
    )
    assert command("run", words, "--model.dtype", "float32") == 0
    assert steps("ckpt/dpo") == 3  # 3 pairs, 6 examples, 2 per step


def test_several_commands_are_imported_one_by_one(capsys):
    write("all.sh", f"{RM.replace(chr(10), ' ')}\n{KTO.replace(chr(10), ' ')}\n")
    assert "has 2 commands; import them one by one" in refused("all.sh", capsys=capsys)


# MindSpeed-RL, MindRLHF

MINDSPEED_RL = """\
defaults:
  - model:
      - qwen25_7b
megatron_training:
  model: qwen25_7b
  use_fused_rmsnorm: true
  use_mcore_models: true
  sequence_parallel: true
  use_flash_attn: true
  no_masked_softmax_fusion: true
  attention_softmax_in_fp32: true
  no_gradient_accumulation_fusion: true
  use_fused_swiglu: true
  bf16: false
  use_distributed_optimizer: true
  tokenizer_type: PretrainedFromHF
  tokenizer_name_or_path: pico
  global_batch_size: 2
  seq_length: 128
  save_interval: 10000
  train_iters: 1
  stage: ray_grpo
  attention_dropout: 0.0
  init_method_std: 0.01
  hidden_dropout: 0.0
  distributed_backend: nccl
  no_shared_storage: true
  variable_seq_lengths: true
  dataset_additional_keys: ['labels']
  data_path: verl.jsonl
  split: 100,0,0
actor_config:
  model: qwen25_7b
  micro_batch_size: 1
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 4
  lr: 5e-7
  lr_decay_style: cosine
  min_lr: 5e-8
  weight_decay: 0.0
  lr_warmup_fraction: 0.0
  clip_grad: 1.0
  adam_beta1: 0.9
  adam_beta2: 0.999
  initial_loss_scale: 4096
  finetune: true
  load: pico
  save: ./ckpt
  no_load_optim: false
  no_load_rng: false
  no_save_optim: false
  no_save_rng: false
ref_config:
  model: qwen25_7b
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 2
  micro_batch_size: 1
  load: pico
  no_load_optim: true
  no_load_rng: true
rl_config:
  blocking: false
  gamma: 1.0
  lam: 0.95
  actor_forward_micro_batch_size: 1
  adv_estimator: group_norm
  kl_penalty: kl
  kl_ctrl_type: fixed
  init_kl_coef: 0.0
  mini_batch_size: 4
  max_prompt_length: 64
  epochs: 1
  clip_ratio: 0.2
  entropy_coeff: 0.0
  shuffle_minibatch: false
  n_samples_per_prompt: 2
  colocate_actor_ref: false
  colocate_all_models: false
  rule_reward: true
  verifier_function: ["acc"]
  verifier_weight: [1.0]
  use_tensorboard: true
  wandb_exp_name: x
  wandb_save_dir: y
  num_cpus_for_local_task: 1
  actor_resource:
    num_npus: 8
  reference_resource:
    num_npus: 8
generate_config:
  trust_remote_code: true
  infer_tensor_parallel_size: 2
  infer_pipeline_parallel_size: 1
  infer_expert_parallel_size: 1
  max_num_seqs: 128
  max_num_batched_tokens: 128000
  max_model_len: 4096
  dtype: "bfloat16"
  gpu_memory_utilization: 0.9
  offload_train_optimizer: true
  offload_train_grad: true
  offload_train_param: true
  sampling_config:
    max_tokens: 4
    logprobs: 1
    top_p: 0.9
    top_k: 50
    min_p: 0.01
    temperature: 0.8
    detokenize: false
"""


def leaves(mapping, prefix=""):
    for key, value in mapping.items():
        yield from leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"]


def test_mindspeed_rl_runs(capsys):
    write("configs/r1_zero_qwen25_7b.yaml", MINDSPEED_RL)
    words = "python cli/train_grpo.py --config-name r1_zero_qwen25_7b.yaml | tee logs/full.log"
    config, text = imported(words, capsys=capsys)
    assert all(name in text for name in leaves(yaml.safe_load(MINDSPEED_RL)))
    assert config["cluster"]["devices"] == 16 and config["cluster"]["reference_devices"] == 8
    assert config["rollout"]["top_k"] == 50 and config["algo"]["mini_batch_size"] == 4
    assert config["rollout"]["prompts_per_stage"] == 1  # blocking: false
    assert config["cluster"]["offload"] == ["optimizer"] and config["algo"]["shuffle_mini_batch"] is False
    assert command("run", words, "--cluster.devices", 1, "--rollout.engine", "local", "--algo.kl_estimator", "k3") == 0
    assert steps("ckpt") == 1


def test_releases_of_mindspeed_rl_differ(capsys):
    """Until May 2025 mini_batch_size counts completions, the loss has no entropy, and its KL is k3; since, prompts."""
    text = MINDSPEED_RL.replace("entropy_coeff: 0.0", "entropy_coeff: 0.001").replace(
        "blocking: false", "blocking: true"
    )
    text = text.replace("init_kl_coef: 0.0", "init_kl_coef: 0.1").replace("  weight_decay: 0.0\n", "")
    text = text.replace("  global_batch_size: 2", "  weight_decay: 0.3\n  global_batch_size: 2")  # for all roles
    write("old.yaml", text)
    old, written = imported("old.yaml", capsys=capsys)
    assert old["algo"]["mini_batch_size"] == 4 and "entropy_coef" not in old["algo"]
    assert "rl_config.entropy_coeff: 0.001: no effect in releases before May 2025" in written
    assert old["algo"]["kl_estimator"] == "k3" and "prompts_per_stage" not in old["rollout"]
    assert old["cluster"]["offload"] == ["optimizer", "policy", "engine"] and old["train"]["weight_decay"] == 0.3
    telling = "  colocate_actor_ref: false\n  colocate_all_models: false\n"
    later = text.replace(telling, "  guarantee_order: true\n")
    write("new.yaml", later.replace("kl_penalty: kl", "kl_penalty: low_var_kl"))
    new, _ = imported("new.yaml", capsys=capsys)
    assert new["algo"]["mini_batch_size"] == 8 and new["algo"]["entropy_coef"] == 0.001
    write("k1.yaml", later)
    assert "k1 has no gradient on average" in refused("k1.yaml", capsys=capsys)
    write("unknown.yaml", text.replace(telling, "").replace("mini_batch_size: 4", "mini_batch_size: 2"))
    assert "may count prompts or completions" in refused("unknown.yaml", capsys=capsys)


def test_the_launch_of_the_pcl_suite(capsys):
    write("finetune.yaml", "parallel_config:\n  data_parallel: 1\n  model_parallel: 4\n  pipeline_stage: 2\n")
    write("predict.yaml", "model:\n  model_config:\n    temperature: 0.9\nparallel_config:\n  data_parallel: 2\n")
    words = (
        "msrun --worker_num=8 --local_worker_num=8 --master_addr=127.0.0.1 --master_port=9190 --join=False "
        "--log_dir=./qwen2_5_one_log examples/qwen_grpo_tutorial/grpo_one_stage.py "
        "--sft_path_infer ./predict.yaml --sft_path_train ./finetune.yaml --vocab_path tok/vocab.json "
        "--merges_file_path tok/merges.txt --mind_dataset_dir gsm8k.mindrecord --save_data_file grpo.mindrecord "
        "--save_ckpt_dir ckpt --use_parallel True --load_sft_checkpoint_infer pico --load_sft_checkpoint_train pico "
        "--load_ref_checkpoint pico --enable_compile_cache False --only_save_strategy False"
    )
    assert "posttrain plan" in refused(words.replace("strategy False", "strategy True"), capsys=capsys)
    given = (words, "--data.train", "verl.jsonl")
    config, text = imported(*given, capsys=capsys)
    assert config["cluster"] == {"devices": 8, "tensor_parallel_size": 4} and config["model"]["tokenizer"] == "tok"
    assert config["model"] == {"path": "pico", "tokenizer": "tok"} and "--enable_compile_cache False" in text
    assert config["reward"]["functions"] == ["accuracy_reward", "format_reward"]  # what the program has
    assert config["rollout"] == {"samples_per_prompt": 2, "max_tokens": 512, "temperature": 0.9}
    ours = from_mapping("grpo", ALGORITHMS["grpo"], {k: v for k, v in config.items() if k != "verb"})
    theirs = GRPOConfig(epochs=100)
    assert asdict(ours.algo).items() >= (theirs.algo_options("pico") | {"reference_sync_steps": 50}).items()
    assert asdict(ours.train).items() >= (theirs.train_options() | {"batch_size": 8}).items()
    tiny = ("--cluster.devices", 1, "--model.tokenizer", "pico", "--train.max_steps", 1, "--rollout.max_tokens", 4)
    assert command("run", *given, *tiny, "--train.batch_size", 2) == 0
    assert steps("ckpt") == 1
    write("predict.yaml", "model:\n  model_config:\n    repetition_penalty: 1.05\n")
    assert "repetition_penalty is 1.05" in refused(*given, capsys=capsys)


def test_flags_that_posttrain_takes_as_they_are(capsys):
    words = (
        "python ./preprocess_data.py --input alpaca.jsonl --tokenizer-name-or-path pico --output-prefix out/alpaca "
        "--workers 1 --tokenizer-type PretrainedFromHF --handler-name AlpacaStyleInstructionHandler "
        "--prompt-type chatml"
    )
    assert "posttrain takes these flags as they are" in refused(words, capsys=capsys)
    assert command("run", words) == 0
    assert Path("out/alpaca_packed_input_ids_document.bin").is_file()


def test_a_file_for_preprocessing_is_taken_as_it_is(capsys):
    write(
        "configs/datasets/grpo_pe_nlp.yaml",
        "input: alpaca.jsonl\ntokenizer_name_or_path: pico\noutput_prefix: out/prompts\nworkers: 1\n"
        "handler_name: R1AlpacaStyleInstructionHandler\ntokenizer_type: HuggingFaceTokenizer\nlog_interval: 1000\n"
        "prompt_type: qwen_r1\nprompt_type_path: templates.json\ndataset_additional_keys: [labels]\n"
        'map_keys: {"prompt": "instruction", "query": "", "response": "output", "system": ""}\n',
    )
    write("templates.json", json.dumps([{"name": "qwen_r1", "format_user": {"slots": ["Q: {{content}} A: "]}}]))
    write(
        "examples/data/preprocess_data.sh",
        'SCRIPT_DIR=$(cd "$(dirname "$0")" && pwd)\nPROJECT_PATH=$SCRIPT_DIR/../..\ndefault_config="alpaca_pairwise"\n'
        'if [ -z "$1" ]; then\n    config=$default_config\nelse\n    config=$1\nfi\n'
        'python "$PROJECT_PATH"/cli/preprocess_data.py $config\n',
    )
    assert command("run", "bash", "examples/data/preprocess_data.sh", "grpo_pe_nlp") == 0
    assert Path("out/prompts_packed_input_ids_document.bin").is_file()
    assert "alpaca_pairwise.yaml: no such configuration file" in refused(
        "examples/data/preprocess_data.sh", capsys=capsys
    )


PREPARE = "python preprocess_data.py --input alpaca.jsonl --tokenizer-name-or-path pico --output-prefix out/ppo"


def test_prompts_for_ppo_are_preprocessed():
    assert command("run", f"{PREPARE} --handler-name PPOAlpacaStyleInstructionHandler --overwrite-cache") == 0
    options = ("--reward", "format", "--rollout.max_tokens", 2, "--train.max_steps", 1, "--train.batch_size", 2)
    assert command("grpo", "--model", "pico", "--data", "out/ppo", *options, "--output_dir", "run") == 0


# MindFormers

MINDFORMERS = """\
seed: 42
output_dir: './output'
load_checkpoint: 'pico'
auto_trans_ckpt: False
run_mode: 'finetune'
trainer:
  type: CausalLanguageModelingTrainer
  model_name: 'qwen2_7b'
runner_config:
  epochs: 1
  batch_size: 1
  sink_mode: True
runner_wrapper:
  type: MFTrainOneStepCell
  use_clip_grad: True
optimizer:
  type: AdamW
  betas: [0.9, 0.95]
  eps: 1.e-8
  learning_rate: 1.e-6
  weight_decay: 0.01
lr_schedule:
  type: CosineWithWarmUpLR
  learning_rate: 1.e-6
  warmup_ratio: 0.01
  total_steps: -1
train_dataset:
  data_loader:
    type: MindDataset
    dataset_dir: "train.mindrecord"
    shuffle: True
use_parallel: True
parallel_config:
  data_parallel: 1
  model_parallel: 4
  pipeline_stage: 2
  use_seq_parallel: True
  micro_batch_num: 2
  vocab_emb_dp: False
  gradient_aggregation_group: 4
micro_batch_interleave_num: 1
recompute_config:
  recompute: True
callbacks:
  - type: MFLossMonitor
  - type: CheckpointMonitor
    save_checkpoint_steps: 500
context:
  mode: 0
  device_target: "Ascend"
model:
  model_config:
    type: LlamaConfig
    seq_length: 128
    hidden_size: 3584
"""


def test_mindformers_runs(capsys):
    write("finetune_qwen2_5_7b.yaml", MINDFORMERS)
    assert "a mindrecord is MindSpore's own format" in refused("finetune_qwen2_5_7b.yaml", capsys=capsys)
    launch = (
        'bash ../../scripts/msrun_launcher.sh "run_qwen2_5.py --config finetune_qwen2_5_7b.yaml --run_mode finetune '
        '--train_data alpaca.jsonl" 8 8118 output/msrun_log False 2000'
    )
    given = (launch, "--ignore", "train_dataset.data_loader.dataset_dir")
    config, text = imported(*given, capsys=capsys)
    assert all(name in text for name in leaves(yaml.safe_load(MINDFORMERS)) if not name.startswith("callbacks"))
    sizes = {"devices": 8, "tensor_parallel_size": 4, "pipeline_parallel_size": 2}
    assert config["cluster"] == {**sizes, "sequence_parallel": True}
    assert config["train"]["batch_size"] == 2
    assert config["save"]["every_steps"] == 500 and config["train"]["min_lr_ratio"] == 0
    assert command("run", *given, "--cluster.devices", 1) == 0
    assert steps("output") == 2


# Scripts of OpenRLHF that generate, score and train, and those that start other scripts

SAMPLING = """\
GENERATE_OUTPUT=./ckpt/rs/generate.jsonl
RM_OUTPUT=./ckpt/rs/rm.jsonl
MODEL_OUTPUT_PATH=./ckpt/rs/ckpt
ITER_LOG_PATH=null
TRAINING_ITERS=1
POLICY_MODEL_PATH=pico
checkSuccess() {
    if [[ $? != 0 ]]; then
        echo "FAILED $1"
        exit 1
    fi
}
iter=0
if [ -f $ITER_LOG_PATH ]; then
    iter=$(cat $ITER_LOG_PATH)
fi
while (($iter < $TRAINING_ITERS)); do
    if ((iter > 0)); then
        POLICY_MODEL_PATH=$MODEL_OUTPUT_PATH
    fi
    read -r -d '' generate_commands <<EOF
../batch_inference.py
    --eval_task generate_vllm --pretrain $POLICY_MODEL_PATH --max_new_tokens 4 --dataset verl.jsonl,prompts.jsonl \\
    --dataset_probs 0.5,0.5 --input_key prompt --temperature 0.9 --tp_size 4 --best_of_n 2 --enable_prefix_caching \\
    --iter $iter --rollout_batch_size 4 --output_path $GENERATE_OUTPUT
EOF
    echo $generate_commands
    python $generate_commands
    checkSuccess "GENERATE"
    read -r -d '' get_rewards_commands <<EOF
../batch_inference.py --eval_task rm --pretrain ckpt/rm --bf16 --max_len 2048 --dataset $GENERATE_OUTPUT \\
    --dataset_probs 1.0 --zero_stage 0 --post_processor rs --micro_batch_size 4 --output_path $RM_OUTPUT
EOF
    echo $get_rewards_commands
    deepspeed $get_rewards_commands
    checkSuccess "RM"
    read -r -d '' sft_commands <<EOF
../train_sft.py --max_len 2048 --dataset $RM_OUTPUT --dataset_probs 1.0 --train_batch_size 2 \\
    --micro_train_batch_size 2 --pretrain $POLICY_MODEL_PATH --save_path $MODEL_OUTPUT_PATH --lr_scheduler constant \\
    --zero_stage 2 --max_epochs 1 --learning_rate 2e-6 --gradient_checkpointing
EOF
    deepspeed $sft_commands
    checkSuccess "SFT"
    iter=$((iter + 1))
done
"""


def test_a_script_that_generates_scores_and_trains_is_a_pipeline(capsys):
    rows = [{"prompt": row["context_messages"], "answer": row["answer"]} for row in PROMPTS]
    write("prompts.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows))
    write("train_rejection_sampling_llama.sh", SAMPLING)
    config, text = imported("train_rejection_sampling_llama.sh", capsys=capsys)
    assert (config["verb"], config["iterations"], config["prompts_per_iteration"]) == ("rejection-sampling", 1, 4)
    assert config["model"]["path"] == "pico" and config["reward"]["functions"] == ["model:ckpt/rm"]
    assert config["data"]["train"] == ["verl.jsonl", "prompts.jsonl"] and config["data"]["weights"] == [0.5, 0.5]
    assert config["generate"]["engine"] == "vllm" and config["generate"]["samples_per_prompt"] == 2
    assert "# --score.post_processor rs" in text and config["output_dir"] == "./ckpt/rs/ckpt"
    assert config["generate"]["top_p"] == 0.9 and config["generate"]["repetition_penalty"] == 1.2  # their defaults
    ours = ("--generate.engine", "local", "--generate.vllm_options", "{}", "--reward", "format", "--data.chat_template")
    assert command("run", "train_rejection_sampling_llama.sh", *ours, "chatml", "--quiet") == 0
    generated = next(Path("ckpt/rs/ckpt").rglob("*.jsonl"))
    assert generated.is_file()
    write("other.sh", SAMPLING.replace("post_processor rs", "post_processor iter_dpo"))
    assert imported("other.sh", "--algo.beta", 0.2, capsys=capsys)[0]["verb"] == "iterative-dpo"


def test_a_script_for_slurm_is_read_with_the_one_that_it_sources(capsys):
    write("train_sft_llama.sh", OPENRLHF_SCRIPT)
    write(
        "train_llama_slurm.sh",
        'readonly training_script="train_sft_llama.sh"\nreadonly GPUS_PER_NODE=8\n'
        "source ./${training_script} slurm\necho $training_commands &>> log\n"
        'srun --container-image="$IMAGE_NAME" \\\n    bash -c "cd /root; ./build_openrlhf.sh && torchrun \\\n'
        '--nproc_per_node $GPUS_PER_NODE --master_addr $MASTER_ADDR ${training_commands}" &>> log\n',
    )
    config, _ = imported("train_llama_slurm.sh", capsys=capsys)
    assert config["verb"] == "sft" and config["model"]["path"] == "pico" and config["cluster"]["devices"] == 8


def test_mindspeed_rl_for_sft(capsys):
    section = "sft:\n  finetune: true\n  stage: sft\n  is_instruction_dataset: true\n  prompt_type: qwen\n"
    section += "  micro_batch_size: 4\n  global_batch_size: 2\n  tokenizer_name_or_path: pico\n  train_iters: 2\n"
    section += "  lr: 5e-5\n  lr_decay_style: cosine\n  min_lr: 1.25e-7\n  weight_decay: 1e-1\n  clip_grad: 1.0\n"
    section += "  tensor_model_parallel_size: 2\n  pipeline_model_parallel_size: 2\n  seq_length: 4096\n"
    section += (
        "  data_path: alpaca.jsonl\n  split: 100,0,0\n  no_shuffle: true\n  eval_interval: 5000\n  eval_iters: 0\n"
    )
    section += "  model: qwen25_7b\n  load: pico\n  save: ./ckpt/sft\n  log_throughput: true\n"
    write("configs/sft_qwen25_7b.yaml", f"defaults:\n  - model:\n      - qwen25_7b\n{section}")
    words = "python cli/train_sft.py --config-name sft_qwen25_7b"
    config, text = imported(words, "--cluster.devices", 1, capsys=capsys)
    assert config["verb"] == "sft" and config["data"]["shuffle"] is False and config["train"]["min_lr_ratio"] == 0.0025
    assert "eval" not in config and "# log_throughput: true" in text
    assert command("run", words, "--cluster.devices", 1) == 0
    assert steps("ckpt/sft") == 2


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("python rlhf_data.py --vocab_path v.json --file_path raw/ --output_path out/", "--data.train FILE"),
        ("python convert_weight.py --torch_ckpt_dir a --mindspore_ckpt_path b --dtype bf16", "--model DIRECTORY"),
        ("nohup python transform_checkpoint.py --src_checkpoint=a.ckpt > output.log 2>&1 &", "any number of devices"),
    ],
)
def test_programs_that_are_not_needed_say_so(words, reason, capsys):
    assert reason in refused(words, capsys=capsys)
