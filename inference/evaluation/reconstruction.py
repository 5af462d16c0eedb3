"""How much of a picture its codes keep, and how many codes of a thing stay the same on another ground.

Shapes: N pictures, S side in pixels, I codes in a picture.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dalle_lean.images.files import to_uint8
from dalle_lean.images.ground import ground_rgb, thing_mask
from dalle_lean.images.vqgan import VQGAN, codebook_use
from dalle_lean.progress import OnBatch, uncounted

BATCH = 16
WINDOW = 11
SIGMA = 1.5
LUMA = (0.299, 0.587, 0.114)


@dataclass(frozen=True, kw_only=True)
class Reconstruction:
    """Quality of held-out pictures after encoding and decoding."""

    psnr_db: float  # from the mean squared error over all pictures, pixels in 0..1
    ssim: float  # mean structural similarity of their lightness, -1..1 (Wang et al. 2004)
    codes_used: float  # share of the codebook that occurs, 0..1
    perplexity: float  # of the codes' frequencies: `CodebookUse.perplexity`


@torch.inference_mode()
def reconstruct(vqgan: VQGAN, pixels: Tensor, on_batch: OnBatch = uncounted) -> tuple[Reconstruction, Tensor, Tensor]:
    """uint8 [N, 3, S, S] -> (measures, codes [N, I], reconstructions uint8 [N, 3, S, S])."""
    made, squared, similar = [], 0.0, 0.0
    codes = encode(vqgan, pixels, on_batch)
    for chunk, chunk_codes in zip(pixels.split(BATCH), codes.split(BATCH), strict=True):
        decoded = vqgan.decode(chunk_codes)
        original = chunk.to(decoded.device).float() / 255
        squared += float((decoded - original).double().square().sum())
        similar += float(ssim(decoded, original).sum())
        made.append(to_uint8(decoded).cpu())
    use = codebook_use(torch.bincount(codes.flatten(), minlength=vqgan.config.codebook_size))
    measured = Reconstruction(
        psnr_db=-10 * math.log10(max(squared / pixels.numel(), 1e-10)),
        ssim=similar / len(pixels),
        codes_used=use.share,
        perplexity=use.perplexity,
    )
    return measured, codes, torch.cat(made)


@torch.inference_mode()
def encode(vqgan: VQGAN, pixels: Tensor, on_batch: OnBatch = uncounted) -> Tensor:
    """uint8 [N, 3, S, S] -> codes [N, I]."""
    device = vqgan.quant_conv.weight.device
    codes = []
    for chunk in pixels.split(BATCH):
        codes.append(vqgan.encode(chunk.to(device).float() / 255).cpu())
        on_batch(len(chunk))
    return torch.cat(codes)


def kept_on_other_ground(vqgan: VQGAN, pictures: Tensor, codes: Tensor, on_batch: OnBatch = uncounted) -> float | None:
    """Share of the codes [N, I] of pictures, uint8 [N, 3, S, S], that stay the same when the ground gets its
    complementary colour, of the patches inside a thing; None if there are none. A model must learn the others for every
    ground."""
    step = vqgan.config.downscale
    repainted, covered = pictures.clone(), torch.zeros(codes.shape, dtype=torch.bool)
    for row, picture in enumerate(pictures):
        rgb = picture.permute(1, 2, 0).double().numpy()
        mask = torch.from_numpy(thing_mask(rgb))
        other = torch.from_numpy(255 - ground_rgb(rgb).round()).byte()
        repainted[row] = torch.where(mask, picture, other[:, None, None])
        covered[row] = mask.unfold(0, step, step).unfold(1, step, step).flatten(2).all(dim=2).flatten()
    kept = (encode(vqgan, repainted, on_batch) == codes)[covered]
    return kept.float().mean().item() if len(kept) else None


def ssim(first: Tensor, second: Tensor) -> Tensor:
    """Structural similarity of the lightness of pictures in 0..1, [N, 3, S, S] twice -> [N].

    Gaussian windows of 11 pixels and a standard deviation of 1.5, constants 0.01 and 0.03, as in Wang et al. 2004,
    "Image Quality Assessment: From Error Visibility to Structural Similarity".
    """
    places = torch.arange(WINDOW, device=first.device) - WINDOW // 2
    line = torch.exp(-places.float().square() / (2 * SIGMA**2))
    window = torch.outer(line, line)[None, None] / line.sum() ** 2
    luma = torch.tensor(LUMA, device=first.device)[None, :, None, None]
    x, y = ((picture.float() * luma).sum(dim=1, keepdim=True) for picture in (first, second))
    mean_x, mean_y, square_x, square_y, product = (F.conv2d(z, window) for z in (x, y, x * x, y * y, x * y))
    variance_x, variance_y, covariance = square_x - mean_x**2, square_y - mean_y**2, product - mean_x * mean_y
    light = (2 * mean_x * mean_y + 0.01**2) / (mean_x**2 + mean_y**2 + 0.01**2)
    structure = (2 * covariance + 0.03**2) / (variance_x + variance_y + 0.03**2)
    return (light * structure).mean(dim=(1, 2, 3))
