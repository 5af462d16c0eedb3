"""docs/published.md, walked: files named, built and sized like the published ones, with random weights."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import open_clip
import pytest
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from dalle_lean import Dalle, DalleConfig
from dalle_lean.cli import main
from dalle_lean.clip.scorer import ClipScorer
from dalle_lean.convert import to_dalle_pytorch
from dalle_lean.convert.taming import taming_config
from dalle_lean.images.vqgan import VQGAN
from dalle_lean.io.model_folder import check_parts
from tests.children import PROGRAM
from tests.dalle_lean.clip.archives import write_archive
from tests.hub import loopback_hub
from tests.preprocessing.shard_folders import random_codes, write_published

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs" / "published.md").read_text(encoding="utf-8")
CLIP = "ViT-B-32-quickgelu"
WORDS = 32_100
# Fewer pictures and steps than by default, and weights that are read faster.
REDUCED = {"--out out": "--out out --num-images 2 --best 1 --precision int8", "--config paper": "--config recipe.toml"}
RECIPE = """
[memory]
activations = "reversible"
loss_tokens = 512
precision = "bf16"

[optimizer]
name = "lamb"

[schedule]
warmup_steps = 0
total_steps = 1
log_every = 1
heldout_every = 1
sample_every = 0
checkpoint_every = 1

[data]
batch_size = 1
heldout_samples = 1
heldout_share = 0.1
"""
VQGAN_YAML = {
    "target": "taming.models.vqgan.GumbelVQ",
    "params": {
        "kl_weight": 1e-08,
        "embed_dim": 256,
        "n_embed": 8192,
        "monitor": "val/rec_loss",
        "ddconfig": {
            **{"double_z": False, "z_channels": 256, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128},
            **{"ch_mult": [1, 1, 2, 4], "num_res_blocks": 2, "attn_resolutions": [32], "dropout": 0.0},
        },
        "lossconfig": {"target": "taming.modules.losses.vqperceptual.VQLPIPSWithDiscriminator", "params": {}},
    },
}


def write_vqgan(folder: Path) -> VQGAN:
    """As PyTorch Lightning 1.0 wrote it: weights, those of the loss, and the state of training and its callbacks."""
    vqgan = VQGAN(taming_config(VQGAN_YAML))
    callback = type("ModelCheckpoint", (), {"__module__": "pytorch_lightning.callbacks.model_checkpoint"})
    content = {
        "epoch": 12,
        "global_step": 345,
        "pytorch-lightning_version": "1.0.8",
        "callbacks": {callback: {"monitor": "val/rec_loss", "best_model_score": torch.tensor(0.5)}},
        "optimizer_states": [{"state": {0: {"step": 1, "exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 1e-4}]}],
        "lr_schedulers": [],
        "state_dict": {**vqgan.state_dict(), "loss.discriminator.main.0.weight": torch.zeros(4, 3, 4, 4)},
    }
    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "pytorch_lightning",
            "pytorch_lightning.callbacks",
            "pytorch_lightning.callbacks.model_checkpoint",
        ):
            patch.setitem(sys.modules, name, type(sys)(name))
        sys.modules["pytorch_lightning.callbacks.model_checkpoint"].ModelCheckpoint = callback
        torch.save(content, folder / "vqgan.gumbelf8.ckpt")
    (folder / "vqgan.gumbelf8.config.yml").write_text(yaml.safe_dump({"model": VQGAN_YAML}))
    return vqgan


def write_tokenizer(path: Path) -> None:
    """T5's parts and number of words."""
    words = [
        ("<pad>", 0.0),
        ("</s>", 0.0),
        ("<unk>", 0.0),
        *((letter, -4.0) for letter in "▁abcdefghijklmnopqrstuvwxyz"),
    ]
    words += [(f"▁word{number}", -9.0) for number in range(WORDS - len(words))]
    tokenizer = Tokenizer(models.Unigram(words, unk_id=2))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(path))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with the downloads."""
    home = tmp_path_factory.mktemp("published")
    (home / "downloads" / "data").mkdir(parents=True)
    torch.manual_seed(0)
    vqgan = write_vqgan(home / "downloads")
    model = Dalle(DalleConfig())
    torch.save(to_dalle_pytorch(model, "fork", "model."), home / "downloads" / "dalle.pt")
    (home / "recipe.toml").write_text(RECIPE)
    write_archive(open_clip.create_model(CLIP).half().state_dict(), home / "downloads" / "ViT-B-32.pt")
    write_tokenizer(home / "downloads" / "tokenizer.json")
    for number in range(2):
        file = home / "downloads" / "data" / f"train-{number:05d}-of-00002.parquet"
        write_published(file, random_codes(vqgan, 60, seed=number))
    return home


@pytest.fixture(scope="module")
def walked(home):
    """The page's commands, one after the other; the prompt page is opened and ended, and `host` is left out."""
    published = {
        f"data/{path.name}": path.read_bytes() for path in sorted((home / "downloads" / "data").glob("*.parquet"))
    }
    done = []
    with pytest.MonkeyPatch.context() as patch, loopback_hub() as hub:
        hub.repos["dataset", "laion/laion_100m_vqgan_f8"] = [published]
        client = os.environ | {"PYTHONPATH": str(ROOT)} | hub.environment(home / "home")
        patch.chdir(home)
        for command in re.findall(r"^    dalle-lean (.*)$", GUIDE.replace("\\\n", " "), flags=re.MULTILINE):
            for there, here in REDUCED.items():
                command = command.replace(there, here)
            words = re.findall(r'"[^"]*"|\S+', command)
            words = [word.strip('"') for word in words]
            if words[0] == "demo":
                see_the_page(words, client)
            elif "hf://" in command and words[0] == "train":
                subprocess.run([*PROGRAM, *words], env=client, cwd=home, check=True)
            elif words[0] != "host":
                with pytest.raises(SystemExit) as end:
                    main(words)
                assert end.value.code == 0, command
            done.append(words[0])
    assert done == ["convert"] * 3 + ["generate", "demo", "pack", "shards", "shards", "train", "train", "host"]
    return home


def see_the_page(words, environment):
    page = subprocess.Popen(
        [*PROGRAM, *words, "--port", "17860"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said = []
        for line in page.stdout:
            said.append(line)
            if "the prompt page is at" in line:
                return
        pytest.fail("".join(said))
    finally:
        page.kill()
        page.communicate()


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_way_ends_in_pictures_a_page_and_a_continued_training(walked):
    assert (walked / "out" / "00.png").is_file()
    assert json.loads((walked / "out" / "results.json").read_text())["settings"]["scorer"].startswith("CLIP")
    for run in ("continued", "streamed"):
        metrics = [json.loads(line) for line in (walked / run / "metrics.jsonl").read_text().splitlines()]
        assert any("heldout_loss" in row for row in metrics)
        check_parts(walked / run / "model")
    parts = check_parts(walked / "published")["parts"]
    assert {"vqgan/model.safetensors", "clip/model.safetensors", "tokenizer.json"} <= parts.keys()
    assert "VQGAN that made the codes" in (walked / "published" / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_converted_clip_has_the_archives_weights(walked):
    archived = open_clip.create_model(CLIP).half()
    clip = ClipScorer.load(walked / "parts" / "clip").model.state_dict()
    assert clip.keys() == archived.state_dict().keys()
    assert all(torch.equal(value, value.half().float()) for value in clip.values() if value.is_floating_point())
