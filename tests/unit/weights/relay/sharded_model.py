"""A small model that four ranks hold in slices: what its senders, which are processes of their own,
and their test both know.
"""

import numpy as np

from slackwater.weights.plan.layout import Layout

SECRET = "of the ranks"
HEAD_DIM = 8
SENDERS = Layout(tp=2, dp=2)
SHAPES = {
    "model.embed_tokens.weight": (96, 64),
    "model.norm.weight": (64,),
    "lm_head.weight": (96, 64),
    **{
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(2)
        for name, shape in {
            "self_attn.q_proj": (64, 64),
            "self_attn.k_proj": (32, 64),
            "self_attn.v_proj": (32, 64),
            "self_attn.o_proj": (64, 64),
            "mlp.gate_proj": (128, 64),
            "mlp.up_proj": (128, 64),
            "mlp.down_proj": (64, 128),
            "input_layernorm": (64,),
            "post_attention_layernorm": (64,),
        }.items()
    },
}


def whole_model() -> dict[str, "np.ndarray[tuple[int, ...], np.dtype[np.float32]]"]:
    rng = np.random.default_rng(5)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
