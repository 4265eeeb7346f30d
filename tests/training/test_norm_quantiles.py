"""Quantiles of per-example norms in the log: right, marked as not private, and of no influence."""

import json

import numpy as np
import pytest
import torch

from tests.training.tiny import make_trainer, run_to_end, tiny_run, train, weights


def found(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "norm_quantiles" in line]


def test_they_are_the_quantiles_of_every_examples_norms(tmp_path, monkeypatch):
    run = tiny_run(steps=3)
    run.runtime.eval_every = 3
    trainer = make_trainer(tmp_path, run)
    seen = []
    backward = trainer.clipper.backward

    def watched(*arguments, **named):
        report = backward(*arguments, **named)
        seen.append(report.norms.detach().clone())
        return report

    monkeypatch.setattr(trainer.clipper, "backward", watched)
    step_ends = []
    take = trainer.take_step
    monkeypatch.setattr(trainer, "take_step", lambda *a: (take(*a), step_ends.append(len(seen)))[0])
    train(trainer)
    first, last = found(tmp_path)
    assert (first["step"], last["step"]) == (1, 3)
    assert first["norm_quantiles"]["groups"] == [group.name for group in trainer.clipper.groups]
    for line, (begin, end) in ((first, (0, step_ends[0])), (last, (step_ends[1], step_ends[2]))):
        assert end - begin > 1  # several physical batches
        norms = torch.cat(seen[begin:end], 1).numpy()
        expected = np.quantile(norms, line["norm_quantiles"]["quantiles"], axis=1).T
        assert line["norm_quantiles"]["values"] == pytest.approx(expected, rel=1e-5)


def test_they_are_marked_and_a_strict_release_has_none(tmp_path):
    run = tiny_run()
    run.runtime.eval_every = 2
    run_to_end(tmp_path / "normal", run)
    assert found(tmp_path / "normal")
    assert all(line["not_private"] is True for line in found(tmp_path / "normal"))
    strict = tiny_run()
    strict.runtime.eval_every, strict.privacy.release = 2, "strict"
    trainer = make_trainer(tmp_path / "strict", strict)
    trainer.metrics.strict = True
    train(trainer)
    assert not found(tmp_path / "strict")


def test_looking_changes_nothing(tmp_path):
    looked = tiny_run()
    looked.runtime.eval_every = 1
    seen, unseen = run_to_end(tmp_path / "a", looked), run_to_end(tmp_path / "b", tiny_run())
    assert len(found(tmp_path / "a")) == 6
    assert not found(tmp_path / "b")
    assert np.array_equal(weights(seen), weights(unseen))


def test_a_run_without_privacy_has_no_norms(tmp_path):
    run = tiny_run(private=False)
    run.runtime.eval_every = 2
    run_to_end(tmp_path, run)
    assert not found(tmp_path)


def test_the_ratio_of_signal_to_noise_of_the_first_steps(tmp_path):
    """‖Σ clipped‖ over σS√d, which the noise's norm is on average; a strict release has none."""
    run = tiny_run(steps=2, adaptive=False)
    trainer = make_trainer(tmp_path / "normal", run)
    sums = []
    add_noise = trainer.stepper.release.add_noise

    def watched(*arguments):
        sums.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters()]).double().norm())
        return add_noise(*arguments)

    trainer.stepper.release.add_noise = watched
    train(trainer)
    lines = [json.loads(line) for line in (tmp_path / "normal" / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "signal_to_noise" in line]
    size = sum(p.numel() for p in trainer.model.parameters())
    expected = [float(total) / (trainer.plan.noise_multiplier * 1.0 * size**0.5) for total in sums]
    assert [line["signal_to_noise"] for line in logged] == pytest.approx(expected, rel=1e-5)
    assert all("not_private" in json.dumps(line) or line.get("released") is False for line in logged)
    run.privacy.release = "strict"
    run_to_end(tmp_path / "strict", run)
    assert "signal_to_noise" not in (tmp_path / "strict" / "metrics.jsonl").read_text()
