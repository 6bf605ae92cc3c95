"""Options of convert, data check, plan and slurm: current names, previous names, and flags of MindSpeed-LLM."""

import subprocess
import sys
from dataclasses import asdict

import pytest

from posttrain.cli import convert
from posttrain.cli.convert import ConvertArgs, check_options
from posttrain.cli.data import DataCheckArgs
from posttrain.cli.diff import DiffArgs
from posttrain.cli.plan import PlanArgs, planned_verb
from posttrain.cli.preprocess import PreprocessArgs
from posttrain.cli.slurm import SlurmArgs
from posttrain.config.tools import read_own_options, read_tool
from posttrain.config.verbs import TOOLS
from posttrain.core.errors import UsageError

NEW = "A B --target_format mcore --source_format hf --tensor_parallel_size 2 --pipeline_parallel_size 4"
SAME = [
    (ConvertArgs, NEW, "A B --from hf --to mcore --tp 2 --pp 4"),
    (ConvertArgs, NEW, "--to=mcore --tp=2 A --pp=4 B --from=hf"),
    (
        ConvertArgs,
        f"{NEW} --layers_per_stage 1 1 2 4 --noop_layers 6 7 --dtype bfloat16 --vocab_multiple 8",
        f"--noop-layers 6,7 A B {NEW[4:]} --num-layer-list 1, 1, 2, 4 --dtype bf16 --vocab-multiple 8",
    ),
    (
        ConvertArgs,
        f"{NEW} --transformer_engine --layers_per_virtual_stage 2 --source_expert_parallel_size 4 --lora_rank 8",
        f"--engine {NEW} --vpp 2 --source-ep 4 --lora-r 8",
    ),
    (
        DataCheckArgs,
        "a.jsonl b.jsonl --trainer dpo --model pico --max_length 64 --on_overlong drop --chat_template chatml",
        "a.jsonl b.jsonl --verb dpo --model.path pico --data.max_tokens 64 --data.on_long drop --data.template chatml",
    ),
    (
        DataCheckArgs,
        'a.jsonl --tokenizer t --max_length 64 --placeholder # --map_keys {"prompt":"q"}',
        'a.jsonl --model.tokenizer t --max_tokens 64 --algo.placeholder # --data.map_keys {"prompt":"q"}',
    ),
    (DiffArgs, "a b --max_tensors 3", "a b --rows 3"),
    (PreprocessArgs, "--input a --on_bad_example quarantine", "--input a --on_bad_row quarantine"),
]


@pytest.mark.parametrize(("args", "new", "old"), SAME)
def test_previous_names_mean_the_same(args, new, old):
    def read(line):
        found = asdict(read_tool(args(), line.split()))
        return {name: value for name, value in found.items() if name not in ("num_layer_list", "lora_r")}

    assert read(new) == read(old)


def test_previous_names_in_a_file(tmp_path):
    (tmp_path / "c.yaml").write_text("source: A\nout: B\nto: mcore\ntp: 2\nnoop-layers: 6,7\nnum_layer_list: [1, 1]\n")
    found = read_tool(ConvertArgs(), [str(tmp_path / "c.yaml"), "--pp", "2"])
    assert (found.source, found.output_dir, found.target_format) == ("A", "B", "mcore")
    assert (found.tensor_parallel_size, found.pipeline_parallel_size) == (2, 2)
    assert found.noop_layers == (6, 7) and found.layers_per_stage == (1, 1)
    (tmp_path / "d.yaml").write_text("source: A\nout: B\nto: mcore\nnoop_layers: 6;7\n")
    with pytest.raises(UsageError, match=r"d\.yaml:4: noop_layers is '6;7'; it must be a list of whole numbers"):
        read_tool(ConvertArgs(), [str(tmp_path / "d.yaml")])


MINDSPEED = [
    ("hf mg --use-mcore-models", "hf", "mcore"),
    ("hf mg", "hf", "legacy"),
    ("mg mg --use-mcore-models --load-from-legacy", "legacy", "mcore"),
    ("mg mg --use-mcore-models --save-to-legacy", "mcore", "legacy"),
    ("mg hf --use-mcore-models", "mcore", "hf"),
    ("optim hf", "legacy", "hf"),
]


@pytest.mark.parametrize(("flags", "source", "target"), MINDSPEED)
def test_formats_of_mindspeed(flags, source, target):
    first, second, *others = flags.split()
    words = ["--load-model-type", first, "--save-model-type", second, "--load-dir", "A", "--save-dir", "B", *others]
    found = read_tool(ConvertArgs(), [*words, "--target-expert-model-parallel-size", "1"])
    assert (found.source, found.output_dir, found.source_format, found.target_format) == ("A", "B", source, target)
    check_options(found)


def test_own_options_stand_anywhere_among_those_of_training():
    line = "sft --nodes 2 c.yaml --cpu --model.path pico --stop a b --devices-per-node=4 --no_quiet --time 1:00"
    options, loose, rest = read_own_options(SlurmArgs(), line.split(" "))
    assert (options.nodes, options.cpu, options.devices_per_node, options.time) == (2, True, 4, "1:00")
    assert loose == ["sft", "c.yaml"] and rest == ["--model.path", "pico", "--stop", "a", "b", "--no_quiet"]
    with pytest.raises(UsageError, match="--nodes is 'two'; it must be a whole number"):
        read_own_options(SlurmArgs(), ["--nodes", "two"])


def test_what_is_planned(tmp_path):
    (tmp_path / "c.yaml").write_text("verb: dpo\n")
    (tmp_path / "d.yaml").write_text("seed: 1\n")
    assert planned_verb(["sft", "c.yaml"]) == ("sft", ["c.yaml"])
    assert planned_verb([str(tmp_path / "c.yaml")]) == ("dpo", [str(tmp_path / "c.yaml")])
    with pytest.raises(UsageError, match=r"d\.yaml: names no verb to plan. Add a line like `verb: sft`"):
        planned_verb([str(tmp_path / "d.yaml")])
    with pytest.raises(UsageError, match=r"VERB or CONFIG\.yaml is not set.*Example: posttrain plan sft"):
        planned_verb([])
    assert read_own_options(PlanArgs(), ["--device_gib", "40", "sft"])[0].device_gib == 40.0


def test_help_of_tools_imports_nothing_heavy():
    commands = [[verb] for verb in TOOLS] + [["data", "check"], ["data", "preprocess"], ["cluster", "up"]]
    code = f"import sys\nfrom posttrain.cli.main import main\nfor words in {commands}:\n"
    code += "    try: main([*words, '--help'])\n    except SystemExit: pass\n"
    code += "sys.exit(str({'torch', 'transformers', 'tyro', 'ray'} & set(sys.modules) or ''))"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert not done.stderr.strip()


def test_optimizer_states_of_megatron_are_refused_with_the_reason(tmp_path):
    words = ["--use-mcore-models", "--load-model-type", "optim", "--load-dir", str(tmp_path), "--save-dir", "out"]
    with pytest.raises(UsageError, match="optimizer states of Megatron are not converted"):
        convert.run(words)
