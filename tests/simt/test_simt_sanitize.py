"""The lanes of `make sanitize` over the CUDA source: what they plant and run is there."""

from __future__ import annotations

from simt.sanitize import ROOT, SIMT, SOURCES


def test_every_source_of_the_kernels_is_run():
    # The cache ops are included by the driver.
    driver = (SIMT / "sanitized.cpp").read_text()
    for path in (ROOT / "csrc/cuda").rglob("*.cu"):
        name = path.relative_to(ROOT).as_posix()
        included = f'#include "{path.relative_to(ROOT / "csrc").as_posix()}"'
        assert name in SOURCES or included in driver, name
