"""Lossless speculative decoding on ONNX Runtime, without torch.

    python examples/onnx_speculative.py                         # two tiny models, made here
    python examples/onnx_speculative.py target.onnx draft.onnx

A model maps input_ids [B, T] to logits [B, T, V] and reads the whole text in every call: a cache
would be its inputs and outputs, and is left out here. The rule is `match`: drafter and target
sample with the same noise, so the text is the one that the target would have sampled alone.
"""

from __future__ import annotations

import argparse

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from specdec_host import Status, sample, verify_chain


def tiny_model(noise: float = 0.0, vocab: int = 64, width: int = 32) -> bytes:
    """A causal model with random weights: logits of tanh(running sum of embeddings).

    noise: how far the last layer is from that of the model without noise.
    """
    random = np.random.default_rng(0)
    weights = {
        "embedding": random.normal(0, 1, (vocab, width)),
        "hidden": random.normal(0, width**-0.5, (width, width)),
        "out": random.normal(0, 1, (width, vocab)) + noise * random.normal(0, 1, (width, vocab)),
    }
    nodes = [
        helper.make_node("Gather", ["embedding", "input_ids"], ["embedded"]),
        helper.make_node("CumSum", ["embedded", "axis"], ["context"]),
        helper.make_node("MatMul", ["context", "hidden"], ["mixed"]),
        helper.make_node("Tanh", ["mixed"], ["state"]),
        helper.make_node("MatMul", ["state", "out"], ["logits"]),
    ]
    constants = [numpy_helper.from_array(w.astype(np.float32), n) for n, w in weights.items()]
    constants.append(numpy_helper.from_array(np.array(1), "axis"))
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["B", "T"])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["B", "T", vocab])
    graph = helper.make_graph(nodes, "tiny", [ids], [logits], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model.SerializeToString()


class Model:
    """An ONNX model of a file or of its bytes."""

    def __init__(self, source: str | bytes) -> None:
        self.session = onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"])

    def logits(self, tokens: list[int], rows: int) -> np.ndarray:
        """[1, rows, V]: those that follow the last `rows` tokens."""
        (logits,) = self.session.run(["logits"], {"input_ids": np.array([tokens])})
        return logits[:, -rows:]

    def next_token(self, tokens: list[int], temperature: float, seed: int) -> int:
        """Sampled with the noise that rule `match` shares between drafter and target."""
        where = dict(seeds=np.array([seed]), positions=np.array([len(tokens)]))
        row = self.logits(tokens, 1)[0]
        return int(sample(row, temperature=temperature, noise="shared", **where).tokens[0])


def generate(
    target: Model, drafter: Model, prompt: list[int], new_tokens: int, gamma: int = 4,
    temperature: float = 0.0, seed: int = 0,
) -> tuple[list[int], int]:  # fmt: skip
    """The prompt with its continuation, and how often the target was called."""
    tokens, calls = list(prompt), 0
    while (left := len(prompt) + new_tokens - len(tokens)) > 0:
        drafts = list(tokens)
        for _ in range(min(gamma, left - 1)):
            token = drafter.next_token(drafts, temperature, seed)
            if token < 0:  # the drafter's row holds no distribution
                break
            drafts.append(token)
        drafted = drafts[len(tokens) :]
        verdict = verify_chain(
            target.logits(drafts, len(drafted) + 1),
            np.array(drafted, dtype=np.int64)[None],
            rule="match",
            temperature=temperature,
            seeds=np.array([seed]),
            positions=np.array([len(tokens)]),
        )
        # A draft out of range counts as none, and its status says so.
        status = Status(int(verdict.status[0]))
        if status & (Status.TARGET_INVALID | Status.BAD_PARAMETER):
            raise ValueError(f"the target or an argument gives no distribution: {status!r}")
        tokens += [int(t) for t in verdict.tokens[0] if t >= 0]
        calls += 1
    return tokens, calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="target and draft model; none: two tiny ones")
    given = parser.parse_args().models
    if len(given) not in (0, 2):
        parser.error(f"models must be a target and a draft model, or none, got {len(given)}")
    target, drafter = map(Model, given or (tiny_model(), tiny_model(noise=0.2)))
    for temperature in (0.0, 0.8):
        tokens, calls = generate(target, drafter, [1, 2, 3], 40, temperature=temperature)
        print(f"temperature {temperature}: 40 tokens in {calls} calls of the target: {tokens[3:]}")


if __name__ == "__main__":
    main()
