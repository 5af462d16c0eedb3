"""What do 100 million pictures, 1,000 volunteers and a million prompts a day take? Arithmetic; nothing is measured.

    python -m benchmarks.scale [--pictures 4e8] [--uplink-bit-per-s 5e7] ... [--write]

prints the tables of docs/scale.md; --write writes them there. Each figure in benchmarks/scale_figures.py is an option.
"""

import argparse
import dataclasses
import io
import math
from collections.abc import Callable
from contextlib import redirect_stdout

from benchmarks.child_process import ROOT
from benchmarks.report import make_parser, print_table
from benchmarks.scale_figures import Case, Figures, cases, source
from dalle_lean.errors import UserError
from dalle_lean.io.files import atomic_write
from dalle_lean.words import human_bytes

PAGE = ROOT / "docs" / "scale.md"
BEGIN, END = "<!-- python -m benchmarks.scale -->\n", "<!-- end -->\n"
DAY_S, MONTH_HOURS = 86_400, 30 * 24
PEERS = 3
"""In the measured run, all listening."""
GROWTH = {"matchmaking": 0, "a volunteer's uplink": 0, "the host's link": 1, "clipping": 1, "distances to clip by": 2}
"""The work of a round grows with this power of the number of volunteers; distances are between all pairs."""


def link_s(num_bytes: float, bit_per_s: float) -> float:
    """Seconds that a link takes for `num_bytes`."""
    return 8 * num_bytes / bit_per_s


def preprocessed_per_s(case: Case, f: Figures) -> float:
    """Pictures per second that one machine encodes or its link delivers, whichever is less."""
    return min(case.encoded_per_s, 1 / link_s(f.file_bytes, f.link_bit_per_s))


def preprocess_hours(case: Case, f: Figures) -> float:
    """Hours on one machine."""
    return f.pictures / preprocessed_per_s(case, f) / 3600


def samples(f: Figures) -> float:
    """Samples of the whole training."""
    return f.pictures * f.passes


def swarm_samples_per_s(case: Case, f: Figures) -> float:
    """Samples per second of all volunteers together."""
    return f.volunteers * case.samples_per_s * f.efficiency


def train_hours(case: Case, f: Figures) -> float:
    """Hours of all volunteers together."""
    return samples(f) / swarm_samples_per_s(case, f) / 3600


def volunteer_bytes(case: Case, f: Figures) -> float:
    """Bytes that a volunteer sends the host in a round of averaging, and gets back.

    Each of the measured PEERS also reduced a share, and so sent 2 (PEERS - 1) / PEERS times as much.
    """
    return f.round_models * 4 * case.model.parameters / (2 * (PEERS - 1) / PEERS)


def round_s(case: Case, f: Figures, steps: float) -> float:
    """Seconds of computing between two rounds."""
    return steps * f.samples_per_step / swarm_samples_per_s(case, f)


def averaging_s(case: Case, f: Figures) -> dict[str, float]:
    """Seconds of a round that each part needs; a part is full when they reach `round_s`."""
    sent_bytes = volunteer_bytes(case, f)
    return {
        "matchmaking": f.matchmakings_per_round * f.matchmaking_s,
        "a volunteer's uplink": link_s(sent_bytes, f.uplink_bit_per_s),
        "the host's link": link_s(f.volunteers * sent_bytes, f.link_bit_per_s),
        "clipping": f.volunteers * case.model.parameters * f.clip_s_per_value / f.clip_threads,
        "distances to clip by": f.volunteers**2 * case.model.parameters * f.clip_s_per_pair_value / f.clip_threads,
    }


def most_volunteers(case: Case, f: Figures, steps: float) -> dict[str, float]:
    """The most that each part supports: n volunteers take 1 / n of the time for a round, and cause n**GROWTH times the
    work."""
    one = dataclasses.replace(f, volunteers=1.0)
    return {
        part: (round_s(case, one, steps) / needed_s) ** (1 / (1 + GROWTH[part]))
        for part, needed_s in averaging_s(case, one).items()
    }


def least_samples_per_step(case: Case, f: Figures) -> float:
    """Samples per step with which no part is full in DiLoCo without clipping."""
    needed_s = max(seconds for part, seconds in averaging_s(case, f).items() if "clip" not in part)
    return f.samples_per_step * needed_s / round_s(case, f, f.diloco_steps)


def host_bytes(case: Case, f: Figures, steps: float) -> float:
    """Bytes that the host sends for averaging in the whole training."""
    return samples(f) / (steps * f.samples_per_step) * f.volunteers * volunteer_bytes(case, f)


def state_bytes(case: Case, f: Figures) -> float:
    """Bytes that a newcomer downloads: weights in fp32 and 8-bit statistics."""
    return case.model.parameters * (4 + f.statistics_bytes)


def donor_bytes_per_s(case: Case, f: Figures) -> float:
    """Bytes per second to all newcomers."""
    return f.volunteers * f.joins_per_day * state_bytes(case, f) / DAY_S


def peak_prompts_per_s(f: Figures) -> float:
    """Prompts per second in the busiest hour."""
    return f.peak_factor * f.prompts_per_day / DAY_S


def replicas(case: Case, f: Figures) -> int:
    """Replicas for the busiest hour."""
    return math.ceil(peak_prompts_per_s(f) * f.candidates / case.drawn_per_s)


def fronts(f: Figures) -> int:
    """Fronts for the busiest hour, one for each engine."""
    return math.ceil(peak_prompts_per_s(f) * f.front_s_per_prompt)


def answer_bytes(case: Case, f: Figures) -> float:
    """Bytes of an answer without previews: a PNG in base64 for each picture, and six characters of JSON per code."""
    return f.kept * (case.png_bytes * 4 / 3 + 6 * case.model.codes)


def dollars_once(case: Case, f: Figures) -> dict[str, float]:
    """The cost of preprocessing and of a training with DiLoCo."""
    state_gb = donor_bytes_per_s(case, f) * 3600 * train_hours(case, f) / 1e9
    return {
        "preprocessing": preprocess_hours(case, f) * case.dollars_per_hour,
        "volunteers, if rented": train_hours(case, f) * f.volunteers * case.dollars_per_hour,
        "host and donor": train_hours(case, f) * 2 * f.server_dollars_per_hour,
        "traffic: shards": samples(f) * case.row_bytes / 1e9 * f.egress_dollars_per_gb,
        "traffic: averaging": host_bytes(case, f, f.diloco_steps) / 1e9 * f.egress_dollars_per_gb,
        "traffic: states": state_gb * f.egress_dollars_per_gb,
    }


def dollars_per_month(case: Case, f: Figures) -> dict[str, float]:
    """The cost of storing the shards and of serving; replicas for the busiest hour run all the time."""
    sent_gb = f.prompts_per_day * MONTH_HOURS / 24 * answer_bytes(case, f) / 1e9
    return {
        "storage of the shards": f.pictures * case.row_bytes / 1e9 * f.storage_dollars_per_gb_month,
        "replicas": replicas(case, f) * MONTH_HOURS * case.dollars_per_hour,
        "fronts": fronts(f) * MONTH_HOURS * f.server_dollars_per_hour,
        "traffic: pictures": sent_gb * f.egress_dollars_per_gb,
    }


def shares_in_use(case: Case, f: Figures) -> dict[str, float]:
    """How full each part is; 1 is full. With averaging by DiLoCo, and one front."""
    averaging = {part: s / round_s(case, f, f.diloco_steps) for part, s in averaging_s(case, f).items()}
    return {
        "a preprocessing machine's link": case.encoded_per_s * link_s(f.file_bytes, f.link_bit_per_s),
        **averaging,
        "the donor's link": link_s(donor_bytes_per_s(case, f), f.link_bit_per_s),
        "the front": peak_prompts_per_s(f) * f.front_s_per_prompt,
        "the engine's link": link_s(peak_prompts_per_s(f) * answer_bytes(case, f), f.link_bit_per_s),
    }


def rounded(value: float) -> str:
    """A value with three significant digits."""
    return f"{float(f'{value:.3g}'):,.10g}"


def preprocessing_rows(case: Case, f: Figures) -> dict[str, str]:
    """The rows on preprocessing."""
    return {
        "arithmetic of encoding a picture, GFLOP": rounded(case.model.encode_flop / 1e9),
        "pictures/s of a machine": rounded(case.encoded_per_s),
        "the same, with what its link brings": rounded(preprocessed_per_s(case, f)),
        "cores that decode, beside a machine": rounded(preprocessed_per_s(case, f) * f.decode_s),
        "hours of one machine": rounded(preprocess_hours(case, f)),
        "machines for all": rounded(math.ceil(preprocess_hours(case, f) / 24 / f.preprocess_days)),
        "downloaded": human_bytes(f.pictures * f.file_bytes),
        "a row of a shard": human_bytes(case.row_bytes),
        "all shards": human_bytes(f.pictures * case.row_bytes),
    }


def training_rows(case: Case, f: Figures) -> dict[str, str]:
    """The rows on training."""
    return {
        "parameters": f"{case.model.parameters:,}",
        "memory of a step at batch 1, on a GPU": human_bytes(case.model.peak_bytes),
        "samples/s of a volunteer": rounded(case.samples_per_s),
        "samples/s of all": rounded(swarm_samples_per_s(case, f)),
        "steps": rounded(samples(f) / f.samples_per_step),
        "hours": rounded(train_hours(case, f)),
        "shards to a volunteer, each second": human_bytes(case.samples_per_s * case.row_bytes),
        "state to a newcomer": human_bytes(state_bytes(case, f)),
        "states to all newcomers, each day": human_bytes(donor_bytes_per_s(case, f) * DAY_S),
        "averaging, a volunteer each way, each round": human_bytes(volunteer_bytes(case, f)),
        "averaging, the host each way, each round": human_bytes(f.volunteers * volunteer_bytes(case, f)),
        "talk of all volunteers, each round": human_bytes(f.volunteers * f.talk_bytes),
    }


def volunteer_rows(case: Case, f: Figures) -> dict[str, str]:
    """The rows on how many volunteers fill each part, and how large a step suits `volunteers`."""
    ways = (("each step", 1.0), (f"DiLoCo, {rounded(f.diloco_steps)} steps", f.diloco_steps))
    samples_per_step = least_samples_per_step(case, f)
    return {
        **{
            f"{name}: {part}": rounded(most)
            for name, steps in ways
            for part, most in most_volunteers(case, f, steps).items()
        },
        f"samples a step for {rounded(f.volunteers)}, DiLoCo, not clipped": rounded(samples_per_step),
        "rounds of the whole training then": rounded(samples(f) / (samples_per_step * f.diloco_steps)),
    }


def serving_rows(case: Case, f: Figures) -> dict[str, str]:
    """The rows on serving."""
    return {
        "arithmetic of drawing a picture, GFLOP": rounded(case.model.draw_flop / 1e9),
        "pictures/s of a replica": rounded(case.drawn_per_s),
        "ranking by the bundled CLIP, of a replica's time": f"{100 * f.rank_s * case.drawn_per_s:.2g} %",
        "prompts/s in the busiest hour": rounded(peak_prompts_per_s(f)),
        "pictures/s in the busiest hour": rounded(peak_prompts_per_s(f) * f.candidates),
        "replicas": rounded(replicas(case, f)),
        "fronts": rounded(fronts(f)),
        "an answer": human_bytes(answer_bytes(case, f)),
        "answers, each day": human_bytes(f.prompts_per_day * answer_bytes(case, f)),
    }


def dollar_rows(bill: dict[str, float]) -> dict[str, str]:
    """The items of a bill and their sum."""
    return {name: rounded(dollars) for name, dollars in {**bill, "sum": sum(bill.values())}.items()}


def full_rows(case: Case, f: Figures) -> dict[str, str]:
    """How full each part is, the fullest in bold."""
    shares = shares_in_use(case, f)
    return {part: f"**{rounded(s)}**" if s == max(shares.values()) else rounded(s) for part, s in shares.items()}


TABLES: dict[str, Callable[[Case, Figures], dict[str, str]]] = {
    "Which part is full first (1 is full)": full_rows,
    "Preprocessing": preprocessing_rows,
    "Training": training_rows,
    "Volunteers that fill a part": volunteer_rows,
    "Serving": serving_rows,
    "Dollars, once": lambda case, f: dollar_rows(dollars_once(case, f)),
    "Dollars, each month": lambda case, f: dollar_rows(dollars_per_month(case, f)),
}


def report(f: Figures) -> None:
    """Print all tables, then where each figure comes from."""
    columns = cases(f)
    for title, rows_of in TABLES.items():
        print(f"## {title}\n")
        rows = [rows_of(case, f) for case in columns]
        print_table(["", *(case.title for case in columns)], [[name, *(row[name] for row in rows)] for name in rows[0]])
        print()
    print("## The figures\n")
    specs = dataclasses.fields(Figures)
    print_table(
        ["figure", "value", "from"],
        [[f"`{spec.name}`", f"{getattr(f, spec.name):,.4g}", source(spec, f)] for spec in specs],
    )


def with_tables(page: str, tables: str) -> str:
    """The page with `tables` between its markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UserError(f"{PAGE}: the lines {BEGIN.strip()} and {END.strip()} must enclose the tables")
    return f"{before}{begin}\n{tables}\n{end}{after}"


def positive(text: str) -> float:
    """A finite number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: must be a finite number above 0")
    return value


def main() -> None:
    """Print the tables, or write them into the page."""
    parser = make_parser(__doc__)
    for spec in dataclasses.fields(Figures):
        parser.add_argument(f"--{spec.name.replace('_', '-')}", type=positive, default=spec.default, metavar="N")
    parser.add_argument("--write", action="store_true", help=f"write the tables into {PAGE.relative_to(ROOT)}")
    options = vars(parser.parse_args())
    write = options.pop("write")
    with redirect_stdout(io.StringIO()) as tables:
        report(Figures(**options))
    if not write:
        print(tables.getvalue(), end="")
        return
    try:
        page = with_tables(PAGE.read_text(), tables.getvalue())
    except (OSError, UserError) as mistake:
        parser.error(str(mistake))
    with atomic_write(PAGE) as path:
        path.write_text(page)


if __name__ == "__main__":
    main()
