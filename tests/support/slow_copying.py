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


class SlowAutomaton:
    """A suffix automaton in Python. A fault that is planted in it must be found.

    Args:
        fault: "link": a state that is split keeps its suffix link; "count": a copied state begins
            with no occurrences; "edge": edges to the split state are not moved; None.
    """

    def __init__(self, max_match, fault=None):
        self.max_match, self.fault = max_match, fault
        self.length, self.link, self.edges, self.ends = [0], [None], [{}], [[]]
        self.last, self.text = 0, []

    def _state(self, length, link, edges, ends):
        for values, value in zip(
            (self.length, self.link, self.edges, self.ends), (length, link, edges, ends),
            strict=True,
        ):  # fmt: skip
            values.append(value)
        return len(self.length) - 1

    def append(self, tokens):
        for token in map(int, tokens):
            self.text.append(token)
            current = self._state(len(self.text), 0, {}, [])
            p = self.last
            while p is not None and token not in self.edges[p]:
                self.edges[p][token] = current
                p = self.link[p]
            if p is not None:
                self.link[current] = self._split(p, token)
            self.last = s = current
            while s:
                self.ends[s].append(len(self.text))
                s = self.link[s]

    def _split(self, p, token):
        whole = self.edges[p][token]
        if self.length[whole] == self.length[p] + 1:
            return whole
        ends = [] if self.fault == "count" else list(self.ends[whole])
        part = self._state(self.length[p] + 1, self.link[whole], dict(self.edges[whole]), ends)
        while p is not None and self.edges[p].get(token) == whole and self.fault != "edge":
            self.edges[p][token] = part
            p = self.link[p]
        if self.fault != "link":
            self.link[whole] = part
        return part

    def count(self, ngram):
        state = 0
        for token in map(int, ngram):
            if token not in self.edges[state]:
                return 0
            state = self.edges[state][token]
        return len(self.ends[state])
