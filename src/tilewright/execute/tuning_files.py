"""What was tuned, as one file: measured on one machine, used on others with the same device.

In: a path. Out: a file with every table of this machine's devices (`export_tuning`), or those tables added to one's own (`import_tuning`).

The first line names the format and has the SHA-256 of the rest, which is JSON: the version of Tilewright, the devices, and per target what of
it decides about code (`Target.key()`). A table is taken over where a device here has that very target. Measurements of the compiler that wrote
the file count as made by the one that reads it, as both are of one version. A file that is damaged, of another version, or for other devices
only is an error that names it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from tilewright.base.environment import VERSION
from tilewright.base.errors import DeviceError, TilewrightError, UserError
from tilewright.base.record import record
from tilewright.compile import tuning
from tilewright.compile.driver import compiler_version
from tilewright.execute.devices import Device, compute_devices

_HEAD = "tilewright-tuning 1"


@record
class TuningFile:
    """What was written to a file, or read from it."""

    path: str
    kernels: tuple[str, ...]
    """Names of the kernels, one for each table."""
    measurements: int
    left_out: int = 0
    """Tables of other devices."""

    def __repr__(self) -> str:
        return f"<tuning file {self}>"

    def __str__(self) -> str:
        rest = f"; {self.left_out} tables are of other devices" if self.left_out else ""
        return f"{self.path}: {self.measurements} measurements of {len(self.kernels)} kernels{rest}"


def export_tuning(path: str | os.PathLike[str]) -> TuningFile:
    """Write all that was tuned on this machine's devices to a file."""
    here = {d.target.name: d for d in compute_devices()}
    tables = tuning.store().tables()
    kept = {key: table for key, table in tables.items() if table.target in here}
    body = json.dumps(
        {
            "version": VERSION, "compiler": compiler_version(),
            "targets": {name: {"key": d.target.key(), "device": d.name} for name, d in here.items()},
            "tables": {key: tuning.table_data(table) for key, table in kept.items()},
        },
        indent=1,
    )  # fmt: skip
    try:
        Path(path).write_text(f"{_HEAD} {_digest(body)}\n{body}\n", encoding="utf-8")
    except OSError as error:
        raise UserError.at("TW007", f"{os.fspath(path)} cannot be written: {error.strerror}") from None
    return _report(path, kept.values(), len(tables) - len(kept))


def import_tuning(path: str | os.PathLike[str]) -> TuningFile:
    """Add what a file of `tw.export_tuning` holds to what was tuned here. Kernels called before keep the code they have."""
    name = os.fspath(path)
    data = _read(name)
    if data.version != VERSION:
        raise UserError.at("TW007", f"{name} was written by Tilewright {data.version}, and this is {VERSION}", help="tune again, or use that version")
    here = {d.target.name: d for d in compute_devices()}
    fits = {key: t for key, t in data.tables.items() if t.target in here and data.targets[t.target][0] == here[t.target].target.key()}
    if data.tables and not fits:
        measured = ", ".join(sorted({f"{data.targets[t.target][1]} ({t.target})" for t in data.tables.values()}))
        raise DeviceError.at("TW030", f"{name} was measured on {measured}; here are {_shown(here.values())}", help="tune on a machine with the same device")
    for key, table in fits.items():
        own = [replace(m, version=compiler_version()) if m.version == data.compiler else m for m in table.entries]
        tuning.store().add(key, table.kernel, table.target, own)
    return _report(path, fits.values(), len(data.tables) - len(fits))


@record
class _Content:
    version: str
    compiler: str
    targets: dict[str, tuple[str, str]]
    """By name: what decides about code, and the device's name."""
    tables: dict[str, tuning.TuningTable]


def _read(name: str) -> _Content:
    try:
        text = Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError.at("TW007", f"{name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise _foreign(name) from None
    head, _, body = text.partition("\n")
    if not head.startswith("tilewright-tuning "):
        raise _foreign(name)
    if not head.startswith(_HEAD + " "):
        raise UserError.at("TW007", f"{name} has another format: {head.rpartition(' ')[0]}, not {_HEAD}", help="export it with this version")
    if head.removeprefix(_HEAD + " ") != _digest(body.removesuffix("\n")):
        raise _damaged(name, "its content does not fit its checksum")
    try:
        data = json.loads(body)
        targets = {str(t): (str(v["key"]), str(v["device"])) for t, v in data["targets"].items()}
        tables = {str(key): tuning.table_of(table) for key, table in data["tables"].items()}
        unknown = [t.target for t in tables.values() if t.target not in targets]
        if unknown:
            raise _damaged(name, f"it does not describe the target {unknown[0]}")
        return _Content(str(data["version"]), str(data["compiler"]), targets, tables)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise _damaged(name, f"{type(error).__name__}: {error}") from None


def _foreign(name: str) -> TilewrightError:
    return UserError.at("TW007", f"{name} is no file of tuning tables", help="write one with tw.export_tuning or 'tilewright tuning export'")


def _damaged(name: str, why: str) -> TilewrightError:
    return UserError.at("TW007", f"{name} is damaged: {why}", help="copy it again, or export it again")


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()


def _report(path: str | os.PathLike[str], tables: Iterable[tuning.TuningTable], left_out: int) -> TuningFile:
    found = list(tables)
    return TuningFile(os.fspath(path), tuple(t.kernel for t in found), sum(len(t.entries) for t in found), left_out)


def _shown(devices: Iterable[Device]) -> str:
    return ", ".join(f"{d.name} ({d.target.name})" for d in devices)
