"""The formatter: one style, the same program, and nothing to do the second time."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.base.errors import UserError
from tilewright.cli.main import cli
from tilewright.frontend.zyn.format import format_text
from tilewright.frontend.zyn.parse import parse_module
from tilewright.tree.show import show

EXAMPLES = sorted((Path(__file__).parents[3] / "examples" / "zyn").glob("*.zyn"))

UGLY = """
//first
let   y=compute( x ,w )@device( "cpu" )   @async{
  @kernel   reduce( + , axis = 1 )  // why
  for i in 0 .. n*2 , j in 0..=m-1 step 4 :
      var s:f32=-1.0
      // inside


      if x[ i,j ]>0 and not (j==3): s+=x[i , j]*2**3-a[i:i+64,:]@b
      else if  x[i,j]<-1 : s = -s
      else:
          s-=1
          #still inside
      yield  ( s,i )
}   |>   sqrt( )


pipeline f(x:tensor[batch,seq],k:int=3 ,z = 4)->tensor[batch , seq]:
        let r={a:1,b : "x{y} // no comment"}
        return g(r.a,
             x ,
                 [1,2,
             3]
        )
config{compute_device:"cpu"}
let z = await  f( 1 ) timeout 5ms else 0
let q = compute(x) { out = x*2+1 }
// last
"""
NEAT = """\
// first
let y = compute(x, w) @device("cpu") @async {
    @kernel reduce(+, axis=1)  // why
    for i in 0..n*2, j in 0..=m-1 step 4:
        var s: f32 = -1.0
        // inside

        if x[i, j] > 0 and not (j == 3): s += x[i, j] * 2 ** 3 - a[i:i+64, :] @ b
        else if x[i, j] < -1: s = -s
        else:
            s -= 1
            # still inside
        yield (s, i)
} |> sqrt()

pipeline f(x: tensor[batch, seq], k: int = 3, z=4) -> tensor[batch, seq]:
    let r = {a: 1, b: "x{y} // no comment"}
    return g(r.a,
        x,
        [1, 2,
            3]
    )
config { compute_device: "cpu" }
let z = await f(1) timeout 5ms else 0
let q = compute(x) { out = x * 2 + 1 }
// last
"""


def test_style() -> None:
    assert format_text(UGLY) == NEAT
    assert format_text(NEAT) == NEAT


def test_nothing() -> None:
    assert format_text("") == ""
    assert format_text("\n\n") == ""
    assert format_text("// only this") == "// only this\n"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_formatted(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert format_text(text) == text


def spaced(text: str, gaps: list[str]) -> str:
    """The text with other spaces inside its lines: each run of them becomes one of `gaps`."""
    lines = []
    for number, line in enumerate(text.split("\n")):
        indent = len(line) - len(line.lstrip())
        parts = line.strip().split(" ")
        lines.append(" " * indent + "".join(p + gaps[(number + i) % len(gaps)] for i, p in enumerate(parts)).rstrip())
    return "\n".join(lines)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(EXAMPLES), st.lists(st.sampled_from([" ", "  ", "   "]), min_size=1, max_size=7), st.integers(1, 3))
def test_spaces_do_not_matter(path: Path, gaps: list[str], factor: int) -> None:
    text = path.read_text(encoding="utf-8")
    changed = "\n".join(" " * (factor * (len(x) - len(x.lstrip()))) + x.lstrip() for x in text.split("\n"))
    changed = "\n".join(x if "//" in x or '"' in x else spaced(x, gaps) for x in changed.split("\n"))
    assert show(parse_module(changed)) == show(parse_module(text))
    assert format_text(changed) == text


def test_what_is_not_zynml_is_refused() -> None:
    with pytest.raises(UserError, match="TW001"):
        format_text("let x = (1")


def test_command(tmp_path: Path) -> None:
    file = tmp_path / "a.zyn"
    file.write_text(UGLY)
    run = CliRunner()
    found = run.invoke(cli, ["fmt", "--check", str(file)])
    assert (found.exit_code, found.stderr) == (1, f"{file}: would change\n")
    found = run.invoke(cli, ["fmt", "--diff", str(file)])
    assert found.exit_code == 1 and "+let q = compute(x) { out = x * 2 + 1 }" in found.stdout
    assert file.read_text() == UGLY
    found = run.invoke(cli, ["fmt", str(file)])
    assert (found.exit_code, found.stdout, file.read_text()) == (0, f"{file}: formatted\n", NEAT)
    found = run.invoke(cli, ["fmt", "--check", str(file)])
    assert (found.exit_code, found.stdout) == (0, "")
    assert run.invoke(cli, ["fmt", "-"], input=UGLY).stdout == NEAT
    (tmp_path / "bad.zyn").write_text("let = 3")
    found = run.invoke(cli, ["fmt", str(tmp_path / "bad.zyn"), str(file)])
    assert found.exit_code == 1 and "error[TW001]" in found.stderr
    assert run.invoke(cli, ["fmt", str(tmp_path / "none.zyn")]).exit_code == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.zyn", "bad.zyn"]


def test_blocks_in_lists_keep_their_attributes_and_depth() -> None:
    text = """\
let both = [
    compute(x) @async {
        @kernel elementwise
        for i in 0..n:
            out[i] = x[i]
    },
    compute(y) @async @tile(4) {
        for i in 0..n: out[i] = y[i]
    },
]
let y = f(compute(x) @async {
    for i in 0..n: out[i] = x[i]
}, 3) @ w
"""
    assert format_text(text) == text
    assert format_text(text.replace(" @async", "  @  async").replace("    ", "  ")) == text
