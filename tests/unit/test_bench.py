"""The benchmarks run, measure what they say, and write down what they found. Peers are not installed here."""

import json
import re

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench import agents, common, curves, dpo, generate, grpo, learn, long, opd, sft
from bench.__main__ import main
from bench.common import Options, Result, Shape, Times
from posttrain.core.types import Sample, count_units

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU they measure the large shapes")

TINY = Shape(32, 2, 4, 2, 64, 512, True, 8)
MIXTURE = Shape(32, 2, 4, 2, 24, 512, False, 8, experts=6, experts_per_token=2, own_head_size=16)


@pytest.fixture
def tiny(monkeypatch):
    """The same work, small enough for a test."""
    monkeypatch.setitem(common.SHAPES, "small", TINY)
    monkeypatch.setitem(common.SHAPES, "mixture", MIXTURE)
    monkeypatch.setattr(common, "limits", lambda: (1e11, 1e10))
    monkeypatch.setattr(generate, "COMPLETION", 4)
    monkeypatch.setattr(sft, "ROWS_PER_STEP", 4)
    monkeypatch.setattr(dpo, "PAIRS", 2)
    for name, value in {"PROMPTS": 2, "SAMPLES": 2, "PROMPT": 8, "COMPLETION": 4}.items():
        monkeypatch.setattr(grpo, name, value)
    for name, value in {"PROMPTS": 2, "PROMPT": 8, "COMPLETION": 4}.items():
        monkeypatch.setattr(opd, name, value)
    for name, value in {"EPISODES": 8, "TOGETHER": 2, "TURNS": 2, "REPLY": 3, "MEAN_SECONDS": 0.001}.items():
        monkeypatch.setattr(agents, name, value)
    monkeypatch.setattr(curves, "BATCHES", (4, 1))
    monkeypatch.setattr(curves, "LENGTHS", (32,))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def rows_of(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| 20")]


def test_both_schedules_of_agents_are_in_one_row(tiny, tmp_path):
    page = tmp_path / "results.md"
    main(["agents", "--out", str(page)])
    [row] = rows_of(page)
    assert row[1] == "episodes small, 8, 2 at a time, 2 turns of 3 tokens, tools 0.001 s"
    assert re.fullmatch(r"lock_step: 2 episodes in .* s, device busy .*%; concurrent: 8 episodes .*%", row[2])
    assert row[4].endswith("x")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("sft", "SFT small, "),
        ("dpo", "DPO small, 2 pairs a step"),
        ("grpo", "GRPO small, 2 x 2, 8 + 4 tokens"),
        ("opd", "OPD small, teacher twice as deep, 2 prompts, 8 + 4"),
        ("generate", "generation small, 8 sequences, groups of 8, 4 new tokens"),
    ],
)
def test_a_table_adds_its_rows_to_the_page(name, found, tiny, tmp_path, capsys):
    page = tmp_path / "results.md"
    arguments = [name, "--steps", "2", "--peers", "none", "--profile", "--out", str(page)]
    main(arguments)
    rows = rows_of(page)
    assert any(row[1].startswith(found) for row in rows)
    assert all(len(row) == len(common.COLUMNS) for row in rows)
    assert all("torch" in row[6] and row[7] == f"`python -m bench {' '.join(arguments)}`" for row in rows)
    assert any("TFLOP/s" in row[5] for row in rows)
    assert "aten::" in capsys.readouterr().out  # the profile


@pytest.mark.parametrize("name", ["sft", "generate"])
def test_a_mixture_of_experts_is_measured(name, tiny, tmp_path):
    page = tmp_path / "results.md"
    main([name, "--shapes", "mixture", "--steps", "1", "--peers", "none", "--out", str(page)])
    assert all("mixture, " in row[1] for row in rows_of(page)) and rows_of(page)


@pytest.mark.parametrize("shape", [TINY, MIXTURE])
def test_the_weights_of_a_shape_are_counted(shape):
    layers = common.random_weights(shape).model.layers
    weights = {name: weight for name, weight in layers.named_parameters() if weight.ndim > 1}
    assert shape.read_weights == sum(weight.numel() for weight in weights.values())
    used = {name: weight.numel() for name, weight in weights.items()}
    for name in weights:
        if ".experts." in name:
            used[name] = used[name] * shape.experts_per_token // shape.experts
    assert shape.layer_weights == sum(used.values())


def test_long_completions_have_different_lengths(tiny, monkeypatch, tmp_path):
    monkeypatch.setitem(long.WORK, "small", long.Work(2, 2, 8, 64, TINY.vocabulary // 16))
    monkeypatch.setattr(long, "TAIL_COUNTS", (1, 2))
    monkeypatch.setattr(long, "WRONG", (0.0, 1.0))
    page = tmp_path / "results.md"
    main(["long", "--out", str(page)])
    (_, what, ours, *_), *tails = rows_of(page)
    assert what.startswith("long generation small, 2 x 2 sequences, prompt 8, at most 64 (mean ")
    assert "tokens/s" in ours and "0 preemptions" in ours
    drafted = "random weights small, greedy, drafts of 4 tokens"
    assert [row[1].partition(", ")[0] for row in tails] == [f"tail of {n} sequences" for n in (1, 1, 2, 2)]
    assert all(drafted in row[1] and row[3].startswith("without drafts ") and row[4].endswith("x") for row in tails)
    shares = [int(row[1].split()[-2].rstrip("%")) for row in tails]
    assert shares[1::2] == [0, 0] and min(shares[::2]) > 50, "all wrong, none wrong"


def test_generation_is_compared_with_transformers(tiny, tmp_path):
    page = tmp_path / "results.md"
    main(["generate", "--peers", "hf", "--out", str(page)])
    peers = [row[3] for row in rows_of(page)]
    assert [peer.split(" ")[0] for peer in peers] == ["transformers", "transformers", "without"]
    assert all(row[4].endswith("x") for row in rows_of(page))


class Trainer:
    """Stands for one of TRL's: it calls back as transformers' trainer does."""

    def __init__(self, callbacks, events):
        self.callbacks, self.events = callbacks, events

    def train(self):
        for number in range(3):
            for callback in self.callbacks:
                callback.on_step_begin(None, None, None)
            self.events.append(f"theirs {number}")
            for callback in self.callbacks:
                callback.on_log(None, None, None, logs={"loss": float(number)})
                callback.on_step_end(None, None, None)


def test_on_a_cpu_ours_and_theirs_take_turns_and_only_their_own_time_counts(tiny, monkeypatch):
    events = []
    now = [0.0]
    monkeypatch.setattr(common, "clock", lambda: now[0])

    def our_step(number):
        events.append(f"ours {number}")
        now[0] += 10.0
        return {"loss": 1.0}

    times = common.in_turns(Options(steps=3), lambda: our_step, lambda callbacks: Trainer(callbacks, events))
    assert events == ["ours 0", "theirs 0", "ours 1", "theirs 1", "ours 2", "theirs 2"]
    assert times["ours"].seconds == [10.0] * 3 and times["TRL"].seconds == [0.0] * 3
    assert times["TRL"].logs[2] == {"loss": 2.0}


def test_the_first_steps_do_not_count():
    assert Times([100.0, 50.0, 20.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]).typical == 4.0
    assert Times([100.0, 1.0]).typical == 1.0 and Times([3.0]).typical == 3.0


def test_rows_are_appended_below_what_is_there(tmp_path):
    page = tmp_path / "results.md"
    page.write_text("# Results\n", encoding="utf-8")
    options = Options(out=page, command="python -m bench sft")
    common.record(Result(what="a|b", ours="1 s", peer="TRL 2 s", ratio=2.0), options)
    common.record(Result(what="c", ours="1 s"), options)
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# Results\n\n| date |") and text.count(common.HEADER) == 1
    assert "| a\\|b | 1 s | TRL 2 s | 2.00x |" in text and text.endswith("| `python -m bench sft` |\n")


def test_the_arithmetic_of_a_step_is_counted_as_it_is_computed(tiny, tmp_path):
    """Two answers to one prompt: the prompt once in the layers, the head where tokens count."""
    shape = TINY
    with common.saved_model(shape) as folder:
        policy = common.learner(folder, Options())
    _, wanted = common.objective("dpo")
    pair = dpo.pairs_of_steps(shape, 1)[0][:2]
    computed = sum(map(len, pair)) - dpo.PROMPT
    counted = sum(int(sample.mask.sum()) for sample in pair)
    weights = shape.layers * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64)
    found = common.training_flops(policy, pair, wanted, shape)
    assert found == 6 * (weights * computed + 32 * 512 * counted)


def test_texts_for_peers_are_the_same_tokens(tmp_path):
    sample = dpo.pairs_of_steps(TINY, 1)[0][0]
    with common.saved_model(TINY) as folder:
        assert common.words_of(folder)(common.text_of(sample.tokens))["input_ids"] == sample.tokens.tolist()


def test_curves_are_measured_and_drawn(tiny, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curves.png"
    main(["curves", "--picture", str(picture)])
    found = json.loads(picture.with_suffix(".json").read_text(encoding="utf-8"))
    assert [(row["batch"], row["length"]) for row in found["generation"]] == [(4, 32), (1, 32)]
    assert picture.stat().st_size < 200_000


def test_curves_can_be_drawn_again_elsewhere(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curves.png"
    memory = [{"vocabulary": v, "tokens": t, "gib": v / 1e5 + t / 1024} for v in (1000, 9000) for t in (1024, 2048)]
    speed = [{"batch": 1, "length": 256, "tokens_per_second": 100.0}]
    numbers = {"shape": "0.5b", "device": "a GPU", "versions": "", "generation": speed, "memory": memory}
    picture.with_suffix(".json").write_text(json.dumps(numbers), encoding="utf-8")
    main(["curves", "--redraw", "--picture", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert curves.slopes(memory) == pytest.approx({1000: 1.0, 9000: 1.0})


def test_an_unknown_name_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["grop"])
    assert "there is generate, long, sft, dpo, grpo, opd" in capsys.readouterr().err


def test_distillation_computes_no_matrix_product_twice():
    """A step has 6 FLOPs per weight of the student and token, and 2 of the teacher; heads only where tokens count."""
    teacher = Shape(48, 3, 4, 2, 80, 512, True, 8)
    with common.saved_model(TINY) as student, common.saved_model(teacher) as taught_by:
        policy = common.learner(student, Options(), teacher=taught_by)
        _, wanted = common.objective("opd", teacher=taught_by)
        rng = np.random.default_rng(0)
        samples = [Sample(tokens=rng.integers(10, 500, 24).astype(np.int32), mask=np.arange(24) >= 8) for _ in range(4)]
        with FlopCounterMode(display=False) as counter:
            policy.forward_backward(samples, wanted, count_units(samples, "token"), 96)
        floor = common.training_flops(policy, samples, wanted, TINY)
        floor += common.training_flops(policy, samples, wanted, teacher) / 3
        assert counter.get_total_flops() == floor


def test_a_level_is_reached_where_the_next_look_confirms_it():
    course = learn.Course("opd", None)
    course.looks = [(0.0, 9.0), (5.0, 12.5), (10.0, 11.0), (15.0, 12.0), (20.0, 13.0)]
    assert course.reached(12.0) == 15.0  # not 5.0, which was chance
    assert course.reached(13.0) is None and course.reached(9.0) == 0.0


def test_a_recipe_fills_what_is_not_given():
    options = learn.arguments(["gsm8k", "model", "data", "out", "--recipe", "distillation", "--grpo_steps", "7"])
    assert options.grpo_steps == 7 and options.held_out == 1000 and options.opd_steps > 0
    assert options.until < options.opd_until < learn.END < 540
    given = ["gsm8k", "model", "data", "out", "--recipe", "distillation", "--grpo", '{"rollout": {"max_tokens": 9}}']
    assert learn.arguments(given).grpo["rollout"] == {"samples_per_prompt": 16, "max_tokens": 9}
    assert learn.arguments(["gsm8k", "model", "data", "out"]).opd_steps == 0


def test_results_are_in_the_file_as_soon_as_they_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(learn, "results_file", tmp_path / "results.jsonl")
    rewarded, taught, idle = (learn.Course(name, None) for name in ("grpo", "opd", "opd-idle"))
    rewarded.looks, rewarded.seconds = [(0.0, 9.0), (20.0, 12.0), (40.0, 12.0)], 40.0
    taught.looks, taught.seconds = [(0.0, 9.0), (5.0, 12.0), (8.0, 12.5)], 8.0
    idle.looks = [(0.0, 12.0), (5.0, 12.0)]
    learn.compare(rewarded, taught, 12.0)
    learn.compare(rewarded, idle, 12.0)
    found = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    assert found[1]["share"] == 0.125 and found[1]["grpo_first"] == 20.0
    assert "nothing to reach" in found[2]["text"]


def test_rows_are_split_off_the_training_data(tmp_path):
    for split, count in (("train", 5), ("test", 2)):
        rows = [{"question": f"{split} {i}?", "answer": f"so\n#### {i}"} for i in range(count)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    learn.write_rows(learn.gsm8k, tmp_path, tmp_path / "out", held_out=2)
    lines = {
        s: (tmp_path / "out" / f"{s}-prompts.jsonl").read_text().splitlines() for s in ("train", "held-out", "test")
    }
    assert {split: len(found) for split, found in lines.items()} == {"train": 3, "held-out": 2, "test": 2}
    assert not set(lines["train"]) & set(lines["held-out"])
    learn.write_rows(learn.gsm8k, tmp_path, tmp_path / "few", held_out=1, count=2)
    assert len((tmp_path / "few" / "train-prompts.jsonl").read_text().splitlines()) == 1
