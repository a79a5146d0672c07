"""The tests of the loop run on one thread, and draft from the second round on, however fast the
machine is."""

import math

import pytest
from specdec_hf.runner.comparison import forget_checks
from specdec_hf.runner.spec_runner import SpecRunner
from specdec_hf.schedules import benefit_guard
from support import hf_models
from support.cli_models import folder, home  # noqa: F401  # what commands work in
from support.hf_models import one_thread  # noqa: F401  # autouse here


@pytest.fixture(autouse=True)
def drafts_at_once(monkeypatch):
    """The benefit guard would let short texts of tiny models end before it tries a draft."""
    monkeypatch.setattr(benefit_guard, "MAX_LOSS", math.inf)


@pytest.fixture(scope="module")
def model():
    """Of few tokens, so that its texts repeat themselves."""
    return hf_models.build("llama", vocab_size=11)


def serving():
    from support import text_server  # noqa: PLC0415  # which needs an extra

    return text_server.serving()


@pytest.fixture
def server():
    with serving() as made:
        yield made


@pytest.fixture(scope="module")
def client():
    with serving() as (made, _):
        yield made


@pytest.fixture
def forgetful():
    """What was found of models is measured again, and what is found is not kept."""
    forget_checks()
    yield
    forget_checks()


@pytest.fixture
def forwards(monkeypatch):
    """Of each forward: its sequences, first position and tokens, and whether it had no mask."""
    seen, window = [], SpecRunner.window

    def watched(self, starts, size, *args):
        made = window(self, starts, size, *args)
        seen.append((len(starts), int(starts[0]), size, made["attention_mask"] is None))
        return made

    monkeypatch.setattr(SpecRunner, "window", watched)
    return seen
