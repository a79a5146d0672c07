"""Token recycling: the adjacency matrix, the trees that it fills, and the text they draft for."""

import dataclasses

import numpy as np
import pytest
from specdec_hf import Candidates, SpeculativeDecoder, TreeSpec
from specdec_hf.drafting.drafter import Round
from specdec_papers.token_recycling import TokenRecyclingDrafter
from support import hf_models
from support.drafter_proof import begun, history_of
from support.hf_models import NEW, run

pytestmark = pytest.mark.papers


def started(*arguments, **options):
    return begun(TokenRecyclingDrafter(*arguments, **options), 2)


def told(state, before, after, *candidates):
    """Commit a round in which this was fed."""
    none = np.empty((2, 0), dtype=np.int64)
    done = Round.of_chain(before.lengths, before.active, np.zeros(2, dtype=np.int64), none)
    state.commit(after, dataclasses.replace(done, candidates=Candidates(*candidates)))


def proposed(state, history, limits=(9, 9)):
    """Each sequence's paths of tokens from the root to every node."""
    draft = state.propose(history, np.array(limits))
    if draft is None:
        return None
    paths = []
    for tokens, parents in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
        of = {-1: []}
        for n, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if token >= 0:
                of[n] = [*of[parent], token]
        paths.append(list(of.values())[1:])
    assert draft.depth == max(len(path) for some in paths for path in some)
    return paths


def test_the_tree_is_filled_from_the_matrix():
    state = started(TreeSpec.branching((2, 2)), 2)
    prompts = [4, 1, 2, 1, 3, 1], [5, 6, 5]
    # The latest follower of 1 is 3; its only follower is 1, as that of 2 is.
    assert proposed(state, history_of(*prompts)) == [[[3], [2], [3, 1], [2, 1]], [[6], [6, 5]]]
    second_alone = started(TreeSpec((-1,), (1,)), 2)
    assert proposed(second_alone, history_of(*prompts)) == [[[2]], []]
    # Behind 1 the target holds 7 and 3 for likely, and it has read the drafts 3 and 2 as well.
    tokens = np.array([[1, 3, 2, 1], [5, 6, -1, -1]])
    parents = np.array([[-1, 0, 0, 2], [-1, 0, -1, -1]])
    ids = np.array([[[9, 9], [8, 4], [2, 1], [7, 3]], [[6, 5], [5, 6], [1, 1], [1, 1]]])
    history = history_of([*prompts[0], 9, 1], [*prompts[1], 6])
    told(state, history_of(*prompts), history, tokens, parents, ids)
    assert state._rows[0] == {1: [7, 3], 2: [2, 1], 3: [8, 4], 4: [1]}
    assert proposed(state, history) == [
        [[7], [3], [3, 8], [3, 4]],
        [[5], [6], [5, 6], [5, 5], [6, 5], [6, 6]],
    ]
    assert proposed(state, history, (1, 0)) == [[[7], [3]], []]
    ended = history_of([*prompts[0], 9], [*prompts[1], 6], active=(True, False))
    assert proposed(state, ended) is None
    told(state, ended, history_of([*prompts[0], 9], [*prompts[1], 6]), tokens, parents, ids + 1)
    assert state._rows[1] == {5: [6, 5], 6: [5, 6]}


def test_what_a_call_has_learnt_can_be_inherited():
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9,))
    other = hf_models.build("llama", vocab_size=97)
    expected = model.generate(**inputs, max_new_tokens=NEW, do_sample=False).tolist()
    for inherit in (False, True):
        drafter = TokenRecyclingDrafter(TreeSpec.branching((3, 2, 1)), inherit=inherit)
        first, second = (run(model, inputs, drafter=drafter) for _ in range(2))
        assert first.sequences.tolist() == second.sequences.tolist() == expected
        assert (first.stats.accepted < second.stats.accepted) == inherit
    (learnt,) = begun(drafter)._rows
    # A call that does not end by itself leaves nothing.
    stream = SpeculativeDecoder(drafter).stream(other, inputs["input_ids"], max_new_tokens=NEW)
    next(stream)
    stream.close()
    assert begun(drafter, 2)._rows == [learnt, learnt]
    batch = run(model, hf_models.prompts((4, 5)), drafter=drafter, max_new_tokens=1)
    assert batch.stats.drafted == 0
    assert learnt.keys() <= begun(drafter)._rows[0].keys()
    run(other, inputs, drafter=drafter, max_new_tokens=1)
    assert 0 < len(begun(drafter, model=other)._rows[0]) < len(learnt)
