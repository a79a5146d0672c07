"""Processes that are the ranks of `torch.distributed` groups (gloo), for tests to call.

`Ranks` keeps its processes for many calls. They are forked from a server that has imported torch
once, so that starting them is cheap.
"""

from __future__ import annotations

import datetime
import multiprocessing
import pickle
import traceback

import torch
import torch.distributed as dist

TIMEOUT = 60  # seconds; no test waits for it unless a rank hangs

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch.distributed", "specdec_kernels.sharded"])


class RankFailed(Exception):
    """What a function raised on a rank: its type's name and its message."""


def _serve(rank, size, store, timeout, connection):
    """Runs functions in rank `rank` of `size` until the connection closes."""
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=timeout)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit
    )
    # All ranks create all groups. Group n has the ranks below n.
    groups = {n: dist.new_group(list(range(n)), timeout=limit) for n in range(1, size + 1)}
    while True:
        try:
            function, members, args = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):  # the tests are over
            return
        try:
            answer = True, function(groups[members], *args)
        except Exception as error:
            answer = False, (type(error).__name__, str(error), traceback.format_exc())
        connection.send_bytes(pickle.dumps(answer))


class Ranks:
    """`size` processes; `run` calls a function in the first ones of them, as one group."""

    def __init__(self, size, folder, timeout=TIMEOUT):
        self._ends, self._processes = [], []
        for rank in range(size):
            mine, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(
                target=_serve, args=(rank, size, folder / "store", timeout, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._ends.append(mine)
            self._processes.append(process)

    def answers(self, ranks, function, *args):
        """For each rank: (True, what it returned), (False, (type, message, traceback)), or None if
        its process died. `function(group, *args)` is called in all of them."""
        for end in self._ends[:ranks]:
            end.send_bytes(pickle.dumps((function, ranks, args)))
        out = []
        for end in self._ends[:ranks]:
            assert end.poll(2 * TIMEOUT), "a rank did not answer"
            try:
                out.append(pickle.loads(end.recv_bytes()))
            except (EOFError, ConnectionResetError):
                out.append(None)
        return out

    def run(self, ranks, function, *args):
        """What each rank returned; raises what the first failing rank raised."""
        answers = self.answers(ranks, function, *args)
        for answer in answers:
            if not answer or not answer[0]:
                raise RankFailed(answer and answer[1][2])
        return [answer[1] for answer in answers]

    def close(self):
        """Ends the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
