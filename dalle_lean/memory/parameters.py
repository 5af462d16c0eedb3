"""The number of parameters of a DALL-E, tensor by tensor.

D hidden size, H d heads times head size, m D inner width of the feed-forward, V rows of the vocabulary.
"""

from dalle_lean.model.config import DalleConfig


def parameters(config: DalleConfig) -> int:
    """Number of parameters of `Dalle(config)`; tied ones count once."""
    return sum(parameter_sizes(config))


def parameter_sizes(config: DalleConfig) -> list[int]:
    """Elements of each parameter tensor: the blocks, what layers own, the output layer, the tables."""
    blocks = block_sizes(config) * (max(config.layer_blocks) + 1)
    layers = layer_sizes(config) * config.num_layers
    width = config.hidden_size
    output = [width, width, config.num_tokens * width, config.num_tokens]  # the last LayerNorm, [V, D] + V
    return [*blocks, *layers, *output, *table_sizes(config)]


def block_sizes(config: DalleConfig) -> list[int]:
    """A block: qkv [3 H d, D], out [D, H d] + D; up [m D, D] + m D, twice that if gated; down [D, m D] + D."""
    return [size for layer in projection_shapes(config).values() for size in projection_sizes(config, *layer)]


def muon_sizes(config: DalleConfig) -> list[int]:
    """Elements of each matrix that Muon updates: the blocks' weights, for PixelFly only the low-rank factors."""
    projections = [(projection_sizes(config, *layer), layer[2]) for layer in projection_shapes(config).values()]
    weights = [sizes[: len(sizes) - bias] for sizes, bias in projections]
    first = 0 if config.pixelfly_rank is None else 1
    return [size for sizes in weights for size in sizes[first:]] * (max(config.layer_blocks) + 1)


def projection_shapes(config: DalleConfig) -> dict[str, tuple[int, int, bool]]:
    """The projections of a block: (inputs, outputs, bias)."""
    width, attention = config.hidden_size, config.num_heads * config.head_size
    inner = config.ffn_multiplier * width
    return {
        "qkv": (width, 3 * attention, config.attention_bias),
        "out": (attention, width, True),
        "up": (width, (1 + config.ffn_gated) * inner, True),
        "down": (inner, width, True),
    }


def projection_sizes(config: DalleConfig, in_features: int, out_features: int, bias: bool) -> list[int]:
    """The tensors of one projection: a dense weight [out, in], or PixelFly's butterfly and low-rank factors; a bias."""
    if config.pixelfly_rank is None:
        return [in_features * out_features, *([out_features] if bias else [])]
    from dalle_lean.model.pixelfly import pixelfly_parameters

    rank, sizes = config.pixelfly_rank, (config.pixelfly_block_size, config.pixelfly_butterfly_size)
    low_rank = [rank * in_features, rank * out_features] if rank else []
    both = pixelfly_parameters(in_features, out_features, *sizes, rank, bias=False)
    return [both - sum(low_rank), *low_rank, *([out_features] if bias else [])]


def layer_sizes(config: DalleConfig) -> list[int]:
    """A layer's own tensors: for each branch LayerScale [D] and LayerNorm (2 [D]), with sandwich norm a second one."""
    return [config.hidden_size] * (2 * (5 if config.sandwich_norm else 3))


def table_sizes(config: DalleConfig) -> list[int]:
    """An untied input table [V, D]; without rotary positions, learnt ones of the text, of rows and of columns."""
    width = config.hidden_size
    tables = [] if config.tie_embeddings else [config.num_tokens * width]
    if not config.rotary:
        tables.append(config.num_text_positions * width)
    if not config.rotary and config.image_len:
        tables += [config.image_side * width, config.image_side * width]
    return tables
