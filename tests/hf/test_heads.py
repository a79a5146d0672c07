"""One table of heads: each drafts what a forward of the same weights over the whole text says.

Files of every layout are read, written back, and refused by the name of what is wrong.
"""

import copy
import functools
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors.torch
import torch
from hf import published_heads as layouts
from safetensors.torch import load_file, save_file
from specdec_hf import EagleTree, TreeSpec
from specdec_hf.drafting.registry import class_of, drafters
from specdec_hf.heads.eagle3.drafter import Eagle3ChainDrafter, Eagle3Drafter
from specdec_hf.heads.eagle3.files import save_as_speculators
from specdec_hf.runner.spec_runner import SpecRunner
from specdec_lab.training.unrolled import unroll
from specdec_papers.dflash import save_dflash
from specdec_papers.pass_head import PassHeadDrafter
from specdec_papers.peagle import save_peagle
from support import drafter_proof, hf_models
from support.drafter_proof import begun, history_of, propose, with_states

PAGE = Path(__file__).parents[2] / "docs" / "heads.md"
NONE: dict[str, Any] = {}


class Case(NamedTuple):
    """A head: the row of `LAYOUTS`, or a kind of `MADE`; its drafter, and arguments of a call."""

    head: str
    drafter: str = ""
    settings: dict[str, Any] = NONE
    target: str = "llama"

    @property
    def kind(self):
        return self.head.partition(",")[0]


CHAINS = {"eagle3": "eagle3_chain", "eagle": "eagle_chain"}
CASES = {name: Case(name) for name in (*layouts.LAYOUTS, "blockwise", "exit_head", "pass_head")} | {
    "eagle3, tree": Case("eagle3", "eagle3"),
    "eagle, tree": Case("eagle", "eagle"),
    "eagle3, shared cache": Case("eagle3", settings={"cache": "aligned"}),
    "eagle3, dynamic cache": Case("eagle3", settings={"cache": "dynamic"}),
    "pass_head, two drafts": Case("pass_head", settings={"gamma": 2, "temperature": 0.8}),
    "pass_head, GPT-2": Case("pass_head", target="gpt2"),
    "pass_head, Gemma 2": Case("pass_head", target="gemma2"),
}
SAMPLED = {"do_sample": True, "rule": "token", "seed": [5, 6, 7], "gamma": layouts.DRAFTS + 1}
TREE = TreeSpec((-1, -1, 0, 0, 1, 3), (0, 2, 0, 1, 1, 0))  # of Medusa's


@functools.cache
def target_of(name):
    """Of so many layers that those which EAGLE-3 reads without being told are 2, 4 and 5."""
    return hf_models.build(name, layers=8 if name == "llama" else 2)


@pytest.fixture
def target():
    return target_of("llama")


def drafted(case, target, folder, reference=None):
    """What a head of a folder drafted in some rounds, and what it must draft."""
    reference = reference or layouts.Reference(case.kind, target, folder)
    name = case.drafter or CHAINS.get(case.kind, case.kind)
    more = {"eagle": (EagleTree(2, 3, 6),), "eagle3": (EagleTree(2, 3, 6),), "medusa": (TREE,)}
    drafter = class_of(name)(folder, *more.get(name, ()))
    drafter.draft_weights = "float"  # where it rounds them to int8
    settings = (SAMPLED if drafters()[name].draws else NONE) | case.settings
    _, rounds = hf_models.rounds_of(target, drafter, (9, 4, 12), **settings)
    return rounds[:: 1 + len(rounds) // 5], reference.logits


def furthest(rounds, logits_of):
    """The largest difference, and how many drafts are above the deepest one."""
    ranks = [0] * layouts.DRAFTS if rounds[0][1].parents is None else TREE.ranks
    found = hf_models.differences(rounds, logits_of, ranks)
    return tuple(map(max, zip(*found, strict=True)))


@pytest.mark.parametrize("name", CASES)
def test_drafts_are_those_of_a_forward_over_the_whole_text(name, tmp_path):
    """Of a ragged batch. Negative control: they are not those after another text."""
    case = CASES[name]
    target, published = target_of(case.target), case.head in layouts.LAYOUTS
    made = layouts.publish if published else hf_models.folder_of
    rounds, logits_of = drafted(case, target, made(case.head, target, tmp_path))
    worst, depth = furthest(rounds, logits_of)
    assert worst < 5e-4  # sums in another order, as with AVX2, differ by 2e-4
    assert depth >= case.settings.get("gamma", 3) - 1
    assert furthest(rounds[:2], lambda text, path: logits_of(text[:-1], path))[0] > 1e-2


def inside(name, value):
    return {"transformer_layer_config": lambda inner: inner | {name: value}}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("eagle3", {"eagle_config": {layouts.EAGLE_AUX: [2, 4, 5]}}),
        ("eagle3", {"norm_before_residual": True}), ("dflash", {layouts.AUX: [0, 1]}),
        ("dflash, windows", {"sliding_window_non_causal": True}),
        ("dflash, windows", inside("sliding_window", 4)),
        ("dflash, from the anchor", {"sample_from_anchor": False}),
        ("peagle", {"mask_token_id": 5}),
        ("peagle", inside("rope_parameters", {"rope_type": "default", "rope_theta": 70.0})),
        ("peagle, windows", inside("sliding_window", 2)),
    ],
)  # fmt: skip
def test_a_wrong_reading_of_a_field_is_found(name, fields, target, tmp_path):
    folder, case = layouts.publish(name, target, tmp_path), CASES[name]
    reference, path = layouts.Reference(case.kind, target, folder), folder / "config.json"
    config = json.loads(path.read_text())
    for field, value in fields.items():
        config[field] = value(config[field]) if callable(value) else value
    path.write_text(json.dumps(config))
    rounds, logits_of = drafted(case, target, folder, reference)
    assert furthest(rounds[:3], logits_of)[0] > 1e-2


TRAINED = {name: hf_models.MADE[name] for name in ("eagle3", "medusa", "blockwise", "exit_head")}


@pytest.mark.parametrize("kind", TRAINED)
def test_training_unrolls_what_is_drafted(kind, target, tmp_path):
    """At the place before the pending token, whatever follows the drafts."""
    make, save = TRAINED[kind]
    head = make(target, **({"noise": 0.1} if kind == "eagle3" else {}))
    head.borrow(target)
    save(head, tmp_path, torch.float32)
    reference = layouts.Reference(kind, target, tmp_path)
    text, drafts = [5, 9, 33, 2, 60, 14], [1, 2]
    layers = () if kind in ("medusa", "blockwise") else head.config.layers
    steps = list(unroll(head, hf_models.text_batch(target, layers, [*text, *drafts, 3, 8]), 3))
    rows = [x[0, len(text) - 2] for x in steps]
    if kind == "exit_head":  # one step says all
        rows = steps[0][0, len(text) - 2 : len(text) + 1]
    for n, row in enumerate(rows):
        want = reference.logits(text, drafts[:n])[reference.tokens].float()
        torch.testing.assert_close(row, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "pass_head", "dflash", "peagle"])
def test_a_cache_that_was_given_leaves_the_text_as_it_is(kind, tmp_path):
    """A head drafts once it has states, and knows those of later tokens only."""
    target = hf_models.build("llama", vocab_size=7)
    ids = hf_models.prompts((9,), vocab_size=7)["input_ids"]
    drafter = drafter_proof.NAMED[kind](target, tmp_path)
    for cached in (6, 8):
        past = target(ids[:, :cached], use_cache=True).past_key_values
        given = {"past_key_values": past, "drafter": drafter, "max_new_tokens": 16}
        assert hf_models.decode_as_generate(target, **given).stats.drafted > 0


HEADS = ("eagle3", "eagle", "medusa", "blockwise", "exit_head", "pass_head", "dflash", "peagle")


@pytest.mark.parametrize("kind", HEADS)
def test_drafts_end_where_the_context_ends(kind, tmp_path):
    """Places of a block may lie beyond it; the tokens that are drafted do not."""
    target = hf_models.build("gpt2" if kind == "pass_head" else "llama", context=24)
    drafter = drafter_proof.NAMED[kind](target, tmp_path)
    settings = {"drafter": drafter, "max_new_tokens": 6}
    stats = hf_models.decode_as_generate(target, (18, 3), **settings).stats
    assert stats.drafted > 0
    assert not [note for note in stats.notes if "not packed" not in note]


@pytest.mark.parametrize("kind", [one for one in HEADS if one != "eagle"])
def test_other_heads_and_targets_are_refused(kind, tmp_path):
    with pytest.raises(TypeError, match=r"head must be .* or the folder of such a head, got int"):
        class_of(kind)(3)
    made = drafter_proof.NAMED[kind](hf_models.tiny("llama"), tmp_path)
    with pytest.raises(ValueError, match="trained for a model with a vocabulary of 67, got 9"):
        hf_models.decode(hf_models.build("llama", vocab_size=9), drafter=made)


@pytest.mark.parametrize("kind", ["dflash", "peagle"])
def test_a_target_without_the_layers_of_a_head_is_refused(kind, tmp_path):
    """Also where a layer is its last, whose state is kept after the norm alone."""
    target, field = hf_models.tiny("llama"), layouts.AUX if kind == "dflash" else layouts.EAGLE_AUX
    folder = layouts.LAYOUTS[kind][0](target, tmp_path, **{field: [0, 2]})
    with pytest.raises(ValueError, match=r"states after 2 layers, and must read .* model's 2"):
        hf_models.decode(target, drafter=f"{kind}:{folder}")


def test_embeddings_in_a_file_of_dflash_are_not_its_own(target, tmp_path):
    """Nor is the output matrix of the whole vocabulary: the library overwrites both."""
    folder, seen = layouts.dflash(target, tmp_path, draft=67), []
    file = folder / "model.safetensors"
    rows = {name: torch.ones(67, 32) for name in ("embed_tokens.weight", "lm_head.weight")}
    for tensors in (load_file(file), load_file(file) | rows):
        save_file(tensors, file)
        drafter, sampled = class_of("dflash")(folder), SAMPLED | {"seed": 5}
        _, rounds = hf_models.rounds_of(target, drafter, (9,), **sampled)
        seen.append([draft.drawn.logits for _, draft in rounds])
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


@pytest.mark.parametrize("lengths", [(7,), (9, 5)])
def test_the_cache_is_as_it_was_before_a_draft(lengths):
    """Later rounds of one token and of several have the same logits, bit for bit."""
    target, lengths = hf_models.tiny("llama"), np.array(lengths)
    ids = torch.randint(1, 67, (len(lengths), 24), generator=torch.Generator().manual_seed(0))
    size = max(lengths)
    texts = [row[size - n : size].tolist() for row, n in zip(ids, lengths, strict=True)]
    rows = []
    for drafts in (False, True):
        runner = SpecRunner(target, len(lengths), 16)
        runner.forward(ids[:, : size - 1], lengths - size, 1)
        runner.truncate(lengths - 1)  # of the pending tokens
        past = runner.cache.cursor.past
        if drafts:
            drafter = PassHeadDrafter(hf_models.pass_head(target))
            state = begun(drafter, len(lengths), model=target, runner=runner)
            assert propose(state, history_of(*texts), 4).tokens.shape == (len(lengths), 4)
        assert runner.lengths.tolist() == (lengths - 1).tolist()
        assert runner.cache.cursor.past == past
        rows.append(runner.forward(ids[:, size - 1 : size], lengths - 1, 1))
        rows.append(runner.forward(ids[:, 20:23], lengths, 3))
    assert torch.equal(rows[0], rows[2])
    assert torch.equal(rows[1], rows[3])


def head_turning(target, context, **rope):
    """A head with a rotary embedding that goes by the length of the text."""
    shaped = copy.deepcopy(target)
    shaped.config.max_position_embeddings = context
    shaped.config.rope_parameters = {"rope_theta": 1e4, "factor": 4.0, **rope}
    return hf_models.head_for(shaped, range(67), noise=0.05).requires_grad_(False)


def test_angles_that_depend_on_the_longest_text_are_those_of_the_text():
    """A table for places beyond the text would turn all of them by other angles."""
    target, factors = target_of("llama"), {"short_factor": [1.0] * 4, "long_factor": [8.0] * 4}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 64, **factors}
    head = head_turning(target, 64, **rope)
    drafter = Eagle3ChainDrafter(head, draft_weights="float")
    _, rounds = hf_models.rounds_of(target, drafter, (9, 4, 12), **SAMPLED)
    logits_of = functools.partial(hf_models.expected_logits, target, head)
    assert furthest(rounds[:: 1 + len(rounds) // 4], logits_of)[0] < 1e-4


def test_a_head_turns_by_the_longest_text_of_its_own_call():
    """In each round of a call another one with the same drafter runs, whose text is longer."""
    target, sampled = target_of("llama"), SAMPLED | {"seed": 5}
    drafter = Eagle3ChainDrafter(head_turning(target, 16, rope_type="dynamic"))

    def run_another(texts, draft):
        hf_models.decode(target, (60,), drafter=drafter)
        return draft

    beside = with_states(drafter, lambda state, call: hf_models.told(state, run_another))
    rounds = (hf_models.rounds_of(target, one, (20,), **sampled)[1] for one in (drafter, beside))
    alone, found = ([draft.drawn.logits.tolist() for _, draft in one] for one in rounds)
    assert found == alone


def test_hidden_states_are_returned_as_without_a_head():
    target = hf_models.build("llama", vocab_size=7)
    plain, out = (
        hf_models.decode(target, (9, 4), max_new_tokens=6, output_hidden_states=True, drafter=one)
        for one in (None, Eagle3Drafter(hf_models.head_for(target)))
    )
    assert len(out.hidden_states) == len(plain.hidden_states) == 6
    torch.testing.assert_close(out.hidden_states, plain.hidden_states, atol=1e-5, rtol=1e-4)


def test_a_head_drafts_in_the_dtype_of_its_target_and_stays_as_it_is():
    target = hf_models.build("llama", vocab_size=7).to(torch.bfloat16)
    head = hf_models.head_for(hf_models.build("llama", vocab_size=7))
    before = {name: x.clone() for name, x in head.state_dict().items()}
    for kind in (Eagle3Drafter, Eagle3ChainDrafter):
        out = hf_models.decode(target, (9, 4), drafter=kind(head), max_new_tokens=8)
        assert out.stats.drafted > 0
    assert all(torch.equal(x, before[name]) for name, x in head.state_dict().items())


@pytest.mark.parametrize(
    "change",
    [
        lambda target: target.to(torch.bfloat16),
        lambda target: target.lm_head.weight.copy_(target.lm_head.weight.flip(0)),
        lambda target: setattr(target.lm_head.weight, "data", target.lm_head.weight.flip(0)),
    ],
    ids=["converted", "changed in place", "given other memory"],
)
def test_a_drafter_drafts_for_a_changed_target_as_a_new_one_does(change):
    target = hf_models.build("llama", layers=3)
    head = hf_models.head_for(target)
    drafter = Eagle3Drafter(head)
    before = hf_models.decode(target, drafter=drafter)
    with torch.no_grad():
        change(target)
    again, fresh = (hf_models.decode(target, drafter=one) for one in (drafter, Eagle3Drafter(head)))
    assert before.stats.drafted > 0
    assert hf_models.outcome(again) == hf_models.outcome(fresh)


@pytest.mark.skipif(not PAGE.is_file(), reason="the documents are not here")
def test_the_code_of_the_page_runs(tmp_path, capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    model, inputs = hf_models.build("llama", vocab_size=7), hf_models.prompts((9, 12), vocab_size=7)
    names = {"model": model, "inputs": inputs, "folder": hf_models.head_folder(model, tmp_path)}
    for block in blocks:
        exec(block, names)
    want = model.generate(**inputs, max_new_tokens=16, do_sample=False).tolist()
    assert names["text"].tolist() == names["out"].sequences.tolist() == want
    assert float(capsys.readouterr().out) > 1


OWN = ("eagle3, trained here", "blockwise", "exit_head", "pass_head")
SAVE = {kind: save for kind, (_, save) in hf_models.MADE.items()}
SAVE |= {"dflash": save_dflash, "peagle": save_peagle}


def kind_of(name):
    return name.partition(",")[0]


def load(name, folder):
    return class_of(kind_of(name)).load(folder)


def fields_of(head):
    return head.config.to_dict() if hasattr(head.config, "to_dict") else head.config


def write(name, target, folder):
    made = (
        layouts.publish(name, target, folder)
        if name in layouts.LAYOUTS
        else hf_models.folder_of(kind_of(name), target, folder)
    )
    return made, made / (layouts.MEDUSA_WEIGHTS if kind_of(name) == "medusa" else layouts.WEIGHTS)


@pytest.mark.parametrize("name", [*layouts.LAYOUTS, *OWN])
def test_a_head_is_written_back_as_it_was(name, target, tmp_path):
    folder, file = write(name, target, tmp_path)
    head, given, again = load(name, folder), load_file(file), tmp_path / "again"
    if name == "eagle3, speculators":
        save_as_speculators(head, again, target, torch.float32)
    else:
        SAVE[kind_of(name)](head, again, torch.float32)
    given.pop(layouts.FREQUENCIES, None)
    torch.testing.assert_close(load_file(again / file.name), given, rtol=0, atol=0)
    assert fields_of(load(name, again)) == fields_of(head)
    old, new = (json.loads((one / "config.json").read_text()) for one in (folder, again))
    if "speculators_config" in old:
        inner = [one.pop("transformer_layer_config") for one in (old, new)]
        drafting = [one.pop("speculators_config")["proposal_methods"][0] for one in (old, new)]
        assert drafting[0].items() <= drafting[1].items()
        assert old.keys() == new.keys()
        assert {x: new[x] for x, given in old.items() if given is not None}.items() <= old.items()
        shared = inner[0].keys() & inner[1].keys() - {"sliding_window"}
        assert [inner[0][x] for x in shared] == [inner[1][x] for x in shared]


@pytest.mark.parametrize("kind", ["dflash", "peagle"])
def test_a_target_is_named_and_gives_the_rows_that_a_head_has_not(kind, target, tmp_path):
    """So that other readers of the layout find all weights in the file."""
    head = load(kind, layouts.publish(kind, target, tmp_path / "given"))
    head.own_lm_head = False
    SAVE[kind](head, tmp_path / "made", torch.float32, target)
    written = load_file(tmp_path / "made" / layouts.WEIGHTS)["lm_head.weight"]
    assert torch.equal(written, target.get_output_embeddings().weight[head.tokens])


def change(held, changes):
    """Give names other values; None takes one away, and a function is called with the value."""
    for name, value in changes.items():
        held[name] = value(held[name]) if callable(value) else value
    return {name: value for name, value in held.items() if value is not None}


def damage(name, target, folder, fields, tensors):
    folder, file = write(name, target, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(change(config, fields)))
    save_file(change(load_file(file), tensors), file)
    return folder


def drafting(tokens):
    return {"speculators_config": {"proposal_methods": [{"speculative_tokens": tokens}]}}


def outputs(*shape):
    return {f"{k}.1.weight": torch.zeros(*shape) for k in range(4)}


SPECULATORS = "eagle3, speculators"
TYPE = "speculators_model_type"
SLIDING = {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": False}
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 3, "long_factor": [1.0] * 3,
}  # fmt: skip
NARROW = {"fc.weight": torch.zeros(32, 144), "embed_tokens.weight": None}
NORM = "midlayer.hidden_norm.weight"
# The layout, changed fields of config.json, changed tensors, and the message.
DAMAGED = [
    # What tensors there are, and what they hold.
    ("peagle", {}, {"mask_hidden": None}, "lacks mask_hidden"),
    (SPECULATORS, {"target_hidden_size": 48}, NARROW, "lacks embed_tokens.weight"),
    ("exit_head", {}, {"x.weight": torch.ones(2)}, "holds x.weight, which no .* has"),
    ("eagle3", {}, {"layers.0.hidden_norm.weight": torch.ones(32)}, f"holds {NORM} in two spell"),
    ("pass_head", {"num_embeddings": 4}, {}, r"embeddings of .* must be \[4, 32\], got \[3, 32\]"),
    ("medusa", {"vocab_size": 67}, outputs(3, 32), "vocab_size = 67 rows, got 3"),
    ("blockwise", {}, {"hidden.bias": lambda x: x / 0}, "hidden.bias .* must be finite"),
    ("eagle3", {}, {"d2t": lambda x: 0 * x + 40, "t2d": None}, "d2t must .* 40 to 76, 37"),
    ("eagle3", {}, {"d2t": lambda x: x - (torch.arange(37) == 1) * (x[1] + 1 - x[0]), "t2d": None},
     "36 of 37 different"),
    (SPECULATORS, {}, {"t2d": lambda x: x.roll(1)}, "t2d of .* must mark the tokens of d2t and"),
    # What config.json says of them.
    ("medusa", {"medusa_num_layers": None}, {}, "must hold medusa_num_layers"),
    ("peagle", drafting(1025), {}, r"speculative_tokens must be .* in \[1, 1024\], got 1025"),
    ("dflash", {"block_size": 1}, {}, r"block_size must be .* in \[2, 1025\], got 1$"),
    ("eagle3", {"num_hidden_layers": 2}, {}, "num_hidden_layers of a head must be 1, got 2"),
    ("eagle3", {"norm_before_residual": "false"}, {}, "norm_before_residual must.*, got 'false'"),
    ("eagle3", {"rope_parameters": {"rope_type": "foo", "rope_theta": 1e4}}, {}, "rope_p.*'foo'"),
    ("dflash", inside("rope_parameters", LONG), {}, "rope_parameters must turn the whole of a"),
    ("dflash", {"mask_token_id": 67}, {}, r"mask_token_id must be .* in \[0, 66\], got 67"),
    ("dflash", {"transformer_layer_config": lambda inner: inner | SLIDING}, {},
     "sliding_window must be an integer, got None"),
    # What no head here computes.
    ("peagle", {TYPE: "eagle3"}, {}, "be peagle, got 'eagle3', which drafter eagle3 reads"),
    ("peagle", {"norm_before_fc": True, "fc_norm": True}, {}, "false with fc_norm, got both"),
    ("dflash", inside("layer_types", ["chunked_attention"] * 2), {}, "'chunked_attention'"),
    # Heads of the other EAGLE: the layout and, behind "as", what it is read as.
    ("eagle3 as eagle", {}, {}, "vocab_size: it belongs to a head of EAGLE-3, .* eagle3 reads"),
    ("eagle3, speculators as eagle", {"draft_vocab_size": None}, {}, "of the library speculators"),
    ("eagle as eagle3", {}, {}, "must hold draft_vocab_size; heads of the first EAGLE, which dr"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fields", "tensors", "message"), DAMAGED)
def test_a_damaged_head_is_refused_by_name(name, fields, tensors, message, target, tmp_path):
    layout, _, kind = name.partition(" as ")
    folder = damage(layout, target, tmp_path, fields, tensors)
    with pytest.raises(ValueError, match=message):
        load(kind or layout, folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (layouts.WEIGHTS, None, "model.safetensors is missing"),
        (layouts.WEIGHTS, "x", "cannot read .*safetensors"),
        ("config.json", None, "cannot read a head's .*config.json"),
        ("config.json", "[]", "config.json must hold an object, got list"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_by_name(name, content, message, target, tmp_path):
    folder, _ = write("eagle3", target, tmp_path)
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        load("eagle3", folder)


@pytest.mark.parametrize(
    ("kind", "name"), [("eagle3", "pytorch_model.bin"), ("medusa", "medusa_lm_head.pt")]
)
def test_a_pickle_is_refused_with_the_way_to_convert_it(kind, name, target, tmp_path, monkeypatch):
    folder, file = write(kind, target, tmp_path)
    want = load(kind, folder).state_dict()
    torch.save(load_file(file), folder / name)
    file.unlink()
    with pytest.raises(ValueError, match=r"is a pickle, .* convert it") as refusal:
        load(kind, folder)
    command = str(refusal.value).split("where you trust it: ")[1]
    monkeypatch.chdir(folder)
    exec(command, {"torch": torch, "safetensors": safetensors})
    assert all(torch.equal(x, want[key]) for key, x in load(kind, folder).state_dict().items())
