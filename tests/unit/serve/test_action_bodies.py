"""The action API refuses at its door what no worker could do."""

import pytest

from slackwater.model.errors import ConfigError
from slackwater.model.ids import TenantId
from slackwater.model.tenant_limits import TenantLimits
from slackwater.serve.actions.bodies import ActionBody, EnvironmentBody

TENANT = TenantId("t")


@pytest.mark.parametrize("name", ["a\0b", "../a", "/a", "", "x" * 256, "/".join("d" * 65)])
def test_a_file_name_that_cannot_be_is_refused_with_one_clear_error(name: str) -> None:
    body = EnvironmentBody(files={name: ""})
    with pytest.raises(ConfigError, match=r"^files: .* must "):
        body.to_request(TENANT, TenantLimits())


def test_a_command_or_variable_with_nul_is_refused_with_one_clear_error() -> None:
    with pytest.raises(ConfigError, match=r"^command: "):
        ActionBody(command=["echo", "a\0"]).to_request(TENANT, TenantLimits())
    with pytest.raises(ConfigError, match=r"^variables: "):
        ActionBody(command=["echo"], variables={"A": "\0"}).to_request(TENANT, TenantLimits())
