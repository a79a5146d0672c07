"""The drafter of a call whose user leaves the choice to the library."""

from __future__ import annotations

from typing import Any

from specdec_hf.arguments import Refused
from specdec_hf.drafters.copying import PromptLookupDrafter, SuffixAutomatonDrafter
from specdec_hf.drafters.merge import TrieDrafter
from specdec_hf.drafting.call import DrafterCall
from specdec_hf.drafting.drafter import Drafter, State
from specdec_hf.drafting.registry import class_of
from specdec_hf.heads.shipped import FoundHead, find_head, is_shipped
from specdec_hf.model_paths import state_of_files
from specdec_hf.runner.model_record import record_of
from specdec_hf.trees import EagleTree, TrieTree

CHAINS, DEPTH, NODES = 4, 6, 31
# Below these a node, or a level of the head's tree, is expected to cost more time than it saves: an
# estimate for compiled forwards on two CPU cores.
HEAD_TREE = EagleTree(width=4, depth=DEPTH, size=24, min_probability=0.12)
TREE = TrieTree(CHAINS, DEPTH, NODES, min_probability=0.02)
# A shipped head is expected to give this benefit with the target that it serves, of other weights
# too: only those that agree with it are served, and the guard soon goes by what it measures. In a
# batch forwards of several tokens cost more, and nothing is expected.
BENEFIT_OF_HEAD = 1.5


class AutoDrafter(Drafter, entry="auto"):
    """Copied text, and the drafts of the target's head where there is one, in one tree.

    Its drafts are deterministic, so that under every rule of it the text is the one that the target
    gives alone with the same seeds. Without a head the tree merges prompt lookup and the suffix
    automaton. The head is an EAGLE-3 head, which `specdec_hf.heads.shipped` finds. It drafts for
    targets on a CPU alone: elsewhere its trees are on the device, and cannot be merged.

    Args:
        head: whether the target's head drafts.

    Raises:
        ValueError: when a call starts, a head there that cannot be read or does not fit.
    """

    size, depth = NODES, DEPTH

    def __init__(self, *, head: bool = True) -> None:
        self._takes_head = head
        self._copying = [PromptLookupDrafter(), SuffixAutomatonDrafter()]

    def begin(self, call: DrafterCall) -> State:
        """Choose by the target, and begin a call with what was chosen."""
        drafters: list[Drafter] = [*self._copying]
        head, found = self._find(call.model)
        if found.note is not None:
            call.note(found.note)
        if head is not None:
            drafters.insert(0, class_of("eagle3")(head, HEAD_TREE))
        state = TrieDrafter(drafters, TREE).begin(call)
        shipped = found.folder is not None and is_shipped(found.folder)
        if shipped and call.batch_size == 1:
            state.expected_benefit = BENEFIT_OF_HEAD
        return state

    def has_head(self, model: Any) -> bool:
        """Whether a head drafts for a target, beside which it is placed.

        Raises:
            ValueError: a head that cannot be read or does not fit the target.
        """
        head, _ = self._find(model)
        if head is not None:
            head.for_target(model)
        return head is not None

    def _find(self, model: Any) -> tuple[Any, FoundHead]:
        if not self._takes_head or model.device.type != "cpu":
            return None, FoundHead()
        try:
            return _read(model)
        except OSError as error:
            raise Refused(f"cannot read the head of the target: {error}") from error


def _read(model: Any) -> tuple[Any, FoundHead]:
    """The `PlacedHead` of a target or None; it is read again where its files were changed."""
    answer = find_head(model)
    folder = answer.folder
    if folder is None:
        return None, answer
    key = folder, state_of_files(folder)
    # All calls draft with the same copy, so that only the first one makes it, packs it and compiles
    # it.
    record = record_of(model)
    if record.head is None or record.head[0] != key:
        from specdec_hf.heads.eagle3.files import load_head  # noqa: PLC0415  # where there is one
        from specdec_hf.heads.eagle3.head import Eagle3Head  # noqa: PLC0415
        from specdec_hf.heads.placed import PlacedHead  # noqa: PLC0415

        record.head = key, PlacedHead(folder, Eagle3Head, load_head)
    return record.head[1], answer
