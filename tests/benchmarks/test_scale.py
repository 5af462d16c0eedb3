import dataclasses
import re
import sys

import pytest

from benchmarks import scale
from benchmarks.commands import published_page
from benchmarks.scale_figures import Case, Figures, Model, cases, models, source

MODEL = Model(
    parameters=1000,
    codes=16,
    codebook_size=256,
    picture_side=8,
    encode_flop=1.0,
    draw_flop=1.0,
    sample_flop=1.0,
    peak_bytes=1,
)
CASE = Case(
    "small",
    MODEL,
    encoded_per_s=2.0,
    samples_per_s=4.0,
    drawn_per_s=8.0,
    dollars_per_hour=3.0,
    row_bytes=100.0,
    png_bytes=300.0,
)


def printed(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["scale", *arguments])
    capsys.readouterr()
    scale.main()
    return capsys.readouterr().out


def sections(page):
    """Title -> text, without what stands under the next title; blanks and line breaks are one blank."""
    parts = re.split(r"^#+ (.+)$", page, flags=re.MULTILINE)[1:]
    return {title: " ".join(text.split()) for title, text in zip(parts[::2], parts[1::2], strict=True)}


def test_the_page_holds_what_the_script_prints(monkeypatch, capsys):
    tables = printed(monkeypatch, capsys)
    page = scale.PAGE.read_text()
    assert scale.with_tables(page, tables) == page, "run `python -m benchmarks.scale --write`"


def test_every_measured_figure_is_quoted_from_its_section():
    page = sections(published_page().read_text())
    quoted = [spec for spec in dataclasses.fields(Figures) if "quote" in spec.metadata]
    assert len(quoted) > 10
    for spec in quoted:
        assert spec.metadata["quote"] in page[spec.metadata["section"]], spec.name


def test_a_figure_is_the_number_of_its_quote():
    figures = Figures()
    assert figures.preprocess_pictures_per_s == 79
    assert figures.row_bytes == 862_704 / 4096
    assert figures.clip_s_per_pair_value == pytest.approx(0.052 / (40 * 40 * 524_288))


def test_a_figure_that_the_user_gave_is_not_called_measured():
    specs = {spec.name: spec for spec in dataclasses.fields(Figures)}
    assert source(specs["png_bytes"], Figures()).startswith("measured, [Its data and its tokenizer](../BENCH")
    assert source(specs["png_bytes"], Figures(png_bytes=1.0)) == "given"
    assert source(specs["egress_dollars_per_gb"], Figures()).startswith("invented price")


def test_the_calculators_arithmetic_at_the_measured_rate_takes_the_measured_step():
    figures = Figures()
    assert models()[1].sample_flop / figures.cpu_flop_per_s == pytest.approx(figures.paper_sample_s, rel=0.03)


def test_a_volunteer_sends_three_quarters_of_what_each_of_three_listeners_sent():
    assert scale.volunteer_bytes(CASE, Figures(round_models=0.5)) == pytest.approx(0.75 * 0.5 * 4 * 1000)


def test_the_paper_models_traffic_is_that_of_the_hosts_guide():
    assert scale.volunteer_bytes(cases(Figures())[1], Figures()) == pytest.approx(253e6, rel=0.01)
    assert scale.state_bytes(cases(Figures())[1], Figures()) == pytest.approx(759e6, rel=0.01)


def test_preprocessing_by_hand():
    figures = Figures(pictures=7200.0, file_bytes=1000.0, link_bit_per_s=1e6)
    assert scale.preprocess_hours(CASE, figures) == 1  # 2 pictures/s
    slow = dataclasses.replace(figures, link_bit_per_s=8000.0)
    assert scale.preprocess_hours(CASE, slow) == 2  # the link brings 1 picture/s


def test_averaging_by_hand():
    figures = Figures(
        volunteers=10.0,
        efficiency=0.5,
        samples_per_step=200.0,
        round_models=0.5,
        uplink_bit_per_s=1200.0,
        link_bit_per_s=12_000.0,
        matchmaking_s=3.0,
        matchmakings_per_round=5.0,
        clip_s_per_value=1e-3,
        clip_s_per_pair_value=1e-4,
        clip_threads=2.0,
    )
    assert scale.round_s(CASE, figures, 2) == 20  # 400 samples at 10 x 4 x 0.5 samples/s
    expected = {
        "matchmaking": 15,
        "a volunteer's uplink": 10,
        "the host's link": 10,
        "clipping": 5,
        "distances to clip by": 5,
    }
    assert scale.averaging_s(CASE, figures) == pytest.approx(expected)  # of 1,500 bytes a volunteer


@pytest.mark.parametrize("steps", [1.0, 50.0])
def test_with_most_volunteers_a_part_is_just_full(steps):
    for part, volunteers in scale.most_volunteers(CASE, Figures(), steps).items():
        figures = Figures(volunteers=volunteers)
        assert scale.averaging_s(CASE, figures)[part] == pytest.approx(scale.round_s(CASE, figures, steps)), part


def test_serving_by_hand():
    figures = Figures(prompts_per_day=86_400.0, peak_factor=2.0, candidates=16.0, kept=4.0, front_s_per_prompt=0.75)
    assert scale.replicas(CASE, figures) == 4  # 32 pictures/s, 8 of each
    assert scale.fronts(figures) == 2
    assert scale.answer_bytes(CASE, figures) == 4 * (400 + 96)


def test_twice_the_pictures_cost_twice():
    once, twice = Figures(), Figures(pictures=2 * Figures().pictures)
    for case in cases(once):
        bill = scale.dollars_once(case, once)
        assert scale.dollars_once(case, twice) == pytest.approx({name: 2 * value for name, value in bill.items()})
        storage = [scale.dollars_per_month(case, figures)["storage of the shards"] for figures in (once, twice)]
        assert storage[1] == pytest.approx(2 * storage[0])


def test_what_the_page_says_is_full_first_is():
    full = [
        max(shares, key=shares.__getitem__)
        for case in cases(Figures())
        for shares in [scale.shares_in_use(case, Figures())]
    ]
    assert full == ["distances to clip by", "the front", "distances to clip by"]


@pytest.mark.parametrize(("senders", "measured_s"), [(4, 0.020), (40, 0.225), (100, 0.760)])
def test_clipping_takes_what_was_measured_with_other_numbers_of_senders_too(senders, measured_s):
    figures = Figures(volunteers=float(senders), clip_threads=1.0)
    part = dataclasses.replace(CASE, model=dataclasses.replace(MODEL, parameters=524_288))
    seconds = scale.averaging_s(part, figures)
    assert seconds["clipping"] + seconds["distances to clip by"] == pytest.approx(measured_s, rel=0.25)


def test_the_step_that_is_just_large_enough_fills_nothing_but_clipping():
    figures = Figures(samples_per_step=scale.least_samples_per_step(CASE, Figures()))
    seconds = scale.averaging_s(CASE, figures)
    del seconds["clipping"], seconds["distances to clip by"]
    assert max(seconds.values()) == pytest.approx(scale.round_s(CASE, figures, figures.diloco_steps))


def test_other_numbers_give_other_tables(monkeypatch, capsys):
    tables = printed(monkeypatch, capsys, "--pictures", "2e8")
    assert "| downloaded | 20 TB | 20 TB | 20 TB |" in tables
    assert "| `pictures` | 2e+08 | given |" in tables


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "many"])
def test_what_is_no_number_above_0_is_refused(monkeypatch, capsys, value):
    with pytest.raises(SystemExit) as end:
        printed(monkeypatch, capsys, "--volunteers", value)
    assert end.value.code == 2
    assert "--volunteers" in capsys.readouterr().err


def test_a_page_without_the_markers_is_left_as_it_is(monkeypatch, capsys, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# a page\n")
    monkeypatch.setattr(scale, "PAGE", page)
    monkeypatch.setattr(scale, "ROOT", tmp_path)
    with pytest.raises(SystemExit) as end:
        printed(monkeypatch, capsys, "--write")
    assert end.value.code == 2
    assert "must enclose the tables" in capsys.readouterr().err
    assert page.read_text() == "# a page\n"


def test_write_replaces_the_tables_alone(monkeypatch, capsys, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{scale.BEGIN}old tables\n{scale.END}after\n")
    tables = printed(monkeypatch, capsys)
    monkeypatch.setattr(scale, "PAGE", page)
    monkeypatch.setattr(scale, "ROOT", tmp_path)
    assert printed(monkeypatch, capsys, "--write") == ""
    assert page.read_text() == f"before\n{scale.BEGIN}\n{tables}\n{scale.END}after\n"
