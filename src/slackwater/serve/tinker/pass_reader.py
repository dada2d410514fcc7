"""Training batches as the SDK sends them: decompressed, parsed, checked and packed for the log, in a helper process where they are large."""

import pickle
from dataclasses import dataclass

from slackwater.model.errors import SlackwaterError
from slackwater.serve.tinker import proto as tinker_proto
from slackwater.wire.batches import encode_batch


@dataclass(frozen=True, slots=True)
class PassHead:
    """Which operation it is. A batch that is wrong uses up its number: `error` says why."""

    model_id: str
    seq_id: int
    forward_only: bool
    error: SlackwaterError | None = None


def read_pass(body: bytes, encoding: str, limit: int) -> tuple[PassHead, bytes]:
    """Raises if it cannot be told which operation it is."""
    message = tinker_proto.parse_pass_request(tinker_proto.decompress(body, encoding, limit))
    head = (message.model_id, message.seq_id, message.forward_only)
    try:
        return PassHead(*head), encode_batch(tinker_proto.pass_batch(message))
    except SlackwaterError as error:
        return PassHead(*head, error), b""


def question(body: bytes, encoding: str, limit: int) -> tuple[bytes, bytes]:
    return f"pass {limit} {encoding}".encode(), body


def answer(argument: str, body: bytes) -> tuple[bytes, bytes]:
    """A pickled head, or the error that it came to; and the batch."""
    limit, _, encoding = argument.partition(" ")
    try:
        head, batch = read_pass(body, encoding, int(limit))
    except SlackwaterError as error:
        return pickle.dumps(error), b""
    return pickle.dumps(head), batch
