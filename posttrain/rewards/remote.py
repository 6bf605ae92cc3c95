"""A reward service over HTTP: one POST with several completions, one list of rewards back."""

from __future__ import annotations

import dataclasses
import http.client
import ipaddress
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from posttrain.rewards.verdict import Completion, label_of

ATTEMPTS = 3
PAUSE = 0.1  # seconds before the second attempt; then twice as long each
ANSWER_LIMIT = 4 * 2**20  # bytes
PASSING = (429, 502, 503, 504)  # states of a service that may be over soon


class RemoteError(Exception):
    """The service, not a completion, is at fault: asking again for each would change nothing."""


class RemoteTimeoutError(RemoteError):
    """The service did not answer in time."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Completions go where the user said and nowhere else."""


class Service:
    """Asks one address; `ask` returns what stands under `rewards` in its answer."""

    def __init__(self, address: str, seconds: float) -> None:
        self.address = address
        self.seconds = seconds
        direct = [urllib.request.ProxyHandler({})] if _is_loopback(urlsplit(address).hostname or "") else []
        self.opener = urllib.request.build_opener(_NoRedirects(), *direct)

    def ask(self, completions: Sequence[Completion]) -> Any:
        """Try a few times within the seconds given."""
        body = json.dumps(payload(completions)).encode()
        end = time.monotonic() + self.seconds
        for attempt in range(ATTEMPTS):
            try:
                return self._post(body, end)
            except RemoteTimeoutError:
                raise
            except RemoteError:
                pause = PAUSE * 2**attempt
                if attempt + 1 == ATTEMPTS or time.monotonic() + pause > end:
                    raise
                time.sleep(pause)
        raise AssertionError("unreachable")

    def _post(self, body: bytes, end: float) -> Any:
        headers = {"Content-Type": "application/json"}
        if token := os.environ.get("POSTTRAIN_TOKEN"):  # of a `posttrain serve`, say
            headers["Authorization"] = f"Bearer {token}"
        request = urllib.request.Request(self.address, data=body, headers=headers)
        try:
            with self.opener.open(request, timeout=max(0.01, end - time.monotonic())) as answer:
                raw = answer.read(ANSWER_LIMIT + 1)
        except urllib.error.HTTPError as error:
            text = error.read(500).decode("utf-8", "replace")
            message = f"{self.address} answered {error.code} {error.reason}: {text}"
            if error.code in PASSING or 300 <= error.code < 400 or error.code in (401, 403, 404, 405):
                raise RemoteError(message) from None
            raise ValueError(message) from None  # it may be one completion that it cannot digest
        except TimeoutError:
            raise RemoteTimeoutError(f"{self.address} did not answer within {self.seconds:g} s") from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise RemoteTimeoutError(f"{self.address} did not answer within {self.seconds:g} s") from None
            raise RemoteError(f"{self.address} cannot be reached: {error.reason}") from None
        except (http.client.HTTPException, ConnectionError) as error:
            raise RemoteError(f"{self.address} broke off: {type(error).__name__}: {error}") from None
        if len(raw) > ANSWER_LIMIT:
            raise RemoteError(f"{self.address} sent more than {ANSWER_LIMIT // 2**20} MiB")
        try:
            return json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise RemoteError(f"{self.address} did not send JSON: {error}; it began {raw[:100]!r}") from None


def payload(completions: Sequence[Completion]) -> dict[str, Any]:
    """What is sent: completions in full, and the three lists that OpenRLHF's reward servers expect."""
    return {
        "completions": [dataclasses.asdict(completion) for completion in completions],
        "query": [completion.prompt + completion.text for completion in completions],
        "prompts": [completion.prompt for completion in completions],
        "labels": [label_of(completion.columns) for completion in completions],
    }


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
