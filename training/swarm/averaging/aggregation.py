"""Rules that reduce what several peers sent to one tensor.

A rule is a hivemind TensorPartReducer with the arguments of FiniteMean: it receives one part of a tensor from each
sender and returns the part that all of them continue with. To add a rule, put its class into `RULES` and its name into
training.swarm.config.
"""

from training.swarm.averaging.finite_mean import FiniteMean
from training.swarm.averaging.robust_rules import CentredClipping, Median, TighterClipping, TrimmedMean
from training.swarm.config import AGGREGATIONS, SwarmSettings

RULES: dict[str, type[FiniteMean]] = {
    "centred_clipping": CentredClipping,
    "trimmed_mean": TrimmedMean,
    "median": Median,
    "mean": FiniteMean,
}
assert set(RULES) == set(AGGREGATIONS)


def rule_of(settings: SwarmSettings) -> type[FiniteMean]:
    """The rule that a run's settings name, tighter once the run was rolled back: all its peers see that by its name."""
    if settings.wire.aggregation == "centred_clipping" and settings.swarm.rollbacks:
        return TighterClipping
    return RULES[settings.wire.aggregation]
