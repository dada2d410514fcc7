"""Pictures: a bubble is grey, a phase has its job's colour, and all formats can be written."""

import io

import numpy as np
import pytest
from handmade_reports import two_jobs_taking_turns
from numpy.typing import NDArray

from slackwater.model.ids import JobId, NodeId
from slackwater.model.placement import Phase
from slackwater.timeline.plot import comparison_image, job_colours, node_strips, timeline_image
from slackwater.timeline.spans import Rental, Span


def share_of(image: NDArray[np.float64], colour: str) -> float:
    """Of all pixels, those of this colour."""
    wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    near = np.abs(image[:, :, :3] * 255 - wanted).max(axis=2) < 2
    return float(near.mean())


def picture(cycles: int, hours: tuple[float, float] | None = None) -> NDArray[np.float64]:
    from matplotlib.image import imread

    image = timeline_image(two_jobs_taking_turns(cycles).timeline(), "png", hours)
    return np.asarray(imread(io.BytesIO(image), format="png"), dtype=np.float64)


def test_phases_and_bubbles_take_space_as_they_took_time() -> None:
    image = picture(cycles=20)
    colours = job_colours([JobId("a"), JobId("b")])
    a, b = share_of(image, colours[JobId("a")]), share_of(image, colours[JobId("b")])
    bubbles = share_of(image, "#d9d9d9")
    report = two_jobs_taking_turns(20)
    run_h = report.rollout.run_h + report.train.run_h
    idle_h = sum(use.rented_h * use.bubble_share for use in (report.rollout, report.train))
    assert a == pytest.approx(b, rel=0.05)
    assert bubbles / (a + b) == pytest.approx(idle_h / run_h, rel=0.1)


@pytest.mark.parametrize("pixels", [7, 50, 1500])
def test_a_pixel_is_as_grey_as_its_time_was_idle(pixels: int) -> None:
    report = two_jobs_taking_turns(20)
    nodes = [NodeId("rollout-0"), NodeId("train-0")]
    edges_s = np.linspace(0, report.end_s, pixels + 1)
    colours = {JobId("a"): (1.0, 0.0, 0.0), JobId("b"): (0.0, 1.0, 0.0)}
    blue = (0.0, 0.0, 1.0)  # idle, for once, so that the three parts stay apart
    strips = node_strips(nodes, report.rentals, report.spans, colours, blue, edges_s)
    for row, use in enumerate((report.rollout, report.train)):
        assert strips[row, :, 2].mean() == pytest.approx(use.bubble_share)
        assert strips[row, :, 0].mean() == pytest.approx(strips[row, :, 1].mean())
        assert np.allclose(strips[row].sum(axis=1), 1.0)


def test_time_that_is_not_paid_for_is_white_and_a_tail_shows_where_nothing_else_runs() -> None:
    node, job = NodeId("rollout-0"), JobId("a")
    rentals = [Rental(node, 10.0, 20.0)]
    spans = [
        Span(node, job, Phase.ROLLOUT, 10.0, 14.0, "run"),
        Span(node, JobId("b"), Phase.ROLLOUT, 12.0, 16.0, "tail"),
    ]
    colours = {job: (1.0, 0.0, 0.0), JobId("b"): (0.0, 1.0, 0.0)}
    edges_s = np.array([0.0, 10.0, 12.0, 14.0, 16.0, 20.0])
    strips = node_strips([node], rentals, spans, colours, (0.0, 0.0, 1.0), edges_s)
    white, red, green, blue = (1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1)
    assert strips[0].tolist() == [list(c) for c in (white, red, red, green, blue)]


def test_a_window_shows_only_what_ran_in_it() -> None:
    first_rollout = picture(cycles=2, hours=(0.0, 100 / 3600))
    assert share_of(first_rollout, job_colours([JobId("a")])[JobId("a")]) > 0.05
    assert share_of(first_rollout, job_colours([JobId("x"), JobId("b")])[JobId("b")]) < 0.001


@pytest.mark.parametrize(
    ("fmt", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")]
)
def test_all_formats_can_be_written(fmt: str, start: bytes) -> None:
    runs = [two_jobs_taking_turns(2).timeline(), two_jobs_taking_turns(4, "solo").timeline()]
    assert comparison_image("two runs", runs, fmt).startswith(start)
    assert timeline_image(runs[0], fmt).startswith(start)
