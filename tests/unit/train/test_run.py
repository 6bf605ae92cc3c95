"""A run leaves the process as it found it, and saves beside training."""

import errno
import gc
import os
import threading
import weakref

import numpy as np
import pytest

from posttrain import Callback, sft
from posttrain.checkpoints import checkpoint
from posttrain.core.errors import PosttrainError
from posttrain.models.pico import build_tokenizer
from posttrain.train.learner import Learner
from posttrain.train.run_data import previews
from tests.e2e.rows import write_rows
from tests.oracle.batches import samples as random_samples


def test_a_model_can_be_freed_after_its_run(tmp_path, monkeypatch):
    """While it runs, libraries and models are not looked through for garbage; afterwards they are."""
    made, frozen = [], []
    init, learn = Learner.__init__, Learner.forward_backward

    def noting(self, *args, **options):
        init(self, *args, **options)
        made.append(weakref.ref(self.model))

    def looking(self, *args):
        frozen.append(gc.get_freeze_count())
        return learn(self, *args)

    monkeypatch.setattr(Learner, "__init__", noting)
    monkeypatch.setattr(Learner, "forward_backward", looking)
    rows = write_rows("chat", tmp_path)
    sft(model={"path": "pico"}, data={"train": [rows]}, steps=1, out=str(tmp_path / "run"), quiet=True)
    assert min(frozen) > 1000 and gc.get_freeze_count() == 0
    gc.collect()
    assert [model() for model in made] == [None]


class Steps(Callback):
    """Notes the steps, and sets `second` after the second one."""

    def __init__(self, error=""):
        self.seen, self.error, self.second = [], error, threading.Event()

    def on_step(self, state):
        self.seen.append(state.step)
        if state.step == 2:
            self.second.set()
            if self.error:
                raise ValueError(self.error)


def test_checkpoints_are_sealed_while_training_goes_on(tmp_path, monkeypatch):
    rows, seal, steps = write_rows("chat", tmp_path), checkpoint._seal, Steps()

    def late_seal(folder, step, *rest):
        assert steps.second.wait(60), "training waited for the first save"
        seal(folder, step, *rest)

    monkeypatch.setattr(checkpoint, "_seal", late_seal)
    sft("pico", rows, max_steps=3, save={"every_steps": 1}, output_dir=tmp_path / "run", callbacks=[steps])
    saved = checkpoint.list_checkpoints(tmp_path / "run/checkpoints")
    assert [checkpoint.step_of(path) for path in saved] == [3, 2, 1] and all(map(checkpoint.is_valid, saved))


@pytest.mark.parametrize("error", ["", "an error of its own"])
def test_a_save_that_fails_beside_training_ends_the_run(tmp_path, monkeypatch, error, capsys):
    rows, steps = write_rows("chat", tmp_path), Steps(error)

    def full_disk(folder, step, *rest):
        assert steps.second.wait(60)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, "_seal", full_disk)
    with pytest.raises(PosttrainError, match=error or r"step 1 was not saved.*No space"):
        sft("pico", rows, max_steps=9, save={"every_steps": 1}, output_dir=tmp_path / "run", callbacks=[steps])
    assert steps.seen == [1, 2], "it is noticed before the next save"
    assert ("step 1 was not saved" in capsys.readouterr().err) is bool(error), "one is raised, the other is a warning"
    assert not list((tmp_path / "run/checkpoints").iterdir())


@pytest.mark.parametrize("count", [1, 2, 3])
def test_packed_samples_are_shown_one_by_one_and_those_of_a_pair_by_role(count):
    example = random_samples(np.random.default_rng(0), 1)[:count]
    shown = previews(build_tokenizer(), example, is_pair=False)
    assert [row["tokens"] for row in shown] == [len(sample) for sample in example]
    assert not any("role" in row for row in shown)
    if count == 2:
        of_pair = previews(build_tokenizer(), example, is_pair=True)
        assert of_pair == [row | {"role": role} for row, role in zip(shown, ("chosen", "rejected"), strict=True)]
