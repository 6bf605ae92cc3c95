"""Stages of a batch that overlap: order, errors, and that they really run beside generation."""

import threading

import pytest

from posttrain.rollout.overlap import OverlappingStages

LONG = 60.0  # seconds until a test that would wait forever fails


def test_a_stage_runs_while_the_next_part_is_generated():
    generating_next = threading.Event()
    done = []

    def logprobs(part):
        assert generating_next.wait(LONG), "the stage has to wait for the generation that waits for it"
        done.append(part)

    running = OverlappingStages({"actor": [logprobs]}, "rollout").start()
    running.add([1])
    generating_next.set()  # the caller goes on: it generates the second part
    running.add([2])
    running.finish()
    assert done == [[1], [2]]


def test_stages_of_two_places_do_not_wait_for_each_other():
    both = threading.Barrier(2)
    stages = {"reference": [lambda part: both.wait(LONG)], "critic": [lambda part: both.wait(LONG)]}
    running = OverlappingStages(stages, "actor").start()
    running.add([1])
    running.finish()
    assert not both.broken


def test_stages_of_one_place_keep_their_order_and_those_of_the_generator_run_before_it_goes_on():
    seen = []
    stages = {
        "actor": [lambda part: seen.append(("reference", part)), lambda part: seen.append(("values", part))],
        "reward-0": [],
    }
    running = OverlappingStages(stages, "actor").start()
    assert not running.threads
    for part in ([1], [2]):
        running.add(part)
        assert seen[-2:] == [("reference", part), ("values", part)]
    running.finish()


def test_an_error_of_a_stage_reaches_the_caller():
    def fails(part):
        raise ValueError("no device")

    running = OverlappingStages({"reference": [fails]}, "actor").start()
    running.add([1])
    running.add([2])
    with pytest.raises(ValueError, match="no device"):
        running.finish()


def test_after_a_stop_no_further_part_is_computed():
    begun, stopped = threading.Event(), threading.Event()
    seen = []

    def slow(part):
        seen.append(part)
        begun.set()
        assert stopped.wait(LONG)

    running = OverlappingStages({"reference": [slow]}, "actor").start()
    running.add([1])
    running.add([2])
    assert begun.wait(LONG)
    for thread in running.threads:
        thread.cancelled = True  # what cancel does first; it then waits for the part in progress
    stopped.set()
    running.cancel()
    assert seen == [[1]] and not any(thread.is_alive() for thread in running.threads)
