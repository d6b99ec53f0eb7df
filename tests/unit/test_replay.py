"""The guard of refactorings: its normaliser knows what counts, and the code of a few cases is that of the baseline."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tools.replay import Difference, differences, normalised, python_version

ROOT = Path(__file__).parents[2]
TEXT = """declare float @llvm.fma.f32(float, float, float)
declare i32 @tilewright_helper(ptr)
@table = internal constant [2 x i8] c"%a"
define void @tw_scale_0(ptr %m, i64 %n) nounwind !dbg !5 { ; a comment
entry:
  br label %head
head:
  %i = phi i64 [ 0, %entry ], [ %next, %head ], !dbg !7
  %w = call i32 asm "mov.u32 $0, %tid.x;", "=r"()
  %s = call i32 @tilewright_helper(ptr @table)
  %x = call float @llvm.fma.f32(float 2.0, float 3.0, float 4.0)
  %next = add i64 %i, 1
  %again = icmp slt i64 %next, %n
  br i1 %again, label %head, label %done
done:
  ret void
}
define internal void @other(ptr %m) {
  ret void
}
!4 = !DIFile(filename: "/somewhere/kernels.py", directory: "")
!5 = distinct !DISubprogram(name: "tw_scale_0", file: !4, line: 181, scopeLine: 181)
!7 = !DILocation(line: 184, column: 22, scope: !5)
"""


def renamed(*pairs: tuple[str, str]) -> str:
    text = TEXT
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new)
    return text


def test_names_do_not_count() -> None:
    assert normalised(
        renamed(
            ("tw_scale_0", "tw_scaled_7"),
            ("@other", "@another"),
            ("@table", "@words"),
            ("tilewright_helper", "tilewright_aid"),
        )
    ) == normalised(TEXT)
    assert normalised(
        renamed(("%head", "%loop3"), ("head:", "loop3:"), ("%next", "%following"), ("%m", "%p0"))
    ) == normalised(TEXT)
    assert normalised(
        renamed(("!5", "!100"), ("!7", "!101"), ("/somewhere/kernels.py", "/elsewhere/other.py"))
    ) == normalised(TEXT)
    assert normalised(
        renamed(("line: 181", "line: 11"), ("scopeLine: 181", "scopeLine: 11"), ("line: 184", "line: 14"))
    ) == normalised(TEXT)
    assert normalised(renamed((" ; a comment", ""))) == normalised(TEXT)
    first, second, *rest = TEXT.splitlines(keepends=True)
    assert normalised("".join([second, first, *rest])) == normalised(TEXT)


def test_all_else_counts() -> None:
    changes = [
        ("float 3.0", "float 3.5"), ("add i64", "add nsw i64"), ("%tid.x", "%ntid.x"), ('c"%a"', 'c"%b"'),
        ("llvm.fma.f32", "llvm.fmuladd.f32"),
        ("[ 0, %entry ], [ %next, %head ]", "[ %next, %entry ], [ 0, %head ]"), ("line: 184", "line: 185"),
        ("column: 22", "column: 9"), (" nounwind", ""),
        ("icmp slt i64 %next, %n", "icmp slt i64 %i, %n"), ("label %head, label %done", "label %done, label %head"),
        ("@tilewright_helper(ptr)", "@tilewright_helper(ptr, ptr)"),
    ]  # fmt: skip
    found = {normalised(renamed(change)) for change in changes}
    assert len(found) == len(changes) and normalised(TEXT) not in found


def test_differences_say_what_changed() -> None:
    baseline = {
        "python": python_version(),
        "targets": ["sm_80", "sm_90a"],
        "cases": {"a": "1.2.3 refused:TW020", "b": "- -"},
    }
    same = ["-"] * 4
    assert differences({"a": [*same, "1.2.3", "refused:TW020", "-"]}, baseline) == []
    assert differences({"a": [*same, "1.5.6", "", "-"]}, baseline) == [
        Difference("a", "sm_80", "launch and host changed")
    ]
    assert differences({"a": [*same, "", "1.2.3", "-"]}, baseline) == [
        Difference("a", "sm_90a", "was refused:TW020, is compiled")
    ]
    assert differences({"c": [*same, "-", "-", "-"]}, baseline) == [Difference("c", "", "is new")]
    other = baseline | {"python": "2.7"}
    assert differences({"a": [*same, "1.2.6", "", "-"]}, other) == []


def test_a_handful_of_cases_is_as_in_the_baseline() -> None:
    patterns = (
        "table/add_f32*",
        "table/softmax*",
        "matrix/kn_bf16*",
        "simt/warp_sum",
        "primitives/scan float32",
        "zyn/relu 0",
        "host/allocator",
        "gallery/scale 1000",
    )
    command = [
        sys.executable,
        str(ROOT / "tools" / "replay.py"),
        "--jobs",
        "1",
        *(part for pattern in patterns for part in ("--only", pattern)),
    ]
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all as in the baseline" in done.stdout
