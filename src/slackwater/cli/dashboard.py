"""`slackwater dashboard`: show a recorded run or the running service in a browser."""

from pathlib import Path
from typing import Annotated

import typer

from slackwater.cli.up_options import DEFAULT_STATE

app = typer.Typer(add_completion=False)


@app.command()
def dashboard(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN",
            help="A trace, or the folder of a demo, a service or a training run. "
            "Default: the running service.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Port of a recorded run's page; 0 picks a free one."),
    ] = 0,
    print_only: Annotated[
        bool, typer.Option("--print", help="Print the address and open no browser.")
    ] = False,
    state: Annotated[Path, typer.Option(help="The running service's folder.")] = DEFAULT_STATE,
) -> None:
    """Show a run in the browser: the fleet's timeline, jobs and curves. Ctrl-C ends it."""
    if run is None:
        from slackwater.cli.running_service import find_service

        url, _ = find_service(None, None, state, or_by_url=False)
        _show(f"{url}/dashboard", print_only)
        return
    from fastapi import FastAPI

    from slackwater.serve.dashboard.recorded import RecordedSource
    from slackwater.serve.dashboard.routes import dashboard_routes
    from slackwater.serve.http.errors import add_error_handlers
    from slackwater.serve.http.host_check import HostCheck
    from slackwater.serve.http.server import bind

    source = RecordedSource(run)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    add_error_handlers(app)
    app.include_router(dashboard_routes(source))
    listening = bind("127.0.0.1", port)
    # A fragment (#) is never sent with a request: only the page's login uses the key.
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/dashboard#key={source.key}"
    _show(url, print_only)
    import uvicorn

    config = uvicorn.Config(
        HostCheck(app, bound="127.0.0.1"), log_config=None, access_log=False, lifespan="off"
    )
    uvicorn.Server(config).run(sockets=[listening])


def _show(url: str, print_only: bool) -> None:
    import webbrowser

    print(url, flush=True)
    if not print_only:
        webbrowser.open(url)
