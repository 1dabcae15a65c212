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
from rayloop.run.records.metrics import prometheus
from rayloop.serve_apps.console.content import ROWS, Absent, Console, flat, said
from rayloop.view.page import templates
from rayloop.view.reader import Record
from rayloop.view.strips import cut
from rayloop.view.words import span
from rayloop.web import addressed, bearer

logger = logging.getLogger(__name__)

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
KEPT = {"Cache-Control": "private, max-age=86400"}
FILES = {
    "page.css": "text/css",
    "console.css": "text/css",
    "console.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
"""Files of the pages -> their types."""
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
"""Address -> what it shows, in the template of that name.

It stays the same for as long as the run's folder is there.
"""


def web(folder: RunFolder, token: str) -> FastAPI:
    """The console of the run.

    A browser shows the ``token`` once (``?token=``) and keeps it as a cookie; a program shows it as
    a bearer key; "" admits everybody. Rollouts are read in a thread. Raises ConfigError when
    ``report.boxes`` cannot be loaded.
    """
    console, environment = (
        Console(folder),
        templates(jinja2.PackageLoader("rayloop.serve_apps.console", "pages")),
    )
    environment.globals["ROWS"] = ROWS
    environment.filters |= {
        "cut": cut,
        "flat": flat,
        "meaning": lambda name: prometheus(name)[0],
        "said": said,
        "span": span,
    }
    environment.filters["when"] = lambda seconds: time.strftime(
        "%Y-%m-%d %H:%M:%S", time.gmtime(seconds)
    )

    def filled(request: Request, name: str, content: Record, status: int = 200) -> Response:
        where = {"root": request.scope.get("root_path", ""), "path": request.url.path}
        html = environment.get_template(f"{name}.html").render(page=name, **where, **content)
        return Response(html.encode(errors="replace"), status, media_type="text/html")

    def refused(request: Request, error: Exception) -> Response:
        """The page that says why there is none."""
        if isinstance(error, HTTPException):
            return filled(request, "refused", {"why": error.detail}, error.status_code)
        return filled(
            request, "refused", {"why": str(error)}, 404 if isinstance(error, Absent) else 400
        )

    def page(content: Callable[..., Record]) -> Callable[[Request], Response]:
        """A route.

        Who asks with the stamp of the page that he has gets 304 while nothing has changed.
        """

        def route(request: Request) -> Response:
            stamp, metrics = f'W/"{console.stamp()}"', console.metrics.records()
            response = Response(status_code=304)
            if request.headers.get("If-None-Match") != stamp:
                known = {
                    "stamp": stamp,
                    "name": folder.path.name,
                    "last": metrics[-1]["step"] if metrics else 0,
                }
                found = content(console, request.query_params, **request.path_params)
                response = filled(request, content.__name__, {**known, **found})
            response.headers["ETag"] = stamp
            return response

        return route

    console.curves({})  # imports what draws them
    threading.Thread(target=console.index.update, daemon=True).start()
    app = FastAPI(title="rayloop console", docs_url=None, redoc_url=None, openapi_url=None)
    app.middleware("http")(guard(token, refused))
    for kind in (HTTPException, Absent, RayloopError, ValueError):
        app.add_exception_handler(kind, refused)
    for path, content in PAGES.items():
        app.add_route(path, page(content))

    @app.get("/file/{name}")
    def file(name: str) -> Response:
        if name not in FILES:
            raise Absent(f"there is no file {name}")
        return Response(environment.get_template(name).render(), media_type=FILES[name])

    @app.get("/picture/{place}/{name:path}")
    def picture(place: int, name: str) -> Response:
        data, kind = console.picture(place, name)
        return Response(data, media_type=kind, headers=KEPT)

    return app


def guard(
    token: str, refused: Callable[[Request, Exception], Response]
) -> Callable[..., Awaitable[Response]]:
    """Middleware: admits who has the token, and adds ``HEADERS`` to every answer."""
    cookie = (  # a browser sends cookies to all ports of a host
        f"rayloop_{hashlib.sha256(token.encode()).hexdigest()[:8]}"
    )

    def fits(text: str) -> bool:
        # As bytes: ``compare_digest`` refuses texts with other characters than ASCII.
        return hmac.compare_digest(text.encode(), token.encode())

    async def answer(request: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
        if not token and not addressed(request.scope):
            response: Response = refused(
                request,
                HTTPException(421, "Without a token it answers to its address or localhost."),
            )
        elif token and fits(request.query_params.get("token", "")):
            # The token leaves the address, which a browser's history keeps.
            response = RedirectResponse(str(request.url.remove_query_params("token")), 303)
            response.set_cookie(cookie, token, httponly=True, samesite="lax")
        elif (
            not token
            or fits(request.cookies.get(cookie, ""))
            or fits(bearer(request.scope).decode(errors="replace"))
        ):
            try:
                response = await go_on(request)
            except Exception as error:  # else an answer without HEADERS
                logger.exception("%s failed", request.url.path)
                why = (
                    f"This page cannot be shown: {type(error).__name__}. The console's output says"
                    " more."
                )
                response = refused(request, HTTPException(500, why))
        else:
            response = refused(
                request,
                HTTPException(401, "Open the address with ?token= that the console printed."),
            )
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    return answer
