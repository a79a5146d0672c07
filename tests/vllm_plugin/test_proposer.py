"""The drafts of the proposer, with arrays in place of vLLM's batch of requests.

A row's text ends at its length. What lies behind it is left over from other requests here, as it is
in vLLM.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from specdec_hf.drafters.fingerprint import fingerprint_of
from specdec_host import Corpus
from specdec_vllm import Proposer, Settings, proposer, runner_v1, runner_v2, vllm_interface
from specdec_vllm.settings import DrafterName

GAMMA, LONGEST, VOCAB = 4, 64, 7
DATASTORE = np.random.default_rng(0).integers(0, VOCAB, 400)
NAMES = ("prompt_lookup", "suffix_automaton", "suffix_automaton:FILE", "rest:FILE")


class Tokenizer:
    def __init__(self, *words):
        self.words = words

    def get_vocab(self):
        return {word: i for i, word in enumerate(self.words)}


@pytest.fixture(autouse=True)
def supported(monkeypatch):
    """A vLLM of a version that is served, whose model has the tokenizer of the datastore."""
    monkeypatch.setattr(vllm_interface, "unsupported", lambda: None)
    monkeypatch.setattr(vllm_interface, "tokenizer_of", lambda _: Tokenizer("a", "b"))


@pytest.fixture(scope="module")
def datastore(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "store"
    fingerprint = fingerprint_of(Tokenizer("a", "b"))
    Corpus(DATASTORE).save(path, vocab_size=VOCAB, fingerprint=fingerprint)
    return path


def config(*, by_batch_size=None, embeds=False, vocab_size=VOCAB):
    """What the proposer reads of vLLM's configuration."""
    speculative = SimpleNamespace(
        model=proposer.NAME, num_speculative_tokens=GAMMA,
        num_speculative_tokens_per_batch_size=by_batch_size,
    )  # fmt: skip
    model = SimpleNamespace(
        max_model_len=LONGEST, enable_prompt_embeds=embeds, get_vocab_size=lambda: vocab_size
    )
    return SimpleNamespace(speculative_config=speculative, model_config=model)


@pytest.fixture
def make(monkeypatch, datastore):
    """Makes the proposer of a drafter's name, or of none."""

    def make_one(name=None, **given):
        monkeypatch.delenv("SPECDEC_VLLM_DRAFTER", raising=False)
        if name is not None:
            monkeypatch.setenv("SPECDEC_VLLM_DRAFTER", name.replace("FILE", str(datastore)))
        return Proposer(config(**given))

    return make_one


class Batch:
    """Rows of texts, which begin with the tokens of other requests."""

    def __init__(self, *texts, seed=1):
        self.generator = np.random.default_rng(seed)
        self.tokens = self.generator.integers(0, VOCAB, (8, LONGEST)).astype(np.int32)
        self.lengths = np.full(8, LONGEST, dtype=np.int32)
        self.number = 0
        for text in texts:
            self.add(text)

    def add(self, text):
        self.write(self.number, text)
        self.number += 1

    def write(self, row, text):
        self.tokens[row, : len(text)] = text
        self.lengths[row] = len(text)

    def text(self, row):
        return self.tokens[row, : self.lengths[row]].copy()

    def drafts(self, made, sampled=None):
        sampled = [[0]] * self.number if sampled is None else sampled
        return made.propose(sampled, self.lengths, self.tokens, slot_mappings=None)


def random_texts(number, seed=2, longest=LONGEST - GAMMA - 1):
    generator = np.random.default_rng(seed)
    return [generator.integers(0, VOCAB, generator.integers(1, longest + 1)) for _ in range(number)]


@pytest.mark.parametrize("name", NAMES)
def test_drafts_are_those_of_the_drafter_that_has_this_name_in_the_loop(make, datastore, name):
    drafter_proof = pytest.importorskip("support.drafter_proof", exc_type=ImportError)
    resolve = pytest.importorskip("specdec_hf.drafters.resolve", exc_type=ImportError)
    texts = random_texts(8)
    given = Batch(*texts).drafts(make(name))
    named = name.replace("FILE", str(datastore))
    call = drafter_proof.call_of(batch_size=len(texts))
    drafter = resolve.resolve_drafter(named, None, call.model)
    drafter.check_config = lambda _: None  # the model has another vocabulary
    draft = drafter_proof.propose(drafter.begin(call), drafter_proof.history_of(*texts), GAMMA)
    assert given == [[token for token in row if token >= 0] for row in draft.tokens.tolist()]
    assert sum(map(bool, given)) > 2


@pytest.mark.parametrize("name", NAMES)
def test_a_draft_follows_from_the_text_of_its_row_alone(make, name):
    texts = random_texts(8)
    together = Batch(*texts).drafts(make(name))
    if name == "suffix_automaton":
        assert together == Batch(*texts).drafts(make()), "the default"
    alone = [Batch(text, seed=9).drafts(make(name))[0] for text in texts]
    assert together == alone


@pytest.mark.parametrize("name", NAMES)
def test_a_request_that_still_reads_its_prompt_gets_no_drafts(make, name):
    batch, made = Batch(*random_texts(8)), make(name)
    expected = batch.drafts(made)
    drafted = [row for row, draft in enumerate(expected) if draft]
    sampled = [[] if row == drafted[0] else [1] for row in range(8)]
    expected[drafted[0]] = []
    assert batch.drafts(made, sampled) == expected
    assert drafted[1:]
    assert batch.drafts(made, [[]] * 8) == [[]] * 8
    assert Batch().drafts(made) == []


@pytest.mark.parametrize("name", NAMES)
def test_drafts_end_a_token_before_the_maximal_length(make, name):
    """The last step adds a token more than it accepts."""
    text = np.tile([1, 2, 3], LONGEST)
    for left in range(GAMMA + 3):
        (draft,) = Batch(text[: LONGEST - left]).drafts(make(name))
        assert len(draft) == min(max(left - 1, 0), GAMMA) or name == "rest:FILE"
        assert len(draft) <= max(left - 1, 0)


def test_drafts_end_before_a_token_that_the_model_has_no_logit_for(make):
    batch = Batch([5, 6, 5, 7, 9, 5, 6, 5, 7, 9, 5, 6])
    assert batch.drafts(make(vocab_size=10)) == [[5, 7, 9, 5]]
    assert batch.drafts(make(vocab_size=9)) == [[5, 7]]


def step(batch, kept_aside):
    """A step of a server: texts grow, and requests end, move, are preempted, resume and begin."""
    draw = batch.generator
    for row in range(batch.number):
        grown = np.append(batch.text(row), draw.integers(0, VOCAB, draw.integers(1, GAMMA + 2)))
        batch.write(row, grown[: LONGEST - 1])
    for row in range(batch.number - 1, -1, -1):
        fate = draw.random()
        if fate < 0.1 or batch.lengths[row] == LONGEST - 1:  # it ends, or is preempted
            if fate < 0.05:
                kept_aside.append(batch.text(row))
            batch.number -= 1
            batch.write(row, batch.text(batch.number))  # the last takes its place
    if batch.number > 1 and draw.random() < 0.5:
        one, other = draw.choice(batch.number, 2, replace=False).tolist()
        texts = batch.text(one), batch.text(other)
        batch.write(one, texts[1])
        batch.write(other, texts[0])
    while batch.number < 6 and draw.random() < 0.7:
        prompt = [1, 2, 3, 1, 2][: draw.integers(1, 6)]  # which begins that of other requests
        batch.add(kept_aside.pop() if kept_aside and draw.random() < 0.5 else prompt)


@pytest.mark.parametrize("name", ["suffix_automaton", "suffix_automaton:FILE"])
def test_automata_of_a_server_draft_as_new_ones(make, name):
    made, batch, kept_aside = make(name), Batch(*random_texts(4)), []
    automata, rows, new = made._copy, 0, []
    original = automata._new

    def counted():
        new.append(original())
        return new[-1]

    automata._new = counted
    for _ in range(150):
        step(batch, kept_aside)
        rows += batch.number
        assert batch.drafts(made) == batch.drafts(make(name))
        read = automata.read
        growing = [row for row in range(batch.number) if batch.lengths[row] < LONGEST - 1]
        texts = {row: batch.text(row).tolist() for row in growing}
        assert {row: known.text.tolist() for row, known in read.items()} == texts
        assert all(len(known.automaton) == len(known.text) for known in read.values())
    assert 20 < len(new) < rows / 4, "most texts go on with an automaton"
    batch.number = 0
    batch.add([1])
    batch.drafts(made)
    assert len(automata.read) == 1, "the others are dropped"


def test_what_cannot_be_served_is_refused_by_name(make, monkeypatch):
    with pytest.raises(ValueError, match=r"^specdec_vllm.Proposer is not served: enable_prompt_e"):
        make(embeds=True)
    with pytest.raises(ValueError, match=r"num_speculative_tokens_per_batch_size must be None, go"):
        make(by_batch_size=[[1, 4, 3]])
    monkeypatch.setattr(vllm_interface, "unsupported", lambda: "version 0.99 is not one of 0.32")
    with pytest.raises(ValueError, match=r"not served: version 0.99 is not one of 0.32$"):
        make()


def test_a_datastore_of_another_model_is_refused(make, datastore, monkeypatch, tmp_path, logged):
    with pytest.raises(ValueError, match=r"store must have the model's vocabulary of 8 tokens, go"):
        make("rest:FILE", vocab_size=8)
    monkeypatch.setattr(vllm_interface, "tokenizer_of", lambda _: Tokenizer("b", "a"))
    with pytest.raises(ValueError, match=r"must have been built with the model's tokenizer"):
        make("suffix_automaton:FILE")
    assert not logged
    monkeypatch.setattr(vllm_interface, "tokenizer_of", lambda _: None)
    make("rest:FILE")
    assert logged[0].startswith(f"{datastore}: the tokenizer that the corpus was built with was no")
    (tmp_path / "text").write_text("no corpus")
    missing = "^SPECDEC_VLLM_DRAFTER must .* got '/nowhere': No such f"
    for path, message in (("/nowhere", missing), (tmp_path / "text", "is no corpus")):
        with pytest.raises(ValueError, match=message):
            make(f"rest:{path}")


@pytest.mark.parametrize("module", [vllm_interface.REJECTION, vllm_interface.REJECTION_V2])
def test_a_drafter_that_vllm_would_not_use_ends_the_start(monkeypatch, module):
    place = module, "RejectionSampler.__init__"
    make_init = (runner_v1.REPLACEMENTS | runner_v2.REPLACEMENTS)[place]
    monkeypatch.setattr(vllm_interface, "replace_if_loaded", lambda *_: None)
    owner = SimpleNamespace(synthetic_conditional_rates=None)
    init = make_init(lambda *_, **__: None, Settings(drafter=DrafterName("prompt_lookup")))

    def start(model):
        config = SimpleNamespace(model=model, rejection_sample_method="standard")
        init(owner, SimpleNamespace(), config, device=None)

    start(proposer.NAME)
    with pytest.raises(ValueError, match=r"^SPECDEC_VLLM_DRAFTER needs .* got model 'ngram'$"):
        start("ngram")
