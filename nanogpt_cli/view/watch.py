"""The page of `nanogpt watch`: what run directories hold, as JSON, and a server for this machine alone.

The page says how far it has read, so that of a long run only new lines travel. Names, samples and settings are texts
of others: they leave here as JSON, and the page shows them by textContent alone.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from importlib.util import find_spec
from string import Template
from typing import Any
from urllib.parse import parse_qs, urlsplit

from nanogpt_cli.errors import UserError
from nanogpt_cli.runs.directory import RunDirectory
from nanogpt_cli.runs.facts import run_facts
from nanogpt_cli.runs.lock import holder
from nanogpt_cli.runs.metrics import columns, last_lines, parse_lines, read_after

HOSTS = ("127.0.0.1", "localhost")
POLICY = "default-src 'none'; connect-src 'self'; img-src data:; style-src 'unsafe-inline'; script-src"
TRAIN = ("step", "loss", "lr", "grad_norm", "tokens_per_s", "mfu", "tokens", "time_s")
VAL = ("step", "val_loss")
MOST_POINTS = 4000  # of a curve at once; no screen shows more
SHOWN_FIRST = 6  # of many runs, the newest
LAST = 50  # samples, and notes


def state(runs: Sequence[RunDirectory], wanted: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Every run by path and name, and of some what is new: `wanted` gives their paths and how far each was read."""
    if wanted is None:
        newest = sorted(runs, key=lambda run: run.metrics.stat().st_mtime if run.metrics.is_file() else 0)
        wanted = {str(run.path): "" for run in newest[-SHOWN_FIRST:]}
    listed = []
    for run in runs:
        path = str(run.path)
        one = {"path": path, "name": run.name, "running": holder(run.path) is not None}
        listed.append(one | (_news(run, wanted[path]) if path in wanted else {}))
    return listed


def _news(run: RunDirectory, read: str) -> dict[str, Any]:
    lines, read, whole = read_after(run.metrics, read)
    samples = [{"step": line["step"], "text": str(line.get("text"))} for line in parse_lines(last_lines(run.samples))]
    notes = [line for line in last_lines(run.log_file) if line.startswith(b"note: ")]
    checkpoints = [(path, path.stat()) for path in sorted(run.path.glob("*.pt")) if path.is_file()]
    return {
        "read": read,
        "train": columns([line for line in lines if "loss" in line], TRAIN, MOST_POINTS),
        "val": columns([line for line in lines if "val_loss" in line], VAL, MOST_POINTS),
        "samples": samples[-LAST:],
        "notes": [line.decode(errors="replace") for line in notes[-LAST:]],
        "checkpoints": [(path.name, there.st_size, there.st_mtime) for path, there in checkpoints],
        "facts": asdict(run_facts(run)) if whole else None,
    }


def page(runs: Sequence[RunDirectory] | None = None) -> bytes:
    """The page with all it needs inside; given runs, with all that it shows of them, to be opened without a server.

    Raises:
        UserError: plotly is missing.
    """
    if find_spec("plotly") is None:
        raise UserError("watch needs plotly, which draws its charts. Install it with: pip install plotly")
    folder, data = files("nanogpt_cli.view") / "page", ""
    if runs is not None:
        shown = state(runs, {str(run.path): "" for run in runs})
        data = json.dumps(shown, allow_nan=False).replace("<", "\\u003c")
    places = {"plotly": files("plotly") / "package_data" / "plotly.min.js", "script": folder / "page.js"}
    scripts = {key: place.read_text("utf-8").replace("</script", "<\\/script") for key, place in places.items()}
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts.values())
    policy = " ".join([POLICY, *(f"'sha256-{digest}'" for digest in digests)])
    html, css = ((folder / name).read_text("utf-8") for name in ("page.html", "page.css"))
    return Template(html).substitute(scripts, css=css, data=data, policy=policy).encode()


class Handler(BaseHTTPRequestHandler):
    """Answers with the page and with `data`; everything else is refused."""

    server: "Server"
    timeout = 60  # seconds

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        name, query = url.path.removeprefix("/"), parse_qs(url.query, keep_blank_values=True)
        # a site whose name was made to point here (DNS rebinding) sends its own name
        if self.headers.get("Host", "").partition(":")[0] not in HOSTS:
            self._answer(403, "text/plain", b"This page answers to 127.0.0.1 and localhost alone.\n")
        elif name == "data":
            wanted = None if "first" in query else dict(zip(query.get("run", []), query.get("read", []), strict=False))
            text = json.dumps(state(self.server.find_runs(), wanted), allow_nan=False)
            self._answer(200, "application/json", text.encode())
        elif name == "":
            self._answer(200, "text/html", self.server.page)
        else:
            self._answer(404, "text/plain", b"There is nothing here.\n")

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", "frame-ancestors 'none'")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal is the user's."""


class Server(ThreadingHTTPServer):
    """Listens on 127.0.0.1, port 0 being any; `find_runs` is asked at every look, so that new runs appear.

    Raises:
        UserError: plotly is missing, or the port cannot be had.
    """

    daemon_threads = True

    def __init__(self, find_runs: Callable[[], Sequence[RunDirectory]], port: int) -> None:
        self.find_runs, self.page = find_runs, page()
        try:
            super().__init__((HOSTS[0], port), Handler)
        except OSError as error:
            raise UserError(f"--port {port}: {error.strerror}. Choose another; 0 takes any free one.") from None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that left, or a run that did while it was read: the page asks again."""
