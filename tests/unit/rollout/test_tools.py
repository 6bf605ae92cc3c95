"""Conversations with tools: calls are read as the template writes them; a tool that is lost costs one conversation."""

import asyncio
import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import textwrap

import pytest

from posttrain.core.errors import UsageError
from posttrain.models.pico import build_tokenizer
from posttrain.rollout.mcp_client import McpServer, ServerLostError
from posttrain.rollout.tools import ToolRunner, Tools
from posttrain.sandbox.programs import isolation
from tests.unit.rollout.made import SAMPLING, FakeGenerator, ids, online, prompt

FUNCTIONS = textwrap.dedent(
    '''
    import os, signal, time
    from pathlib import Path

    async def add(a: int, b: int = 1) -> int:
        """Add two numbers."""
        return a + b

    def divide(a: float, b: float) -> float:
        """Divide a by b."""
        return a / b

    def end(how: str, file: str = "") -> str:
        """End this process."""
        if how == "hang":
            time.sleep(1000)
        if how == "once":
            with open(file, "a+") as opened:
                opened.write("x")
                if opened.tell() > 1:
                    return "alive"
        os.kill(os.getpid(), signal.SIGKILL)

    def long(size: int) -> str:
        """Return a long text."""
        return "x" * size

    def silent(a: int): ...
    '''
)
SERVER = textwrap.dedent(
    '''
    import os, signal, sys
    from mcp.server import MCPServer

    server = MCPServer("calculator")

    @server.tool()
    def multiply(a: int, b: int) -> str:
        """Multiply two numbers."""
        if b == 0:
            raise ValueError("b is 0")
        if a == 666:
            os.kill(os.getpid(), signal.SIGKILL)
        return f"{a * b}"

    counted = []

    @server.tool()
    def count() -> str:
        """Count the calls."""
        counted.append(1)
        return str(len(counted))

    @server.tool()
    def process() -> str:
        """Tell the number of this process."""
        return str(os.getpid())

    @server.tool()
    def stop() -> str:
        """Stop without an answer."""
        os.kill(os.getpid(), signal.SIGSTOP)

    if __name__ == "__main__":
        if len(sys.argv) > 1:
            server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
        else:
            server.run("stdio")
    '''
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tools")
    (path / "functions.py").write_text(FUNCTIONS)
    (path / "server.py").write_text(SERVER)
    return path


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call><|end|>"


def play(tools, scripts, schedule="concurrent", max_tokens=900):
    """Play a conversation for each script: the replies of the model, one after the other."""
    tools.check()
    said = {f"go {number}": iter(script) for number, script in enumerate(scripts)}

    def words(request):
        text = tokenizer.decode(request.prompt)
        return next(next(script for name, script in said.items() if name in text))

    tokenizer = build_tokenizer()
    config = online(data__max_length=300, rollout__environment_schedule=schedule)
    sampling = type(SAMPLING)(max_tokens=max_tokens, stop_ids=SAMPLING.stop_ids)
    runner = ToolRunner(tools, FakeGenerator(words), config, sampling, tokenizer)
    asked = [(number, prompt(f"go {number}")) for number in range(len(scripts))]
    return runner.play(asked, list(range(len(scripts))))


def results(rollout):
    return [message["content"] for message in rollout.messages if message["role"] == "tool"]


@pytest.mark.parametrize("schedule", ["concurrent", "lock_step"])
def test_calls_are_answered_until_a_reply_has_none(folder, schedule):
    both = call("add", a=2).removesuffix("<|end|>") + "\n" + call("divide", a=1, b=4)
    scripts = [[f"Let me see. {both}", "It is 3.<|end|>"], ["No tool needed.<|end|>"]]
    specs = [f"{folder}/functions.py:{name}" for name in ("add", "divide")]
    with Tools(specs, workers=1) as tools:
        used, unused = play(tools, scripts, schedule)
    roles = [message["role"] for message in used.messages]
    assert roles == ["user", "assistant", "tool", "tool", "assistant"] and used.turns == 2
    assert results(used) == ["3", "0.25"] and used.text == "It is 3."
    first = used.messages[1]
    assert first["content"] == "Let me see." and [c["function"] for c in first["tool_calls"]] == [
        {"name": "add", "arguments": {"a": 2}},
        {"name": "divide", "arguments": {"a": 1, "b": 4}},
    ]
    assert [c["id"] for c in first["tool_calls"]] == [m["tool_call_id"] for m in used.messages if m["role"] == "tool"]
    assert (unused.turns, unused.rewards, unused.failure) == (1, {}, "")

    tokenizer = build_tokenizer()
    sample = used.sample
    assert tokenizer.decode(sample.tokens[sample.mask]) == "".join(scripts[0])  # exactly what was sampled
    text = tokenizer.decode(sample.tokens)
    assert text.startswith("<s><|system|>add(a, b)\ndivide(a, b)\n<|end|><|user|>go 0")
    assert text.count("<|user|>3<|end|><|user|>0.25<|end|><|assistant|>") == 1


def test_what_the_model_got_wrong_is_told_to_it(folder):
    wrong = [
        call("subtract", a=1),
        call("add", a="1"),
        call("divide", a=1, b=0),
        '<tool_call>\n{"name": "add"\n</tool_call><|end|>',
    ]
    specs = [f"{folder}/functions.py:{name}" for name in ("add", "divide")]
    with Tools(specs, workers=1) as tools:
        [found] = play(tools, [wrong])
    assert not found.failure and found.turns == 4  # what is not a call at all is the last reply
    assert results(found) == [
        "error: there is no tool subtract; there is add, divide",
        "error: a: expected integer, not str",
        "error: ZeroDivisionError: division by zero",
    ]


def test_a_lost_tool_costs_its_own_conversation(folder, tmp_path):
    scripts = [
        [call("end", how="die"), "x<|end|>"],
        [call("add", a=1), call("end", how="once", file=f"{tmp_path}/x"), "fine<|end|>"],
        [call("end", how="hang"), "x<|end|>"],
        [call("add", a=4), call("add", a=5), "fine<|end|>"],
    ]
    specs = [f"{folder}/functions.py:{name}" for name in ("add", "end")]
    with Tools(specs, workers=1, timeout_seconds=3, max_failure_rate=0.5) as tools:
        dies, once, hangs, other = play(tools, scripts)
    assert dies.failure.startswith("tools: ") and "SIGKILL" in dies.failure and dies.sample.finish == "error"
    assert "no result within 3 s" in hangs.failure
    assert results(once) == ["2", "alive"] and results(other) == ["5", "6"]
    assert not once.failure and not other.failure


def test_long_results_are_cut_and_no_room_ends_the_conversation(folder):
    with Tools([f"{folder}/functions.py:long"], workers=1) as tools:
        [found] = play(tools, [[call("long", size=2**17)]])
    assert found.sample.finish == "length" and found.turns == 1 and not found.failure


def test_many_calls_in_a_reply_share_the_room_and_the_time(folder):
    """A model that calls too much is told so: otherwise it would end the process, and with it the run."""
    many = "\n".join(call("long", size=2**17).removesuffix("<|end|>") for _ in range(20))
    endless = "\n".join(call("python", code="while True: pass").removesuffix("<|end|>") for _ in range(2))
    scripts = [[f"{many}<|end|>"], [f"{endless}<|end|>", "done<|end|>"]]
    specs = [f"{folder}/functions.py:long", "sandbox"]
    with Tools(specs, workers=1, timeout_seconds=3, allow_unprotected=True, max_failure_rate=1) as tools:
        found = play(tools, scripts, max_tokens=2000)
    assert [rollout.failure for rollout in found] == ["", ""]
    assert found[0].sample.finish == "length"
    first, second = results(found[1])
    assert first == "error: the program took too long or printed too much"
    assert second == "error: not called: the calls before it took all the time"


def test_wrong_tools_are_refused(folder, monkeypatch):
    for spec, complaint in (
        ("add", "expected FILE.py:FUNCTION"),
        ("mcp:", "expected mcp:COMMAND"),
        ("mcp-session:", "expected mcp-session:COMMAND"),
        (f"{folder}/nothing.py:add", "there is no file"),
        (f"{folder}/functions.py:silent", "no docstring"),
        (f"{folder}/functions.py:ad", "has no function 'ad'"),
        (f"mcp:{sys.executable} -c pass", "the server is lost"),
    ):
        with pytest.raises(UsageError, match=complaint), Tools([spec], workers=1) as tools:
            tools.check()
    twice = [f"{folder}/functions.py:add"] * 2
    with pytest.raises(UsageError, match="two tools have the name add"), Tools(twice, workers=1) as tools:
        tools.check()
    with Tools([f"{folder}/functions.py:add"], workers=1) as tools:
        tools.check()
        tokenizer = build_tokenizer()
        tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
        with pytest.raises(UsageError, match="writes no tool calls"):
            ToolRunner(tools, FakeGenerator(ids), online(), SAMPLING, tokenizer)


@pytest.mark.skipif(isolation()[0] == "unprotected", reason="programs cannot be isolated here")
def test_the_sandbox_runs_programs(folder):
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    codes = ["print(6 * 7)", "1 / 0", killed, "print(7)"]
    with Tools(["sandbox"], workers=1, timeout_seconds=60) as tools:
        [found] = play(tools, [[*(call("python", code=code) for code in codes), "done<|end|>"]])
    good, bad, lost, after = results(found)
    assert good == "42\n" and "ZeroDivisionError" in bad and bad.endswith("error: exit code 1")
    assert "error: exit code" in lost and after == "7\n" and not found.failure


def test_an_mcp_server_over_pipes_is_a_tool_and_may_be_killed(folder):
    pytest.importorskip("mcp")
    scripts = [
        [call("multiply", a=6, b=7), call("multiply", a=1, b=0), "42<|end|>"],
        [call("multiply", a=666, b=1), "x<|end|>"],
        [call("multiply", a=2, b=2), call("multiply", a=3, b=3), "9<|end|>"],
    ]
    with Tools([f"mcp:{sys.executable} server.py"], workers=1, timeout_seconds=60, max_failure_rate=0.5) as tools:
        for process in tools.processes:
            process.request["folder"] = str(folder)
        found = play(tools, scripts)
    assert results(found[0])[0] == "42" and results(found[0])[1].startswith("error: ")
    assert "the server is lost" in found[1].failure and found[1].failure.startswith("tools: ")
    assert results(found[2]) == ["4", "9"] and not found[2].failure
    schema = tools.schemas[0]["function"]
    assert schema["name"] == "multiply" and set(schema["parameters"]["properties"]) == {"a", "b"}


def test_a_conversation_may_have_a_server_of_its_own(folder, tmp_path):
    """It keeps its state when another's server or the process of all tools is killed; it ends with the conversation."""
    pytest.importorskip("mcp")
    dies = [call("count"), call("multiply", a=666, b=1), "x<|end|>"]
    killed = [call("count"), call("end", how="once", file=f"{tmp_path}/x"), call("count"), "x<|end|>"]
    scripts = [[call("count"), call("count"), call("process"), "x<|end|>"], dies, killed, [call("count"), "x<|end|>"]]
    specs = [f"mcp-session:{sys.executable} {folder}/server.py", f"{folder}/functions.py:end"]
    with Tools(specs, workers=1, timeout_seconds=60, max_failure_rate=0.5) as tools:
        for schedule in ("concurrent", "lock_step"):
            whole, lost, other, short = play(tools, scripts, schedule)
            assert results(whole)[:2] == ["1", "2"] and results(other) == ["1", "alive", "2"]
            assert results(short) == ["1"] and "the server is lost" in lost.failure
            assert not (whole.failure or other.failure or short.failure)
            (tmp_path / "x").unlink()
            with contextlib.suppress(ProcessLookupError):  # it has ended already
                ended = os.pidfd_open(int(results(whole)[2]))
                assert select.select([ended], [], [], 60)[0], "the server of a conversation that is over still runs"
                os.close(ended)


def test_servers_of_conversations_are_limited(folder):
    pytest.importorskip("mcp")
    with Tools([f"mcp-session:{sys.executable} {folder}/server.py"], workers=1, timeout_seconds=60) as tools:
        tools.check()
        for given, most in ((0, 32), (5, 5)):
            config = online(rollout__max_concurrent_episodes=given)
            assert ToolRunner(tools, FakeGenerator(ids), config, SAMPLING, build_tokenizer()).most == most


def test_an_mcp_server_that_does_not_answer_is_started_anew(folder):
    pytest.importorskip("mcp")
    server = McpServer(f"{sys.executable} server.py", str(folder), 60)
    assert [tool["function"]["name"] for tool in server.tools()] == ["multiply", "count", "process", "stop"]
    held = [server.connection[2]]
    with pytest.raises(ServerLostError, match=r"no answer within .* raise reward.timeout_seconds"):
        server.call("stop", {}, 0.5)
    assert server.call("multiply", {"a": 2, "b": 3}, 60) == "6"
    held.append(server.connection[2])
    server.loop.call_soon_threadsafe(server.lost, EOFError("the end of the test"))
    ended, left = asyncio.run_coroutine_threadsafe(asyncio.wait(held, timeout=60), server.loop).result(90)
    assert len(ended) == 2 and not left, "the connections are closed, and their servers are ended"


def test_an_mcp_server_over_http_is_a_tool(folder):
    pytest.importorskip("mcp")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, str(folder / "server.py"), str(port)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        try:
            for line in server.stderr:
                if "running on" in line:
                    break
            with Tools(
                [f"mcp:http://127.0.0.1:{port}/mcp"], workers=1, timeout_seconds=60, max_failure_rate=1
            ) as tools:
                [found] = play(tools, [[call("multiply", a=6, b=7), "42<|end|>"]])
                assert results(found) == ["42"] and not found.failure
                server.kill()
                server.wait()
                [lost] = play(tools, [[call("multiply", a=6, b=7), "42<|end|>"]])
                assert "the server is lost" in lost.failure
        finally:
            server.kill()
