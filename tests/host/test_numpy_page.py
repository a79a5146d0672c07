"""The code of docs/numpy.md runs as it is printed, and the page names what the package has."""

import re
from pathlib import Path

import pytest
import specdec_host

PAGE = Path(__file__).resolve().parents[2] / "docs/numpy.md"

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="the documents are not here")


def test_the_printed_code_of_the_numpy_page_runs():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = {}
    exec(code, names)
    verdict = names["verdict"]
    assert verdict.tokens.shape == (2, 6)
    assert (verdict.num_accepted > 0).any()
    assert not verdict.status.any()


def test_the_page_names_what_the_package_has():
    named = re.findall(r"specdec_host\.(\w+)", PAGE.read_text())
    assert named
    assert all(hasattr(specdec_host, name) for name in named)
