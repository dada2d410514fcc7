"""The control plane's HTTP application; front ends (`front/app.py`) forward requests to it."""

from fastapi import FastAPI

from slackwater.runtime.plane import ControlPlane
from slackwater.serve.actions.api import (
    action_routes,
    environment_routes,
    limit_routes,
    permit_routes,
)
from slackwater.serve.actions.run_code import run_code_routes
from slackwater.serve.dashboard.live import LiveSource
from slackwater.serve.dashboard.routes import dashboard_routes
from slackwater.serve.http.application import App
from slackwater.serve.http.auth import find_tenant
from slackwater.serve.http.errors import add_error_handlers
from slackwater.serve.http.fast_path import FastPathMiddleware
from slackwater.serve.http.whole_bodies import WholeBodies
from slackwater.serve.openai.extras import health_routes, refusal_routes
from slackwater.serve.openai.models import model_routes
from slackwater.serve.operator.coschedule import coschedule_routes
from slackwater.serve.operator.instances import instance_routes, node_routes
from slackwater.serve.operator.jobs import job_routes
from slackwater.serve.operator.status import operator_routes
from slackwater.serve.tinker.records import Downloads, download_routes, record_routes
from slackwater.serve.tinker.rest import checkpoint_change_routes, rest_routes
from slackwater.serve.tinker.sampling import future_routes, sampling_routes
from slackwater.serve.tinker.service import service_routes
from slackwater.serve.tinker.sessions import session_life_routes, session_list_routes
from slackwater.serve.tinker.tokenizers import tokenizer_routes
from slackwater.serve.tinker.training import TrainingHandlers, training_routes


def create_app(plane: ControlPlane) -> FastAPI:
    """Each route parses, calls the control plane and answers; error handlers map exceptions."""
    app = App()
    app.state.plane = plane
    training = TrainingHandlers(plane)
    add_error_handlers(app, training.reject_invalid)
    downloads = Downloads(plane.settings.state / "downloads")
    app.state.dashboard = LiveSource(plane)
    routers = (
        future_routes(plane),
        sampling_routes(plane),
        model_routes(plane),
        training_routes(training),
        action_routes(plane),
        environment_routes(plane),
        permit_routes(plane),
        limit_routes(plane),
        run_code_routes(plane),
        session_life_routes(plane),
        service_routes(plane),
        operator_routes(plane),
        job_routes(plane),
        coschedule_routes(plane),
        instance_routes(plane),
        node_routes(plane),
        tokenizer_routes(plane),
        rest_routes(plane),
        checkpoint_change_routes(plane),
        session_list_routes(plane),
        record_routes(plane, downloads),
        download_routes(downloads),
        health_routes(),
        refusal_routes(),
        dashboard_routes(app.state.dashboard),
    )
    for router in routers:  # routes are matched in order
        app.include_router(router)
    app.front = WholeBodies(
        FastPathMiddleware(app.behind, (route for router in routers for route in router.routes)),
        tenant_of=lambda headers: find_tenant(plane.tenants, headers),
    )
    return app
