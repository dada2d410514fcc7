"""A Mooncake Store's URL, before any store is asked."""

import pytest

from slackwater.model.errors import ConfigError
from slackwater.weights.mooncake import MooncakeWeightStore


def test_a_url_that_cannot_be_one_is_named() -> None:
    for url in (
        "mooncake://host",
        "http://host:1/x",
        "mooncake://h:1/x?lend_mb=many",
        "mooncake://h:1/?z=1",
    ):
        with pytest.raises(ConfigError, match="mooncake://MASTER:PORT"):
            MooncakeWeightStore(url)
