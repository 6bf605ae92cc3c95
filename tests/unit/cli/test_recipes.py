"""The recipes in configs/recipes: planned with the shape of their model, and run with the toy model."""

import json
from pathlib import Path

import pytest
import yaml

from posttrain.cli.plan import run as plan
from tests.e2e.commands import command

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "configs" / "recipes").glob("*.yaml"))
QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "vocab_size": 152064,
}
SHAPES = {
    "r1-zero-7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_hidden_layers": 28,
                   "num_key_value_heads": 4},
    "r1-zero-32b": {"hidden_size": 5120, "intermediate_size": 27648, "num_attention_heads": 40, "num_hidden_layers": 64,
                    "num_key_value_heads": 8},
}  # fmt: skip
SMALL = {
    "cluster.devices": 1,
    "model.dtype": "float32",
    "train.batch_size": 2,
    "train.max_steps": 1,
    "rollout.samples_per_prompt": 2,
    "rollout.max_tokens": 4,
    "rollout.engine": "local",
    "algo.mini_batch_size": 4,
}
DATA = ["--data", str(ROOT / "examples/data/questions.jsonl")]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_fits_on_its_devices(recipe, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(QWEN | SHAPES[recipe.stem]))
    model = ["--model", str(tmp_path), "--model.tokenizer", "pico"]
    assert plan([str(recipe), *model, *DATA, "--device_gib", "80"]) == 0
    assert "It fits: about " in capsys.readouterr().out


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_runs_with_a_tiny_model(recipe, tmp_path):
    layout = yaml.safe_load((recipe.parent / yaml.safe_load(recipe.read_text())["defaults"]).read_text())
    sizes = [word for name in layout["cluster"] if name.endswith("_size") for word in (f"--cluster.{name}", "1")]
    small = [word for name, value in SMALL.items() for word in (f"--{name}", value)]
    own = ["--cluster.rollout_devices", "0"] if "rollout_devices" in layout["cluster"] else []
    place = ["--model", "pico", *DATA, "--output_dir", str(tmp_path / "run")]
    assert command("grpo", str(recipe), *place, *small, *sizes, *own, "--quiet") == 0
