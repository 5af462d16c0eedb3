"""The folder of a hosted run: what goes into swarm.toml, and what must not change any more.

RUN_DIR has swarm.toml and tokenizer.json, which everybody may have; vocabulary.json, which goes into the checkpoints'
model folders; identities/ and host.json, which concern this machine; checkpoints/, logs/ and status/.
"""

import dataclasses
import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dalle_lean.errors import UserError
from dalle_lean.io.files import sha256_file
from dalle_lean.tokenizer import Tokenizer
from training.data.catalog import ShardSet, find_shards, is_url
from training.data.loader import TrainingData
from training.run.folder import place_vocabulary
from training.run.progress import OnNotice
from training.run.recipe import Recipe
from training.step.build import matching_vqgan, stated_codes
from training.swarm.config import (
    NAME,
    SwarmSection,
    SwarmSettings,
    TimingSection,
    WireSection,
    read_settings,
    write_settings,
)
from training.swarm.host.checkpoints import first_name
from training.swarm.host.host_config import EVERYWHERE, LOOPBACK, HostConfig, free_ports, make_identities, peer_id
from training.swarm.host.host_config import NAME as HOST_JSON
from training.swarm.network.bootstrap_service import fetch_run, outward_ip
from training.swarm.network.dht import open_dht
from training.swarm.preflight.survey import first_answer

HELPERS = 2
FIRST_PORT = 31337


@dataclass(frozen=True, kw_only=True)
class ListenOptions:
    """Where this machine listens.

    Args:
        port: of the first helper, the others have the next ones; 0 takes free ones. 0 and None keep the ports that the
            run had, for those of its peers that had one.
        announce: the address at which others reach this machine; None for the one its packets leave from.
        listen: the address to listen on.
        donors: how many keep the state; a second one costs as much memory, and replaces the first one at once. None
            keeps what the run had.
    """

    port: int | None = None
    announce: str | None = None
    listen: str | None = None
    donors: int | None = None


def make_run(
    run_dir: Path,
    data: str | None,
    recipe: Recipe,
    *,
    tokenizer: Path | None = None,
    vqgan: Path | None = None,
    name: str | None = None,
    min_peers: int = 1,
    wire: WireSection | None = None,
    timing: TimingSection | None = None,
    place: ListenOptions | None = None,
    on_notice: OnNotice,
) -> SwarmSettings:
    """Make the folder of a run, or bring the addresses of the one that is there up to date.

    Args:
        data: shards; None only for a run that is there, which then goes on as it is.

    Raises ValueError where the run that is there has another recipe: it names what differs.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    before = read_settings(run_dir) if (run_dir / NAME).exists() else None
    made_by = None
    if data is None:
        if before is None:
            raise UserError(f"{run_dir} holds no run yet: name the shards to train on with --data")
        settings = before
    else:
        shards = find_shards(data, codes=stated_codes(recipe, vqgan) if is_url(data) else None, on_notice=on_notice)
        settings = new_settings(run_dir, data, shards, recipe, tokenizer)
        swarm = dataclasses.replace(settings.swarm, name=name or slug(run_dir), min_peers=min_peers)
        settings = dataclasses.replace(
            settings, swarm=swarm, wire=wire or WireSection(), timing=timing or TimingSection()
        )
        if vqgan is not None:
            matching_vqgan(vqgan, shards.info)
        made_by = shards.info.vqgan
    if before is not None and data is not None:
        settings = continued(run_dir, before, settings, named=name is not None)
    place = place or ListenOptions()
    donors = place.donors or len(stations_before(run_dir).donors) or 1
    names = [f"helper-{number}" for number in range(HELPERS)] + [f"donor-{number}" for number in range(donors)]
    host_config = make_stations(run_dir, names, place, vqgan=vqgan, made_by=made_by)
    swarm = dataclasses.replace(
        settings.swarm,
        addresses=tuple(host_config.address(run_dir, helper) for helper in host_config.helpers),
        donors=tuple(peer_id(run_dir, donor) for donor in host_config.donors),
    )
    write_settings(run_dir / NAME, dataclasses.replace(settings, swarm=swarm))
    return read_settings(run_dir)


def new_settings(run_dir: Path, data: str, shards: ShardSet, recipe: Recipe, tokenizer: Path | None) -> SwarmSettings:
    """Settings with the recipe made complete, and the run's tokenizer.json and vocabulary.json in its folder."""
    path = run_dir / "tokenizer.json"
    if path.exists() and tokenizer is not None and sha256_file(path) != sha256_file(tokenizer):
        raise UserError(f"{run_dir} holds a run with another tokenizer than {tokenizer}; give another folder")
    if not path.exists():
        training = TrainingData(
            shards=shards,
            heldout_share=recipe.data.heldout_share,
            shuffle_buffer=recipe.data.shuffle_buffer,
            seed=recipe.data.seed,
        )
        if tokenizer:
            source = Tokenizer.from_file(tokenizer)
        else:
            source = Tokenizer.train(training.captions(), recipe.data.text_vocab_size)
        place_vocabulary(run_dir, None, training.mixed_captions())
        source.save(path)
    config = recipe.model_config(
        image_side=shards.info.image_side,
        image_vocab_size=shards.info.codebook_size,
        text_vocab_size=Tokenizer.from_file(path).vocab_size,
    )
    return SwarmSettings(
        recipe=dataclasses.replace(recipe, model=config.to_dict()),
        swarm=SwarmSection(
            data=data if is_url(data) else str(Path(data).resolve()),
            data_fingerprint=shards.fingerprint,
            tokenizer_fingerprint=sha256_file(path),
        ),
    )


def continued(run_dir: Path, before: SwarmSettings, now: SwarmSettings, *, named: bool) -> SwarmSettings:
    """The settings of now under the name of before; ValueError where they are another run's."""
    differences = before.differences(now)
    if named and now.swarm.name != first_name(before.swarm.name):
        differences.append(f"name ({before.swarm.name})")
    if differences:
        raise UserError(
            f"{run_dir} holds a run with another {', '.join(differences)}; use its own settings, or another folder"
        )
    return dataclasses.replace(now, swarm=dataclasses.replace(now.swarm, name=before.swarm.name))


def make_helper(run_dir: Path, addresses: Sequence[str], place: ListenOptions, on_notice: OnNotice) -> SwarmSettings:
    """Make the folder of one more helper of the run at `addresses`, which is hosted elsewhere, or bring it up to date.

    Raises ValueError where nobody there hands out the run's files and they are not here yet.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    if stations_before(run_dir).donors:
        raise UserError(f"{run_dir} holds a run that is hosted here; give another folder for the helper of another run")
    if not bring_up_to_date(run_dir, addresses):
        if not (run_dir / NAME).exists():
            raise UserError(f"no helper at {', '.join(addresses)} hands out the run's files; is the host up?")
        on_notice(f"no helper at {', '.join(addresses)} answers; this one begins when one of them does")
    make_stations(run_dir, ["helper-0"], place, helper_of=addresses)
    return read_settings(run_dir)


def bring_up_to_date(run_dir: Path, addresses: Sequence[str]) -> bool:
    """Take the run's files from its helpers; False where none answers."""
    try:
        dht = open_dht(addresses, client_mode=True)
    except ValueError:
        return False
    try:
        files = first_answer(dht, addresses, fetch_run)
    finally:
        dht.shutdown()
    if files is None:
        return False
    files.write(run_dir)
    return True


def stations_before(run_dir: Path) -> HostConfig:
    """As they were; none in a fresh folder."""
    return HostConfig.load(run_dir) if (run_dir / HOST_JSON).exists() else HostConfig(ports={}, announce="")


def make_stations(
    run_dir: Path,
    names: Sequence[str],
    place: ListenOptions,
    *,
    vqgan: Path | None = None,
    made_by: str | None = None,
    helper_of: Sequence[str] = (),
) -> HostConfig:
    """Places and identities of the host's peers; what is not given stays as it was."""
    before = stations_before(run_dir)
    listen = place.listen or before.listen
    ports = choose_ports(names, before.ports, place.port, LOOPBACK if listen == EVERYWHERE else listen)
    announce = place.announce or before.announce or outward_ip()
    for address in (listen, announce):
        check_ip(address)
    host_config = HostConfig(
        ports=ports,
        listen=listen,
        announce=announce,
        vqgan=before.vqgan if vqgan is None else str(vqgan.resolve()),
        vqgan_fingerprint=made_by or before.vqgan_fingerprint,
        helper_of=helper_of,
    )
    make_identities(run_dir, names)
    host_config.save(run_dir)
    return host_config


def choose_ports(names: Sequence[str], before: Mapping[str, int], port: int | None, host: str) -> dict[str, int]:
    """A port for each name, see ListenOptions: volunteers hold the addresses, so those of `before` change only where
    `port` names others."""
    if port:
        return {name: port + number for number, name in enumerate(names)}
    known = {name: before[name] for name in names if name in before}
    fresh = [name for name in names if name not in before]
    if port == 0:
        ports = free_ports(len(fresh), host)
    else:
        first = max([FIRST_PORT - 1, *before.values()]) + 1
        ports = list(range(first, first + len(fresh)))
    return known | dict(zip(fresh, ports, strict=True))


def check_ip(address: str) -> None:
    """ValueError unless it is an IPv4 address."""
    try:
        ipaddress.IPv4Address(address)
    except ValueError:
        raise UserError(f"{address!r} is no IPv4 address such as 203.0.113.5") from None


def is_loopback(address: str) -> bool:
    """Whether it is this machine alone."""
    return ipaddress.ip_address(address).is_loopback


def is_private(address: str) -> bool:
    """Whether it means nothing in the Internet."""
    return not ipaddress.ip_address(address).is_global


def slug(run_dir: Path) -> str:
    """A run's name from its folder's."""
    return re.sub(r"[^a-z0-9]+", "-", run_dir.resolve().name.lower()).strip("-")[:56] or "run"
