"""The decoding loop. `generate` begins a session, runs rounds until every sequence has ended, and
finishes it; rounds.py defines the terms and is the file to read first.
"""

from specdec_hf.requirements import refuse_other_versions

refuse_other_versions()
