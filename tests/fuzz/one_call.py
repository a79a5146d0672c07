"""Call number i of a seed: makes its arguments, calls, and checks what comes back."""

from __future__ import annotations

import torch
from fuzz import directed
from fuzz.calls import MAKERS
from fuzz.checks import REFUSALS, Recorder, call_and_check
from fuzz.run import SETTINGS
from fuzz.values import Source, spoiled

from specdec_kernels import _library

OPS = tuple(_library.OPS)
assert set(OPS) == set(MAKERS)


def run(seed: int, i: int) -> str:
    """Returns "returned" or "raised"; any other exception, and a failed check, passes through."""
    if i < len(directed.CALLS) * len(SETTINGS):  # each call under each setting
        function, arguments = directed.CALLS[i // len(SETTINGS)]()
        with Recorder() as recorder:
            function(**arguments)
        assert len(recorder.calls) == 1
        return "returned"
    r = Source(seed, i)
    op = r.choice(OPS)
    function, arguments = MAKERS[op](r)
    is_spoiled = r.happens(0.3)
    if is_spoiled:
        for _ in range(r.choice((1, 1, 2))):
            name = r.choice(list(arguments))
            arguments[name] = spoiled(r, arguments[name])
    recorder = Recorder()
    try:
        with recorder:
            function(**arguments)
    except REFUSALS as error:
        if not is_spoiled and not expected(error):
            raise AssertionError(f"{op} refused valid arguments: {error}") from error
        return "raised"
    # The op itself, with arguments that the public function does not pass on.
    if recorder.calls and r.happens(0.25):
        overload, args = recorder.calls[0]
        changed = list(args)
        for _ in range(r.choice((1, 1, 2))):
            n = r.randrange(len(changed))
            changed[n] = spoiled(r, changed[n])
            # PyTorch lets None pass for a tensor, as an undefined one, which C++ refuses. Beside a
            # meta tensor it would reach the fake kernel as None.
            if changed[n] is None and str(overload._schema.arguments[n].type) == "Tensor":
                changed[n] = args[n]
        try:
            call_and_check(overload, tuple(changed))
        except REFUSALS:
            return "raised"
    return "returned"


def expected(error: BaseException) -> bool:
    """Refusals of arguments that the generator counts as valid."""
    return isinstance(error, torch.OutOfMemoryError)
