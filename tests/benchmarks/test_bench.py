import json
import tomllib

import pytest

from benchmarks import commands
from benchmarks.child_process import ROOT
from benchmarks.commands import (
    BENCHMARKS,
    BenchmarkName,
    comparison,
    job_figures,
    published_figures,
    published_page,
    run,
)
from tests.foreign import foreign_folder
from tests.preprocessing.runs import run_command

JOBS = {
    "benchmark": "speed",
    "preprocess_pictures_per_s": 200.0,
    "train_samples_per_s": 50.0,
    "machine": "A",
    "commit": "abc",
}


def comment(figures):
    return f"text\n<!-- figures: {json.dumps(figures)} -->\nmore text"


def test_figures_stand_in_comments_of_the_page():
    other = {"benchmark": "memory", "layers": [{"way": "a -> b"}]}
    page = comment(JOBS) + comment(other).replace("->", "-\\u003e", 1)
    assert published_figures(page) == {"speed": JOBS, "memory": other}
    assert published_figures("no comment, and <!-- another one -->") == {}


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("<!-- figures: {not JSON} -->", "not a comment with the JSON line"),
        ("<!-- figures: [1] -->", "not a comment with the JSON line"),
        ('<!-- figures: {"machine": "A"} -->', "not a comment with the JSON line"),
        ('<!-- figures: {"benchmark": "speed"}', "not a comment with the JSON line"),
        (comment(JOBS) + comment(JOBS), "figures of speed twice"),
    ],
)
def test_a_broken_comment_is_a_clear_mistake(page, words):
    with pytest.raises(ValueError, match=words):
        published_figures(page)


def test_every_figure_that_is_published_can_be_compared():
    published = published_figures(published_page().read_text())
    by_module = {benchmark.module: benchmark for benchmark in BENCHMARKS.values()}
    for module, figures in published.items():
        if module in by_module:
            assert by_module[module].figures(figures), module
            assert {"machine", "commit"} <= set(figures), module


def test_the_page_is_in_the_package_too():
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert "benchmarks" in wheel["packages"]
    assert wheel["force-include"]["BENCHMARKS.md"] == "benchmarks/BENCHMARKS.md"
    assert published_page() == ROOT / "BENCHMARKS.md"


def test_figures_stand_beside_the_published_ones_with_their_ratio():
    found = JOBS | {"preprocess_pictures_per_s": 300.0}
    lines = comparison(job_figures, found, JOBS)
    assert lines[:2] == ["here: A, commit abc", "published: A, commit abc"]
    assert [line.split()[-3:] for line in lines[3:]] == [["200", "300", "1.50"], ["50", "50", "1.00"]]


def test_another_machine_is_named():
    assert "Another machine" in "\n".join(comparison(job_figures, JOBS, JOBS | {"machine": "B"}))
    assert "Another machine" not in "\n".join(comparison(job_figures, JOBS, JOBS))


def test_a_figure_on_one_side_alone_has_no_ratio():
    without = {name: value for name, value in JOBS.items() if name != "train_samples_per_s"}
    assert comparison(job_figures, JOBS, without)[-1].split()[-3:] == ["-", "50", "-"]
    assert comparison(job_figures, without, JOBS)[-1].startswith("1 published figures were not measured")


def test_a_benchmark_without_published_figures_says_so():
    lines = comparison(job_figures, JOBS, None)
    assert "no figures of this benchmark yet" in lines[1]
    assert lines[-1].split()[-3:] == ["-", "50", "-"]


def test_a_benchmark_that_fails_has_no_figures(capfd):
    assert run("training", ["--turns", "0"]) is None
    assert "--turns 0: must be at least 1" in capfd.readouterr().err


def test_a_benchmark_runs_no_code_of_the_current_folder(monkeypatch, tmp_path, capfd):
    monkeypatch.chdir(foreign_folder(tmp_path))
    run("training", ["--turns", "0"])
    assert "--turns 0: must be at least 1" in capfd.readouterr().err


def test_one_that_fails_is_told_and_the_others_still_run(monkeypatch, capsys):
    monkeypatch.setattr(commands, "run", lambda module, arguments: JOBS if module == "speed" else None)
    assert run_command("bench", "optimizer", "jobs") == 2
    said = capsys.readouterr()
    assert "train samples/s" in said.out
    assert "error: 1 of the benchmarks did not finish: optimizer" in said.err


def test_full_runs_are_as_published_and_the_reference_goes_to_those_that_take_it(monkeypatch, capsys):
    asked = {}
    monkeypatch.setattr(commands, "run", lambda module, arguments: asked.update({module: arguments}))
    run_command("bench", "--full", "--reference", "PYTHON")
    assert asked == {
        "sampling": ["--reference", "PYTHON"],
        "training": ["--reference", "PYTHON"],
        "memory": [],
        "optimizer": [],
        "speed": [],
    }


@pytest.mark.slow
@pytest.mark.parametrize("what", ["optimizer", "jobs"])
def test_a_benchmark_runs_from_the_command_line(what, capsys):
    assert run_command("bench", what) == 0
    out = capsys.readouterr().out
    assert f"python -m benchmarks.{BENCHMARKS[BenchmarkName(what)].module}" in out
    assert "/s" in out.splitlines()[-2]
