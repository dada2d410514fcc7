"""Decompresses gzip and zstd request bodies within a size limit."""

import zlib

import zstandard

_GZIP = zlib.MAX_WBITS | 16
ENCODINGS = ("gzip", "zstd")


class RefusedBodyError(Exception):
    """A refused body with its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def encoding_of(header: str | None) -> str:
    """The body's content encoding; "" for none."""
    name = (header or "").strip().lower()
    name = {"identity": "", "x-gzip": "gzip"}.get(name, name)
    if name and name not in ENCODINGS:
        choices = f"must be one of {', '.join(ENCODINGS)}, or absent"
        raise RefusedBodyError(415, f"Content-Encoding: {name[:100]!r} {choices}")
    return name


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """Decompress the body to at most `limit` bytes."""
    try:
        if encoding == "gzip":
            data = _gunzip(body, limit)
        else:
            data = zstandard.ZstdDecompressor().stream_reader(body).read(limit + 1)
    except (zlib.error, zstandard.ZstdError, EOFError) as error:
        why = f"body: cannot be decompressed as {encoding}: {error}"
        raise RefusedBodyError(422, why) from None
    if len(data) > limit:
        why = f"body: must be at most {limit} bytes when decompressed"
        raise RefusedBodyError(413, why)
    return data


def _gunzip(body: bytes, limit: int) -> bytes:
    """Decompress all gzip members; stops one byte beyond the limit."""
    pieces: list[bytes] = []
    remaining = limit + 1
    while body and remaining > 0:
        member = zlib.decompressobj(_GZIP)
        pieces.append(member.decompress(body, remaining))
        remaining -= len(pieces[-1])
        if not member.eof and remaining > 0:
            raise EOFError("it is truncated")
        body = member.unused_data
    return b"".join(pieces)
