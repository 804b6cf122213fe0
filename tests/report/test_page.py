"""Test the page as a file: its content, its errors, and that it never runs foreign text."""

import base64
import copy
import hashlib
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import page_document
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from page_reader import Page
from PIL import Image

from symrazor.report.content import (
    LEVELS,
    NEGATIVE,
    POSITIVE,
    checked_data_url,
    data_url,
    downsample,
    history_columns,
    page_content,
    signed_data_url,
    visible_text,
)
from symrazor.report.page import MAX_PAGE_BYTES, page_html, write_page


def decoded(address: str) -> np.ndarray:
    """Decode a data URL with an independent decoder."""
    raw = base64.b64decode(address.removeprefix("data:image/png;base64,"))
    return np.asarray(Image.open(io.BytesIO(raw)))


def test_one_file_without_external_resources(tmp_path: Path) -> None:
    file = write_page(page_document.document(), tmp_path / "new" / "report.html")
    text = file.read_text("utf-8")
    page = Page(text)
    assert file.stat().st_size < MAX_PAGE_BYTES
    for tag, attributes in page.elements:
        assert tag not in ("iframe", "object", "embed", "base", "form")
        for key in ("src", "href", "action", "srcset"):
            value = attributes.get(key) or ""
            assert not value or value.startswith(("#", "data:")), (tag, value)
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    assert list(tmp_path.joinpath("new").iterdir()) == [file]  # no partial file is left


def test_untrusted_names_stay_text() -> None:
    page = Page(page_html(page_document.document()))
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == 2 and "img" not in tags and "svg" not in tags
    assert not [key for _, attributes in page.elements for key in attributes if key[:2] == "on"]
    assert f"Yes. {page_document.XSS}" in page.words
    assert page.data["questions"][1]["candidates"][0]["name"] == page_document.XSS
    assert "<" not in page.scripts[0] and ">" not in page.scripts[0]


@settings(max_examples=25, deadline=None)
@given(
    st.text(max_size=40), st.sampled_from(["", "{{script}}", "</style>", "<!--", "]]>", "\ud800"])
)
def test_any_text_is_only_text(name: str, more: str) -> None:
    document = page_document.document()
    empty = Page(page_html(document))
    wild = name + more
    document["questions"][1] |= {"question": wild, "verdict": wild, "name": wild}
    document |= {"title": wild, "command": wild, "kind": wild}
    document["data"]["path"] = wild
    page = Page(page_html(document))
    assert [tag for tag, _ in page.elements if tag != "bdi"] == [
        tag for tag, _ in empty.elements if tag != "bdi"
    ]
    assert page.data["command"] == visible_text(wild)
    assert page.scripts[1] == empty.scripts[1]


@pytest.mark.parametrize(
    ("verdict", "html"),
    [
        ("Yes. 3 % & more.", "<strong>Yes.</strong> 3&nbsp;% &amp; more."),
        (
            "**Translation-invariant.** Every layer is.",
            "<strong>Translation-invariant.</strong> Every",
        ),
        ("Error 0.3 % at most", "<strong>Error 0.3&nbsp;% at most</strong></p>"),
        ("", "<strong></strong></p>"),
    ],
)
def test_the_answer_is_bold(verdict: str, html: str) -> None:
    document = page_document.document()
    document["questions"][0]["verdict"] = verdict
    assert f'<p class="verdict">{html}' in page_html(document)


def test_invisible_characters_are_replaced() -> None:
    assert visible_text("a\u202eb\x00c\ud800") == "a\ufffdb\ufffdc?"
    assert len(visible_text("x" * 5000)) == 2003


def test_policy_allows_only_the_hashed_script_and_style() -> None:
    text = page_html(page_document.document())
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)
    assert policy and style and script
    for part, result in (("style-src", style), ("script-src", script)):
        digest = base64.b64encode(hashlib.sha256(result[1].encode()).digest()).decode()
        assert f"{part} 'sha256-{digest}'" in policy[1]
    assert "default-src 'none'" in policy[1] and "unsafe" not in policy[1]


def test_parts_without_data_are_left_out() -> None:
    candidate = {"name": "a", "reading": {"layers": []}}
    page = Page(page_html({"questions": [{"candidates": [candidate]}]}))
    assert page.data["questions"] == [
        {
            "question": "Question 1",
            "verdict": "",
            "candidates": [{"name": "a", "reading": {"layers": []}}],
        }
    ]


def test_a_longer_training_has_its_curves() -> None:
    document = page_document.document()
    document["questions"][0]["final"] = {
        **document["questions"][0]["candidates"][0],
        "history": page_document.history(60),
    }
    result = Page(page_html(document)).data["questions"][0]
    assert (result["final"]["of"], result["final"]["name"]) == ("relaxed", "relaxed, longer")
    assert result["final"]["series"]["epoch"][-1] == 60
    assert result["final"]["series"]["precisions"]["0.paths.1"]["0.paths.1"][-1] == 60.0
    assert len(result["candidates"]) == len(document["questions"][0]["candidates"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"questions": []}, 'has no "questions"'),
        ({"questions": None}, 'has no "questions"'),
        ({"schema": 7}, "schema 7; this version reads schema 1"),
        ({"questions": [{"question": "?"}]}, "Question 1 has no candidates"),
        ({"questions": [{"candidates": [{"name": "a"}]}]}, "candidate must have a reading"),
    ],
)
def test_invalid_documents_raise(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text("before")
    with pytest.raises(ValueError, match=message):
        write_page({**page_document.document(), **change}, file)
    assert file.read_text() == "before"


@pytest.mark.parametrize(
    "images",
    [
        ["javascript:alert(1)"],
        ["data:image/svg+xml;base64,AAAA"],
        ["https://example.org/a.png"],
        [base64.b64encode(b"<svg onload=alert(1)>").decode()],
        [[["a"]]],
        np.zeros((2, 0, 3)).tolist(),
        [[[1.0, 2.0], [3.0]]],
    ],
)
def test_invalid_images_raise(images: Any) -> None:
    document = page_document.document()
    document["questions"][0]["examples"] = {"images": images}
    with pytest.raises(ValueError, match="must be|differ in size"):
        page_html(document)


def test_large_documents_get_fewer_images_and_then_raise() -> None:
    generator = np.random.default_rng(0)
    document = page_document.document()
    first = document["questions"][0]
    first["examples"] = {"images": generator.integers(0, 256, (24, 3, 64, 64), np.uint8)}
    document["questions"] = [copy.copy(first) for _ in range(10)]
    text = page_html(document)
    shown = Page(text).data["questions"][0]["examples"]["images"]
    assert len(text.encode()) <= MAX_PAGE_BYTES and 4 <= len(shown) < 24
    document["questions"] = document["questions"][:1]
    document["versions"] = {str(i): "x" * 1900 for i in range(2000)}
    with pytest.raises(ValueError, match="more than the limit of 3,000,000"):
        page_html(document)


def test_images_round_trip() -> None:
    generator = np.random.default_rng(1)
    for shape in ((5, 7), (4, 3, 3), (2, 2, 4)):
        pixels = generator.integers(0, 256, shape, np.uint8)
        assert np.array_equal(decoded(data_url(pixels)), pixels)
    result = decoded(signed_data_url(np.array([[1.0, -2.0], [0.0, 2.0]]), 2.0))
    assert result[..., 3].tolist() == [[128, 255], [0, 255]]
    assert tuple(result[0, 1, :3]) == NEGATIVE and tuple(result[1, 1, :3]) == POSITIVE
    assert downsample(np.arange(16.0).reshape(4, 4), 2).tolist() == [
        [2.5, 4.5],
        [10.5, 12.5],
    ]
    assert downsample(np.ones((130, 33)), 64).shape == (44, 11)
    address = data_url(np.zeros((2, 2), np.uint8))
    assert checked_data_url(address) == checked_data_url(address.partition(",")[2]) == address


def test_images_share_one_scale_and_keep_their_colours() -> None:
    document = page_document.document()
    red = np.zeros((1, 3, 2, 2))
    red[:, 0] = 4.0
    document["questions"][0]["examples"] = {"images": red, "transformed": red[None]}
    result = page_content(document, LEVELS[0])["questions"][0]["examples"]
    assert decoded(result["images"][0])[0, 0].tolist() == [255, 0, 0]
    assert decoded(result["transformed"][0][0])[0, 0].tolist() == [255, 0, 0]


def test_series_are_columns_summed_by_path() -> None:
    records = page_document.history(1000)
    result = history_columns(records, ["0.paths.0", "0.paths.1", "head"], 40)
    assert len(result["epoch"]) <= 40 and result["epoch"][-1] == 1000
    assert {len(column) for column in (result["nll"], result["log_evidence"])} == {
        len(result["epoch"])
    }
    assert result["effective_parameters"]["0.paths.0"][-1] == 40.0
    assert result["effective_parameters"]["head"][-1] == 5.0
    assert result["precisions"]["head"] == {
        "head.weight": result["precisions"]["head"]["head.weight"]
    }
    at = next(i for i, epoch in enumerate(result["epoch"]) if epoch % 5)
    assert result["log_evidence"][at] is None and result["effective_parameters"]["head"][at] is None
