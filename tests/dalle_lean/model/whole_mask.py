"""The whole mask of one kind of attention, of which the product only computes parts."""

import torch

from dalle_lean.model.masks import code_sees_code, text_mask


def attention_mask(config, kind):
    """Over `<bos>`, the caption and all codes, [S, S] booleans."""
    text, places = config.num_text_positions, torch.arange(config.image_len)
    mask = torch.zeros(text + len(places), text + len(places), dtype=torch.bool)
    mask[:text, :text] = text_mask(text)
    mask[text:, :text] = True
    mask[text:, text:] = code_sees_code(config, kind, config.image_side, places[:, None], places[None, :])
    return mask
