"""Who has the memory that CUDA graphs read and write: one user at a time, until its call ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol


class Borrower(Protocol):
    """A call, or what ends with it."""

    @property
    def held(self) -> bool:
        """Whether the call still runs."""
        ...


class Loan:
    """Knows the last user of some memory, and the call that it belongs to."""

    def __init__(self) -> None:
        self._user: Callable[[], Any] = lambda: None
        self._borrower: Callable[[], Borrower | None] = lambda: None

    @property
    def user(self) -> Any:
        """The last one, also after its call, or None where it is gone."""
        return self._user()

    def refusal(self, user: Any) -> str:
        """Why a user cannot have the memory, or ""."""
        borrower = self._borrower()
        if self.user in (None, user) or borrower is None or not borrower.held:
            return ""
        return "another cache has the buffers that the graphs belong to"

    def begin(self, user: Any, borrower: Borrower) -> None:
        """Let a user have the memory until the call of the borrower ends."""
        self._user, self._borrower = weakref.ref(user), weakref.ref(borrower)
