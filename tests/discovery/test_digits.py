"""Test `discover` on the embedded digits."""

import json
from pathlib import Path

import pytest
from command import run_command

from symrazor.discovery.digits import discover_digits
from symrazor.discovery.question import Options


def test_discover_on_the_embedded_digits(tmp_path: Path) -> None:
    """Check files and numbers of a short run."""
    process = run_command(
        "discover",
        "--epochs",
        "1",
        "--starts",
        "1",
        "--out",
        str(tmp_path),
        "--json",
        str(tmp_path / "a.json"),
    )
    assert process.returncode == 0, process.stderr
    assert "Which digit is it?" in process.stdout
    assert "nats" in process.stdout
    assert (tmp_path / "evidence.png").read_bytes().startswith(b"\x89PNG")
    document = json.loads((tmp_path / "a.json").read_text())
    assert document == json.loads((tmp_path / "discover.json").read_text())
    answers = document["questions"]
    assert [a["name"] for a in answers] == ["digit", "quadrant"]
    assert (tmp_path / "quadrant" / "network.pt2").is_file()
    for answer in answers:
        values = [c["log_evidence"] for c in answer["candidates"]]
        assert values == sorted(values, reverse=True)
        assert answer["margin"] == pytest.approx(values[0] - values[1])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_evidence_selects_the_right_symmetry(seed: int) -> None:
    """Translation symmetry is kept for digits, or undecided, and broken for quadrants."""
    answers = [one.answer for one in discover_digits(Options(seed=seed, progress=False)).results]
    digit, quadrant = answers
    kept = "Translation-invariant: position does not matter."
    undecided = "Undecided: the data do not show whether position matters."
    assert digit.headline in ((kept,) if seed == 0 else (kept, undecided))
    assert not quadrant.symmetric
    assert quadrant.headline == "Not translation-invariant: position matters."
    shares = [layer.free_share for layer in quadrant.named("relaxed").fit.reading.layers[:3]]
    assert shares[0] < 0.5 * max(shares)  # symmetry is broken late, not at the first layer
    assert max(shares) > 0.08
    for answer in answers:  # the best by evidence is better on test data than the worst
        losses = [c.fit.reading.test["nll"] for c in answer.candidates]
        assert losses[0] < losses[-1]
