"""The three loops beside each other: each takes the steps that it is timed for, and the record is written where asked."""

import json

import torch

from dpexp.benchmark import loops


def test_each_loop_is_timed_and_recorded(tmp_path, capsys):
    threads = torch.get_num_threads()
    path = tmp_path / "new" / "loops.json"
    try:
        assert loops.main([str(path)], {"hidden": 16, "layers": 1, "steps": 4, "rounds": 1}) == 0
    finally:
        torch.set_num_threads(threads)
    found = json.loads(path.read_text())
    assert [row["way"] for row in found["rows"]] == ["dpexp.train", "PrivacyEngine", "transformers.Trainer"]
    # between four beginnings lie three steps, of which the first two are left out
    assert [row["steps"] for row in found["rows"]] == [1, 1, 1]
    assert all(row["step_s"] > 0 for row in found["rows"])
    assert found["rows"][0]["relative"] == 1
    assert found["settings"]["hidden"] == 16
    # behind what the Trainer prints
    said = capsys.readouterr().out
    assert json.loads(said[said.index("[\n") :]) == found["rows"]
