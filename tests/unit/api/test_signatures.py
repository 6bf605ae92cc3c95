"""What dir(), help() and signatures of the package say is what there is."""

import dataclasses
import inspect
import pydoc
import subprocess
import sys

import pytest

import posttrain
from posttrain.algorithms import ALGORITHMS
from posttrain.api.arguments import Arguments
from posttrain.api.options import OPTION_OF, OnlineOptions, PipelineOptions, TrainingOptions
from posttrain.cli.eval import EvalArgs
from posttrain.cli.generate import GenerateArgs
from posttrain.cli.mix import MixArgs
from posttrain.cli.plot import PlotArgs
from posttrain.cli.score import ScoreArgs
from posttrain.cli.select import SelectArgs
from posttrain.cli.split import SplitArgs
from posttrain.config.parsing import option_keys, sections
from posttrain.config.sections import with_algorithm
from posttrain.config.verbs import PIPELINES
from posttrain.pipelines.settings import pipeline_defaults

OBJECTS = {"config", "eval_data", "tokenizer", "peft_config", "callbacks", "metrics"}
SHIPPED = [name for name, algorithm in ALGORITHMS.items() if algorithm.__module__.startswith("posttrain.")]


def test_every_verb_is_a_function_and_dir_lists_what_exists():
    names = {*SHIPPED, *(name.replace("-", "_") for name in PIPELINES)}
    assert names <= set(posttrain.__all__)
    assert set(dir(posttrain)) == {*posttrain.__all__, "__version__"}
    for name in posttrain.__all__:
        assert inspect.getdoc(getattr(posttrain, name)), name


@pytest.mark.parametrize("verb", SHIPPED)
def test_each_argument_is_an_option_or_an_object(verb):
    config = with_algorithm(ALGORITHMS[verb])
    known = {*option_keys(config), *sections(config)}
    parameters = inspect.signature(getattr(posttrain, verb)).parameters
    assert not [entry for entry in parameters.values() if entry.kind is entry.VAR_KEYWORD]
    for name in parameters.keys() - OBJECTS:
        assert OPTION_OF.get(name, name) in known, name
    assert ("reward" in parameters) == ALGORITHMS[verb].online
    assert set(sections(config)) - set(parameters) == set()


@pytest.mark.parametrize("verb", PIPELINES)
def test_each_argument_of_a_pipeline_is_one_of_its_options(verb):
    config = pipeline_defaults(verb)
    parameters = inspect.signature(getattr(posttrain, verb.replace("-", "_"))).parameters
    for name in parameters.keys() - OBJECTS:
        assert name in {*option_keys(config), *sections(config)}, name


@pytest.mark.parametrize("options", [TrainingOptions, OnlineOptions, PipelineOptions])
def test_help_shows_every_argument(options):
    function = {TrainingOptions: posttrain.sft, OnlineOptions: posttrain.grpo}.get(options, posttrain.iterative_dpo)
    text = pydoc.render_doc(function, renderer=pydoc.plaintext)
    for name in options.__annotations__:
        assert f"{name}: '" in text and f"        {name}: " in text, name


@pytest.mark.parametrize(
    ("function", "options"),
    [
        ("generate", GenerateArgs),
        ("score", ScoreArgs),
        ("select", SelectArgs),
        ("evaluate", EvalArgs),
        ("mix_data", MixArgs),
        ("split_data", SplitArgs),
        ("plot", PlotArgs),
    ],
)
def test_tools_have_the_options_of_their_commands(function, options):
    """Loaded tokenizers exist in Python only; `data` are the files of the others."""
    known = {entry.name: entry.default for entry in dataclasses.fields(options)} | {"tokenizer": "", "data": ""}
    parameters = inspect.signature(getattr(posttrain, function)).parameters
    for name, parameter in parameters.items():
        assert name in known, name
        if isinstance(parameter.default, int | float | str) and name not in ("quiet", "output_file", "output_dir"):
            assert parameter.default == known[name], name
        assert name in getattr(posttrain, function).__doc__ or parameter.default is parameter.empty, name


def test_trainers_show_their_arguments_too():
    for trainer in ("SFTTrainer", "RewardTrainer", "DPOTrainer", "KTOTrainer", "GRPOTrainer", "PPOTrainer"):
        parameters = inspect.signature(getattr(posttrain, trainer)).parameters
        assert {"model", "data", "config", "max_steps", "callbacks"} <= parameters.keys()


def test_names_of_other_libraries_are_answered_with_ours():
    for theirs, ours in (
        ("train_dataset", "data"),
        ("reward_funcs", "reward"),
        ("processing_class", "tokenizer"),
        ("args", "config"),
    ):
        with pytest.raises(TypeError, match=f"'{theirs}'; here it is '{ours}'"):
            posttrain.grpo("pico", **{theirs: []})
        with pytest.raises(TypeError, match=f"'{theirs}'; here it is '{ours}'"):
            posttrain.GRPOTrainer("pico", **{theirs: []})
    with pytest.raises(posttrain.UsageError, match=r"train\.learning_rate"):
        posttrain.sft("pico", "x.jsonl", lr=1e-3)


def test_an_algorithm_of_the_user_is_a_function_too(tmp_path):
    code = (
        "import posttrain\nfrom posttrain.algorithms import register\nfrom posttrain.algorithms.sft import SFT\n"
        "@register('mine', help='mine')\nclass Mine(SFT): pass\n"
        "rows = [{'prompt': '1', 'completion': '2'}]\n"
        "result = posttrain.mine('pico', rows, max_steps=1, quiet=True, output_dir='run')\n"
        "assert 'max_steps' in posttrain.mine.__doc__\nprint(result.steps, posttrain.mine.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.endswith("\n1 mine\n"), done.stderr
    with pytest.raises(AttributeError, match="no attribute 'yours'"):
        posttrain.yours  # noqa: B018


def collected(**arguments):
    found = Arguments("grpo", option_keys(with_algorithm(ALGORITHMS["grpo"])))
    found.add(arguments)
    return found


ROWS = [{"prompt": "1+1=", "answer": "2"}]


def test_data_may_be_files_examples_or_several_of_these():
    assert collected(data="a.jsonl").options == {"data.train": ["a.jsonl"]}
    assert collected(data=["a.jsonl", "b.jsonl"]).options == {"data.train": ["a.jsonl", "b.jsonl"]}
    found = collected(data={"train": ROWS, "max_length": 5}, eval_data=ROWS)
    assert found.options == {
        "data.train": ["in-memory:train"],
        "data.max_length": 5,
        "data.eval": ["in-memory:eval"],
    }
    assert found.examples == {"train": ROWS, "eval": ROWS}
    mixed = collected(data=["a.jsonl", ROWS, tuple(ROWS)])
    assert mixed.options == {"data.train": ["a.jsonl", "in-memory:train-2", "in-memory:train-3"]}
    assert collected(data=(row for row in ROWS)).examples == {"train": ROWS}  # a generator is read once
    assert collected(data={"train": "a.jsonl", "eval": 0.1}).options["data.eval"] == 0.1
    for wrong in ([*ROWS, "a.jsonl"], 5):
        with pytest.raises(posttrain.UsageError, match=r"^data"):
            collected(data=wrong)


def test_a_dataset_of_hugging_face_is_examples_and_several_splits_are_refused():
    import datasets

    dataset = datasets.Dataset.from_list(ROWS)
    found = collected(data=dataset)
    assert found.examples["train"] is dataset
    with pytest.raises(posttrain.UsageError, match=r"several splits \(train, test\)"):
        collected(data=datasets.DatasetDict(train=dataset, test=dataset))
    assert list(collected(data=dataset.to_iterable_dataset()).examples["train"]) == ROWS


def test_lora_settings_of_peft():
    import peft

    chosen = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["v_proj", "q_proj"])
    assert collected(peft_config=chosen).options == {
        "model.lora_rank": 4,
        "model.lora_alpha": 8,
        "model.lora_dropout": 0.1,
        "model.use_dora": False,
        "model.use_rslora": False,
        "model.lora_init": "zeros",
        "model.lora_target_modules": ["q_proj", "v_proj"],
    }
    kinds = peft.LoraConfig(target_modules="all-linear", use_rslora=True, init_lora_weights="pissa")
    found = collected(peft_config=kinds).options
    assert found["model.use_rslora"] is True and found["model.lora_init"] == "pissa"
    everywhere = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    assert collected(peft_config=everywhere).options["model.lora_target_modules"] == ["all-linear"]
    for wrong, name in (
        (peft.LoraConfig(target_modules="all-linear", init_lora_weights="olora"), "init_lora_weights"),
        (peft.LoraConfig(target_modules="all-linear", modules_to_save=["head"]), "modules_to_save"),
        (peft.LoraConfig(), "target_modules"),
        (peft.LoraConfig(target_modules=".*q_proj"), "target_modules"),
        (peft.PromptTuningConfig(num_virtual_tokens=2), "PROMPT_TUNING"),
    ):
        with pytest.raises(posttrain.UsageError, match=name):
            collected(peft_config=wrong)
