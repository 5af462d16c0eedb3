"""The ranges of Lamb's settings, without torch: a recipe is checked long before there are any weights."""

import math
from collections.abc import Mapping
from typing import Any

from dalle_lean.errors import UserError


def check_settings(settings: Mapping[str, Any]) -> None:
    """UserError names the first of Lamb's settings, without `lr`, that is out of range; others are ignored."""
    betas, block_size = settings["betas"], settings["block_size"]
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise UserError(f"betas = {list(betas)}: must be two numbers of at least 0 and below 1")
    for name in ("eps", "weight_decay", "min_eight_bit_numel"):
        check_number(settings, name)
    if not settings["clamp_weight_norm"] > 0:
        raise UserError(f"clamp_weight_norm = {settings['clamp_weight_norm']}: must be above 0")
    if not isinstance(block_size, int) or block_size < 1:
        raise UserError(f"block_size = {block_size}: must be a whole number of at least 1")


def check_number(settings: Mapping[str, Any], name: str) -> None:
    """UserError unless the setting is finite and at least 0."""
    if not 0 <= settings[name] < math.inf:
        raise UserError(f"{name} = {settings[name]}: must be a finite number of at least 0")
