"""Other Python threads go on while a CPU kernel runs for long, also where its arrays are small."""

from __future__ import annotations

import threading
import time

import numpy as np

import tilewright as tw


def test_threads_go_on_beside_a_loop_whose_length_is_a_number() -> None:
    @tw.kernel
    def busy(x: tw.Array, rounds: int) -> tw.Array:
        n = x.shape[0]
        out = tw.empty((n,), x.dtype)
        for i in tw.grid(n):
            value = x[i]
            for _ in range(rounds):
                value = tw.sqrt(value * value + 1e-30)
            out[i] = value
        return out

    x, rounds, seconds = np.ones(64, np.float32), 1000, 0.0
    busy(x, rounds, device="cpu")
    while seconds < 0.2:
        rounds *= 2
        start = time.process_time()
        busy(x, rounds, device="cpu")
        seconds = time.process_time() - start
    worker = threading.Thread(target=lambda: busy(x, rounds, device="cpu"))
    worker.start()
    turns = 0
    while worker.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 5
