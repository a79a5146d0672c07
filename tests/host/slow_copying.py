"""The definition of copied drafts, by brute force over lists of tokens."""

from __future__ import annotations


def ends_of(text, ngram):
    """Where the occurrences of an n-gram end."""
    n = len(ngram)
    return [end for end in range(n, len(text) + 1) if text[end - n : end] == ngram]


def match(text, max_match):
    """The longest end of a text, of at most max_match tokens, that occurred before its end."""
    for length in range(min(max_match, len(text) - 1), 0, -1):
        if len(ends_of(text, text[-length:])) > 1:
            return text[-length:]
    return []


def followers(text, context):
    """(token, count, end of the latest) of the tokens after a context, in the order of drafts."""
    found = {}
    for end in ends_of(text, context):
        if end < len(text):
            count, _ = found.get(text[end], (0, 0))
            found[text[end]] = count + 1, end + 1
    triples = [(token, count, last) for token, (count, last) in found.items()]
    return sorted(triples, key=lambda triple: (-triple[1], -triple[2]))


def options(text, context, max_match, min_match, limit):
    """Up to `limit` (token, confidence, context with it); shorter contexts come after longer."""
    context = context[-max_match:]
    found, left, before = {}, 1.0, None
    while len(context) >= min_match and len(found) < limit:
        ends, unseen = ends_of(text, context), 2 / len(context)
        if ends != before:  # else it is the same state
            seen = followers(text, context)
            total = sum(count for _, count, _ in seen)
            for token, count, _ in seen:
                if token not in found and len(found) < limit:
                    found[token] = left * count / (total + unseen), [*context, token]
            left *= 1 - total / (total + unseen)
        before, context = ends, context[1:]
    return [(token, p, longer) for token, (p, longer) in found.items()]


def chains(text, gamma, count, max_match, min_match, min_confidence=0.0):
    """[(tokens, confidences)] of `SuffixAutomaton.propose` without a corpus."""
    context = match(text, max_match)

    def opened(context, limit):
        return options(text, context, max_match, min_match, limit)

    # (-probability, number, tokens and confidences before it, option)
    branches = [(-o[1], n, [], [], o) for n, o in enumerate(opened(context, count))]
    number, found = len(branches), []
    branches = [branch for branch in branches if -branch[0] >= min_confidence]
    while branches and len(found) < count:
        branches.sort(key=lambda branch: branch[:2])
        negative, _, tokens, confidences, (token, confidence, context) = branches.pop(0)
        tokens, confidences = [*tokens, token], [*confidences, confidence]
        while len(tokens) < gamma:
            best, *others = opened(context, count - len(found)) or [None]
            if best is None:
                break
            for other in others:
                if -negative * other[1] >= min_confidence:
                    branches.append((negative * other[1], number, tokens, confidences, other))
                    number += 1
            token, confidence, context = best
            negative *= confidence
            if -negative < min_confidence:
                break
            tokens, confidences = [*tokens, token], [*confidences, confidence]
        found.append((tokens, confidences))
    return found
