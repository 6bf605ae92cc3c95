"""A run leaves the process as it found it."""

import gc
import weakref

from posttrain import sft
from posttrain.train.learner import Learner
from tests.e2e.rows import write_rows


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
