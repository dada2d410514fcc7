"""Links to downloads: however often one is asked for, there is one of it."""

import asyncio
from pathlib import Path

import pytest
from fastapi import Request

from slackwater.model.errors import NotFoundError, RefusedError
from slackwater.serve.tinker import records
from slackwater.serve.tinker.records import Downloads, Files

OF = ("mine", "tinker://m/sampler_weights/x")
REQUEST = Request(
    {"type": "http", "scheme": "http", "server": ("here", 80), "path": "/", "headers": []}
)


def test_what_is_asked_for_again_is_the_same_link_and_newest_content(tmp_path: Path) -> None:
    downloads = Downloads(tmp_path / "downloads")
    links = {downloads.offer(REQUEST, OF, b"%d" % place, "a b.json")[0] for place in range(100)}
    (link,) = links
    assert link.startswith("http://here/downloads/")
    token = link.split("/")[-2]
    assert downloads.take(token, "a b.json") == b"99"
    with pytest.raises(NotFoundError):
        downloads.take(token, "other.json")
    assert downloads.offer(REQUEST, ("other", *OF[1:]), b"", "a b.json")[0] != link


def test_files_are_made_once_and_again_where_that_failed(tmp_path: Path) -> None:
    downloads, begun, fails = Downloads(tmp_path / "downloads"), list[Path](), [True]

    async def make(folder: Path) -> Files:
        begun.append(folder)
        await asyncio.to_thread(folder.mkdir, parents=True)
        if fails[0]:
            raise RefusedError("not now")
        return {"x.tar": folder / "x.tar"}

    async def ask() -> list[Files | BaseException]:
        asked = (downloads.prepare(OF, make) for _ in range(10))
        return await asyncio.gather(*asked, return_exceptions=True)

    async def twice() -> None:
        assert all(isinstance(each, RefusedError) for each in await ask())
        fails.clear()
        fails.append(False)
        assert [await ask(), await ask()] == [[{"x.tar": begun[1] / "x.tar"}] * 10] * 2

    asyncio.run(twice())
    assert len(begun) == 2
    assert list((tmp_path / "downloads").iterdir()) == begun[1:]


def test_links_and_files_end_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads, now_s = Downloads(tmp_path / "downloads"), [0.0]
    monkeypatch.setattr("slackwater.serve.tinker.records.time.time", lambda: now_s[0])

    async def make(folder: Path) -> Files:
        await asyncio.to_thread(folder.mkdir, parents=True)
        return {}

    async def prepare(number: int) -> None:
        await downloads.prepare((str(number),), make)

    for number in range(5):
        asyncio.run(prepare(number))
        token = downloads.offer(REQUEST, (str(number),), b"", "x")[0].split("/")[-2]
        now_s[0] += 3 * records.LINK_LIVES_S
        with pytest.raises(NotFoundError):
            downloads.take(token, "x")
    assert len(list((tmp_path / "downloads").iterdir())) == 1
    assert len(downloads._offers) == 1
