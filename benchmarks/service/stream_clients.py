"""Streaming clients in a process of their own: `python -m benchmarks.service.stream_clients
'{"url": ...}'` prints what they saw.

Plain sockets and as little work per chunk as can be, since they share the machine with what they
measure. It imports nothing of the service, so that the same clients can be run against an older
one.
"""

import asyncio
import json
import resource
import sys
import time
from typing import Any
from urllib.parse import urlsplit


async def one_client(options: dict[str, Any], requests: int, seen: dict[str, list[float]]) -> None:
    """So many requests, one after the other, over one connection each."""
    address = urlsplit(options["url"])
    body = json.dumps(options["body"]).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {address.netloc}\r\n"
        f"authorization: Bearer {options['key']}\r\ncontent-type: application/json\r\n"
        f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode()
    for _ in range(requests):
        began_s = time.perf_counter()
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(head + body)
        first_s, events, ok = 0.0, 0, False
        while data := await reader.read(1 << 16):
            if not ok:
                ok = b" 200 " in data.split(b"\r\n", 1)[0]
            found = data.count(b"data: ")
            if found and not first_s:
                first_s = time.perf_counter()
            events += found
        writer.close()
        if not ok or not first_s:
            seen["failed"].append(1.0)
            continue
        seen["first_s"].append(first_s - began_s)
        seen["whole_s"].append(time.perf_counter() - began_s)
        seen["events"].append(float(events))


async def run(options: dict[str, Any]) -> dict[str, Any]:
    """All clients at once."""
    seen: dict[str, list[float]] = {"first_s": [], "whole_s": [], "events": [], "failed": []}
    began_s = time.perf_counter()
    await asyncio.gather(
        *(one_client(options, options["requests"], seen) for _ in range(options["clients"]))
    )
    took_s = time.perf_counter() - began_s
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {**seen, "took_s": took_s, "cpu_s": used.ru_utime + used.ru_stime}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(run(json.loads(sys.argv[1])))))
