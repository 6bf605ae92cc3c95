"""The built-in toy model: small, the same every time, and a plain Hugging Face folder."""

import multiprocessing
import os
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.models import pico
from tests.invariance.worlds import run_world


def test_has_at_most_a_million_parameters():
    assert 500_000 < sum(parameter.numel() for parameter in pico.build_model().parameters()) <= 1_000_000


def test_weights_are_the_same_every_time_and_leave_the_global_generator_alone():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = pico.build_model().state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    second = pico.build_model().state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_folder_has_the_same_bytes_wherever_it_is_built(tmp_path, monkeypatch):
    folders = []
    for name in ("a", "b"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        folders.append(pico.pico_folder())
    first, second = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders)
    assert folders[0] != folders[1] and first == second
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= first.keys()


def test_folder_is_built_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = pico.pico_folder()
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert pico.pico_folder() == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


def test_a_cache_that_cannot_be_written_is_replaced_by_a_temporary_folder(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # works for root too, unlike a read-only folder
    pico._temporary_folder.cache_clear()
    folder = pico.pico_folder()
    assert (folder / "model.safetensors").is_file() and pico.pico_folder() == folder


def build_as_rank(rank, folder):
    os.environ["XDG_CACHE_HOME"] = str(folder / str(rank))
    return sorted(path.name for path in pico.pico_folder().iterdir())


def test_every_rank_of_a_process_group_writes_it_whole(tmp_path):
    first, second = run_world(2, tmp_path / "world", build_as_rank, tmp_path)
    assert first == second and {"config.json", "generation_config.json", "model.safetensors"} < set(first)


def build(cache: str, barrier) -> None:
    os.environ["XDG_CACHE_HOME"] = cache
    barrier.wait()
    assert (pico.pico_folder() / "model.safetensors").is_file()


def test_processes_that_build_it_at_once_leave_one_whole_folder(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    processes = [context.Process(target=build, args=(str(tmp_path), barrier)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    (folder,) = (tmp_path / "posttrain").iterdir()  # no unfinished copies are left
    AutoModelForCausalLM.from_pretrained(folder)
    pico._write(folder)  # one that comes late finds it there, and is content
    assert [path.name for path in (tmp_path / "posttrain").iterdir()] == [folder.name]


def test_stock_classes_load_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(pico.pico_folder())
    built = pico.build_model().state_dict()
    assert all(torch.equal(tensor, built[name]) for name, tensor in model.state_dict().items())
    tokenizer = AutoTokenizer.from_pretrained(pico.pico_folder())
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id


def test_every_text_survives_and_printable_characters_are_one_token(tmp_path: Path):
    pico.build_tokenizer().save_pretrained(tmp_path)
    for tokenizer in (pico.build_tokenizer(), AutoTokenizer.from_pretrained(tmp_path)):
        printable = "\n" + "".join(map(chr, range(32, 127)))
        assert len(tokenizer.encode(printable)) == len(set(tokenizer.encode(printable))) == 96
        for text in (printable, "  two  spaces ,. ", "Ünïcode 数 🙂", "tab\tand\r\n", ""):
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_chat_template():
    tokenizer = pico.build_tokenizer()
    messages = [
        {"role": "system", "content": "add"},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
    ]
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert whole == "<s><|system|>add<|end|><|user|>1+1?<|end|><|assistant|>2<|end|>"
    prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    assert whole.startswith(prompt) and prompt.endswith("<|assistant|>")
    ids = tokenizer.encode(whole)
    assert ids[-1] == tokenizer.eos_token_id and len(ids) == 1 + 3 * 2 + len("add1+1?2")
