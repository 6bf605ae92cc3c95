"""Loading and saving: what comes back is what was there, bit for bit, and nothing is made up."""

import json
import logging
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from posttrain.checkpoints.checkpoint import write_checkpoint
from posttrain.config.sections import ModelConfig
from posttrain.core.errors import CheckpointError, UsageError
from posttrain.models import loading, paths, saving, tensors, tokenizers
from posttrain.nn import attention
from tests.tiny import NAMES, VOCABULARY, tiny_folder, tiny_model, tiny_tokenizer

CPU = torch.device("cpu")
TOKENS = torch.arange(6, 30)[None]


def load_tiny(path, head="token", *, trainable=False, seed=0, **options):
    return loading.load_model(ModelConfig(path=str(path), **options), head, device=CPU, trainable=trainable, seed=seed)


@torch.no_grad()
def output(model, tokens=TOKENS):
    """Logits or scores by stock attention."""
    model.set_attn_implementation("sdpa")
    return model(input_ids=tokens, use_cache=False).logits


def rewrite(folder, change):
    """Edit the tensors of a saved model."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# Paths


def test_no_path_names_the_option():
    with pytest.raises(UsageError, match=r"--model\.path"):
        paths.resolve_path("")


def test_pico_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert paths.resolve_path("pico").startswith(str(tmp_path))


def test_a_folder_with_a_model_is_itself(tmp_path):
    folder = tiny_folder("llama", tmp_path)
    assert paths.resolve_path(str(folder)) == str(folder)


def test_a_run_folder_is_its_newest_valid_checkpoint(tmp_path):
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    checkpoints = tmp_path / "run" / "checkpoints"
    for step in (1, 2, 3):
        write_checkpoint(checkpoints, step, lambda folder: saving.save_model(model, tokenizer, folder / "model"))
    (checkpoints / "step-00000003" / "model" / "config.json").write_text("{}")
    expected = str(checkpoints / "step-00000002" / "model")
    assert paths.resolve_path(str(tmp_path / "run")) == expected
    assert paths.resolve_path(str(checkpoints / "step-00000002")) == expected
    assert torch.equal(output(load_tiny(tmp_path / "run")), output(model))


def test_a_folder_without_a_model_says_what_is_there(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "data").mkdir()
    with pytest.raises(UsageError, match=r"no model in .*no config\.json.*data/, notes\.txt"):
        paths.resolve_path(str(tmp_path))
    with pytest.raises(UsageError, match="It is a file"):
        paths.resolve_path(str(tmp_path / "notes.txt"))


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/at/all", "~/nowhere", "a/b/c", "has space"])
def test_what_is_neither_folder_nor_hub_name_is_refused(path):
    with pytest.raises(UsageError, match="there is no folder"):
        paths.resolve_path(path)


@pytest.mark.parametrize("path", ["gpt2", "Qwen/Qwen2.5-0.5B"])
def test_a_hub_name_is_left_as_it_is(path):
    assert paths.resolve_path(path) == path


def test_a_model_of_modelscope_is_the_folder_it_was_downloaded_to(tmp_path, monkeypatch):
    folder, asked = tiny_folder("llama", tmp_path), []
    module = types.ModuleType("modelscope")
    module.snapshot_download = lambda name: asked.append(name) or str(folder)
    monkeypatch.setitem(sys.modules, "modelscope", module)
    paths.modelscope_model.cache_clear()
    path = "modelscope://owner/tiny.model"
    assert output(load_tiny(path)).equal(output(load_tiny(folder))) and asked == ["owner/tiny.model"]
    assert tokenizers.load_tokenizer(ModelConfig(path=path)).get_vocab() == tiny_tokenizer().get_vocab()


def test_models_of_modelscope_that_cannot_be_had(monkeypatch):
    def fails(name):
        raise ConnectionError("no route\nto host")

    module = types.ModuleType("modelscope")
    module.snapshot_download = fails
    for there, path, words in (
        (module, "modelscope://owner/other", "^model.path: modelscope://owner/other: from ModelScope: no route$"),
        (module, "modelscope://nobody", "expected modelscope://owner/name$"),
        (None, "modelscope://owner/another", "pip install modelscope$"),
    ):
        monkeypatch.setitem(sys.modules, "modelscope", there)
        with pytest.raises(UsageError, match=words):
            paths.resolve_path(path)


@pytest.mark.parametrize("reachable", [True, False])
def test_a_hub_name_that_cannot_be_loaded_is_one_line(monkeypatch, reachable):
    monkeypatch.setattr(paths, "hub_is_reachable", lambda: reachable)
    monkeypatch.setattr(paths, "hub_options", lambda source: {"local_files_only": True})
    for action in (load_tiny, lambda path: tokenizers.load_tokenizer(ModelConfig(path=path))):
        with pytest.raises(UsageError, match="nobody/no-such-model is not a local folder") as caught:
            action("nobody/no-such-model")
        assert "\n" not in str(caught.value)


# Loading


@pytest.mark.parametrize("head", ["token", "score"])
@pytest.mark.parametrize("name", NAMES)
def test_round_trip_is_exact(name, head, tmp_path):
    folder = tiny_folder(name, tmp_path, head=head)
    model = load_tiny(folder, head, trainable=True)
    expected = output(tiny_model(name, head=head))
    assert torch.equal(output(model.eval()), expected)
    saving.save_model(model, tokenizers.load_tokenizer(ModelConfig(path=str(folder))), tmp_path / "saved")
    assert torch.equal(output(load_tiny(tmp_path / "saved", head)), expected)
    stock = AutoModelForSequenceClassification if head == "score" else AutoModelForCausalLM
    assert torch.equal(output(stock.from_pretrained(tmp_path / "saved")), expected)


def test_the_saved_folder_is_plain(tmp_path):
    folder = tiny_folder("mixtral", tmp_path)
    saving.save_model(load_tiny(folder), tiny_tokenizer(), tmp_path / "saved")
    before, after = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "saved"))
    assert before == after  # neither our attention nor use_cache=False leaks out
    assert load_file(folder / "model.safetensors").keys() == load_file(tmp_path / "saved/model.safetensors").keys()
    assert (tmp_path / "saved" / "generation_config.json").is_file()
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template == tiny_tokenizer().chat_template


def test_a_new_score_head_is_drawn_from_the_seed(tmp_path):
    folder = tiny_folder("llama", tmp_path, hidden_size=256)
    global_state = torch.get_rng_state()
    first, same, other = (load_tiny(folder, "score", seed=seed).score.weight for seed in (1, 1, 2))
    assert torch.equal(first, same) and not torch.equal(first, other)
    assert first.shape == (1, 256) and float(first.std() * 257**0.5) == pytest.approx(1, abs=0.15)
    assert torch.equal(torch.get_rng_state(), global_state)


def test_a_score_model_scores_the_last_token_in_stock_code_even_if_it_is_the_end_token(tmp_path):
    folder = tiny_folder("llama", tmp_path, pad_token_id=5)  # padding is the end token, as in SmolLM2
    edit_json(folder / "tokenizer_config.json", pad_token="<|im_end|>")
    config = ModelConfig(path=str(folder))
    tokenizer = tokenizers.load_tokenizer(config)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 5
    model = load_tiny(folder, "score")
    saving.save_model(model, tokenizer, tmp_path / "saved")
    stock = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    texts = ["1+1=2<|im_end|>", "much longer than that<|im_end|>"]
    batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    with torch.no_grad():
        scores = stock(**batch).logits
    model.set_attn_implementation("sdpa")
    for text, score in zip(texts, scores, strict=True):
        with torch.no_grad():
            hidden = model.base_model(input_ids=torch.tensor([tokenizer.encode(text)])).last_hidden_state
            assert torch.allclose(model.score(hidden[:, -1]), score, atol=1e-5)


@pytest.mark.parametrize("head", ["token", "score"])
def test_facts_in_the_config_survive(head, tmp_path):
    model = load_tiny(tiny_folder("qwen2", tmp_path), head)
    facts = {"score_mean": 0.25, "score_std": 1.5, "placeholder_token": "<step>", "reward_tokens": ["+", "-"]}
    for key, value in facts.items():
        setattr(model.config, key, value)
    saving.save_model(model, tiny_tokenizer(), tmp_path / "saved")
    config = load_tiny(tmp_path / "saved", head).config
    assert {key: getattr(config, key) for key in facts} == facts


def test_dropout_is_off(tmp_path):
    noisy = {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5}
    model = load_tiny(tiny_folder("gpt2", tmp_path, **noisy), trainable=True)
    assert model.training
    assert torch.equal(output(model), output(model))
    raw = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny-gpt2-token").train()
    assert not torch.equal(output(raw), output(raw))  # or the test shows nothing


def test_noise_by_configuration_is_off(tmp_path):
    folder = tiny_folder("mixtral", tmp_path, attention_dropout=0.5, router_jitter_noise=0.5)
    model = load_tiny(folder, trainable=True)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        first, second = (model(input_ids=TOKENS).logits for _ in range(2))
    assert torch.equal(first, second)


def test_what_is_loaded_for_inference_is_frozen_and_quiet(tmp_path):
    model = load_tiny(tiny_folder("llama", tmp_path))
    assert not model.training and not loading.trainable_parameters(model)
    assert model.config._attn_implementation == attention.NAME and not model.config.use_cache
    assert model.dtype == torch.float32


def test_dtype_of_the_files_does_not_matter_on_a_cpu(tmp_path):
    tiny_model("llama").bfloat16().save_pretrained(tmp_path / "half")
    tiny_tokenizer().save_pretrained(tmp_path / "half")
    assert load_tiny(tmp_path / "half").dtype == torch.float32
    assert load_tiny(tmp_path / "half", dtype="bfloat16").dtype == torch.bfloat16


def test_trainable_parameters_are_in_order_and_tied_ones_come_once(tmp_path):
    tied = loading.trainable_parameters(load_tiny(tiny_folder("qwen2", tmp_path), trainable=True))
    untied = loading.trainable_parameters(load_tiny(tiny_folder("qwen2_untied", tmp_path), trainable=True))
    assert list(untied) == [*tied, "lm_head.weight"]
    assert len({id(parameter) for parameter in tied.values()}) == len(tied)


def test_the_padding_token_learns_like_any_other(tmp_path):
    model = load_tiny(tiny_folder("llama", tmp_path, pad_token_id=7), trainable=True)
    model.set_attn_implementation("sdpa")
    model(input_ids=TOKENS).logits.square().sum().backward()
    assert 7 in TOKENS and float(model.get_input_embeddings().weight.grad[7].abs().sum()) > 0


@pytest.mark.parametrize("head", ["token", "score"])
@pytest.mark.parametrize("name", NAMES)
def test_a_meta_model_and_its_shards_are_the_model(name, head, tmp_path):
    """What processes read of a model each for itself: nothing of it but the weights is missing at first."""
    folder = tiny_folder(name, tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        torch.default_generator.manual_seed(3)
        whole = loading.read_model(str(folder), head, dtype)
        torch.default_generator.manual_seed(3)
        meta_model, found = loading.load_meta_model(str(folder), head, dtype)
        absent = {name for name, tensor in meta_model.named_parameters() if tensor.is_meta}
        assert found == folder and absent == dict(meta_model.named_parameters()).keys() - {"score.weight"}
        materialized = meta_model._apply(
            lambda tensor: torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor
        )
        materialized.tie_weights()
        buffers = tensors.module_tensors(materialized).keys() - dict(materialized.named_parameters()).keys()
        tensors.read_shards(materialized, folder, absent | buffers)
        for kind in ("named_parameters", "named_buffers"):
            one, other = (dict(getattr(model, kind)()) for model in (whole, materialized))
            assert one.keys() == other.keys()
            for key, tensor in one.items():
                assert tensor.dtype == other[key].dtype and torch.equal(tensor, other[key]), key
        assert (
            whole.config.to_dict() == materialized.config.to_dict() and whole.name_or_path == materialized.name_or_path
        )
        if head == "token":
            assert whole.generation_config.to_dict() == materialized.generation_config.to_dict()


def test_a_meta_model_of_the_hub_reads_from_its_cache(tmp_path, monkeypatch):
    place = tmp_path / "models--some--model"
    (place / "refs").mkdir(parents=True)
    (place / "refs/main").write_text("0" * 40)
    tiny_folder("llama", tmp_path).rename(place / "snapshot")
    (place / "snapshots").mkdir()
    (place / "snapshot").rename(place / "snapshots" / ("0" * 40))
    monkeypatch.setattr(paths.hub, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(loading, "read_config", lambda _, head: config)
    config = AutoConfig.from_pretrained(place / "snapshots" / ("0" * 40))
    meta_model, folder = loading.load_meta_model("some/model", "token", torch.float32)
    assert folder == place / "snapshots" / ("0" * 40) and meta_model.model.embed_tokens.weight.is_meta


def test_a_meta_model_needs_tensors_of_its_own_names(tmp_path):
    folder = tiny_folder("llama", tmp_path)
    rewrite(folder, lambda saved: saved.update(other=saved.pop("model.norm.weight")))
    assert loading.load_meta_model(str(folder), "token", torch.float32)[0] is None
    (folder / "model.safetensors").unlink()
    assert loading.load_meta_model(str(folder), "token", torch.float32)[0] is None
    score = tiny_folder("llama", tmp_path, head="score")
    with pytest.raises(UsageError, match="is a reward model; a language model is needed here"):
        loading.load_meta_model(str(score), "token", torch.float32)


def test_activation_checkpointing_gives_the_same_gradients(tmp_path):
    folder, gradients = tiny_folder("llama", tmp_path), []
    for checkpoint in (False, True):
        model = load_tiny(folder, trainable=True, gradient_checkpointing=checkpoint)
        assert model.is_gradient_checkpointing == checkpoint
        model.set_attn_implementation("sdpa")
        model(input_ids=TOKENS, use_cache=False).logits.square().sum().backward()
        gradients.append([parameter.grad for parameter in loading.trainable_parameters(model).values()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


# What must not pass


@pytest.mark.parametrize(
    ("name", "lost", "said"),
    [
        ("llama", "model.layers.1.mlp.up_proj.weight", r"not in the files: model\.layers\.1\.mlp\.up_proj\.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.gate.weight", r"not in the files: model\.layers\.0\.mlp\.gate"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.1.w1.weight", "experts are missing or damaged"),
        (
            "mixtral",
            "model.layers.0.block_sparse_moe.experts.1.w2.weight",
            r"experts\.down_proj has shape \(3, .*\(4, ",
        ),
    ],
)
@pytest.mark.parametrize("head", ["token", "score"])  # a new head excuses the head alone
def test_missing_weights_are_named(name, lost, said, head, tmp_path):
    folder = tiny_folder(name, tmp_path)
    rewrite(folder, lambda saved: saved.pop(lost))
    with pytest.raises(UsageError, match=said):
        load_tiny(folder, head)


def test_weights_without_a_place_are_named(tmp_path, caplog):
    folder = tiny_folder("llama", tmp_path)
    rewrite(folder, lambda saved: saved.update({"model.extra.weight": torch.zeros(2)}))
    with caplog.at_level(logging.WARNING, logger="posttrain"):
        load_tiny(folder)
    assert "model.extra.weight" in caplog.text
    caplog.clear()
    load_tiny(tiny_folder("qwen3", tmp_path), "score")  # whose lm_head gives way, as it should
    assert not [record for record in caplog.records if record.name == "posttrain"]


def test_a_reward_model_is_no_language_model(tmp_path):
    for name in ("llama", "qwen2"):  # the tied one misses nothing
        with pytest.raises(UsageError, match="is a reward model"):
            load_tiny(tiny_folder(name, tmp_path, head="score"))


def test_a_classifier_of_many_classes_is_refused(tmp_path):
    folder = tiny_folder("llama", tmp_path, head="score")
    rewrite(folder, lambda saved: saved.update({"score.weight": torch.zeros(3, 32)}))
    with pytest.raises(UsageError, match=r"score\.weight has shape \(3, 32\)"):
        load_tiny(folder, "score")


def test_damaged_and_wrong_folders_are_one_line(tmp_path):
    damaged = tiny_folder("llama", tmp_path)
    (damaged / "model.safetensors").write_bytes(b"not a tensor in sight")
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "config.json").write_text('{"model_type": "no-such-architecture"}')
    empty = tiny_folder("qwen2", tmp_path)
    (empty / "model.safetensors").unlink()
    for folder in (damaged, strange, empty):
        with pytest.raises(UsageError, match=folder.name) as caught:
            load_tiny(folder)
        assert "\n" not in str(caught.value)


def test_pickled_weights_are_not_read(tmp_path):
    folder = tiny_folder("llama", tmp_path)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="safetensors"):
        load_tiny(folder)


def test_code_in_a_model_folder_is_not_run(tmp_path):
    folder = tiny_folder("llama", tmp_path)
    edit_json(folder / "config.json", model_type="own", auto_map={"AutoConfig": "own.Config"})
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\n")
    with pytest.raises(UsageError):
        load_tiny(folder)
    assert not (tmp_path / "ran").exists()


def test_threads_that_read_models_do_so_one_after_another(tmp_path, monkeypatch):
    """While transformers reads a model, no other is tied: a second thread has to wait, or would keep it so."""
    folder, original = tiny_folder("qwen2", tmp_path), AutoModelForCausalLM.from_pretrained
    reading, met = threading.Lock(), []

    def read(*args, **options):
        met.append(not reading.acquire(blocking=False))
        try:
            return original(*args, **options)
        finally:
            if not met[-1]:
                reading.release()

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", read)
    with ThreadPoolExecutor(4) as threads:
        models = list(threads.map(lambda _: load_tiny(folder, trainable=False), range(8)))
    assert met == [False] * 8
    assert all(model.lm_head.weight is model.model.embed_tokens.weight for model in models)


def test_four_bits_need_adapters():
    with pytest.raises(UsageError, match=r"model\.lora_rank"):
        load_tiny("pico", trainable=True, load_in_4bit=True)


# The tokenizer


def test_a_missing_padding_token_is_the_end_token(tmp_path):
    folder = tiny_folder("llama", tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["pad_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    size = len(AutoTokenizer.from_pretrained(folder))
    tokenizer = tokenizers.load_tokenizer(ModelConfig(path=str(folder)))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id and len(tokenizer) == size <= VOCABULARY


def test_another_tokenizer_may_be_named(tmp_path):
    folder = tiny_folder("llama", tmp_path)
    assert len(tokenizers.load_tokenizer(ModelConfig(path=str(folder), tokenizer="pico"))) == 263
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no model in"):
        tokenizers.load_tokenizer(ModelConfig(path=str(folder), tokenizer=str(tmp_path / "empty")))


def test_the_vocabulary_is_the_models_not_the_tokenizers(tmp_path):
    config = ModelConfig(path=str(tiny_folder("gpt2", tmp_path)))
    assert loading.vocabulary_size(config) == VOCABULARY > len(tokenizers.load_tokenizer(config))


# Saving


def test_a_generation_config_that_transformers_would_not_save(tmp_path):
    folder = tiny_folder("llama", tmp_path)
    edit_json(folder / "generation_config.json", temperature=0.5)  # without do_sample: loads, does not save
    model = load_tiny(folder)
    saving.save_model(model, tiny_tokenizer(), tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert saved["temperature"] == 0.5 and saved["do_sample"]


@pytest.mark.parametrize("head", ["token", "score"])
@pytest.mark.parametrize("name", ["gpt2", "qwen2", "mixtral", "deepseek_v3"])
def test_weights_are_read_back_in_place(name, head, tmp_path):
    folder = tiny_folder(name, tmp_path, head=head)
    model = load_tiny(folder, head, trainable=True)
    expected = output(model.eval())
    saving.save_model(model, tiny_tokenizer(), tmp_path / "saved")
    addresses = {key: tensor.data_ptr() for key, tensor in model.state_dict().items()}
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(1)
    assert not torch.equal(output(model), expected)
    saving.load_weights(model, tmp_path / "saved")
    assert torch.equal(output(model), expected)
    assert {key: tensor.data_ptr() for key, tensor in model.state_dict().items()} == addresses
    assert all(parameter.requires_grad for parameter in model.parameters() if parameter.is_floating_point())


def test_weights_that_do_not_fit_are_refused(tmp_path):
    model = load_tiny(tiny_folder("llama", tmp_path))
    other = tiny_folder("qwen2_untied", tmp_path)
    with pytest.raises(CheckpointError, match="does not fit"):
        saving.load_weights(model, tiny_folder("llama", tmp_path / "three", num_hidden_layers=3))
    with pytest.raises(CheckpointError):
        saving.load_weights(model, other)
    rewrite(tmp_path / "tiny-llama-token", lambda saved: saved.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        saving.load_weights(model, tmp_path / "tiny-llama-token")
    with pytest.raises(CheckpointError, match="cannot be read"):
        saving.load_weights(model, tmp_path / "nowhere")
