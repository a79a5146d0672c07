"""Sphinx: `pip install -e .[docs] && sphinx-build docs build/docs`."""

from specdec_kernels import __version__

project = "specdec-kernels"
author = "the developers of specdec-kernels"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
html_theme = "alabaster"
