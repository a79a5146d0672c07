"""The lanes of `make sanitize` over the CUDA source: what they plant and run is there."""

from __future__ import annotations

import pytest
from simt.sanitize import CONTROLS, ROOT, SIMT, SOURCES


@pytest.mark.parametrize("control", CONTROLS, ids=lambda c: c.name)
def test_a_control_can_be_planted_and_names_a_case(control):
    assert (ROOT / control.path).read_text().count(control.before) == 1
    assert control.after != control.before
    op, name = control.case.split(" ", 1)
    cases = (SIMT / "sanitized.cpp").read_text()
    assert f'{op}("{name}"' in cases


def test_every_source_of_the_kernels_is_run():
    # The cache ops are included by the driver.
    driver = (SIMT / "sanitized.cpp").read_text()
    for path in (ROOT / "csrc/cuda").rglob("*.cu"):
        name = path.relative_to(ROOT).as_posix()
        included = f'#include "{path.relative_to(ROOT / "csrc").as_posix()}"'
        assert name in SOURCES or included in driver, name
