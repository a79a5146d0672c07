"""A text server over `BatchQueue`, which needs the extra ``server``, and that queue."""

from specdec_hf.exports import lazily

__all__, __getattr__, __dir__ = lazily(__file__, __name__)
