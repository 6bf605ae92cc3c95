"""Threads that read prompts: slow ones hold up neither the others nor the end of the process."""

import asyncio
import threading
from typing import ClassVar

import pytest

from posttrain.endpoint.errors import ApiError
from posttrain.endpoint.protocol import read_chat
from posttrain.server.prompts import PromptReader, PromptThreads
from tests.unit.server.serving import PATIENCE, pico

BODY = b'{"messages": [{"role": "user", "content": "1+1="}]}'


class SlowReader(PromptReader):
    """Waits for `release` with every body that says so."""

    release: ClassVar = threading.Event()
    bodies: ClassVar = []

    def read(self, raw, parse):
        self.bodies.append(raw)
        if raw == b"slow":
            assert self.release.wait(PATIENCE)
        return super().read(BODY, parse)


@pytest.fixture
def threads():
    model = pico()
    SlowReader.release.clear()
    SlowReader.bodies.clear()
    found = PromptThreads([SlowReader(model, name="pico", max_tokens=8, max_length=64) for _ in range(2)])
    yield found
    SlowReader.release.set()
    found.close()
    for thread in found.threads:
        thread.join(PATIENCE)


def test_a_slow_prompt_holds_up_no_other(threads):
    async def run():
        slow = asyncio.ensure_future(threads.read(b"slow", read_chat))
        await asyncio.sleep(0.01)
        request, prompts = await asyncio.wait_for(threads.read(b"quick", read_chat), PATIENCE)
        assert not slow.done() and request.chat and len(prompts) == 1
        SlowReader.release.set()
        assert (await slow)[1][0].tolist() == prompts[0].tolist()

    asyncio.run(run())


def test_a_queued_prompt_is_left_unread_when_its_client_has_gone(threads):
    async def run():
        slow = [asyncio.ensure_future(threads.read(b"slow", read_chat)) for _ in range(2)]
        gone = asyncio.ensure_future(threads.read(b"gone", read_chat))
        await asyncio.sleep(0.05)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        SlowReader.release.set()
        await asyncio.gather(*slow)
        await threads.read(b"next", read_chat)

    asyncio.run(run())
    assert SlowReader.bodies == [b"slow", b"slow", b"next"]


def test_the_process_does_not_wait_for_a_slow_prompt(threads):
    async def run():
        slow = asyncio.ensure_future(threads.read(b"slow", read_chat))
        await asyncio.sleep(0.01)
        threads.close()
        slow.cancel()

    asyncio.run(run())
    assert all(thread.daemon for thread in threads.threads)
    SlowReader.release.set()
    for thread in threads.threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_errors_belong_to_their_request():
    threads = PromptThreads([PromptReader(pico(), name="pico", max_tokens=8, max_length=64)])
    with pytest.raises(ApiError, match="not JSON"):
        asyncio.run(threads.read(b"{", read_chat))
    assert len(asyncio.run(threads.read(BODY, read_chat))[1]) == 1
    threads.close()
