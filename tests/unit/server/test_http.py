"""HTTP as strangers speak it: limits, tokens, broken requests, slow ones and large ones."""

import contextlib
import json
import socket
import time

import pytest

from posttrain.core.errors import UsageError
from posttrain.endpoint import http_limits
from posttrain.endpoint.http import is_loopback
from posttrain.server.app import ServeOptions
from tests.unit.server.serving import PATIENCE, RawConnection, ask, pico, serving, wait_for

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
    with RawConnection(server.port) as connection:
        connection.socket.sendall(data)
        connection.socket.shutdown(socket.SHUT_WR)
        return connection.file.read()


def test_several_requests_on_one_connection(server):
    with RawConnection(server.port) as connection:
        for _ in range(3):
            status, headers, body = connection.send("POST", "/v1/chat/completions", BODY).response()
            assert status == 200 and "connection" not in headers and json.loads(body)["choices"]
        assert connection.send("GET", "/nothing").response()[0] == 404
        assert connection.send("GET", "/health").response()[0] == 200
        status, headers, _ = connection.send("GET", "/health", Connection="close").response()
        assert headers["connection"] == "close" and not connection.file.read()


def test_old_clients_get_their_answer_without_chunks(server):
    body = json.dumps({**BODY, "stream": True}).encode()
    head = "POST /v1/chat/completions HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with RawConnection(server.port) as connection:
        connection.socket.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        status, headers, answer = connection.response()
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
        # Shapes that two servers in a row may read differently
        (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\na", 411),
        (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\na", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1, 1\r\n\r\na", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length:\r\n\r\na", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: \xb2\r\n\r\na", 400),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: a\r\n\tfolded\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: a\nX: b\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: a\rX: b\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: a\x00b\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\nHost: a\n\n\r\n\r\n", 400),
        (b"\r\nGET /health HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET  /health HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nX: " + b"a" * 40_000 + b"\r\n\r\n", 431),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 600000\r\n\r\n", 413),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),  # a TLS handshake
    ],
    ids=lambda value: str(value)[:50],
)
def test_broken_requests(server, data, status):
    answer = raw(server, data)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer
    assert answer.count(b"connection: close") == 1
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    assert ask(server.port, "GET", "/health")[0] == 200


@pytest.mark.parametrize(
    "data", [b"", b"GET", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nabc"]
)
def test_who_says_half_and_hangs_up_gets_nothing(server, data):
    assert raw(server, data) == b""
    assert ask(server.port, "GET", "/health")[0] == 200


@pytest.mark.parametrize(
    "data", [b"GET /health HTT", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nabc"]
)
def test_a_request_that_never_ends_is_cut_off(server, monkeypatch, data):
    monkeypatch.setattr(http_limits, "READ_SECONDS", 0.05)
    with RawConnection(server.port) as connection:
        connection.socket.sendall(data)
        assert is_closed(connection)


def test_a_request_byte_by_byte_does_not_extend_its_time(server, monkeypatch):
    monkeypatch.setattr(http_limits, "READ_SECONDS", 0.3)
    with RawConnection(server.port) as connection, pytest.raises(ConnectionError):
        for _ in range(1000):
            connection.socket.sendall(b"A")
            time.sleep(0.01)


def test_idle_connections_are_closed(server, monkeypatch):
    monkeypatch.setattr(http_limits, "IDLE_SECONDS", 0.05)
    with RawConnection(server.port) as connection:
        assert is_closed(connection)
    with RawConnection(server.port) as connection:
        assert connection.send("GET", "/health").response()[0] == 200
        assert is_closed(connection)


def test_a_response_takes_no_longer_than_its_time(server, monkeypatch):
    monkeypatch.setattr(server.http.limits, "request_seconds", 0.2)
    with RawConnection(server.port) as connection:
        connection.send("POST", "/v1/chat/completions", {**BODY, "n": 8, "max_tokens": 500, "ignore_eos": True})
        assert is_closed(connection)
    wait_for(lambda: not server.service.engine.open)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_does_not_read_is_cut_off(server, monkeypatch, stream):
    """Its response is larger than what the kernel buffers; others are served meanwhile."""
    monkeypatch.setattr(server.http.limits, "request_seconds", 2.0)
    with RawConnection(server.port) as connection:
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = {**BODY, "n": 64, "max_tokens": 100, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
        connection.send("POST", "/v1/chat/completions", {**body, "stream": stream})
        wait_for(lambda: server.service.engine.open)  # its time runs
        monkeypatch.undo()
        assert ask(server.port, "POST", "/v1/chat/completions", BODY)[0] == 200
        wait_for(lambda: not server.http.under_way() and not server.service.engine.open)


def test_the_longest_idle_connections_make_room(server, monkeypatch):
    monkeypatch.setattr(server.http.limits, "max_connections", len(server.http.limits.open) + 10)
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(RawConnection(server.port)) for _ in range(30)]
        for connection in idle[:10]:
            assert is_closed(connection)
        assert idle[-1].send("POST", "/v1/chat/completions", BODY).response()[0] == 200
        assert ask(server.port, "POST", "/v1/chat/completions", BODY)[0] == 200
    wait_for(lambda: not server.http.limits.open)


def test_health_is_served_when_all_connections_are_in_use(server, monkeypatch):
    wait_for(lambda: not server.http.limits.open)
    monkeypatch.setattr(server.http.limits, "max_connections", 2)
    long = {**BODY, "max_tokens": 500, "ignore_eos": True, "stream": True}
    with RawConnection(server.port) as first, RawConnection(server.port) as second:
        for connection in (first, second):
            assert connection.send("POST", "/v1/chat/completions", long).head()[0] == 200
        assert ask(server.port, "GET", "/health")[0] == 200
        status, headers, answer = ask(server.port, "POST", "/v1/chat/completions", BODY)
        assert status == 503 and headers["retry-after"] == "1" and "all 2 connections" in answer["error"]["message"]
        monkeypatch.setattr(http_limits, "HEALTH_CONNECTIONS", 0)
        assert ask(server.port, "GET", "/health")[0] == 503
    wait_for(lambda: not server.http.limits.open)


def test_a_wish_for_another_protocol_is_ignored(server):
    with RawConnection(server.port) as connection:
        headers = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2_Settings": "AAMAAABk"}
        assert connection.send("POST", "/v1/chat/completions", BODY, **headers).response()[0] == 200
        connection.send("POST", "/v1/chat/completions", {**BODY, "max_tokens": 500, "ignore_eos": True}, **headers)
        wait_for(lambda: server.service.engine.open)
    wait_for(lambda: not server.service.engine.open)


def is_closed(connection):
    """Whether the server closes the connection without a word."""
    with contextlib.suppress(ConnectionResetError):
        assert connection.file.read() == b""
    return True


def test_a_request_before_the_answer_to_the_last_costs_the_connection(server):
    """Nobody does so any more; it must not be answered wrongly."""
    body = json.dumps({**BODY, "max_tokens": 100, "ignore_eos": True}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with RawConnection(server.port) as connection:
        connection.socket.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        connection.socket.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.response()[0] == 200
        assert connection.file.read() == b""


def test_ten_megabytes(server):
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "a" * 10_000_000}]
    with pytest.raises(openai.APIStatusError, match=r"524,288") as caught:
        client.chat.completions.create(model="pico", messages=messages)
    assert caught.value.status_code == 413 and caught.value.code == "body_too_large"
    # A client that sends the whole body before it reads can still read the error.
    with RawConnection(server.port) as connection:
        connection.send("POST", "/v1/completions", Content_Length=10**7)
        connection.socket.sendall(b"a" * 10**7)
        assert connection.response()[0] == 413
    with RawConnection(server.port) as connection:  # as curl asks for a large one: it need not be sent at all
        status, _, _ = connection.send(
            "POST", "/v1/completions", Content_Length=10**7, Expect="100-continue"
        ).response()
        assert status == 413


def test_a_client_that_waits_for_leave_gets_it(server):
    body = json.dumps(BODY).encode()
    with RawConnection(server.port) as connection:
        connection.send("POST", "/v1/chat/completions", Content_Length=len(body), Expect="100-continue")
        assert connection.head()[0] == 100
        connection.socket.sendall(body)
        assert connection.response()[0] == 200


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
    with RawConnection(closed.port) as connection:  # what a stranger would send is not even read
        assert connection.send("POST", "/v1/chat/completions", Content_Length=500_000).response()[0] == 401
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
