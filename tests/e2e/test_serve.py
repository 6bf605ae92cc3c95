"""`posttrain serve` as a process: started, asked with the official client, told to stop in all ways."""

import re
import signal
import socket
import subprocess
import sys
import threading

import pytest

from tests.e2e.commands import PATIENCE, command

openai = pytest.importorskip("openai")

ASKED = [{"role": "user", "content": "12+30="}]


class Process:
    """A server on a free port, and its official client."""

    def __init__(self, model, *options):
        arguments = [sys.executable, "-m", "posttrain", "serve", str(model), "--port", "0", *map(str, options)]
        self.process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def __enter__(self):
        self.line = self.process.stdout.readline()
        found = re.search(r"http://\S+:(\d+)", self.line)
        assert found, self.process.communicate()
        self.port = int(found[1])
        self.client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=PATIENCE
        )
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def stream(self, n=1, tokens=480):
        """An answer that takes a while, its first words read."""
        stream = self.client.chat.completions.create(
            model="pico", messages=ASKED, stream=True, n=n, max_tokens=tokens, extra_body={"ignore_eos": True}
        )
        for chunk in stream:
            if chunk.choices[0].delta.content:
                return stream
        raise AssertionError("it said nothing")

    def end(self, *signals):
        """The exit code after these signals, and what was said on standard error."""
        for number in signals:
            self.process.send_signal(number)
        _, said = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, said


def test_sigterm_lets_those_under_way_finish():
    with Process("pico") as server:
        assert "serving pico on http://127.0.0.1:" in server.line
        stream = server.stream()
        ended = []
        ending = threading.Thread(target=lambda: ended.append(server.end(signal.SIGTERM)))
        ending.start()
        rest = [chunk.choices[0] for chunk in stream]
        assert rest[-1].finish_reason == "length"
        ending.join(PATIENCE)
        code, said = ended[0]
        assert code == 0 and "finishing 1 request in progress" in said and "Traceback" not in said
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", server.port), timeout=5)


def test_who_takes_too_long_is_cut_off_and_the_exit_code_says_so():
    with Process("pico", "--drain_seconds", 0.1) as server:
        stream = server.stream(n=64)
        code, said = server.end(signal.SIGTERM)
        assert code == 143 and "1 request cut off" in said and "Traceback" not in said
        with pytest.raises(openai.APIError):
            list(stream)


def test_a_second_ctrl_c_does_not_wait():
    with Process("pico") as server:
        server.stream(n=64)
        code, said = server.end(signal.SIGINT, signal.SIGINT)
        assert code == 130 and "Traceback" not in said


def test_a_run_is_served_as_it_chats(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "12+30=", "response": "42"}\n')
    run = tmp_path / "run"
    assert command("sft", "--model.path", "pico", "--data.train", rows, "--steps", 2, "--quiet", "--out", run) == 0
    capsys.readouterr()
    assert command("chat", run, "--greedy", "--max_tokens", 20, "--ask", ASKED[0]["content"]) == 0
    said = capsys.readouterr().out.removesuffix("\n")
    with Process(run, "--name", "mine", "--slots", 2) as server:
        answer = server.client.chat.completions.create(model="mine", messages=ASKED, temperature=0, max_tokens=20)
        text = answer.choices[0].message.content
        from posttrain.inference.terminal_text import escape_controls

        assert escape_controls(text) == said
        assert server.end(signal.SIGTERM)[0] == 0


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["pico", "--host", "0.0.0.0"], "needs a --token"),
        (["pico", "--host", "0.0.0.0", "--token", "short"], "at least 8"),
        (["pico", "--slots", -1], "slots is -1"),
        (["pico", "--max_tokens", 0], "max_tokens is 0"),
        (["no/such/model/at/all"], "no/such/model"),
        (["pico", "--host", "192.0.2.1", "--token", "long-enough"], "192.0.2.1"),  # not an address of this machine
    ],
)
def test_mistakes_are_named(argv, words, capsys, monkeypatch):
    monkeypatch.delenv("POSTTRAIN_TOKEN", raising=False)
    assert command("serve", *argv) == 2
    assert words in capsys.readouterr().err


def test_a_port_in_use(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert command("serve", "pico", "--port", port) == 2
        assert f"--port {port}" in capsys.readouterr().err
