"""Systems of single papers, one file each: drafters, heads, beam search, and the first programs.

The loop of `specdec_hf` finds them by the entry points of the wheel and imports none by itself.
"""

from specdec_hf.exports import lazily

__all__, __getattr__, __dir__ = lazily(__file__, __name__)
