"""The run console as an application: ``rayloop console RUN`` serves it.

It only reads, and needs neither Ray nor torch.
"""

import hashlib
import hmac
import logging
import threading
import time
from collections.abc import Awaitable, Callable

import jinja2
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response

from rayloop.core.failures import RayloopError
from rayloop.run.folder import RunFolder
from rayloop.run.records.metrics import Metric, prometheus
from rayloop.serve_apps.console.content import TABLE_ROWS, Absent, Console, flat_json, said
from rayloop.view.filmstrip import cut
from rayloop.view.formatting import span
from rayloop.view.page import templates
from rayloop.view.reader import Record
from rayloop.web import addressed, bearer

logger = logging.getLogger(__name__)

Next = Callable[[Request], Awaitable[Response]]

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; img-src 'self'; style-src 'self'; script-src 'self'; connect-src"
        " 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_PICTURE_HEADERS = {"Cache-Control": "private, max-age=86400"}
_FILE_TYPES = {
    "page.css": "text/css",
    "console.css": "text/css",
    "console.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
"""Media types of the pages' files, by name."""
PAGES: dict[str, Callable[..., Record]] = {
    "/": Console.overview,
    "/curves": Console.curves,
    "/step/{step:int}": Console.step,
    "/step/{step:int}/group/{number:int}": Console.group,
    "/step/{step:int}/group/{number:int}/sample/{sample:int}": Console.episode,
    "/rollouts": Console.rollouts,
    "/evaluations": Console.evaluations,
    "/evaluations/{before:int}/{after:int}": Console.pair,
    "/configuration": Console.configuration,
    "/events": Console.events,
    "/judge": Console.judge,
}
"""The content of each page, by its path; the method has the name of the template.

A path stays the same as long as the run's folder exists.
"""
_COOKIE_DIGEST_CHARACTERS = 8


class Pages:
    """Makes the pages' HTML from the templates and the content of the console."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.environment = templates(jinja2.PackageLoader("rayloop.serve_apps.console", "pages"))
        self.environment.globals["ROWS"] = TABLE_ROWS
        self.environment.filters |= {
            "cut": cut,
            "flat": flat_json,
            "meaning": _metric_row,
            "said": said,
            "span": span,
            "when": _utc_time,
        }

    def html(self, request: Request, name: str, content: Record, status: int = 200) -> Response:
        """The page of a template."""
        address = {"root": request.scope.get("root_path", ""), "path": request.url.path}
        html = self.environment.get_template(f"{name}.html").render(page=name, **address, **content)
        return Response(html.encode(errors="replace"), status, media_type="text/html")

    def refusal(self, request: Request, error: Exception) -> Response:
        """The page that explains the refusal."""
        if isinstance(error, HTTPException):
            return self.html(request, "refused", {"why": error.detail}, error.status_code)
        status = 404 if isinstance(error, Absent) else 400
        return self.html(request, "refused", {"why": str(error)}, status)

    def route(self, content: Callable[..., Record]) -> Callable[[Request], Response]:
        """A route to a page.

        A client that sends the stamp of its copy gets 304 while nothing has changed.
        """

        def answer(request: Request) -> Response:
            stamp = f'W/"{self.console.stamp()}"'
            if request.headers.get("If-None-Match") == stamp:
                response = Response(status_code=304)
            else:
                metrics = self.console.metrics.records()
                common = {
                    "stamp": stamp,
                    "name": self.console.folder.path.name,
                    "last": metrics[-1]["step"] if metrics else 0,
                }
                record = content(self.console, request.query_params, **request.path_params)
                response = self.html(request, content.__name__, common | record)
            response.headers["ETag"] = stamp
            return response

        return answer


def _metric_row(name: str) -> Metric:
    row, _ = prometheus(name)
    return row


def _utc_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))


def web(folder: RunFolder, token: str) -> FastAPI:
    """The console of the run.

    A browser shows the ``token`` once (``?token=``) and keeps it as a cookie; a program shows it as
    a bearer key; "" admits everybody. Rollouts are read in a thread. Raises ConfigError when
    ``report.boxes`` cannot be loaded.
    """
    console = Console(folder)
    pages = Pages(console)
    # The first call imports the libraries that draw the charts.
    console.curves({})
    threading.Thread(target=console.index.update, daemon=True).start()

    app = FastAPI(title="rayloop console", docs_url=None, redoc_url=None, openapi_url=None)
    app.middleware("http")(guard(token, pages.refusal))
    for error in (HTTPException, Absent, RayloopError, ValueError):
        app.add_exception_handler(error, pages.refusal)
    for path, content in PAGES.items():
        app.add_route(path, pages.route(content))

    @app.get("/file/{name}")
    def file(name: str) -> Response:
        if name not in _FILE_TYPES:
            raise Absent(f"the file {name} does not exist")
        text = pages.environment.get_template(name).render()
        return Response(text, media_type=_FILE_TYPES[name])

    @app.get("/picture/{place}/{name:path}")
    def picture(place: int, name: str) -> Response:
        data, media_type = console.picture(place, name)
        return Response(data, media_type=media_type, headers=_PICTURE_HEADERS)

    return app


def guard(
    token: str, refused: Callable[[Request, Exception], Response]
) -> Callable[..., Awaitable[Response]]:
    """Middleware that admits requests with the token, and adds ``HEADERS`` to every answer."""
    digest = hashlib.sha256(token.encode()).hexdigest()[:_COOKIE_DIGEST_CHARACTERS]
    # A browser sends cookies to all ports of a host, so each token has its own name.
    cookie = f"rayloop_{digest}"

    def is_token(text: str) -> bool:
        # As bytes: ``compare_digest`` refuses texts with other characters than ASCII.
        return hmac.compare_digest(text.encode(), token.encode())

    def is_admitted(request: Request) -> bool:
        if not token or is_token(request.cookies.get(cookie, "")):
            return True
        return is_token(bearer(request.scope).decode(errors="replace"))

    async def response_of(request: Request, call_next: Next) -> Response:
        if not token and not addressed(request.scope):
            message = "Without a token it answers to its address or localhost."
            return refused(request, HTTPException(421, message))
        if token and is_token(request.query_params.get("token", "")):
            # A browser's history keeps addresses, so the token must not stay in this one.
            redirect = RedirectResponse(str(request.url.remove_query_params("token")), 303)
            redirect.set_cookie(cookie, token, httponly=True, samesite="lax")
            return redirect
        if not is_admitted(request):
            message = "Open the address with ?token= that the console printed."
            return refused(request, HTTPException(401, message))
        try:
            return await call_next(request)
        # Starlette would answer an unexpected error without HEADERS.
        except Exception as error:
            logger.exception("%s failed", request.url.path)
            message = (
                f"This page cannot be shown: {type(error).__name__}. The console's output says"
                " more."
            )
            return refused(request, HTTPException(500, message))

    async def answer(request: Request, call_next: Next) -> Response:
        response = await response_of(request, call_next)
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    return answer
