"""What the page says, without the page."""

from contextlib import closing
from threading import Event
from types import SimpleNamespace

import pytest

from demo import progress_views as views
from demo.actions import TABS_KEPT, ShownByTab
from demo.form import cut_prompt, default_settings
from demo.service.drawing_service import DrawingService, Queued, Running
from demo.service.latency_model import LatencyModel
from demo.service.scheduler import Busy, Scheduler
from inference.request import Request, Settings
from tests.demo.conftest import TAB, WISH, answer, failing_service, named_actions


def test_the_last_view_has_the_best(service):
    *_, last = answer(service)
    expected = service.generator("a red heart", num_images=6, best=2, top_k=0, top_p=1.0, seed=1)
    assert [picture.index for picture in last["drawn"].pictures] == [picture.index for picture in expected]
    assert "The 2 best of 6, best first" in last["status"]


def test_a_caption_tells_score_number_and_seed(service):
    *_, last = answer(service)
    first, _ = last["drawn"].pictures
    assert views.captions(last["drawn"])[0] == f"score {first.score:.3f} · no. {first.index}\nseed 1"


@pytest.mark.parametrize(("top_k", "alike"), [(0, False), (1, True)])
def test_the_page_says_that_all_pictures_are_alike(service, top_k, alike):
    *_, last = answer(service, values=WISH | {"top_k": top_k})
    assert ("All came out alike" in last["status"]) == alike


def test_the_page_says_that_nothing_was_drawn(service, monkeypatch):
    monkeypatch.setattr("inference.ranking.BLANK_SHARE", 2.0)
    *_, last = answer(service)
    assert "All are of one colour: the model draws nothing for these words" in last["status"]


EXAMPLES = ("a red heart", "a smiling astronaut", "a blue circle on a white ground", "a house", "a car")


def sentence_of(service, prompt):
    """What the first view says of the words; none after it takes that back, and there are pictures."""
    first, *others, last = answer(service, prompt, examples=EXAMPLES)
    assert not any("unknown" in update for update in (*others, last))
    assert len(last["drawn"].pictures) == 2
    return first["unknown"]


KNOWN = "I know nothing in this prompt; I do know “a red heart”, “a blue circle on a white ground” and “a house”."


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("two red hearts", None),
        ("?!", None),
        ("a zeppelin on a red ground", "I have not learnt to draw “zeppelin”, so these pictures may not show it."),
        ("a red car, 🚀 and ein Herz", "draw “🚀”, “ein” or “herz”, so these pictures may not show them."),
        ("a zeppelin", "I have not learnt to draw “zeppelin”, so these pictures may not show it. " + KNOWN),
        ("ein rotes Herz", "draw “ein”, “rotes” or “herz”, so these pictures may not show them. " + KNOWN),
        ("❤️", "I read this as “heart”."),
        ("a haert near a bleu ground", "these pictures may not show them. Did you mean “heart” for “haert”?"),
        ("🧶", "I have not learnt to draw “🧶”, so these pictures may not show it. " + KNOWN),
        ("a herat", "draw “herat”, so these pictures may not show it. Did you mean “heart”? " + KNOWN),
        ("красное сердце", "draw “красное” or “сердце”, so these pictures may not show them. " + KNOWN),
        ("赤いハート", "draw “赤いハート”, so these pictures may not show it. " + KNOWN),
        ("قلب أحمر", "draw “قلب” or “أحمر”, so these pictures may not show them. " + KNOWN),
        ("x" * 1000, f"draw “{'x' * 30}…”, so these pictures may not show it. " + KNOWN),
        ("🚀" * 1000, "draw “🚀”, so these pictures may not show it. " + KNOWN),
    ],
)
def test_what_the_model_has_not_learnt_is_said_from_the_beginning(knowing_service, prompt, said):
    shown = sentence_of(knowing_service, prompt)
    assert shown == "" if said is None else said in shown


def test_of_many_unknown_words_a_few_are_named(knowing_service):
    prompt = " ".join(f"w{number}" for number in range(200))
    assert "“w0”, “w1”, “w2”, “w3”, “w4”, “w5” or 194 more words, so" in sentence_of(knowing_service, prompt)


def test_a_model_without_a_vocabulary_says_nothing(service):
    assert sentence_of(service, "a zeppelin") == ""


def test_where_no_example_is_known_none_is_named(knowing_service):
    first = next(answer(knowing_service, "zeppelin", examples=["a yacht"]))
    assert "I know nothing in this prompt.</div>" in first["unknown"]


def test_what_is_said_of_words_is_text_and_never_markup():
    shown = views.unknown(["<b>", "&"], ['<img src="x">'])
    assert "“&lt;b&gt;” or “&amp;”" in shown
    assert "<img" not in shown


@pytest.mark.parametrize(
    ("prompt", "cut"),
    [
        ("a red heart", "a red heart"),
        ("x" * 1000, "x" * 1000),
        ("word " * 200 + "more", ("word " * 200).strip()),
        ("x" * 995 + " over the end", "x" * 995 + " over"),
        ("x" * 996 + "\n over the end", "x" * 996),
        (" " * 10 + "x" * 2000, " " * 10 + "x" * 990),
        ("🚀" * 2000, "🚀" * 1000),
        ("赤いハート" * 400, "赤いハート" * 200),
        (" " * 2000, " " * 1000),
    ],
)
def test_a_long_prompt_is_cut_at_a_words_end_where_it_has_one(prompt, cut):
    assert cut_prompt(prompt) == cut


def test_the_page_says_that_it_cut_a_prompt_and_puts_what_is_left_into_its_box(knowing_service):
    actions, tab = named_actions(knowing_service), SimpleNamespace(session_hash="tab")
    first, *others, last, _ = actions.draw(tab, "zeppelin " * 222 + "ab", False, *WISH.values())
    assert first["prompt"] == "zeppelin " * 110 + "zeppelin"
    assert "Only the first 998 of the prompt&#x27;s 2000 characters are read; the rest is ignored." in first["unknown"]
    assert "draw “zeppelin”, so these" in first["unknown"]
    assert not any("unknown" in update or "prompt" in update for update in (*others, last))
    assert actions.shown.get(tab).drawn.request.prompt == first["prompt"]


def test_an_over_long_prompt_is_drawn_and_the_cut_is_said(service):
    prompt = "a red heart on a white ground beside a green book and two black cats in a house"
    *_, last = answer(service, prompt)
    assert f"I did not read “{service.generator.unread(prompt)}”." in last["status"]
    assert len(last["drawn"].pictures) == 2


def test_the_growing_pictures_are_on_the_page(service, monkeypatch):
    monkeypatch.setattr("demo.service.drawing_service.PREVIEW_INTERVAL_S", 0.0)
    stages = [update["stage"] for update in answer(service) if "data:image/webp" in update.get("stage", "")]
    assert len(stages) == 4
    assert all("4 of the 6 being drawn" in stage for stage in stages)


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, ImportError])
def test_a_failure_while_drawing_is_answered_with_a_sentence(generator, latency, caplog, kind):
    *_, last = answer(failing_service(generator, latency, kind("something of the inside\nand a page of details")))
    said = f"Drawing failed because of a bug in the program ({kind.__name__}: something of the inside); the server"
    assert said in last["status"]
    assert "details" not in last["status"]
    assert "fewer" not in last["status"]
    assert "and a page of details" in caplog.text
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes")])
def test_only_a_lack_of_memory_is_answered_with_the_advice_to_draw_fewer(service, monkeypatch, caplog, error):
    def fail(*given):
        raise error

    monkeypatch.setattr(service, "_step", fail)
    *_, last = answer(service)
    assert "Drawing failed because this machine lacks memory; try fewer candidates." in last["status"]
    assert "bug" not in last["status"]
    assert "Traceback" in caplog.text


def test_an_exceptions_message_is_short_and_text_on_the_page():
    assert views.broken(KeyError()).startswith("Drawing failed because of a bug in the program (KeyError); ")
    assert len(views.broken(RuntimeError("a long one " * 1000))) < 400
    assert "<img" not in views.failure(views.broken(RuntimeError("<img src=x>")))


def test_a_full_page_is_answered_kindly(generator, latency):
    service = DrawingService(generator, latency, scheduler=Scheduler(1, 0))
    with closing(answer(service)) as first:
        next(first), next(first)
        *_, last = answer(service)
        assert "The page is busy: 1 drawing, 0 waiting. Please try again in about" in last["status"]
        assert "mistake" not in last["status"]


def test_a_cancelled_answer_ends_and_frees_its_place(service):
    answering = answer(service)
    next(answering), next(answering)
    assert len(service.scheduler) == 1
    answering.close()
    assert len(service.scheduler) == 0
    with pytest.raises(StopIteration):
        next(answering)


def test_a_stopped_answer_says_so_and_frees_its_place(service):
    stop = Event()
    answering = answer(service, stop=stop)
    next(answering), next(answering)
    stop.set()
    (last,) = answering
    assert "Stopped." in last["status"]
    assert last["unknown"] == ""
    assert "grow here" in last["stage"]
    assert len(service.scheduler) == 0


def test_the_line_and_the_bar_say_how_long_it_takes():
    assert "You are next; your turn comes in about 12 s." in views.waiting(Queued(1, 12.3))
    assert "You are number 3 in line; your turn comes in about 3 min." in views.waiting(Queued(3, 180))
    bar = views.drawing(Running("drawing", 0.25, 7.4, 2))
    assert 'aria-valuenow="25"' in bar
    assert "Drawing, about 7 s left (with 2 other prompts)" in bar
    assert "try again in about 41 s" in views.busy(Busy(3, 20, 41.2))


def test_what_a_sentence_quotes_cannot_become_markup():
    assert "<b>" not in views.failure("no <b>bold</b> move")


def test_the_page_says_why_so_many_candidates(generator):
    fast, slow = (DrawingService(generator, LatencyModel(4, {8: seconds, 64: 8 * seconds})) for seconds in (0.01, 2.0))
    assert views.advice(fast).endswith("128 as in the paper")
    assert "The paper's 128 would take about" in views.advice(slow)
    assert "so the default is 8" in views.advice(slow)
    assert views.estimate(slow, 8) == "8 candidates take about 8 s on this CPU."


@pytest.mark.parametrize(
    ("row_s", "said"),
    [
        (0.01, "by default 128 candidates, about 1 s (as in the paper)"),
        (2.0, "by default 8 candidates, about 8 s (the paper's 128, halved until they take at most 10 s)"),
        (9.0, "by default 8 candidates, about 36 s (the fewest; this machine is slow now)"),
    ],
)
def test_the_terminal_says_why_so_many_candidates(generator, row_s, said):
    assert views.default_count(DrawingService(generator, LatencyModel(4, {8: row_s, 64: row_s * 8}))).startswith(said)


def test_fewer_candidates_are_set_for_a_model_that_draws_with_guidance(generator, monkeypatch):
    service = DrawingService(generator, LatencyModel(4, {8: 3.0, 64: 24.0}))
    monkeypatch.setattr(generator, "guidance", 2.0)
    assert default_settings(service) | {"guidance": 2.0, "num_images": 8} == default_settings(service)
    assert views.estimate(service, 4) == "4 candidates take about 24 s on this CPU."
    assert views.estimate(service, 4, 1.0) == "4 candidates take about 12 s on this CPU."


def test_a_later_visitor_gets_what_the_machine_has_shown_since(service):
    service.latency = LatencyModel(4, {8: 9.0, 64: 72.0})
    before = named_actions(service).greet()
    assert "8 candidates take about 36 s" in before["status"]
    for _ in answer(service):
        pass
    after = named_actions(service).greet()
    assert "128 candidates take about" in after["status"]
    assert "128 candidates take about" in after["estimate"]
    assert (before["num_images"].value, after["num_images"].value) == (8, 128)
    assert after["num_images"].info.endswith("128 as in the paper")


def test_the_foot_tells_size_and_grid(generator):
    parameters = sum(parameter.numel() for parameter in generator.model.parameters())
    assert f"{parameters:,} parameters" in views.facts(generator)
    assert "32 × 32 pixels" in views.facts(generator)
    assert "16 codes" in views.facts(generator)


@pytest.mark.parametrize("seed", [str(2**53), "9" * 5000, "abc", "-1", "1.5", ""])
@pytest.mark.parametrize("prompt", [{"prompt": "a red heart"}, {}])
def test_a_seed_in_the_address_that_the_box_cannot_hold_exactly_is_refused(service, prompt, seed):
    tab = SimpleNamespace(query_params={**prompt, "seed": seed}, session_hash="tab")
    [only] = named_actions(service).open(tab, False, *WISH.values())
    assert "The seed in the address must be a whole number from 0 to 9007199254740991." in only.pop("status")
    assert only == prompt


def test_a_seed_in_the_address_without_a_prompt_is_kept_for_the_next(service):
    tab = SimpleNamespace(query_params={"seed": "3"}, session_hash="tab")
    assert list(named_actions(service).open(tab, True, *WISH.values())) == [{"seed": 3, "new_seed": False}]


@pytest.mark.parametrize("rows", [0, 2])
def test_a_kept_seed_promises_the_same_pictures_unless_they_began_with_given_rows(service, rows):
    codes = service.generator("a red heart", num_images=1)[0].codes
    start = codes[: 4 * rows] if rows else None
    *_, drawn = service.draw(Request("a red heart", Settings(num_images=2, seed=3), start))
    actions = named_actions(service)
    actions.shown.put(TAB, drawn)
    kept = actions.keep_seed(TAB)
    assert (kept["seed"], kept["new_seed"]) == (3, False)
    assert "Seed 3 is kept" in kept["status"]
    assert ("draw the same pictures again" in kept["status"]) == (rows == 0)
    assert ("but not the upper rows of these pictures" in kept["status"]) == (rows == 2)


def test_the_largest_seed_of_the_box_may_come_from_the_address(service):
    tab = SimpleNamespace(query_params={"prompt": "a red heart", "seed": str(2**53 - 1)}, session_hash="tab")
    first, *_ = named_actions(service).open(tab, True, *WISH.values())
    assert first["seed"] == 2**53 - 1


def test_what_the_oldest_of_many_tabs_shows_is_forgotten(service):
    *_, drawn = service.draw(Request("a red heart", Settings(num_images=1)))
    shown, tabs = ShownByTab(), [SimpleNamespace(session_hash=str(i)) for i in range(TABS_KEPT + 2)]
    for tab in tabs:
        shown.put(tab, drawn)
        shown.put(tabs[0], drawn)  # used all the time
    assert [tab.session_hash for tab in tabs if shown.get(tab) is None] == ["1", "2"]


def test_what_a_tab_shows_is_forgotten_after_a_while(service, monkeypatch):
    *_, drawn = service.draw(Request("a red heart", Settings(num_images=1)))
    shown, (first, second) = ShownByTab(), (SimpleNamespace(session_hash=name) for name in ("first", "second"))
    shown.put(first, drawn)
    monkeypatch.setattr("demo.actions.KEPT_S", 0)
    shown.put(second, drawn)
    assert shown.get(first) is None
    assert shown.get(second).drawn is drawn


def test_buttons_of_pictures_that_are_forgotten_say_so(service):
    actions = named_actions(service)
    (more,) = actions.draw_more(TAB, "a red heart", *WISH.values())
    assert "These pictures are gone; draw new ones" in more["status"]
    assert "These pictures are gone; draw new ones" in actions.keep_seed(TAB)["status"]
