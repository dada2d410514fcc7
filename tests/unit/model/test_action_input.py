"""What a caller hands to an environment or an action is checked by one set of rules."""

import pytest

from slackwater.model.action_input import FILES_MOST, check_command, check_file_names
from slackwater.model.errors import ConfigError


@pytest.mark.parametrize("name", ["a", "a/b/c", "./a", "a//b", "ünïcode", "with space", "..."])
def test_an_ordinary_file_name_is_taken(name: str) -> None:
    check_file_names([name])


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["a\0b"], "without NUL"),
        (["\ud800"], "surrogates"),
        (["../a"], "inside the environment"),
        (["/a"], "inside the environment"),
        (["a/.."], "inside the environment"),
        (["."], "inside the environment"),
        (["x" * 256], "components of at most 255 bytes"),
        (["/".join(["y" * 200] * 20)], "at most 3072 bytes"),
        (["a", "a/b"], "a file or a folder, not both"),
        ([str(number) for number in range(FILES_MOST + 1)], "must be fewer"),
    ],
)
def test_a_file_name_that_cannot_be_is_refused(names: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=r"^files: ") as refused:
        check_file_names(names)
    assert why in str(refused.value)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    ("command", "variables", "field"),
    [
        (["echo", "a\0"], {}, "command"),
        (["echo"], {"A": "\0"}, "variables"),
        (["echo"], {"A=": ""}, "variables"),
        (["echo"], {"": ""}, "variables"),
        (["echo"], {"\ud800": ""}, "variables"),
    ],
)
def test_what_no_process_can_be_started_with_is_refused(
    command: list[str], variables: dict[str, str], field: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        check_command(command, variables)
