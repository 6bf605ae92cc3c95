"""Options of other libraries: every hint exists for its verb, and a whole file or command is answered once."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from posttrain.algorithms import ALGORITHMS
from posttrain.cli.chat import ChatArgs
from posttrain.cli.generate import GenerateArgs
from posttrain.cli.score import ScoreArgs
from posttrain.config import parsing
from posttrain.config.foreign import mindspeed, page, verl
from posttrain.config.foreign.answer import LIBRARIES
from posttrain.config.sections import option_value, with_algorithm
from posttrain.config.verbs import PIPELINES, TOOLS
from posttrain.core.errors import UsageError
from posttrain.pipelines.settings import pipeline_defaults

EXAMPLES = Path(__file__).parent / "examples"
ROOT = Path(__file__).parents[4]
DEFAULTS = {verb: with_algorithm(algorithm) for verb, algorithm in ALGORITHMS.items()}
DEFAULTS |= {"generate": GenerateArgs(), "score": ScoreArgs(), "chat": ChatArgs()}
DEFAULTS |= {verb: pipeline_defaults(verb) for verb in PIPELINES}


def read(verb, *words):
    return parsing.read_args(verb, "", DEFAULTS[verb], list(map(str, words)))


def refused(verb, *words):
    with pytest.raises(UsageError) as error:
        read(verb, *words)
    return str(error.value)


def translated_file(message):
    """The YAML text in an answer."""
    return yaml.safe_load(message.partition("As a file for posttrain:\n")[2].partition("\nSet these")[0])


def translated_command(message):
    """The words behind `posttrain VERB` of the command in an answer."""
    text = message.partition("As a command:\n")[2].partition("\nSet these")[0]
    program, _, *words = shlex.split(text.replace("\\\n", " "))
    assert program == "posttrain"
    return words


# The tables


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_every_option_that_a_table_names_exists_for_every_verb_of_the_table(library):
    for verb, rows in library.by_verb.items():
        known = parsing.option_keys(DEFAULTS[verb])
        wrong = {name: meaning.options for name, meaning in rows.items() if not set(meaning.options) <= set(known)}
        assert not wrong, (library.name, verb)
        named = {name: re.findall(r"\b(?:algo|rollout|train|data|cluster|reward|eval|save|log|model)\.\w+", m.note)
                 for name, m in rows.items()}  # fmt: skip
        everywhere = {key for start in DEFAULTS.values() for key in parsing.option_keys(start)}
        there = {option for options in named.values() for option in options} - library.names
        assert there <= everywhere | {"rollout.n", "data.max_prompt_length", "data.max_response_length"}


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_every_row_says_something_and_names_verbs_that_exist(library):
    for rows in library.by_verb.values():
        for name, meaning in rows.items():
            assert meaning.options or meaning.note, name
            assert {verb for verbs in meaning.verbs.values() for verb in verbs} <= {*ALGORITHMS, *TOOLS, *PIPELINES}, (
                name
            )


def test_the_page_shows_the_tables():
    text = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    assert set(re.findall(r"<!-- options of (.+?) -->", text)) == {library.name for library in LIBRARIES}
    assert page.filled(text) == text, "run `make docs`"


def test_the_tables_are_not_imported_for_help():
    code = (
        "import sys, posttrain.config.parsing; print([n for n in sys.modules if n.startswith('posttrain.config.for')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['posttrain.config.foreign', 'posttrain.config.foreign.request']"


# Single options


OPENRLHF_ON_PPO = {
    "--train_batch_size 128": "--algo.mini_batch_size",
    "--rollout_batch_size 1024": "--train.batch_size",
    "--prompt_max_len 1024": "--data.max_length",
    "--generate_max_len 512": "--rollout.max_tokens",
    "--actor_learning_rate 1e-6": "--train.learning_rate",
    "--critic_learning_rate 9e-6": "--algo.critic_learning_rate",
    "--max_epochs 1": "--algo.epochs_per_batch",
    "--eps_clip 0.2": "--algo.clip_low and --algo.clip_high",
    "--n_samples_per_prompt 4": "--rollout.samples_per_prompt",
    "--reward_pretrain rm": "--reward.functions",
    "--critic_pretrain rm": "--algo.critic",
    "--prompt_data d.jsonl": "--data.train",
    "--max_samples 100": "--data.max_examples",
    "--zero_stage 3": "--cluster.zero_stage",
    "--use_wandb key": "--log.report_to",
    "--enable_ema": "--train.ema_decay",
    "--init_kl_coef 0.01": "--algo.kl_coef",
    "--ref_pretrain m": "--algo.reference",
    "--aux_loss_coef 0.1": "--model.router_aux_loss_coef",
    "--ptx_coef 0.05": "--algo.pretrain_coef",
    "--l2 0.1": "--train.weight_decay",
    "--num_episodes 2": "--train.epochs",
    "--max_ckpt_num 3": "--save.max_checkpoints",
    "--max_ckpt_mem 100": "--save.max_gigabytes",
    "--save_steps -1": "--save.every_steps",
    "--input_key text": "--data.map_keys",
}


@pytest.mark.parametrize("typed", OPENRLHF_ON_PPO)
def test_a_single_option_of_openrlhf(typed):
    message = refused("ppo", *typed.split())
    named = re.escape(OPENRLHF_ON_PPO[typed])
    assert re.fullmatch(rf"{typed.split()[0]}: no such option; here it is {named}( \(.+\))?\.", message), message


@pytest.mark.parametrize(
    ("verb", "typed", "named"),
    [
        ("sft", "--train_batch_size 8", "--train.batch_size"),
        ("dpo", "--ipo", "--algo.loss_type"),
        ("kto", "--vanilla_loss", "--algo.variant"),
        ("dpo", "--beta 0.1", "--algo.beta"),
        ("grpo", "--beta 0.1", "--algo.kl_coef"),
        ("orpo", "--beta 0.1", "--algo.odds_ratio_coef"),
        ("grpo", "--rollout.n 8", "--rollout.samples_per_prompt"),
        ("sft", "--flash_attn", "not needed"),
        ("sft", "--colocate_all_models", "--help-all lists all options"),
        ("ppo", "--colocate_all_models", "not needed: models share devices"),
        ("grpo", "--critic_pretrain m", "posttrain ppo has"),
    ],
)
def test_the_same_name_means_another_thing_with_another_verb(verb, typed, named):
    assert named in refused(verb, *typed.split())


def test_libraries_that_disagree_are_both_named():
    message = refused("grpo", "--batch_size", 4)
    assert "(MindRLHF)" not in message or " or " in message
    assert "--kl_coef" in refused("grpo", "--kl_coef", 1) and "algo.kl_coef" in refused("grpo", "--kl_coef", 1)


def test_unknown_names_get_no_far_fetched_hint():
    assert refused("sft", "--rollout_batch_size", 3).endswith("posttrain sft --help-all lists all options.")
    assert "Did you mean --train.learning_rate?" in refused("sft", "--train.lerning_rate", 3)


# Whole files


FILES = {
    "verl_grpo.yaml": ("grpo", "verl"),
    "mindspeed_rl_grpo.yaml": ("grpo", "MindSpeed-RL"),
    "mindrlhf_grpo.yaml": ("grpo", "MindRLHF"),
    "llama_factory_dpo.yaml": ("dpo", "LLaMA-Factory"),
    "axolotl_qlora.yaml": ("sft", "axolotl"),
    "trl_grpo.yaml": ("grpo", "TRL"),
}
VALUES = {
    "verl_grpo.yaml": {
        "train.batch_size": 512,
        "algo.mini_batch_size": 1024,
        "rollout.samples_per_prompt": 8,
        "train.learning_rate": 1e-6,
        "algo.kl_coef": 0.001,
        "algo.kl_in": "loss",
        "algo.kl_estimator": "k3",
        "algo.clip_high": 0.28,
        "data.train": ("train_a.parquet", "train_b.parquet"),
        "data.max_length": 1024,
        "rollout.max_tokens": 4096,
        "rollout.engine": "vllm",
        "rollout.vllm_options": {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.6},
        "cluster.devices": 16,
        "cluster.offload": ("optimizer",),
        "reward.functions": ("rewards/math.py:score",),
        "log.report_to": ("wandb",),
        "log.project": "math",
        "eval.samples_per_prompt": 4,
    },
    "mindspeed_rl_grpo.yaml": {
        "train.batch_size": 64,
        "train.max_steps": 1000,
        "train.learning_rate": 5e-7,
        "train.min_lr_ratio": 0.1,
        "train.warmup_ratio": 0.05,
        "model.path": "./Qwen2.5-7B",
        "algo.kl_coef": 0.001,
        "algo.clip_low": 0.2,
        "rollout.ahead": 0,
        "rollout.top_k": 50,
        "rollout.max_tokens": 2048,
        "data.max_length": 1024,
        "cluster.tensor_parallel_size": 2,
        "cluster.sequence_parallel": True,
        "cluster.reference_tensor_parallel_size": 2,
        "cluster.pipeline_parallel_size": 4,
        "reward.functions": ("base_acc",),
        "log.report_to": ("tensorboard",),
    },
    "mindrlhf_grpo.yaml": {
        "model.path": "/models/qwen",
        "output_dir": "/runs/grpo",
        "algo.kl_coef": 0.01,
        "algo.clip_high": 0.28,
        "algo.reference_sync_steps": 50,
        "rollout.samples_per_prompt": 8,
        "cluster.tensor_parallel_size": 4,
        "model.gradient_checkpointing": True,
        "rollout.engine": "vllm",
    },
    "llama_factory_dpo.yaml": {
        "model.lora_rank": 8,
        "model.lora_alpha": 16.0,
        "model.lora_target_modules": ("all-linear",),
        "algo.beta": 0.1,
        "algo.loss_type": "sigmoid",
        "train.lr_scheduler": "cosine",
        "train.min_lr_ratio": 0.0,
        "train.learning_rate": 5e-6,
        "model.dtype": "bfloat16",
        "data.eval_fraction": 0.1,
        "data.max_examples": 1000,
    },
    "axolotl_qlora.yaml": {
        "model.load_in_4bit": True,
        "model.lora_rank": 32,
        "data.train": ("teknium/some-instructions:train", "local.jsonl"),
        "data.eval_fraction": 0.05,
        "log.project": "instruct",
        "train.warmup_steps": 10,
    },
    "trl_grpo.yaml": {
        "data.train": ("trl-lib/some-math:train",),
        "algo.kl_coef": 0.04,
        "algo.clip_low": 0.2,
        "algo.clip_high": 0.28,
        "algo.loss_aggregation": "fixed_length",
        "algo.scale_by_std": False,
        "rollout.vllm_options": {"gpu_memory_utilization": 0.3},
        "model.lora_rank": 16,
    },
}


def names_in(mapping, prefix=""):
    for key, value in mapping.items():
        if isinstance(value, dict):
            yield from names_in(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_answered_once_with_all_its_keys(name):
    verb, library = FILES[name]
    file = EXAMPLES / name
    message = refused(verb, file)
    assert message.startswith(f"{file} looks like a configuration of {library}. Here they are called:\n")
    told = message.partition("As a file for posttrain:")[0]
    same = set(parsing.option_keys(DEFAULTS[verb]))
    for key in names_in(yaml.safe_load(file.read_text())):
        if key not in same and key != "defaults":
            assert re.search(rf"[ ,]{re.escape(key)}[,:]", told), key
    assert f"{file}:" in told and "no such option" not in told


@pytest.mark.parametrize("name", FILES)
def test_the_translated_file_is_read_with_the_values_of_the_original(name, tmp_path):
    verb, _ = FILES[name]
    message = refused(verb, EXAMPLES / name)
    (tmp_path / "new.yaml").write_text(yaml.safe_dump(translated_file(message)))
    config = read(verb, tmp_path / "new.yaml")
    assert {key: option_value(config, key) for key in VALUES[name]} == VALUES[name]


def test_what_is_left_to_decide():
    message = refused("dpo", EXAMPLES / "llama_factory_dpo.yaml")
    left = "data.train, data.map_keys, train.batch_size, cluster.worker_timeout_seconds"
    assert message.endswith(f"Set these yourself: {left}.")
    message = refused("sft", EXAMPLES / "axolotl_qlora.yaml")
    assert "train.batch_size" in message.splitlines()[-1]


@pytest.mark.parametrize(
    ("given", "name", "wanted", "because"),
    [
        ("sft", "llama_factory_dpo.yaml", "dpo", "stage is dpo"),
        ("ppo", "verl_grpo.yaml", "grpo", "algorithm.adv_estimator is grpo"),
        ("sft", "verl_grpo.yaml", "grpo", "algorithm.adv_estimator is grpo"),
        ("ppo", "mindspeed_rl_grpo.yaml", "grpo", "megatron_training.stage is ray_grpo"),
    ],
)
def test_a_file_for_another_verb(given, name, wanted, because):
    message = refused(given, EXAMPLES / name)
    assert because in message and f"that is `posttrain {wanted}`, not `posttrain {given}`" in message
    assert f"`posttrain {wanted} {EXAMPLES / name}`" in message and "\n" not in message


def test_pref_loss_names_the_verb(tmp_path):
    text = (EXAMPLES / "llama_factory_dpo.yaml").read_text().replace("pref_loss: sigmoid", "pref_loss: orpo")
    (tmp_path / "c.yaml").write_text(text)
    assert "that is `posttrain orpo`" in refused("dpo", tmp_path / "c.yaml")


def test_a_file_of_ours_is_left_alone(tmp_path):
    (tmp_path / "c.yaml").write_text("verb: sft\nmodel: pico\ndefaults: base.yaml\n")
    (tmp_path / "base.yaml").write_text("sed: 1\n")
    assert "base.yaml:1: sed: no such option. Did you mean seed?" in refused("sft", tmp_path / "c.yaml")
    (tmp_path / "base.yaml").write_text("seed: 1\n")
    message = refused("sft", tmp_path / "c.yaml", "--num_train_epochs", 2, "--save_steps", 5, "--bf16", "true")
    assert translated_command(message)[0] == str(tmp_path / "c.yaml")
    assert "Set these" not in message
    config = read("sft", *translated_command(message))
    assert (config.model.path, config.seed, config.train.epochs, config.model.dtype) == ("pico", 1, 2.0, "bfloat16")


# Whole commands


PPO_2024 = """--pretrain m/sft --reward_pretrain m/rm --critic_pretrain m/rm --save_path out --save_steps -1
--logging_steps 1 --eval_steps -1 --micro_train_batch_size 2 --train_batch_size 128 --micro_rollout_batch_size 4
--rollout_batch_size 1024 --max_epochs 1 --num_episodes 2 --prompt_max_len 1024 --generate_max_len 512 --zero_stage 2
--bf16 --actor_learning_rate 5e-7 --critic_learning_rate 9e-6 --init_kl_coef 0.01 --prompt_data a.jsonl,b.jsonl
--prompt_data_probs 0.4,0.6 --max_samples 80000 --normalize_reward --actor_init_on_gpu --adam_offload --flash_attn
--gradient_checkpointing --eps_clip 0.2 --lambd 0.95 --enable_ema --ptx_coef 0.05 --vllm_num_engines 2
--colocate_actor_ref --ref_reward_offload"""


def test_a_command_of_openrlhf():
    message = refused("ppo", *PPO_2024.split())
    assert message.startswith("These look like options of OpenRLHF's train_ppo_ray. Here they are called:\n")
    assert "--train_batch_size 128: here --algo.mini_batch_size (completions" in message
    assert "no such option" not in message
    config = read("ppo", *translated_command(message))
    expected = {
        "model.path": "m/sft",
        "reward.functions": ("model:m/rm",),
        "algo.critic": "m/rm",
        "algo.mini_batch_size": 128,
        "train.batch_size": 1024,
        "train.epochs": 2.0,
        "algo.epochs_per_batch": 1,
        "data.max_length": 1024,
        "rollout.max_tokens": 512,
        "train.learning_rate": 5e-7,
        "algo.critic_learning_rate": 9e-6,
        "algo.kl_coef": 0.01,
        "data.train": ("a.jsonl", "b.jsonl"),
        "data.weights": (0.4, 0.6),
        "save.every_steps": 0,
        "reward.normalize": "saved",
        "cluster.offload": ("optimizer", "reference", "reward"),
        "train.ema_decay": 0.992,
        "algo.gae_lambda": 0.95,
    }
    assert {key: option_value(config, key) for key in expected} == expected


def test_names_of_2026_that_exist_here_with_another_meaning():
    words = "--actor.model_name_or_path m --train.batch_size 128 --rollout.batch_size 1024 --rollout.max_new_tokens 512"
    words += " --actor.adam.lr 1e-6 --algo.kl.init_coef 0.01 --rollout.temperature 0.7 --train.max_epochs 2"
    message = refused("ppo", *words.split())
    assert message.startswith("These look like options of OpenRLHF (2026)'s train_ppo_ray.")
    assert "--train.batch_size 128: here --algo.mini_batch_size" in message
    assert "--rollout.temperature" not in message.partition("As a command")[0]
    config = read("ppo", *translated_command(message))
    assert (config.train.batch_size, config.algo.mini_batch_size, config.rollout.temperature) == (1024, 128, 0.7)
    assert (config.algo.epochs_per_batch, config.algo.kl_coef) == (2, 0.01)


HYDRA = """algorithm.adv_estimator=gae data.train_files=~/data/train.parquet data.train_batch_size=256
actor_rollout_ref.model.path=m/x actor_rollout_ref.actor.optim.lr=1e-6 critic.optim.lr=1e-5 critic.model.path=m/x
+trainer.val_before_train=False trainer.logger=['console','tensorboard'] trainer.n_gpus_per_node=1
actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.4"""


def test_hydra_words():
    message = refused("ppo", *HYDRA.split())
    assert message.startswith("These look like options of verl's main_ppo.")
    assert "critic.optim.lr=1e-5: here --algo.critic_learning_rate." in message
    config = read("ppo", *translated_command(message))
    assert (config.algo.critic_learning_rate, config.log.report_to) == (1e-5, ("tensorboard",))
    assert "reward.functions" in message.splitlines()[-1]
    assert "that is `posttrain ppo`, not `posttrain grpo`" in refused("grpo", *HYDRA.split())


def test_switches_and_single_dashes_do_not_hide_the_rest():
    message = refused("sft", "-cfg", "x.json", "--packing", "--bf16", "--per_device_train_batch_size", 4, "--seed", 3)
    assert "These look like options of" in message and "-cfg: no such option" in message
    assert "--per_device_train_batch_size 4: here --train.batch_size" in message
    assert translated_command(message) == ["--model.dtype", "bfloat16", "--seed", "3"]
    assert "-steps: options begin with --" in refused("sft", "-steps", 1)


def test_batch_inference_of_openrlhf():
    words = "--eval_task generate_vllm --pretrain m/sft --bf16 --max_new_tokens 2048 --dataset a.jsonl,b.jsonl"
    words += " --input_key question --best_of_n 8 --iter 1 --rollout_batch_size 512 --output_path out.jsonl --tp_size 2"
    message = refused("generate", *words.split())
    assert message.startswith("These look like options of OpenRLHF's batch_inference.")
    options = read("generate", *translated_command(message))
    assert (options.model, options.data, options.samples_per_prompt) == ("m/sft", ("a.jsonl", "b.jsonl"), 8)
    assert (options.window_index, options.window_size, options.max_tokens) == (2, 512, 2048)
    assert "that is `posttrain score`" in refused("generate", *words.replace("generate_vllm", "rm").split())


def test_pipelines_have_the_options_of_their_trainer():
    assert refused("iterative-dpo", "--pref_beta", 0.1) == "--pref_beta: no such option; here it is --algo.beta."
    words = "--pretrain m --train_batch_size 64 --learning_rate 1e-6 --best_of_n 4 --rollout_batch_size 512"
    message = refused("rejection-sampling", *words.split(), "--reward_pretrain", "rm")
    config = read("rejection-sampling", *translated_command(message))
    assert (config.train.batch_size, config.generate.samples_per_prompt) == (64, 4)
    assert (config.prompts_per_iteration, config.reward.functions) == (512, ("model:rm",))


def test_from_python():
    start = DEFAULTS["sft"]
    with pytest.raises(UsageError, match=r"^lr: no such option; here it is train\.learning_rate\.$"):
        parsing.read_mapping("sft", "", start, {"lr": 3})
    with pytest.raises(UsageError, match=r"num_train_epochs=3: here --train\.epochs"):
        parsing.read_mapping("sft", "", start, {"num_train_epochs": 3, "save_steps": 5, "bf16": True})


def test_layers_of_a_virtual_stage_become_stages_per_device():
    given = {"actor_config.num_layers": "32", "megatron_training.pipeline_model_parallel_size": "4"}
    interleaved = {"cluster.virtual_pipeline_parallel_size": "4", "cluster.pipeline_schedule": "interleaved"}
    assert mindspeed.virtual_stages("2", given) == interleaved
    assert mindspeed.virtual_stages("8", given) == {}, "one stage per device"
    assert mindspeed.virtual_stages("3", given) is None and mindspeed.virtual_stages("2", {}) is None, "by hand"
    assert mindspeed.stage_layers("11,13,19,21", {}) == {"cluster.pipeline_layers_per_stage": ["11", "13", "19", "21"]}
    assert verl.virtual_stages("4", {}) == interleaved and verl.virtual_stages("null", {}) == {}
