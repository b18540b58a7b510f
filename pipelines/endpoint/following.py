"""The HTTP server of `vlmdistill report --serve`: one page that follows its workspace."""

from collections.abc import Sequence

from fastapi import FastAPI, Request
from fastapi.responses import Response

from vlmdistill.pipelines.endpoint.hosting import application, explained, page
from vlmdistill.pipelines.report.live import LiveReport


def build_page_app(report: LiveReport, hosts: Sequence[str]) -> FastAPI:
    """The application: `GET /` gives the page, or status 304 to whom has its latest version.

    Nothing else is served, no file by its name. The page is without a key, so it is for this machine; a
    request's Host header must be one of `hosts`.
    """
    app = application(None, hosts, explained)

    @app.get("/", include_in_schema=False)
    def index(request: Request) -> Response:  # in a thread: it reads files
        version = report.version()
        tag = {"ETag": f'"{version.tag}"', "Cache-Control": "no-cache"}
        if request.headers.get("if-none-match") == tag["ETag"]:
            return Response(status_code=304, headers=tag)
        return page(version.html, version.script, **tag)

    return app
