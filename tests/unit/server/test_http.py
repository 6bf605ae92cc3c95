"""HTTP as strangers speak it: limits, tokens, broken requests, slow ones and large ones."""

import contextlib
import json
import socket

import pytest

from posttrain.core.errors import UsageError
from posttrain.server import http
from posttrain.server.app import ServeOptions, is_loopback
from tests.unit.server.serving import PATIENCE, Talk, ask, pico, serving

openai = pytest.importorskip("openai")

TOKEN = "a-long-secret"
BODY = {"messages": [{"role": "user", "content": "1+1="}], "max_tokens": 2}


@pytest.fixture(scope="module")
def server():
    with serving(pico(), max_body_mib=0.5) as found:
        yield found


@pytest.fixture(scope="module")
def closed():
    """It wants a token."""
    with serving(pico(), token=TOKEN) as found:
        yield found


def raw(server, data):
    """All that comes back for these bytes until the connection is closed."""
    with Talk(server.port) as talk:
        talk.socket.sendall(data)
        talk.socket.shutdown(socket.SHUT_WR)
        return talk.file.read()


def test_several_requests_on_one_connection(server):
    with Talk(server.port) as talk:
        for _ in range(3):
            status, headers, body = talk.send("POST", "/v1/chat/completions", BODY).answer()
            assert status == 200 and headers["connection"] == "keep-alive" and json.loads(body)["choices"]
        assert talk.send("GET", "/nothing").answer()[0] == 404
        assert talk.send("GET", "/health").answer()[0] == 200
        status, headers, _ = talk.send("GET", "/health", Connection="close").answer()
        assert headers["connection"] == "close" and not talk.file.read()


def test_old_clients_get_their_answer_without_chunks(server):
    body = json.dumps({**BODY, "stream": True}).encode()
    head = "POST /v1/chat/completions HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with Talk(server.port) as talk:
        talk.socket.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        status, headers, answer = talk.answer()
    assert status == 200 and headers["connection"] == "close" and "transfer-encoding" not in headers
    assert answer.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"hello\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n folded: yes\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost : localhost\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: +1\r\n\r\na", 400),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 411),
        (b"GET /health HTTP/1.1\r\nX: " + b"a" * 40_000 + b"\r\n\r\n", 431),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 600000\r\n\r\n", 413),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),  # somebody tries TLS
    ],
    ids=lambda value: str(value)[:50],
)
def test_broken_requests(server, data, status):
    answer = raw(server, data)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer
    assert answer.count(b"Connection: close") == 1
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    assert ask(server.port, "GET", "/health")[0] == 200


@pytest.mark.parametrize(
    "data", [b"", b"GET", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nabc"]
)
def test_who_says_half_and_hangs_up_gets_nothing(server, data):
    assert raw(server, data) == b""
    assert ask(server.port, "GET", "/health")[0] == 200


def test_who_never_finishes_is_cut_off(server, monkeypatch):
    monkeypatch.setattr(http, "READ_SECONDS", 0.05)
    with Talk(server.port) as talk:
        talk.socket.sendall(b"GET /health HTT")
        with contextlib.suppress(ConnectionResetError):
            assert talk.file.read() == b""


def test_a_request_before_the_answer_to_the_last_costs_the_connection(server):
    """Nobody does so any more; it must not be answered wrongly."""
    body = json.dumps({**BODY, "max_tokens": 100, "ignore_eos": True}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with Talk(server.port) as talk:
        talk.socket.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        talk.socket.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert talk.answer()[0] == 200
        assert talk.file.read() == b""


def test_ten_megabytes(server):
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "a" * 10_000_000}]
    with pytest.raises(openai.APIStatusError, match=r"524,288") as caught:
        client.chat.completions.create(model="pico", messages=messages)
    assert caught.value.status_code == 413 and caught.value.code == "body_too_large"
    with Talk(server.port) as talk:  # who sends it all before reading can still read why
        talk.send("POST", "/v1/completions", Content_Length=10**7)
        talk.socket.sendall(b"a" * 10**7)
        assert talk.answer()[0] == 413
    with Talk(server.port) as talk:  # as curl asks for a large one: it need not be sent at all
        status, _, _ = talk.send("POST", "/v1/completions", Content_Length=10**7, Expect="100-continue").answer()
        assert status == 413


def test_a_client_that_waits_for_leave_gets_it(server):
    body = json.dumps(BODY).encode()
    with Talk(server.port) as talk:
        talk.send("POST", "/v1/chat/completions", Content_Length=len(body), Expect="100-continue")
        assert talk.head()[0] == 100
        talk.socket.sendall(body)
        assert talk.answer()[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/v1/chat/completions", {}, 405),
        ("DELETE", "/v1/models", {}, 405),
        ("GET", "/", {}, 404),
        ("GET", "/../../etc/passwd", {}, 404),
        ("POST", "/v1/chat/completions", {"Content_Type": "text/plain"}, 415),
        ("GET", "/v1/models", {"Host": "evil.example"}, 403),
        ("GET", "/v1/models", {"Host": "localhost.evil.example:8000"}, 403),
        ("GET", "/v1/models", {"Host": "[::1]:8000"}, 200),
        ("GET", "/v1/models?a=b", {"Host": "127.0.0.1"}, 200),
        ("GET", "/v1/models/p%69co", {}, 200),
        ("GET", "/health", {"Host": "evil.example"}, 200),
    ],
)
def test_who_may_ask_what(server, method, path, headers, status):
    assert ask(server.port, method, path, **headers)[0] == status


def test_a_token_opens_all_and_nothing_else_does(closed):
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}, {"Authorization": "Bearer é"}):
        for path in ("/v1/models", "/metrics", "/v1/nothing"):
            status, found, answer = ask(closed.port, "GET", path, **headers)
            assert status == 401 and found["www-authenticate"] == "Bearer"
            assert answer["error"]["code"] == "invalid_api_key"
    assert ask(closed.port, "GET", "/health")[0] == 200
    with Talk(closed.port) as talk:  # what a stranger would send is not even read
        assert talk.send("POST", "/v1/chat/completions", Content_Length=500_000).answer()[0] == 401
    address = f"http://127.0.0.1:{closed.port}/v1"
    with pytest.raises(openai.AuthenticationError, match="token is wrong"):
        openai.OpenAI(base_url=address, api_key="bad", max_retries=0).models.list()
    client = openai.OpenAI(base_url=address, api_key=TOKEN, timeout=PATIENCE, default_headers={"Host": "gpu7:8000"})
    assert client.chat.completions.create(model="pico", **BODY).usage


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"host": "0.0.0.0"}, "needs a --token"),
        ({"host": "192.168.1.5"}, "needs a --token"),
        ({"host": "example.org"}, "needs a --token"),
        ({"host": "0.0.0.0", "token": "short"}, "at least 8"),
        ({"token": "with\nnewline"}, "printable"),
        ({"port": 70000}, "port"),
        ({"max_length": 1}, "max_length"),
        ({"timeout_seconds": 0}, "timeout_seconds"),
    ],
)
def test_options_are_checked(options, words):
    with pytest.raises(UsageError, match=words):
        ServeOptions(**options).check()


def test_only_these_are_this_machine():
    assert all(is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "[::1]", "127.1.2.3"))
    assert not any(
        is_loopback(host) for host in ("", "0.0.0.0", "::", "10.0.0.1", "localhost.org", "1", "127.0.0.1.org")
    )
