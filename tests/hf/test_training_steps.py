"""What a step of training reads and computes: texts, places, beginnings of weights, and losses."""

import pytest
import torch
from specdec_hf.lab.training.conversations import (
    ChatFormat,
    converse,
)
from specdec_hf.lab.training.losses import mean_loss
from specdec_hf.lab.training.on_policy import OnPolicy, is_on_policy, write_answers
from specdec_hf.lab.training.settings import LOSSES
from specdec_hf.lab.training.texts import (
    append_conversations,
    cut_texts,
    is_held_out,
    read_conversations,
)
from specdec_hf.lab.training.train import Recipe
from specdec_hf.lab.training.unrolled import Batch
from support import hf_models
from support.cli_models import END, tokenizer
from support.heads import draft_llama

from specdec_kernels import sample

pytestmark = pytest.mark.training

CHAT = ChatFormat((1, 2), (3, 4), frozenset({3}))


@pytest.fixture(scope="module")
def target():
    return hf_models.build("llama", vocab_size=40)


def conversations(model, numbers=range(7), **kwargs):
    settings = {"batch_size": 3, "length": 20, "turn_length": 8, "seed": 1} | kwargs
    made = converse(model, CHAT, numbers=iter(numbers), **settings)
    return {one.number: one for one in made}


def test_a_text_does_not_depend_on_those_written_beside_it(target):
    together, alone = conversations(target), conversations(target, batch_size=1)
    assert together == alone
    assert together.keys() == set(range(7))
    assert len({tuple(one.tokens) for one in together.values()}) == 7


def test_prompts_are_answered_as_generate_answers_them(target):
    """Every second answer is greedy."""
    prompts = [[5], [7, 9, 11, 6, 30, 31], [8, 8, 8]]
    made = conversations(target, range(3), prompts=prompts, batch_size=2)
    for number in (0, 2):
        one, given = made[number], [1, 2, *prompts[number], 3, 4]
        assert one.answer == len(given)
        want = target.generate(
            torch.tensor([given]), attention_mask=torch.ones(1, len(given)), do_sample=False,
            max_new_tokens=20 - len(given), eos_token_id=3,
        )  # fmt: skip
        assert one.tokens == want[0].tolist()


def test_a_turn_begins_with_its_opening_and_the_model_goes_on(target):
    opened = conversations(target, opening=lambda number: [7, 9][: number % 3])
    plain = conversations(target)
    for number, one in opened.items():
        size = number % 3
        assert one.tokens[: 2 + size] == [1, 2, 7, 9][: 2 + size]
        assert one.answer <= 2 + 8 + 2  # the turn's length counts its opening
        assert (one == plain[number]) == (size == 0)
    assert any(one.answer > 6 for number, one in opened.items() if number % 3 == 2)


def test_the_format_is_that_of_the_chat_template():
    model, made = hf_models.build("llama", vocab_size=END + 1), tokenizer()
    chat = ChatFormat.of(model, made)
    ids = made.apply_chat_template(
        [{"role": "user", "content": "hey"}], add_generation_prompt=True, return_dict=False
    )
    assert [*chat.before, *made("hey")["input_ids"], *chat.between] == ids
    assert END in chat.ends
    plain = ChatFormat.of(model, tokenizer(None))
    assert (plain.before, plain.between) == ((END,), ())


def test_a_cut_line_of_an_interrupted_run_is_left_out(target, tmp_path):
    path, made = tmp_path / "texts.jsonl", conversations(target)
    list(append_conversations(path, [made[1], made[0]]))
    path.write_text(path.read_text()[:-5])
    list(append_conversations(path, [made[2]]))
    assert read_conversations(path) == [made[1], made[2]]


@pytest.mark.parametrize("count", [3, 45])
def test_training_reads_nothing_beside_what_is_held_out(count):
    """A token of a text of 1000 tells where it lies."""
    given = [list(range(1000 * n, 1000 * (n + 1))) for n in range(count)]
    pieces = list(cut_texts([[], *given], 24, 10**9))
    assert [token for one in pieces for token in one.tokens] == list(range(1000 * count))
    read, held = (
        {token for one in pieces if is_held_out(one) == kind for token in one.tokens}
        for kind in (False, True)
    )
    assert not read & held
    if count < 20:
        assert held == {1000 * n + k for n in range(count) for k in range(950, 1000)}
    else:
        assert held == {token for n in range(19, count, 20) for token in given[n]}


def test_a_place_is_an_answers_where_the_token_that_it_drafts_is():
    """From the first token of the answer, which is drafted at the last one before it."""
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    batch = Batch(tokens, tokens, tokens, tokens, torch.tensor([6, 4]), torch.tensor([3, 4]))
    assert batch.places(1).int().tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert batch.places(1, answers=True).int().tolist() == [[0, 1, 1, 1, 1], [0, 0, 1, 0, 0]]
    assert batch.places(2, answers=True).int().tolist() == [[1, 1, 1, 1], [0, 1, 0, 0]]


# Draft models: where they begin, and texts of their own.


def random_batch(target, lengths, answers):
    """Texts of random tokens, and the target's states over them."""
    generator = torch.Generator().manual_seed(0)
    vocab = target.config.vocab_size
    tokens = torch.randint(0, vocab, (len(lengths), max(lengths)), generator=generator)
    with torch.no_grad():
        final = target.get_decoder()(tokens).last_hidden_state
    none = final[..., :0]
    return Batch(tokens, none, none, final, torch.tensor(lengths), torch.tensor(answers))


def test_the_share_of_the_batches_is_exact():
    for share in (0.0, 0.1, 0.29, 1.0):
        chosen = [is_on_policy(step, share) for step in range(1, 101)]
        assert all(n * share - 1 < sum(chosen[:n]) <= n * share + 1e-6 for n in range(101))


def test_answers_are_drawn_one_token_after_the_other(target):
    """Each as from the whole text before it, whatever is written beside it."""
    llama = draft_llama(target).llama
    batch = random_batch(target, [9, 14, 12], [3, 6, 12])
    prompts, seeds = torch.tensor([3, 6, 11]), torch.tensor([-5, 7, 2**40])
    ends = torch.tensor([], dtype=torch.int64)
    tokens, lengths = write_answers(llama, batch.tokens, prompts, batch.lengths, ends, seeds)
    for b, (prompt, length) in enumerate(zip(prompts.tolist(), lengths.tolist(), strict=True)):
        assert torch.equal(tokens[b, :prompt], batch.tokens[b, :prompt])
        for place in range(prompt, length):
            logits = llama(tokens[b : b + 1, :place]).logits[:, -1].detach()
            want = sample(logits, seeds=seeds[b : b + 1], positions=torch.tensor([place]))
            assert tokens[b, place] == want.tokens


def test_the_target_scores_what_the_draft_model_wrote(target):
    head, batch = draft_llama(target), random_batch(target, [9, 14, 12], [3, 6, 12])
    change = OnPolicy(head, target, {1}, 0.5, seed=3)
    assert change(1, batch) is batch
    made = change(2, batch)
    assert made.answers.tolist() == [3, 6, 6]  # from the middle where there is no answer
    assert not torch.equal(made.tokens[0, 3:9], batch.tokens[0, 3:9])
    for b, length in enumerate(made.lengths.tolist()):
        alone = target.get_decoder()(made.tokens[b : b + 1, :length]).last_hidden_state
        torch.testing.assert_close(made.final[b, :length], alone[0].detach())
    assert not torch.equal(change(4, batch).tokens, made.tokens)  # other random numbers
    assert torch.equal(change(2, batch).tokens, made.tokens)


# The losses: their values and gradients.

FORMULAS = {  # of P and the logarithm of Q
    "forward_kl": lambda p, log_q: -(p * log_q).sum(dim=-1),
    "reverse_kl": lambda p, log_q: (log_q.exp() * (log_q - p.log())).sum(dim=-1),
    "total_variation": lambda p, log_q: (p - log_q.exp()).abs().sum(dim=-1) / 2,
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.bfloat16, 0.02)])
def test_a_mean_loss_is_that_of_the_rows_that_count(name, dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 11, generator=generator, dtype=torch.float64)
    labels = torch.randn(3, 5, 11, generator=generator, dtype=torch.float64).softmax(dim=-1)
    valid = torch.rand(3, 5, generator=generator) < 0.6
    exact, ours = logits.clone().requires_grad_(), logits.to(dtype).requires_grad_()
    want = FORMULAS[name](labels, exact.log_softmax(dim=-1))[valid].mean()
    got = mean_loss(name, ours, labels.to(dtype), valid)
    (2 * want).backward()
    (2 * got).backward()
    assert abs(got.item() - want.item()) < tolerance
    torch.testing.assert_close(ours.grad.double(), exact.grad, atol=tolerance, rtol=0)
    assert float(ours.grad[~valid].abs().max()) == 0


def test_a_target_that_rounds_to_zero_has_a_finite_reverse_kl():
    target = torch.tensor([[1.0, 0.0]], dtype=torch.bfloat16)
    logits = torch.zeros(1, 2, dtype=torch.bfloat16, requires_grad=True)
    loss = mean_loss("reverse_kl", logits, target, torch.tensor([True]))
    loss.backward()
    assert loss.isfinite()
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 1] > 0  # it drafts too much of what the target never says


def test_the_first_half_of_the_steps_has_the_forward_kl():
    recipe = Recipe(8, loss="total_variation")
    made = [recipe.loss_at(step, 8) for step in range(1, 9)]
    assert made == ["forward_kl"] * 4 + ["total_variation"] * 4
