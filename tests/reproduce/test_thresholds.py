"""The page about thresholds: which records it takes, what it draws, and that its commands make such records."""

from pathlib import Path

import pytest

from dpexp.reproduce import thresholds
from dpexp.reproduce.documents import WORDS, Document
from dpexp.reproduce.records import load
from tests.reproduce.samples import made_by, summary, write


def _run(clip: str, seed: int, accuracy: float, sigma: float | None = None, **more: object) -> dict:
    epsilon = 3.0 if sigma is None else None
    run = summary(
        clip,
        seed,
        accuracy,
        epsilon=epsilon,
        sigma=sigma,
        lr=0.01,
        batch_size=1024,
        epochs=1.0,
        **more,
    )
    run["details"]["config"]["model"] |= {"head": "linear", "frozen_features": True}
    return run


def _document(folder: Path) -> Document:
    runs = [
        _run("flat", seed, accuracy - (0.1 if sigma is None else 0) + 1e-3 * seed, sigma, clip_norm=threshold)
        for sigma in (None, 0.0)
        for threshold, accuracy in ((0.05, 0.8), (8.0, 0.75))
        for seed in (0, 1, 2)
    ]
    runs += [_run("adaptive_flat", seed, 0.79 + 1e-3 * seed) for seed in (0, 1, 2)]
    return thresholds.document(load(write(folder, *runs, summary("flat", 0, 0.5, epsilon=3.0))))


def test_noise_and_clipping_are_told_apart(tmp_path: Path) -> None:
    document = _document(tmp_path)
    (block,) = document.sections
    assert [(row["noise"], row["threshold"], row["ours"]) for row in block.rows] == [
        ("no noise", "C = 0.05", "80.10 ± 0.10"), ("no noise", "C = 8", "75.10 ± 0.10"),
        ("ε = 3", "C = 0.05", "70.10 ± 0.10"), ("ε = 3", "C = 8", "65.10 ± 0.10"), ("ε = 3", "adaptive", "79.10 ± 0.10"),
    ]  # fmt: skip
    assert block.rows[0]["loss"] == "0.300"
    assert "- no noise: C = 0.05 (n = 3) minus C = 8 (n = 3) = +5.00" in block.paragraphs[0]
    assert "ε = 3: adaptive (n = 3) minus C = 0.05 (n = 3) = +9.00" in block.paragraphs[0]
    assert "(Welch's t, two-sided)" in block.paragraphs[0]
    # the page makes no claim
    assert not any(word in block.paragraphs[0] for word in WORDS)
    assert "ε = 3, adaptive" in document.svg
    assert document.status == "small 15 runs"
    assert document.svg == _document(tmp_path).svg


def test_without_records_it_has_its_commands() -> None:
    document = thresholds.document([])
    assert (document.svg, document.status) == ("", "not run")
    assert document.sections[0].paragraphs[0].count("`python -m dpexp.train") == len(thresholds.commands())


@pytest.mark.parametrize("command", thresholds.commands())
def test_its_commands_make_records_that_it_takes(command: str) -> None:
    assert len(thresholds.grid([made_by(command)], "linear")) == 1
