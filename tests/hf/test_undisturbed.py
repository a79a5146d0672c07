"""Checks that change a model for a while leave it as it was."""

import threading

from specdec_hf.cache.undisturbed import undisturbed
from support import hf_models


def test_two_threads_that_check_a_model_keep_its_hooks():
    """The second must not take the model without its hooks for the caller's."""
    model = hf_models.build("llama")
    model.register_forward_hook(lambda *_: None)
    entered = threading.Event()

    def second():
        entered.set()
        with undisturbed(model), undisturbed(model):
            done.wait(0.1)

    done = threading.Event()
    thread = threading.Thread(target=second)
    with undisturbed(model):
        thread.start()
        entered.wait()
        done.wait(0.05)
    done.set()
    thread.join()
    assert len(model._forward_hooks) == 1
