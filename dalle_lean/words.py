"""Counts with their nouns."""


def counted(count: int, noun: str) -> str:
    """`count` and `noun`, in the regular plural unless the count is 1: "1 shard", "1,200 batches"."""
    ending = "es" if noun.endswith(("ch", "s")) else "s"
    return f"{count:,} {noun}{'' if count == 1 else ending}"
