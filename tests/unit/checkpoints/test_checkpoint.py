"""Checkpoints: what is saved comes back, what is damaged is named, what is old goes, what matters stays."""

import json
import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from posttrain.checkpoints import checkpoint
from posttrain.checkpoints.checkpoint import (
    FileHashing,
    checkpoint_to_resume,
    delete_old_checkpoints,
    describe_files,
    files_of_rank,
    is_run_directory,
    is_valid,
    list_checkpoints,
    looks_complete,
    newest_valid,
    remove_temporaries,
    resolve_model_folder,
    start_checkpoint,
    step_of,
    verify,
    write_checkpoint,
)
from posttrain.checkpoints.random_state import restore_rng, rng_state
from posttrain.checkpoints.tensor_files import (
    LazyTensors,
    TensorFiles,
    load_tensors,
    save_sharded,
    save_tensors,
)
from posttrain.core.errors import CheckpointError
from posttrain.core.files import file_sha256, read_json, write_json


def save(checkpoints: Path, step: int, size: int = 1000, mark: int = 0) -> Path:
    def write(folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "weights.bin").write_bytes(bytes([step % 256, mark]) * (size // 2))
        write_json(folder / "state.json", {"step": step, "mark": mark})

    return write_checkpoint(checkpoints, step, write)


def steps(checkpoints: Path) -> list[int]:
    return [step_of(path) for path in list_checkpoints(checkpoints)]


def temporaries(checkpoints: Path) -> list[str]:
    return [path.name for path in checkpoints.iterdir() if path.name.startswith(".")]


def test_a_saved_step_is_valid_and_lists_every_file(tmp_path):
    path = save(tmp_path / "run" / "checkpoints", 40)
    assert path.name == "step-00000040"
    verify(path)
    manifest = read_json(path / "manifest.json")
    assert manifest["format"] == 1
    assert manifest["step"] == 40
    assert set(manifest["files"]) == {"model/weights.bin", "state.json"}
    assert manifest["files"]["model/weights.bin"]["size"] == 1000
    assert temporaries(path.parent) == []
    assert newest_valid(path.parent) == path


def test_everything_is_on_the_disk_before_the_name_is(tmp_path, monkeypatch):
    events = []
    fsync, rename = os.fsync, os.rename

    def noting_fsync(descriptor):
        events.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    def noting_rename(source, target, **options):
        events.append("rename")
        rename(source, target, **options)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "rename", noting_rename)
    save(tmp_path, 40)
    renamed = events.index("rename")
    before = [name.rpartition(f"-{os.getpid()}")[2] for name in events[:renamed]]
    assert set(before) == {"", "/model", "/model/weights.bin", "/state.json", "/manifest.json"}
    assert before.index("/manifest.json") > max(before.index("/model/weights.bin"), before.index("/state.json"))
    assert before[-1] == ""
    assert events[renamed + 1 :] == [str(tmp_path)]


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda path: (path / "manifest.json").unlink(), "manifest.json: missing"),
        (lambda path: (path / "manifest.json").write_text("{"), "manifest.json: damaged"),
        (lambda path: (path / "manifest.json").write_text("[]"), "manifest.json: damaged"),
        (lambda path: (path / "manifest.json").write_bytes(b"\xff"), "manifest.json: damaged"),
        (lambda path: (path / "model" / "weights.bin").unlink(), "weights.bin: missing"),
        (lambda path: os.truncate(path / "model" / "weights.bin", 999), "weights.bin: damaged: 999 bytes"),
        (lambda path: flip_bit(path / "model" / "weights.bin", 7003), "weights.bin: damaged"),
        (lambda path: flip_bit(path / "state.json", 80), "state.json: damaged"),
        (lambda path: (path / "model" / "extra.bin").write_bytes(b""), "extra.bin: not listed in manifest.json"),
        (lambda path: (path / "model" / "extra.bin").symlink_to("weights.bin"), "extra.bin: a checkpoint may only"),
        (lambda path: path.rename(path.with_name("step-00000050")), None),
    ],
)
def test_damage_is_found_by_name_and_the_one_before_is_taken(tmp_path, caplog, damage, named):
    earlier, path = save(tmp_path, 30), save(tmp_path, 40)
    damage(path)
    if named is not None:
        with pytest.raises(CheckpointError, match=named):
            verify(path)
    assert newest_valid(tmp_path) == earlier
    assert newest_valid(tmp_path, step=40) is None
    assert newest_valid(tmp_path, step=30) == earlier
    assert "skipped a damaged checkpoint" in caplog.text


def test_nothing_is_resumed_where_all_checkpoints_are_damaged(tmp_path):
    assert checkpoint_to_resume(tmp_path / "none") is None
    earlier, path = save(tmp_path, 30), save(tmp_path, 40)
    (path / "state.json").write_bytes(b"")
    assert checkpoint_to_resume(tmp_path) == earlier
    (earlier / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints can be used"):
        checkpoint_to_resume(tmp_path)


def flip_bit(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_a_flipped_bit_of_the_manifest_is_found(tmp_path):
    path = save(tmp_path, 40, size=2)
    manifest = path / "manifest.json"
    good = manifest.read_bytes()
    for bit in range(0, 8 * (len(good) - 1), 5):  # all of them pass too; the last byte is the newline
        flip_bit(manifest, bit)
        assert not is_valid(path), f"bit {bit} of {manifest.read_text(errors='replace')}"
        manifest.write_bytes(good)
    verify(path)


def test_a_manifest_cannot_point_outside(tmp_path):
    path = save(tmp_path, 40)
    (tmp_path / "outside").write_bytes(b"")
    manifest = read_json(path / "manifest.json")
    manifest["files"]["../outside"] = {
        "size": 0,
        "sha256": file_sha256(tmp_path / "outside"),
    }
    write_json(path / "manifest.json", manifest)
    with pytest.raises(CheckpointError, match=r"manifest\.json: damaged"):
        verify(path)


def test_another_format_is_refused(tmp_path):
    path = save(tmp_path, 40)
    manifest = path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(CheckpointError, match="reads format 1"):
        verify(path)


def test_looking_complete_means_sizes_only(tmp_path):
    path = save(tmp_path, 40)
    flip_bit(path / "model" / "weights.bin", 0)
    assert looks_complete(path)
    assert not is_valid(path)
    os.truncate(path / "model" / "weights.bin", 1)
    assert not looks_complete(path)


def test_a_failing_writer_leaves_nothing_and_is_named(tmp_path):
    earlier = save(tmp_path, 30)

    def write(folder: Path) -> None:
        (folder / "half").write_bytes(bytes(2_000_000))
        raise ValueError("no such tensor")

    with pytest.raises(CheckpointError) as caught:
        write_checkpoint(tmp_path, 40, write)
    message = str(caught.value)
    assert "step 40 was not saved: ValueError: no such tensor" in message
    assert "2.00 MB" in message
    assert "Earlier checkpoints are untouched" in message
    assert isinstance(caught.value.__cause__, ValueError)
    assert [path.name for path in tmp_path.iterdir()] == [earlier.name]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_cleans_up_and_goes_on(tmp_path, error):
    def write(folder: Path) -> None:
        (folder / "half").write_bytes(b"1")
        raise error

    with pytest.raises(error):
        write_checkpoint(tmp_path, 40, write)
    assert list(tmp_path.iterdir()) == []


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 40, mark=1)
    path = save(tmp_path, 40, mark=2)
    assert read_json(path / "state.json")["mark"] == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000040"]
    verify(path)


def test_a_replacement_that_fails_puts_the_earlier_one_back(tmp_path, monkeypatch):
    save(tmp_path, 40, mark=1)
    rename = os.rename

    def failing(source, target, **options):
        if Path(source).name.startswith(".tmp-step"):
            raise OSError(5, "Input/output error")
        rename(source, target, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", failing)
        with pytest.raises(CheckpointError, match="Input/output error"):
            save(tmp_path, 40, mark=2)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000040"]
    assert read_json(newest_valid(tmp_path) / "state.json")["mark"] == 1


@pytest.mark.parametrize("new_one", ["whole", "damaged", "missing"])
def test_a_replacement_cut_off_is_settled(tmp_path, new_one):
    old = save(tmp_path, 40, mark=1).rename(tmp_path / "step-00000040.old")
    if new_one != "missing":
        save(tmp_path / "elsewhere", 40, mark=2).rename(tmp_path / "step-00000040")
        (tmp_path / "elsewhere").rmdir()
    if new_one == "damaged":
        flip_bit(tmp_path / "step-00000040" / "state.json", 0)
    expected = tmp_path / "step-00000040" if new_one == "whole" else old
    assert newest_valid(tmp_path) == expected
    remove_temporaries(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000040"]
    assert read_json(newest_valid(tmp_path) / "state.json")["mark"] == (2 if new_one == "whole" else 1)


def test_temporaries_of_the_living_stay(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    stale = [tmp_path / f".tmp-step-00000001-{dead.pid}", tmp_path / f".tmp-delete-step-00000002-{dead.pid}"]
    for folder in stale:
        (folder / "model").mkdir(parents=True)
    living = tmp_path / f".tmp-step-00000001-{os.getppid()}"
    living.mkdir()
    remove_temporaries(tmp_path)
    assert list(tmp_path.iterdir()) == [living]


def test_retention_by_count(tmp_path):
    for step in (10, 20, 30, 40, 50):
        save(tmp_path, step)
    assert [
        step_of(path) for path in delete_old_checkpoints(tmp_path, max_checkpoints=3, max_gigabytes=0, best_step=None)
    ] == [20, 10]
    assert steps(tmp_path) == [50, 40, 30]
    assert temporaries(tmp_path) == []


def test_retention_keeps_the_best_as_one_of_the_count(tmp_path):
    for step in (10, 20, 30, 40, 50):
        save(tmp_path, step)
    delete_old_checkpoints(tmp_path, max_checkpoints=3, max_gigabytes=0, best_step=20)
    assert steps(tmp_path) == [50, 40, 20]
    delete_old_checkpoints(tmp_path, max_checkpoints=1, max_gigabytes=0, best_step=20)
    assert steps(tmp_path) == [50, 20]
    delete_old_checkpoints(tmp_path, max_checkpoints=0, max_gigabytes=0, best_step=None)
    assert steps(tmp_path) == [50]


def test_retention_by_bytes(tmp_path):
    for step in (10, 20, 30, 40):
        save(tmp_path, step, size=10_000)
    delete_old_checkpoints(tmp_path, max_checkpoints=10, max_gigabytes=25_000 / 1e9, best_step=None)
    assert steps(tmp_path) == [40, 30]
    delete_old_checkpoints(tmp_path, max_checkpoints=10, max_gigabytes=1 / 1e9, best_step=None)
    assert steps(tmp_path) == [40]


def test_retention_never_deletes_the_only_valid_one(tmp_path):
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    flip_bit(tmp_path / "step-00000040" / "model" / "weights.bin", 0)
    (tmp_path / "step-00000030" / "manifest.json").unlink()
    delete_old_checkpoints(tmp_path, max_checkpoints=1, max_gigabytes=0, best_step=None)
    assert newest_valid(tmp_path) == tmp_path / "step-00000020"
    flip_bit(tmp_path / "step-00000020" / "model" / "weights.bin", 0)
    save(tmp_path, 15)
    assert delete_old_checkpoints(tmp_path, max_checkpoints=1, max_gigabytes=0, best_step=None) == []
    assert newest_valid(tmp_path) == tmp_path / "step-00000015"


def test_retention_deletes_nothing_where_nothing_is_valid(tmp_path):
    for step in (10, 20):
        flip_bit(save(tmp_path, step) / "state.json", 0)
    assert delete_old_checkpoints(tmp_path, max_checkpoints=0, max_gigabytes=0, best_step=None) == []
    assert steps(tmp_path) == [20, 10]


def test_an_incomplete_checkpoint_does_not_count(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step)
    (tmp_path / "step-00000020" / "state.json").unlink()
    delete_old_checkpoints(tmp_path, max_checkpoints=2, max_gigabytes=0, best_step=None)
    assert steps(tmp_path) == [30, 10]


def test_retention_trusts_the_one_just_written(tmp_path):
    for step in (10, 20):
        save(tmp_path, step)
    flip_bit(save(tmp_path, 30) / "state.json", 0)  # a run resumed from 20 leaves it, and saves at 25
    newest = save(tmp_path, 25)
    delete_old_checkpoints(tmp_path, max_checkpoints=1, max_gigabytes=0, best_step=None, newest=newest)
    assert steps(tmp_path) == [30, 25]
    assert newest_valid(tmp_path) == newest


def test_steps_are_numbers_not_text(tmp_path):
    for step in (99_999_999, 100_000_000, 7):
        save(tmp_path, step)
    assert steps(tmp_path) == [100_000_000, 99_999_999, 7]


def test_a_run_folder_stands_for_its_newest_model(tmp_path):
    assert not is_run_directory(tmp_path)
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        resolve_model_folder(tmp_path)
    save(tmp_path / "checkpoints", 10)
    newest = save(tmp_path / "checkpoints", 20)
    assert is_run_directory(tmp_path)
    assert resolve_model_folder(tmp_path) == newest / "model"
    flip_bit(newest / "state.json", 0)
    assert resolve_model_folder(tmp_path).parent.name == "step-00000010"


def test_tensors_come_back_bit_for_bit(tmp_path):
    tensors = {
        "weights": torch.randn(3, 5),
        "transposed": torch.randn(4, 2).T,
        "half": torch.randn(7).bfloat16(),
        "flags": torch.tensor([True, False]),
        "step": torch.tensor(3, dtype=torch.int64),
        "nothing": torch.empty(0, 4),
        "trained": torch.nn.Parameter(torch.full((2,), float("nan"))),
    }
    save_tensors(tmp_path / "x.safetensors", tensors, {"version": "1"})
    loaded = load_tensors(tmp_path / "x.safetensors")
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name].nan_to_num(9), tensor.detach().nan_to_num(9))


def test_who_may_read_the_folder_may_read_the_tensors(tmp_path):
    path = write_checkpoint(tmp_path, 1, lambda folder: save_tensors(folder / "x.safetensors", {"x": torch.ones(1)}))
    assert (path / "x.safetensors").stat().st_mode & 0o777 == path.stat().st_mode & 0o666


def test_pieces_of_one_buffer_may_be_saved_but_shared_ones_not(tmp_path):
    flat = torch.arange(10.0)
    save_tensors(tmp_path / "x.safetensors", {"b": flat[5:], "a": flat[:5]})
    assert load_tensors(tmp_path / "x.safetensors")["b"].tolist() == [5, 6, 7, 8, 9]
    for second in (flat, flat[2:4], flat.view(2, 5).T):
        with pytest.raises(CheckpointError, match="share memory") as caught:
            save_tensors(tmp_path / "y.safetensors", {"embedding": flat, "head": second})
        assert "embedding" in str(caught.value)
        assert "head" in str(caught.value)
    assert not (tmp_path / "y.safetensors").exists()


def test_damaged_files_of_tensors_and_json_are_named(tmp_path):
    for name, content in (("short.safetensors", b"123"), ("header.safetensors", b"\xff" * 100)):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=name):
            load_tensors(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"missing\.safetensors"):
        load_tensors(tmp_path / "missing.safetensors")
    with pytest.raises(CheckpointError, match=r"missing\.json"):
        read_json(tmp_path / "missing.json")


def draw() -> list[float]:
    numbers = [random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn())]
    return numbers + torch.randn(3).tolist() + torch.rand(17).tolist() + torch.randperm(9).tolist()


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_tensors_of_many_are_files_that_anybody_reads(tmp_path, ranks):
    """Each rank writes some, one entry at a time; whole tensors and parts of them come back bit for bit."""
    tensors = {
        "matrix": torch.randn(5, 7),
        "half": torch.randn(3, 2).bfloat16(),
        "step": torch.tensor(4.0),
        "empty": torch.zeros(0, 3),
        "numbers": torch.arange(9),
    }
    fetched = []

    def fetch(name):
        fetched.append(name)
        return {name: tensors[name]}

    entries = [LazyTensors({n: (tuple(t.shape), t.dtype)}, partial(fetch, n)) for n, t in tensors.items()]
    for rank in range(ranks):
        save_sharded(tmp_path, "x", entries, rank, ranks)
    assert fetched == list(tensors) * ranks  # all ranks take part in gathering each
    assert len(list(tmp_path.glob("x-*.safetensors"))) == min(ranks, len(tensors))
    found = {name: tensor for file in tmp_path.glob("x-*") for name, tensor in load_tensors(file).items()}
    assert found.keys() == tensors.keys()
    files = TensorFiles(tmp_path, "x")
    for name, tensor in tensors.items():
        assert files.shape(name) == tuple(tensor.shape)
        for read in (found[name], files.read(name)):
            assert read.dtype == tensor.dtype and torch.equal(read, tensor)
    assert torch.equal(files.read("matrix", (slice(1, 3), slice(2, 7))), tensors["matrix"][1:3, 2:7])
    assert torch.equal(files.read("numbers", (slice(4, 4),)), tensors["numbers"][4:4])
    with pytest.raises(CheckpointError, match="x has no tensor other"):
        files.read("other")


def test_one_file_is_read_like_several(tmp_path):
    save_tensors(tmp_path / "x.safetensors", {"a": torch.arange(6.0).reshape(2, 3)})
    assert TensorFiles(tmp_path, "x").read("a", (slice(1, 2), slice(0, 2))).tolist() == [[3.0, 4.0]]
    with pytest.raises(CheckpointError, match=r"y\.safetensors: cannot be read"):
        TensorFiles(tmp_path, "y")
    (tmp_path / "z.safetensors.index.json").write_text(
        '{"weight_map": {"a": "x.safetensors", "b": "gone.safetensors"}}'
    )
    files = TensorFiles(tmp_path, "z")
    assert files.shape("a") == (2, 3)
    with pytest.raises(CheckpointError, match=r"gone\.safetensors: cannot be read"):
        files.read("b")
    (tmp_path / "w.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"w\.safetensors\.index\.json: damaged"):
        TensorFiles(tmp_path, "w")


@pytest.mark.parametrize("seeded", [False, True])
def test_random_numbers_go_on_bit_for_bit(seeded):
    if seeded:
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)
    # An odd number of normal draws leaves one of the pair waiting in each generator: it is part of the state.
    random.gauss(0, 1)
    np.random.randn()
    torch.randn(1)
    state = json.loads(json.dumps(rng_state()))
    expected = draw()
    draw()
    random.seed(9)
    np.random.seed(9)
    torch.manual_seed(9)
    restore_rng(state)
    assert draw() == expected
    restore_rng(state)
    assert rng_state() == state


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")
def test_random_numbers_of_the_accelerator_go_on():
    device = torch.accelerator.current_accelerator()
    state = json.loads(json.dumps(rng_state()))
    expected = torch.randn(100, device=device)
    torch.manual_seed(9)
    restore_rng(state)
    assert torch.equal(torch.randn(100, device=device), expected)


def test_resuming_on_another_device_is_said(caplog):
    here = torch.accelerator.current_accelerator(check_available=True)
    state = rng_state()
    if here is not None:
        del state[here.type]
    else:
        state["cuda"] = "AAAA"
    restore_rng(state)
    assert "not be bit-identical" in caplog.text


def test_looking_at_folders_needs_no_torch():
    modules = "posttrain.checkpoints.checkpoint, posttrain.train.run_directory"
    code = f"import sys; import {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert checkpoint.MANIFEST == "manifest.json"


def test_files_that_others_have_hashed_are_not_read_again(tmp_path):
    def write(folder):
        for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "state.json"):
            (folder / name).write_bytes(name.encode())

    def described(size=32, sha256="0" * 64):
        return {"model-00002-of-00002.safetensors": {"size": size, "sha256": sha256}}

    path = start_checkpoint(tmp_path, 1, write, described)()
    files = json.loads((path / "manifest.json").read_text())["files"]
    assert list(files) == sorted(files) and len(files) == 3
    assert files["model-00002-of-00002.safetensors"]["sha256"] == "0" * 64, "as it was told"
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002.safetensors: damaged"):
        verify(path)
    with pytest.raises(CheckpointError, match="has 32 bytes, but the worker that wrote it found 31"):
        start_checkpoint(tmp_path, 2, write, partial(described, 31))()


def test_a_rank_hashes_the_files_that_it_wrote(tmp_path):
    (tmp_path / "model").mkdir()
    names = [f"{stem}-0000{n}-of-00002.safetensors" for stem in ("model/model", "optimizer") for n in (1, 2)]
    for name in (*names, "value-head.safetensors", "model/config.json"):
        (tmp_path / name).write_bytes(name.encode())
    assert [path.name for path in files_of_rank(tmp_path, 0)] == [Path(name).name for name in (names[0], names[2])]
    found = {}
    for rank in range(3):
        hashing = FileHashing(tmp_path, files_of_rank(tmp_path, rank))
        while (entries := hashing.result()) is None:
            pass
        found |= entries
    assert found == describe_files(tmp_path, [tmp_path / name for name in names])
    failed = FileHashing(tmp_path, [tmp_path / "absent"])
    with pytest.raises(FileNotFoundError):
        while failed.result() is None:
            pass
