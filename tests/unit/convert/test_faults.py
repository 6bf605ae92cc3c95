"""Files that are missing, cut, changed or malicious: refused with their name, and no target is left."""

import json
import os
import signal

import pytest
import torch
from safetensors.torch import save_file

from posttrain.convert import stream
from posttrain.convert.conversion import convert, wrap_as_checkpoint
from posttrain.convert.files import open_pt
from posttrain.convert.megatron import CheckpointLayout
from posttrain.convert.source import open_source
from posttrain.core.errors import CheckpointError, PosttrainError, UsageError
from tests.unit.convert.models import converted, core, make, weights


@pytest.fixture
def folder(tmp_path):
    return make("llama", tmp_path / "hf")


@pytest.fixture
def shards(tmp_path, folder):
    converted(folder, tmp_path / "core", CheckpointLayout("mcore", tp=2, pp=2))
    return tmp_path / "core"


def refused(source, kind, *words):
    out = source.parent / "out"
    before = sorted(source.parent.iterdir())
    with pytest.raises(PosttrainError) as caught:
        converted(source, out, CheckpointLayout(), kind)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert sorted(source.parent.iterdir()) == before  # no target, nothing half done


def rank(shards, name="mp_rank_01_001"):
    return shards / "iter_0000001" / name / "model_optim_rng.pt"


def test_a_missing_rank(shards):
    rank(shards).unlink()
    refused(shards, "mcore", "mp_rank_01_001", "missing")


def test_a_truncated_rank(shards):
    data = rank(shards).read_bytes()
    rank(shards).write_bytes(data[: len(data) // 2])
    refused(shards, "mcore", "mp_rank_01_001", "cannot be read")


def test_a_changed_bit(shards):
    location = open_pt(rank(shards)).tensors["model/decoder.layers.1.mlp.linear_fc2.weight"]
    data = bytearray(rank(shards).read_bytes())
    data[location.offset + 5] ^= 1
    rank(shards).write_bytes(bytes(data))
    refused(shards, "mcore", "mp_rank_01_001", "decoder.layers.1.mlp.linear_fc2.weight", "damaged")


def test_copies_that_differ(shards):
    (shards / "convert.json").unlink()
    state = core(shards, 1, 0, None)
    state["model"]["decoder.layers.0.input_layernorm.weight"][3] += 1
    torch.save(state, rank(shards, "mp_rank_01_000"))
    refused(shards, "mcore", "mp_rank_01_000", "input_layernorm", "differs between")


@pytest.mark.parametrize("change", ["lost", "more", "shape"])
def test_tensors_that_are_not_as_expected(shards, change):
    (shards / "convert.json").unlink()
    state = core(shards, 1, 1, None)
    name = "decoder.layers.0.self_attention.linear_proj.weight"
    if change == "lost":
        del state["model"][name]
    elif change == "more":
        state["model"]["decoder.layers.0.surprise"] = torch.zeros(3)
    else:
        state["model"][name] = torch.zeros(16, 7)
    torch.save(state, rank(shards))
    word = {"lost": "missing", "more": "surprise", "shape": "(16, 7)"}[change]
    refused(shards, "mcore", "mp_rank_01_001", word)


class Evil:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (self.target,)


def test_a_pickle_payload_is_not_run(shards):
    target = str(shards.parent / "owned")
    torch.save({"model": {}, "args": Evil(target)}, rank(shards, "mp_rank_00_000"))
    refused(shards, "mcore", "mp_rank_00_000", "not loaded")
    assert not (shards.parent / "owned").exists()


def test_safetensors_that_lie(folder):
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-4])
    refused(folder, "hf", "model.safetensors", "truncated")
    file.write_bytes(data[:5])
    refused(folder, "hf", "model.safetensors", "truncated")
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["model.norm.weight"]["shape"] = [10**12]
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    refused(folder, "hf", "model.safetensors", "damaged")


def test_a_lost_or_unknown_tensor_of_hugging_face(folder):
    tensors = weights(folder)
    save_file({k: v for k, v in tensors.items() if "layers.2.mlp.up_proj" not in k}, folder / "model.safetensors")
    refused(folder, "hf", "model.layers.2.mlp.up_proj.weight", "missing")
    save_file(tensors | {"model.layers.2.mlp.up_proj.bias": torch.zeros(24)}, folder / "model.safetensors")
    refused(folder, "hf", "model.layers.2.mlp.up_proj.bias", "not in the model")


def test_a_file_of_the_index_is_missing(folder, tmp_path):
    converted(folder, tmp_path / "many", CheckpointLayout(), shard_bytes=5000)
    lost = sorted((tmp_path / "many").glob("model-*.safetensors"))[1]
    lost.unlink()
    refused(tmp_path / "many", "hf", lost.name, "missing")


def test_unknown_families_and_quantized_weights(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "rwkv"}))
    refused(folder, "hf", "rwkv", "not supported")
    (folder / "config.json").write_text(json.dumps(config))
    tensors = weights(folder)
    name = "model.layers.2.mlp.up_proj.weight"
    for dtype in (torch.int8, torch.float8_e4m3fn):
        save_file(tensors | {name: tensors[name].to(dtype)}, folder / "model.safetensors")
        refused(folder, "hf", name, "quantized")


def test_the_layer_for_later_tokens_is_never_dropped(tmp_path):
    folder = make("deepseek_v3-later", tmp_path / "hf")
    tensors = weights(folder)
    save_file({k: v for k, v in tensors.items() if "eh_proj" not in k}, folder / "model.safetensors")
    refused(folder, "hf", "model.layers.4.eh_proj.weight", "missing")
    name = "model.layers.4.embed_tokens.weight"
    save_file(tensors | {name: tensors[name] + 1}, folder / "model.safetensors")
    refused(folder, "hf", name, "differs between")
    save_file({k: v for k, v in tensors.items() if k != name}, folder / "model.safetensors")  # a copy may be left out
    converted(folder, tmp_path / "core", CheckpointLayout("mcore", tp=2, pp=2))
    last = core(tmp_path / "core", 1, 1, None)["model"]
    assert torch.equal(last["mtp.layers.0.eh_proj.weight"], tensors["model.layers.4.eh_proj.weight"][8:])
    assert torch.equal(last["mtp.layers.0.final_layernorm.weight"], tensors["model.layers.4.shared_head.norm.weight"])
    converted(tmp_path / "core", tmp_path / "back", CheckpointLayout(), "mcore")
    assert torch.equal(weights(tmp_path / "back")[name], tensors[name])


def test_a_failure_half_way_leaves_nothing(folder, tmp_path, monkeypatch):
    count = 0
    original = stream.TensorStream.load

    def fails_later(self, tensor):
        nonlocal count
        count += 1
        if count == 9:
            raise KeyboardInterrupt
        return original(self, tensor)

    monkeypatch.setattr(stream.TensorStream, "load", fails_later)
    with pytest.raises(KeyboardInterrupt):
        converted(folder, tmp_path / "core", CheckpointLayout("mcore", tp=2))
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_full_target_is_not_touched(folder, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there/mine").write_text("x")
    with pytest.raises(UsageError, match="not empty"):
        converted(folder, tmp_path / "there", CheckpointLayout("mcore"))
    assert (tmp_path / "there/mine").read_text() == "x"


def test_the_manifest_names_every_tensor(folder, shards):
    manifest = json.loads((shards / "convert.json").read_text())
    assert {row["name"] for row in manifest["source"]} == set(weights(folder))
    assert manifest["elements"] == sum(tensor.numel() for tensor in weights(folder).values())
    assert all(len(row["sha256"]) == 64 and row["dtype"] == "float32" for row in manifest["target"])


def test_a_mixture_of_types_is_refused_unless_one_is_chosen(folder, tmp_path):
    tensors = weights(folder)
    name = "model.layers.2.self_attn.q_proj.weight"
    save_file(tensors | {name: tensors[name].bfloat16()}, folder / "model.safetensors")
    with pytest.raises((UsageError, CheckpointError), match="--dtype"):
        converted(folder, tmp_path / "core", CheckpointLayout("mcore"))
    converted(folder, tmp_path / "core", CheckpointLayout("mcore"), dtype=torch.bfloat16)


@pytest.mark.parametrize("sharded", [False, True], ids=["folder", "run directory"])
def test_a_killed_conversion_leaves_nothing_to_the_next(folder, tmp_path, sharded, caplog):
    """The process of a conversion is killed while it writes; the same command then works and removes what is left."""
    source, out = open_source(folder, "hf", None, None), tmp_path / "out"

    def write(**details):
        if sharded:
            return wrap_as_checkpoint(source, out, None, **details)
        return convert(source, out, CheckpointLayout(), **details)

    if (child := os.fork()) == 0:
        write(progress=lambda count, total: os.kill(os.getpid(), signal.SIGKILL))
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert len(list(tmp_path.rglob(".tmp-*/**/*.safetensors"))) == 1
    write()
    assert not list(tmp_path.rglob(".tmp-*")) and "that killed processes had left" in caplog.text
    assert len(list(out.rglob("*.safetensors"))) == 1
