"""Top-k, top-p and temperature against their definitions."""

import pytest
import torch

from inference.sampling.filtering import filter_logits, guide, sample
from inference.sampling.noise import GumbelNoise

NAN = float("nan")
LOGITS = torch.tensor([[0.1, 0.4, 0.3, 0.2]]).log()


def kept(logits):
    return [row.isfinite().nonzero().flatten().tolist() for row in logits]


@pytest.mark.parametrize(("top_k", "expected"), [(1, [1]), (2, [1, 2]), (4, [0, 1, 2, 3]), (99, [0, 1, 2, 3])])
def test_top_k_keeps_the_k_largest(top_k, expected):
    assert kept(filter_logits(LOGITS, top_k=top_k)) == [expected]


@pytest.mark.parametrize("guidance", [0.5, 1.0, 3.0])
def test_guidance_moves_logits_away_from_those_of_the_empty_caption(guidance):
    null = LOGITS.flip(1)
    torch.testing.assert_close(guide(LOGITS, null, guidance), null + guidance * (LOGITS - null))


def test_guidance_draws_no_code_that_the_caption_makes_implausible():
    conditional = torch.tensor([[0.80, 0.12, 0.06, 0.02], [0.30, 0.30, 0.20, 0.20]]).log()
    null = torch.tensor([[0.80, 0.1989, 0.001, 0.0001], [0.01, 0.01, 0.01, 0.97]]).log()
    assert (null + 3 * (conditional - null)).argmax(dim=1).tolist() == [3, 0]
    assert kept(guide(conditional, null, torch.tensor([[3.0], [3.0]]))) == [[0, 1], [0, 1, 2, 3]]


def test_top_k_keeps_ties():
    assert kept(filter_logits(torch.tensor([[2.0, 1.0, 1.0, 0.0]]), top_k=2)) == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [(0.0, [1]), (0.39, [1]), (0.41, [1, 2]), (0.69, [1, 2]), (0.71, [1, 2, 3]), (0.95, [0, 1, 2, 3])],
)
def test_top_p_keeps_the_code_that_crosses_p_and_nothing_after_it(top_p, expected):
    assert kept(filter_logits(LOGITS, top_p=top_p)) == [expected]


def test_top_p_counts_the_mass_of_what_top_k_left():
    # 0.4 and 0.3 are left, that is 4/7 and 3/7: the first alone exceeds a half.
    assert kept(filter_logits(LOGITS, top_k=2, top_p=0.5)) == [[1]]
    assert kept(filter_logits(LOGITS, top_p=0.5)) == [[1, 2]]


def test_off_changes_nothing():
    logits = torch.randn(3, 1000)
    assert torch.equal(filter_logits(logits, top_k=0, top_p=1.0), logits)
    off = filter_logits(logits, torch.zeros(3, dtype=torch.long), torch.ones(3))
    assert torch.equal(off, logits)


def test_each_row_may_have_its_own_settings():
    torch.manual_seed(0)
    logits = torch.randn(4, 50)
    top_k, top_p = torch.tensor([0, 3, 10, 50]), torch.tensor([0.5, 1.0, 0.3, 0.9])
    together = filter_logits(logits, top_k, top_p)
    alone = [filter_logits(logits[row : row + 1], int(top_k[row]), float(top_p[row])) for row in range(4)]
    assert torch.equal(together, torch.cat(alone))


def test_top_p_keeps_ties_with_the_code_that_crosses_p():
    assert kept(filter_logits(torch.tensor([[3.0, 1.0, 2.0, 1.0, 1.0]]), top_p=0.7)) == [[0, 2]]
    assert kept(filter_logits(torch.tensor([[3.0, 1.0, 2.0, 1.0, 1.0]]), top_p=0.8)) == [[0, 1, 2, 3, 4]]


def by_the_definition(logits, top_k, top_p):
    """Which codes of one row may be drawn, code by code."""
    order = sorted(range(len(logits)), key=lambda code: -logits[code])
    if 0 < top_k < len(order):
        order = [code for code in order if logits[code] >= logits[order[top_k - 1]]]
    if top_p < 1:
        chances = torch.tensor([logits[code] for code in order], dtype=torch.float64).softmax(0).tolist()
        mass, count = 0.0, 0
        while mass <= top_p and count < len(order):
            mass, count = mass + chances[count], count + 1
        order = [code for code in order if logits[code] >= logits[order[count - 1]]]
    return sorted(order)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("largest_k", [None, 40])
def test_what_is_kept_is_what_the_definition_keeps(ties, largest_k):
    torch.manual_seed(0)
    logits = torch.randn(200, 60) * 3
    logits = logits.round() if ties else logits
    top_k, top_p = torch.randint(1 if largest_k else 0, 41, (200,)), torch.rand(200)
    found = kept(filter_logits(logits, top_k, top_p, largest_k))
    rows = zip(logits.tolist(), top_k.tolist(), top_p.tolist(), strict=True)
    assert found == [by_the_definition(*row) for row in rows]


def drawn_with_all_noise(logits, noise, top_k, top_p, temperature):
    """One code for each row by sorting all codes and adding noise to each."""
    codes = logits.shape[1]
    top_k = torch.where(top_k > 0, top_k, codes).clamp(max=codes)[:, None]
    falling = logits.topk(codes).values.double()
    kth = falling.gather(1, top_k - 1)
    weight = (falling - falling[:, :1]).exp()
    mass = weight.cumsum(dim=1)
    num_kept = (logits >= kth).sum(dim=1, keepdim=True)
    total = mass.gather(1, num_kept - 1)
    crosses = (mass > top_p[:, None] * total) & (top_p[:, None] < 1)
    first = torch.where(crosses.any(dim=1), crosses.int().argmax(dim=1), codes - 1)[:, None]
    kept = (logits >= kth) & (logits >= falling.gather(1, first))
    greedy = (temperature == 0)[:, None]
    scores = logits / temperature[:, None].masked_fill(greedy, 1) + noise.masked_fill(greedy, 0)
    return scores.masked_fill(~kept, -torch.inf).argmax(dim=1)


@pytest.mark.parametrize("codes", [1024, 1021, 8192])
@pytest.mark.parametrize("top_k_is_on", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # bfloat16 makes ties
def test_what_is_drawn_is_what_all_codes_and_all_noise_draw(codes, top_k_is_on, dtype):
    torch.manual_seed(0)
    noise = GumbelNoise(range(50), range(50), codes, steps=8)
    for step in range(8):
        logits = (torch.randn(50, codes) * 3).to(dtype).float()
        top_k = torch.randint(int(top_k_is_on), 300, (50,))
        top_p = torch.rand(50) * 1.2  # 1 is off, for a sixth of the rows
        top_p, temperature = top_p.clamp(max=1), (torch.rand(50) * 2 - 0.2).clamp(min=0)
        filtered = filter_logits(logits, top_k, top_p, 300 if top_k_is_on else None)
        drawn = sample(filtered, noise.at(step), temperature)
        expected = drawn_with_all_noise(logits, noise.at(step), top_k, top_p, temperature)
        assert torch.equal(drawn, expected)


def test_the_callers_logits_stay_as_they_are():
    logits = LOGITS.clone()
    filter_logits(logits, top_k=1, top_p=0.1)
    assert torch.equal(logits, LOGITS)


def test_temperature_zero_takes_the_most_likely_code_whatever_the_noise():
    assert sample(LOGITS, torch.tensor([[99.0, 0.0, 0.0, 0.0]]), temperature=0).tolist() == [1]


def test_temperature_comes_after_filtering_and_widens_only_what_is_kept():
    noise = -torch.log(-torch.log(torch.rand(20_000, 4, generator=torch.Generator().manual_seed(0))))
    filtered = filter_logits(LOGITS, top_k=2).expand(20_000, -1)
    share = torch.bincount(sample(filtered, noise, temperature=2.0), minlength=4) / 20_000
    expected = torch.tensor([0.0, 0.4**0.5, 0.3**0.5, 0.0])
    torch.testing.assert_close(share, expected / expected.sum(), atol=0.015, rtol=0)
