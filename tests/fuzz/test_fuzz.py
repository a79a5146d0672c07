"""Some random calls of `make sanitize` on the library as it is, and what the checks reject."""

import pytest
from fuzz import directed
from fuzz.calls import MAKERS
from fuzz.checks import CHECKS, Recorder
from fuzz.one_call import run
from fuzz.values import Source

SEED = 20


@pytest.mark.slow
def test_random_calls_return_valid_results_or_are_refused():
    outcomes = [run(SEED, i) for i in range(500)]
    assert 200 < outcomes.count("returned") < 450


def test_a_call_is_determined_by_its_seed_and_number():
    for op, make in MAKERS.items():
        first, again = (make(Source(SEED, 1)) for _ in range(2))
        assert repr(first) == repr(again), op
        assert first.function.__name__ == op


def recorded(make):
    """An op, the arguments that a public function passes to it, and what it returns."""
    function, arguments = make()
    with Recorder() as recorder:
        function(**arguments)
    overload, args = recorder.calls[0]
    return overload, args, overload(*args)


@pytest.mark.parametrize(
    ("output", "value"), [(0, 19), (0, -2), (1, 3), (2, 64), (3, float("nan")), (3, 90.0)],
    ids=["id V", "id -2", "too many accepted", "unknown bit", "nan", "no logarithm of a float"],
)  # fmt: skip
def test_the_checks_reject_a_verdict_with(output, value):
    overload, args, out = recorded(directed.CALLS[0])
    given = dict(zip((a.name for a in overload._schema.arguments), args, strict=True))
    CHECKS["verify_chain"](given, *out)
    out[output].view(-1)[0] = value
    with pytest.raises(AssertionError):
        CHECKS["verify_chain"](given, *out)
