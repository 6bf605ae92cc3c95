"""Adapters: they change nothing at first, train alone, save alone, and merge into what they computed."""

import importlib.util
import json
import warnings

import pytest
import torch
from safetensors.torch import load_file

from posttrain.config.sections import ModelConfig
from posttrain.core.errors import CheckpointError, UsageError
from posttrain.models import adapters, loading, saving, tokenizers
from posttrain.models.tensors import export_tensors, module_tensors
from posttrain.nn.forward import ModelRunner, verify_against_stock
from tests.tiny import NAMES, VOCABULARY, tiny_folder, tiny_tokenizer
from tests.unit.models.test_loading import TOKENS, edit_json, load_tiny, output

pytest.importorskip("peft")
BOTH = pytest.mark.parametrize("head", ["token", "score"])
ALL = pytest.mark.parametrize("name", NAMES)


@torch.no_grad()
def train(model, seed=0):
    """Stands in for training: every trainable parameter moves."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in loading.trainable_parameters(model).values():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def adapted(folder, head="token", **options):
    options = {"lora_rank": 4, **options}
    return load_tiny(folder, head, trainable=True, **options).eval()


@BOTH
@ALL
def test_adapters_change_nothing_until_trained_and_can_be_switched_off(name, head, tmp_path):
    folder = tiny_folder(name, tmp_path, head=head)
    base, model = output(load_tiny(folder, head)), adapted(folder, head)
    assert adapters.is_adapted(model)
    assert torch.equal(output(model), base)
    train(model)
    trained = output(model)
    assert not torch.allclose(trained, base, atol=1e-3)
    with adapters.disabled(model):
        assert torch.equal(output(model), base)
    assert torch.equal(output(model), trained)


@BOTH
@ALL
def test_saved_adapters_come_back_and_merge_into_the_same_model(name, head, tmp_path):
    folder = tiny_folder(name, tmp_path, head=head)
    model = train(adapted(folder, head))
    saving.save_model(model, tiny_tokenizer(), tmp_path / "saved")
    assert not (tmp_path / "saved" / "model.safetensors").exists()
    saved = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    assert len(saved) == len(loading.trainable_parameters(model))
    again = loading.read_model(str(tmp_path / "saved"), head, torch.float32)
    assert torch.equal(output(again), output(model))
    merged = load_tiny(tmp_path / "saved", head)
    assert not adapters.is_adapted(merged)
    verify_against_stock(ModelRunner.from_model(merged))  # our attention has reached its layers
    assert torch.allclose(output(merged), output(model), atol=1e-5, rtol=1e-4)
    plain = load_tiny(folder, head)
    assert {n: p.shape for n, p in merged.named_parameters()} == {n: p.shape for n, p in plain.named_parameters()}


@BOTH
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral"])
def test_peft_itself_reads_the_folder(name, head, tmp_path):
    from peft import PeftModel

    folder = tiny_folder(name, tmp_path, head=head)
    model = train(adapted(folder, head))
    saving.save_model(model, tiny_tokenizer(), tmp_path / "saved")
    stock = loading.AUTO_CLASSES[head].from_pretrained(folder)
    stock = PeftModel.from_pretrained(stock, str(tmp_path / "saved")).eval()
    stock.get_base_model().set_attn_implementation("sdpa")
    with torch.no_grad():
        assert torch.allclose(stock(input_ids=TOKENS, use_cache=False).logits, output(model), atol=1e-6)
    assert json.loads((tmp_path / "saved/adapter_config.json").read_text())["base_model_name_or_path"] == str(folder)


@BOTH
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_adapters_are_read_back_in_place(name, head, tmp_path):
    model = train(adapted(tiny_folder(name, tmp_path, head=head), head))
    expected = output(model)
    saving.save_model(model, tiny_tokenizer(), tmp_path / "saved")
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    train(model, seed=1)
    assert not torch.equal(output(model), expected)
    saving.load_weights(model, tmp_path / "saved")
    assert torch.equal(output(model), expected)
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses


def test_adapters_that_do_not_fit_are_refused(tmp_path):
    folder = tiny_folder("llama", tmp_path)
    saving.save_model(adapted(folder), tiny_tokenizer(), tmp_path / "saved")
    with pytest.raises(CheckpointError, match="only in one of the two"):
        saving.load_weights(adapted(folder, lora_target_modules=("q_proj",)), tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"lora_A.* has shape \(4, .*, but \(2, "):
        saving.load_weights(adapted(folder, lora_rank=2), tmp_path / "saved")


@BOTH
def test_only_adapters_and_the_score_head_get_gradients(head, tmp_path):
    model = train(adapted(tiny_folder("llama", tmp_path), head))
    trainable = loading.trainable_parameters(model)
    heads = [name for name in trainable if "lora_" not in name]
    assert heads == (["score.modules_to_save.default.weight"] if head == "score" else [])
    model.train().set_attn_implementation("sdpa")
    with adapters.disabled(model), torch.no_grad():  # a reference pass in between must not unhook anything
        model(input_ids=TOKENS)
    model(input_ids=TOKENS, use_cache=False).logits.square().sum().backward()
    touched = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert touched == set(trainable) and all(float(p.grad.abs().sum()) > 0 for p in trainable.values())


def test_switching_off_keeps_a_frozen_model_frozen(tmp_path):
    model = adapted(tiny_folder("llama", tmp_path)).requires_grad_(False)
    with adapters.disabled(model):
        pass
    assert not loading.trainable_parameters(model)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_activation_checkpointing_gives_the_same_gradients(name, tmp_path):
    folder, gradients = tiny_folder(name, tmp_path), []
    for checkpoint in (False, True):
        model = train(adapted(folder, gradient_checkpointing=checkpoint)).train()
        model.set_attn_implementation("sdpa")
        model(input_ids=TOKENS, use_cache=False).logits.square().sum().backward()
        gradients.append([parameter.grad for parameter in loading.trainable_parameters(model).values()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_the_adapters_own_dropout_stays(tmp_path):
    folder = tiny_folder("gpt2", tmp_path)
    model = train(adapted(folder, lora_dropout=0.5)).train()
    assert not torch.equal(output(model), output(model))
    assert torch.equal(output(model.eval()), output(model))


def test_the_seed_decides_the_adapters(tmp_path):
    folder = tiny_folder("llama", tmp_path)
    drawn = [adapters.adapter_tensors(load_tiny(folder, trainable=True, lora_rank=4, seed=seed)) for seed in (1, 1, 2)]
    name = next(name for name in drawn[0] if "lora_A" in name)
    assert torch.equal(drawn[0][name], drawn[1][name]) and not torch.equal(drawn[0][name], drawn[2][name])


def test_rank_alpha_and_targets_arrive(tmp_path):
    model = train(
        adapted(tiny_folder("llama", tmp_path), lora_rank=2, lora_alpha=6.0, lora_target_modules=("q_proj", "v_proj"))
    )
    names = {name.split(".")[-4] for name in loading.trainable_parameters(model)}
    assert names == {"q_proj", "v_proj"}
    layer = model.model.layers[0].self_attn.q_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert a.shape == (2, 32)
    x = torch.randn(3, 32)
    assert torch.allclose(layer(x), layer.get_base_layer()(x) + 3.0 * x @ a.T @ b.T, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "targets", "said"),
    [
        ("llama", ("q_proj", "vproj"), "no module 'vproj'.*v_proj"),
        ("llama", ("mlp",), "does not support these adapters"),
        ("qwen2", ("lm_head",), "shares its weight"),
        ("qwen2", ("embed_tokens",), "shares its weight"),
    ],
)
def test_targets_that_cannot_be(name, targets, said, tmp_path):
    with pytest.raises(UsageError, match=said):
        adapted(tiny_folder(name, tmp_path), lora_target_modules=targets)


def test_an_untied_output_layer_may_have_an_adapter(tmp_path):
    model = train(adapted(tiny_folder("llama", tmp_path), lora_target_modules=("lm_head", "embed_tokens")))
    expected = output(model)
    assert torch.allclose(output(adapters.merge(model)), expected, atol=1e-5, rtol=1e-4)


@BOTH
def test_new_adapters_stand_on_the_merged_old_ones(head, tmp_path):
    """So that the model without them is the one that training began with."""
    first = train(adapted(tiny_folder("llama", tmp_path, head=head), head))
    saving.save_model(first, tiny_tokenizer(), tmp_path / "first")
    second = adapted(tmp_path / "first", head)
    assert torch.allclose(output(second), output(first), atol=1e-5, rtol=1e-4)
    start = output(second)
    train(second, seed=1)
    with adapters.disabled(second):
        assert torch.equal(output(second), start)
    saving.save_model(second, tiny_tokenizer(), tmp_path / "second")
    assert adapters.base_model_of(tmp_path / "second") == str(tmp_path / "first")
    assert torch.allclose(output(load_tiny(tmp_path / "second", head)), output(second), atol=1e-5, rtol=1e-4)
    with pytest.raises(UsageError, match="posttrain export"):
        adapted(tmp_path / "first", head, load_in_4bit=True)


def test_a_reward_model_may_begin_with_the_adapters_of_a_language_model(tmp_path):
    language = train(adapted(tiny_folder("llama", tmp_path)))
    saving.save_model(language, tiny_tokenizer(), tmp_path / "saved")
    reward = load_tiny(tmp_path / "saved", "score")
    language.set_attn_implementation("sdpa")
    reward.set_attn_implementation("sdpa")
    with torch.no_grad():
        states = [model.base_model(input_ids=TOKENS).last_hidden_state for model in (language, reward)]
    assert torch.allclose(*states, atol=1e-5)
    saving.save_model(adapted(tiny_folder("llama", tmp_path), "score"), tiny_tokenizer(), tmp_path / "reward")
    with pytest.raises(CheckpointError, match=r"score\.weight"):
        load_tiny(tmp_path / "reward")


def test_facts_and_tokenizer_travel_with_the_adapters(tmp_path):
    model = adapted(tiny_folder("llama", tmp_path), "score")
    model.config.score_mean = 0.25
    saving.save_model(model, tiny_tokenizer(), tmp_path / "saved")
    assert load_tiny(tmp_path / "saved", "score").config.score_mean == 0.25
    config = ModelConfig(path=str(tmp_path / "saved"))
    assert tokenizers.load_tokenizer(config).chat_template and loading.vocabulary_size(config) == VOCABULARY
    for file in (tmp_path / "saved").glob("*token*"):
        file.unlink()
    for name in ("chat_template.jinja", "config.json"):  # as other programs save adapters
        (tmp_path / "saved" / name).unlink()
    assert tokenizers.load_tokenizer(config).chat_template and loading.vocabulary_size(config) == VOCABULARY
    assert load_tiny(tmp_path / "saved", "score").dtype == torch.float32


def test_adapters_of_pico_name_it_and_not_its_cache(tmp_path, monkeypatch):
    model = train(adapted("pico"))
    saving.save_model(model, tiny_tokenizer(), tmp_path / "saved")
    assert adapters.base_model_of(tmp_path / "saved") == "pico"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    again = loading.read_model(str(tmp_path / "saved"), "token", torch.float32)
    assert torch.equal(output(again), output(model))


def test_the_same_adapters_give_the_same_file(tmp_path):
    for name in ("a", "b"):
        saving.save_model(adapted(tiny_folder("llama", tmp_path)), tiny_tokenizer(), tmp_path / name)
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("a", "b")]
    assert files[0] == files[1]
    targets = json.loads(files[0]["adapter_config.json"])["target_modules"]
    assert targets == sorted(targets)


def test_a_lost_base_is_explained(tmp_path):
    saving.save_model(adapted(tiny_folder("llama", tmp_path)), tiny_tokenizer(), tmp_path / "saved")
    edit_json(tmp_path / "saved" / "adapter_config.json", base_model_name_or_path=str(tmp_path / "gone"))
    with pytest.raises(UsageError, match=r"there is no folder .*gone"):
        load_tiny(tmp_path / "saved")
    edit_json(tmp_path / "saved" / "adapter_config.json", base_model_name_or_path=None)
    with pytest.raises(UsageError, match="names no base model"):
        load_tiny(tmp_path / "saved")


def test_a_missing_package_comes_with_the_command(tmp_path, monkeypatch):
    folder = tiny_folder("llama", tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"model\.lora_rank needs peft: pip install peft"):
        adapted(folder)
    with pytest.raises(UsageError, match="pip install bitsandbytes accelerate"):
        adapted(folder, load_in_4bit=True)


@BOTH
def test_adapters_on_four_bits(head, tmp_path):
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("accelerate")
    # 64 wide: the block of weights that share a scale
    folder = tiny_folder("llama", tmp_path, hidden_size=64, intermediate_size=128)
    model = adapted(folder, head, load_in_4bit=True).train()
    linear = model.model.layers[0].self_attn.q_proj
    assert type(linear.get_base_layer()).__name__ == "Linear4bit"
    start, full = output(model), output(load_tiny(folder, head))
    assert not torch.equal(start, full)
    assert head == "score" or (start - full).abs().mean() < full.abs().mean() / 2  # rounded, not ruined
    assert torch.equal(output(model.eval()), start)  # an evaluation leaves the frozen weights alone
    model.state_dict()
    assert torch.equal(output(model.train()), start)
    model(input_ids=TOKENS, use_cache=False).logits.square().sum().backward()
    assert all(p.grad is not None for p in loading.trainable_parameters(model).values())
    train(model.eval())
    expected = output(model)
    saving.save_model(model, tiny_tokenizer(), tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    train(model, seed=1)
    saving.load_weights(model, tmp_path / "saved")
    assert torch.equal(output(model), expected)
    assert load_tiny(tmp_path / "saved", head).dtype == torch.float32  # on the weights as they are on disk


def test_peft_gives_no_false_alarm_for_experts(tmp_path):
    """It says that it ignores the ranks of gate_up_proj, and does not."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        model = adapted(tiny_folder("mixtral", tmp_path), lora_rank=4)
    ranks = [
        layer.r["default"] for name, layer in adapters.adapted_layers(model) if name.endswith("experts.base_layer")
    ]
    assert ranks == [8] * len(model.model.layers)


EXPERT = "model.layers.0.block_sparse_moe.experts.1.w2.weight"


def test_adapters_on_experts_are_not_left_out_in_silence(tmp_path):
    """Weights that go to another engine have their adapters merged, those of experts as peft merges them."""
    folder = tiny_folder("mixtral", tmp_path)
    everywhere = train(adapted(folder))
    sent = dict(export_tensors(everywhere, torch.float32))
    merged = dict(export_tensors(adapters.merge(everywhere), torch.float32))
    assert sent.keys() == merged.keys() == load_file(folder / "model.safetensors").keys()
    for name, tensor in sent.items():
        torch.testing.assert_close(tensor, merged[name], atol=1e-6, rtol=1e-5)
    beside = train(adapted(folder, lora_target_modules=("q_proj", "o_proj")))
    sent = dict(export_tensors(beside, torch.float32))
    plain = load_file(folder / "model.safetensors")
    changed = {name for name, tensor in sent.items() if not torch.equal(tensor, plain[name])}
    assert sent.keys() == plain.keys() and not torch.equal(merged[EXPERT], plain[EXPERT])
    assert changed == {name for name in plain if "q_proj" in name or "o_proj" in name}
    assert {
        adapters.plain_name(name)
        for name in module_tensors(train(adapted(folder)))
        if not adapters.is_adapter_tensor(name)
    } == set(module_tensors(load_tiny(folder, "token")))


# Kinds of adapters

KINDS = {
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "both": {"use_dora": True, "use_rslora": True},
    "pissa": {"lora_init": "pissa"},
    "pissa_rslora": {"lora_init": "pissa_niter_16", "use_rslora": True},
}
EACH_KIND = pytest.mark.parametrize("kind", KINDS)


@EACH_KIND
@BOTH
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_each_kind_begins_with_the_base_model_and_merges_as_peft_does(name, head, kind, tmp_path):
    from peft import PeftModel

    folder = tiny_folder(name, tmp_path, head=head)
    base, model = output(load_tiny(folder, head)), adapted(folder, head, **KINDS[kind])
    assert torch.allclose(output(model), base, atol=2e-5)
    train(model)
    trained = output(model)
    assert not torch.allclose(trained, base, atol=1e-3)
    with adapters.disabled(model):
        assert torch.equal(output(model), base), "the reference is the base model itself"
    saving.save_model(model, tiny_tokenizer(), tmp_path / "saved")
    theirs = PeftModel.from_pretrained(loading.AUTO_CLASSES[head].from_pretrained(folder), tmp_path / "saved")
    assert torch.allclose(output(theirs.eval()), trained, atol=1e-5, rtol=1e-4)
    stock = theirs.merge_and_unload().state_dict()
    merged = load_tiny(tmp_path / "saved", head).state_dict()
    exported = dict(export_tensors(model, torch.float32))  # what rollout workers get
    for key, tensor in stock.items():
        torch.testing.assert_close(merged[key], tensor, atol=1e-6, rtol=1e-5)
        if key in exported:
            torch.testing.assert_close(exported[key], tensor, atol=1e-6, rtol=1e-5)
    assert exported.keys() == set(module_tensors(load_tiny(folder, head)))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("rslora", [False, True])
def test_pissa_trains_as_pefts_own(name, rslora, tmp_path):
    """peft changes the base weights and trains A and B of rank r; here A and B are a half of an adapter of rank 2 r."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from posttrain.config.sections import TrainConfig
    from posttrain.nn.optimizer import Optimizer

    folder = tiny_folder(name, tmp_path)
    ours = adapted(folder, lora_init="pissa", use_rslora=rslora, lora_alpha=6)
    ours.set_attn_implementation("sdpa")
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    options = {"fan_in_fan_out": name == "gpt2", "use_rslora": rslora, "init_lora_weights": "pissa"}
    theirs = get_peft_model(stock, LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", **options)).eval()
    trained = {n: p for n, p in theirs.named_parameters() if p.requires_grad}
    config = TrainConfig(max_grad_norm=0.5, weight_decay=0.1)
    optimizers = [Optimizer(loading.trainable_parameters(ours), config), Optimizer(trained, config)]
    for _ in range(4):
        norms = []
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            logits = model(input_ids=TOKENS).logits
            logits.log_softmax(-1)[..., 3].sum().backward()
            norms.append(optimizer.step(1e-2)["grad_norm"])
        assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    with torch.no_grad():
        assert torch.allclose(ours(input_ids=TOKENS).logits, theirs(input_ids=TOKENS).logits, atol=2e-4)


def test_kinds_that_cannot_be_are_refused(tmp_path):
    folder = tiny_folder("mixtral", tmp_path)
    for options in ({"lora_init": "pissa"}, {"use_dora": True}):
        with pytest.raises(
            UsageError, match=r"lora_init pissa: .* is not a linear layer|does not support these adapters"
        ):
            adapted(folder, **options)
    with pytest.raises(UsageError, match=r"model.lora_rank is 40, but a matrix of shape \(32, 32\)"):
        adapted(tiny_folder("llama", tmp_path / "llama"), lora_init="pissa", lora_rank=40)


@EACH_KIND
def test_each_kind_is_generated_with_as_it_is_trained(kind, tmp_path, caplog):
    """The engine's log-probabilities of its own greedy completions are the trainer's, and those of the merged model."""
    from posttrain.config.sections import TrainConfig
    from posttrain.engines.base import GenerationRequest, Sampling
    from posttrain.train.learner import Learner

    caplog.set_level("INFO", "posttrain")
    model = ModelConfig(path=str(tiny_folder("qwen3", tmp_path)), lora_rank=4, **KINDS[kind])
    learner = Learner(model, TrainConfig())
    assert ("run the code of peft" in caplog.text) == bool(KINDS[kind].get("use_dora"))
    train(learner.model)
    learner.generator.weights_changed()
    requests = [GenerationRequest(prompt=[4, 9, 17 + i], seed=i) for i in range(3)]
    found = learner.generate(requests, Sampling(max_tokens=8, temperature=1.0))
    for sample, stream in zip(found, learner.logprobs(found), strict=True):
        assert sample.logprobs[sample.mask] == pytest.approx(stream[sample.mask], abs=1e-4)
    saving.save_model(learner.model, tiny_tokenizer(), tmp_path / "saved")
    merged = Learner(ModelConfig(path=str(tmp_path / "saved")), TrainConfig(), trainable=False)
    for sample, stream in zip(found, merged.logprobs(found), strict=True):
        assert sample.logprobs[sample.mask] == pytest.approx(stream[sample.mask], abs=1e-4)
