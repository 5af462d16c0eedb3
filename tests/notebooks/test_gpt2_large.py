"""The tutorial on memory: every cell run with a tiny model and local text, its figures held against the calculator."""

import dataclasses
import re

import pytest

pytest.importorskip("nbclient")
pytest.importorskip("bitsandbytes")

from tokenizers import ByteLevelBPETokenizer

from dalle_lean import MemoryPlan
from dalle_lean.language import LanguageConfig
from dalle_lean.memory import TrainingSetup, cost_of
from docs.notebook_page import NOTEBOOK, PAGE, page_of
from tests.notebooks.running import NOTEBOOKS, filled_in, run

TECHNIQUES = ("baseline", "eight-bit", "sharing", "checkpoint", "reversible", "pieces", "alone")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    guides = sorted((NOTEBOOKS.parent / "docs").glob("*.md"))
    (folder / "text.txt").write_text("\n".join(guide.read_text() for guide in guides))
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train([str(folder / "text.txt")], vocab_size=400, special_tokens=["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    notebook = filled_in(
        "gpt2-large.ipynb",
        GPU_GB=0.006,
        STEPS=40,
        LEARNING_RATE=5e-3,
        MODEL={"hidden_size": 64, "num_layers": 6, "num_heads": 4, "head_size": 16},
        TOKENS=64,
        SETS=2,
        DATA={"path": "text", "data_files": str(folder / "text.txt"), "cache_dir": str(folder / "cache")},
        TOKENIZER=str(folder / "tokenizer.json"),
        FOLDER=str(folder / "trained"),
    )
    found = run(notebook, folder)
    assert (folder / "trained" / "model.safetensors").is_file()
    return found


def figures(said):
    """(way, computed, found) of each line of the table; found begins with "measured" unless it was not run."""
    return re.findall(r"^(\S.*?) +computed +(\S+ \wB) +(\S.*)$", said, re.MULTILINE)


@pytest.mark.timeout(900)
@pytest.mark.long
def test_the_plain_way_needs_too_much_and_is_not_run_and_each_technique_takes_less(outputs):
    assert figures(outputs["baseline"])[0][2] == "not run: more than 0.006 GB"
    lines = figures(outputs["alone"])
    assert len(lines) == len(TECHNIQUES)
    units = {"kB": 1e3, "MB": 1e6}

    def count(text):
        number, unit = text.split()
        return float(number) * units[unit]

    computed = [count(text) for _, text, _ in lines]
    assert computed[:-1] == sorted(computed[:-1], reverse=True)
    taken = [(text, found.removeprefix("measured ")) for _, text, found in lines if not found.startswith("not run: ")]
    measured = [(count(text), count(found)) for text, found in taken]
    assert len(measured) >= 3
    for predicted, found in measured:
        assert found == pytest.approx(predicted, rel=0.06)


@pytest.mark.long
def test_the_model_learns(outputs):
    assert "it learns: " in outputs["train"]
    assert outputs["write"].strip()


@pytest.mark.long
def test_what_was_not_measured_on_a_gpu_says_so(outputs):
    assert all("measured on cpu, not on a GPU" in outputs[name] for name in TECHNIQUES)
    assert "tokens/s on cpu" in outputs["train"]


def test_the_texts_figures_are_the_calculators():
    notebook = filled_in("gpt2-large.ipynb")
    texts = {cell.id.removesuffix("-text"): cell.source for cell in notebook.cells if cell.cell_type == "markdown"}
    said = {name: re.findall(r"\*\*([\d.]+) GB\*\*", texts[name]) for name in TECHNIQUES}
    plain = LanguageConfig(hidden_size=1280, num_layers=36, num_heads=20)
    shared = dataclasses.replace(plain, shared_blocks=9)
    keep, again = (MemoryPlan(activations=name, loss_tokens=None) for name in ("keep", "checkpoint"))
    rebuilt = MemoryPlan(activations="reversible", loss_tokens=None)
    pieces = MemoryPlan(activations="reversible", loss_tokens=256, samples=1, grads_in_place=True)
    turned, alone = (dataclasses.replace(config, reversible=True) for config in (shared, plain))
    ways = {
        "baseline": (plain, keep, "adamw"),
        "eight-bit": (plain, keep, "adamw8bit"),
        "sharing": (shared, keep, "adamw8bit"),
        "checkpoint": (shared, again, "adamw8bit"),
        "reversible": (turned, rebuilt, "adamw8bit"),
        "pieces": (turned, pieces, "adamw8bit"),
        "alone": (alone, pieces, "adamw8bit"),
    }
    for name, (config, plan, optimizer) in ways.items():
        cost = cost_of(config, plan, TrainingSetup(batch=4, optimizer=optimizer))
        assert said[name] == [f"{cost.peak_bytes / 1e9:.3g}"], name


def test_the_page_is_that_of_the_notebook():
    assert PAGE.read_text(encoding="utf-8") == page_of(NOTEBOOK), "run: python docs/notebook_page.py"
