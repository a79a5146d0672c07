"""The ops of specdec_host run without the GIL and on threads of their own."""

import ctypes
import sys
import threading
import time

import numpy as np
import pytest
import specdec_host as host
from support.programs import output_of

LOGITS = np.random.default_rng(0).normal(size=(64, 20_000)).astype(np.float32)
DRAWS = dict(seeds=np.arange(64), positions=np.arange(64))


def draw():
    return host.sample(LOGITS, noise="shared", **DRAWS)


def counts_during(call, calls):
    """Whether another thread counts during one of so many calls; who has the GIL keeps it."""
    count, stop, interval = [0], threading.Event(), sys.getswitchinterval()

    def go():
        while not stop.is_set():
            count[0] += 1
            time.sleep(0)  # gives the GIL away

    sys.setswitchinterval(1000)
    thread = threading.Thread(target=go)
    thread.start()
    try:
        for _ in range(calls):
            before = count[0]
            call()
            if count[0] > before:
                return True
        return False
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)


def test_another_thread_runs_during_a_call_and_none_during_one_that_holds_the_gil():
    assert counts_during(draw, 1000)  # the other thread may have to wait for a processor
    if sys.platform == "linux":  # takes usleep from the C library
        sleep = ctypes.PyDLL(None).usleep
        assert not counts_during(lambda: sleep(3000), 20), "the control"


@pytest.mark.parametrize(("given", "number"), [("7", 7), ("5000", 1024)])
def test_at_first_the_environment_says_how_many_threads_there_are(given, number):
    program = "import specdec_host; print(specdec_host.get_num_threads())"
    assert output_of("-c", program, OMP_NUM_THREADS=given) == f"{number}\n"


@pytest.mark.parametrize(
    ("number", "error", "message"),
    [
        (0, ValueError, "number must be at least 1, got 0"),
        (1025, ValueError, "number must be at most 1024, got 1025"),
        (1.5, TypeError, "number must be an integer, got 1.5"),
    ],
)
def test_the_number_of_threads_is_checked(number, error, message):
    with pytest.raises(error, match=message):
        host.set_num_threads(number)
