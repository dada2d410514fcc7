"""The alphabet of byte-level tokenizers: one printable character for each byte."""


def byte_characters() -> dict[str, int]:
    """The byte of each character: itself if printable, the others from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(0x100 + place): byte for place, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted
