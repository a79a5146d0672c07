"""Drafters without a model: they copy from texts, count n-grams, or draw at random."""
