"""Functions the tests of isolated compilation run in the worker process."""

import os
import sys
import time

from tilewright.base.errors import TargetLimit


def double(data: bytes) -> bytes:
    return data * 2


def greet(name: str) -> str:
    return f"hello {name}"


def chatter(text: str) -> bytes:
    print(text)
    os.write(1, text.encode())
    return sys.stdin.read().encode()


def abort(text: str) -> bytes:
    os.write(2, b"about to abort: " + text.encode() + b"\n")
    os.abort()


def sleep(seconds: str) -> bytes:
    time.sleep(float(seconds))
    return b"awake"


def killed_once(marker: str) -> bytes:
    if not os.path.exists(marker):
        open(marker, "w").close()
        os.kill(os.getpid(), 9)
    return b"second time"


def limit() -> bytes:
    raise TargetLimit.at("TW020", "too much", help="use less")


def fault() -> bytes:
    raise ZeroDivisionError("none of ours")


def process_id() -> bytes:
    return str(os.getpid()).encode()
