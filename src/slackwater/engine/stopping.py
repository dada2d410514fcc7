"""Stop strings: does the newest token complete one?"""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
_SLACK_TOKENS = 8  # a character may span tokens, and a tokenizer may merge spaces at the front


def completes_stop_string(
    tokens: Sequence[int], stop_strings: Sequence[str], decode: Decode
) -> bool:
    """Whether the text of `tokens` holds a stop string; asked after every token.

    Only the tail is decoded: a token adds at least one byte of text or none, so a string that
    ends in the newest token lies within its length in bytes of tokens, and some slack.
    """
    window = max(len(text.encode()) for text in stop_strings) + _SLACK_TOKENS
    text = decode(tokens[-window:])
    return any(stop in text for stop in stop_strings)
