"""The short help: its flags exist, its examples run, and all flags are one word away."""

import shlex

import pytest

from windtunnel.cli import DONE, application, main
from windtunnel.cli.help import EXAMPLES, SHORT
from windtunnel.cli.run import MISSED

RUN = [text for command, texts in EXAMPLES.items() if command != "serve" for text in texts]


@pytest.mark.parametrize("command", SHORT)
def test_the_short_help_has_the_flags_that_people_use(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == DONE
    short = capsys.readouterr().out
    assert main([command, "--help-all"]) == DONE
    everything = capsys.readouterr().out
    assert f"windtunnel {command} --help-all" in short
    assert all(name.replace("-", "_").upper() in short or f"--{name}" in short for name in SHORT[command])
    assert short.count("\n") < 80 < everything.count("\n")
    if "model" in SHORT[command]:
        assert "--block-size" in everything or "--axis" in everything
    assert "--block-size" not in short


@pytest.mark.parametrize("text", RUN)
def test_its_examples_run(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(text)[1:]) in (DONE, MISSED)
    assert capsys.readouterr().out


def test_the_shell_completes_the_flags_of_every_command() -> None:
    script = application(["--install-completion"]).generate_completion(shell="bash")
    assert "--tensor-parallel-size" in script and "--target-request-rate" in script
