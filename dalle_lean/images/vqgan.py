"""The VQGAN: pictures <-> codes (Esser et al. 2021, "Taming Transformers", arXiv 2012.09841).

The package taming-transformers provides the encoder and the decoder; the window encoder, both quantizers and the folder
format are implemented here. Weights have the published checkpoints' names.

Shapes: N pictures, H x W pixels, h x w codes (h = H / downscale), K codebook size, C code width.
"""

import hashlib
import io
import json
import math
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from dalle_lean.errors import UserError
from dalle_lean.fields import Range, check
from dalle_lean.io.files import write_json
from dalle_lean.io.folder_config import read_folder_config
from dalle_lean.io.safetensors_io import load_strictly, read_weights, save_weights
from dalle_lean.require import require

FORMAT = "dalle_lean_vqgan/1"
NORM_GROUPS = 32  # taming-transformers builds every GroupNorm with 32 groups


@dataclass(frozen=True, kw_only=True)
class VQGANConfig:
    """The VQGAN's architecture. The defaults are the published f=8 Gumbel model."""

    quantizer: Literal["gumbel", "vq"] = "gumbel"
    """"gumbel": a 1x1 convolution scores the codes; "vq": the nearest code wins."""
    # The upper limits are far beyond any known model, yet no damaged file can ask for all memory.
    codebook_size: Annotated[int, Range(1, 2**20)] = 8192
    code_width: Annotated[int, Range(1, 2**16)] = 256
    z_channels: Annotated[int, Range(1, 2**16)] = 256
    """Width of the encoder's output; a Gumbel quantizer needs z_channels == code_width."""
    channels: Annotated[int, Range(1, 4096)] = 128
    """Width at full resolution, before the multipliers; a multiple of 32."""
    channel_multipliers: tuple[Annotated[int, Range(1, 64)], ...] = (1, 1, 2, 4)
    """One per resolution; each after the first halves the picture."""
    num_res_blocks: Annotated[int, Range(1, 64)] = 2
    attention_resolutions: tuple[Annotated[int, Range(1, 8192)], ...] = (32,)
    """Sides in pixels, counted down from picture_side, at which blocks attend; the innermost always does."""
    picture_side: Annotated[int, Range(1, 8192)] = 256
    norm_groups: Annotated[int, Range(1, 4096)] = NORM_GROUPS
    """Groups of every GroupNorm. Keep four or more channels per group: with fewer, flat colours are lost."""
    encoder_window: int | None = None
    """Side in pixels of the window that a code sees, centred on its patch; None is the published encoder, whose codes
    see the whole picture."""

    def __post_init__(self) -> None:
        for name in ("channel_multipliers", "attention_resolutions"):
            if isinstance(values := getattr(self, name), list):
                object.__setattr__(self, name, tuple(values))
        check(self)
        if not 1 <= len(self.channel_multipliers) <= 10:
            raise UserError(f"channel_multipliers={self.channel_multipliers}: must be 1 to 10 of them")
        if self.channels % NORM_GROUPS:
            raise UserError(f"channels={self.channels}: must be a multiple of {NORM_GROUPS}")
        if self.channels % self.norm_groups:
            raise UserError(f"norm_groups={self.norm_groups}: must divide channels={self.channels}")
        if self.quantizer == "gumbel" and self.z_channels != self.code_width:
            raise UserError(f"z_channels={self.z_channels}: a Gumbel quantizer needs code_width={self.code_width}")
        if self.picture_side % self.downscale:
            raise UserError(f"picture_side={self.picture_side}: must be a multiple of {self.downscale}")
        windows = range(self.downscale, 4 * self.downscale + 1, 2)
        if self.encoder_window is not None and self.encoder_window not in windows:
            raise UserError(
                f"encoder_window={self.encoder_window!r}: must be an even number of pixels in "
                f"{windows[0]}..{windows[-1]}, or left out"
            )

    @property
    def downscale(self) -> int:
        """Pixels per code along one side: 8 with four multipliers."""
        return 2 ** (len(self.channel_multipliers) - 1)

    @property
    def image_side(self) -> int:
        """Codes along one side of a picture of picture_side pixels."""
        return self.picture_side // self.downscale

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON. An `encoder_window` of None is left out, so that published fingerprints stay valid."""
        content = asdict(self)
        if self.encoder_window is None:
            del content["encoder_window"]
        return content

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`; ValueError names unknown and missing fields."""
        known = {field.name for field in fields(cls)}
        if wrong := known ^ {*content, "encoder_window"}:
            raise UserError(f"VQGAN config: unknown or missing fields {sorted(wrong)}")
        return cls(**content)


class WindowEncoder(nn.Module):
    """An encoder whose codes each depend on one window of pixels: equal windows get equal codes. The published encoder
    attends to the whole picture and normalises over it, so a thing has other codes on another ground."""

    def __init__(self, config: VQGANConfig, window: int):
        super().__init__()
        width = 2 * config.channels * config.channel_multipliers[-1]
        step = config.downscale
        self.patches = nn.Conv2d(3, width, window, step, padding=(window - step) // 2, padding_mode="replicate")
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(2 * config.num_res_blocks)
        )
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, config.z_channels)

    def forward(self, pixels: Tensor) -> Tensor:
        """pixels [N, 3, H, W] -> [N, Z, h, w]."""
        x = self.patches(pixels).permute(0, 2, 3, 1)
        for block in self.blocks:
            x = x + block(x)
        return self.out(self.norm(x)).permute(0, 3, 1, 2)


class GumbelQuantizer(nn.Module):
    """A 1x1 convolution scores the codes (the published f=8 model). Only training adds Gumbel noise to the scores."""

    def __init__(self, config: VQGANConfig):
        super().__init__()
        self.proj = nn.Conv2d(config.z_channels, config.codebook_size, 1)
        self.embed = nn.Embedding(config.codebook_size, config.code_width)

    @property
    def table(self) -> Tensor:
        """The code vectors [K, C]."""
        return self.embed.weight

    def scores(self, z: Tensor) -> Tensor:
        """z [N, C, h, w] -> [N, K, h, w]; the highest is the code."""
        return self.proj(z)


class NearestQuantizer(nn.Module):
    """The nearest code vector in Euclidean distance (plain VQ)."""

    def __init__(self, config: VQGANConfig):
        super().__init__()
        self.embedding = nn.Embedding(config.codebook_size, config.code_width)

    @property
    def table(self) -> Tensor:
        """The code vectors [K, C]."""
        return self.embedding.weight

    def scores(self, z: Tensor) -> Tensor:
        """z [N, C, h, w] -> [N, K, h, w]: minus half the squared distance, up to a term that all codes share."""
        table = self.embedding.weight
        return torch.einsum("nchw,kc->nkhw", z, table) - table.square().sum(dim=1)[:, None, None] / 2


class VQGAN(nn.Module):
    """Encoder, quantizer and decoder. Pictures are in 0..1; the networks, like the published ones, use -1..1."""

    def __init__(self, config: VQGANConfig):
        super().__init__()
        self.config = config
        self.stored_fingerprints: tuple[str, ...] = ()  # from the config.json that it was loaded from
        taming = require("taming.modules.diffusionmodules.model", extra="demo")
        shape = {
            "double_z": False,
            "z_channels": config.z_channels,
            "resolution": config.picture_side,
            "in_channels": 3,
            "out_ch": 3,
            "ch": config.channels,
            "ch_mult": config.channel_multipliers,
            "num_res_blocks": config.num_res_blocks,
            "attn_resolutions": config.attention_resolutions,
            "dropout": 0.0,
        }
        with redirect_stdout(io.StringIO()):  # the package prints while it builds
            window = config.encoder_window
            self.encoder = taming.Encoder(**shape) if window is None else WindowEncoder(config, window)
            self.decoder = taming.Decoder(**shape)
        for module in self.modules():
            if isinstance(module, nn.GroupNorm):
                module.num_groups = config.norm_groups
        self.quantize = GumbelQuantizer(config) if config.quantizer == "gumbel" else NearestQuantizer(config)
        self.quant_conv = nn.Conv2d(config.z_channels, config.code_width, 1)
        self.post_quant_conv = nn.Conv2d(config.code_width, config.z_channels, 1)
        self.to(memory_format=torch.channels_last)  # bfloat16 convolutions are twice as fast on a CPU

    def latents(self, pixels: Tensor) -> Tensor:
        """pixels [N, 3, H, W] in -1..1 -> vectors before quantization [N, C, h, w]."""
        return self.quant_conv(self.encoder(pixels))

    def pixels(self, quantized: Tensor) -> Tensor:
        """Code vectors [N, C, h, w] -> pixels [N, 3, H, W], about -1..1, not clamped."""
        return self.decoder(self.post_quant_conv(quantized))

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Pictures [N, 3, H, W] in 0..1 -> the most likely codes [N, h * w], int64, raster order, without noise. H = W,
        a multiple of `config.downscale`. ValueError for other shapes, integers and values outside 0..1."""
        if not images.is_floating_point():
            raise ValueError(f"images: dtype {images.dtype}; must be floating, in 0..1 (bytes: divide by 255)")
        step = self.config.downscale
        side = images.shape[-1] if images.dim() else 0
        if images.dim() != 4 or images.shape[1] != 3 or images.shape[2] != side or side < step or side % step:
            raise ValueError(f"images: shape {list(images.shape)}; must be [N, 3, H, H] with H a multiple of {step}")
        # NaN fails both comparisons, so it is refused too.
        if images.numel() and not (images.min() >= 0 and images.max() <= 1):
            raise ValueError(f"images: values {images.min():.3g}..{images.max():.3g}; must be in 0..1")
        return self.most_likely_codes(images)

    @torch.no_grad()
    def most_likely_codes(self, images: Tensor) -> Tensor:
        """`encode` for pictures known to be valid: nothing waits for a GPU to check their values. On a CPU, where codes
        see only their own patch, equal patches are encoded once. On a GPU, counting them would wait for the device."""
        if self.config.encoder_window == self.config.downscale and images.device.type == "cpu":
            patches, index = unique_patches(images, self.config.downscale)
            return self._most_likely_codes(patches)[:, 0][index]
        return self._most_likely_codes(images)

    def _most_likely_codes(self, images: Tensor) -> Tensor:
        weight = self.quant_conv.weight
        z = self.latents(images.to(weight.device, weight.dtype) * 2 - 1)
        # In lower precision, codes with close scores would change places.
        with torch.autocast(weight.device.type, enabled=False):
            return self.quantize.scores(z.to(weight.dtype)).argmax(dim=1).flatten(start_dim=1)

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Codes [N, I], int64 in 0..K-1, I = h * h -> pictures [N, 3, H, W] in 0..1, clamped. ValueError for another
        dtype, a number of codes that is not a square, and a code out of range."""
        self.check_codes(codes)
        return self.decode_checked(codes.to(self.quantize.table.device))

    @torch.no_grad()
    def decode_checked(self, codes: Tensor) -> Tensor:
        """`decode` for codes known to be valid and on the device: nothing waits for it."""
        side = math.isqrt(codes.shape[1])
        quantized = nn.functional.embedding(codes, self.quantize.table)
        grid = quantized.transpose(1, 2).reshape(len(codes), -1, side, side)
        return (self.pixels(grid).clamp(-1, 1) + 1) / 2

    def check_codes(self, codes: Tensor) -> int:
        """The side of the square grid of codes."""
        if codes.dtype != torch.int64:
            raise ValueError(f"codes: dtype {codes.dtype}; must be torch.int64")
        side = math.isqrt(codes.shape[-1]) if codes.dim() == 2 else 0
        if side < 1 or side * side != codes.shape[1]:
            raise ValueError(f"codes: shape {list(codes.shape)}; must be [N, I] with I a square number")
        if codes.numel() and not (codes.min() >= 0 and codes.max() < self.config.codebook_size):
            raise ValueError(f"codes: {codes.min()}..{codes.max()}; must be in 0..{self.config.codebook_size - 1}")
        return side

    def fingerprint(self, dtype: torch.dtype = torch.float32) -> str:
        """Hexadecimal SHA-256 of the config and of every weight, rounded to `dtype`, as float32."""
        return sha256_of(self.config.to_dict(), self.rounded(dtype))

    def codes_fingerprint(self, dtype: torch.dtype = torch.float32) -> str:
        """`fingerprint` without decoder and picture_side: equal for VQGANs that give pictures the same codes."""
        description = {name: value for name, value in self.config.to_dict().items() if name != "picture_side"}
        decoder = ("decoder.", "post_quant_conv.")
        return sha256_of(description, {n: w for n, w in self.rounded(dtype).items() if not n.startswith(decoder)})

    def rounded(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The weights in `dtype`."""
        return {name: weight.detach().to(dtype) for name, weight in self.state_dict().items()}

    def reads_codes_of(self, recorded: str) -> bool:
        """Whether codes with the fingerprint `recorded` are this VQGAN's; older data records the older kinds."""
        return recorded in self.stored_fingerprints or recorded in (self.codes_fingerprint(), self.fingerprint())

    def check_reads(self, recorded: str, codes: str, advice: str = "") -> None:
        """UserError unless `reads_codes_of(recorded)`; its sentence begins with `codes` and ends with `advice`."""
        if not self.reads_codes_of(recorded):
            raise UserError(f"{codes} of the VQGAN {recorded[:12]}, not of {self.codes_fingerprint()[:12]}{advice}")

    def save(self, folder: str | Path, dtype: torch.dtype = torch.float32) -> None:
        """Write `config.json` and `model.safetensors`, each atomically, with the weights rounded to `dtype`."""
        save_weights(self.state_dict(), Path(folder) / "model.safetensors", dtype)
        fingerprints = {"fingerprint": self.fingerprint(dtype), "codes_fingerprint": self.codes_fingerprint(dtype)}
        write_json(Path(folder) / "config.json", {"format": FORMAT, **fingerprints, **self.config.to_dict()})

    @classmethod
    def load(cls, folder: str | Path, *, checked: bool = False) -> Self:
        """Read what `save` wrote, with float32 weights, in eval mode; ValueError for anything else.

        checked: the files' hashes were already verified (`dalle_lean.io.model_folder.check_parts`); the weights are
            not hashed again.
        """
        description = read_folder_config(folder, FORMAT)
        del description["format"]
        expected, codes = description.pop("fingerprint", None), description.pop("codes_fingerprint", None)
        if not isinstance(expected, str):
            raise UserError(f"{Path(folder) / 'config.json'}: the fingerprint of the weights is missing")
        with torch.device("meta"):  # takes no memory before the sizes are verified
            model = cls(VQGANConfig.from_dict(description))
        path = Path(folder) / "model.safetensors"
        weights = {name: tensor.float() for name, tensor in read_weights(path, model.state_dict()).items()}
        load_strictly(model, weights, str(path), assign=True)
        if not checked and model.fingerprint() != expected:
            raise UserError(f"{folder}: the weights are not those that config.json was written for")
        model.stored_fingerprints = (expected,) if codes is None else (expected, codes)
        return model.eval()


def unique_patches(images: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """images [N, 3, H, W] -> (unique patches [D, 3, side, side], each place's index into them [N, h * w])."""
    patches = nn.functional.unfold(images.float(), side, stride=side).transpose(1, 2)  # [N, h * w, 3 * side * side]
    rows = patches.reshape(-1, patches.shape[-1]).contiguous().numpy()
    as_bytes = rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1])))[:, 0]
    _, first, of_row = np.unique(as_bytes, return_index=True, return_inverse=True)
    unique = torch.from_numpy(rows[first]).reshape(-1, images.shape[1], side, side)
    return unique, torch.from_numpy(of_row).reshape(patches.shape[:2])


def sha256_of(description: Mapping[str, Any], weights: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode())
    for name, weight in sorted(weights.items()):
        digest.update(f"{name} {list(weight.shape)}".encode())
        digest.update(weight.detach().to("cpu", torch.float32).contiguous().numpy().astype("<f4").tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class CodebookUse:
    """How many codes are used, and how evenly."""

    share: float  # share of the codebook that occurs, 0..1
    perplexity: float  # exp of the entropy in nats: the number of equally frequent codes with the same entropy, 1..K


def codebook_use(counts: Tensor) -> CodebookUse:
    """Of a codebook whose codes occur so often, integers [K]."""
    used = counts[counts > 0].double() / counts.sum()
    return CodebookUse(share=len(used) / len(counts), perplexity=float((-used * used.log()).sum().exp()))
