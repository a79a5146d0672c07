"""The drafters, a file for each family; resolve.py makes one of the argument ``drafter``."""
