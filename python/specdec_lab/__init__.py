"""The laboratory: heads are trained, drafters analysed and the loop timed. No call needs it."""
