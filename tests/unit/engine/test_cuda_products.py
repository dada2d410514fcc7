"""Products of few rows by our own kernel, in parts that add up. Without a GPU it runs in Triton's
interpreter.
"""

import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="the kernel is Triton's")

from slackwater.engine.cuda.product_kernel import few_rows_product, processors, tiling  # noqa: E402

PRODUCTS = (
    [(5, 4000, 512), (32, 2048, 1024)] if DEVICE == "cuda" else [(1, 128, 512), (5, 300, 256)]
)
KIND = torch.bfloat16 if DEVICE == "cuda" else torch.float32


@pytest.mark.parametrize(("rows", "columns", "depth"), PRODUCTS)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_the_parts_of_a_product_add_up_to_it(
    rows: int, columns: int, depth: int, biased: bool
) -> None:
    generator = torch.Generator(device=DEVICE).manual_seed(rows)
    x, weight, bias = (
        torch.randn(*shape, generator=generator, device=DEVICE).to(KIND)
        for shape in ((rows, depth), (columns, depth), (columns,))
    )
    how = tiling(columns, depth, processors())
    assert how is not None
    found = few_rows_product(x, weight, bias if biased else None, how)
    assert found.shape == (how.parts, rows, columns)
    wanted = x.double() @ weight.double().T + (bias.double() if biased else 0)
    error = (found.double().sum(0) - wanted).norm() / wanted.norm()
    assert error < 5e-3


@pytest.mark.parametrize(
    ("columns", "depth"), [(4096, 2048), (2048, 2048), (12288, 2048), (2048, 6144), (4192, 2048)]
)
def test_a_product_fills_a_device_in_one_go(columns: int, depth: int) -> None:
    how = tiling(columns, depth, 132)
    assert how is not None
    assert 0.6 * 132 <= -(-columns // how.columns) * how.parts <= 132
    assert depth % (how.parts * how.step * how.pieces) == 0


def test_what_would_take_several_rounds_is_left_to_the_library() -> None:
    assert tiling(151936, 2048, 132) is None


def test_a_depth_that_is_no_whole_number_of_steps_is_left_to_the_library() -> None:
    assert tiling(64 * 132, 100, 132) is None
