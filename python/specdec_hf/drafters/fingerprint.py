"""Whether stored ids, or those of a draft model, mean the tokens of the target's tokenizer.

Two tokenizers at hand are compared token by token, so that their special tokens may differ. With
stored ids only a hash of their whole vocabulary is kept, which cannot tell what differs: they are
refused where any token does, a renamed special one included.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

UNKNOWN = bytes(32)
DIGITS = 12  # hexadecimal digits in a message


def fingerprint_of(tokenizer: Any) -> bytes:
    """32 bytes that no tokenizer with another vocabulary has, special tokens included."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(vocabulary).encode()).digest()


def check_fingerprint(name: str, fingerprint: bytes, tokenizer: Any) -> str | None:
    """Check that stored ids are those of the model's tokenizer.

    Args:
        name: of what holds the ids, for messages.
        fingerprint: of the tokenizer that it was built with, or `UNKNOWN`.
        tokenizer: the model's; None where it is not known.

    Returns:
        A note where one of the two is not known, else None.

    Raises:
        ValueError: the ids are those of another tokenizer.
    """
    if fingerprint == UNKNOWN:
        return (
            f"the {name} does not record the tokenizer that it was built with; if that is not the "
            "model's, its drafts are rejected"
        )
    if tokenizer is None:
        return (
            f"the tokenizer that the {name} was built with was not checked, because none was "
            "given; if it is not the model's, the drafts are rejected"
        )
    wanted = fingerprint_of(tokenizer)
    if fingerprint != wanted:
        raise ValueError(
            f"{name} must have been built with the model's tokenizer, of fingerprint "
            f"{wanted.hex()[:DIGITS]}, got one that was built with {fingerprint.hex()[:DIGITS]}"
        )
    return None


def same_vocabulary(tokenizer: Any, other: Any) -> bool:
    """Whether no id names different tokens in two tokenizers.

    Models of one family often add or rename special tokens, so these may differ, and either may
    hold ids that the other lacks. Two tokenizers that share no other id are compared by these.
    """
    ours, theirs = ({i: t for t, i in one.get_vocab().items()} for one in (tokenizer, other))
    shared = ours.keys() & theirs.keys()
    compared = shared - {*tokenizer.added_tokens_decoder, *other.added_tokens_decoder} or shared
    return bool(compared) and all(ours[i] == theirs[i] for i in compared)
