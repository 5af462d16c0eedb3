"""The front door: quick help, mistakes in one line, exit codes."""

import inspect
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import typer

from dalle_lean.cli import COMMANDS, load, main
from dalle_lean.ending import terminate
from dalle_lean.errors import UserError
from dalle_lean.require import MissingPackage
from tests.children import PROGRAM, start


def run(*arguments):
    return subprocess.run([*PROGRAM, *arguments], capture_output=True, text=True, timeout=120, check=False)


def functions():
    """The words of every command, of those below one word too, and its function."""
    for name, (target, _) in sorted(COMMANDS.items()):
        command = load(target)
        if isinstance(command, typer.Typer):
            yield from (((name, one.callback.__name__), one.callback) for one in command.registered_commands)
        else:
            yield (name,), command


def test_help_names_every_command_and_imports_neither_torch_nor_a_room():
    script = textwrap.dedent("""
        import sys
        from dalle_lean.cli import main
        try:
            main(["--help"])
        except SystemExit:
            heavy = {"torch", "numpy", "preprocessing", "training", "inference", "demo"} & set(sys.modules)
            sys.exit(f"imported {heavy}" if heavy else 0)
    """)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    for name in COMMANDS:
        assert name in result.stdout


@pytest.mark.parametrize(("words", "function"), list(functions()))
def test_every_command_of_the_table_exists_and_says_what_it_does(words, function):
    assert (function.__doc__ or "").strip()


@pytest.mark.parametrize(("words", "function"), list(functions()))
def test_help_names_every_option_whole_on_80_columns(words, function, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        main([*words, "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert "[default: (" not in " ".join(shown.split())  # Typer's parentheses around words for a default
    assert max(map(len, shown.splitlines())) <= 80
    names = re.findall(r"^  (--[a-z0-9-]+)", shown, flags=re.MULTILINE)
    said = [name for name, it in inspect.signature(function).parameters.items() if it.annotation is not typer.Context]
    parameters = {f"--{name.replace('_', '-')}" for name in said}
    arguments = set(re.findall(r"^  \[?([A-Za-z_:\[\]]+)\]? <", shown, flags=re.MULTILINE))
    assert len(parameters) + 1 == len(names) + len(arguments)
    assert set(names) <= parameters | {"--help"}


def test_no_word_at_all_is_answered_with_the_help(capsys):
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 0
    said = capsys.readouterr()
    assert "train-vqgan" in said.out
    assert said.err == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sing"], "No such command 'sing'. See dalle-lean --help\n"),
        (["draw", "a cat"], "No such command 'draw'. Did you mean 'generate' or 'serve'? See dalle-lean --help\n"),
        (["trian"], "No such command 'trian'. Did you mean 'train', 'train-vqgan'? See dalle-lean --help\n"),
        (["generate"], "Missing argument 'PROMPT'. See dalle-lean generate --help\n"),
        (["shards", "show"], "Missing argument 'DIR'. See dalle-lean shards show --help\n"),
        (
            ["generate", "x", "--oout", "y"],
            "No such option: --oout (Possible options: --out). See dalle-lean generate --h",
        ),
        (["bench", "samplng"], "Invalid value for 'WHAT': 'samplng' is not one of 'sampling', 'training', "),
        (["demo", "--port", "99999"], "Invalid value for '--port': 99999 must be at most 65535."),
        (["demo", "--port", "0"], "Invalid value for '--port': 0 must be at least 1."),
        (["demo", "--port", "8o8o"], "Invalid value for '--port': '8o8o' is not a whole number."),
        (["calculator", "--tflops", "fast"], "Invalid value for '--tflops': 'fast' is not a number."),
        (["pack", "model", "out", "--guidance", "0"], "Invalid value for '--guidance': 0 must be at least 1"),
        (["pack", "model", "out", "--guidance", "8.5"], "Invalid value for '--guidance': 8.5 must be at most 8"),
        (["convert", "nothing.pt", "out"], "nothing.pt is not a file"),
        (["convert", "a.pt", "b", "--kind", "clip"], "no weights file at a.pt"),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(arguments, words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    said = capsys.readouterr()
    assert (stop.value.code, said.out) == (2, "")
    assert words in said.err
    assert len(said.err.splitlines()) == 1


def test_a_mistake_is_all_that_a_process_says():
    result = run("rollback", "nowhere")  # imports torch and hivemind
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: nowhere holds no run: name the RUN_DIR of `dalle-lean host`\n"


ENDINGS = {
    "a mistake": (UserError("side=3: must be even"), 2, "error: side=3: must be even"),
    "a file that is not there": (FileNotFoundError(2, "No such file or directory", "x.png"), 2, "x.png"),
    "a full disk": (OSError(28, "No space left on device"), 2, "No space left on device"),
    "no memory": (MemoryError("not enough for one picture"), 2, "not enough for one picture"),
    "a package that is not installed": (MissingPackage("yaml is not installed"), 2, "yaml is not installed"),
    "a library's ValueError": (ValueError("operands could not be broadcast"), 1, "operands could not be broadcast"),
    "a library that is broken": (ImportError("undefined symbol"), 1, "undefined symbol"),
    "any other bug": (KeyError("width"), 1, "KeyError: 'width'"),
}


@pytest.mark.parametrize(("failure", "code", "words"), ENDINGS.values(), ids=ENDINGS)
def test_what_the_user_can_mend_is_one_line_and_a_bug_a_traceback(failure, code, words, capsys, monkeypatch):
    def fail(*_, **__):
        raise failure

    monkeypatch.setattr("dalle_lean.convert.files.import_dalle", fail)
    with pytest.raises(SystemExit) as stop:
        main(["convert", "weights.pt", "out"])
    said = capsys.readouterr()
    assert (stop.value.code, said.out) == (code, "")
    assert words in said.err
    if code == 2:
        assert len(said.err.splitlines()) == 1
    else:
        assert said.err.startswith("Traceback")
        assert re.match(r"error: this is a bug of dalle-lean \d", said.err.splitlines()[-1])


def test_a_missing_package_is_one_line_that_says_what_to_install():
    script = "import sys; sys.modules['yaml'] = None\nimport dalle_lean.require as r; r.require('yaml', extra='demo')"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    expected = "MissingPackage: yaml is not installed; install it with: pip install 'dalle-lean[demo]'"
    assert expected in result.stderr


def test_ctrl_c_ends_with_a_line_and_no_traceback(tmp_path):
    fifo = tmp_path / "weights.pt"
    os.mkfifo(fifo)
    script = f"""
import dalle_lean.convert.files as files, time
from dalle_lean.cli import main
files.import_dalle = lambda *a, **k: (print("working", flush=True), time.sleep(60))
main(["convert", "{fifo}", "out"])
"""
    process = start([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "working\n"
    time.sleep(1)  # Python takes a signal that comes just before the long sleep only after it
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors.strip() == "stopped; only what was finished is kept"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train", "ended by SIGTERM; what was finished is saved. To go on: dalle-lean train"),
        ("serve", "stopped by SIGTERM"),
    ],
)
def test_a_program_that_sigterm_ended_says_how_to_go_on_unless_it_is_a_server(command, words, capsys, monkeypatch):
    monkeypatch.setattr("dalle_lean.cli.load", lambda _: lambda: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        with pytest.raises(SystemExit) as stop:
            main([command])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (stop.value.code, capsys.readouterr().err) == (143, f"{words}\n")


@pytest.mark.parametrize(
    ("command", "words"),
    [("train", "stopped; only what was finished is kept"), ("serve", "stopped"), ("join", "stopped")],
)
def test_ctrl_c_does_not_sound_like_a_loss_where_nothing_is_lost(command, words, capsys, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("dalle_lean.cli.load", lambda _: interrupted)
    with pytest.raises(SystemExit) as stop:
        main([command])
    assert (stop.value.code, capsys.readouterr().err) == (130, f"{words}\n")


@pytest.mark.parametrize("module", ["typer", "training.commands.train"])
def test_ctrl_c_during_the_imports_ends_with_a_line_and_no_traceback(module):
    script = f"""
import builtins
plain = builtins.__import__
def interrupted(name, *arguments):
    if name == {module!r}:
        raise KeyboardInterrupt
    return plain(name, *arguments)
builtins.__import__ = interrupted
import importlib
importlib.import_module = lambda name: interrupted(name)
from dalle_lean.cli import main
main(["train", "shards", "run"])
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "interrupted\n")


def test_the_readme_calls_real_commands_with_real_options_and_data():
    root = Path(__file__).parents[2]
    lines = re.findall(r"^    dalle-lean (.*)$", (root / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(lines) >= 6
    commands = dict(functions())
    for line in lines:
        words = shlex.split(line, comments=True)
        function = commands.get((words[0],)) or commands[words[0], words[1]]
        parameters = {parameter.replace("_", "-") for parameter in inspect.signature(function).parameters}
        assert {word.removeprefix("--") for word in words if word.startswith("--")} <= parameters, line
        assert all((root / word).exists() for word in words if word.startswith(("tests/", "models/"))), line


def test_the_version_is_the_packages():
    result = run("--version")
    assert result.returncode == 0
    assert re.fullmatch(r"dalle-lean \d+\.\d+\.\d+\n", result.stdout)


@pytest.mark.parametrize(
    ("setting", "expected"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)]
)
def test_waiting_threads_leave_their_core_soon_unless_the_user_says_otherwise(monkeypatch, setting, expected):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # removed again after the test, whatever it leaves
        monkeypatch.delenv(name)
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        main(["--help"])
    assert os.environ.get("GOMP_SPINCOUNT") == expected


@pytest.mark.parametrize("arguments", [["train", "shards", ""], ["generate", "a cat", "--out="], ["pack", "", "out"]])
def test_an_empty_argument_is_no_folder(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("error: an argument is empty")


@pytest.mark.parametrize("arguments", [["--publish", ""], ["--publish="], ["--prompt-page", "", "--page"]])
def test_an_option_that_turns_something_off_may_be_empty(arguments, capsys, tmp_path):
    with pytest.raises(SystemExit):
        main(["host", str(tmp_path / "run"), *arguments])
    assert "holds no run yet" in capsys.readouterr().err


@pytest.mark.parametrize("prompt", ["what is 1 + 1 =", "--code=QUJD="])
def test_what_only_ends_in_an_equals_sign_is_not_empty(prompt, capsys, tmp_path):
    with pytest.raises(SystemExit):
        main(["join", prompt, str(tmp_path / "no swarm.toml")])
    assert "an argument is empty" not in capsys.readouterr().err
