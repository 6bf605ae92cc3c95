"""Schedules of pipeline stages: every pass once, after what it needs, and no two ranks that wait for each other."""

import pytest

from posttrain.core.errors import UsageError
from posttrain.parallel.pipeline import check_pipeline_parallel, passes_in_flight, schedule, stage_bounds
from tests.tiny import tiny_model

SIZES = [(2, 1), (4, 1), (2, 2), (4, 2), (2, 3)]


def valid(virtual, size, count):
    return virtual == 1 or count % max(1, count // size) == 0


@pytest.mark.parametrize(("size", "virtual"), SIZES)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 8])
def test_every_pass_runs_once_after_what_it_needs(size, virtual, count):
    """Plays the ranks: a receive waits for its send, and messages between two ranks arrive in their order."""
    if not valid(virtual, size, count):
        return
    found = schedule(size, virtual, count)
    stages = size * virtual
    waiting, done, sent = {rank: list(actions) for rank, actions in found.items()}, set(), {}
    while any(waiting.values()):
        progress = False
        for rank, actions in waiting.items():
            while actions:
                kind, stage, index = actions[0]
                assert stage % size == rank
                if kind.startswith("SEND"):
                    assert (kind[-1], stage, index) in done
                    other = stage + (1 if kind == "SEND_F" else -1)
                    sent.setdefault((rank, other % size), []).append((kind[-1], other, index))
                elif kind.startswith("RECV"):
                    source = (stage - (1 if kind == "RECV_F" else -1)) % size
                    if not sent.get((source, rank)):
                        break
                    assert sent[source, rank].pop(0) == (kind[-1], stage, index), "in another order"
                    done.add((kind, stage, index))
                else:
                    needed = {("RECV_F", stage, index)} if kind == "F" and stage else set()
                    if kind == "B":
                        needed = {("F", stage, index)} | ({("RECV_B", stage, index)} if stage < stages - 1 else set())
                    assert needed <= done and (kind, stage, index) not in done
                    done.add((kind, stage, index))
                actions.pop(0)
                progress = True
        assert progress, "all ranks wait"
    passes = {action for action in done if action[0] in "FB"}
    assert len(passes) == 2 * stages * count


def test_a_rank_holds_few_micro_batches_at_once():
    for rank, actions in schedule(4, 1, 12).items():
        held = most = 0
        for kind, _, _ in actions:
            held += {"F": 1, "B": -1}.get(kind, 0)
            most = max(most, held)
        assert most == 4 - rank, "1F1B; all 12 would be held without it"
    assert passes_in_flight(8, 4, 1, ()) == 1.0  # 4 micro-batches of a quarter of the layers
    assert passes_in_flight(8, 2, 1, (7, 1)) == 14 / 8
    assert passes_in_flight(8, 2, 2, ()) == 5 / 4


def test_stages_have_equally_many_layers_or_those_listed():
    assert stage_bounds(10, 4) == [(0, 3), (3, 6), (6, 8), (8, 10)]
    assert stage_bounds(4, 2, (1, 3)) == [(0, 1), (1, 4)]


@pytest.mark.parametrize(
    ("family", "sizes", "words"),
    [
        ("gpt2", (2, 1, ()), r"GPT2LMHeadModel \(gpt2\) cannot be divided into stages here; .*llama"),
        ("llama", (4, 1, ()), "makes 4 stages, but this llama model has 2 layers"),
        (
            "llama",
            (2, 1, (1, 2)),
            "pipeline_layers_per_stage is 1 2, but .* give 2 numbers of at least 1 whose sum is 2",
        ),
        ("llama", (2, 1, (2, 0)), "pipeline_layers_per_stage is 2 0, but"),
    ],
)
def test_models_that_cannot_be_divided_are_refused(family, sizes, words):
    with pytest.raises(UsageError, match=words):
        check_pipeline_parallel(tiny_model(family), *sizes)
    check_pipeline_parallel(tiny_model("llama"), 2, 1, ())
