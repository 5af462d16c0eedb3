"""Model folders: all that `generate` needs, each part listed with its hash.

config.json, model.safetensors and, where given, tokenizer.json, vocabulary.json, vqgan/, clip/ and a card README.md.
"""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from dalle_lean.errors import UserError, check_guidance
from dalle_lean.io.files import (
    MOST_BYTES,
    fresh_folder,
    link_or_copy,
    read_bytes,
    read_text,
    sha256_file,
    sync_files,
    sync_folder,
    write_json,
)
from dalle_lean.io.folder_config import MODEL_FORMAT, perhaps_beside, read_folder_config
from dalle_lean.io.safetensors_io import MOST_HEADER_BYTES, load_strictly, read_shapes, read_weights, save_weights
from dalle_lean.memory.parameters import parameters
from dalle_lean.model.config import DalleConfig
from dalle_lean.model.dalle import Dalle
from dalle_lean.tokenizer import MOST_TOKENIZER_BYTES
from dalle_lean.vocabulary import Vocabulary

FORMAT = MODEL_FORMAT
WEIGHTS = "model.safetensors"
HASHED_SUFFIXES = (".json", ".safetensors")
PART_FILES = ("config.json", "model.safetensors", "tokenizer.json")


def save_model(
    model: Dalle,
    folder: str | Path,
    *,
    tokenizer: str | Path | None = None,
    vocabulary: str | Path | None = None,
    vqgan: str | Path | None = None,
    clip: str | Path | None = None,
    card: str | None = None,
    vqgan_fingerprint: str | None = None,
    caption_dropout: float | None = None,
    guidance: float = 1.0,
    dtype: torch.dtype | None = torch.float32,
) -> None:
    """Write a model folder. An existing one is replaced as a whole once the new one is complete on disk; ValueError if
    `folder` holds anything else.

    Args:
        tokenizer: a tokenizer.json to copy.
        vocabulary: a vocabulary.json to copy, with the words of the training captions (dalle_lean.vocabulary).
        vqgan, clip: folders of these parts to copy.
        card: text of README.md.
        vqgan_fingerprint: of the VQGAN on whose codes the model was trained; `generate` refuses another one.
        caption_dropout: share of the training captions that were replaced by the empty one; None is unknown.
        guidance: the model's default classifier-free guidance; 1 is off.
        dtype: of the stored floating-point weights; None keeps the model's.
    """
    folder = Path(folder).resolve()  # a link keeps leading to the model
    check_guidance(guidance)
    check_replaceable(folder)
    with fresh_folder(folder) as fresh:
        save_weights(model.state_dict(), fresh / WEIGHTS, dtype)
        for name, file in (("tokenizer.json", tokenizer), ("vocabulary.json", vocabulary)):
            if file is not None:
                shutil.copyfile(file, fresh / name)
        for name, part in (("vqgan", vqgan), ("clip", clip)):
            if part is not None:
                copy_part(Path(part), fresh / name)
        if card is not None:
            (fresh / "README.md").write_text(card, encoding="utf-8")
        content = {
            "format": FORMAT,
            "dalle": model.config.to_dict(),
            "vqgan_fingerprint": vqgan_fingerprint,
            "caption_dropout": caption_dropout,
            "guidance": guidance,
            "parts": {name: sha256_file(fresh / name) for name in hashed_parts(fresh)},
        }
        write_json(fresh / "config.json", content)
        sync_files(fresh)
        replace_folder(fresh, folder)


def load_model(folder: str | Path) -> Dalle:
    """The transformer of a model folder, in float32 and eval mode. ValueError if a part is missing or altered, or
    the configuration or the weights do not fit this program."""
    return read_model(folder, check_parts(folder))


def read_model(
    folder: str | Path,
    checked: dict[str, Any],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = torch.float32,
) -> Dalle:
    """`load_model` for a folder that `check_parts` has verified; `checked` is its result. Nothing is hashed again.

    dtype: None keeps the stored one.
    """
    path = Path(folder) / WEIGHTS
    model = Dalle(DalleConfig.from_dict(checked["dalle"]), device="meta")
    weights = {
        name: tensor.to(device, dtype if tensor.is_floating_point() else None)
        for name, tensor in read_weights(path, model.state_dict()).items()
    }
    load_strictly(model, weights, str(path), assign=True)
    return model.eval()


def copy_part(part: Path, out: Path) -> None:
    """Copy the files of a VQGAN or CLIP, but not those of its training beside them."""
    out.mkdir()
    for name in PART_FILES:
        if (part / name).is_file():
            shutil.copyfile(part / name, out / name)
    if not (out / "config.json").exists():
        raise UserError(f"{part} is not a finished VQGAN or CLIP: it has no config.json")


def pack_model(
    model: Path,
    out: Path,
    *,
    vocabulary: Path | None = None,
    vqgan: Path | None = None,
    clip: Path | None = None,
    card: Path | None = None,
    guidance: float | None = None,
    average: Path | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the model folder `model` to `out` with other parts or another dtype; None keeps `model`'s. With `average`,
    another model folder, the mean of both weights is written (`average_weights`). ValueError if a part is not of its
    kind, or the model was not trained on codes of `vqgan`."""
    content = check_parts(model)
    for file in (vocabulary, card):
        if file is not None and not file.is_file():
            raise UserError(f"{file}: no such file")
    if clip is not None:
        from dalle_lean.clip.scorer import read_clip_config

        read_clip_config(clip)
    if vocabulary is not None:
        Vocabulary.load(vocabulary)
    expected = content.get("vqgan_fingerprint")
    if vqgan is not None:
        from dalle_lean.images.vqgan import VQGAN

        loaded = VQGAN.load(vqgan)
        if expected is not None:
            loaded.check_reads(expected, f"{vqgan} does not fit: {model} was trained on codes")
        del loaded  # before the model takes its place in memory
    new = {"tokenizer.json": None, "vocabulary.json": vocabulary, "vqgan": vqgan, "clip": clip, "README.md": card}
    files = {name: path or model / name for name, path in new.items() if path or (model / name).exists()}
    parts: dict[str, Any] = {name.removesuffix(".json"): path for name, path in files.items() if name != "README.md"}
    packed = read_model(model, content, dtype=None)
    if average is not None:
        average_weights(packed, content, average)
    save_model(
        packed,
        out,
        **parts,
        card=read_text(files["README.md"]) if "README.md" in files else None,
        vqgan_fingerprint=expected,
        caption_dropout=content.get("caption_dropout"),
        guidance=content.get("guidance", 1.0) if guidance is None else guidance,
        dtype=dtype,
    )


def average_weights(model: Dalle, content: dict[str, Any], other: Path) -> None:
    """Set each weight to the mean of `model`'s, whose config.json is `content`, and of the model folder `other`
    (Wortsman et al. 2022, arXiv 2203.05482): a model that was trained further then keeps more of what it could before.
    ValueError unless both have one configuration, one tokenizer and one VQGAN."""
    theirs = check_parts(other)
    tokenizers = [each["parts"].get("tokenizer.json") for each in (content, theirs)]
    for what, same in (
        ("configuration", content["dalle"] == theirs["dalle"]),
        ("tokenizer", tokenizers[0] == tokenizers[1]),
        ("VQGAN", content.get("vqgan_fingerprint") == theirs.get("vqgan_fingerprint")),
    ):
        if not same:
            raise UserError(f"{other} has another {what}; only the model that a training began from can be averaged")
    others = read_model(other, theirs).state_dict()
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            if weight.is_floating_point():
                weight.copy_((weight.float() + others[name]) / 2)


def check_parts(folder: str | Path) -> dict[str, Any]:
    """The content of config.json; ValueError unless every part has a possible size and the recorded SHA-256."""
    folder = Path(folder)
    content = read_folder_config(folder, FORMAT)
    parts = content.get("parts")
    if not isinstance(content.get("dalle"), dict) or not isinstance(parts, dict) or WEIGHTS not in parts:
        raise UserError(f"{folder}/config.json does not name the model's configuration and its parts")
    if not isinstance(content.get("vqgan_fingerprint"), str | None):
        raise UserError(f"{folder}/config.json: vqgan_fingerprint must be a string or null")
    dropout, guidance = content.get("caption_dropout"), content.get("guidance", 1.0)
    if dropout is not None and not (isinstance(dropout, float | int) and 0 <= dropout <= 1):
        raise UserError(f"{folder}/config.json: caption_dropout must be a share in 0..1 or null")
    if not isinstance(guidance, float | int):
        raise UserError(f"{folder}/config.json: guidance must be a number")
    try:
        check_guidance(guidance)
    except ValueError as error:
        raise UserError(f"{folder}/config.json: {error}") from None
    on_disk = set(hashed_parts(folder))
    for name in sorted(on_disk | set(parts)):
        if name not in on_disk:
            raise UserError(f"{folder}: {name} is missing; get a complete copy of the folder")
        if name not in parts:
            raise UserError(f"{folder}: {name} does not belong to this model; remove it or save the folder again")
    check_sizes(folder, on_disk, DalleConfig.from_dict(content["dalle"]))
    for name in sorted(on_disk):
        if sha256_file(folder / name) != parts[name]:
            raise UserError(f"{folder}: {name} is not the file this model was saved with; get a complete copy")
    return content


def check_sizes(folder: Path, parts: Iterable[str], config: DalleConfig) -> None:
    """ValueError for a part of an impossible size, before minutes are spent on hashing it."""
    for path in (folder / name for name in parts):
        if path.suffix == ".json":
            limit_bytes = MOST_TOKENIZER_BYTES if path.name == "tokenizer.json" else MOST_BYTES
            if path.stat().st_size > limit_bytes:
                raise UserError(f"{path} has {path.stat().st_size:,} bytes: it may have {limit_bytes:,} at most")
        else:
            read_shapes(path)
    most_bytes = 8 * parameters(config) + MOST_HEADER_BYTES
    if (size_bytes := (folder / WEIGHTS).stat().st_size) > most_bytes:
        raise UserError(f"{folder / WEIGHTS} has {size_bytes:,} bytes: the model's weights have {most_bytes:,} at most")


def hashed_parts(folder: Path) -> list[str]:
    """Paths, relative to the folder, of the parts with a hash: JSON and safetensors files except config.json.

    Hidden files are no parts: the hub's client leaves some in .cache.
    """
    parts = (name for name in visible_files(folder) if name.suffix in HASHED_SUFFIXES and name != Path("config.json"))
    return sorted(part.as_posix() for part in parts)


def visible_files(folder: Path) -> list[Path]:
    """Paths, relative to the folder, of the files in it and its subfolders that are not hidden."""
    names = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return [name for name in names if not any(part.startswith(".") for part in name.parts)]


def find_model(name: str | None = None) -> Path:
    """The folder of a model: `name` is a folder or a hub id; None is $DALLE_LEAN_MODEL, else the bundled model. Only a
    hub id ("owner/name") is downloaded, without its code and pickles."""
    name = name or os.environ.get("DALLE_LEAN_MODEL")
    if not name:
        return bundled_model()
    if Path(name).is_dir():
        read_folder_config(name, FORMAT)  # before a page or a drawing loads what it needs
        return Path(name)
    if Path(name).is_file():
        raise UserError(f"{name} is a file, not a model folder; give a folder, or a hub id such as owner/name")
    perhaps = perhaps_beside(Path(name))
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise UserError(f"no model folder at {name}{perhaps}; give a folder, or a hub id such as owner/name")
    from huggingface_hub import snapshot_download

    patterns = [f"*{suffix}" for suffix in HASHED_SUFFIXES] + ["*.md"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"there is no folder {name}{perhaps}, and no model of that name came from the hub: {reason}"
        ) from None


def bundled_model() -> Path:
    folder = Path(__file__).resolve().parents[2] / "models" / "emoji"
    if not (folder / "config.json").is_file():
        raise UserError("this installation has no bundled model; name one with --model or $DALLE_LEAN_MODEL")
    return folder


def check_replaceable(folder: Path) -> None:
    """ValueError unless `folder` is missing, empty or a model folder; nothing else is ever replaced."""
    if folder.is_dir() and not any(folder.iterdir()):
        return
    config = folder / "config.json"
    if folder.exists() and not (config.is_file() and FORMAT.encode() in read_bytes(config)):
        raise UserError(f"{folder} is neither empty nor a model folder and is not replaced; name another folder")


def keep_other_files(folder: Path, fresh: Path) -> None:
    """Take over what is no part of a model, such as the pictures that a card shows. Hidden files go."""
    for name in visible_files(folder):
        if name.suffix not in HASHED_SUFFIXES and name != Path("README.md"):
            (fresh / name).parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(folder / name, fresh / name)


def replace_folder(fresh: Path, folder: Path) -> None:
    """Replace the model folder `folder` by `fresh`, and keep its other files. A kill between the two renames leaves
    the old folder as `.NAME.old`; the next call first puts it back, so a complete folder is never lost."""
    retired = folder.with_name(f".{folder.name}.old")
    if retired.exists() and not folder.exists():
        os.rename(retired, folder)
    shutil.rmtree(retired, ignore_errors=True)
    if folder.exists():
        keep_other_files(folder, fresh)
        os.rename(folder, retired)
    os.rename(fresh, folder)
    sync_folder(folder.parent)
    shutil.rmtree(retired, ignore_errors=True)
