"""docs/published.md, walked with files named and built like the published ones, of their sizes and of small ones, with
random weights."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass, field
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
from tests.children import PROGRAM, kill_family, start
from tests.dalle_lean.clip.archives import write_archive
from tests.hub import loopback_hub
from tests.preprocessing.shard_folders import random_codes, write_published
from training.swarm.config import read_settings
from training.swarm.network.addresses import free_ports

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs" / "published.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    dalle-lean (.*)$", GUIDE.replace("\\\n", " "), flags=re.MULTILINE)
# Fewer pictures and steps than by default, weights that are read faster, and a host on loopback.
REDUCED = {
    "--out out": "--out out --num-images 2 --best 1 --precision int8",
    "--config paper": "--config recipe.toml",
    "--announce 203.0.113.5": "--announce 127.0.0.1 --listen 127.0.0.1 --port 0 --steps 3",
}
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


def vqgan_yaml(embed_dim, n_embed, resolution, ch, ch_mult, num_res_blocks, attn_resolutions):
    return {
        "target": "taming.models.vqgan.GumbelVQ",
        "params": {
            "kl_weight": 1e-08,
            "embed_dim": embed_dim,
            "n_embed": n_embed,
            "monitor": "val/rec_loss",
            "ddconfig": {
                **{"double_z": False, "z_channels": embed_dim, "resolution": resolution, "in_channels": 3, "out_ch": 3},
                **{"ch": ch, "ch_mult": ch_mult, "num_res_blocks": num_res_blocks},
                **{"attn_resolutions": attn_resolutions, "dropout": 0.0},
            },
            "lossconfig": {"target": "taming.modules.losses.vqperceptual.VQLPIPSWithDiscriminator", "params": {}},
        },
    }


@dataclass(frozen=True)
class Size:
    """What the downloads contain, and the options that files of another size than the published ones need."""

    model: DalleConfig
    vqgan: dict
    clip: str
    options: dict = field(default_factory=dict)


WORDS = 32_100
FULL = Size(DalleConfig(), vqgan_yaml(256, 8192, 256, 128, [1, 1, 2, 4], 2, [32]), "ViT-B-32-quickgelu")
SMALL = Size(
    DalleConfig(
        text_vocab_size=WORDS,
        text_len=16,
        image_vocab_size=64,
        image_side=4,
        hidden_size=32,
        num_layers=4,
        num_heads=2,
        head_size=16,
    ),
    vqgan_yaml(8, 64, 32, 32, [1, 1, 1, 1], 1, []),
    "ViT-S-32-alt",
    {
        "--kind clip": "--kind clip --architecture ViT-S-32-alt",
        "downloads/dalle.pt paper": "downloads/dalle.pt paper --config dalle.json",
    },
)


def write_vqgan(folder: Path, content: dict) -> VQGAN:
    """As PyTorch Lightning 1.0 wrote it: weights, those of the loss, and the state of training and its callbacks."""
    vqgan = VQGAN(taming_config(content))
    callback = type("ModelCheckpoint", (), {"__module__": "pytorch_lightning.callbacks.model_checkpoint"})
    checkpoint = {
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
        torch.save(checkpoint, folder / "vqgan.gumbelf8.ckpt")
    (folder / "vqgan.gumbelf8.config.yml").write_text(yaml.safe_dump({"model": content}))
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


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(SMALL, marks=pytest.mark.slow),
        pytest.param(FULL, marks=[pytest.mark.slow, pytest.mark.timeout(3000)]),
    ],
    ids=["small", "full"],
)
def size(request):
    return request.param


@pytest.fixture(scope="module")
def home(size, tmp_path_factory):
    """A folder with the downloads."""
    home = tmp_path_factory.mktemp("published")
    (home / "downloads" / "data").mkdir(parents=True)
    torch.manual_seed(0)
    vqgan = write_vqgan(home / "downloads", size.vqgan)
    model = Dalle(size.model)
    torch.save(to_dalle_pytorch(model, "fork", "model."), home / "downloads" / "dalle.pt")
    (home / "dalle.json").write_text(json.dumps(size.model.to_dict()))
    (home / "recipe.toml").write_text(RECIPE)
    write_archive(open_clip.create_model(size.clip).half().state_dict(), home / "downloads" / "ViT-B-32.pt")
    write_tokenizer(home / "downloads" / "tokenizer.json")
    for number in range(2):
        file = home / "downloads" / "data" / f"train-{number:05d}-of-00002.parquet"
        write_published(file, random_codes(vqgan, 60, seed=number))
    return home


@pytest.fixture(scope="module")
def client(home):
    """The environment of a program that sees a hub with the published shards."""
    shards = sorted((home / "downloads" / "data").glob("*.parquet"))
    with loopback_hub() as hub:
        hub.repos["dataset", "laion/laion_100m_vqgan_f8"] = [
            {f"data/{path.name}": path.read_bytes() for path in shards}
        ]
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        yield environment | {"PYTHONPATH": str(ROOT)} | hub.environment(home / "home")


def reduced(command, size):
    """The words of one of the page's commands."""
    for there, here in (REDUCED | size.options).items():
        command = command.replace(there, here)
    return shlex.split(command)


@pytest.fixture(scope="module")
def walked(home, size, client):
    """The page's commands but the last one, one after the other; the prompt page is ended once it is there."""
    *commands, last = COMMANDS
    assert last.startswith("host ")
    pages = []
    with contextlib.chdir(home), pytest.MonkeyPatch.context() as patch:
        patch.setattr("demo.server.wait", lambda page: (pages.append(page.local_url), page.close(verbose=False)))
        for command in commands:
            words = reduced(command, size)
            if words[0] == "demo":
                words += ["--port", str(free_ports(1)[0])]
            if "hf://" in command or (size is FULL and words[0] != "demo"):  # this process would keep gigabytes
                subprocess.run([*PROGRAM, *words], env=client, check=True)
                continue
            with pytest.raises(SystemExit) as end:
                main(words)
            assert end.value.code == 0, command
    assert len(pages) == 1
    return home


def until_said(sentence, words, folder, environment):
    """Run a command until it says this, then end it as Ctrl+C does."""
    program = start(
        [*PROGRAM, *words],
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said = []
        for line in program.stdout:
            said.append(line)
            if sentence in line:
                program.send_signal(signal.SIGINT)
                program.communicate(timeout=120)
                return
        pytest.fail("".join(said))
    finally:
        kill_family(program)


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


def test_the_converted_clip_has_the_archives_weights(walked):
    archived = torch.jit.load(walked / "downloads" / "ViT-B-32.pt").state_dict()
    clip = ClipScorer.load(walked / "parts" / "clip").model.state_dict()
    assert clip.keys() <= archived.keys()
    assert all(torch.equal(value, archived[name].to(value.dtype)) for name, value in clip.items())


@pytest.mark.slow
@pytest.mark.swarm
def test_others_can_be_let_in(walked, size, client):
    until_said("dalle-lean join /ip4/127.0.0.1/", reduced(COMMANDS[-1], size), walked, client)
    assert read_settings(walked / "runs" / "paper").swarm.data == "hf://datasets/laion/laion_100m_vqgan_f8"
