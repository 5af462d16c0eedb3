"""The Dockerfile and the compose files, as far as they can be checked without Docker's daemon."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer.main

from dalle_lean.cli import build_app

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[3]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def compose(name="compose.yaml"):
    return yaml.safe_load((ROOT / name).read_text())["services"]


def check_command(arguments):
    """That `dalle-lean` takes these arguments, without running them."""
    word, *options = arguments
    command = typer.main.get_command(build_app(word)).commands[word]
    command.make_context(word, list(options))


def test_the_images_own_command_and_those_of_the_services_are_ones_that_the_program_takes():
    assert 'ENTRYPOINT ["dalle-lean"]' in DOCKERFILE
    check_command(re.findall(r'"([^"]+)"', re.search(r"^CMD (.*)", DOCKERFILE, re.M)[1]))
    for service in compose().values():
        check_command(service["command"])


def test_what_the_dockerfile_copies_is_there_and_not_ignored():
    wanted = (ROOT / ".dockerignore").read_text().split()
    for line in re.findall(r"^COPY (.*)", DOCKERFILE, re.M):
        for name in shlex.split(line)[:-1]:
            assert (ROOT / name).exists()
            assert f"!{name}" in wanted


def test_the_image_holds_all_that_the_wheel_is_made_of_and_installs_extras_that_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    copied = {name for line in re.findall(r"^COPY (.*)", DOCKERFILE, re.M) for name in shlex.split(line)[:-1]}
    assert {file.partition("/")[0] for file in (*wheel["packages"], *wheel["force-include"])} <= copied
    extras = re.search(r"'\.\[(.+)\]'", DOCKERFILE)[1].split(",")
    assert set(extras) <= set(project["project"]["optional-dependencies"])


def test_the_page_waits_for_the_engine_and_asks_it_where_it_listens():
    services = compose()
    assert services["page"]["depends_on"] == {"engine": {"condition": "service_healthy"}}
    assert services["page"]["command"][-2:] == ["--serve", "http://engine:8000"]
    check = services["engine"]["healthcheck"]["test"]
    assert "http://127.0.0.1:8000/ready" in check[-1]
    compile(check[-1], "healthcheck", "exec")


def test_the_file_for_gpus_changes_services_that_exist():
    assert compose("compose.cuda.yaml").keys() <= compose().keys()
