"""Metadata of a published weight version."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from slackwater.nets.lora import LoraSpec


def lora_meta(lora: LoraSpec | None) -> dict[str, Any]:
    """The `meta` of a version: whether its tensors are an adapter, and of which shape."""
    return {"lora": None if lora is None else asdict(lora)}


def lora_of(meta: Mapping[str, Any]) -> LoraSpec | None:
    """The adapter's shape that `lora_meta` wrote, or None for whole weights."""
    found = meta.get("lora")
    return None if found is None else LoraSpec(**found)
