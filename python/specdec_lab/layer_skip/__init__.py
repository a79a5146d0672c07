"""The search for the sublayers that a self-drafting model leaves out."""
