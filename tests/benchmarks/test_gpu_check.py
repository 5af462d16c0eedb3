"""The check for machines with a GPU, run small on a CPU."""

import json
import sys

import pytest

from benchmarks import gpu_check


def check(monkeypatch, capsys, *arguments: str) -> tuple[int, dict]:
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--device", "cpu", "--small", *arguments])
    with pytest.raises(SystemExit) as end:
        gpu_check.main()
    return end.value.code, json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.slow
def test_each_part_reports_its_figures(monkeypatch, capsys):
    code, found = check(monkeypatch, capsys, "--parts", "train paper", "draw small", "recipe")
    training, drawing, recipe = found["parts"]
    assert code == 0, found
    assert training["tokens_per_s"] > 0
    assert 0 < training["mfu"] < 1
    assert drawing["drawing_s"] > 0
    assert recipe["losses"][1] < recipe["losses"][0]


def test_a_part_that_hangs_is_ended(monkeypatch, capsys):
    monkeypatch.setitem(gpu_check.LIMITS_S, "train small", 0.01)
    code, found = check(monkeypatch, capsys, "--parts", "train small")
    assert (code, found["parts"][0]["outcome"]) == (1, "ended after 0.01 s")


def test_a_part_that_fails_hides_nothing_of_the_others(monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    code, found = check(monkeypatch, capsys, "--parts", "train small", "draw small")
    assert (code, [line["outcome"] for line in found["parts"]]) == (1, ["exit code 1", "exit code 1"])
