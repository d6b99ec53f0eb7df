"""`tilewright compile` and `inspect` of explicit kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tilewright.cli.main import cli

SAXPY = str(Path(__file__).parents[3] / "examples" / "simt" / "saxpy.py")
ARGS = ["--kernel", "saxpy", "--args", "a=float x=f32[*] y=f32[*]"]


def run(*words: str) -> str:
    done = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_stages() -> None:
    assert ".reqntid 128" in run("compile", SAXPY, *ARGS, "--target", "sm_90a", "--block", "128")
    assert "kernel @saxpy stage=thread" in run("compile", SAXPY, *ARGS, "--target", "sm_90a", "--stage", "thread")
    assert "define ptx_kernel" in run("compile", SAXPY, *ARGS, "--target", "sm_90a", "--stage", "llvm")
    assert "tw_saxpy_0" in run("compile", SAXPY, *ARGS)


@pytest.mark.requires("ptxas")
def test_inspect() -> None:
    found = json.loads(run("inspect", SAXPY, *ARGS, "--target", "sm_90a", "--block", "64", "--json"))
    assert (found["kernel"], found["threads"], found["spilled bytes"], found["occupancy"]) == ("saxpy", 64, 0, 1.0)
    assert "limited by: threads" in run("inspect", SAXPY, *ARGS, "--target", "sm_90a")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compile", SAXPY], "has 2 explicit kernels: saxpy, saxpy_striding"),
        (["compile", SAXPY, "--kernel", "nothing"], "has no kernel 'nothing'"),
        (["compile", SAXPY, "--kernel", "saxpy"], "the annotation of 'a' does not say its type"),
        (["compile", SAXPY, *ARGS, "--stage", "tile"], "an explicit kernel has no stage tile"),
        (["compile", SAXPY, *ARGS, "--block", "x"], "--block is 'x'"),
        (["compile", SAXPY, "--kernel", "saxpy", "--args", "z=f32[*]"], "--args: saxpy has no argument 'z'"),
        (["inspect", SAXPY, *ARGS, "--fusion"], "--fusion does nothing here"),
    ],
)
def test_mistakes(words: list[str], message: str) -> None:
    done = CliRunner().invoke(cli, words)
    assert done.exit_code != 0 and message in done.output
