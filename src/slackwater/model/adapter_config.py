"""peft's `adapter_config.json`, which describes a low-rank adapter to other tools."""

from typing import Any

ATTENTION_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_LAYERS = ("gate_proj", "up_proj", "down_proj")
HEAD = "lm_head"


def adapter_config(
    rank: int, alpha: float, *, attn: bool, mlp: bool, unembed: bool, base_model: str | None = None
) -> dict[str, Any]:
    """The fields that peft, the Tinker cookbook and vLLM read; the update is `alpha/r * B @ A`."""
    layers = (
        (ATTENTION_LAYERS if attn else ())
        + (MLP_LAYERS if mlp else ())
        + ((HEAD,) if unembed else ())
    )
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "fan_in_fan_out": False,
        "bias": "none",
        "target_modules": list(layers),
    }
