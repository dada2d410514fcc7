"""A worker's end of a connection to a hub, for tests: as the real one, without its threads."""

import asyncio

from slackwater.runtime.net.hub import WorkerHub
from slackwater.wire import messages
from slackwater.wire.frames import FrameDecoder
from slackwater.wire.proof import new_nonce, peer_proof


async def next_message(reader: asyncio.StreamReader) -> messages.ToWorker:
    """The one message that a hub answers with."""
    decoder = FrameDecoder()
    while True:
        data = await reader.read(1 << 16)
        assert data, "the hub hung up"
        if frames := decoder.feed(data):
            return messages.decode_to_worker(frames[0].body)


async def dial(
    hub: WorkerHub, hello: messages.Hello, key: str, *, name: str | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, messages.ToWorker]:
    """Prove the key under the hello's name, or another, and say the hello; what the hub answered to
    the proof.
    """
    reader, writer = await asyncio.open_connection(*hub.address)
    name, ours = name or hello.worker, new_nonce()
    pool = hello.node.pool or "" if hello.node is not None else ""
    writer.write(messages.encode(messages.ConnectRequest(name, ours, pool=pool)))
    challenge = await next_message(reader)
    assert isinstance(challenge, messages.Challenge)
    proof = peer_proof(key.encode(), name, ours + challenge.nonce)
    writer.write(messages.encode(messages.ChallengeResponse(proof)))
    answer = await next_message(reader)
    if isinstance(answer, messages.Welcome):
        writer.write(messages.encode(hello))
    return reader, writer, answer
