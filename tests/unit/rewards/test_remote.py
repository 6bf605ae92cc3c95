"""Rewards over HTTP, against a real server on this machine."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from posttrain.rewards.base import Completion, Rewards


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(asked)
        act = self.path.strip("/")
        texts = [row["text"] for row in asked["completions"]]
        if act == "hang":
            self.server.release.wait(60)
            return
        if act == "down" or (act == "busy" and len(self.server.asked) < 3):
            self.send_error(503)
        elif act == "picky" and "bad" in texts:
            self.send_error(500)
        elif act == "elsewhere":
            self.send_response(302)
            self.send_header("Location", f"http://127.0.0.1:{self.server.server_port}/score")
            self.end_headers()
        elif act == "words":
            self.answer(b"hello")
        elif act == "wrong":
            self.answer(json.dumps({"rewards": [1.0] * (len(texts) + 1)}).encode())
        else:
            rewards = [None if text == "none" else float(len(text)) for text in texts]
            self.answer(json.dumps({"rewards": rewards}).encode())

    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.release = [], threading.Event()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.release.set()
    server.shutdown()
    server.server_close()
    thread.join()


def score(server, path, *texts, seconds=20.0):
    row = {"prompt": "p", "messages": [], "finish": "stop", "tokens": 1, "columns": {"label": "7"}}
    completions = [Completion(text=text, **row) for text in texts]
    with Rewards([f"http://127.0.0.1:{server.server_port}/{path}"], timeout_seconds=seconds, workers=1) as rewards:
        rewards.check()
        return [row[0] for row in rewards.score(completions)]


def test_one_request_for_a_batch_in_two_dialects(server):
    assert [verdict.value for verdict in score(server, "score", "a", "bb")] == [1, 2]
    (asked,) = server.asked
    assert asked["query"] == ["pa", "pbb"] and asked["prompts"] == ["p", "p"] and asked["labels"] == ["7", "7"]
    assert asked["completions"][1] == {
        "prompt": "p",
        "messages": [],
        "text": "bb",
        "finish": "stop",
        "tokens": 1,
        "columns": {"label": "7"},
    }


def test_a_busy_service_is_asked_again(server):
    assert [verdict.value for verdict in score(server, "busy", "a")] == [1]
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("path", "text", "kind"),
    [
        ("down", "responded 503", "error"),
        ("elsewhere", "responded 302", "error"),
        ("words", "did not send JSON", "error"),
        ("wrong", "2 rewards for 1 completions", "error"),
    ],
)
def test_faults_of_the_service(server, path, text, kind):
    verdicts = score(server, path, "a", "b")
    assert [verdict.kind for verdict in verdicts] == [kind] * 2 and text in verdicts[0].reason


def test_a_service_that_does_not_answer_is_not_asked_for_each(server):
    verdicts = score(server, "hang", "a", "b", "c", seconds=1.0)
    assert [verdict.kind for verdict in verdicts] == ["timeout"] * 3
    assert "did not respond within" in verdicts[0].reason and len(server.asked) == 1


def test_one_bad_completion_fails_alone(server):
    assert [verdict.value for verdict in score(server, "picky", "a", "bad", "cc")] == [1, None, 2]
    assert [verdict.value for verdict in score(server, "score", "a", "none")] == [1, None]


def test_nobody_listens(server):
    completions = [Completion(prompt="", messages=[], text="a", finish="", tokens=1, columns={})]
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as free:
        port = free.server_port
    with Rewards([f"http://127.0.0.1:{port}/"]) as rewards:
        (verdict,) = rewards.score(completions)[0]
    assert verdict.kind == "error" and "cannot be reached" in verdict.reason
