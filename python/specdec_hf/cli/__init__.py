"""The command line, ``python -m specdec_hf``. It uses the loop; the loop does not know it."""
