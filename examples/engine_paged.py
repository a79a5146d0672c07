"""A small engine over the ops alone: a paged cache, copied drafts, rollback.

`python examples/engine_paged.py` continues four prompts with a model of random weights. Rejected
tokens leave the cache, and their blocks return to the pool. Texts equal those of plain decoding.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from specdec_kernels import ngram_propose, paged_append_, paged_truncate_, verify_chain

LAYERS, HEADS, SIZE, VOCAB, LONGEST = 2, 2, 16, 40, 64
BLOCK, BLOCKS, GAMMA = 4, 48, 4  # slots of a block, blocks of the pool, drafts of a round
random, width = torch.Generator().manual_seed(0), HEADS * SIZE
shapes = [(VOCAB, width), (LONGEST, width), (width, VOCAB), *[(width, 4 * width)] * LAYERS]
TOKENS, PLACES, HEAD, *WEIGHTS = (torch.randn(s, generator=random) / s[0] ** 0.5 for s in shapes)


def forward(tokens, positions, mask, cached=lambda layer, keys, values: (keys, values)):
    """Logits [B, n, V] of tokens [B, n]; `cached` gives the keys and values that mask refers to."""
    x = TOKENS[tokens] + PLACES[positions] / 4
    for layer, weight in enumerate(WEIGHTS):
        q, k, v = (x @ weight[:, : 3 * width]).unflatten(-1, (3, HEADS, SIZE)).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (q, *cached(layer, k, v)))
        attended = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + attended.transpose(1, 2).flatten(2) @ weight[:, 3 * width :]
    return x @ HEAD


class Engine:
    """`lengths[b]` tokens of sequence b have their keys and values in the blocks `tables[b]`."""

    def __init__(self, sequences):
        pool = (LAYERS, 2, BLOCKS, BLOCK, HEADS, SIZE)
        self.caches, self.free = torch.zeros(pool), [*range(BLOCKS)]
        self.tables = torch.full((sequences, LONGEST // BLOCK), -1, dtype=torch.int32)
        self.lengths = torch.zeros(sequences, dtype=torch.int32)

    def feed(self, tokens, counts):
        """Append the first counts[b] of the tokens [B, n]; returns logits of all."""
        for table, length, more in zip(self.tables, self.lengths, counts, strict=True):
            for column in range(-(-length // BLOCK), -(-(length + more) // BLOCK)):
                table[column] = self.free.pop()
        positions = self.lengths[:, None] + torch.arange(tokens.shape[1])

        def cached(layer, keys, values):
            caches = self.caches[layer].unbind()
            paged_append_(caches, [keys, values], self.tables, self.lengths, counts)
            return [cache[self.tables.clamp(min=0)].flatten(1, 2) for cache in caches]

        visible = torch.arange(LONGEST) <= positions[:, None, :, None]
        logits = forward(tokens.clamp(min=0), positions.clamp(max=LONGEST - 1), visible, cached)
        self.lengths += counts
        return logits

    def truncate(self, lengths):
        freed = paged_truncate_(self.tables, self.lengths, lengths, BLOCK)
        self.free += freed.blocks[freed.blocks >= 0].tolist()


def generate(prompts, new_tokens):
    """The texts with new_tokens more each, the engine, and what each round accepted."""
    ends = torch.tensor([len(prompt) for prompt in prompts])
    goals, engine, accepted = ends + new_tokens, Engine(len(prompts)), []
    texts = torch.tensor([prompt + [0] * (LONGEST - len(prompt)) for prompt in prompts])
    engine.feed(texts[:, : ends.max() - 1], ends - 1)  # the last token begins the first round
    while (ends < goals).any():
        drafts, counts = ngram_propose(texts, ends, gamma=GAMMA)
        last = texts.gather(1, ends[:, None] - 1)
        logits = engine.feed(torch.cat([last, drafts], 1), torch.where(ends < goals, 1 + counts, 0))
        verdict = verify_chain(
            logits, drafts, rule="greedy", seeds=ends, positions=ends, max_new_tokens=goals - ends
        )
        for text, end, tokens in zip(texts, ends.tolist(), verdict.tokens, strict=True):
            emitted = tokens[tokens >= 0]
            text[end : end + len(emitted)] = emitted
        ends += (verdict.tokens >= 0).sum(1)
        engine.truncate(torch.where(ends < goals, ends - 1, 0))  # 0: the sequence is done
        accepted.append(verdict.num_accepted.tolist())
    return [text[:end].tolist() for text, end in zip(texts, ends, strict=True)], engine, accepted


def plain(text, new_tokens):
    """The text without drafts and without a cache."""
    for _ in range(new_tokens):
        every = torch.arange(len(text))
        logits = forward(torch.tensor([text]), every[None], every <= every[:, None])
        text = [*text, int(logits[0, -1].argmax())]
    return text


if __name__ == "__main__":
    prompts = [[7, 3, 7], [1], [*range(10, 23)], [5, 6, 5, 6, 5]]
    texts, engine, accepted = generate(prompts, 40)
    for prompt, text in zip(prompts, texts, strict=True):
        print(*text, "(as plain decoding)" if text == plain(prompt, 40) else "(ANOTHER TEXT)")
    drafts = sum(map(sum, accepted))
    print(f"{len(accepted)} rounds for 40 tokens each, {drafts} drafts accepted;", end=" ")
    print(f"{len(engine.free)} of {BLOCKS} blocks free again")
