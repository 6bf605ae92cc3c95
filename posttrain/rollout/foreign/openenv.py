"""Environments behind OpenEnv's protocol, which run as servers of their own: `rollout.environment: openenv:URL`.

Each episode is a session: a WebSocket of its own at URL/ws, on which requests and observations are JSON.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlsplit

from posttrain.core.errors import UsageError
from posttrain.rollout.foreign import Messages, options_of, seed_of, user_message, with_observation

CONNECT_SECONDS = 10.0


class OpenEnv:
    """Plays one episode in a session of the server.

    The reply becomes the action's field that the column `action_field` names (`message` if there is none); the
    observation's field `observation_field`, or else all of the observation as JSON, is what the model sees.
    """

    def __init__(self, name: str) -> None:
        self.url = name

    @staticmethod
    def check(name: str) -> None:
        url = urlsplit(name)
        if url.scheme not in ("http", "https", "ws", "wss") or not url.hostname:
            raise UsageError(f"openenv:{name}: expected the address of a server, as in openenv:http://127.0.0.1:8000")
        connect(name).close()

    def start(self, example: dict[str, Any]) -> Messages:
        self.action_field = str(example.get("action_field") or "message")
        self.observation_field = str(example.get("observation_field") or "")
        self.session = connect(self.url)
        found = self.ask("reset", {"seed": seed_of(example), **options_of(example)})
        return with_observation(example, self.as_text(found["observation"]))

    def __del__(self) -> None:
        """Close the session of an episode that was cut off: its thread would keep it open, and servers limit them."""
        if (session := getattr(self, "session", None)) is not None:
            session.close()

    def step(self, reply: str) -> tuple[Messages | None, float]:
        found = self.ask("step", {self.action_field: reply})
        reward = float(found.get("reward") or 0.0)
        if found.get("done"):
            self.session.close()
            return None, reward
        return user_message(self.as_text(found["observation"])), reward

    def as_text(self, observation: Any) -> str:
        if not self.observation_field:
            return observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)
        if not isinstance(observation, dict) or self.observation_field not in observation:
            fields = sorted(observation) if isinstance(observation, dict) else []
            raise UsageError(
                f"the observation has no field {self.observation_field!r}, which the column observation_field names; "
                f"it has {', '.join(fields) or 'none'}"
            )
        return str(observation[self.observation_field])

    def ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Send one request and return the data of its response; the time limit is that of the environment's step."""
        self.session.send(json.dumps({"type": kind, "data": data}))
        found = json.loads(self.session.recv())
        if not isinstance(found, dict) or found.get("type") != "observation":
            raise UsageError(f"{self.url} answered {kind} with {str(found)[:500]}")
        return dict(found["data"])


def connect(url: str) -> Any:
    try:
        from websockets.exceptions import WebSocketException
        from websockets.sync.client import connect as open_socket
    except ModuleNotFoundError as error:
        raise UsageError(f"openenv:{url} needs websockets: pip install websockets ({error})") from None
    address = url.rstrip("/").replace("http", "ws", 1) if url.startswith("http") else url.rstrip("/")
    try:
        return open_socket(f"{address}/ws", open_timeout=CONNECT_SECONDS, proxy=None)
    except (OSError, TimeoutError, WebSocketException) as error:
        raise UsageError(f"openenv:{url}: there is no OpenEnv server: {error}") from None
