"""EAGLE-3 heads: module, files, draft step and drafters."""
