"""Creates the folder of a hosted run, or continues it: what goes into swarm.toml, and what must not change later.

RUN_DIR holds swarm.toml and tokenizer.json, which are public; vocabulary.json, which goes into the checkpoints' model
folders; identities/, host.json, passes/, bans and invites.json, which concern this machine only; checkpoints/, logs/
and status/.
"""

import dataclasses
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dalle_lean.errors import UserError
from dalle_lean.io.files import sha256_file, write_bytes
from dalle_lean.io.model_folder import WEIGHTS
from dalle_lean.progress import OnNotice
from dalle_lean.tokenizer import Tokenizer
from training.data.catalog import ShardSet, find_shards, is_url
from training.data.loader import TrainingData
from training.run.folder import place_vocabulary
from training.run.recipe import Recipe
from training.step.build import (
    bundled_vqgan,
    holds_vqgan_of,
    load_init,
    matching_vqgan,
    new_config,
    stated_codes,
    with_model_of,
)
from training.swarm.admission.keys import SigningKey
from training.swarm.admission.pass_issuer import LIST, OPEN, Application
from training.swarm.admission.passes import HELPER
from training.swarm.admission.service import apply
from training.swarm.config import (
    ADMISSIONS,
    SWARM_TOML,
    SwarmSection,
    SwarmSettings,
    TimingSection,
    WireSection,
    read_settings,
    write_settings,
)
from training.swarm.host.checkpoints import Checkpoints, finish_rollback, has_intact_checkpoint, list_checkpoints
from training.swarm.host.host_config import HOST_JSON, IDENTITIES, HostConfig, make_identities, peer_id
from training.swarm.host.host_gate import HELPER_KEY, host_gate, run_key_file
from training.swarm.network.addresses import check_ip, free_ports, outward_ip
from training.swarm.network.bootstrap_service import TOKENIZER, fetch_run, first_answer
from training.swarm.network.dht import open_dht

HELPERS = 2
HELPER_NAME = "helper-0"
"""The only peer of a machine that runs a helper for a run hosted elsewhere."""
FIRST_PORT = 31337


def make_run(
    run_dir: Path,
    data: str | None,
    recipe: Recipe,
    *,
    init: Path | None = None,
    tokenizer: Path | None = None,
    vqgan: Path | None = None,
    name: str | None = None,
    min_peers: int = 1,
    wire: WireSection = WireSection(),
    timing: TimingSection = TimingSection(),
    admission: str | None = None,
    port: int | None = None,
    donors: int | None = None,
    announce: str | None = None,
    listen: str | None = None,
    publish: str | None = None,
    peer_list: str | None = None,
    on_notice: OnNotice,
) -> SwarmSettings:
    """Create the folder of a run, or update the addresses of an existing one and complete an interrupted rollback.

    Args:
        data: shards; None continues an existing run unchanged.
        init: model folder to start from, in place of new weights; its model replaces the recipe's.
        tokenizer: by default that of `init`, or one trained on the captions.
        vqgan: by default the bundled model's or that of `init`, if it made the codes.
        admission: who gets a pass, see training.swarm.admission.pass_issuer; None keeps the run's policy, at first
            "open".
        port: see `choose_ports`.
        donors: number of donors; a second one doubles the memory and takes over at once if the first dies. None keeps
            the run's previous number, at first 1.
        announce, listen, publish, peer_list: see HostConfig; None keeps the previous value.

    Raises ValueError if the existing run has other settings; it names what differs. As `rollback` if one cannot be
    completed.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    finish_rollback(run_dir, on_notice)
    before = read_settings(run_dir) if (run_dir / SWARM_TOML).exists() else None
    previous = previous_config(run_dir)
    has_list = Path(peer_list).is_file() if peer_list else previous.peer_list is not None
    admission = checked_admission(before, admission, has_list)
    donors = donors or len(previous.donors) or 1
    names = [f"helper-{number}" for number in range(HELPERS)] + [f"donor-{number}" for number in range(donors)]
    host_config = checked_config(
        previous, names, port, announce=announce, listen=listen, publish=publish, peer_list=peer_list
    )
    first_model = write = None
    known = before if before and init and has_begun_with(run_dir, before, init) else None
    recipe = with_model_of(recipe, init) if known is None else dataclasses.replace(recipe, model=known.recipe.model)
    if data is None:
        if before is None:
            raise UserError(f"{run_dir} holds no run yet: name the shards to train on with --data")
        settings = before
        if before.first_epoch and not list_checkpoints(run_dir, on_notice):
            raise UserError(
                f"{run_dir} has lost the weights that its run began with: host it again with --data and --init"
            )
    else:
        shards = find_shards(data, codes=stated_codes(recipe, vqgan) if is_url(data) else None, on_notice=on_notice)
        first_weights = "" if known is None else known.swarm.first_weights
        if init is not None and known is None:
            first_model, first_weights = load_init(init, shards.info), sha256_file(init / WEIGHTS)
        if vqgan is None and not is_url(data):
            vqgan = bundled_vqgan(shards.info)
        lacks_vqgan = vqgan is None and (known is None or previous.vqgan is None)
        if lacks_vqgan and init is not None and holds_vqgan_of(init, shards.info):
            vqgan = init / "vqgan"
        if vqgan is not None:
            matching_vqgan(vqgan, shards.info)
        host_config = dataclasses.replace(host_config, vqgan_fingerprint=shards.info.vqgan)
        swarm = SwarmSection(
            name=name or slug(run_dir),
            min_peers=min_peers,
            data=data if is_url(data) else str(Path(data).resolve()),
            data_fingerprint=shards.fingerprint,
            first_weights=first_weights,
            run_key=before.swarm.run_key if before else "",
        )
        settings = SwarmSettings(recipe=recipe, swarm=swarm, wire=wire, timing=timing)
        if settings.first_epoch >= settings.last_epoch:
            first = settings.first_epoch * settings.steps_per_epoch
            raise UserError(f"total_steps={settings.total_steps}: a run with --init begins at step {first}; set more")
        settings, write = with_tokenizer(run_dir, before, settings, shards, tokenizer, init)
        if before is not None:
            settings = continued(run_dir, before, settings, named=name is not None)
    if vqgan is not None:
        host_config = dataclasses.replace(host_config, vqgan=str(vqgan.resolve()))
    # Only now is anything written: what is refused above leaves no trace in the folder.
    if write is not None:
        write()
    run_key = settings.swarm.run_key if before else SigningKey.load_or_create(run_key_file(run_dir)).public
    host_config.save(run_dir)
    swarm = dataclasses.replace(
        settings.swarm,
        run_key=run_key,
        admission=admission,
        addresses=tuple(host_config.address(run_dir, helper) for helper in host_config.helpers),
        donors=tuple(peer_id(run_dir, donor) for donor in host_config.donors),
    )
    if host_config.vqgan is None:
        on_notice("checkpoints will have no VQGAN, which generate needs: name the one that made the codes with --vqgan")
    write_settings(run_dir / SWARM_TOML, dataclasses.replace(settings, swarm=swarm))
    settings = read_settings(run_dir)
    if first_model is not None:
        Checkpoints(run_dir, settings, host_config, on_notice).begin_with(first_model)
    return settings


def has_begun_with(run_dir: Path, before: SwarmSettings, init: Path) -> bool:
    """Whether the run began with this model folder's weights and needs them no more: it has a checkpoint."""
    first, weights = before.swarm.first_weights, init / WEIGHTS
    return bool(first) and weights.is_file() and sha256_file(weights) == first and has_intact_checkpoint(run_dir)


def hosted_settings(run_dir: Path) -> SwarmSettings:
    """The settings of a run hosted on this machine; ValueError if the folder holds none."""
    if not (run_dir / SWARM_TOML).is_file():
        raise UserError(f"{run_dir} holds no run: name the RUN_DIR of `dalle-lean host`")
    return read_settings(run_dir)


def checked_admission(before: SwarmSettings | None, admission: str | None, has_list: bool) -> str:
    """The run's admission policy; ValueError if the run cannot have it."""
    if before is not None and not before.swarm.run_key and admission is not None:
        raise UserError(
            "this run was started without a key, so its peers have no passes: leave out --admission, or host a new run"
        )
    admission = admission or (OPEN if before is None else before.swarm.admission)
    if admission not in ADMISSIONS:
        raise UserError(f"admission = {admission!r}: must be one of {', '.join(ADMISSIONS)}")
    if admission == LIST and not has_list:
        raise UserError("--admission list needs --peer-list with a file of peer ids, one per line")
    return admission


def with_tokenizer(
    run_dir: Path,
    before: SwarmSettings | None,
    settings: SwarmSettings,
    shards: ShardSet,
    tokenizer: Path | None,
    init: Path | None,
) -> tuple[SwarmSettings, Callable[[], None] | None]:
    """The settings with the complete model and the tokenizer's hash; and for a run that has none yet, what writes its
    tokenizer.json and vocabulary.json."""
    path = run_dir / TOKENIZER
    if tokenizer is None and init is not None:
        tokenizer = init / TOKENIZER
        if not tokenizer.is_file():
            raise UserError(f"{init} has no tokenizer.json: name its model's with --tokenizer")
    source = None if tokenizer is None else Tokenizer.from_file(tokenizer)
    write = None
    if before is not None and path.exists():  # without swarm.toml, it is of a set-up that was never finished
        text = path.read_text(encoding="utf-8")
        if source is not None and source.to_json() != text:
            raise UserError(f"{run_dir} holds a run with another tokenizer than {tokenizer}; name another folder")
        source = Tokenizer.from_file(path)
    else:
        training = TrainingData(shards, settings.recipe.data)
        source = source or Tokenizer.train(training.captions(), settings.recipe.data.text_vocab_size)
        text = source.to_json()

        def write() -> None:
            place_vocabulary(run_dir, init, training.mixed_captions())
            write_bytes(path, text.encode())

    config = new_config(settings.recipe, shards.info, source.vocab_size)
    recipe = dataclasses.replace(settings.recipe, model=config.to_dict())
    swarm = dataclasses.replace(settings.swarm, tokenizer_fingerprint=hashlib.sha256(text.encode()).hexdigest())
    return dataclasses.replace(settings, recipe=recipe, swarm=swarm), write


def continued(run_dir: Path, before: SwarmSettings, now: SwarmSettings, *, named: bool) -> SwarmSettings:
    """The new settings under the run's current name; ValueError if they belong to another run."""
    differences = before.differences(now)
    if named and now.swarm.name != before.swarm.first_name:
        differences.append(f"name ({before.swarm.name})")
    if differences:
        raise UserError(
            f"{run_dir} holds a run with another {', '.join(differences)}; use its own settings, or another folder"
        )
    return dataclasses.replace(now, swarm=dataclasses.replace(now.swarm, name=before.swarm.name))


def make_helper(
    run_dir: Path,
    addresses: Sequence[str],
    on_notice: OnNotice,
    *,
    code: str = "",
    port: int | None = None,
    **changes: Any,
) -> SwarmSettings:
    """Create or update the folder of another helper for the run at `addresses`, which is hosted elsewhere.

    Args:
        code: of the host's invitation, the first time.
        port, changes: see `checked_config`.

    Raises ValueError if no helper there serves the run's files and the folder does not have them, and Refused.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    previous = previous_config(run_dir)
    if previous.donors:
        raise UserError(f"{run_dir} holds a run that is hosted here; name another folder for the helper of another run")
    host_config = checked_config(previous, [HELPER_NAME], port, helper_of=addresses, **changes)
    make_identities(run_dir, [HELPER_NAME])
    if not update_run_files(run_dir, addresses, code):
        if not (run_dir / SWARM_TOML).exists():
            raise UserError(f"no helper at {', '.join(addresses)} serves the run's files; is the host up?")
        on_notice(f"no helper at {', '.join(addresses)} answers; this one starts when one does")
    host_config.save(run_dir)
    return read_settings(run_dir)


def update_run_files(run_dir: Path, addresses: Sequence[str], code: str = "") -> bool:
    """Fetch the run's files and a helper's pass from its helpers; False if none answers."""
    try:
        dht = open_dht(addresses, client_mode=True, must_bootstrap=False)
    except ValueError:
        return False
    try:
        files = first_answer(dht, addresses, fetch_run)
        if files is None:
            return False
        files.write(run_dir)
        if files.settings.swarm.run_key:
            own_key = SigningKey.load_or_create(run_dir / IDENTITIES / HELPER_KEY)
            asked = Application(peer=peer_id(run_dir, HELPER_NAME), code=code, key=own_key.public)
            gate = host_gate(run_dir, files.settings, HELPER_NAME)
            apply(dht, addresses, gate, asked)
            own = gate.own_pass()
            if own is None or own.role != HELPER:
                raise UserError("the code is for a trainer; ask the run's host for one from invite --role helper")
    finally:
        dht.shutdown()
    return True


def previous_config(run_dir: Path) -> HostConfig:
    """The saved host.json; one without peers for a folder that holds no run yet."""
    holds_run = (run_dir / SWARM_TOML).exists() and (run_dir / HOST_JSON).exists()
    return HostConfig.load(run_dir) if holds_run else HostConfig(ports={}, announce="")


def checked_config(before: HostConfig, names: Sequence[str], port: int | None, **changes: Any) -> HostConfig:
    """The addresses of the host's peers; ValueError for one that is no IPv4 address.

    Args:
        port: see `choose_ports`.
        changes: fields of HostConfig; None keeps the previous value. By default others reach this machine at the source
            address of its outgoing packets.
    """
    changes["announce"] = changes.get("announce") or before.announce or outward_ip()
    host_config = dataclasses.replace(before, **{name: value for name, value in changes.items() if value is not None})
    for address in (host_config.listen, host_config.announce):
        check_ip(address)
    return dataclasses.replace(host_config, ports=choose_ports(names, before.ports, port, host_config.local_host))


def choose_ports(names: Sequence[str], before: Mapping[str, int], port: int | None, host: str) -> dict[str, int]:
    """A port for each name. Volunteers know the ports in `before`, so only `port` changes them.

    Args:
        port: of the first name; the others get the next ones. 0 picks free ports for names without one.
    """
    if port:
        return {name: port + number for number, name in enumerate(names)}
    known = {name: before[name] for name in names if name in before}
    new = [name for name in names if name not in before]
    if port == 0:
        ports = free_ports(len(new), host)
    else:
        first = max([FIRST_PORT - 1, *before.values()]) + 1
        ports = list(range(first, first + len(new)))
    return known | dict(zip(new, ports, strict=True))


def slug(run_dir: Path) -> str:
    """The default name of a run, from its folder's."""
    return re.sub(r"[^a-z0-9]+", "-", run_dir.resolve().name.lower()).strip("-")[:56] or "run"
