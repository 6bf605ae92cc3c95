"""Errors of the API: raised anywhere in the server, sent to the client in the shape that OpenAI's clients read."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """Ends a request with this status and message."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        """`param`: the field of the request that is wrong; `code`: a word that programs can test for."""
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {"Retry-After": "1"} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), self.status, headers)
