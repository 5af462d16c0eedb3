"""Rules that reduce what several peers sent to one tensor.

A rule is a hivemind TensorPartReducer with the arguments of FiniteMean: it receives one part of a tensor from each
sender and returns the part that all of them continue with. To add a rule, put its class into `RULES` and its name into
training.swarm.config.
"""

from training.swarm.averaging.finite_mean import FiniteMean
from training.swarm.averaging.robust_rules import CentredClipping, Median, TrimmedMean
from training.swarm.config import AGGREGATIONS

RULES: dict[str, type[FiniteMean]] = {
    "centred_clipping": CentredClipping,
    "trimmed_mean": TrimmedMean,
    "median": Median,
    "mean": FiniteMean,
}
assert set(RULES) == set(AGGREGATIONS)
