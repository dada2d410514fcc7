"""How commands ask a service: cheaply, without leaving files, with errors that name the field."""

import ssl
from pathlib import Path
from typing import Annotated

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field, ValidationError
from typer.testing import CliRunner

from slackwater.cli.main import app
from slackwater.cli.running_service import ServiceClient
from slackwater.model.errors import ConfigError
from slackwater.serve.http.errors import validation_message


@pytest.mark.parametrize(("scheme", "most"), [("http", 0), ("https", 1)])
def test_clients_read_certificates_at_most_once_and_never_without_tls(
    scheme: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[ssl.SSLContext] = []
    load = ssl.SSLContext.load_verify_locations

    def loaded(self: ssl.SSLContext, *given: str, **named: str) -> None:
        read.append(self)
        load(self, *given, **named)

    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", loaded)
    for _ in range(3):
        ServiceClient(f"{scheme}://127.0.0.1:1", "key")
    assert len(read) <= most
    assert all(context.verify_mode is ssl.CERT_REQUIRED for context in read)


def test_a_number_that_json_does_not_have_is_named_before_it_is_sent() -> None:
    client = ServiceClient("http://127.0.0.1:1", "key")
    with pytest.raises(ConfigError, match=r"limits\.limit_s: nan must be a finite number"):
        client.send("POST", "/", {"limits": {"limit_s": float("nan")}})


@pytest.mark.parametrize("ask", [["status"], ["down"], ["job", "list"], ["node", "token", "n"]])
def test_asking_for_a_service_that_does_not_run_makes_no_folder(
    ask: list[str], tmp_path: Path
) -> None:
    CliRunner().invoke(app, [*ask, "--state", str(tmp_path / "none")])
    assert not (tmp_path / "none").exists()


def test_a_wrong_field_of_a_request_has_its_value_and_no_types_of_pydantic() -> None:
    with pytest.raises(ValidationError) as raised:
        Asked.model_validate({"cores": 0, "limit_s": -1.5})
    wrong = validation_message(RequestValidationError(raised.value.errors()))
    assert wrong == (
        "cores: 0 must be greater than or equal to 1, or must be a valid list; "
        "limit_s: -1.5 must be greater than 0"
    )


class Asked(BaseModel):
    cores: Annotated[int, Field(ge=1)] | list[Annotated[int, Field(ge=1)]]
    limit_s: Annotated[float, Field(gt=0)]
