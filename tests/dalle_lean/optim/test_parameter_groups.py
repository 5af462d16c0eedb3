"""The parameters that an optimizer takes."""

from dalle_lean import Dalle, DalleConfig
from dalle_lean.optim.parameter_groups import parameter_groups


def test_matrices_decay_and_vectors_do_not_and_each_parameter_stands_once():
    config = DalleConfig(
        text_vocab_size=50, text_len=4, image_vocab_size=20, image_side=3, hidden_size=16, num_layers=5, num_heads=2,
        head_size=8, shared_blocks=2, attention_pattern=("row", "column"),
    )  # fmt: skip
    model = Dalle(config)
    decaying, plain = parameter_groups(model, weight_decay=0.1)
    assert (decaying["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert all(name.endswith("weight") and "norm" not in name for name in (names[id(p)] for p in decaying["params"]))
    assert all("norm" in name or name.endswith(("bias", "scale")) for name in (names[id(p)] for p in plain["params"]))
    grouped = [id(parameter) for group in (decaying, plain) for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters())
