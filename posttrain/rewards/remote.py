"""Clients of services over HTTP: `JsonService` posts JSON, `RewardService` posts completions and receives rewards."""

from __future__ import annotations

import dataclasses
import http.client
import ipaddress
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from posttrain.data.ground_truth import ground_truth_of
from posttrain.rewards.verdict import Completion

ATTEMPTS = 3
PAUSE = 0.1  # seconds before the second attempt, doubled for each further one
RESPONSE_LIMIT = 4 * 2**20  # bytes
RETRIED = (429, 502, 503, 504)  # status codes of a service that may recover soon


class RemoteError(Exception):
    """The service failed, not a completion; sending completions one by one would not help."""

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        """`retry_after`: seconds that the service asks to wait."""
        super().__init__(message)
        self.retry_after = retry_after


class RemoteTimeoutError(RemoteError):
    """The service did not respond in time."""


class RefusedRequestError(ValueError):
    """The service refused the request; one of the completions may be the cause."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Refuse redirects: completions are sent only to the address that the user gave."""


class JsonService:
    """Posts JSON to one address and receives JSON; failed attempts are repeated within the time limit."""

    response_limit = RESPONSE_LIMIT

    def __init__(self, address: str, seconds: float, *, token: str = "", attempts: int = ATTEMPTS) -> None:
        """`token`: sent as bearer token, unless it is empty."""
        self.address, self.seconds, self.token, self.attempts = address, seconds, token, attempts
        direct = [urllib.request.ProxyHandler({})] if _is_loopback(urlsplit(address).hostname or "") else []
        self.opener = urllib.request.build_opener(_NoRedirects(), *direct)

    def post(self, value: Any, before_attempt: Callable[[float], None] = lambda _: None) -> Any:
        """Post a value and return the decoded response.

        `before_attempt`: called before each attempt with the time at which all must have ended; it may wait.
        """
        body = json.dumps(value).encode()
        end = time.monotonic() + self.seconds
        for attempt in range(self.attempts):
            before_attempt(end)
            try:
                return self._post(body, end)
            except RemoteTimeoutError:
                raise
            except RemoteError as error:
                pause = max(PAUSE * 2**attempt, error.retry_after)
                if attempt + 1 == self.attempts or time.monotonic() + pause > end:
                    raise
                time.sleep(pause)
        raise AssertionError("unreachable")

    def _post(self, body: bytes, end: float) -> Any:
        headers = {"Content-Type": "application/json"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        request = urllib.request.Request(self.address, data=body, headers=headers)
        try:
            with self.opener.open(request, timeout=max(0.01, end - time.monotonic())) as response:
                raw = response.read(self.response_limit + 1)
        except urllib.error.HTTPError as error:
            text = error.read(500).decode("utf-8", "replace")
            message = f"{self.address} responded {error.code} {error.reason}: {text}"
            if error.code in RETRIED or 300 <= error.code < 400 or error.code in (401, 403, 404, 405):
                raise RemoteError(message, _seconds(error.headers.get("Retry-After"))) from None
            raise RefusedRequestError(message) from None
        except TimeoutError:
            raise RemoteTimeoutError(f"{self.address} did not respond within {self.seconds:g} s") from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise RemoteTimeoutError(f"{self.address} did not respond within {self.seconds:g} s") from None
            raise RemoteError(f"{self.address} cannot be reached: {error.reason}") from None
        except (http.client.HTTPException, ConnectionError) as error:
            raise RemoteError(f"{self.address} closed the connection: {type(error).__name__}: {error}") from None
        if len(raw) > self.response_limit:
            raise RemoteError(f"{self.address} sent more than {self.response_limit // 2**20} MiB")
        try:
            return json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise RemoteError(f"{self.address} did not send JSON: {error}; the response is {raw[:100]!r}") from None


class RewardService(JsonService):
    """A reward service at one address."""

    def __init__(self, address: str, seconds: float) -> None:
        super().__init__(address, seconds, token=os.environ.get("POSTTRAIN_TOKEN", ""))  # as `posttrain serve` checks

    def score(self, completions: Sequence[Completion]) -> Any:
        """Post completions and return the decoded response."""
        return self.post(payload(completions))


def _seconds(header: str | None) -> float:
    """Read a Retry-After header; 0 if there is none, or a date."""
    try:
        return min(max(0.0, float(header or 0)), 3600.0)
    except ValueError:
        return 0.0


def payload(completions: Sequence[Completion]) -> dict[str, Any]:
    """Return the request body: all fields of the completions, and the lists that OpenRLHF's reward servers expect."""
    return {
        "completions": [dataclasses.asdict(completion) for completion in completions],
        "query": [completion.prompt + completion.text for completion in completions],
        "prompts": [completion.prompt for completion in completions],
        "labels": [ground_truth_of(completion.columns) for completion in completions],
    }


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
