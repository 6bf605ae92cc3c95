"""The endpoint that agents in training talk to: OpenAI's API on 127.0.0.1, with a key per conversation.

Each request is attributed to its conversation by its key, becomes tokens that continue those of an earlier reply
(conversations.py), and is generated together with the requests of all other conversations. What was sampled is recorded
before the program receives it.

Tokens are sampled as `rollout.temperature`, `top_p`, `top_k` and `min_p` say, since that is the distribution that is
trained; what a program asks for instead is counted in `overridden`. Its max_tokens and stop are followed.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from posttrain.core.errors import PosttrainError
from posttrain.core.types import Ints, Sample
from posttrain.data.encoding.chat import ChatRenderer
from posttrain.data.encoding.tokens import TokenEncoder
from posttrain.endpoint.engine_thread import CompletionThread, PendingCompletion
from posttrain.endpoint.errors import ApiError
from posttrain.endpoint.http import (
    EventStream,
    Handler,
    HttpServer,
    RequestLifetime,
    api_error,
    as_handler,
    json_only,
    server_error,
)
from posttrain.endpoint.http_limits import Headers, HttpLimits
from posttrain.endpoint.messages import MessageFormat
from posttrain.endpoint.metrics import ServerMetrics
from posttrain.endpoint.output_text import TokenTexts
from posttrain.endpoint.protocol import CompletionRequest, read_chat
from posttrain.endpoint.request_fields import parse_body
from posttrain.endpoint.responses import CompletionResponse, pending_completions
from posttrain.endpoint.responses_api import read_responses
from posttrain.engines.base import Sampling
from posttrain.rollout.conversations import ConversationTree, Turn

HOST = "127.0.0.1"
MODEL = "policy"  # its name for clients, which may ask for any other
Parse = Callable[[dict[str, Any]], CompletionRequest]
PATHS: dict[str, Parse] = {"/v1/chat/completions": read_chat, "/v1/responses": read_responses}
BODY_BYTES = 64 * 2**20
TOO_LONG = "context_length_exceeded"
SETTINGS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # of the trained distribution
UNCONSTRAINED = ("response_format", "tool_choice", "strict")  # the others that training does not follow


@dataclass(slots=True, eq=False)
class AgentConversation:
    """The requests of one run of a program, and their limits."""

    session: AgentSession
    tree: ConversationTree
    seed: int
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    too_long: str = ""  # why a request was refused that had no room for a reply
    latest: float = field(default_factory=time.monotonic)  # time of the last reply, or of the start
    asked: Counter[bytes] = field(default_factory=Counter)  # requests with the same tokens, so far
    by_process_key: bool = False  # a request came with the key of the process, not with the conversation's own

    def read(self, raw: bytes, parse: Parse) -> tuple[CompletionRequest, Turn]:
        """Read a request and find the tokens that it continues; called in the thread that owns the tokenizer."""
        body = parse_body(raw)
        request = parse(body)
        session, format = self.session, self.session.format
        if request.ignore_eos:
            raise ApiError(400, "ignore_eos: what is trained ends its turns", param="ignore_eos")
        if request.top_logprobs and not session.engine.has_top_logprobs:
            raise ApiError(400, "top_logprobs: only the local engine returns them", param="top_logprobs")
        session.note_overridden(body, request)
        try:
            turn = self.tree.request(request.messages, format.tools_of(request))
        except PosttrainError as error:
            raise ApiError(400, str(error), param="messages") from None
        prompt = turn.prompt
        request.sampling = replace(
            session.sampling,
            max_tokens=self.room(turn, prompt, request.sampling.max_tokens),
            stop_texts=tuple(dict.fromkeys((*session.sampling.stop_texts, *request.sampling.stop_texts))),
        )
        format.set_parsing(request, prompt)
        request.seed = self.next_seed(prompt, request.seed)
        return request, turn

    def room(self, turn: Turn, prompt: Ints, asked: int) -> int:
        """Return how many tokens the reply may have; ApiError if the branch is full."""
        start = len(turn.path[0].added)
        left = self.session.sampling.max_tokens - (len(prompt) - start)
        if start > self.session.max_prompt_length:
            limit = f"data.max_length is {self.session.max_prompt_length}"
            self.too_long = f"the prompt has {start} tokens; {limit}"
        elif left < 1:
            limit = f"rollout.max_tokens is {self.session.sampling.max_tokens}"
            self.too_long = f"the conversation has {len(prompt) - start} tokens after its first prompt; {limit}"
        else:
            return min(left, asked or left)
        raise ApiError(400, self.too_long, param="messages", code=TOO_LONG)

    def next_seed(self, prompt: Ints, asked: int | None) -> int:
        """Return a seed that depends on the conversation's seed and on the request alone, not on when it came."""
        digest = hashlib.blake2b(prompt.astype("<i4").tobytes(), digest_size=16).digest()
        number = self.asked[digest]
        self.asked[digest] += 1
        key = f"{self.seed}/{asked}/{number}/".encode() + digest
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1

    def record(
        self,
        turn: Turn,
        replies: Sequence[tuple[Sample, dict[str, Any]]],
        stop_texts: Sequence[str],
        asked: float,
    ) -> None:
        """Record what was sampled for a request, in the thread of `read`; several replies are branches.

        `asked`: the time of the request.
        """
        now = time.monotonic()
        turn.seconds, self.latest = (max(0.0, asked - self.latest), now - asked), now
        for number, (sample, message) in enumerate(replies):
            own = turn
            if number:
                own = Turn(turn.parent, turn.tools, turn.messages, turn.added, seconds=turn.seconds)
            self.tree.reply(own, sample, message, stop_texts)


class AgentSession:
    """The conversations of one batch: one engine with constant weights, one way of sampling."""

    def __init__(
        self, endpoint: AgentEndpoint, engine: CompletionThread, sampling: Sampling, max_prompt_length: int
    ) -> None:
        self.endpoint, self.engine, self.sampling = endpoint, engine, sampling
        self.max_prompt_length = max_prompt_length
        self.name, self.seconds, self.metrics = MODEL, endpoint.seconds, ServerMetrics({})
        self.tokenizer, self.token_texts, self.format = endpoint.tokenizer, endpoint.token_texts, endpoint.format
        self.overridden: set[str] = set()  # settings of programs that were not followed

    def open(self, seed: int, origin: str) -> AgentConversation:
        """Return a new conversation, which the endpoint then accepts requests for."""
        tree = ConversationTree(self.endpoint.chat, self.sampling.stop_ids, origin)
        conversation = AgentConversation(self, tree, seed)
        self.endpoint.conversations[conversation.key] = conversation
        return conversation

    def close(self, conversation: AgentConversation) -> None:
        """Accept no further requests for a conversation."""
        for key in [key for key, open in self.endpoint.conversations.items() if open is conversation]:
            del self.endpoint.conversations[key]

    def note_overridden(self, body: dict[str, Any], request: CompletionRequest) -> None:
        """Remember which settings a request has that training does not follow."""
        for name in SETTINGS:
            if body.get(name) is not None and getattr(request.sampling, name) != getattr(self.sampling, name):
                self.overridden.add(name)
        tools = request.output.tools
        found = (request.output.schema is not None, tools and tools.choice != "auto", tools and tools.strict)
        self.overridden |= {name for name, is_set in zip(UNCONSTRAINED, found, strict=True) if is_set}


class AgentResponse(CompletionResponse):
    """A response whose tokens are recorded before the program receives it."""

    def __init__(
        self,
        conversation: AgentConversation,
        turn: Turn,
        request: CompletionRequest,
        completions: list[PendingCompletion],
        started: float,
    ) -> None:
        super().__init__(conversation.session, request, completions, len(turn.prompt), started)
        self.conversation, self.turn = conversation, turn

    async def completed(self) -> None:
        replies = []
        for index, (output, completion) in enumerate(zip(self.outputs, self.completions, strict=True)):
            choice = self.format.choice(index, output.message, None, output.finish_reason, output.seed)
            replies.append((sample_of(completion), choice["message"]))
        stop_texts = self.completions[0].sampling.stop_texts
        await self.conversation.session.endpoint.in_prompt_thread(
            self.conversation.record, self.turn, replies, stop_texts, self.started
        )


def sample_of(completion: PendingCompletion) -> Sample:
    """Return what was sampled; a stop text may have ended a stream before the engine noticed."""
    if completion.sample is not None:
        return completion.sample
    prompt, tokens = completion.request.prompt, np.array(completion.tokens, dtype=np.int32)
    logprobs = np.array(completion.logprobs, dtype=np.float32)
    return Sample(
        tokens=np.concatenate([prompt, tokens]),
        mask=np.arange(len(prompt) + len(tokens)) >= len(prompt),
        logprobs=np.concatenate([np.zeros(len(prompt), dtype=np.float32), logprobs]),
        finish=completion.finish,
    )


class AgentEndpoint:
    """An HTTP server on this machine's loopback address, whose event loop runs in a thread; `start`, then `close`."""

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int], seconds: float, sockets: list[socket.socket]) -> None:
        """`seconds`: the time limit of one request; `sockets`: to listen on, of the loopback address."""
        self.seconds, self.sockets = seconds, sockets
        # A tokenizer is not thread-safe: the event loop has a copy, and the thread that reads requests another.
        self.tokenizer: Any = copy.deepcopy(tokenizer)
        self.token_texts = TokenTexts(self.tokenizer)
        own: Any = copy.deepcopy(tokenizer)
        self.chat = ChatRenderer(own, TokenEncoder(own))
        self.format = MessageFormat(own, stop_ids, "this model")
        self.prompt_thread = ThreadPoolExecutor(1, thread_name_prefix="agent prompts")
        self.conversations: dict[str, AgentConversation] = {}  # by key
        self.thread = threading.Thread(target=lambda: asyncio.run(self.serve()), name="agent endpoint", daemon=True)
        self.ready: Future[asyncio.AbstractEventLoop] = Future()

    def start(self) -> None:
        self.thread.start()
        self.loop = self.ready.result()

    def close(self) -> None:
        """End the server with all its connections."""
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.stop.set)
            self.thread.join()
        self.prompt_thread.shutdown(wait=False, cancel_futures=True)

    async def serve(self) -> None:
        self.stop = asyncio.Event()
        routes = [
            *(Route(path, json_only(self.handler(parse)), methods=["POST"]) for path, parse in PATHS.items()),
            Route("/v1/models", as_handler(models), methods=["GET"]),
        ]
        app = Starlette(
            routes=routes,
            middleware=[Middleware(RequestLifetime, count=lambda path, status: None)],
            exception_handlers={ApiError: api_error, HTTPException: unknown_path, Exception: server_error},
        )
        self.http = HttpServer(app, HttpLimits(BODY_BYTES, self.seconds, self.admit))
        serving = asyncio.ensure_future(self.http.serve(self.sockets))
        self.ready.set_result(asyncio.get_running_loop())
        await self.stop.wait()
        self.http.should_exit = True
        self.http.cut_off()
        await serving

    @contextmanager
    def session(self, engine: CompletionThread, sampling: Sampling, max_prompt_length: int) -> Iterator[AgentSession]:
        """Serve conversations with this engine; its failure is raised in the end."""
        ended: Future[asyncio.Future[None]] = Future()
        self.loop.call_soon_threadsafe(lambda: ended.set_result(engine.start()))
        thread_ended = ended.result()
        session = AgentSession(self, engine, sampling, max_prompt_length)
        try:
            yield session
        finally:
            for conversation in {id(open): open for open in self.conversations.values()}.values():
                if conversation.session is session:
                    session.close(conversation)
            engine.close()
            asyncio.run_coroutine_threadsafe(wait_for(thread_ended), self.loop).result()

    def admit(self, path: str, headers: Headers) -> None:
        """Raise ApiError unless the request has the key of a conversation that is going on."""
        if self.key_of(headers.get(b"authorization", b"").decode("latin-1")) not in self.conversations:
            raise ApiError(401, "the key is not that of a conversation that is going on", code="invalid_api_key")

    @staticmethod
    def key_of(authorization: str) -> str:
        return authorization.removeprefix("Bearer ").strip()

    async def in_prompt_thread(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.prompt_thread, function, *args)

    def handler(self, parse: Parse) -> Handler:
        return lambda http_request: self.respond(http_request, parse)

    async def respond(self, http_request: HttpRequest, parse: Parse) -> Response:
        started = time.monotonic()
        key = self.key_of(http_request.headers.get("authorization", ""))
        conversation = self.conversations.get(key)
        if conversation is None:  # it ended while the body arrived
            raise ApiError(401, "the key is not that of a conversation that is going on", code="invalid_api_key")
        conversation.by_process_key = conversation.by_process_key or key != conversation.key
        request, turn = await self.in_prompt_thread(conversation.read, await http_request.body(), parse)
        completions = pending_completions(request, [turn.prompt])
        response = AgentResponse(conversation, turn, request, completions, started)
        conversation.session.engine.submit(completions)
        if request.stream:
            return EventStream(response.events(), response.close)
        return Response(json.dumps(await response.whole(), ensure_ascii=False), media_type="application/json")


async def wait_for(future: asyncio.Future[None]) -> None:
    await future


def models(_: HttpRequest) -> Response:
    model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "posttrain"}
    return JSONResponse({"object": "list", "data": [model]})


async def unknown_path(request: HttpRequest, error: Exception) -> Response:
    path = str(request.scope["path"])
    there = " and ".join(PATHS)
    return ApiError(404, f"unknown path {path[:80]}; agents in training have {there}", code="unknown_url").response()
