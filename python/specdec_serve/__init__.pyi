# The public names and their modules: for type checkers, and for __init__.py, which reads them here.
from specdec_serve.batch_queue import BatchQueue as BatchQueue
from specdec_serve.batch_queue import QueuedSequence as QueuedSequence
