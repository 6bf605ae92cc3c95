"""The web server of the board: the page, and the API that it reads."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import math
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from posttrain.board.control import RunControl
from posttrain.board.curves import csv_rows, curves, metric_names
from posttrain.board.evaluations import RunEvaluation, compared, evaluations_of, evaluations_page, main_figure
from posttrain.board.launch import (
    Job,
    Launch,
    Launcher,
    changed_options,
    form,
    presets,
    trainers,
    values_of_preset,
    values_of_run,
)
from posttrain.board.rollouts import ORDERS, Filter, RolloutReader, shared_prompts
from posttrain.board.runs import BoardRun, RunList
from posttrain.core.errors import UsageError
from posttrain.endpoint.errors import ApiError
from posttrain.endpoint.http import (
    Handler,
    HttpServer,
    RequestLifetime,
    address_of,
    api_error,
    check_client,
    check_token,
    json_only,
    listen,
    server_error,
)
from posttrain.endpoint.http_limits import Headers, HttpLimits
from posttrain.plots.runs import XAxis

STATIC = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
MAX_BODY_BYTES = 64 * 2**10
REQUEST_SECONDS = 60.0
DRAIN_SECONDS = 5.0
MAX_RUNS_COMPARED = 20
MAX_PAGE = 200
COMPARED_COMPLETIONS = 8  # of a prompt, per run

# Everything comes from this server. Scripts and styles are files: nothing that a run wrote can become one.
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(kw_only=True, slots=True)
class BoardOptions:
    """Where to listen, what to show, what is allowed."""

    runs: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8400
    token: str = ""
    allow_control: bool = False
    cache: Path | None = None

    def check(self) -> None:
        check_token(self.host, self.token)
        if not 0 <= self.port <= 65535:
            raise UsageError(f"port is {self.port}; it must be from 0 to 65535.")
        assert self.token or not self.allow_control, "control needs a token"


class SecurityHeaders:
    """ASGI middleware: adds the headers to every response."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.headers = [(name.lower().encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *self.headers]
            await send(message)

        await self.app(scope, receive, with_headers)


def as_json(value: Any) -> Response:
    """Encode in ASCII: a completion may hold half of a surrogate pair, which UTF-8 cannot."""
    return Response(json.dumps(value, allow_nan=False), media_type="application/json")


class Query:
    """The parameters of a request, read with their types."""

    def __init__(self, request: HttpRequest) -> None:
        self.values = request.query_params

    def text(self, name: str, default: str = "") -> str:
        return self.values.get(name, default)

    def whole(self, name: str, least: int = -(2**62), most: int = 2**62) -> int | None:
        return self._number(name, int, least, most)

    def number(self, name: str) -> float | None:
        return self._number(name, float, -1e300, 1e300)

    def yes(self, name: str) -> bool | None:
        value = self.text(name)
        if value not in ("", "yes", "no"):
            raise ApiError(400, f"{name}: expected yes or no", param=name)
        return None if not value else value == "yes"

    def choice(self, name: str, choices: Sequence[str]) -> Any:
        value = self.text(name, choices[0])
        if value not in choices:
            raise ApiError(400, f"{name}: expected one of {', '.join(choices)}", param=name)
        return value

    def _number(self, name: str, kind: Callable[[str], Any], least: float, most: float) -> Any:
        value = self.text(name)
        if not value:
            return None
        try:
            found = kind(value)
        except ValueError:
            found = None
        if found is None or not least <= found <= most:
            raise ApiError(400, f"{name}: expected a number, not {value[:40]!r}", param=name)
        return found


class Board:
    """Answers the requests of the page."""

    def __init__(self, options: BoardOptions) -> None:
        self.options = options
        self.list = RunList(options.runs)
        self.readers: dict[str, RolloutReader] = {}
        self.control = RunControl() if options.allow_control else None
        self.launcher = Launcher(self.list.roots)

    # What requests name

    def run(self, run_id: str) -> BoardRun:
        found = self.list.get(run_id)
        if found is None:
            raise ApiError(404, "there is no such run, or not any more")
        return found

    def runs(self, query: Query) -> list[BoardRun]:
        ids = [name for name in query.text("runs").split(",") if name]
        if not 1 <= len(ids) <= MAX_RUNS_COMPARED:
            raise ApiError(400, f"runs: name 1 to {MAX_RUNS_COMPARED} runs", param="runs")
        return [self.run(run_id) for run_id in dict.fromkeys(ids)]

    def reader(self, run: BoardRun) -> RolloutReader:
        return self.readers.setdefault(run.id, RolloutReader(run, self.options.cache))

    # Responses

    def runs_page(self, query: Query) -> Any:
        runs = [run.summary() | {"figure": main_figure(run)} for run in self.list.find()]
        return {"runs": runs, "control": self.control is not None}

    def run_page(self, query: Query) -> Any:
        run = self.run(query.text("run"))
        text, _ = run.log_text("run.log", limit=8192)
        return {
            **run.summary(),
            **run.phases(),
            "checkpoints": run.checkpoints(),
            "log": text.splitlines()[-12:],
            "control": self.control is not None,
            "started": self.control.describe(run) if self.control is not None else None,
        }

    def names_page(self, query: Query) -> Any:
        return {"metrics": metric_names(self.runs(query))}

    def curves_page(self, query: Query) -> Any:
        smoothing = query.number("smoothing") or 0.0
        if not 0 <= smoothing < 1:
            raise ApiError(400, "smoothing: expected a number from 0 to below 1", param="smoothing")
        names = [name for name in query.text("metrics").split(",") if name]
        x_axis: XAxis = query.choice("x_axis", get_args(XAxis))
        first, last = query.number("x_from"), query.number("x_to")
        shown = (-math.inf if first is None else first, math.inf if last is None else last)
        return {"runs": curves(self.runs(query), names, x_axis, smoothing, shown)}

    def csv_page(self, query: Query) -> Any:
        names = [name for name in query.text("metrics").split(",") if name]
        text = io.StringIO()
        csv.writer(text).writerows(csv_rows(self.runs(query), names))
        return Response(text.getvalue().encode("utf-8", "backslashreplace"), media_type="text/csv")

    def completions_page(self, query: Query) -> Any:
        wanted = Filter(
            step=query.whole("step"),
            group=query.whole("group"),
            prompt=query.whole("prompt", 0, 2**64 - 1),
            min_reward=query.number("min_reward"),
            max_reward=query.number("max_reward"),
            min_length=query.whole("min_length", 0),
            max_length=query.whole("max_length", 0),
            failed=query.yes("failed"),
            truncated=query.yes("truncated"),
            many_turns=query.yes("many_turns"),
            text=query.text("text"),
            order=query.choice("order", ORDERS),
        )
        offset, limit = query.whole("offset", 0) or 0, query.whole("limit", 1, MAX_PAGE) or 50
        return self.reader(self.run(query.text("run"))).page(wanted, offset, limit)

    def completion_page(self, query: Query) -> Any:
        found = self.reader(self.run(query.text("run"))).completion(query.whole("number", 0) or 0)
        return found or missing("completion")

    def group_page(self, query: Query) -> Any:
        found = self.reader(self.run(query.text("run"))).group(query.whole("number", 0) or 0)
        return found or missing("completion")

    def prompts_page(self, query: Query) -> Any:
        return shared_prompts([self.reader(run) for run in self.runs(query)])

    def prompt_page(self, query: Query) -> Any:
        prompt = query.whole("prompt", 0, 2**64 - 1)
        if prompt is None:
            raise ApiError(400, "prompt: is not set", param="prompt")
        return {
            "runs": [
                {"run": run.id, "completions": self.reader(run).of_prompt(prompt, COMPARED_COMPLETIONS)}
                for run in self.runs(query)
            ]
        }

    def config_page(self, query: Query) -> Any:
        found = [run.config() for run in self.runs(query)]
        names = dict.fromkeys(name for config in found for name in config)
        changed = changed_options(self.runs(query)[0]) if len(found) == 1 else set()
        return {
            "options": [
                {
                    "name": name[:200],
                    "values": [option_text(config[name]) if name in config else None for config in found],
                    "changed": name in changed,
                }
                for name in list(names)[:2000]
            ],
            "texts": [run.config_text() for run in self.runs(query)],
        }

    def log_page(self, query: Query) -> Any:
        run = self.run(query.text("run"))
        names = run.log_files()
        name = query.text("file", names[0] if names else "")
        text, size = run.log_text(name)
        return {"files": names, "file": name, "text": text, "bytes": size}

    def examples_page(self, query: Query) -> Any:
        return {"examples": bounded(self.run(query.text("run")).examples())}

    def evaluations_page(self, query: Query) -> Any:
        return evaluations_page(self.run(query.text("run")), self.list.find())

    def pairs_page(self, query: Query) -> Any:
        return compared(self.evaluation(query.text("first")), self.evaluation(query.text("second")))

    def evaluation(self, name: str) -> RunEvaluation:
        found = next((each for each in evaluations_of(self.run(name.partition(".")[0])) if each.id == name), None)
        return found or missing("evaluation")

    # Control

    def stop(self, body: dict[str, Any]) -> Any:
        return {"process": self.allowed().stop(self.run(str(body.get("run", ""))))}

    def resume(self, body: dict[str, Any]) -> Any:
        return {"command": self.allowed().resume(self.run(str(body.get("run", ""))))}

    def allowed(self) -> RunControl:
        if self.control is None:
            raise ApiError(403, "this board only reads; start it with --allow_control to start, stop and resume runs")
        return self.control

    # The launch form. What reads files outside the run directories, or starts a process, needs a token.

    def with_token(self) -> Launcher:
        if not self.options.token:
            raise ApiError(
                403,
                "this board reads nothing but runs; start it with --allow_control or a token for checks and presets",
            )
        return self.launcher

    def trainers_page(self, query: Query) -> Any:
        return {"trainers": trainers(), "checks": bool(self.options.token), "control": self.control is not None}

    def form_page(self, query: Query) -> Any:
        verb = query.text("trainer")
        return {"options": form(verb), "presets": presets(verb) if self.options.token else []}

    def values_page(self, query: Query) -> Any:
        if query.text("run"):
            return values_of_run(self.run(query.text("run")))
        self.with_token()
        return values_of_preset(query.text("trainer"), query.text("preset"))

    def job_page(self, query: Query) -> Any:
        return self.job_description(self.with_token().get(query.text("job")))

    def jobs_page(self, query: Query) -> Any:
        """Return the runs that this board has started, the newest first."""
        jobs = list(self.launcher.jobs.values()) if self.options.token else []
        return {"jobs": [self.job_description(job) for job in reversed(jobs) if job.kind == "run"][:20]}

    def job_description(self, job: Job) -> dict[str, Any]:
        folder = job.output_dir
        known = next((run.id for run in self.list.find() if str(run.folder.path) == folder), "") if folder else ""
        return job.describe() | {"run": known}

    def preview(self, body: dict[str, Any]) -> Any:
        """Return the command and the YAML of chosen values; nothing is read or started."""
        try:
            launch = Launch.read(body)
        except UsageError as error:  # a value that an option cannot have; the form is being filled in
            return {"command": "", "yaml": "", "problem": str(error)}
        return {"command": launch.command, "yaml": launch.yaml, "problem": launch.problem}

    def check(self, body: dict[str, Any]) -> Any:
        return self.job_description(self.with_token().check(str(body.get("check", "")), Launch.read(body)))

    def launch(self, body: dict[str, Any]) -> Any:
        self.allowed()
        return self.job_description(self.launcher.launch(body))


def missing(what: str) -> Any:
    raise ApiError(404, f"there is no such {what}")


def option_text(value: Any) -> str:
    return (value if isinstance(value, str) else json.dumps(value, default=str))[:2000]


def bounded(value: Any, depth: int = 6) -> Any:
    """Return JSON values with long texts, long lists and deep levels cut off, and without NaN."""
    if isinstance(value, str):
        return value[:200_000]
    if isinstance(value, dict) and depth:
        return {str(name)[:200]: bounded(inner, depth - 1) for name, inner in list(value.items())[:200]}
    if isinstance(value, list) and depth:
        return [bounded(inner, depth - 1) for inner in value[:200]]
    return value if value is None or isinstance(value, bool | int) else str(value)[:2000]


class BoardServer:
    """Serves the page and the API until a signal arrives."""

    def __init__(self, options: BoardOptions) -> None:
        self.options, self.board = options, Board(options)
        board = self.board
        read: dict[str, Callable[[Query], Any]] = {
            "/api/runs": board.runs_page,
            "/api/run": board.run_page,
            "/api/metrics": board.names_page,
            "/api/curves": board.curves_page,
            "/api/csv": board.csv_page,
            "/api/completions": board.completions_page,
            "/api/completion": board.completion_page,
            "/api/group": board.group_page,
            "/api/prompts": board.prompts_page,
            "/api/prompt": board.prompt_page,
            "/api/config": board.config_page,
            "/api/log": board.log_page,
            "/api/examples": board.examples_page,
            "/api/evaluations": board.evaluations_page,
            "/api/pairs": board.pairs_page,
            "/api/trainers": board.trainers_page,
            "/api/form": board.form_page,
            "/api/values": board.values_page,
            "/api/job": board.job_page,
            "/api/jobs": board.jobs_page,
        }
        change: dict[str, Callable[[dict[str, Any]], Any]] = {
            "/api/stop": board.stop,
            "/api/resume": board.resume,
            "/api/preview": board.preview,
            "/api/check": board.check,
            "/api/launch": board.launch,
        }
        routes = [Route(path, page_handler(page), methods=["GET"]) for path, page in static_files().items()]
        routes += [Route(path, read_handler(answer), methods=["GET"]) for path, answer in read.items()]
        routes += [Route(path, json_only(change_handler(act)), methods=["POST"]) for path, act in change.items()]
        self.app = Starlette(
            routes=routes,
            middleware=[Middleware(SecurityHeaders), Middleware(RequestLifetime, count=lambda path, status: None)],
            exception_handlers={
                ApiError: api_error,
                UsageError: usage_error,
                HTTPException: http_error,
                Exception: server_error,
            },
        )
        self.app.router.redirect_slashes = False
        self.http = HttpServer(self.app, HttpLimits(MAX_BODY_BYTES, REQUEST_SECONDS, self.admit))

    def admit(self, path: str, headers: Headers) -> None:
        """Raise ApiError unless the client may send this request. The page itself holds nothing of a run."""
        if path.startswith("/api/") or not self.options.token:
            check_client(headers, self.options.token)

    async def run(self, ready: Callable[[str], None]) -> int:
        """Serve until a signal arrives; return 0 after SIGTERM, 130 after Ctrl-C."""
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        signals: list[int] = []

        def received(number: int) -> None:
            signals.append(number)
            stop.set()

        sockets = listen(self.options.host, self.options.port)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, received, number)
        try:
            serving = asyncio.ensure_future(self.http.serve(sockets))
            ready(address_of(self.options.host, sockets))
            await stop.wait()
            self.http.should_exit = True
            await asyncio.wait((serving,), timeout=DRAIN_SECONDS)
            self.http.cut_off()
            await asyncio.wait((serving,), timeout=DRAIN_SECONDS)
        finally:
            self.board.launcher.end_checks()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
        return 130 if signal.SIGINT in signals else 0


def static_files() -> dict[str, tuple[bytes, str]]:
    """Return the files of the page by path."""
    found: dict[str, tuple[bytes, str]] = {}
    for file in files("posttrain.board").joinpath("static").iterdir():
        kind = STATIC.get(Path(file.name).suffix)
        if kind is not None:
            path = "/" if file.name == "index.html" else f"/static/{file.name}"
            found[path] = (file.read_bytes(), f"{kind}; charset=utf-8")
    return found


def page_handler(page: tuple[bytes, str]) -> Handler:
    async def handle(_: HttpRequest) -> Response:
        return Response(page[0], media_type=page[1])

    return handle


def read_handler(answer: Callable[[Query], Any]) -> Handler:
    async def handle(request: HttpRequest) -> Response:
        found = await run_in_threadpool(lambda: answer(Query(request)))
        return found if isinstance(found, Response) else as_json(found)

    return handle


def change_handler(act: Callable[[dict[str, Any]], Any]) -> Handler:
    async def handle(request: HttpRequest) -> Response:
        try:
            body = json.loads(await request.body())
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            raise ApiError(400, "the body is not a JSON object")
        return as_json(await run_in_threadpool(act, body))

    return handle


async def usage_error(_: HttpRequest, error: Exception) -> Response:
    """Respond to options that the launch form has sent and a command would refuse."""
    return ApiError(400, str(error)).response()


async def http_error(request: HttpRequest, error: Exception) -> Response:
    """Respond to what Starlette's router raises: an unknown path, or another method."""
    assert isinstance(error, HTTPException)
    path = str(request.scope["path"])[:80]
    if error.status_code == 405:
        return ApiError(405, f"{path} does not accept {request.method[:10]}").response()
    return ApiError(404, f"unknown path {path}", code="unknown_url").response()
