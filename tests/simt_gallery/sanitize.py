"""NVIDIA's compute-sanitizer over the gallery: does it see the bugs the emulator sees, and nothing in the good twins?

    python -m simt_gallery.sanitize --out simt_gallery/sanitizer.json    # from tests/, with a GPU, CuPy and compute-sanitizer

For each tool one process runs the bad kernels that name it, and one all the good twins; arrays are allocated one by one, so that
the tool knows where each ends. Out: a line for each kernel that the two do not agree about, and the counts; with `--out` all of it
as JSON. Where the machine refuses the tool, that is what is recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TOOLS = ("memcheck", "racecheck", "synccheck")
MARK = "#### case "
_FOUND = re.compile(r"^=+ +(?:Invalid |Error: |Warning: |Race reported|Barrier error)")
_REFUSED = re.compile(r"^=+ +(?:Error: |Internal ).*(?:not supported|[Pp]ermission|[Ii]nsufficient|failed to)", re.MULTILINE)


def sanitizer() -> str | None:
    """The tool: on the path, or where CUDA is installed."""
    found = shutil.which("compute-sanitizer")
    return found or next((str(p) for p in sorted(Path("/usr/local").glob("cuda*/bin/compute-sanitizer"), reverse=True)), None)


def cases() -> list[object]:
    from simt_gallery import all_cases

    return list(all_cases())


def child(kind: str, tool: str) -> None:
    """Run the kernels of one process, each after a line that names it."""
    import cupy

    from simt_gallery.cases import Case, launch

    cupy.cuda.set_allocator(None)
    for case in cases():
        assert isinstance(case, Case)
        if kind == "bad" and case.tool != tool:
            continue
        print(f"{MARK}{case.name}", flush=True)
        try:
            launch(case, case.bad if kind == "bad" else case.good, [cupy.asarray(a) for a in case.arrays()], None)
            cupy.cuda.runtime.deviceSynchronize()
        except Exception as error:  # what the tool stops comes back as an error of the driver
            print("raised", type(error).__name__, str(error).splitlines()[0][:100], flush=True)
    print(f"{MARK}end", flush=True)


def run_tool(path: str, kind: str, tool: str, seconds: int) -> dict[str, object]:
    """What the tool says of each kernel of one process: how many reports."""
    command = [path, "--tool", tool, "--destroy-on-device-error", "kernel", "--report-api-errors", "no", "--print-limit", "0", sys.executable, "-m",
               "simt_gallery.sanitize", "--child", kind, tool]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=os.environ, check=False)
    except subprocess.TimeoutExpired:
        return {"tool": tool, "kind": kind, "refused": f"not done after {seconds} s"}
    output = done.stdout + done.stderr
    if MARK + "end" not in output:
        refused = _REFUSED.search(output)
        last = output.strip().splitlines()[-1:] or ["no output"]
        return {"tool": tool, "kind": kind, "refused": refused[0] if refused else last[0]}
    reports: dict[str, int] = {}
    current = ""
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            current = line[len(MARK) :]
            reports[current] = 0
        elif _FOUND.match(line) and current:
            reports[current] += 1
    reports.pop("end", None)
    return {"tool": tool, "kind": kind, "reports": reports}


def _device() -> str:
    import tilewright as tw

    return next((device.name for device in tw.devices() if device.type == "cuda"), "no GPU")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=int, default=300, help="the most one process may take")
    parser.add_argument("--child", nargs=2, metavar=("KIND", "TOOL"))
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return
    path = sanitizer()
    if path is None:
        sys.exit("compute-sanitizer is not installed")
    jobs = [(kind, tool) for tool in TOOLS for kind in ("bad", "good")]
    with ThreadPoolExecutor(len(jobs)) as pool:
        results = list(pool.map(lambda job: run_tool(path, *job, options.seconds), jobs))
    for result in results:
        reports = result.get("reports")
        if not isinstance(reports, dict):
            print(f"{result['tool']} {result['kind']}: not run: {result['refused']}")
            continue
        wrong = [name for name, count in reports.items() if (count > 0) != (result["kind"] == "bad")]
        print(f"{result['tool']} {result['kind']}: agrees about {len(reports) - len(wrong)} of {len(reports)}")
        for name in wrong:
            print(f"    {name}: {reports[name]} reports")
    if options.out:
        record = {"device": _device(), "tool": path, "runs": results}
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
