"""Messages arrive as they were sent."""

import threading
from dataclasses import fields
from multiprocessing import Pipe

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.cluster import messages
from posttrain.core.types import STREAMS, Sample


def through(body, kind="call", **options):
    ours, theirs = Pipe()
    with ours, theirs:
        sender = threading.Thread(target=messages.send, args=(ours, kind, 7, body), kwargs=options)
        sender.start()
        received = messages.receive(theirs)
        sender.join()
        assert not theirs.poll(), "something was left over"
    return received


def same(one, other):
    for entry in fields(Sample):
        a, b = getattr(one, entry.name), getattr(other, entry.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype and np.array_equal(a, b), entry.name
        else:
            assert a == b and type(a) is type(b), entry.name


@st.composite
def samples(draw):
    n = draw(st.integers(1, 5))
    streams = draw(st.sets(st.sampled_from(STREAMS)))
    return Sample(
        tokens=np.arange(n, dtype=np.int32) + draw(st.integers(0, 99)),
        mask=np.arange(n) > draw(st.integers(0, 5)),
        **{name: np.full(n, draw(st.floats(width=32, allow_nan=False)), dtype=np.float32) for name in streams},
        reward=draw(st.floats(allow_nan=False)),
        origin=draw(st.text(st.characters(codec="utf-8"), max_size=3)),
        version=draw(st.integers(0, 3)),
    )


@settings(max_examples=40, deadline=None)
@given(st.lists(samples(), max_size=6))
def test_samples_arrive_as_they_were(sent):
    _, (role, (found, empty), options) = through(("actor", (sent, []), {"adapters": True}))
    assert (role, empty, options) == ("actor", [], {"adapters": True})
    assert len(found) == len(sent)
    for one, other in zip(sent, found, strict=True):
        same(one, other)
        other.tokens += 1  # they belong to whoever got them


def test_arrays_and_nested_lists():
    arrays = [np.arange(n, dtype=np.float32) for n in (3, 0, 5)]
    mixed = [np.arange(3), np.ones(2, dtype=np.float32), np.ones((2, 2))]
    _, (found, others, nested) = through((arrays, mixed, [(arrays, 1), (arrays, 2)]))
    for got, sent in zip([*found, *others, *nested[1][0]], [*arrays, *mixed, *arrays], strict=True):
        assert got.dtype == sent.dtype and np.array_equal(got, sent)
    assert nested[1][1] == 2


def test_the_header_describes_the_message():
    head, body = through(None, kind="ping", parallel=True)
    assert (head.kind, head.number, head.parallel, body) == ("ping", 7, True, None)


def test_a_body_that_cannot_be_pickled_leaves_the_connection_usable():
    ours, theirs = Pipe()
    with pytest.raises(TypeError):
        messages.send(ours, "call", 1, threading.Lock())
    messages.send(ours, "call", 2, "next")
    head, body = messages.receive(theirs)
    assert (head.number, body) == (2, "next")


class Strange:
    """Can be pickled, but not unpickled."""

    def __reduce__(self):
        return int, ("not a number",)


def test_a_body_that_cannot_be_unpickled_is_reported_and_the_next_message_arrives():
    ours, theirs = Pipe()
    messages.send(ours, "call", 1, (Strange(), [np.arange(4.0)]))
    messages.send(ours, "call", 2, "next")
    head, body = messages.receive(theirs)
    assert head.number == 1 and "not a number" in body.reason
    assert messages.receive(theirs)[1] == "next"


def test_a_peer_that_stops_reading_is_noticed():
    ours, _theirs = Pipe()
    messages.set_timeout(ours, 0.2)
    with pytest.raises(BlockingIOError):
        messages.send(ours, "call", 1, [np.zeros(10_000_000)])
