"""Parses, checks and packs training batches; large ones in a helper process."""

from dataclasses import dataclass
from pathlib import Path

from slackwater.model.errors import SlackwaterError, UnavailableError
from slackwater.serve.tinker import json_pass
from slackwater.serve.tinker import proto as tinker_proto
from slackwater.wire.batches import encode_batch

PROTOBUF, JSON, JSON_FORWARD = "protobuf", "json", "json-forward"
PASS_PATHS = ("/api/v1/forward_backward", "/api/v1/forward")
MAX_JSON_PASS_BYTES = 16 << 20  # SDKs that send JSON split batches at about 5 MB


@dataclass(frozen=True, slots=True)
class PassHead:
    """The operation's identity; an invalid batch has an `error`, and uses up its number."""

    model_id: str
    seq_id: int
    forward_only: bool
    error: SlackwaterError | None = None


def read_pass(body: bytes, form: str) -> tuple[PassHead, bytes]:
    """Parse a batch in one of three formats; raises if the operation is unknown."""
    data = b""
    if form == PROTOBUF:
        message = tinker_proto.parse_pass_request(body)
    else:
        message, data = json_pass.parse_head(body, forward_only=form == JSON_FORWARD)
    head = (message.model_id, message.seq_id, message.forward_only)
    try:
        if form != PROTOBUF:
            json_pass.fill_data(message, data)
        return PassHead(*head), encode_batch(tinker_proto.pass_batch(message))
    except SlackwaterError as error:
        return PassHead(*head, error), b""


def batch_of(body: Path) -> Path:
    """The file that `read_pass_file` writes the batch to."""
    return body.with_name(f"{body.name}.batch")


def read_pass_file(body: Path, form: str) -> PassHead:
    """Parse the batch in a body's file and write it to its own file."""
    try:
        head, batch = read_pass(body.read_bytes(), form)
        batch_of(body).write_bytes(batch)
    except OSError as error:  # the disk is full, or the client left and its body was removed
        why = f"body: the batch cannot be read or stored ({error.strerror}); try again"
        raise UnavailableError(why) from None
    return head
