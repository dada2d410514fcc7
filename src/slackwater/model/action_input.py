"""Checks of callers' input to environments and actions: file names, commands, variables.

The HTTP layer and the sandbox worker use the same functions. Input that passes can be given to the
kernel: it has no NUL byte, it can be encoded, and no path leaves its environment.
"""

from collections.abc import Iterable, Mapping

from slackwater.model.errors import ConfigError

FILES_MOST = 10_000
FILE_DEPTH_MOST = 64
FILE_NAME_BYTES_MOST = 255  # of one component, as Linux allows
FILE_PATH_BYTES_MOST = 3072  # below PATH_MAX, which also counts the environment's own folder
NAME_MOST = 200


def check_environment_name(field: str, name: str) -> None:
    """Refuse a name that cannot be that of a folder."""
    is_name = name and name[0] != "." and "/" not in name and is_plain(name)
    if not is_name or len(name.encode()) > NAME_MOST:
        raise ConfigError.of(field, name, f"must be a file name of at most {NAME_MOST}")


def check_file_names(names: Iterable[str]) -> None:
    """Refuse files that cannot all be written into an environment."""
    folders: set[str] = set()
    files: set[str] = set()
    for count, name in enumerate(names, 1):
        if count > FILES_MOST:
            raise ConfigError.of("files", f"more than {FILES_MOST} names", "must be fewer")
        parts = _parts(name)
        files.add("/".join(parts))
        folders.update("/".join(parts[:depth]) for depth in range(1, len(parts)))
    if both := files & folders:
        raise ConfigError.of("files", min(both), "must be a file or a folder, not both")


def _parts(name: str) -> list[str]:
    if not is_plain(name):
        raise ConfigError.of("files", name, "must be text without NUL and surrogates")
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if not parts or name.startswith("/") or ".." in parts or name.endswith(("/", "/.")):
        raise ConfigError.of("files", name, "must be a path inside the environment")
    if len(parts) > FILE_DEPTH_MOST:
        fix = f"must have at most {FILE_DEPTH_MOST} components"
        raise ConfigError.of("files", name, fix)
    if max(len(part.encode()) for part in parts) > FILE_NAME_BYTES_MOST:
        fix = f"must have components of at most {FILE_NAME_BYTES_MOST} bytes"
        raise ConfigError.of("files", name, fix)
    if len(name.encode()) > FILE_PATH_BYTES_MOST:
        fix = f"must be at most {FILE_PATH_BYTES_MOST} bytes long"
        raise ConfigError.of("files", name, fix)
    return parts


def check_command(command: Iterable[str], variables: Mapping[str, str]) -> None:
    """Refuse arguments and variables with which no process can start."""
    for part in command:
        if not is_plain(part):
            raise ConfigError.of("command", part, "must be text without NUL and surrogates")
    for name, value in variables.items():
        if not name or "=" in name or not is_plain(name):
            fix = "must be a name without '=', NUL and surrogates"
            raise ConfigError.of("variables", name, fix)
        if not is_plain(value):  # the value itself may be a secret
            fix = "must have text without NUL and surrogates"
            raise ConfigError.of("variables", name, fix)


def is_plain(text: str) -> bool:
    """Whether the kernel accepts the text as a name or an argument."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text
