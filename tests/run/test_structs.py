"""Structs in kernels, against NumPy: the table of `kernels_structs`, layouts, arguments, results that are given, calls of kernels, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import tilewright as tw
from kernels_structs import CASES, LAYOUTS, PARTICLE, SIZES, Particle, draw, sums, totals, turned
from tilewright.base.errors import UserError
from tilewright.cli.main import cli

NESTED = np.dtype([("place", [("x", "f4"), ("y", "f4")]), ("mass", "f8"), ("spin", "c8"), ("on", "?")], align=True)


@pytest.mark.filterwarnings("ignore::tilewright.PerformanceWarning")
@pytest.mark.parametrize("device", ["cpu", "emulator"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_table(case: Any, layout: str, device: str) -> None:
    for size in SIZES if device == "cpu" else SIZES[:4]:
        case.check(device, layout, size)


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_a_struct_and_a_number_as_results(device: str) -> None:
    p = draw(33, PARTICLE)
    out, total = totals(p, device=device)
    np.testing.assert_allclose(out["x"], p["x"] - p["x"].astype(float).sum() / 34, rtol=1e-5, atol=1e-6)
    assert (out["y"] == 0).all() and (out["id"] == np.arange(33)).all()
    assert total == p["id"].sum()


@tw.kernel
def move(p: tw.InOut, dt: float) -> None:
    for i in tw.grid(len(p)):
        p[i].x += p[i].y * dt


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_structs_written_in_place(device: str) -> None:
    for layout in ("plain", "of doubles", "mixed and aligned", "padded"):
        p = draw(33, LAYOUTS[layout])
        want = p["x"].astype(float) + 0.5 * p["y"]
        rest = p[["y", "id"]].copy()
        move(p, 0.5, device=device)
        np.testing.assert_allclose(p["x"], want, rtol=1e-6, atol=1e-6)
        assert (p[["y", "id"]] == rest).all()


def test_fields_that_are_not_aligned_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_WARN", "on")
    p = draw(33, LAYOUTS["packed"])
    with pytest.raises(
        UserError,
        match=r"field 'x' of argument 'p' is written in place, and it is not aligned as float32 wants: it lies 1 bytes into structs of 13 bytes",
    ):
        move(p, 0.5)
    with pytest.warns(tw.PerformanceWarning, match="lies 5 bytes into structs of 13 bytes"):
        np.testing.assert_allclose(_fresh_sums(p), p["x"] + p["y"], rtol=1e-5)


@tw.kernel
def _fresh_sums(p: tw.Array) -> tw.Array:
    out = tw.empty(len(p), tw.f64)
    for i in tw.grid(len(p)):
        out[i] = p[i].y + p[i].x
    return out


@pytest.mark.filterwarnings("ignore::tilewright.PerformanceWarning")
def test_results_that_are_given() -> None:
    for layout in LAYOUTS.values():
        p = draw(33, layout)
        want = turned(p)
        out = np.zeros(33, layout)
        assert turned(p, out=out) is out
        assert (out == want).all()
        assert turned(p, out=p) is p  # as if there were no other array
        assert (p == want).all()
    with pytest.raises(UserError, match=r"out= of turned is struct\(x: f64.*and the result is struct\(x: f32"):
        turned(draw(3, PARTICLE), out=np.zeros(3, LAYOUTS["of doubles"]))
    with pytest.raises(UserError, match="out= of turned is dtype float32"):
        turned(draw(3, PARTICLE), out=np.zeros(3, np.float32))


def test_views_and_axes() -> None:
    p = draw(66, PARTICLE)
    for view in (p[::2], p[32::-1], p.reshape(33, 2)[:, 1]):
        np.testing.assert_allclose(
            sums(view), view["x"].astype(float) + 2 * view["y"].astype(float) - view["id"], rtol=1e-12
        )

    @tw.kernel
    def rows(p: tw.Array) -> tw.Array:
        n, m = p.shape
        out = tw.empty((n, m), p.dtype)
        for i, j in tw.grid(n, m):
            out[i, j] = p[i, m - 1 - j]
        return out

    table = p.reshape(6, 11)
    for device in ("cpu", "emulator"):
        assert (rows(table, device=device) == table[:, ::-1]).all()


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_structs_in_structs(device: str) -> None:
    @tw.kernel
    def nested(p: tw.Array) -> tw.Array:
        out = tw.empty(len(p), p.dtype)
        for i in tw.grid(len(p)):
            place = p[i].place
            out[i].place = place
            out[i]["place"].x += place.y
            out[i].mass = p["place"]["x"][i] * p[i].mass
            out[i].spin = p[i].spin * 1j
            out[i].on = not p[i].on
        return out

    rng = np.random.default_rng(0)
    p = np.zeros(33, NESTED)
    p["place"]["x"], p["place"]["y"], p["mass"] = rng.standard_normal((3, 33))
    p["spin"], p["on"] = rng.standard_normal(33) + 1j, rng.integers(0, 2, 33)
    out = nested(p, device=device)
    np.testing.assert_allclose(out["place"]["x"], p["place"]["x"] + p["place"]["y"], rtol=1e-6)
    np.testing.assert_array_equal(out["place"]["y"], p["place"]["y"])
    np.testing.assert_allclose(out["mass"], p["place"]["x"] * p["mass"], rtol=1e-12)
    np.testing.assert_allclose(out["spin"], p["spin"] * 1j)
    np.testing.assert_array_equal(out["on"], ~p["on"])


@tw.kernel
def length(v: Particle) -> tw.Array:
    return tw.sqrt(v.x * v.x + v.y * v.y)


@tw.kernel
def flipped(v: Particle) -> tw.Array:
    return Particle(v.y, v.x, id=v.id)


@tw.kernel
def made(p: tw.Array[Particle], wind: Particle) -> tw.Array:
    out = tw.zeros(len(p), Particle)
    for i in tw.grid(len(p)):
        v = flipped(p[i])
        v.x += wind.x
        v.id = 1 if length(v) > 1.0 else 0
        out[i] = v
    return out


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_classes_and_calls(device: str) -> None:
    p = draw(33, PARTICLE)
    assert np.zeros(2, Particle).dtype == Particle.dtype == PARTICLE
    out = made(p, Particle(x=0.5), device=device)
    np.testing.assert_allclose(out["x"], p["y"] + np.float32(0.5), rtol=1e-6)
    np.testing.assert_array_equal(out["y"], p["x"])
    np.testing.assert_array_equal(out["id"], np.hypot(out["x"].astype(float), out["y"]) > 1)
    np.testing.assert_array_equal(made(p, np.array((0.5, 0, 0), PARTICLE)[()], device=device), out)


def test_other_layouts_have_their_own_code() -> None:
    for _ in range(2):
        for layout in ("plain", "of doubles", "padded"):
            p = draw(31, LAYOUTS[layout])
            got = sums(p)
            np.testing.assert_allclose(got, p["x"].astype(float) + 2 * p["y"].astype(float) - p["id"], rtol=1e-12)
    with pytest.raises(UserError, match=r"has no field 'y'"):
        sums(np.zeros(3, [("x", "f4"), ("id", "i4")]))
    with pytest.raises(
        UserError,
        match=r"argument 'p' must be Particle\(x: f32, y: f32, id: i32\), got struct\(x: f64, y: f64, id: i64\)",
    ):
        made(draw(3, LAYOUTS["of doubles"]), Particle())
    with pytest.raises(UserError, match=r"argument 'p' must be Particle\(.*\), got an array of float32"):
        made(np.zeros(3, np.float32), Particle())
    with pytest.raises(UserError, match=r"argument 'wind' is an array of structs, and must be one struct"):
        made(draw(3, PARTICLE), draw(3, PARTICLE))


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        ([("x", "f4", 3), ("y", "f4"), ("id", "i4")], r"field 'x' of argument 'p' is an array of shape \[3\]"),
        ([("x", "f4"), ("y", "U4"), ("id", "i4")], "field 'y' of argument 'p' has dtype <U4, which is not supported"),
        (
            [("x", ">f4"), ("y", "f4"), ("id", "i4")],
            "field 'x' of argument 'p' has dtype >f4, which has the other byte order",
        ),
        (
            {"names": ["x", "y", "id"], "formats": ["f4", "f4", "i4"], "offsets": [0, 2, 8]},
            "fields 'x' and 'y' of argument 'p' overlap in memory, at byte 2",
        ),
    ],
)
def test_layouts_that_are_refused(dtype: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        sums(np.zeros(3, np.dtype(dtype)))


def _error(body: str, tmp_path: Path) -> str:
    space: dict[str, Any] = {"tw": tw, "Particle": Particle}
    tw.run_source(
        f"@tw.kernel\ndef wrong(p: tw.Array):\n    out = tw.empty(len(p), p.dtype)\n    for i in tw.grid(len(p)):\n        {body}\n    return out\n",
        space,
    )
    with pytest.raises(UserError) as found:
        space["wrong"](draw(3, PARTICLE))
    return str(found.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("out[i] = p[i] + 1", "arithmetic with a whole struct, struct(x: f32, y: f32, id: i32)"),
        ("out[i] += p[i]", "'+=' on a whole struct"),
        ("out[i].x = p[i].z", "has no field 'z'"),
        ("out[i].x = p[i].xx", "did you mean 'x'?"),
        ("out[i] = (1, 2)", "has 3 fields, and is given 2 values"),
        ("out[i] = Particle(1, 2, 3, 4)", "has 3 fields, got 4 values"),
        ("out[i] = Particle(1, q=3)", "has no field 'q'"),
        ("out[i].x = p[['x', 'y']][i]", "several fields at once"),
    ],
)
def test_what_structs_cannot_do(body: str, message: str, tmp_path: Path) -> None:
    assert message in _error(body, tmp_path)


TEXT = """import numpy as np
import tilewright as tw
POINT = np.dtype([("x", "f4"), ("y", "f4")])
class Particle(tw.State):
    x: tw.f32
    y: float = 2.0
    id: tw.i32
@tw.kernel
def one(p: tw.Array[Particle], s: float) -> tw.Array:
    out = tw.empty(len(p), p.dtype)
    for i in tw.grid(len(p)):
        out[i] = Particle(1.0, 2.0, p[i].id << 1)
    return out
@tw.kernel
def two(p, table):
    out = tw.empty(len(p), POINT)
    for i in tw.grid(len(p)):
        out[i].x = table[p[i].id] * p["w"][i]
        out[i].y = 0
    return out
"""


def test_check_knows_structs(tmp_path: Path) -> None:
    path = tmp_path / "structs.py"
    path.write_text(TEXT)
    found = CliRunner().invoke(cli, ["check", str(path)])
    assert found.exit_code == 0, found.output
    path.write_text(TEXT.replace("p[i].id << 1", "p[i].idd"))
    found = CliRunner().invoke(cli, ["check", str(path)])
    assert found.exit_code == 1 and "structs.py:12" in found.output and "did you mean 'id'?" in found.output


@pytest.mark.parametrize("target", ["sm_90a", "wgsl", "msl", "spirv-vulkan", "gfx942"])
def test_code_for_every_target(target: str) -> None:
    assert turned.compile(draw(33, PARTICLE), target=target).code
