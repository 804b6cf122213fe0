"""Serve the page of a run to browsers on this machine.

The server listens on 127.0.0.1 only. Requests must name this host, so that no other site can reach
it through a name of its own. Other users of this machine can connect as well: the address of the
page has a random token, and posts need this token.
"""

import json
import secrets
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from symrazor.report.page import content_digest, embedded_json, fill_template, read_asset
from symrazor.serving.session import Session, decoded_files

HOST = "127.0.0.1"
MAX_BODY_BYTES = 64 << 20
MAX_PORT = 65_535
MAX_LENGTH_DIGITS = 16
TIMEOUT_SECONDS = 60
"""Longest wait for the next part of a request."""
TOKEN_HEADER = "X-Symrazor-Token"
Action = Callable[[Session, Mapping[str, Any]], Any]

ACTIONS: dict[str, Action] = {
    "/open": lambda session, body: session.open(decoded_files(body["files"])),
    "/predict": lambda session, body: session.predict(body["sample"], body["move"]),
    "/sweep": lambda session, body: session.sweep(body["sample"], body["move"], body["control"]),
}
"""Path -> function that answers a POST request to it."""


def play_page(session: Session, token: str) -> tuple[str, str]:
    """Return the page and its content security policy."""
    style = "\n".join((read_asset("page.css"), read_asset("play.css")))
    script = "\n".join(read_asset(name) for name in ("draw.js", "play.js"))
    policy = (
        f"default-src 'none'; img-src data:; style-src '{content_digest(style)}'; "
        f"script-src '{content_digest(script)}'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )
    data = embedded_json({**session.describe(), "token": token})
    return fill_template("play.html", {"style": style, "script": script, "data": data}), policy


class _Handler(BaseHTTPRequestHandler):
    session: ClassVar[Session]
    token: ClassVar[str]
    server_version, sys_version = "symrazor", ""
    timeout = TIMEOUT_SECONDS

    def do_GET(self) -> None:
        if not self._is_local():
            return
        if not self._has_token(self.path.removeprefix("/")):
            text = b"Open the address that symrazor serve has printed."
            self._send(HTTPStatus.NOT_FOUND, text, "text/plain")
            return
        page, policy = play_page(self.session, self.token)
        self._send(HTTPStatus.OK, page.encode(), "text/html; charset=utf-8", policy)

    def do_POST(self) -> None:
        if not self._is_local():
            return
        action = ACTIONS.get(self.path)
        length = self.headers.get("Content-Length", "")
        size = int(length) if length.isdecimal() and len(length) < MAX_LENGTH_DIGITS else None
        if not self._has_token(self.headers.get(TOKEN_HEADER, "")):
            error = "Open the address that symrazor serve has printed last."
            self._send_json(HTTPStatus.FORBIDDEN, {"error": error})
        elif action is None:
            self._send_json(HTTPStatus.NOT_FOUND, {"error": "No such path."})
        elif size is None:
            self._send_json(HTTPStatus.LENGTH_REQUIRED, {"error": "The length is missing."})
        elif size > MAX_BODY_BYTES:
            text = f"The files have more than {MAX_BODY_BYTES >> 20} MiB. Use symrazor predict."
            self._send_json(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {"error": text})
        else:
            try:
                self._send_json(
                    HTTPStatus.OK, action(self.session, json.loads(self.rfile.read(size)))
                )
            except Exception as error:  # wrong requests and untrusted files can raise any error
                text = str(error) or type(error).__name__
                self._send_json(HTTPStatus.BAD_REQUEST, {"error": text})

    def _has_token(self, token: str) -> bool:
        return secrets.compare_digest(token.encode(), self.token.encode())

    def _is_local(self) -> bool:
        """Return whether a request names this host; reject it otherwise."""
        port = int(self.server.server_address[1])  # type: ignore[index]
        if self.headers.get("Host") in (f"{HOST}:{port}", f"localhost:{port}"):
            return True
        self._send(HTTPStatus.FORBIDDEN, b"", "text/plain")
        return False

    def _send_json(self, status: HTTPStatus, value: Any) -> None:
        self._send(status, json.dumps(value, allow_nan=False).encode(), "application/json")

    def _send(self, status: HTTPStatus, content: bytes, kind: str, policy: str = "") -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Content-Security-Policy": policy or "default-src 'none'",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }
        for name, text in headers.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


class PageServer(ThreadingHTTPServer):
    """Serve the page of a session, once it is started; port 0 takes a free one.

    Raises:
        ValueError: the port cannot be used.
    """

    def __init__(self, session: Session, port: int = 0) -> None:
        self.token = secrets.token_urlsafe(24)
        handler = type("Handler", (_Handler,), {"session": session, "token": self.token})
        if not 0 <= port <= MAX_PORT:
            raise ValueError(f"The port must be from 0 to {MAX_PORT:,}, got {port}.")
        try:
            super().__init__((HOST, port), handler)
        except OSError as error:
            raise ValueError(
                f"Cannot use port {port}: {error.strerror}. Omit --port, or choose another one."
            ) from error

    @property
    def address(self) -> str:
        """Address of the page."""
        return f"http://{HOST}:{self.server_address[1]}/{self.token}"


def serve(
    run: Path, question: str | None = None, port: int = 0, tell: Callable[[str], object] = print
) -> None:
    """Serve the page of a run until Ctrl-C.

    Args:
        run: the run folder.
        question: name of the question, if the run has several.
        port: port to listen on; 0 for a free one.
        tell: called with the address.

    Raises:
        ValueError: no such run or question, a run on trajectories, or a port that is in use.
    """
    with PageServer(Session(run, question), port) as server:
        tell(server.address)
        server.serve_forever()
