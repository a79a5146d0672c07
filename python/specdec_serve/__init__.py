"""A text server over `specdec_hf.BatchQueue`; needs the extra ``server``."""
