"""Training of heads: the texts, the loop, and runs that were interrupted."""

import dataclasses
import json
from collections import Counter

import pytest
import torch
from specdec_hf import generate
from specdec_hf.heads.eagle3.config import HeadConfig
from specdec_hf.heads.eagle3.files import load_head, save_head
from specdec_hf.heads.eagle3.head import Eagle3Head
from specdec_hf.heads.shipped import TARGET, digest_of, read_sample
from specdec_hf.lab.training.conversations import (
    ANSWERS,
    ChatFormat,
    Conversation,
    answer_sampling,
    converse,
)
from specdec_hf.lab.training.openings import OPENINGS, opening_of
from specdec_hf.lab.training.pipeline import Pipeline, Progress, TrainingSettings
from specdec_hf.lab.training.texts import (
    append_conversations,
    cut_texts,
    is_held_out,
    read_conversations,
)
from specdec_hf.lab.training.unrolled import Batch
from support import hf_models
from support.cli_models import END, tokenizer
from support.heads import TEXTS, Interrupted, Interrupting, head_for

# Few different ones, so that a head can learn them by heart.
CHAT = ChatFormat((1, 2), (3, 4), frozenset({3}))
SMALL = TrainingSettings(
    tokens=900, length=24, turn_length=8, rows=8, steps=30, batch_size=4, learning_rate=5e-3,
    draft_vocab_size=30,
)  # fmt: skip


def conversations(model, numbers=range(7), **kwargs):
    settings = {"batch_size": 3, "length": 20, "turn_length": 8, "seed": 1} | kwargs
    made = converse(model, CHAT, numbers=iter(numbers), **settings)
    return {one.number: one for one in made}


def test_a_text_does_not_depend_on_those_written_beside_it():
    model = hf_models.build("llama", vocab_size=40)
    together, alone = conversations(model), conversations(model, batch_size=1)
    assert together == alone
    assert together.keys() == set(range(7))
    assert len({tuple(one.tokens) for one in together.values()}) == 7


def test_prompts_are_answered_as_generate_answers_them():
    """Every second answer is greedy."""
    model = hf_models.build("llama", vocab_size=40)
    prompts = [[5], [7, 9, 11, 6, 30, 31], [8, 8, 8]]
    made = conversations(model, range(3), prompts=prompts, batch_size=2)
    for number in (0, 2):
        one, given = made[number], [1, 2, *prompts[number], 3, 4]
        assert one.answer == len(given)
        want = model.generate(
            torch.tensor([given]), attention_mask=torch.ones(1, len(given)), do_sample=False,
            max_new_tokens=20 - len(given), eos_token_id=3,
        )  # fmt: skip
        assert one.tokens == want[0].tolist()


def test_a_turn_begins_with_its_opening_and_the_model_goes_on():
    model = hf_models.build("llama", vocab_size=40)
    opened = conversations(model, opening=lambda number: [7, 9][: number % 3])
    plain = conversations(model)
    for number, one in opened.items():
        size = number % 3
        assert one.tokens[: 2 + size] == [1, 2, 7, 9][: 2 + size]
        assert one.answer <= 2 + 8 + 2  # the turn's length counts its opening
        assert (one == plain[number]) == (size == 0)
    assert any(one.answer > 6 for number, one in opened.items() if number % 3 == 2)
    long = conversations(model, range(2), opening=lambda number: list(range(10, 18)))
    assert all(one.tokens[:12] == [1, 2, *range(10, 18), 3, 4] for one in long.values())
    given = conversations(model, range(2), prompts=[[5], [6]], opening=lambda number: [7])
    assert [given[n].tokens[:5] for n in range(2)] == [[1, 2, 5, 3, 4], [1, 2, 6, 3, 4]]


def test_openings_follow_from_number_and_seed_and_have_the_asked_share():
    drawn = [opening_of(number, 0.6, 5) for number in range(2000)]
    assert drawn == [opening_of(number, 0.6, 5) for number in range(2000)]
    assert drawn != [opening_of(number, 0.6, 6) for number in range(2000)]
    assert sum(map(bool, drawn)) / 2000 == pytest.approx(0.6, abs=0.04)  # 3.6 standard errors
    assert not any(opening_of(number, 0.0, 5) for number in range(200))
    assert all(opening_of(number, 1.0, 5) for number in range(200))
    kinds = Counter(kind for kind, words in OPENINGS.items() for one in drawn if one in words)
    assert kinds.keys() == OPENINGS.keys()
    assert min(kinds.values()) > 60  # 100 expected


def test_answers_that_are_held_out_are_greedy_and_sampled_as_the_others():
    held = [n for n in range(400) if is_held_out(Conversation(n, [1], 0))]
    for numbers in (held, sorted(set(range(400)) - set(held))):
        drawn = Counter(map(answer_sampling, numbers))
        assert drawn == dict.fromkeys(ANSWERS, len(numbers) // 2)


def test_the_format_is_that_of_the_chat_template():
    model = hf_models.build("llama", vocab_size=END + 1)
    made = tokenizer()
    chat = ChatFormat.of(model, made)
    ids = made.apply_chat_template(
        [{"role": "user", "content": "hey"}], add_generation_prompt=True, return_dict=False
    )
    assert [*chat.before, *made("hey")["input_ids"], *chat.between] == ids
    assert END in chat.ends
    plain = ChatFormat.of(model, tokenizer(None))
    assert (plain.before, plain.between) == ((END,), ())


def test_a_cut_line_of_an_interrupted_run_is_left_out(tmp_path):
    path = tmp_path / "texts.jsonl"
    made = conversations(hf_models.build("llama", vocab_size=40))
    for _ in append_conversations(path, [made[1], made[0]]):
        pass
    path.write_text(path.read_text()[:-5])
    for _ in append_conversations(path, [made[2]]):
        pass
    assert read_conversations(path) == [made[1], made[2]]


def test_a_place_is_an_answers_where_the_token_that_it_drafts_is():
    """From the first token of the answer, which is drafted at the last one before it."""
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    batch = Batch(tokens, tokens, tokens, tokens, torch.tensor([6, 4]), torch.tensor([3, 4]))
    assert batch.places(1).int().tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert batch.places(1, answers=True).int().tolist() == [[0, 1, 1, 1, 1], [0, 0, 1, 0, 0]]
    assert batch.places(2, answers=True).int().tolist() == [[1, 1, 1, 1], [0, 1, 0, 0]]


def trained(model, folder, progress=None, settings=SMALL, **kwargs):
    pipeline = Pipeline(model, tokenizer(), folder, settings, progress or Progress())
    return pipeline, pipeline.run(**kwargs)


@pytest.fixture(scope="module")
def target():
    return hf_models.build("llama", vocab_size=END + 1)


@pytest.fixture(scope="module")
def whole(target, tmp_path_factory):
    """An unbroken run, on one thread as those that it is compared with: others sum otherwise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = trained(target, tmp_path_factory.mktemp("whole"), texts=TEXTS)
    torch.set_num_threads(threads)
    return made


@pytest.mark.parametrize(
    "name",
    [
        "eagle3",
        pytest.param("medusa", marks=pytest.mark.full),
        "blockwise",
        pytest.param("exit_head", marks=pytest.mark.full),
        pytest.param("pass_head", marks=pytest.mark.full),
    ],
)
def test_a_head_learns_texts_by_heart(name, tmp_path):
    """The loss falls, acceptance rises, the target stays as it is, and the head drafts for it."""
    target = hf_models.build("llama", vocab_size=END + 1, layers=3)
    before = {key: weight.clone() for key, weight in target.state_dict().items()}
    settings = dataclasses.replace(SMALL, head=name, steps=25, draft_vocab_size=END + 1)
    pipeline, _ = trained(target, tmp_path, settings=settings, texts=TEXTS)
    losses, shared = pipeline.curves.losses, pipeline.curves.shared
    assert len(losses[-1]) == (1 if name == "exit_head" else 3)
    for step in range(len(losses[-1])):
        assert losses[-1][step] < losses[0][step] - 0.05
        assert shared[-1][step] > shared[0][step]
    assert all(torch.equal(weight, before[key]) for key, weight in target.state_dict().items())
    assert all(weight.grad is None for weight in target.parameters())
    inputs = tokenizer()(TEXTS[0], return_tensors="pt", return_token_type_ids=False)
    out = generate(
        target, **inputs, drafter=f"{name}:{tmp_path}", max_new_tokens=12, guard=False,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert out.stats.drafted > 0


@pytest.mark.parametrize(
    ("stage", "after"),
    [
        pytest.param("texts", 300, marks=pytest.mark.full),
        pytest.param("hidden states", 300, marks=pytest.mark.full),
        ("training", 17),
    ],
)
def test_an_interrupted_run_ends_with_the_same_weights(stage, after, target, whole, tmp_path):
    with pytest.raises(Interrupted):
        trained(target, tmp_path, Interrupting(stage, after), texts=TEXTS)
    _, head = trained(target, tmp_path, texts=TEXTS)
    want = whole[1].state_dict()
    assert all(torch.equal(x, want[name]) for name, x in head.state_dict().items())


def test_a_finished_run_is_not_made_again(whole, target):
    pipeline, head = whole
    again, read = trained(target, pipeline.folder, Interrupting("training", 1), texts=TEXTS)
    assert again.curves == pipeline.curves
    assert again.curves.steps[-1] == 30
    want = head.state_dict()
    assert all(torch.equal(x, want[name]) for name, x in read.state_dict().items())
    assert load_head(pipeline.folder).tokens.tolist() == head.tokens.tolist()


def test_the_head_names_its_target_and_has_a_text_that_took_no_part_in_training(whole, target):
    written = json.loads((whole[0].folder / "config.json").read_text())
    assert written[TARGET] == digest_of(target)
    sample = read_sample(whole[0].folder, target.config.vocab_size)
    texts = read_conversations(whole[0].work / "texts.jsonl")
    assert list(sample.tokens) in [list(one.tokens) for one in texts if is_held_out(one)]


def resumed(target, texts, folder, start, **changes):
    settings = dataclasses.replace(SMALL, steps=1, learning_rate=1e-6, **changes)
    pipeline = Pipeline(target, tokenizer(), folder, settings, Progress(), resume=start)
    return pipeline.run(texts=texts)


def test_training_goes_on_from_a_head_with_another_draft_vocabulary(whole, target, tmp_path):
    start = load_head(whole[0].folder)
    head = resumed(target, TEXTS, tmp_path / "a", whole[0].folder, draft_vocab_size=20)
    assert len(head.tokens) == 20 != len(start.tokens)
    assert torch.equal(head.lm_head.float(), target.lm_head.weight[head.tokens])
    for name, weight in head.state_dict().items():
        assert torch.allclose(weight, start.state_dict()[name], atol=5e-6), name
    other = resumed(target, TEXTS, tmp_path / "b", None, draft_vocab_size=20).state_dict()
    assert not torch.allclose(
        other["midlayer.qkv_proj.weight"], start.midlayer.qkv_proj.weight, atol=1e-3
    )
    kept = resumed(target, ["zz top " * 3, "quick fox "] * 30, tmp_path / "c", whole[0].folder)
    assert kept.tokens.tolist() == start.tokens.tolist()
    with pytest.raises(ValueError, match="was begun with other resumed head: give the same"):
        resumed(target, TEXTS, tmp_path / "a", None, draft_vocab_size=20)


def test_heads_that_cannot_be_gone_on_with_are_refused_by_name(target, tmp_path):
    own, layers = head_for(target), Eagle3Head(HeadConfig.for_target(target, 9, (0, 1)))
    own.own_lm_head = True
    for head, folder in ((own, "own"), (layers, "layers")):
        save_head(head, tmp_path / folder)
    for folder, message in (
        ("own", "with the target's embeddings and output matrix, and .*own has its own"),
        ("layers", r"with layers = \(.*\), got \(0, 1\)"),
        ("missing", "cannot read a head.s .*missing.config.json: No such file"),
    ):
        with pytest.raises(ValueError, match=message):
            resumed(target, TEXTS, tmp_path / "out", tmp_path / folder)
    assert not (tmp_path / "out" / "work" / "texts.jsonl").exists()
    with pytest.raises(ValueError, match="resume must be a head of kind eagle3, and Medusa heads"):
        resumed(target, TEXTS, tmp_path / "out", tmp_path / "own", head="medusa")


def test_too_few_texts_are_refused(target, tmp_path):
    with pytest.raises(ValueError, match=r"texts must be at least 20, .* got 1 of \d tokens"):
        trained(target, tmp_path, texts=["hey you"])
    with pytest.raises(ValueError, match=r"prompts must be at least 20, .* got 19$"):
        trained(target, tmp_path, prompts=["hey"] * 19)
    assert not list((tmp_path / "work").iterdir())  # before any stage


@pytest.mark.parametrize("count", [3, 20, 45])
def test_training_reads_nothing_beside_what_is_held_out(count):
    """A token of a text of 1000 tells where it lies."""
    given = [list(range(1000 * n, 1000 * (n + 1))) for n in range(count)]
    pieces = list(cut_texts([[], *given], 24, 10**9))
    assert [one.number for one in pieces] == list(range(len(pieces)))
    assert [token for one in pieces for token in one.tokens] == list(range(1000 * count))
    assert max(len(one.tokens) for one in pieces) == 24
    read, held = (
        {token for one in pieces if is_held_out(one) == kind for token in one.tokens}
        for kind in (False, True)
    )
    assert not read & held
    if count < 20:
        assert held == {1000 * n + k for n in range(count) for k in range(950, 1000)}
    else:
        assert held == {token for n in range(19, count, 20) for token in given[n]}


class Clock(Interrupting):
    """A clock whose hands follow the progress alone, so that every run is cut to equal steps."""

    def __init__(self, after=10**6, stages=("training",)):
        super().__init__("training", after)
        self.seconds, self.stages = 0.0, stages

    def monotonic(self):
        return self.seconds

    def advance(self, done, text=""):
        self.seconds += 0.05 * (self.now in self.stages)
        super().advance(done, text)


@pytest.fixture
def bounded(target, monkeypatch):
    """Runs for so many minutes of a clock."""

    def run(folder, clock, minutes, steps, **data):
        for module in ("pipeline", "train"):
            monkeypatch.setattr(f"specdec_hf.lab.training.{module}.time", clock)
        settings = dataclasses.replace(SMALL, steps=steps, tokens=900 if data else 10**9)
        pipeline = Pipeline(target, tokenizer(), folder, settings, clock, minutes=minutes)
        return pipeline, pipeline.run(**data)

    return run


@pytest.mark.full
def test_a_bounded_run_goes_on_as_if_unbroken_and_is_not_made_again(bounded, tmp_path):
    """The steps that it was cut to stay."""
    want, head = bounded(tmp_path / "whole", Clock(), 0.04, 2000, texts=TEXTS)
    assert want.curves.steps[0] == 20
    assert 30 < want.curves.steps[-1] < 100
    with pytest.raises(Interrupted):
        bounded(tmp_path / "broken", Clock(25), 0.04, 2000, texts=TEXTS)
    for folder, after in (("broken", 10**6), ("whole", 1), ("broken", 1)):
        pipeline, again = bounded(tmp_path / folder, Clock(after), 0.04, 2000, texts=TEXTS)
        assert pipeline.curves == want.curves
        for name, x in head.state_dict().items():
            assert torch.equal(x, again.state_dict()[name])


@pytest.mark.parametrize(
    ("change", "given", "message"),
    [
        (lambda model: model.model.layers[1].mlp.down_proj.weight.add_(1), {}, "another model"),
        (lambda model: model.double(), {}, "dtype = float32, got"),
        (lambda model: None, {"texts": ["another text "] * 40}, "other texts"),
        (lambda model: None, {"settings": dataclasses.replace(SMALL, seed=5)}, "seed = 0, got 5"),
    ],
)
def test_a_folder_begun_with_anything_else_is_refused(change, given, message, whole):
    folder, model = whole[0].folder, hf_models.build("llama", vocab_size=END + 1)
    with torch.no_grad():
        change(model)
    before = (folder / "work" / "run.json").read_text()
    with pytest.raises(ValueError, match=f"was begun with {message}"):
        trained(model, folder, **{"texts": TEXTS, **given})
    assert (folder / "work" / "run.json").read_text() == before
